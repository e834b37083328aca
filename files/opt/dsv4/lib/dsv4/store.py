"""JSON state on disk: written whole or not at all, read without trusting it.

Two processes share every file here, and either can be killed at any instruction, so a writer goes
through a temporary name and a rename, and a reader tells apart *missing* from *broken*.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4.layout import SCHEMA


class BrokenState(Exception):
    """A state file exists but does not hold what its name says."""


def write_bytes(path: Path, data: bytes, mode: int = 0o644, *, sync: bool = True) -> None:
    """Replace `path` with `data`, so that a reader or a crash sees the old file or the new one.

    Without `sync` a power cut may lose it, and nobody waits for a disk that is busy.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fchmod(handle.fileno(), mode)
            if sync:
                os.fsync(handle.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: dict[str, Any], mode: int = 0o644, *, sync: bool = True) -> None:
    """Write one JSON object with its schema number (see `write_bytes`)."""
    text = json.dumps({"schema": SCHEMA, **value}, indent=1, sort_keys=True, ensure_ascii=False)
    write_bytes(path, text.encode() + b"\n", mode, sync=sync)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`, or None when there is no such file.

    Raises `BrokenState` when the file is there but is no JSON object, which is a finding to report
    and never a reason to crash.
    """
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenState(f"{path}: cannot be read ({error}); remove it and run again") from error
    if not isinstance(value, dict):
        raise BrokenState(
            f"{path}: holds {type(value).__name__}, not an object; remove it and run again"
        )
    return value


def read_json_or(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    """Return the object in `path`, or `default` when it is missing or broken."""
    try:
        value = read_json(path)
    except BrokenState:
        return default
    return default if value is None else value


@contextlib.contextmanager
def hold(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file; the lock ends with the process, however that ends.

    Raises `BlockingIOError` when another process has it and this one does not wait.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str | None:
    """Return the SHA-256 of a regular file in hex, or None when it cannot be read."""
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return None
