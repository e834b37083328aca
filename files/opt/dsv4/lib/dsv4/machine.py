"""What this machine is, read and never changed.

The deploy sends this one file over SSH to a machine that has none of our tools yet, so it imports
the standard library only and nothing of ours. Everything that cannot be read is None: "unknown" is
an answer, a traceback is not.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_REPORTED = {"[n/a]", "n/a", "not supported", "[not supported]", ""}
"""How nvidia-smi spells a field it does not have; on a GB10 every memory field is one of these."""


APART = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108
"""Directories that the units' sandboxes show otherwise, or not at all."""

LINKS = 40
"""As many as the kernel follows."""


def read(path: str | Path) -> str | None:
    """Return a small text file, or None."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def run(argv: list[str], timeout: float = 20) -> tuple[int, str]:
    """Return exit status and output of a command; 127 when it is not there, 124 when it hangs."""
    try:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return 127, ""
    except subprocess.TimeoutExpired:
        return 124, ""
    except OSError as error:
        return 126, str(error)
    return done.returncode, done.stdout.decode(errors="replace").strip()


def os_release(text: str | None) -> dict[str, str]:
    """Return /etc/os-release as a mapping."""
    pairs = (line.partition("=") for line in (text or "").splitlines() if "=" in line)
    return {key.strip(): value.strip().strip('"') for key, _, value in pairs}


def field(text: str) -> str | None:
    """Return an nvidia-smi field, or None when it says in one of its ways that it has none."""
    return None if text.strip().lower() in NOT_REPORTED else text.strip()


def gpu_rows(text: str) -> list[list[str | None]]:
    """Return nvidia-smi's csv rows with the fields it does not report as None."""
    return [[field(cell) for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def unit_of(pid: int) -> str | None:
    """Return the systemd unit a process belongs to, on either cgroup version."""
    for line in (read(f"/proc/{pid}/cgroup") or "").splitlines():
        match = re.search(r"/([^/]+\.service)(?:/|$)", line)
        if match:
            return match[1]
    return None


def gpu() -> dict[str, Any]:
    """Return driver, device and the processes on it; see `holders` for why memory is not asked."""
    status, text = run(
        ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    )
    found: dict[str, Any] = {
        "smi_status": status,
        "smi_text": text[:400] if status else None,
        "name": None,
        "driver": None,
        "compute_cap": None,
        "module": (read("/sys/module/nvidia/version") or "").strip() or None,
        "processes": [],
    }
    rows = gpu_rows(text) if status == 0 else []
    if rows and len(rows[0]) == 3:
        found["name"], found["driver"], found["compute_cap"] = rows[0]
    if status == 0:
        found["processes"] = holders()
    return found


def holders() -> list[dict[str, Any]]:
    """Return the processes that hold the GPU; memory per process may or may not be reported."""
    _, text = run(
        [
            "nvidia-smi",
            "--query-compute-apps=pid,process_name,used_memory",
            "--format=csv,noheader,nounits",
        ]
    )
    found = []
    for row in gpu_rows(text):
        if row and row[0] and row[0].isdecimal():
            pid = int(row[0])
            name = row[1] if len(row) > 1 else None
            mib = row[2] if len(row) > 2 else None
            found.append(
                {
                    "pid": pid,
                    "name": name,
                    "mib": int(mib) if mib and mib.isdecimal() else None,
                    "unit": unit_of(pid),
                }
            )
    return found


def toolkit(home: str) -> dict[str, Any]:
    """Return what a CUDA home really is: where it points, its own version, its compiler's."""
    path = Path(home)
    found: dict[str, Any] = {
        "home": home,
        "resolved": str(path.resolve()) if path.exists() else None,
        "version": None,
        "nvcc": None,
        "ptxas": (path / "bin/ptxas").exists(),
        "dangling": path.is_symlink() and not path.exists(),
    }
    with contextlib.suppress(ValueError, TypeError, LookupError):
        version = json.loads(read(path / "version.json") or "")["cuda"]["version"]
        found["version"] = version if isinstance(version, str) else None
    if (path / "bin/nvcc").exists():
        status, text = run([str(path / "bin/nvcc"), "--version"])
        match = re.search(r"release (\d+\.\d+)", text)
        found["nvcc"] = match[1] if match and status == 0 else None
    return found


def mount_of(path: str) -> dict[str, Any]:
    """Return the space on the mount that holds `path`, or that will hold it once it exists.

    `free` is what an unprivileged writer gets: the blocks reserved for root do not count.
    """
    place = Path(path)
    while not place.exists():
        place = place.parent
    space = os.statvfs(place)
    return {
        "path": path,
        "device": place.stat().st_dev,
        "free": space.f_bavail * space.f_frsize,
        "total": space.f_blocks * space.f_frsize,
    }


def way(path: Path) -> Iterator[Path]:
    """Yield each link that a path leads over, and the place where it ends."""
    at, todo, links = Path("/"), [*path.absolute().parts[1:]], 0
    while todo:
        step = at / todo.pop(0)
        if step.name == "..":
            at = at.parent
        elif step.is_symlink() and links < LINKS:
            yield step
            links, target = links + 1, step.readlink()
            at = Path("/") if target.is_absolute() else at
            todo = [*(part for part in target.parts if part != "/"), *todo]
        else:
            at = step
    yield at


def visible_files(root: Path) -> list[str]:
    """Return the files in a directory, without hidden ones (the hub's own, and a downloader's).

    A directory that is a link is gone into like any other, unless it leads back.
    """
    found: list[str] = []

    def gather(directory: Path, base: str, above: tuple[tuple[int, int], ...]) -> None:
        facts = directory.stat()
        here = (facts.st_dev, facts.st_ino)
        if here in above:
            return
        for entry in os.scandir(directory):
            name = f"{base}{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                gather(directory / entry.name, f"{name}/", (*above, here))
            else:
                found.append(name)

    gather(root, "", ())
    return sorted(found)


def adopted(path: str) -> dict[str, Any]:
    """Return whether a pack's directory is there, and which directories apart it leads through.

    A unit's sandbox hides a link in somebody's home as well as what it leads to, so each step on
    the way to each file counts. `apart` has an example for each.
    """
    root = Path(path)
    found: dict[str, Any] = {"path": path, "directory": None, "apart": {}}
    with contextlib.suppress(OSError):
        found["directory"] = root.is_dir()
        files = [root]
        if found["directory"]:
            files += [root / name for name in visible_files(root)]
        steps = {str(step) for file in files for step in (file, *way(file))}
        for place in APART:
            tops = {place, os.path.realpath(place)}
            below = sorted(step for step in steps for top in tops if step.startswith(f"{top}/"))
            if below:
                found["apart"][place] = below[0]
    return found


def listener(port: int) -> dict[str, Any] | None:
    """Return who listens on a TCP port: pid, command and unit where they can be told."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read(table) or "").splitlines()[1:]:
            cells = line.split()
            if len(cells) > 9 and cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{cells[9]}]")
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                if str(descriptor.readlink()) in inodes:
                    pid = int(process.name)
                    return {
                        "pid": pid,
                        "command": (read(process / "comm") or "").strip(),
                        "unit": unit_of(pid),
                    }
    return {"pid": None, "command": None, "unit": None}


def newest_kernel() -> str | None:
    """Return the newest installed kernel, to compare with the running one."""

    def key(name: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", name)]

    names = [p.name.removeprefix("vmlinuz-") for p in Path("/boot").glob("vmlinuz-*")]
    return max(names, key=key) if names else None


def kibibytes(meminfo: str | None) -> dict[str, int]:
    """Return /proc/meminfo as numbers."""
    rows = (line.split() for line in (meminfo or "").splitlines())
    return {r[0].rstrip(":"): int(r[1]) for r in rows if len(r) > 1 and r[1].isdecimal()}


def describe(
    port: int, paths: list[str], cuda_home: str, pack_dir: str | None = None
) -> dict[str, Any]:
    """Return everything preflight decides by."""
    release = os_release(read("/etc/os-release"))
    memory = kibibytes(read("/proc/meminfo"))
    return {
        "arch": platform.machine(),
        "os": {"id": release.get("ID"), "version": release.get("VERSION_ID")},
        "os_name": release.get("PRETTY_NAME"),
        "dgx": (read("/etc/dgx-release") or "").strip() or None,
        "kernel": platform.release(),
        "kernel_newest": newest_kernel(),
        "cmdline": (read("/proc/cmdline") or "").split(),
        "python": platform.python_version(),
        "systemd": Path("/run/systemd/system").is_dir(),
        "hostname": platform.node(),
        "machine_id": (read("/etc/machine-id") or "").strip() or None,
        "boot_id": (read("/proc/sys/kernel/random/boot_id") or "").strip() or None,
        "cores": os.cpu_count(),
        "memory_kib": {
            key: memory.get(key)
            for key in ("MemTotal", "MemFree", "MemAvailable", "Cached", "CmaTotal", "CmaFree")
        },
        "mounts": [mount_of(path) for path in paths],
        "pack_dir": adopted(pack_dir) if pack_dir else None,
        "gpu": gpu(),
        "toolkit": toolkit(cuda_home),
        "listener": listener(port) if port else None,
        "reboot_required": Path("/run/reboot-required").exists(),
        "time": int(time.time()),
        "apt": shutil.which("apt-get") is not None,
    }


def main(argv: list[str]) -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(prog="dsv4 machine", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--cuda-home", default="/usr/local/cuda")
    parser.add_argument("--pack-dir", help="a pack of somebody's own")
    parser.add_argument("--json", action="store_true", help="accepted; the output is always JSON")
    options = parser.parse_args(argv)
    machine = describe(options.port, options.path, options.cuda_home, options.pack_dir)
    json.dump({"ok": True, "machine": machine}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
