"""A unit's control group, found and killed without asking systemd.

When memory is nearly gone nothing may depend on another process answering, so the paths are known
and the kernel's own files do the work. systemd keeps the same tree in version 2 (where
`cgroup.kill` ends a whole group at once), in its named version 1 hierarchy, or in both.
"""

import os
import signal
from collections.abc import Iterable
from typing import Final

ROOT: Final = "/sys/fs/cgroup"
HIERARCHIES: Final = ("", "unified", "systemd")
SLICE: Final = "system.slice"
ROUNDS: Final = 20
"""How often the version 1 walk looks again: a process that forks while it is being killed leaves a
child in the group."""


def slices(directory: str) -> list[str]:
    """Return the slices in a directory: where an owner's drop-in may have put the unit."""
    try:
        names = os.listdir(directory)  # noqa: PTH208  a Path for each costs more than the rest
    except OSError:
        return []
    return [f"{directory}/{name}" for name in names if name.endswith(".slice")]


def directories(unit: str, root: str = ROOT) -> list[str]:
    """Return where the unit's control group is, in every hierarchy that has it.

    In the slice where services are by default, or, with a `Slice=` of its owner's, in another one
    or one below.
    """
    found = []
    for hierarchy in HIERARCHIES:
        home = os.path.join(root, hierarchy).rstrip("/")  # noqa: PTH118
        places = [f"{home}/{SLICE}"]
        if not os.path.exists(f"{places[0]}/{unit}/cgroup.procs"):  # noqa: PTH110
            first = slices(home)
            places = [*first, *(below for place in first for below in slices(place))]
        paths = (f"{place}/{unit}" for place in places)
        found += [path for path in paths if os.path.exists(f"{path}/cgroup.procs")]  # noqa: PTH110
    return found


def pids(paths: Iterable[str]) -> set[int]:
    """Return every process in these groups and in the groups below them."""
    found: set[int] = set()
    for path in paths:
        for directory, _, files in os.walk(path):
            if "cgroup.procs" in files:
                try:
                    with open(f"{directory}/cgroup.procs", "rb") as handle:  # noqa: PTH123
                        found.update(int(line) for line in handle.read().split())
                except (OSError, ValueError):
                    continue
    return found - {0}


def owner(pid: int) -> int | None:
    """Return the user a process runs as, None when it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return None


def send(targets: Iterable[int], number: int) -> int:
    """Send a signal to each process; return how many took it."""
    sent = 0
    for pid in targets:
        try:
            os.kill(pid, number)
        except OSError:
            continue
        sent += 1
    return sent


def kill(paths: list[str]) -> int:
    """Send SIGKILL to everything in the groups; return how many processes there were."""
    struck = pids(paths)
    for path in paths:
        try:
            with open(f"{path}/cgroup.kill", "wb", buffering=0) as handle:  # noqa: PTH123
                handle.write(b"1")
        except OSError:
            continue
    fresh = set(struck)
    for _ in range(ROUNDS):
        send(fresh, signal.SIGKILL)
        fresh = pids(paths) - struck
        if not fresh:
            break
        struck |= fresh
    return len(struck)
