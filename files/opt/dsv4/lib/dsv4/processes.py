"""Who runs on this machine, read from /proc.

A process can end between two reads, so whatever vanishes half-way is left out. Imports little,
because the watchdog uses it with all its pages locked.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
ENGINE_PREFIX: Final = "VLLM::"
"""vLLM renames its workers; the kernel keeps 15 bytes of it (`VLLM::EngineCor`)."""

KIB_PER_GIB: Final = 1 << 20
COMMAND_SHOWN: Final = 120


@dataclass(frozen=True)
class Process:
    """One process; `rss` in GiB, `age` in seconds, `cgroup` the raw text of its file."""

    pid: int
    parent: int
    uid: int
    comm: str
    command: str
    rss: float
    age: float
    cgroup: str

    def __str__(self) -> str:
        """Name it the way an owner looks for it."""
        return f"pid {self.pid} ({self.command or self.comm}), {self.rss:.1f} GiB, {self.age:.0f} s"


def parse_status(text: str) -> dict[str, str]:
    """Return the fields of /proc/PID/status."""
    return {
        name: value.strip()
        for name, colon, value in (line.partition(":") for line in text.splitlines())
        if colon
    }


def start_ticks(stat: str) -> int:
    """Return the start time of /proc/PID/stat in clock ticks; the name in it may hold anything."""
    return int(stat.rpartition(")")[2].split()[19])


def read_process(pid: int, proc: Path = PROC, uptime: float = 0.0) -> Process | None:
    """Return one process, None when it is gone or its files cannot be read."""
    home = proc / str(pid)
    try:
        status = parse_status((home / "status").read_text(errors="replace"))
        command = (home / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        started = start_ticks((home / "stat").read_text(errors="replace"))
        return Process(
            pid=pid,
            parent=int(status.get("PPid", "0")),
            uid=int(status["Uid"].split()[0]),
            comm=status["Name"],
            command=command.strip()[:COMMAND_SHOWN],
            rss=int(status.get("VmRSS", "0 kB").split()[0]) / KIB_PER_GIB,
            age=max(0.0, uptime - started / os.sysconf("SC_CLK_TCK")),
            cgroup=(home / "cgroup").read_text(errors="replace"),
        )
    except (OSError, KeyError, ValueError, IndexError):
        return None


def read_all(proc: Path = PROC) -> Iterator[Process]:
    """Yield every process that can be read."""
    try:
        uptime = float((proc / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        uptime = 0.0
    for name in os.listdir(proc):  # noqa: PTH208  a Path for each entry costs more than the read
        if name.isdigit() and (process := read_process(int(name), proc, uptime)):
            yield process


def in_unit(process: Process, unit: str) -> bool:
    """Say whether a process belongs to a unit: its cgroup, or one below, in any hierarchy."""
    paths = (line.rpartition(":")[2] for line in process.cgroup.splitlines())
    return any(unit in path.split("/") for path in paths)


def largest(processes: list[Process], count: int) -> list[Process]:
    """Return the `count` processes with most resident memory, largest first."""
    return sorted(processes, key=lambda process: -process.rss)[:count]


def open_files(folder: str) -> Iterator[str]:
    """Yield what the descriptors in /proc/PID/fd lead to; one may be closed while we look."""
    try:
        entries = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return
    for entry in entries:
        try:
            yield os.readlink(f"{folder}/{entry}")  # noqa: PTH115
        except OSError:
            continue


def holding(prefix: str, proc: Path = PROC) -> dict[int, list[str]]:
    """Return which processes have files open whose path starts with `prefix` (needs root)."""
    found: dict[int, list[str]] = {}
    for name in os.listdir(proc):  # noqa: PTH208
        if name.isdigit():
            links = {link for link in open_files(f"{proc}/{name}/fd") if link.startswith(prefix)}
            if links:
                found[int(name)] = sorted(links)
    return found


def mapping(
    paths: set[str], proc: Path = PROC, pids: set[int] | None = None
) -> dict[str, set[int]]:
    """Return which of `paths` are mapped into memory, and by whom."""
    found: dict[str, set[int]] = {}
    names = os.listdir(proc) if pids is None else [str(pid) for pid in pids]  # noqa: PTH208
    for name in names:
        if not name.isdigit():
            continue
        try:
            text = (proc / name / "maps").read_text(errors="surrogateescape")
        except OSError:
            continue
        for line in text.splitlines():
            path = line[line.find("/") :] if "/" in line else ""
            if path in paths:
                found.setdefault(path, set()).add(int(name))
    return found
