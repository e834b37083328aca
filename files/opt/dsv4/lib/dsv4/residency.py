"""How much of a file lies in the page cache, and how to have it dropped.

Both questions are only answered truthfully to root or the file's owner: for others mincore says
"all of it" and cachestat fails. A part of a file is named by its first byte and its length; length
0 means to the end, as it does for the kernel.
"""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SYS_CACHESTAT: Final = 451
"""The same number on every architecture; Linux 6.5 and later."""

OVERLAYFS: Final = 0x794C7630
"""Its files have their pages at another inode, which mmap finds and cachestat does not."""

MEMORY_ONLY: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
"""File systems whose pages are the only copy, by their magic numbers: nothing drops them."""

AT_ONCE: Final = 1 << 30
"""How much of a file mincore is asked about at a time; the answer takes a byte a page."""

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
libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


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
    """Give a descriptor of a regular file for reading; whatever else lies there is an error.

    Opening a pipe would wait for its writer, and what was a file a moment ago may be one now.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def inode(descriptor: int) -> tuple[int, int]:
    """Return what a file is, whatever its name: device and number."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def failure(what: str) -> OSError:
    """Return the error the last C call has left."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def file_system(descriptor: int) -> int:
    """Return the magic number of the file system a file is on, as statfs(2) gives it."""
    found = (ctypes.c_long * 32)()
    if libc.fstatfs(descriptor, found):
        raise failure("fstatfs")
    return int(found[0])


def memory_only(descriptor: int) -> str:
    """Return the kind of file system that keeps this file in memory alone, empty for a disk's."""
    return MEMORY_ONLY.get(file_system(descriptor), "")


def by_cachestat(descriptor: int, start: int = 0, length: int = 0) -> int:
    """Return the resident bytes of a file as the kernel counts them."""
    wanted, found = Range(start, length), CacheStat()
    arguments = (ctypes.byref(wanted), ctypes.byref(found), ctypes.c_uint(0))
    if libc.syscall(ctypes.c_long(SYS_CACHESTAT), ctypes.c_int(descriptor), *arguments):
        raise failure("cachestat")
    return int(found.cache) * PAGE


def by_mincore(descriptor: int, start: int, length: int) -> int:
    """Return the resident bytes by asking about each page of a mapping.

    + start: a multiple of the page size
    + length: above 0, and all of it within the file
    """
    found = 0
    for offset in range(start, start + length, AT_ONCE):
        size = min(AT_ONCE, start + length - offset)
        address = libc.mmap(None, size, PROT_READ, MAP_SHARED, descriptor, offset)
        if address == MAP_FAILED:
            raise failure("mmap")
        try:
            pages = (ctypes.c_ubyte * ((size + PAGE - 1) // PAGE))()
            if libc.mincore(address, size, pages):
                raise failure("mincore")
        finally:
            libc.munmap(address, size)
        found += len(bytes(pages).translate(None, delete=NOT_RESIDENT)) * PAGE
    return found


def resident_of(descriptor: int, start: int = 0, length: int = 0) -> int:
    """Return how many bytes of an open file, or of a part of it, are in memory."""
    size = os.fstat(descriptor).st_size
    length = max(0, min(length or size, size - start))
    if length == 0:
        return 0
    try:
        if file_system(descriptor) == OVERLAYFS:
            raise OSError
        found = by_cachestat(descriptor, start, length)
    except OSError:
        found = by_mincore(descriptor, start, length)
    return min(found, length)


def resident(path: Path, start: int = 0, length: int = 0) -> int:
    """Return how many bytes of a file, or of a part of it, are in memory."""
    with opened(path) as descriptor:
        return resident_of(descriptor, start, length)


def drop_of(descriptor: int, start: int = 0, length: int = 0) -> None:
    """Ask the kernel to drop a file's pages; written ones go to disk first, or they would stay."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def drop(path: Path, start: int = 0, length: int = 0) -> None:
    """Ask the kernel to drop the pages of the file with this name."""
    with opened(path) as descriptor:
        drop_of(descriptor, start, length)
