"""Keep one machine running: `python -m tests.lab.keeper NAME BIND...`, detached, one a machine.

Under `--keep-unit` nspawn ends with status 133 when the machine reboots, and whoever started it
must start it again: a service manager where there is one, this otherwise. SIGTERM shuts the machine
down in order. If this process is killed, the kernel tells nspawn the same. A machine whose nspawn
is killed goes on without it, as an orphan that `machines.down` finds by its mark.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from dsv4 import store
from tests.lab import cgroups, places, steps

REBOOT = 133
PR_SET_PDEATHSIG = 1
CAP_IPC_LOCK = 14


def nspawn_argv(name: str, binds: list[str], booted: bool, capabilities: int) -> list[str]:
    """Return the command that boots machine `name`."""
    argv = [
        *("systemd-nspawn", "--quiet", "--boot", "--register=no"),
        f"--directory={places.MACHINES / name / 'rootfs'}",
        *(f"--machine={name}", f"--hostname={name}"),
        # Persistent inside, and of no concern to the host's journal
        *("--link-journal=no", "--console=read-only"),
        *("--resolv-conf=copy-host", "--timezone=off"),
        f"--setenv={steps.MARK}={places.MACHINES / name}",
        *binds,
    ]
    if not booted:
        # No service manager could give it a scope
        argv.append("--keep-unit")
    if capabilities & 1 << CAP_IPC_LOCK:
        # A machine's root may lock memory; the watchdog does
        argv.append("--capability=CAP_IPC_LOCK")
    return argv


def bounding_set(status: str) -> int:
    """Return the capabilities a process can ever have, from its /proc status."""
    for line in status.splitlines():
        if line.startswith("CapBnd:"):
            return int(line.split()[1], 16)
    return 0


def main(argv: list[str]) -> int:
    """Boot the machine, and again each time it reboots; return nspawn's last status."""
    name, binds = argv[0], argv[1:]
    record = places.MACHINES / name / "keeper.json"
    booted = Path("/run/systemd/system").is_dir()
    bounds = bounding_set(Path("/proc/self/status").read_text())
    command = nspawn_argv(name, binds, booted, bounds)
    env = os.environ | {
        # A stand-in for a machine, not a sandbox: no filter on system calls, /tmp on the disk
        "SYSTEMD_SECCOMP": "0",
        "SYSTEMD_NSPAWN_TMPFS_TMP": "0",
    }
    libc = ctypes.CDLL(None, use_errno=True)
    child: subprocess.Popen[bytes] | None = None
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if child is not None:
            child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        groups = [] if booted else cgroups.make(name)

        def enter(groups: list[Path] = groups) -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            for group in groups:
                (group / "cgroup.procs").write_text("0")

        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, preexec_fn=enter)
        store.write_json(
            record,
            {
                "pid": os.getpid(),
                "start": steps.started_at(os.getpid()),
                "nspawn_pid": child.pid,
                "nspawn_start": steps.started_at(child.pid),
            },
        )
        status = child.wait()
        for group in groups:
            cgroups.remove(group)
        if status != REBOOT or stopping:
            return status if status >= 0 else 128 - status
        print(f"keeper: {name} reboots", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
