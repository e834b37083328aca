"""The runtime part of `dsv4 verify`: bytes, versions, patches, and what the engine finds inside.

Every file is compared with its RECORD, then the runtime's own interpreter imports what the engine
would, as the engine's user and with the engine's environment. That takes half a GiB and seconds, so
it is not done where the watchdog's soft floor would be near.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dsv4 import guard, inside, layout, memory, runtime, store
from dsv4.findings import Finding

ROOM_GIB: Final = 2.0
"""Memory that imports of the engine and, on hardware, a CUDA context may take; half a GiB was
measured without CUDA."""
LIMIT_S: Final = 300.0

REBUILD: Final = "run the deploy, which builds it anew"

NAMES: Final = {
    "torch": "torch",
    "extension": "exllamav3's extension",
    "plugin": "the EXL3 plugin",
    "tool_parser": "the tool parser",
    "reasoning_parser": "the reasoning parser",
    "cuda": "CUDA",
}


def bytes_of(home: Path) -> Finding:
    """Compare every file with what was built; only root may note damage for the next deploy."""
    try:
        found = runtime.inspect(home)
    except (store.BrokenState, OSError) as error:
        return Finding("runtime", "unknown", "unreadable", str(error), "run it as root")
    if found["ok"]:
        return Finding("runtime", "ok", "whole", f"{home.name}: every file is as it was built")
    faults = found["faults"]
    more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
    return Finding("runtime", "fault", "changed", f"{home.name}: {faults[0]}{more}", REBUILD)


def patches_of(manifest: Mapping[str, Any]) -> Finding:
    """Say which patches the runtime has; that their files are unchanged is part of the bytes."""
    patched = manifest.get("patched") or {}
    names = sorted((manifest.get("parts") or {}).get("patches") or {})
    if not patched and not names:
        return Finding("patches", "ok", "none", "the route has none")
    text = f"{', '.join(names) or 'patched'}: {len(patched)} files, by hash"
    return Finding("patches", "ok", "whole", text)


def environment(path: Path = layout.ENVIRONMENT) -> dict[str, str]:
    """Return the engine's environment, as systemd reads the file: one plain value a line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key: value for key, _, value in pairs}


def asked(manifest: Mapping[str, Any], offers: guard.Offers, cuda: bool) -> dict[str, Any]:
    """Return what to ask the runtime, from what it was built of and what it is to serve."""
    inputs = manifest.get("inputs") or {}
    return {
        "torch_cuda": manifest.get("torch_cuda") or None,
        "extension": "exllamav3" in inputs,
        "plugin": "plugin" in inputs,
        "tool_parser": offers.tool_parser,
        "reasoning_parser": offers.reasoning_parser,
        "cuda_memory": cuda,
    }


def as_engine(user: str) -> dict[str, Any]:
    """Return how a process is started as the engine's user; as oneself without being root."""
    return {"user": user, "group": user, "extra_groups": []} if os.geteuid() == 0 else {}


def call(home: Path, question: Mapping[str, Any], user: str) -> tuple[dict[str, Any], str]:
    """Return the runtime's answer, or an empty one and why."""
    script = Path(inside.__file__).resolve()
    # What it imports may compile or cache something: not into anybody's home
    surroundings = {"PATH": f"{home}/bin:/usr/bin:/bin", "HOME": "/nonexistent", **environment()}
    try:
        done = subprocess.run(
            [str(home / "bin/python"), "-I", "-B", str(script), json.dumps(dict(question))],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=LIMIT_S,
            cwd="/",
            env={**surroundings, "VLLM_LOGGING_LEVEL": "ERROR"},
            **as_engine(user),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {}, str(error)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(inside.MARK):
            value = json.loads(line.removeprefix(inside.MARK))
            return (value, "") if isinstance(value, dict) else ({}, "it answered no object")
    last = (done.stderr.strip().splitlines() or ["no word"])[-1][:200]
    return {}, f"its interpreter ended with {done.returncode}: {last}"


def inner(answer: Mapping[str, Any], model_gib: float | None) -> Iterator[Finding]:
    """Yield a finding for each thing the runtime was asked."""
    versions = answer.get("versions") or {}
    faults = answer.get("faults") or {}
    words = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    yield Finding("versions", "ok", "read", words or "none", figures=dict(versions))
    for name, fault in faults.items():
        title = NAMES.get(name, name)
        if fault is not None:
            yield Finding(name, "fault", "missing", f"{title}: {fault}", REBUILD)
        elif name != "cuda":
            yield Finding(name, "ok", "there", f"{title} is there")
    seen = answer.get("cuda_memory")
    if isinstance(seen, dict):
        free = seen["free"] / memory.GIB
        figures = {"cuda_free_gib": round(free, 3), "cuda_total_gib": seen["total"] / memory.GIB}
        text = f"CUDA sees {free:.1f} GiB free"
        if model_gib is not None:
            figures["model_free_gib"] = round(model_gib, 3)
            text += f", our model of it {model_gib:.1f} (off by {model_gib - free:+.1f})"
        yield Finding("cuda memory", "ok", "calibrated", text, figures=figures)


def prove(config: guard.Guard, *, again: bool, link: Path = layout.CURRENT) -> list[Finding]:
    """Return every finding about the runtime in service.

    + again: somebody asked; at the end of a deploy, the build has made the same imports, so that
      too little room for them is no reason to hold it up
    """
    name = runtime.link_target(link)
    if name is None:
        return [Finding("runtime", "fault", "none", "no runtime is in service", "run the deploy")]
    home = link.parent / "runtimes" / name
    found = [bytes_of(home)]
    manifest = store.read_json_or(home / runtime.MANIFEST, {})
    if not manifest:
        return found
    found.append(patches_of(manifest))
    limits = config.memory
    info = memory.read_meminfo()
    left = info.available - ROOM_GIB
    if left < limits.soft_floor_gib:
        text = (
            f"{info.available:.1f} GiB are available; {ROOM_GIB:g} for the imports would leave"
            f" {left:.1f}, below the watchdog's soft floor of {limits.soft_floor_gib:.1f}"
        )
        if not again:
            return [
                *found,
                Finding("imports", "skipped", "no room", f"{text}; the build made them"),
            ]
        remedy = "stop the service and verify again"
        return [*found, Finding("imports", "unknown", "no room", text, remedy)]
    cuda = limits.device == "cuda"
    free = memory.free_for_engine(info, limits.device) if cuda else None
    answer, why = call(home, asked(manifest, config.offers, cuda), config.user)
    if not answer:
        return [*found, Finding("imports", "fault", "failed", why, REBUILD)]
    return [*found, *inner(answer, free)]
