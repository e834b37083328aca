"""One deploy at a time: a lock that its holder's death releases.

A deploy is many short SSH commands and no process here lives as long as it does, except the sshd
session that carries them all. So a small holder keeps a flock(2) and goes when that session goes:
a controller that is killed, or whose connection ends, holds nothing.
"""

import argparse
import contextlib
import fcntl
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any, Final

from dsv4 import layout, store

SESSIONS: Final = {"sshd", "sshd-session"}
"""Names of the process that carries one SSH connection (OpenSSH before and after 9.8)."""


def parent(pid: int) -> tuple[str, int]:
    """Return command name and parent of a process, from its stat line (the name may hold ')')."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.index("(") + 1 : text.rindex(")")], int(
        text[text.rindex(")") + 2 :].split()[1]
    )


def carrier(pid: int) -> int:
    """Return the process whose end means the controller is gone.

    That is the nearest sshd session above us, or, when the deploy runs on this machine itself,
    the outermost pyinfra process.
    """
    chain = []
    while pid > 1:
        name, above = parent(pid)
        if name in SESSIONS:
            return pid
        chain.append((name, pid))
        pid = above
    pyinfra = [number for name, number in chain if name.startswith("pyinfra")]
    return (pyinfra or [number for _, number in chain] or [pid])[-1]


def read_holder(path: Path = layout.LOCK) -> dict[str, Any] | None:
    """Return who holds the deploy lock, None when nobody does; the flock decides, not the text."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return store.read_json_or(path.with_suffix(".json"), {"owner": "unknown"})
    finally:
        os.close(descriptor)
    return None


def describe(holder: dict[str, Any]) -> str:
    """Return the holder in words."""
    return (
        f"{holder.get('owner', 'unknown')} on {holder.get('host', 'unknown')}"
        f" since {holder.get('since', 'unknown')} (session pid {holder.get('session', 'unknown')})"
    )


def acquire(owner: str, host: str, token: str, path: Path = layout.LOCK) -> dict[str, Any] | None:
    """Take the lock for a run and return None, or return who has it.

    `token` names the run, so that asking twice within one run is fine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    watched = carrier(os.getppid())
    if not _flock(descriptor):
        found = store.read_json_or(path.with_suffix(".json"), {"owner": "unknown"})
        if found.get("token") != token or found.get("session") == watched:
            os.close(descriptor)
            return None if found.get("token") == token else found
        # The same run on a new connection: the holder below waits for the old one to go
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    store.write_json(
        path.with_suffix(".json"),
        {"owner": owner, "host": host, "since": since, "token": token, "session": watched},
    )
    ready, started = os.pipe()
    if os.fork() == 0:
        hold(descriptor, watched, started)
    os.close(started)
    os.read(ready, 1)  # a sudo with a terminal of its own hangs up on who is still in its session
    os.close(ready)
    os.close(descriptor)
    return None


def _flock(descriptor: int) -> bool:
    """Try for half a second: a reader of the lock holds it for an instant."""
    for _ in range(10):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def hold(descriptor: int, watched: int, started: int) -> None:
    """Keep the inherited lock until the watched process is gone; never returns."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(started)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with contextlib.suppress(OSError):
        gone = os.pidfd_open(watched)
        select.select([gone], [], [])
    os.close(descriptor)
    os._exit(0)


def main(argv: list[str]) -> int:
    """Take the lock, or say who has it."""
    parser = argparse.ArgumentParser(prog="dsv4 lock", description=__doc__)
    parser.add_argument("--owner", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument(
        "--token", required=True, help="any text that is the same all through a run"
    )
    options = parser.parse_args(argv)
    held_by = acquire(options.owner, options.host, options.token)
    if held_by is not None:
        sys.stderr.write(
            f"dsv4 lock: another deploy is at work on this machine: {describe(held_by)};"
            " wait for it or stop it, then run again\n"
        )
        return 1
    json.dump({"ok": True}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
