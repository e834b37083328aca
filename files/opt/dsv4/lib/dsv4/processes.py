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

GPU: Final = "/dev/nvidia"
"""How the paths of the GPU's device files begin; who has one open or mapped uses it."""

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

    @property
    def unit(self) -> str | None:
        """The systemd unit it belongs to, the innermost one."""
        paths = (line.rpartition(":")[2] for line in self.cgroup.splitlines())
        parts = (part for path in paths for part in reversed(path.split("/")))
        return next((part for part in parts if part.endswith((".service", ".scope"))), None)

    def __str__(self) -> str:
        """Name it the way an owner looks for it."""
        where = f" in {self.unit}" if self.unit else ""
        return (
            f"pid {self.pid} ({self.command or self.comm}){where}, {self.rss:.1f} GiB,"
            f" {self.age:.0f} s old"
        )


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


def is_dead(status: dict[str, str]) -> bool:
    """Say whether a process has ended and only waits for its parent to notice: it holds nothing.

    One whose first thread has ended while others go on looks alike and is not dead.
    """
    return status.get("State", "")[:1] in {"Z", "X"} and status.get("Threads", "1") == "1"


def read_process(pid: int, proc: Path = PROC, uptime: float = 0.0) -> Process | None:
    """Return one process, None when it is gone, dead, or its files cannot be read."""
    home = proc / str(pid)
    try:
        status = parse_status((home / "status").read_text(errors="replace"))
        if is_dead(status):
            return None
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


def uptime(proc: Path = PROC) -> float:
    """Return how long the machine has been up, seconds; 0 when it cannot be told."""
    try:
        return float((proc / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


def all_pids(proc: Path = PROC) -> list[int]:
    """Return every process's number."""
    # A Path for each entry costs more than the read
    return [int(name) for name in os.listdir(proc) if name.isdigit()]  # noqa: PTH208


def read_all(proc: Path = PROC) -> Iterator[Process]:
    """Yield every process that can be read."""
    up = uptime(proc)
    for pid in all_pids(proc):
        if process := read_process(pid, proc, up):
            yield process


def resident(pid: int, proc: Path = PROC) -> int:
    """Return a process's resident memory in pages, 0 when it is gone."""
    try:
        with open(f"{proc}/{pid}/statm", "rb") as handle:  # noqa: PTH123
            return int(handle.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def top(count: int, proc: Path = PROC) -> list[Process]:
    """Return the `count` processes with most resident memory, largest first.

    Reads one small file of each and the rest of those few only, so that the watchdog can afford it.
    """
    sizes = sorted(((resident(pid, proc), pid) for pid in all_pids(proc)), reverse=True)[:count]
    up = uptime(proc)
    found = (read_process(pid, proc, up) for _, pid in sizes)
    return [process for process in found if process is not None]


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
    for pid in all_pids(proc):
        links = {link for link in open_files(f"{proc}/{pid}/fd") if link.startswith(prefix)}
        if links:
            found[pid] = sorted(links)
    return found


def mapped_lines(pid: int, proc: Path = PROC) -> list[str]:
    """Return the lines of /proc/PID/maps that name a file."""
    try:
        text = (proc / str(pid) / "maps").read_text(errors="surrogateescape")
    except OSError:
        return []
    return [line for line in text.splitlines() if "/" in line]


def mapped_files(pid: int, proc: Path = PROC) -> set[str]:
    """Return the paths that a process has mapped into its memory."""
    return {line[line.find("/") :] for line in mapped_lines(pid, proc)}


def using(prefix: str, proc: Path = PROC) -> set[int]:
    """Return which processes have a file below `prefix` open or mapped (needs root).

    A descriptor may be closed while its mapping stays, and a mapped device is a used one.
    """
    found = set(holding(prefix, proc))
    for pid in all_pids(proc):
        if pid not in found and any(path.startswith(prefix) for path in mapped_files(pid, proc)):
            found.add(pid)
    return found


def mapping(
    paths: set[str], proc: Path = PROC, pids: set[int] | None = None
) -> dict[str, set[int]]:
    """Return which of `paths` are mapped into memory, and by whom.

    A container or a bind mount shows the same file under another path, so device and inode count
    as well. The path does too, because on some file systems stat names another device.
    """
    by_inode = {key: path for path in paths if (key := inode_key(path)) is not None}
    found: dict[str, set[int]] = {}
    for pid in all_pids(proc) if pids is None else pids:
        for line in mapped_lines(pid, proc):
            columns = line.split(None, 5)
            path = columns[5] if columns[5] in paths else by_inode.get((columns[3], columns[4]))
            if path is not None:
                found.setdefault(path, set()).add(pid)
    return found


def inode_key(path: str) -> tuple[str, str] | None:
    """Return a file's device and inode as /proc/PID/maps writes them; None when it is gone."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", str(found.st_ino)
