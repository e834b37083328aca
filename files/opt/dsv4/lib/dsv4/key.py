"""The API key: made here, kept here, shown to root only.

    dsv4 key show      print it
    dsv4 key rotate    put a new one in force at once, without a restart; the old one is dead
    dsv4 key create    make one if there is none (the deploy does)

It never travels: the deploy asks for one to be made, the unit hands it to the engine as a systemd
credential, and the owner reads it on the machine. A running server goes by the digest of the key
in force (`dsv4.routes`), so no request in flight and no long load is lost to a new one.
"""

import argparse
import grp
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Final

from dsv4 import engine_api, fingerprint, guard, layout, routes, store, systemd, tree

BYTES: Final = 32
COMMANDS: Final = ("show", "rotate", "create")
ASK_TIMEOUT_S: Final = 10.0


def create() -> None:
    """Make a key and put it in place of the one before, if there was one."""
    tree.note("paths", {str(layout.API_KEY): {"step": "service", "kind": "secret"}})
    layout.CREDENTIALS.mkdir(parents=True, exist_ok=True, mode=0o700)
    store.write_bytes(layout.API_KEY, secrets.token_urlsafe(BYTES).encode() + b"\n", 0o600)


def is_private() -> bool:
    """Say whether there is a key that only root can read."""
    found = tree.describe(layout.API_KEY)
    return (found["kind"], found.get("owner"), found.get("mode")) == ("file", "root", "600")


def read(path: Path | None = None) -> str:
    """Return a key without its line end."""
    return (path or layout.API_KEY).read_text().strip()


def put_in_force(key: str, group: str = layout.USER) -> None:
    """Have a running server take this key and no other; its digest is for the engine's group."""
    store.write_bytes(layout.KEY_DIGEST, routes.digest(key).encode() + b"\n", 0o600)
    os.chown(layout.KEY_DIGEST, 0, grp.getgrnam(group).gr_gid)
    layout.KEY_DIGEST.chmod(0o640)


def takes(url: str, key: str) -> bool | None:
    """Say whether the server lets this key in; None when it gives no answer."""
    try:
        engine_api.Client(url, key, ASK_TIMEOUT_S).models()
    except engine_api.ApiError as error:
        return False if error.kind == engine_api.AUTH else None
    return True


def note_in_force(key: str) -> None:
    """Put the new key among what the engine runs with, so that no deploy restarts it for that."""
    started = store.read_json_or(layout.STARTED_JSON, {})
    inputs = started.get("inputs")
    if isinstance(inputs, dict):
        salt = fingerprint.content(layout.FINGERPRINT_SALT)
        inputs["api_key"] = fingerprint.key_digest(key.encode(), salt)
        store.write_json(layout.STARTED_JSON, started)


def rotate() -> tuple[int, str]:
    """Replace the key; return the exit status and what came of it, proven by asking the server."""
    try:
        old = read()
    except FileNotFoundError:
        old = ""
    create()
    new = read()
    if not layout.KEY_DIGEST.exists():
        return 0, "a new key is there; it counts from the next start of the service on"
    put_in_force(new)
    try:
        config = guard.read()
    except guard.BrokenGuard as error:
        return 3, f"a new key is there, but whether it is in force cannot be told: {error}"
    if systemd.show(config.unit, "ActiveState").get("ActiveState") != "active":
        return 0, f"a new key is there; it counts from the start of {config.unit} on"
    if takes(config.url, new) and takes(config.url, old) is False:
        note_in_force(new)
        return 0, "the new key is in force and the old one is dead; nothing was restarted"
    return 1, (
        "a new key is there, but the running server does not go by it: `systemctl restart"
        f" {config.unit}` puts it in force"
    )


def main(argv: list[str]) -> int:
    """Show the key, make one, or replace it."""
    parser = argparse.ArgumentParser(
        prog="dsv4 key", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="show")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(argv)
    try:
        if options.command == "rotate":
            status, said = rotate()
            sys.stderr.write(f"dsv4 key: {said}\n")
            if options.json:
                print(json.dumps({"ok": status == 0, "said": said}))
            return status
        if options.command == "create":
            if not layout.API_KEY.exists():
                create()
            os.chown(layout.API_KEY, 0, 0)
            layout.API_KEY.chmod(0o600)
            return 0
        key = read()
    except FileNotFoundError:
        sys.stderr.write("dsv4 key: there is none; set serve_api_key and deploy\n")
        return 1
    except PermissionError:
        sys.stderr.write("dsv4 key: only root may do that; run it with sudo\n")
        return 1
    print(json.dumps({"ok": True, "key": key}) if options.json else key)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
