"""`dsv4 NAME …`: one front for all tools."""

import importlib
import os
import sys
from typing import Final

OWNER: Final = {
    "key": "show the API key (root)",
    "probe": "ask the model one question with a known answer",
    "state": "print everything the deploy decides by",
}
"""What the owner of the machine uses; the other tools are for units and the deploy."""

INTERNAL: Final = frozenset(
    {
        *("accounts", "apt", "build", "cache_drop", "fetch", "launch", "lock", "machine"),
        *("memory_gate", "pack_config", "pack_verify", "ready", "receipt", "switch", "tools"),
        *("tree", "watchdog"),
    }
)


def usage() -> str:
    """Return the help text."""
    rows = "\n".join(f"  dsv4 {name:<8} {text}" for name, text in OWNER.items())
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
    return int(tool.main(argv[1:]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
