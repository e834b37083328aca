"""The API key: made here, kept here, shown to root only.

It never travels: the deploy asks for one to be made, the unit hands it to the engine as a systemd
credential, and the owner reads it on the machine with `sudo dsv4 key`.
"""

import argparse
import json
import os
import secrets
import sys

from dsv4 import layout, store, tree

BYTES = 32


def create() -> None:
    """Make a key and put it in place of the one before, if there was one."""
    tree.note("paths", {str(layout.API_KEY): {"step": "service", "kind": "secret"}})
    layout.CREDENTIALS.mkdir(parents=True, exist_ok=True, mode=0o700)
    store.write_bytes(layout.API_KEY, secrets.token_urlsafe(BYTES).encode() + b"\n", 0o600)


def is_private() -> bool:
    """Say whether there is a key that only root can read."""
    found = tree.describe(layout.API_KEY)
    return (found["kind"], found.get("owner"), found.get("mode")) == ("file", "root", "600")


def main(argv: list[str]) -> int:
    """Show the key, or make one."""
    parser = argparse.ArgumentParser(prog="dsv4 key", description=__doc__)
    make = parser.add_mutually_exclusive_group()
    make.add_argument("--create", action="store_true", help="make one if there is none")
    make.add_argument("--rotate", action="store_true", help="make a new one; restart dsv4 after")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        if options.rotate or (options.create and not layout.API_KEY.exists()):
            create()
        if options.create:
            os.chown(layout.API_KEY, 0, 0)
            layout.API_KEY.chmod(0o600)
        if options.rotate or options.create:
            return 0
        key = layout.API_KEY.read_text().strip()
    except FileNotFoundError:
        sys.stderr.write("dsv4 key: there is none; set serve_api_key and deploy\n")
        return 1
    except PermissionError:
        sys.stderr.write("dsv4 key: only root may read it; run sudo dsv4 key\n")
        return 1
    print(json.dumps({"ok": True, "key": key}) if options.json else key)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
