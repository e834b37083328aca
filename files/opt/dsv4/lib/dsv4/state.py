"""Everything the deploy decides by, in one remote command.

Reads and never changes. What cannot be read is None or an empty mapping, so that a half-made
machine gives a state and not a traceback; the deploy then makes the missing half.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    accounts,
    apt,
    fingerprint,
    key,
    layout,
    lock,
    machine,
    pack_config,
    pack_verify,
    receipt,
    runtime,
    store,
    systemd,
    tools,
    tree,
)

UNIT_FIELDS: Final = {
    "LoadState": "load",
    "ActiveState": "active",
    "SubState": "sub",
    "UnitFileState": "enabled",
    "NeedDaemonReload": "need_reload",
    "Result": "result",
    "MainPID": "main_pid",
    "InvocationID": "invocation",
    "NRestarts": "restarts",
    "StatusText": "status_text",
    "Job": "job",
}


def library_hash(library: Path) -> str:
    """Return one hash over the tools' own sources, as the deploy computes it from its copy."""
    whole = hashlib.sha256()
    for path in sorted(library.rglob("*.py")):
        whole.update(str(path.relative_to(library)).encode() + b"\0")
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:12]


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """Return `systemctl show` output as one mapping a unit."""
    found = {}
    for block in text.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        if name := values.get("Id"):
            found[name] = {ours: values.get(theirs, "") for theirs, ours in UNIT_FIELDS.items()}
    return found


def is_roots_own(library: Path) -> bool:
    """Say whether our code is there and nobody but root can change it: root's units run it."""
    if not library.is_dir():
        return False
    for path in (library.resolve(), *library.resolve().rglob("*.py")):
        found = path.stat()
        if found.st_uid not in {0, os.geteuid()} or found.st_mode & 0o022:
            return False
    return True


def units(names: Iterable[str] = (*layout.UNITS, layout.UNIT_BENCH)) -> dict[str, dict[str, str]]:
    """Return the units' live state; empty where systemd does not answer."""
    return parse_units(systemd.show_all(names, ["Id", *UNIT_FIELDS]))


def paths(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is at each path the record says we put there."""
    return {path: tree.describe(Path(path)) for path in record.get("paths", {})}


def bytes_under(directory: Path) -> int:
    """Return the disk space a directory's files take, unfinished ones as far as they are."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def packs(root: Path = layout.PACKS, user: str = layout.USER_FETCH) -> dict[str, dict[str, Any]]:
    """Return each downloaded pack's revisions: complete and untouched or not, last error."""
    ids = accounts.ids_of(user)
    owner = ids[0] if ids else None
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(root.glob("*/*.json")):
        value = store.read_json_or(path, {"complete": False, "error": "its state file is broken"})
        pack, files = path.with_suffix(""), value.get("files")
        complete = value.get("complete") is True and pack.is_dir()
        changed = pack_verify.touched(pack, files, owner) if complete and files else []
        found.setdefault(path.parent.name, {})[path.stem] = {
            "complete": complete and not changed,
            "error": str(changed[0]) if changed else value.get("error"),
            "repo_id": value.get("repo_id"),
            "bytes": bytes_under(pack),
        }
    return found


def engine() -> dict[str, Any]:
    """Return what the running engine started from, and how that differs from what is on disk."""
    started = store.read_json_or(layout.STARTED_JSON, {})
    wanted = fingerprint.wanted()
    return {
        "started": started,
        "differs": fingerprint.differs(started, wanted) if started else [],
        "phase": store.read_json_or(layout.PHASE_JSON, {}),
        "verified": store.read_json_or(layout.VERIFIED_JSON, {}),
        "wanted": wanted,
    }


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return the whole state."""
    record = store.read_json_or(layout.RECORD_JSON, {})
    users = (layout.USER, layout.USER_FETCH)
    library = layout.LIB / "dsv4"
    return {
        "machine": machine.describe(
            options.port, options.path, options.cuda_home, options.pack_dir
        ),
        "library": library_hash(library) if is_roots_own(library) else None,
        "tools": tools.current(),
        "accounts": {user: accounts.groups_of(user) for user in users if accounts.exists(user)},
        "groups": accounts.present(["video", "render"]),
        "packages": apt.installed(options.package),
        "paths": paths(record),
        "units": units(),
        "runtimes": runtime.all_of(),
        "current": runtime.link_target(layout.CURRENT),
        "previous": runtime.link_target(layout.PREVIOUS),
        "packs": packs(),
        "view": pack_config.served(),
        "fetch": store.read_json_or(layout.FETCH_PROGRESS, {}),
        "build": store.read_json_or(layout.BUILD_PROGRESS, {}),
        "engine": engine(),
        "lock": lock.read_holder(),
        "receipt": receipt.newest("deploy")[1],
        "hub_token": layout.HUB_TOKEN.exists(),
        "api_key": key.is_private(),
    }


def progress() -> dict[str, Any]:
    """Return the moving parts only: what a deploy polls while it follows a unit."""
    return {
        "units": units(),
        "fetch": store.read_json_or(layout.FETCH_PROGRESS, {}),
        "build": store.read_json_or(layout.BUILD_PROGRESS, {}),
        "bench": store.read_json_or(layout.BENCH_PROGRESS, {}),
        "phase": store.read_json_or(layout.PHASE_JSON, {}),
    }


def main(argv: list[str]) -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(prog="dsv4 state", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="say who listens there")
    parser.add_argument("--path", action="append", default=[], help="say what space its mount has")
    parser.add_argument("--package", action="append", default=[], help="say its version")
    parser.add_argument("--cuda-home", default="/usr/local/cuda")
    parser.add_argument("--pack-dir", help="say whether it is there and can be served")
    parser.add_argument("--progress", action="store_true", help="only what moves")
    parser.add_argument("--json", action="store_true", help="accepted; the output is always JSON")
    options = parser.parse_args(argv)
    found = progress() if options.progress else describe(options)
    json.dump({"ok": True, "schema": layout.SCHEMA, **found}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
