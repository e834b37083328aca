"""Make room in the page cache before the engine asks CUDA how much is free.

On a GB10 page cache counts as used in CUDA's figure, so a pack that was just downloaded or served
keeps its own engine from starting. `auto` keeps a warm cache when enough is free without dropping
(a warm load takes half a minute, a cold one ten), else drops as much of the pack as is missing,
largest and last-loaded files first. What was dropped is measured by residency before and after:
pages that are dirty or mapped stay, whatever the advice.

Only the real files behind the view's links are touched, and only inside the pack's root. The memory
gate that follows decides whether the engine may start; this hook never fails a start.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsv4 import guard, launch, layout, memory, processes, residency, systemd

MODES: Final = ("auto", "always", "never")
NAMED: Final = 3


@dataclass(frozen=True)
class File:
    """One file of the pack and how much of it is in memory, in bytes."""

    path: Path
    size: int
    resident: int


@dataclass
class Outcome:
    """What was done and what is known after it; GiB where not said otherwise."""

    mode: str
    kind: str
    needed: float
    free_before: float
    free_after: float
    dropped: float = 0.0
    kept: float = 0.0
    files: int = 0
    seconds: float = 0.0
    cached_elsewhere: float = 0.0
    mapped_by: list[str] = field(default_factory=list)
    why: str = ""

    @property
    def short(self) -> float:
        """Return how much is still missing."""
        return max(0.0, self.needed - self.free_after)


def pack_files(view: Path, root: Path) -> list[Path]:
    """Return the regular files that a view's links reach inside the pack's root, each once."""
    inside = root.resolve()
    found = set()
    for link in sorted(view.iterdir()):
        real = link.resolve()
        if link.is_symlink() and real.is_file() and real.is_relative_to(inside):
            found.add(real)
    return sorted(found)


def order(files: Iterable[File]) -> list[File]:
    """Return the files in the order they are given up: largest first, of equals the last loaded."""
    by_name = sorted(files, key=lambda file: file.path.name, reverse=True)
    return sorted(by_name, key=lambda file: -file.size)


def measure(paths: Iterable[Path]) -> list[File]:
    """Return each file with its residency; what cannot be read is left out."""
    found = []
    for path in paths:
        try:
            found.append(File(path, path.stat().st_size, residency.resident(path)))
        except OSError:
            continue
    return found


def give_up(
    files: list[File],
    missing: float | None,
    drop: Callable[[Path], None] = residency.drop,
    resident: Callable[[Path], int] = residency.resident,
) -> tuple[int, list[File]]:
    """Drop files until `missing` bytes are gone (None: all of them).

    Returns the bytes that really went, and the files that are still in memory after their drop.
    """
    gone = 0
    stuck = []
    for file in order(files):
        if missing is not None and gone >= missing:
            break
        if file.resident == 0:
            continue
        try:
            drop(file.path)
            after = resident(file.path)
        except OSError:
            after = file.resident
        gone += max(0, file.resident - after)
        if after > 0:
            stuck.append(File(file.path, file.size, after))
    return gone, stuck


def who_maps(files: list[File]) -> list[str]:
    """Return which processes keep these files in memory by mapping them."""
    mapped = processes.mapping({str(file.path) for file in files})
    pids = sorted({pid for found in mapped.values() for pid in found})
    known = (processes.read_process(pid) for pid in pids[:NAMED])
    return [f"pid {process.pid} ({process.comm})" for process in known if process]


def run(config: guard.Guard, mode: str, meminfo: Path) -> Outcome:
    """Drop what has to be dropped, and say what was."""
    limits = config.memory
    info = memory.read_meminfo(meminfo)
    free = memory.free_for_engine(info, limits.device)
    needed = memory.start_needs(info.total, limits.utilisation, limits.gate_margin_gib)
    outcome = Outcome(
        mode, memory.free_kind(limits.device), needed=needed, free_before=free, free_after=free
    )
    if mode == "never":
        outcome.why = "memory.cache_drop is never"
        return outcome
    if mode == "auto" and free >= needed:
        outcome.why = "enough is free"
        return outcome
    if mode == "auto" and limits.device == "cpu":
        outcome.why = "a CPU engine can use what the page cache holds"
        return outcome
    started = time.monotonic()
    files = measure(pack_files(Path(config.view), Path(config.pack_root)))
    missing = None if mode == "always" else (needed - free) * memory.GIB
    gone, stuck = give_up(files, missing)
    after = memory.read_meminfo(meminfo)
    kept = sum(file.resident for file in files) - gone
    outcome.seconds = time.monotonic() - started
    outcome.dropped, outcome.kept = gone / memory.GIB, kept / memory.GIB
    outcome.files = len(files)
    outcome.free_after = memory.free_for_engine(after, limits.device)
    outcome.cached_elsewhere = max(0.0, after.cached - outcome.kept)
    outcome.mapped_by = who_maps(stuck) if stuck else []
    return outcome


def line(outcome: Outcome) -> str:
    """Return the outcome as one line for the journal."""
    figures = f"{outcome.free_after:.1f} GiB free ({outcome.kind}), {outcome.needed:.1f} needed"
    if outcome.why:
        return f"kept the page cache: {outcome.why}; {figures}"
    text = (
        f"dropped {outcome.dropped:.2f} GiB of the pack in {outcome.seconds:.2f} s,"
        f" {outcome.kept:.2f} GiB stay; {figures}"
    )
    if outcome.mapped_by:
        text += f"; still mapped by {', '.join(outcome.mapped_by)}"
    if outcome.short > 0:
        text += (
            f"; {outcome.short:.1f} GiB short, page cache of other files holds"
            f" {outcome.cached_elsewhere:.1f} GiB"
        )
    return text


def main(argv: list[str]) -> int:
    """Run the hook; only a wrong call is an error."""
    parser = argparse.ArgumentParser(prog="dsv4 cache_drop", description=__doc__)
    parser.add_argument("--mode", choices=MODES, help="instead of what guard.json says")
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    parser.add_argument("--meminfo", type=Path, default=Path("/proc/meminfo"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if launch.refused():
        return 0
    result: dict[str, Any] = {"ok": False}
    try:
        config = guard.read(options.guard)
        if not systemd.as_hook(config.unit):
            return 0
        mode = options.mode or config.memory.cache_drop
        if mode not in MODES:
            raise guard.BrokenGuard(f"memory.cache_drop: must be one of {MODES} (got {mode!r})")
        outcome = run(config, mode, options.meminfo)
        text = line(outcome)
        result = {"ok": outcome.short <= 0, "short": outcome.short, **vars(outcome)}
    except (OSError, ValueError) as error:
        text = f"nothing dropped: {error}"
        result["error"] = str(error)
    sys.stderr.write(f"dsv4 cache_drop: {text}\n")
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
