"""Running programs and saying what takes how long."""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Only a machine's first process has this in its environment
MARK = "DSV4_LAB_MACHINE"


class LabError(Exception):
    """Something in the lab did not work; the message is one line for whoever ran the command."""


def say(text: str) -> None:
    """Tell the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Name a step when it begins, and its time when it is done."""
    say(f"lab: {what} ...")
    begun = time.monotonic()
    yield
    say(f"lab: {what}: {time.monotonic() - begun:.1f} s")


def run(
    argv: Sequence[str | Path],
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    what: str = "",
) -> str:
    """Run a program to its end and return what it printed; into `log` instead, when given."""
    options: dict[str, Any] = {"env": env, "pass_fds": pass_fds, "stdin": subprocess.DEVNULL}
    if log is None:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, **options)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise LabError(f"{' '.join(map(str, argv))}: {' '.join(last) or done.returncode}")
        return str(done.stdout)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as handle:
        done = subprocess.run(argv, check=False, stdout=handle, stderr=handle, **options)
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise LabError(f"{what or argv[0]} failed ({' '.join(last) or done.returncode}); see {log}")
    return ""


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[int]:
    """Hold `path` as a lock; yields the descriptor, for children that must be waited for too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    # Scripts number their own descriptors from 3 on, and would close a lock that lies there
    descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(opened)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"lab: waiting for another run, which has {what} in hand ({path})")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Delete a directory tree without ever following a mount out of it."""
    if path.exists() or path.is_symlink():
        run(["rm", "-rf", "--one-file-system", "--", path])


def started_at(pid: int) -> int | None:
    """Return when a live process started, in ticks: with the pid it names one process for good."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def is_alive(pid: object, start: object) -> bool:
    """Tell whether the very process that was recorded still runs."""
    return isinstance(pid, int) and start is not None and started_at(pid) == start


def marked(value: Path) -> list[int]:
    """Return the processes that carry `value` as their mark."""
    wanted = f"{MARK}={value}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in words:
            found.append(int(process.name))
    return found
