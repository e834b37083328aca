"""Remove downloads and views that nothing serves and nobody asked for any more.

A new revision of a pack is downloaded beside the old one, so that the service can go on with that;
the old one stays, a hundred gigabytes, until its owner says so. Never removed are the pack behind
the served view, the one the running engine started from, the one that is described to the fetcher,
and anything while a download runs. Without `--remove` it only lists.

What is kept is told by real files and not by names: a served directory may be a link into the
packs, or be made of such links. When one of the files that say what is kept cannot be read, nothing
goes. Views are root's and go first; the packs are the fetcher's, who parses what comes from the
network, and what is in their tree is removed as that user.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsv4 import accounts, layout, machine, pack_verify, store
from dsv4.sizes import both_units

GOING: Final = ".removing-"
"""A directory that is being removed; one that is left over is no pack and no view any more."""


@dataclass(frozen=True)
class Leftover:
    """One thing to remove, why, and what it takes on disk."""

    path: Path
    why: str
    bytes: int


def disk_use(path: Path) -> int:
    """Return the bytes a file or directory takes that go when it is removed.

    What another revision shares by a hard link stays, and a sparse file takes what is written.
    """
    paths = [path] if not path.is_dir() or path.is_symlink() else list(path.rglob("*"))
    found = [one.lstat() for one in paths]
    return sum(one.st_blocks * 512 for one in found if one.st_nlink <= 1)


def reached(directory: Path) -> Iterator[Path]:
    """Yield what serving a directory takes: all in it, and where its links lead, to the end."""
    seen: set[Path] = set()
    todo = [directory]
    while todo:
        for at in machine.way(todo.pop()):
            if at in seen:
                continue
            seen.add(at)
            yield at
            if at.is_dir() and not at.is_symlink():
                todo += at.iterdir()


def kept(views: Path, packs: Path, spec: Path, started: Path) -> set[Path]:
    """Return the real files and directories that stay: served, run from, described to the fetcher.

    With each, the directories it is in. Raises `store.BrokenState` when it cannot be told.
    """
    roots = kept_views(views, started)
    made_from = known(views / layout.VIEW_NOTE.name).get("made_from") or {}
    if root := text_of(made_from, "pack_root"):
        roots.add(Path(root))
    wanted = known(spec)
    if wanted:
        name, revision = (text_of(wanted, key) for key in ("name", "revision"))
        if not name or not revision:
            raise store.BrokenState(f"{spec}: names no pack and revision; deploy again")
        roots.add(packs / name / revision)
    found = {at for root in roots for at in reached(root)}
    return found | {above for at in found for above in at.parents}


def known(path: Path) -> dict[str, Any]:
    """Return a state file's object, empty when there is none; a broken one is refused."""
    return store.read_json(path) or {}


def text_of(value: Any, key: str) -> str | None:
    """Return a text, None when there is none."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) and found else None


def kept_views(views: Path, started: Path) -> set[Path]:
    """Return the views that stay: the served one, and the one the engine started from."""
    names = [text_of(known(started).get("inputs"), "view")]
    names.append(_target(views / layout.VIEW_CURRENT.name))
    found = {views / Path(name).name for name in names if name}
    return {view for view in found if view.is_dir()}


def _target(link: Path) -> str | None:
    return os.readlink(link) if link.is_symlink() else None  # noqa: PTH115 - as text


def views_to_go(views: Path, shown: set[Path]) -> Iterator[Leftover]:
    """Yield the views that nothing serves."""
    for view in sorted(views.iterdir()) if views.is_dir() else ():
        if view.is_dir() and not view.is_symlink() and view not in shown:
            yield Leftover(view, "view that nothing serves", disk_use(view))


def packs_to_go(packs: Path, stay: set[Path]) -> Iterator[Leftover]:
    """Yield the downloads that go, and what is left in those that stay and are complete.

    An unfinished one that stays goes on from its partial files, so these stay, too.
    """
    for pack in directories(packs):
        for root in directories(pack):
            record = pack_verify.state_path(root)
            if root.name.startswith(GOING):
                yield Leftover(root, "removed in part", disk_use(root))
            elif not record.is_file():
                continue
            elif root.resolve() not in stay:
                yield Leftover(root, "not served and not wanted", disk_use(root))
            elif store.read_json_or(record, {}).get("complete") is True:
                for name in pack_verify.leftovers(root):
                    path = root / name
                    yield Leftover(path, "part of a download that is over", disk_use(path))
        for record in sorted((*pack.glob("*.json"), *pack.glob("*.hashed"))):
            root = record.with_suffix("")
            if not record.is_symlink() and not root.is_symlink() and root.resolve() not in stay:
                yield Leftover(record, "record of a download that goes", disk_use(record))


def directories(directory: Path) -> list[Path]:
    """Return what is a directory itself; a link to one is somebody's arrangement, and stays."""
    below = sorted(directory.iterdir()) if directory.is_dir() else []
    return [path for path in below if path.is_dir() and not path.is_symlink()]


def strangers(packs: Path, stay: set[Path]) -> list[Path]:
    """Return what lies where revisions do and is no download of ours: nothing touches it."""
    found = []
    for pack in sorted(packs.iterdir()) if packs.is_dir() else []:
        if pack.is_symlink():
            found.append(pack)
        elif pack.is_dir():
            below = (path for path in sorted(pack.iterdir()) if path.is_dir())
            found += [
                path
                for path in below
                if path.resolve() not in stay
                and not path.name.startswith(GOING)
                and (path.is_symlink() or not pack_verify.state_path(path).is_file())
            ]
    return found


def remove(leftover: Leftover) -> None:
    """Remove one thing; a directory is renamed first, so that half of one is never taken for it."""
    path = leftover.path
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    going = path
    if not path.name.startswith(GOING):
        going = path.with_name(f"{GOING}{path.name}")
        path.rename(going)
    shutil.rmtree(going)


def main(argv: list[str]) -> int:
    """List or remove."""
    parser = argparse.ArgumentParser(prog="dsv4 pack_gc", description=__doc__)
    parser.add_argument("--remove", action="store_true", help="remove what would be listed")
    parser.add_argument("--packs", type=Path, default=layout.PACKS)
    parser.add_argument("--views", type=Path, default=layout.VIEWS)
    parser.add_argument("--spec", type=Path, default=layout.FETCH_JSON)
    parser.add_argument("--started", type=Path, default=layout.STARTED_JSON)
    parser.add_argument("--user", default=layout.USER_FETCH, help="whose the packs are")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    packs, views = options.packs, options.views
    try:
        views.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            held.enter_context(store.hold(views / layout.VIEWS_LOCK))
            fetching = not _hold_packs(packs, held)
            stay = kept(views, packs, options.spec, options.started)
            found = list(views_to_go(views, kept_views(views, options.started)))
            own = [] if fetching else list(packs_to_go(packs, stay))
            left = strangers(packs, stay)
            if options.remove:
                ids = accounts.ids_of(options.user)
                if own and ids is None:
                    raise store.BrokenState(f"there is no user {options.user}; deploy first")
                for leftover in found:
                    remove(leftover)
                if own and ids:
                    accounts.become(*ids)
                for leftover in own:
                    remove(leftover)
            found += own
    except (OSError, store.BrokenState) as error:
        sys.stderr.write(f"dsv4 pack_gc: {why(error, options.user)}\n")
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        return 3
    verb = "removed" if options.remove else "would go"
    for one in found:
        sys.stderr.write(f"dsv4 pack_gc: {verb}: {one.path}, {both_units(one.bytes)}: {one.why}\n")
    for path in left:
        sys.stderr.write(
            f"dsv4 pack_gc: {path}: left alone, it is no download of ours"
            f" ({'a link' if path.is_symlink() else f'no {path.name}.json beside it'})\n"
        )
    if fetching:
        sys.stderr.write("dsv4 pack_gc: a download is at work; packs are left alone meanwhile\n")
    if options.json:
        rows = [{"path": str(one.path), "why": one.why, "bytes": one.bytes} for one in found]
        total = sum(one.bytes for one in found)
        value = {"ok": True, "removed": options.remove, "bytes": total, "found": rows}
        print(json.dumps({**value, "left": list(map(str, left))}))
    return 0


def why(error: Exception, user: str) -> str:
    """Return one line about what stopped it, and what helps."""
    if isinstance(error, PermissionError):
        return (
            f"{error}; run it as root, and where the packs are not {user}'s have that put right"
            " first (dsv4 pack_owner)"
        )
    return f"{error}; nothing more was removed"


def _hold_packs(packs: Path, held: contextlib.ExitStack) -> bool:
    """Take the fetcher's place; False while it is at work itself."""
    try:
        if packs.is_dir():
            held.enter_context(store.hold(packs / layout.FETCH_LOCK, wait=False))
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
