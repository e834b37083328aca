"""Put files, directories and links in place, and keep the record of them.

The plan comes as JSON on stdin, so no content is ever in argv, in a log or in a world-readable
temporary file. Each entry is replaced as a whole (old or new, never between), and
`/etc/dsv4/record.json` remembers what was put where by which step, so that it can be taken away.
"""

import argparse
import base64
import contextlib
import errno
import grp
import json
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dsv4 import layout, store

Kind = Literal["dir", "file", "link", "absent"]
KINDS: Final = ("dir", "file", "link", "absent")


class BadPlan(ValueError):
    """The plan is not one we can carry out; nothing was touched."""


@dataclass(frozen=True)
class Entry:
    """One path as it shall be. `content` for files, `target` for links."""

    path: Path
    kind: Kind
    owner: str = "root"
    group: str = "root"
    mode: int = 0o644
    content: bytes = b""
    target: str = ""


def parse(entry: Any) -> Entry:
    """Return a checked entry; raise `BadPlan` with its path and what is wrong."""
    if not isinstance(entry, dict):
        raise BadPlan(f"an entry must be an object (got {type(entry).__name__})")
    path = entry.get("path")
    kind = entry.get("kind")
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise BadPlan(f"path must be absolute (got {path!r})")
    if ".." in Path(path).parts or not Path(path).name:
        raise BadPlan(f"path must name one place, without .. (got {path!r})")
    if kind not in KINDS:
        raise BadPlan(f"{path}: kind must be one of {', '.join(KINDS)} (got {kind!r})")
    try:
        mode = int(str(entry.get("mode", "755" if kind == "dir" else "644")), 8)
        content = base64.b64decode(entry.get("base64", ""), validate=True)
    except (ValueError, TypeError) as error:
        raise BadPlan(f"{path}: {error}") from None
    if not 0 <= mode <= 0o7777:
        raise BadPlan(f"{path}: mode must be 0 to 7777 in octal (got {mode:o})")
    return Entry(
        path=Path(path),
        kind=kind,
        owner=str(entry.get("owner", "root")),
        group=str(entry.get("group", "root")),
        mode=mode,
        content=content,
        target=str(entry.get("target", "")),
    )


def describe(path: Path) -> dict[str, Any]:
    """Return what is at `path` in the form the deploy compares by."""
    try:
        status = path.lstat()
    except OSError:
        return {"kind": "absent"}
    found: dict[str, Any] = {
        "owner": _name(pwd.getpwuid, status.st_uid),
        "group": _name(grp.getgrgid, status.st_gid),
        "mode": f"{stat.S_IMODE(status.st_mode):o}",
    }
    if stat.S_ISLNK(status.st_mode):
        return {"kind": "link", "target": str(path.readlink())}
    if stat.S_ISDIR(status.st_mode):
        return {"kind": "dir", **found}
    if stat.S_ISREG(status.st_mode):
        return {"kind": "file", **found, "sha256": store.sha256_file(path)}
    return {"kind": "other", **found}


def _name(lookup: Any, number: int) -> str:
    try:
        return str(lookup(number)[0])
    except KeyError:
        return str(number)


def put(entry: Entry) -> bool:
    """Make one path as the entry says; return whether anything changed."""
    if entry.kind == "absent":
        return _remove(entry.path)
    uid, gid = pwd.getpwnam(entry.owner).pw_uid, grp.getgrnam(entry.group).gr_gid
    wanted = {"kind": entry.kind, "owner": entry.owner, "group": entry.group}
    wanted["mode"] = f"{entry.mode:o}"
    if entry.kind == "file":
        wanted["sha256"] = store.sha256_bytes(entry.content)
    if entry.kind == "link":
        wanted = {"kind": "link", "target": entry.target}
    if describe(entry.path) == wanted:
        return False
    if entry.kind == "dir":
        _directory(entry, uid, gid)
    elif entry.kind == "file":
        _file(entry, uid, gid)
    else:
        link_to(entry.path, entry.target)
    return True


def _remove(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return True
    existed = path.is_symlink() or path.exists()
    path.unlink(missing_ok=True)
    return existed


def _directory(entry: Entry, uid: int, gid: int) -> None:
    if entry.path.is_symlink() or (entry.path.exists() and not entry.path.is_dir()):
        raise OSError(errno.ENOTDIR, "something else is in the way", str(entry.path))
    if not entry.path.exists():
        entry.path.mkdir(parents=True, mode=0o700)
    os.chown(entry.path, uid, gid)
    entry.path.chmod(entry.mode)


def _file(entry: Entry, uid: int, gid: int) -> None:
    refuse_directory(entry.path)
    entry.path.parent.mkdir(parents=True, exist_ok=True)  # of a package that is not installed
    temporary = entry.path.with_name(f".{entry.path.name}.dsv4-new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(entry.content)
            handle.flush()
            os.fchown(handle.fileno(), uid, gid)
            os.fchmod(handle.fileno(), entry.mode)
            os.fsync(handle.fileno())
        temporary.replace(entry.path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    store.sync_directory(entry.path.parent)


def refuse_directory(path: Path) -> None:
    """Refuse to put a file or a link where somebody has a directory: what is in it is not ours."""
    if path.is_dir() and not path.is_symlink():
        raise OSError(errno.EISDIR, "a directory is in the way, move it elsewhere", str(path))


def link_to(path: Path, target: str) -> None:
    """Point `path` at `target` by rename, so that it never is without one."""
    refuse_directory(path)
    temporary = path.with_name(f".{path.name}.dsv4-new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)
    store.sync_directory(path.parent)


def parents(entries: Iterable[Entry]) -> set[Path]:
    """Return the directories that will be made on the way to these paths."""
    wanted = (entry for entry in entries if entry.kind != "absent")
    return {path for entry in wanted for path in entry.path.parents if not path.exists()}


def note(section: str, names: dict[str, Any], record: Path | None = None) -> None:
    """Add to the record of what was put on this machine; a None value takes a name out."""
    record = record or layout.RECORD_JSON
    record.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    whole = store.read_json_or(record, {})
    known = {**whole.get(section, {}), **names}
    whole[section] = {name: value for name, value in known.items() if value is not None}
    store.write_json(record, whole)


def main(argv: list[str]) -> int:
    """Carry out the plan on stdin; the record is written before the paths, so none is forgotten."""
    parser = argparse.ArgumentParser(prog="dsv4 tree", description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; the output is always JSON")
    parser.parse_args(argv)
    try:
        plan = json.load(sys.stdin)
        step = str(plan["step"])
        entries = [parse(entry) for entry in plan["entries"]]
    except (ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"dsv4 tree: the plan on stdin is not usable: {error}\n")
        return 2
    layout.ETC.mkdir(exist_ok=True, mode=0o750)
    made = {str(path): {"step": step, "kind": "dir", "made": True} for path in parents(entries)}
    note(
        "paths",
        made
        | {
            str(entry.path): None if entry.kind == "absent" else {"step": step, "kind": entry.kind}
            for entry in entries
        },
    )
    try:
        changed = [str(entry.path) for entry in entries if put(entry)]
    except (OSError, KeyError) as error:
        sys.stderr.write(f"dsv4 tree: {error}; run the deploy again once it is put right\n")
        return 1
    with contextlib.suppress(BrokenPipeError):
        json.dump({"ok": True, "changed": changed}, sys.stdout)
        print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
