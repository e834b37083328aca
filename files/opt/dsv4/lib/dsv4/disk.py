"""Reading large files with several requests at a time, which is how an NVMe disk is fast."""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

THREADS: Final = 4
PIECE: Final = 16 << 20
GIB: Final = 1 << 30
MEASURED: Final = GIB
MEASURED_S: Final = 1.0


def pieces(sizes: Iterable[tuple[Path, int]]) -> Iterator[tuple[Path, int]]:
    """Yield where the whole pieces of these files begin."""
    for path, size in sizes:
        for start in range(0, size - PIECE + 1, PIECE):
            yield path, start


def parallel_rate(
    files: dict[str, int], most: int = MEASURED, seconds: float = MEASURED_S
) -> float | None:
    """Return how fast the disk gives these files, GiB/s; None where it cannot be asked.

    Reads beside the page cache (O_DIRECT), so neither what is cached counts nor is anything cached
    by it, and stops after `most` bytes or so many seconds.
    """
    todo = pieces((Path(name), size) for name, size in files.items())
    lock = threading.Lock()
    done: list[int] = []
    begun = time.monotonic()

    def work() -> None:
        buffer = mmap.mmap(-1, PIECE)  # aligned, as O_DIRECT wants it
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < seconds:
                with lock:
                    path, start = next(todo, (None, 0))
                    if path is None or len(done) * PIECE >= most:
                        return
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                try:
                    got = os.preadv(descriptor, [buffer], start)
                finally:
                    os.close(descriptor)
                done.append(got)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begun
    return sum(done) / GIB / took if done else None
