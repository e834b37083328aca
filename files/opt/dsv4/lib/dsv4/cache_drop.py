"""Make room in the page cache before the engine asks CUDA how much is free.

On a GB10 page cache counts as used in CUDA's figure, so a pack that was just downloaded or served
keeps its own engine from starting. `auto` keeps a warm cache when enough is free without dropping
(a warm load takes half a minute, a cold one ten), else drops as much of the pack as is missing,
largest and last-loaded files first, the last of them from its end on. What was dropped is measured
by residency before and after: pages that are dirty, mapped or in memory alone stay, whatever the
advice.

Only the real files behind those of the view's links that name a file of the pack are touched. In an
adopted one that file may be a link itself, as in the hub's own cache: then its bytes are where that
leads. The memory gate that follows decides whether the engine may start; as a hook this never fails
a start. By hand it ends with 1 when less is free than the engine needs, and with 3 when that cannot
be told.
"""

import errno
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsv4 import guard, launch, layout, memory, systemd

MODES: Final = ("auto", "always", "never")
NAMED: Final = 3
PIECE: Final = 64 << 20
"""How finely a file is given up; pages can be 2 MiB large, and one in use in part stays whole."""
ROUNDS: Final = 3
"""Tries to get at what is missing: what a drop gives back is not to the byte what MemFree gains."""


@dataclass(frozen=True)
class File:
    """One file of the pack and how much of it is in memory, in bytes.

    + inode: what had this name when it was measured, None for whatever has it
    """

    path: Path
    size: int
    resident: int
    inode: tuple[int, int] | None = None


class Replaced(OSError):
    """Another file has the name by now: what was measured is gone, and this one is not known."""


@dataclass(frozen=True)
class Found:
    """The pack's files, and those that are none of ours to drop, each with the reason."""

    files: list[File]
    left: dict[Path, str]

    @property
    def resident(self) -> int:
        """Return how much of the pack is in memory, bytes."""
        return sum(file.resident for file in self.files)


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
    stuck: float = 0.0
    files: int = 0
    seconds: float = 0.0
    cached_elsewhere: float = 0.0
    mapped_by: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    why: str = ""

    @property
    def short(self) -> float:
        """Return how much is still missing."""
        return max(0.0, self.needed - self.free_after)

    @property
    def ok(self) -> bool:
        """Say whether the engine finds what it needs, and whether all went that was asked for."""
        return self.short <= 0 and (self.mode != "always" or self.stuck == 0)


OUTSIDE: Final = "outside the pack's root"


def pack_files(view: Path, root: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the regular files that hold a pack's bytes as a view shows it, each once.

    And, with the reason, the links that lead elsewhere: what they reach belongs to somebody else. A
    link of the view's belongs to the pack when what it names is in the pack's root.
    """
    inside = root.resolve()
    found: set[Path] = set()
    left: dict[Path, str] = {}
    for folder, folders, names in os.walk(view, onerror=cannot_be_listed):
        for link in (Path(folder) / name for name in (*folders, *names)):
            if not link.is_symlink():
                continue  # our own configuration
            named = link.parent / link.readlink()
            where = named.parent.resolve() / named.name
            if not (named.is_relative_to(root) or where.is_relative_to(inside)):
                left[link] = OUTSIDE
                continue
            real = named.resolve()
            if real.is_file():
                found.add(real)
            else:
                left[link] = "no file" if real.exists() else "gone"
    return sorted(found), left


def cannot_be_listed(error: OSError) -> None:
    """Fail instead of taking a directory for an empty one."""
    raise error


def order(files: Iterable[File]) -> list[File]:
    """Return the files in the order they are given up: largest first, of equals the last loaded."""
    by_name = sorted(files, key=lambda file: file.path.name, reverse=True)
    return sorted(by_name, key=lambda file: -file.size)


def measure(paths: Iterable[Path], left: dict[Path, str] | None = None) -> Found:
    """Return each file with its residency, and those that cannot be dropped with the reason.

    A file with two names is one, and its pages are there once.
    """
    from dsv4 import residency  # a start with nothing to drop is 7 ms shorter without

    found = Found([], dict(left or {}))
    known: set[tuple[int, int]] = set()
    for path in paths:
        try:
            with residency.opened(path) as descriptor:
                inode = residency.inode(descriptor)
                if inode in known:
                    continue
                known.add(inode)
                if kind := residency.memory_only(descriptor):
                    found.left[path] = f"in {kind}, which is memory"
                    continue
                size = os.fstat(descriptor).st_size
                resident = residency.resident_of(descriptor)
                found.files.append(File(path, size, resident, inode))
        except OSError as error:
            found.left[path] = error.strerror or str(error)
    return found


def drop(file: File, wanted: float) -> int:
    """Drop a file from its end on until `wanted` bytes are gone; return how many went."""
    from dsv4 import residency

    with residency.opened(file.path) as descriptor:
        if file.inode not in {None, residency.inode(descriptor)}:
            raise Replaced(errno.ESTALE, "was replaced", str(file.path))
        if wanted >= file.resident:
            residency.drop_of(descriptor)
            return max(0, file.resident - residency.resident_of(descriptor))
        gone = 0
        for start in range((file.size - 1) // PIECE * PIECE, -1, -PIECE):
            if before := residency.resident_of(descriptor, start, PIECE):
                residency.drop_of(descriptor, start, PIECE)
                gone += max(0, before - residency.resident_of(descriptor, start, PIECE))
            if gone >= wanted:
                break
        return gone


def give_up(files: Iterable[File], missing: float) -> tuple[int, list[File]]:
    """Drop files until `missing` bytes are gone.

    Returns the bytes that really went, and what of the files is still in memory after their drop
    although it was to go.
    """
    gone = 0
    stuck = []
    for file in order(files):
        wanted = missing - gone
        if wanted <= 0:
            break
        if file.resident == 0:
            continue
        try:
            went = drop(file, wanted)
        except Replaced:
            continue
        except OSError:
            went = 0
        gone += went
        if stays := int(min(wanted, file.resident)) - went:
            stuck.append(File(file.path, file.size, max(0, stays)))
    return gone, [file for file in stuck if file.resident > 0]


def who_maps(files: list[File]) -> list[str]:
    """Return which processes keep these files in memory by mapping them."""
    from dsv4 import processes

    mapped = processes.mapping({str(file.path) for file in files})
    pids = sorted({pid for found in mapped.values() for pid in found})
    known = (processes.read_process(pid) for pid in pids[:NAMED])
    named = [f"pid {process.pid} ({process.comm})" for process in known if process]
    return [*named, f"{len(pids) - NAMED} more"] if len(pids) > NAMED else named


def reasons(left: dict[Path, str]) -> list[str]:
    """Return why files were left alone, the same reason once."""
    names: dict[str, list[str]] = {}
    for path, why in sorted(left.items()):
        names.setdefault(why, []).append(path.name)
    return [
        f"{len(some)} file{'s' if len(some) > 1 else ''} left alone, {why} ({some[0]}"
        f"{', …' if len(some) > 1 else ''})"
        for why, some in names.items()
    ]


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
    found = measure(*pack_files(Path(config.view), Path(config.pack_root)))
    resident, gone = found.resident, 0
    missing = float("inf") if mode == "always" else (needed - free) * memory.GIB
    for _ in range(ROUNDS):
        went, stuck = give_up(found.files, missing)
        gone += went
        info = memory.read_meminfo(meminfo)
        free = memory.free_for_engine(info, limits.device)
        if mode == "always" or free >= needed or went == 0 or gone >= resident:
            break
        found = measure((file.path for file in found.files), found.left)
        missing = (needed - free) * memory.GIB
    outcome.seconds = time.monotonic() - started
    outcome.dropped, outcome.kept = gone / memory.GIB, max(0, resident - gone) / memory.GIB
    outcome.stuck = sum(file.resident for file in stuck) / memory.GIB
    outcome.files = len(found.files)
    outcome.free_after = free
    outcome.cached_elsewhere = max(0.0, info.cached - outcome.kept)
    outcome.mapped_by = who_maps(stuck) if stuck else []
    outcome.left = reasons(found.left)
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
        text += f"; {outcome.stuck:.2f} GiB still mapped by {', '.join(outcome.mapped_by)}"
    elif outcome.stuck:
        text += f"; {outcome.stuck:.2f} GiB would not go although nobody maps them (locked or read)"
    if outcome.left:
        text += f"; {'; '.join(outcome.left)}"
    if outcome.short > 0:
        text += (
            f"; {outcome.short:.1f} GiB short, page cache of other files holds"
            f" {outcome.cached_elsewhere:.1f} GiB"
        )
    return text


@dataclass
class Options:
    """How it was called; `mode` instead of what guard.json says."""

    guard: Path = layout.GUARD_JSON
    meminfo: Path = Path("/proc/meminfo")
    mode: str | None = None
    json: bool = False


def parse(argv: list[str]) -> Options:
    """Return the options of a plain call, and leave every other to argparse, which takes 8 ms."""
    options, rest = Options(), list(argv)
    while rest:
        match rest:
            case ["--json", *rest]:
                options.json = True
            case ["--guard", name, *rest]:
                options.guard = Path(name)
            case ["--meminfo", name, *rest]:
                options.meminfo = Path(name)
            case ["--mode", mode, *rest] if mode in MODES:
                options.mode = mode
            case _:
                return by_argparse(argv)
    return options


def by_argparse(argv: list[str]) -> Options:
    """Return the options of any call; a wrong one ends the program with 2 and the usage."""
    import argparse

    parser = argparse.ArgumentParser(prog="dsv4 cache_drop", description=__doc__)
    parser.add_argument("--mode", choices=MODES, help="instead of what guard.json says")
    parser.add_argument("--guard", type=Path, default=Options.guard)
    parser.add_argument("--meminfo", type=Path, default=Options.meminfo)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv, Options())


def main(argv: list[str]) -> int:
    """Run the hook, or do its work by hand and say with the status what came of it."""
    options = parse(argv)
    if launch.refused():
        return 0
    result: dict[str, Any] = {"ok": False}
    status = 3
    try:
        config = guard.read(options.guard)
        if not systemd.as_hook(config.unit):
            return 0
        mode = options.mode or config.memory.cache_drop
        if mode not in MODES:
            raise guard.BrokenGuard(f"memory.cache_drop: must be one of {MODES} (got {mode!r})")
        outcome = run(config, mode, options.meminfo)
        text, status = line(outcome), 0 if outcome.ok else 1
        result = {"ok": outcome.ok, "short": outcome.short, **vars(outcome)}
    except (OSError, ValueError) as error:
        text = f"nothing dropped: {error}"
        result["error"] = str(error)
    sys.stderr.write(f"dsv4 cache_drop: {text}\n")
    if options.json:
        print(json.dumps(result))
    return 0 if systemd.is_hook() else status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
