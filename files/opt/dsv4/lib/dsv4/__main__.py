"""`dsv4 NAME …`: one front for all tools."""

import contextlib
import fcntl
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsv4 import layout

OWNER: Final = {
    "bench": "measure how fast it is, beside reference figures (root)",
    "census": "say what the pack's bytes are, by component and type",
    "doctor": "say what is wrong, from live state and logs (root)",
    "key": "show, rotate: the API key (root)",
    "pack_gc": "list or remove packs and views that nothing serves (root)",
    "pack_verify": "check the pack's structure, or with --full every byte",
    "probe": "ask the model one question with a known answer",
    "receipt": "list or compare what deploys, verify and bench left",
    "remove": "list what would be taken away, or take it away (root)",
    "runtime": "check every byte of the runtime in service (root)",
    "state": "print everything the deploy decides by",
    "status": "show the live picture: service, memory, what differs",
    "verify": "prove that what is served works (root)",
}
"""What the owner of the machine uses; the other tools are for units and the deploy."""

INTERNAL: Final = frozenset(
    {
        *("accounts", "apt", "artefact", "build", "cache_drop", "fetch", "launch", "liveness"),
        *("lock", "machine", "memory_gate", "pack_config", "pack_owner", "patches"),
        *("readahead", "ready"),
        *("switch", "tools", "tree", "watchdog", "xet"),
    }
)


CHANGING: Final = frozenset(
    {"accounts", "apt", "artefact", "key", "pack_config", "pack_gc", "switch", "tools", "tree"}
)
"""What the deploy changes the machine with; one at a time, see `alone`."""

PATIENCE_S: Final = 1800.0


@contextlib.contextmanager
def alone(
    name: str, path: Path = layout.WORK_LOCK, patience_s: float = PATIENCE_S
) -> Iterator[None]:
    """Let one changing command run at a time.

    A deploy that is killed leaves the command it had running here, which goes on to its end: the
    next deploy's command waits for that and then finds its work done. Raises TimeoutError.
    """
    with path.open("w") as lock:
        deadline = time.monotonic() + patience_s
        waited = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"an earlier command is still at work after {patience_s:.0f} s; see"
                        f" `fuser -v {path}`"
                    ) from None
            if not waited:
                sys.stderr.write(f"dsv4 {name}: waiting for the command of an earlier deploy\n")
                waited = True
            time.sleep(0.1)
        yield


def usage() -> str:
    """Return the help text."""
    width = max(map(len, OWNER))
    rows = "\n".join(f"  dsv4 {name:<{width}} {text}" for name, text in OWNER.items())
    return f"usage: dsv4 NAME [--json] [options]\n\n{rows}\n"


def main(argv: list[str]) -> int:
    """Dispatch to a tool; 2 for a name that is none."""
    if argv and argv[0] in {"-h", "--help"}:
        sys.stdout.write(usage())
        return 0
    if not argv or argv[0] not in OWNER.keys() | INTERNAL:
        got = f" (got {argv[0]})" if argv else ""
        sys.stderr.write(f"dsv4: name a tool{got}\n{usage()}")
        return 2
    # What other users read must not depend on whose shell or unit this runs in; what is secret is
    # made with a mode of its own
    os.umask(0o022)
    tool = importlib.import_module(f"dsv4.{argv[0]}")
    if argv[0] not in CHANGING or os.geteuid() != 0:
        return int(tool.main(argv[1:]))
    try:
        with alone(argv[0]):
            return int(tool.main(argv[1:]))
    except TimeoutError as error:
        sys.stderr.write(f"dsv4 {argv[0]}: {error}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
