"""What reading ahead does for a loader that faults page by page, beside the disk, as JSON.

    .venv/bin/python -m tests.bench.readahead [--gib 4] [--window 2]  (writes files of 1 GiB)

A child maps file after file and touches every page, with the kernel's own read-ahead off
(MADV_RANDOM), as loaders that jump about in a file defeat it. Cold: the files' pages are dropped
before each run, nothing else of the machine is. The disk's rate is that of parallel direct reads
right before and right after. The page cache is sampled from outside, ten times a second. Asserts
nothing.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from dsv4 import disk, processes, readahead, residency
from tests.bench import report

GIB = 1 << 30
BLOCK = 64 << 20
LOADER = """
import mmap, sys, time
most = int(sys.argv[1])
begun, read = time.monotonic(), 0
for name in sys.argv[2:]:
    with open(name, "rb") as f:
        m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    m.madvise(mmap.MADV_RANDOM)
    for start in range(0, len(m), 1 << 20):
        m[start : start + (1 << 20) : 4096]
        read += min(1 << 20, len(m) - start)
        if read >= most:
            break
    m.close()
    if read >= most:
        break
print(read / (time.monotonic() - begun) / (1 << 30))
"""


def fill(folder: Path, count: int) -> list[Path]:
    """Write the files."""
    paths = [folder / f"{n}.safetensors" for n in range(count)]
    for path in paths:
        with path.open("wb") as handle:
            for _ in range(GIB // BLOCK):
                handle.write(os.urandom(BLOCK))
    return paths


def forget(paths: list[Path]) -> None:
    """Have none of it in memory."""
    for path in paths:
        residency.drop(path)


def load(paths: list[Path], most: int) -> "subprocess.Popen[str]":
    """Start the loader."""
    argv = [sys.executable, "-c", LOADER, str(most), *map(str, paths)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


class Sampler:
    """Notes how much of the files is in memory."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.peak, self.ended = paths, 0, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        """Look ten times a second."""
        while not self.ended.wait(0.1):
            self.peak = max(self.peak, sum(residency.resident(path) for path in self.paths))

    def __enter__(self) -> "Sampler":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def alone(paths: list[Path]) -> float:
    """Return the loader's rate by itself, over the first 128 MiB: it takes minutes for more."""
    forget(paths)
    with load(paths, 128 << 20) as child:
        out, _ = child.communicate()
    return float(out)


def ahead(paths: list[Path], window: int) -> dict[str, Any]:
    """Return the loader's rate with the read-ahead beside it, and the page cache it took."""
    forget(paths)
    names = {str(path) for path in paths}
    shards = [readahead.Shard(path, GIB) for path in paths]
    with (
        Sampler(paths) as cache,
        readahead.Reader(readahead.Plan(shards, window)) as reader,
        load(paths, len(paths) * GIB) as child,
    ):
        seen = readahead.Sight(
            phase=lambda: "loading" if child.poll() is None else "profiling",
            pids=lambda: {child.pid},
            mapped=lambda pids: processes.mapping(names, pids=pids),
            short=lambda: False,
        )
        why = readahead.follow(reader, seen)
        out, _ = child.communicate()
    return {
        "gib_s": round(float(out), 3),
        "peak_page_cache_gib": round(cache.peak / GIB, 3),
        "read_gib": round(reader.totals.read / GIB, 3),
        "dropped_gib": round(reader.totals.dropped / GIB, 3),
        "ended": why,
    }


def disk_rate(paths: list[Path]) -> float:
    """Return what the disk gives over all of the files."""
    sizes = {str(path): GIB for path in paths}
    return round(disk.parallel_rate(sizes, most=len(paths) * GIB, seconds=60) or 0.0, 3)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--window", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", default="/var/tmp")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        paths = fill(Path(name), options.gib)
        by_itself = round(alone(paths), 3)
        before = disk_rate(paths)
        for _ in range(options.runs):
            begun = time.monotonic()
            found = ahead(paths, int(options.window * GIB))
            after = disk_rate(paths)
            share = round(found["gib_s"] / ((before + after) / 2), 3)
            runs.append({**found, "disk_gib_s": [before, after], "of_the_disk": share})
            before = after
            print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
        forget(paths)
    found = {"alone_gib_s": by_itself, "window_gib": options.window, "runs": runs}
    return report.show(found)


if __name__ == "__main__":
    raise SystemExit(main())
