"""The hooks around the engine: `dsv4 launch check | record | stopping | ended`.

    check     before anything else: restart limit, watchdog, stale processes, port, runtime, pack
    record    last before the start: write down what the engine starts from
    stopping  ExecStop: systemd runs it on a deliberate stop and when the engine ends with status 0
    ended     ExecStopPost: say why the unit ended

All run as root. Only processes of our unit, or engine processes of our user, are ever killed.
"""

import contextlib
import json
import os
import pwd
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    cgroup,
    fingerprint,
    firewall,
    guard,
    key,
    launch,
    layout,
    liveness,
    phase,
    processes,
    store,
)
from dsv4.systemd import as_hook, show

KILL_WAIT_S: Final = 15.0
PORT_WAIT_S: Final = 10.0
WATCHDOG_WAIT_S: Final = 3.0
TRIP_WAIT_S: Final = 2.0
TERM_RECORD_WAIT_S: Final = 0.3
SHM: Final = Path("/dev/shm")  # noqa: S108 - what an engine left there is looked for
DRAIN_POLL_S: Final = 0.5
INDEX: Final = "model.safetensors.index.json"
HEADER_LIMIT: Final = 100_000_000
"""The safetensors format's own bound on a header."""


def say(text: str) -> None:
    """Write one line to the journal."""
    sys.stderr.write(f"dsv4 launch: {text}\n")


# The restart limit


def earlier_restarts(times: Iterable[Any], now: float, window: float) -> list[float]:
    """Return which automatic starts lie within the window; times are seconds since boot."""
    return [float(t) for t in times if isinstance(t, int | float) and now - window <= t <= now]


def judge_restart(
    known: Mapping[str, Any], last: Mapping[str, Any], limits: guard.Restarts, now: float
) -> tuple[dict[str, Any], str | None]:
    """Return the history with one more automatic start, and why there shall be none.

    + known: the history so far, seconds since boot in `started_at`; `alike` counts those in a row
      that followed an end with its own number of `retries`
    + last: what is known of the start before this one, see `phase.failure`
    """
    times = known.get("started_at", [])
    recent = earlier_restarts(times if isinstance(times, list) else [], now, limits.window_s)
    retries, alike = last.get("retries"), known.get("alike", 0)
    bounded = isinstance(retries, int) and isinstance(alike, int)
    why = None
    if bounded and alike >= retries:
        why = "an automatic restart does not help"
    elif len(recent) >= limits.limit:
        why = f"{len(recent)} automatic restarts in {limits.window_s / 60:.0f} minutes did not help"
    if why is not None:
        return dict(known), why
    return {"started_at": [*recent, now], "alike": alike + 1 if bounded else 0}, None


def count_restart(config: guard.Guard, restarts: int, now: float) -> str | None:
    """Count an automatic start; return why there shall be no more, None while there may be.

    A start by hand (systemd's own count is 0 then) clears the history, so an owner can always try
    again, however often the machine has tried before.
    """
    layout.REFUSED_JSON.unlink(missing_ok=True)
    if restarts == 0:
        layout.RESTARTS_JSON.unlink(missing_ok=True)
        return None
    last = store.read_json_or(layout.PHASE_JSON, {}).get("detail")
    last = last if isinstance(last, dict) else {}
    known, why = judge_restart(
        store.read_json_or(layout.RESTARTS_JSON, {}), last, config.restarts, now
    )
    if why is None:
        store.write_json(layout.RESTARTS_JSON, known)
        return None
    said = str(last.get("reason") or "")
    reason = (
        f"{why}{f'; last: {said}' if said else ''}; see `journalctl -u {config.unit}`, then start"
        " it by hand"
    )
    store.write_json(layout.REFUSED_JSON, {"reason": reason})
    return reason


# The watchdog


def watchdog_fault(unit: str) -> str | None:
    """Return why this machine is not guarded; a watchdog that is coming back is waited for."""
    end = time.monotonic() + WATCHDOG_WAIT_S
    while show(unit, "ActiveState").get("ActiveState") != "active":
        if time.monotonic() >= end:
            return (
                f"{unit} does not run, and nothing else keeps this machine from freezing; see"
                f" `journalctl -u {unit}`"
            )
        time.sleep(0.2)
    return None


# Stale processes and the port


def ancestors(processes_by_pid: Mapping[int, processes.Process], pid: int) -> set[int]:
    """Return a process and everything it descends from."""
    found: set[int] = set()
    while pid in processes_by_pid and pid not in found:
        found.add(pid)
        pid = processes_by_pid[pid].parent
    return found


def stale(
    found: Iterable[processes.Process],
    config: guard.Guard,
    uid: int | None,
    own: int,
    on_gpu: Container[int] = (),
) -> list[processes.Process]:
    """Return what is left of an earlier engine: in our unit's group, or an engine of our user's.

    + on_gpu: who uses the GPU; of our user's processes those are engines whatever their name
    """
    by_pid = {process.pid: process for process in found}
    ours = ancestors(by_pid, own)
    return [
        process
        for pid, process in sorted(by_pid.items())
        if pid not in ours
        and (
            processes.in_unit(process, config.unit)
            or (
                process.uid == uid
                and (process.comm.startswith(processes.ENGINE_PREFIX) or pid in on_gpu)
            )
        )
    ]


def end_stale(config: guard.Guard, uid: int | None) -> Iterator[str]:
    """Kill what an earlier engine left and wait until it is gone; yield what would not go."""
    left = stale(processes.read_all(), config, uid, os.getpid(), processes.using(processes.GPU))
    for process in left:
        say(f"killing a leftover of an earlier engine: {process}")
    cgroup.send((process.pid for process in left), signal.SIGKILL)
    end = time.monotonic() + KILL_WAIT_S
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [process for process in left if Path(f"/proc/{process.pid}").exists()]
    for process in left:
        yield (
            f"{process} took SIGKILL but is still there after {KILL_WAIT_S:.0f} s (in the kernel"
            " or the driver); wait, or reboot"
        )


def shm_left(uid: int, held: Container[str], root: Path = SHM) -> list[Path]:
    """Return the files of a user in shared memory that no process has open or mapped.

    A killed engine leaves its queues there, and they are memory that nobody gives back.
    """
    found = []
    for path in sorted(root.iterdir()):
        with contextlib.suppress(OSError):
            status = path.lstat()
            ours = status.st_uid == uid and stat.S_ISREG(status.st_mode)
            if ours and str(path) not in held:
                found.append(path)
    return found


def clean_shm(uid: int, root: Path = SHM) -> None:
    """Remove what dead engines of ours left in shared memory."""
    if not (candidates := shm_left(uid, (), root)):
        return
    held = set(processes.mapping({str(path) for path in candidates}))
    held |= {link for links in processes.holding(f"{root}/").values() for link in links}
    dead = shm_left(uid, held, root)
    size = 0
    for path in dead:
        with contextlib.suppress(OSError):
            size += path.stat().st_blocks * 512
            path.unlink()
    if dead:
        say(f"removed {len(dead)} leftovers of an earlier engine from {root}, {size >> 20} MiB")


def can_bind(host: str, port: int) -> bool:
    """Say whether the engine could listen there; connections in TIME_WAIT do not matter."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def listening_inodes(tables: Iterable[str], port: int) -> set[str]:
    """Return the sockets that listen on a port, from the text of /proc/net/tcp and tcp6."""
    found = set()
    for table in tables:
        for line in table.splitlines()[1:]:
            columns = line.split()
            listens = len(columns) > 9 and columns[3] == "0A"
            if listens and int(columns[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{columns[9]}]")
    return found


def port_holders(port: int) -> list[str]:
    """Return who listens on a port, as pid and command."""
    tables = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            tables.append((processes.PROC / "net" / name).read_text())
    wanted = listening_inodes(tables, port)
    open_sockets = processes.holding("socket:")
    pids = sorted(pid for pid, links in open_sockets.items() if wanted & set(links))
    found = (processes.read_process(pid) for pid in pids)
    return [f"pid {process.pid} ({process.command})" for process in found if process]


def port_fault(config: guard.Guard) -> str | None:
    """Return who is in the way of our port, after a moment for it to become free."""
    end = time.monotonic() + PORT_WAIT_S
    while not can_bind(config.host, config.port):
        holders = port_holders(config.port)
        if holders or time.monotonic() >= end:
            who = ", ".join(holders) or "no process that can be named"
            return (
                f"{config.host}:{config.port} is not free: {who} listens there; stop it, or set"
                " another serve_port"
            )
        time.sleep(0.2)
    return None


# The runtime and the pack


def runtime_fault(runtime: Path = layout.CURRENT) -> str | None:
    """Return why the runtime in service cannot serve."""
    try:
        manifest = store.read_json(runtime / "manifest.json")
    except store.BrokenState as error:
        return str(error)
    if manifest is None:
        return f"{runtime}: no complete runtime there (no manifest.json); deploy again to build one"
    return None


@contextlib.contextmanager
def acting_as(account: pwd.struct_passwd) -> Iterator[None]:
    """Give file access the rights of another user for a moment."""
    groups = os.getgroups()
    user, group = os.geteuid(), os.getegid()
    os.setgroups(os.getgrouplist(account.pw_name, account.pw_gid))
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)
        os.setgroups(groups)


def safetensors_size(path: Path) -> int:
    """Return how long a safetensors file must be by its header; ValueError when it has none."""
    with path.open("rb") as handle:
        start = handle.read(8)
        if len(start) < 8 or not 0 < (length := struct.unpack("<Q", start)[0]) <= HEADER_LIMIT:
            raise ValueError("does not start with a header")
        entries = json.loads(handle.read(length))
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return int(8 + length + max(ends, default=0))


def shards(view: Path) -> tuple[str, ...]:
    """Return the names of the weight files a view must have; ValueError when it names none."""
    index = view / INDEX
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except FileNotFoundError:
        names = {path.name for path in view.glob("*.safetensors")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: is no index ({error})") from error
    if not names:
        raise ValueError(f"{view}: has no index and no safetensors file")
    return tuple(sorted(str(name) for name in names))


def shard_fault(path: Path, known_sizes: Mapping[str, Any]) -> str | None:
    """Return what is wrong with one weight file, as the engine would meet it."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "is no regular file"
        path.open("rb").close()
    except PermissionError:
        return "may not be read by the engine's user"
    except OSError:
        return "is a link that leads nowhere" if path.is_symlink() else "is missing"
    expected = (known_sizes.get(path.resolve().name) or {}).get("size")
    try:
        expected = safetensors_size(path) if expected is None else int(expected)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is no safetensors file ({error})"
    if found.st_size != expected:
        return f"has {found.st_size} bytes instead of {expected}"
    return None


def pack_sizes(view: Path, name: str) -> dict[str, Any]:
    """Return what the downloader knows of the files behind a view: size by name."""
    root = (view / name).resolve().parent
    files = store.read_json_or(root.with_name(f"{root.name}.json"), {}).get("files")
    return files if isinstance(files, dict) else {}


def view_faults(view: Path, account: pwd.struct_passwd) -> list[str]:
    """Return what is missing or wrong in the served directory, one line for each kind."""
    try:
        names = shards(view)
    except ValueError as error:
        return [f"{error}; deploy again to make the view"]
    sizes = pack_sizes(view, names[0])
    with acting_as(account):
        faults = {name: fault for name in names if (fault := shard_fault(view / name, sizes))}
    if not faults:
        return []
    few = "; ".join(f"{name} {fault}" for name, fault in list(faults.items())[:4])
    more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
    return [
        f"{view}: {len(faults)} of {len(names)} weight files cannot be served: {few}{more};"
        " run `dsv4 verify`, then deploy again"
    ]


# The hooks


def check(config: guard.Guard) -> int:
    """Clear what an earlier start left, and refuse what cannot work."""
    layout.RUN.mkdir(mode=0o755, exist_ok=True)
    layout.DRAINING.unlink(missing_ok=True)
    restarts = show(config.unit, "NRestarts").get("NRestarts", "0")
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    if reason := count_restart(config, int(restarts) if restarts.isdigit() else 0, now):
        say(f"no further start: {reason}")
        return 0
    phase.write("starting")
    try:
        account = pwd.getpwnam(config.user)
    except KeyError:
        say(f"there is no user {config.user}; deploy again to make it")
        return 1
    faults = []
    if fault := watchdog_fault(config.watchdog_unit):
        faults.append(fault)
    faults.extend(end_stale(config, account.pw_uid))
    clean_shm(account.pw_uid)
    if fault := port_fault(config):
        faults.append(fault)
    if fault := firewall.fault(config.port, config.allowed_networks):
        faults.append(fault)
    if fault := runtime_fault():
        faults.append(fault)
    faults.extend(view_faults(Path(config.view), account))
    if faults:
        for fault in faults:
            say(fault)
        phase.write("failed", {"reason": faults[0]})
        return 1
    say(
        f"port {config.port} is free, runtime {fingerprint.target(layout.CURRENT)},"
        f" view {fingerprint.target(Path(config.view))}"
    )
    return 0


def record(config: guard.Guard) -> int:
    """Write down what the engine is about to start from."""
    if launch.refused():
        return 0
    salt = fingerprint.salt(layout.FINGERPRINT_SALT)
    inputs = fingerprint.wanted()
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    given = Path(directory) if directory else None
    tls = [fingerprint.content(given / name) if given else None for name in fingerprint.TLS]
    inputs["tls"] = fingerprint.key_digest(fingerprint.joined(tls), salt)
    if given and (given / "api_key").exists():
        # The key on disk, which may have been replaced since systemd read it, is the one in force
        key.put_in_force(key.read(), config.user)
    else:
        layout.KEY_DIGEST.unlink(missing_ok=True)
    state = show(config.unit, "NeedDaemonReload", "InvocationID")
    if state.get("NeedDaemonReload") == "yes":
        inputs["unit"] = "not loaded"
    store.write_json(
        layout.STARTED_JSON,
        {
            "inputs": inputs,
            "invocation": os.environ.get("INVOCATION_ID", state.get("InvocationID", "")),
            "boot": (processes.PROC / "sys/kernel/random/boot_id").read_text().strip(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )
    return 0


def drain(config: guard.Guard) -> None:
    """Let requests that run come to their end, for a bounded time; new ones are turned away.

    Not where nothing guards the machine: then the engine must go, and its requests with it.
    """
    if show(config.watchdog_unit, "ActiveState").get("ActiveState") != "active":
        return
    layout.DRAINING.touch()
    started = time.monotonic()
    while (found := liveness.read_metrics(config)) is not None and found.requests > 0:
        waited = time.monotonic() - started
        if waited >= config.stop.drain_s:
            say(f"{found.requests:.0f} requests still run after {waited:.0f} s; they end here")
            return
        time.sleep(DRAIN_POLL_S)


def stopping(config: guard.Guard) -> int:
    """Tell a deliberate stop from an engine that ended by itself.

    systemd gives ExecStop a MAINPID only while there is one. vLLM's server ends with status 0 when
    a worker dies, which must not pass for a stop: failing here makes the unit failed, and failed
    units are restarted.
    """
    if os.environ.get("MAINPID", "").isdigit():
        phase.write("stopping")
        drain(config)
        return 0
    trip = trip_of(os.environ.get("INVOCATION_ID", ""), layout.WATCHDOG_RECORDS, TERM_RECORD_WAIT_S)
    status = os.environ.get("EXIT_STATUS", "0")
    reason = f"the engine ended by itself with status {status}, which counts as a failure"
    if trip is not None:
        reason = why_ended("", "", "", trip) or reason
    say(reason)
    phase.write("failed", {"reason": reason})
    return 1


def trip_of(invocation: str, records: Path, seconds: float) -> dict[str, Any] | None:
    """Return the watchdog's newest record if it is of this start; it is written after the kill."""
    end = time.monotonic() + seconds
    while True:
        newest = max(records.glob("*.json"), default=None)
        found = store.read_json_or(newest, {}) if newest else {}
        if invocation and found.get("invocation") == invocation:
            return found
        if time.monotonic() >= end:
            return None
        time.sleep(0.1)


SETUP: Final = {
    "203": "its program cannot be executed; deploy again",
    "217": "systemd does not know its user; deploy again",
    "226": "systemd could not set up its sandbox; see which path it misses in `journalctl -u dsv4`",
    "243": "systemd could not read one of its credentials, the API key or a TLS file; put it there",
}
"""What systemd's own exit statuses mean, when a process of the unit never came to run."""


def why_ended(
    result: str, code: str, status: str, trip: Mapping[str, Any] | None, last_phase: str = ""
) -> str | None:
    """Return in words why a unit ended; None for a deliberate stop."""
    if trip is not None:
        return f"stopped by the watchdog: {trip.get('reason', 'no reason recorded')}"
    words = {
        "success": None,
        "timeout": "it did not stop in time and was killed"
        if last_phase == "stopping"
        else "it was not ready within systemd's own limit (TimeoutStartSec)",
        "oom-kill": "the kernel's OOM killer ended one of its processes",
        "watchdog": "systemd missed its sign of life",
        "signal": f"it was killed by {f'SIG{status}' if status else 'a signal'}",
        "core-dump": f"it crashed with SIG{status}",
        "resources": "systemd could not set it up (user, credential, file or namespace)",
    }
    if code == "exited" and status in SETUP:
        return SETUP[status]
    return words.get(result, f"it ended with {code or result} {status}".strip())


def ended(config: guard.Guard) -> int:
    """Say why the unit ended; keep the reason that `ready` or a hook has given already."""
    environment = os.environ
    result = environment.get("SERVICE_RESULT", "")
    code, status = environment.get("EXIT_CODE", ""), environment.get("EXIT_STATUS", "")
    if result == "success":
        # The unit that stops an unguarded engine is running its `systemctl stop` meanwhile
        if show(config.unguarded_unit, "ActiveState").get("ActiveState") == "activating":
            reason = f"stopped, because {config.watchdog_unit} could not be kept running"
            say(reason)
            phase.write("failed", {"reason": reason})
            return 1
        phase.write("stopped")
        return 0
    invocation = environment.get("INVOCATION_ID", "")
    found = phase.read_of(invocation)
    said = str(found.get("reason") or "")
    trip = trip_of(invocation, layout.WATCHDOG_RECORDS, TRIP_WAIT_S if status == "KILL" else 0.0)
    last = str(store.read_json_or(layout.PHASE_JSON, {}).get("phase", ""))
    ends = why_ended(result, code, status, trip, last) or "stopped"
    reason = launch.refused() or (ends if trip else said) or ends
    say(f"ended: {reason}")
    phase.write("failed", phase.failure(reason, found.get("retries") if reason == said else None))
    return 0


def main(argv: Sequence[str]) -> int:
    """Run one hook."""
    hooks = {"check": check, "record": record, "stopping": stopping, "ended": ended}
    if len(argv) != 1 or argv[0] not in hooks:
        sys.stderr.write(f"usage: dsv4 launch [{' | '.join(hooks)}]\n")
        return 2
    try:
        config = guard.read()
    except guard.BrokenGuard as error:
        say(str(error))
        return 3
    starting = argv[0] in {"check", "record"}
    if starting and not as_hook(config.unit):
        return 0
    try:
        return hooks[argv[0]](config)
    except OSError as error:  # a full /run, a file system that went read-only
        reason = f"{argv[0]} could not do its work: {error}"
        say(reason)
        phase.write("failed", {"reason": reason})
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
