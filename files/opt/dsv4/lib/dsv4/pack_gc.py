"""Remove downloads and views that nothing serves and nobody asked for any more.

A new revision of a pack is downloaded beside the old one, so that the service can go on with that;
the old one stays, a hundred gigabytes, until its owner says so. Never removed are the pack behind
the served view, the one the running engine started from, the one that is described to the fetcher,
and anything while a download runs. Without `--remove` it only lists.
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

from dsv4 import layout, pack_verify, store
from dsv4.sizes import both_units


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


def kept_roots(views: Path, spec: Path, started: Path) -> set[Path]:
    """Return the packs that stay: served, run from, described to the fetcher."""
    kept = set()
    made_from = store.read_json_or(views / layout.VIEW_NOTE.name, {}).get("made_from") or {}
    if root := made_from.get("pack_root"):
        kept.add(Path(root))
    for view in kept_views(views, started):
        kept |= {link.readlink().parent for link in view.iterdir() if link.is_symlink()}
    wanted = store.read_json_or(spec, {})
    if wanted.get("name") and wanted.get("revision"):
        kept.add(layout.PACKS / str(wanted["name"]) / str(wanted["revision"]))
    return kept


def kept_views(views: Path, started: Path) -> set[Path]:
    """Return the views that stay: the served one, and the one the engine started from."""
    inputs = store.read_json_or(started, {}).get("inputs") or {}
    names = [inputs.get("view"), _target(views / layout.VIEW_CURRENT.name)]
    found = {views / Path(name).name for name in names if isinstance(name, str) and name}
    return {view for view in found if view.is_dir()}


def _target(link: Path) -> str | None:
    return os.readlink(link) if link.is_symlink() else None  # noqa: PTH115 - as text


def leftovers(
    packs: Path, views: Path, kept: set[Path], shown: set[Path], fetching: bool
) -> Iterator[Leftover]:
    """Yield what goes, packs first; while a download runs no pack and nothing in one."""
    for pack in sorted(packs.glob("*/")) if not fetching else ():
        for root in sorted(pack.glob("*/")):
            if root not in kept:
                yield Leftover(root, "not served and not wanted", disk_use(root))
            else:
                for name in pack_verify.leftovers(root):
                    path = root / name
                    yield Leftover(path, "part of a download that is over", disk_use(path))
        for record in sorted(pack.glob("*.json")):
            if record.with_suffix("") not in kept:
                yield Leftover(record, "record of a download that goes", disk_use(record))
    for view in sorted(views.iterdir()) if views.is_dir() else ():
        if view.is_dir() and not view.is_symlink() and view not in shown:
            yield Leftover(view, "view that nothing serves", disk_use(view))


def remove(leftover: Leftover) -> None:
    """Remove one thing; a directory is renamed first, so that half of one is never taken for it."""
    path = leftover.path
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    going = path.with_name(f".removing-{path.name}")
    if going != path and not path.name.startswith(".removing-"):
        path.rename(going)
    shutil.rmtree(going if going.exists() else path)


def main(argv: list[str]) -> int:
    """List or remove."""
    parser = argparse.ArgumentParser(prog="dsv4 pack_gc", description=__doc__)
    parser.add_argument("--remove", action="store_true", help="remove what would be listed")
    parser.add_argument("--packs", type=Path, default=layout.PACKS)
    parser.add_argument("--views", type=Path, default=layout.VIEWS)
    parser.add_argument("--spec", type=Path, default=layout.FETCH_JSON)
    parser.add_argument("--started", type=Path, default=layout.STARTED_JSON)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found: list[Leftover] = []
    try:
        options.views.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            held.enter_context(store.hold(options.views / layout.VIEWS_LOCK))
            fetching = not _hold_packs(options.packs, held)
            kept = kept_roots(options.views, options.spec, options.started)
            shown = kept_views(options.views, options.started)
            found = list(leftovers(options.packs, options.views, kept, shown, fetching))
            for leftover in found if options.remove else ():
                remove(leftover)
    except OSError as error:
        sys.stderr.write(f"dsv4 pack_gc: {error}; run it as root, again\n")
        return 3
    verb = "removed" if options.remove else "would go"
    for one in found:
        sys.stderr.write(f"dsv4 pack_gc: {verb}: {one.path}, {both_units(one.bytes)}: {one.why}\n")
    if fetching:
        sys.stderr.write("dsv4 pack_gc: a download is at work; packs are left alone meanwhile\n")
    if options.json:
        rows = [{"path": str(one.path), "why": one.why, "bytes": one.bytes} for one in found]
        total = sum(one.bytes for one in found)
        print(json.dumps({"ok": True, "removed": options.remove, "bytes": total, "found": rows}))
    return 0


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
