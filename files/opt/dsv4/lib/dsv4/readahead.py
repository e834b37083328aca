"""Read the weights ahead of an engine that faults them in page by page.

A load through mmap asks the disk for a little at a time; the disk is fast when several large
requests wait for it. This follows which file the engine has mapped, reads what comes next with
parallel reads, and drops what it brought in once the engine has let go of it. Never more than a
window: the mapped file, whose pages nobody can drop, plus what was read ahead.

It touches nothing while the engine has no weight file mapped (page cache counts against the
engine's own check of free memory, which comes before the first), pauses when memory is short, and
is gone before the engine profiles memory: `phase.json` says when, and it ends without a drop. A
second pass over the files, as for a draft, reads little of each and is left alone.

Started with the engine's unit where `service_readahead` is on. Nobody has measured it on a Spark.
"""

import argparse
import contextlib
import json
import os
import pwd
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    cgroup,
    disk,
    guard,
    layout,
    memory,
    notify,
    processes,
    residency,
    store,
    weights,
)

GIB: Final = 1 << 30
LOOK_S: Final = 0.2
SOON_S: Final = 0.03
"""How soon it looks again while the window is full: until then the disk has nothing to do."""
IDLE_S: Final = 0.02
PATIENCE_S: Final = 30.0
"""How long the phase may be another start's: the engine's first hook writes its own at once."""

GOING: Final = ("starting", "loading")


# What is read next, and what is dropped


@dataclass
class Shard:
    """One weight file: how far it was looked through, and how much of it we brought in, bytes."""

    path: Path
    size: int
    done: int = 0
    brought: int = 0
    seen: bool = False
    mapped: bool = False

    @property
    def whole(self) -> bool:
        """Say whether there is nothing left to read of it."""
        return self.done >= self.size


@dataclass(frozen=True)
class Piece:
    """A part of a file to be read."""

    shard: Shard
    start: int
    length: int


@dataclass
class Plan:
    """What the engine has mapped and what was read ahead of it, within a window of bytes."""

    shards: list[Shard]
    window: int
    peak: int = 0
    full: bool = False

    def look(self, mapped: Iterable[str]) -> list[Shard]:
        """Take in what is mapped now; return what lies behind the engine and can be dropped.

        Files before the last one that was mapped count as passed, also those that came and went
        between two looks. When the last file is seen, what has been let go of by then is dropped
        and nothing after that: from there on the engine may begin to profile at any moment. Nor is
        anything while it has none mapped: that may be between two files, or be the end of a load
        whose last file came and went unseen.
        """
        over = self.all_seen
        self.mark(set(mapped))
        if over or not self.engaged:
            return []
        return [shard for shard in self.shards if shard.seen and not shard.mapped and shard.brought]

    def mark(self, mapped: set[str]) -> None:
        """Note what is mapped and what was."""
        for shard in self.shards:
            shard.mapped = str(shard.path) in mapped
        reached = max((n for n, shard in enumerate(self.shards) if shard.mapped), default=-1)
        for shard in self.shards[: reached + 1]:
            shard.seen = True

    @property
    def engaged(self) -> bool:
        """Say whether the engine has a file mapped, and so is in the middle of loading."""
        return any(shard.mapped for shard in self.shards)

    @property
    def all_seen(self) -> bool:
        """Say whether the engine has come to the last file."""
        return all(shard.seen for shard in self.shards)

    @property
    def over(self) -> bool:
        """Say whether there is nothing more to do for this load."""
        return self.all_seen and all(shard.whole for shard in self.shards if shard.mapped)

    @property
    def held(self) -> int:
        """Return what is in memory on our account: mapped files, and what we brought in."""
        return sum(shard.size if shard.mapped else shard.brought for shard in self.shards)

    def next(self) -> Piece | None:
        """Return what to read next; None when the window is full, nothing is left or mapped.

        The mapped file first: its pages come in anyway, and it counts as a whole. One that is
        larger than the window is read ahead no further than the window.
        """
        self.full = False
        if not self.engaged:
            return None
        for shard in self.shards:
            if shard.whole or (shard.seen and not shard.mapped):
                continue
            length = min(disk.PIECE, shard.size - shard.done)
            if shard.mapped:
                brought = sum(other.brought for other in self.shards)
                fits = self.held <= self.window or brought + length <= self.window
            else:
                fits = self.held + length <= self.window
            if not fits:
                self.full = True
                return None
            piece = Piece(shard, shard.done, length)
            shard.done += length
            shard.brought += length
            self.peak = max(self.peak, sum(other.brought for other in self.shards))
            return piece
        return None

    def is_late(self, piece: Piece) -> bool:
        """Say whether a piece has come after its file was dropped, and can be dropped itself."""
        shard = piece.shard
        passed = shard.seen and not shard.mapped and not shard.brought
        return passed and self.engaged and not self.all_seen

    def was_there(self, piece: Piece) -> None:
        """Take a piece back that was in memory before us: it is not ours to drop."""
        piece.shard.brought -= piece.length


# Reading


@dataclass
class Totals:
    """What was done, in bytes and seconds."""

    read: int = 0
    dropped: int = 0
    paused_s: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)


class Reader:
    """Threads that read what the plan says, into a buffer that nobody looks at."""

    def __init__(self, plan: Plan, threads: int = disk.THREADS) -> None:
        self.plan = plan
        self.totals = Totals()
        self.lock = threading.Lock()
        self.paused = threading.Event()
        self.ended = threading.Event()
        self.buffer = bytearray(disk.PIECE)
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(threads)]

    def __enter__(self) -> "Reader":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def work(self) -> None:
        """Read piece after piece until told to end."""
        while not self.ended.is_set():
            piece = None
            if not self.paused.is_set():
                with self.lock:
                    piece = self.plan.next()
            if piece is None:
                self.ended.wait(IDLE_S)
            else:
                self.bring(piece)

    def bring(self, piece: Piece) -> None:
        """Have a piece in memory; a file that cannot be read is the engine's to complain about."""
        try:
            with residency.opened(piece.shard.path) as descriptor:
                there = residency.resident_of(descriptor, piece.start, piece.length)
                if there >= piece.length:
                    with self.lock:
                        self.plan.was_there(piece)
                    return
                view = memoryview(self.buffer)[: piece.length]
                got = os.preadv(descriptor, [view], piece.start)
        except OSError as error:
            with self.lock:
                self.plan.was_there(piece)
                piece.shard.done = piece.shard.size
                self.totals.failed[piece.shard.path.name] = error.strerror or str(error)
            return
        with self.lock:
            self.totals.read += got
            late = self.plan.is_late(piece)
        if late:  # the engine was done with the file before this was
            forget(piece.shard.path, piece.start, piece.length)

    def look(self, mapped: Iterable[str]) -> None:
        """Tell the plan what is mapped, and drop what lies behind."""
        with self.lock:
            behind = self.plan.look(mapped)
        for shard in behind:
            forget(shard.path)
            with self.lock:
                self.totals.dropped += shard.brought
                shard.brought, shard.done = 0, shard.size


def forget(path: Path, start: int = 0, length: int = 0) -> None:
    """Drop a file's pages: those of a complete download, so there is nothing to write first."""
    with contextlib.suppress(OSError), residency.opened(path) as descriptor:
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


# The engine


def engine_pids(unit: str, uid: int | None) -> set[int]:
    """Return the engine's processes: those in the unit's group that are not root's hooks."""
    return {pid for pid in cgroup.pids(cgroup.directories(unit)) if cgroup.owner(pid) == uid}


def is_short(limits: guard.Memory, path: Path) -> bool:
    """Say whether memory is too short to bring more in; so is memory nobody can tell of."""
    try:
        info = memory.read_meminfo(path)
    except (OSError, ValueError):
        return True
    free = memory.free_for_engine(info, limits.device)
    return info.available <= limits.soft_floor_gib or free <= limits.hard_floor_gib


@dataclass(frozen=True)
class Sight:
    """What is looked at, each replaceable: the phase's name, the engine, its files, memory."""

    phase: Callable[[], str]
    pids: Callable[[], set[int]]
    mapped: Callable[[set[int]], Iterable[str]]
    short: Callable[[], bool]


def sight(config: guard.Guard, files: set[str], uid: int | None, meminfo: Path) -> Sight:
    """Return what there is to see on this machine."""
    return Sight(
        phase=lambda: str(store.read_json_or(layout.PHASE_JSON, {}).get("phase", "missing")),
        pids=lambda: engine_pids(config.unit, uid),
        mapped=lambda pids: processes.mapping(files, pids=pids),
        short=lambda: is_short(config.memory, meminfo),
    )


def follow(
    reader: Reader,
    seen: Sight,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Read ahead of the engine until it needs that no more; return why it ended."""
    started = before = clock()
    begun = engine = False
    while True:
        name, pids = seen.phase(), seen.pids()
        if name in GOING:
            begun = True
        elif begun or clock() - started >= PATIENCE_S:
            return f"the phase is {name}"
        if engine and not pids:
            return "the engine is gone"
        engine = engine or bool(pids)
        now = clock()
        if reader.paused.is_set():
            reader.totals.paused_s += now - before
        before = now
        # Before the look, which gives the threads something to read
        if seen.short():
            reader.paused.set()
        else:
            reader.paused.clear()
        if begun:
            reader.look(seen.mapped(pids))
        if reader.plan.over:
            return "all is read"
        sleep(SOON_S if reader.plan.full else LOOK_S)


def main(argv: list[str]) -> int:
    """Read ahead of one load: 0 when it is over, 3 when there is nothing to follow."""
    parser = argparse.ArgumentParser(prog="dsv4 readahead", description=__doc__)
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    parser.add_argument("--meminfo", type=Path, default=Path("/proc/meminfo"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"ok": False}
    try:
        config = guard.read(options.guard)
        uid = pwd.getpwnam(config.user).pw_uid
        files = weights.weight_files(Path(config.view))
        if not files:
            raise guard.BrokenGuard(f"{config.view}: has no weight files to read")
    except (guard.BrokenGuard, KeyError) as error:
        sys.stderr.write(f"dsv4 readahead: {error}\n")
        return 3
    window = int(config.readahead.window_gib * GIB)
    plan = Plan([Shard(Path(name), size) for name, size in files.items()], window)
    notify.notify("STATUS=waiting for the load to begin")
    started = time.monotonic()
    with Reader(plan) as reader:
        why = follow(reader, sight(config, set(files), uid, options.meminfo))
    totals = reader.totals
    result = {
        "ok": True,
        "why": why,
        "read_gib": totals.read / GIB,
        "dropped_gib": totals.dropped / GIB,
        "peak_gib": plan.peak / GIB,
        "paused_s": totals.paused_s,
        "seconds": time.monotonic() - started,
    }
    text = (
        f"ended, {why}: read {result['read_gib']:.2f} GiB ahead of the engine, at most"
        f" {result['peak_gib']:.2f} at a time, dropped {result['dropped_gib']:.2f} behind it"
    )
    if totals.paused_s >= 1:
        text += f", paused {totals.paused_s:.0f} s for want of memory"
    if totals.failed:
        name, reason = min(totals.failed.items())
        more = f" and {len(totals.failed) - 1} more" if len(totals.failed) > 1 else ""
        text += f"; could not read {name}{more}: {reason}"
    sys.stderr.write(f"dsv4 readahead: {text}\n")
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
