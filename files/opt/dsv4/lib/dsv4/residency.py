"""How much of a file lies in the page cache, and how to have it dropped.

Both questions are only answered truthfully to root or the file's owner: for others mincore says
"all of it" and cachestat fails.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SYS_CACHESTAT: Final = 451
"""The same number on every architecture; Linux 6.5 and later."""

PROT_READ: Final = 1
MAP_SHARED: Final = 1
MAP_FAILED: Final = ctypes.c_void_p(-1).value
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
NOT_RESIDENT: Final = bytes(range(0, 256, 2))
"""mincore says "in memory" with the lowest bit; the others are undefined."""

libc: Final = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
libc.syscall.restype = ctypes.c_long


class Range(ctypes.Structure):
    """`struct cachestat_range`; length 0 means to the end."""

    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class CacheStat(ctypes.Structure):
    """`struct cachestat`, in pages."""

    _fields_ = (
        ("cache", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Give a descriptor of a file for reading."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def failure(what: str) -> OSError:
    """Return the error the last C call has left."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def by_cachestat(descriptor: int) -> int:
    """Return the resident bytes of a file as the kernel counts them."""
    whole, found = Range(0, 0), CacheStat()
    arguments = (ctypes.byref(whole), ctypes.byref(found), ctypes.c_uint(0))
    if libc.syscall(ctypes.c_long(SYS_CACHESTAT), ctypes.c_int(descriptor), *arguments):
        raise failure("cachestat")
    return int(found.cache) * PAGE


def by_mincore(descriptor: int, size: int) -> int:
    """Return the resident bytes of a file by asking about each page of a mapping of it."""
    if size == 0:
        return 0
    address = libc.mmap(None, size, PROT_READ, MAP_SHARED, descriptor, 0)
    if address == MAP_FAILED:
        raise failure("mmap")
    try:
        pages = (ctypes.c_ubyte * ((size + PAGE - 1) // PAGE))()
        if libc.mincore(address, size, pages):
            raise failure("mincore")
    finally:
        libc.munmap(address, size)
    return len(bytes(pages).translate(None, delete=NOT_RESIDENT)) * PAGE


def resident(path: Path) -> int:
    """Return how many bytes of a file are in memory."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        try:
            found = by_cachestat(descriptor)
        except OSError:
            found = by_mincore(descriptor, size)
    return min(found, size)


def drop(path: Path) -> None:
    """Ask the kernel to drop a file's pages; written ones go to disk first, or they would stay."""
    with opened(path) as descriptor:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
