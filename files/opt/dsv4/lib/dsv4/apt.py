"""Install Debian packages without a dialog, a restart of the model server, or a fight over locks.

Somebody else's apt (unattended upgrades run at boot) is waited for and named; lock files are never
removed and nobody is killed. Half-configured packages are configured once, then the install is
tried again.
"""

import argparse
import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from dsv4 import tree

LOCKS: Final = (
    Path("/var/lib/dpkg/lock-frontend"),
    Path("/var/lib/dpkg/lock"),
    Path("/var/lib/apt/lists/lock"),
)
LISTS: Final = Path("/var/lib/apt/lists")
FLOCK: Final = "hhqqi4x"
"""struct flock on 64-bit Linux: type, whence, start, length, pid."""

ENVIRONMENT: Final = {
    "DEBIAN_FRONTEND": "noninteractive",
    "NEEDRESTART_MODE": "l",  # list only: it must not restart a server that loads for minutes
    "NEEDRESTART_SUSPEND": "1",
    "LC_ALL": "C.UTF-8",
}


def holder(lock: Path) -> int | None:
    """Return the pid that holds a POSIX record lock, as dpkg and apt take them; None when free."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return None
    try:
        question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    finally:
        os.close(descriptor)
    return None if answer[0] == fcntl.F_UNLCK else int(answer[4])


def name_of(pid: int) -> str:
    """Return the command line of a process, or its absence, for a message."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return "gone"


def wait_for_locks(limit_s: float, locks: tuple[Path, ...] = LOCKS) -> str | None:
    """Wait until no package manager runs; return a sentence that names it when it still does."""
    deadline = time.monotonic() + limit_s
    while True:
        busy = [(lock, pid) for lock in locks if (pid := holder(lock)) is not None]
        if not busy:
            return None
        lock, pid = busy[0]
        if time.monotonic() > deadline:
            return (
                f"{lock} has been held by pid {pid} ({name_of(pid)}) for {limit_s:.0f} s;"
                " let it finish, then run the deploy again"
            )
        time.sleep(1)


def installed(packages: list[str]) -> dict[str, str | None]:
    """Return the version of each package, None for one that is not (fully) installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    if not packages:
        return found
    form = "${Package}\t${db:Status-Abbrev}\t${Version}\n"
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", form, *packages], capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        name, _, rest = line.partition("\t")
        status, _, version = rest.partition("\t")
        if name in found and status.startswith("ii"):
            found[name] = version
    return found


def main(argv: list[str]) -> int:
    """Install what is missing of the named packages."""
    parser = argparse.ArgumentParser(prog="dsv4 apt", description=__doc__)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--wait", type=float, default=900, help="seconds to wait for another apt")
    options = parser.parse_args(argv)
    missing = [name for name, version in installed(options.packages).items() if version is None]
    if not missing:
        return 0
    if busy := wait_for_locks(options.wait):
        sys.stderr.write(f"dsv4 apt: {busy}\n")
        return 1
    audit = subprocess.run(["dpkg", "--audit"], capture_output=True, text=True, check=False)
    if audit.stdout.strip() or any(Path("/var/lib/dpkg/updates").glob("[0-9]*")):
        _apt(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"])
    tree.note("packages", {name: {"step": "base"} for name in missing})
    install = ["apt-get", "install", "-y", "--no-install-recommends"]
    install += ["-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Options::=--force-confdef"]
    install += ["-o", "Dpkg::Options::=--force-confold", *missing]
    if any(LISTS.glob("*_Packages*")) and _apt(install) == 0:
        return 0
    if _apt(["apt-get", "update", "-q", "-o", "DPkg::Lock::Timeout=300"]) != 0:
        sys.stderr.write("dsv4 apt: apt-get update failed; see above, check network and clock\n")
        return 1
    if _apt(install) != 0:
        sys.stderr.write(f"dsv4 apt: could not install {' '.join(missing)}; see above\n")
        return 1
    return 0


def _apt(command: list[str]) -> int:
    """Run a package command with its output on our stderr."""
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, stdout=sys.stderr, check=False
    )
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
