"""Take away what was put here: `sudo dsv4 remove [--packs] [--yes]`.

Without --yes it lists what it would do. What is ours is what /etc/dsv4/record.json says, and in our
own directories what this version makes there; so a record that was lost, or a run that was cut off,
changes nothing: the next run finds what is left and finishes. Kept are packs (unless asked for),
Debian packages (others may need them by now) and whatever in our directories is not ours; all of
it is named. The record goes last.
"""

import argparse
import contextlib
import fnmatch
import grp
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dsv4 import __main__ as front
from dsv4 import accounts, cgroup, firewall, layout, lock, processes, store, systemd

Do = Literal["stop", "remove", "keep"]

WHOLE: Final = (
    *(layout.CACHE, layout.TOOLS, layout.UV_CACHE.parent, layout.LOGS, layout.RUN),
    layout.FETCH_PROGRESS.parent,
)
"""Directories in which everything is ours, whatever its name: caches, logs, what a boot forgets."""

TOPS: Final = (
    *(layout.UV_CACHE.parent, layout.LOGS, layout.FETCH_PROGRESS.parent, layout.RUN),
    *(layout.VAR, layout.ROOT, layout.ETC),
)
"""Our own directories, in the order they go: the one with the record is the last."""

HEX: Final = "[0-9a-f]"
MADE: Final = (
    # What the tools make under names of its own kind
    *("lib/dsv4", "lib/dsv4-*", "lib/.new", "lib/.old", "lib/.link", "tools-*", "locks/*.lock"),
    *(f"runtimes/*-{HEX * 12}", "runtimes/.*", "wheels/*.whl", "wheels/*.json", "wheels/.*"),
    *(f"wheels/{HEX * 16}", f"views/{HEX * 16}", "views/current.json", "views/.*"),
    *("receipts/*.json", "receipts/.*", "watchdog/*.json", "watchdog/.*", "metrics/.*"),
    # Files that were being written when somebody pulled the plug
    *(".*.dsv4-new", "*/.*.dsv4-new", ".*.new", "*/.*.new", ".*.json.*", "*/.*.json.*"),
    *(".api_key.*", "credentials/.api_key.*", "credentials/.hub_token.*"),
)
PACKED: Final = (f"*/{HEX * 40}", f"*/{HEX * 40}.json", f"*/{HEX * 40}.hashed", "*/.*", ".*")
"""What the download makes below the packs."""

SHARED: Final = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))  # noqa: S108 - looked through
"""Where everybody may write: what belongs to our accounts there came from our processes."""

ACCOUNT_HOME: Final = "/nonexistent"
END_S: Final = 20.0
STOP_S: Final = 180.0


@dataclass(frozen=True)
class Item:
    """One thing and what becomes of it; `what` is its kind, `why` is for people."""

    do: Do
    what: str
    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.do} {self.what} {self.name}{f' ({self.why})' if self.why else ''}"


# What there is


def record() -> dict[str, Any]:
    """Return the record, empty when it is missing or broken: then the names we know have to do."""
    return store.read_json_or(layout.RECORD_JSON, {})


def section(whole: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the record."""
    found = whole.get(name)
    return found if isinstance(found, dict) else {}


def known_paths(whole: Mapping[str, Any]) -> set[Path]:
    """Return every path that is ours by name: the record's, and this version's."""
    found = {Path(path) for path in section(whole, "paths") if path.startswith("/")}
    named = {value for value in vars(layout).values() if isinstance(value, Path)}
    found |= {path for path in named if any(top in path.parents for top in TOPS)}
    found |= {layout.PROFILE, layout.TMPFILES, layout.NEEDRESTART}
    return found | {layout.SYSTEMD / unit for unit in layout.UNITS}


def units_of(paths: Iterable[Path]) -> list[str]:
    """Return the units to be stopped, the engine's first so that its guard outlives it."""
    ours = {path.name for path in paths if path.parent == layout.SYSTEMD} | {layout.UNIT_BENCH}
    return sorted(ours, key=lambda name: (name != layout.UNIT, name))


def accounts_of(whole: Mapping[str, Any]) -> list[str]:
    """Return the accounts that we made: by the record, or by the way we make them."""
    found = []
    for name in (layout.USER, layout.USER_FETCH):
        recorded = name in section(whole, "users")
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            if recorded and group(name):  # userdel leaves a group in which somebody else is
                found.append(name)
            continue
        like_ours = account.pw_dir == ACCOUNT_HOME and account.pw_shell.endswith("nologin")
        if recorded or like_ours:
            found.append(name)
    return found


def group(name: str) -> bool:
    """Say whether there is such a group."""
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def there(path: Path) -> bool:
    """Say whether something is at a path, a link that leads nowhere included."""
    return path.is_symlink() or path.exists()


def mounts(text: str) -> set[Path]:
    """Return where something is mounted, from /proc/self/mountinfo."""
    rows = (line.split() for line in text.splitlines())
    # Blanks and the like are written as octal
    return {Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), row[4])) for row in rows if row}


@dataclass(frozen=True)
class Sorter:
    """Tells apart what is ours in our directories; a tree is named by its head.

    + ours: paths that are ours by name
    + made: patterns of names, relative to `top`, that our tools make
    + mounted: where something is mounted; that is never touched
    """

    top: Path
    ours: set[Path]
    made: tuple[str, ...]
    mounted: set[Path]

    def sort(self, entries: Iterable[Path]) -> Iterator[Item]:
        """Yield what becomes of each of these, what is in a directory before the directory."""
        for path in sorted(entries):
            name = str(path.relative_to(self.top))
            if path == layout.PACKS:
                continue
            if path in WHOLE or any(matches(name, pattern) for pattern in self.made):
                yield from tree(path, self.mounted)
            elif path.is_dir() and not path.is_symlink() and self.holds_ours(path):
                yield from self.directory(path)
            elif path in self.ours and (path.is_symlink() or not path.is_dir()):
                yield Item("remove", "file", str(path))
            else:
                yield Item("keep", "path", str(path), "not put there by this project")

    def directory(self, path: Path) -> Iterator[Item]:
        """Yield what is in a directory of ours, and the directory when all of it goes."""
        found = list(self.sort(path.iterdir()))
        yield from found
        yield from emptied(path, found, self.mounted)

    def holds_ours(self, path: Path) -> bool:
        """Say whether a directory is ours, or one with something of ours in it."""
        return path in self.ours or any(path in other.parents for other in self.ours)


def tree(path: Path, mounted: set[Path]) -> Iterator[Item]:
    """Yield a path that is ours with all that is in it, but for what is mounted there."""
    if path in mounted:
        yield Item("keep", "mount", str(path), "what is mounted there is not this project's")
    elif any(path in mount.parents for mount in mounted):
        for entry in sorted(path.iterdir()):
            yield from tree(entry, mounted)
    elif path.is_dir() and not path.is_symlink():
        yield Item("remove", "tree", str(path))
    else:
        yield Item("remove", "file", str(path))


def emptied(path: Path, found: Iterable[Item], mounted: set[Path]) -> Iterator[Item]:
    """Yield a directory of which nothing is left."""
    if any(item.do == "keep" for item in found):
        return
    if path in mounted:
        yield Item("keep", "mount", str(path), "empty, and a mount")
    else:
        yield Item("remove", "directory", str(path))


def matches(name: str, pattern: str) -> bool:
    """Say whether a relative path fits a pattern, part by part."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(
        fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True)
    )


def plan(*, packs: bool) -> list[Item]:
    """Return what is to be done now, in order; nothing but keeps when all is gone already."""
    whole = record()
    paths = known_paths(whole)
    mounted = mounts(Path("/proc/self/mountinfo").read_text())
    items = [*units(paths)]
    if firewall.is_loaded():  # else what it drops would be dropped until the next boot
        items.append(Item("remove", "firewall table", f"inet {firewall.TABLE}"))
    items += outside(paths, whole)
    for top in filter(there, TOPS):
        if top in WHOLE:
            items += tree(top, mounted)
            continue
        found = list(Sorter(top, paths, MADE, mounted).sort(top.iterdir()))
        if top == layout.VAR:
            found += pack_items(mounted, packs=packs)
        items += [*found, *emptied(top, found, mounted)]
    items += [*left_behind(whole, mounted)]
    items += [Item("remove", "account", name) for name in accounts_of(whole)]
    # The record and its directory are the last but for the lock that is held meanwhile
    items.sort(key=lambda item: item.name in late())
    if there(layout.WORK_LOCK):
        items.append(Item("remove", "file", str(layout.WORK_LOCK)))
    installed = sorted(section(whole, "packages"))
    if installed:
        why = "others may need them by now; apt-get remove those that none does"
        items.append(Item("keep", "Debian packages", " ".join(installed), why))
    return items


def late() -> set[str]:
    """Return what goes when all else is gone: without the record less would be known."""
    return {str(path) for path in (layout.RECORD_JSON, layout.ETC, layout.WORK_LOCK)}


def units(paths: Iterable[Path]) -> Iterator[Item]:
    """Yield the units that run or start at boot."""
    for name in units_of(paths):
        found = systemd.show(name, "ActiveState", "UnitFileState", "LoadState")
        active = found.get("ActiveState") not in {None, "", "inactive", "failed"}
        enabled = found.get("UnitFileState") == "enabled"
        failed = found.get("ActiveState") == "failed"
        if active or enabled or failed or wants(name):
            state = ", ".join([found.get("ActiveState", ""), *(["at boot"] if enabled else [])])
            yield Item("stop", "unit", name, state)


def wants(unit: str) -> list[Path]:
    """Return the links by which a unit is started along with others."""
    return [path for path in layout.SYSTEMD.glob(f"*.*/{unit}") if path.is_symlink()]


def outside(paths: set[Path], whole: Mapping[str, Any]) -> Iterator[Item]:
    """Yield our files in directories that are the system's, and directories made for them."""
    ours = sorted(
        (path for path in paths if not any(path == top or top in path.parents for top in TOPS)),
        key=lambda path: -len(path.parts),
    )
    for path in ours:
        made = section(whole, "paths").get(str(path), {})
        if path.is_dir() and not path.is_symlink():
            if isinstance(made, dict) and made.get("made"):
                left = [entry for entry in path.iterdir() if entry not in paths]
                if left:
                    yield Item("keep", "directory", str(path), f"holds {left[0].name}")
                else:
                    yield Item("remove", "directory", str(path))
        elif there(path) and path != layout.WORK_LOCK:
            yield Item("remove", "file", str(path))
    for unit in units_of(paths):
        for drop_in in sorted(layout.SYSTEMD.glob(f"{unit}.d/*")):
            if drop_in not in paths:
                yield Item("keep", "file", str(drop_in), "a drop-in of your own")


def left_behind(whole: Mapping[str, Any], mounted: set[Path]) -> Iterator[Item]:
    """Yield what our accounts have in directories for everybody, while their numbers are known."""
    uids = {ids[0] for name in accounts_of(whole) if (ids := accounts.ids_of(name))}
    for path in (path for place in SHARED if place.is_dir() for path in sorted(place.iterdir())):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid in uids:
                yield from tree(path, mounted)


def pack_items(mounted: set[Path], *, packs: bool) -> Iterator[Item]:
    """Yield what becomes of the packs: taken along, or kept."""
    if not layout.PACKS.is_dir():
        return
    if packs or not any(layout.PACKS.iterdir()):
        yield from Sorter(layout.PACKS, names(), PACKED, mounted).directory(layout.PACKS)
        return
    files = (path for path in layout.PACKS.rglob("*") if not path.is_symlink())
    size = sum(path.lstat().st_blocks * 512 for path in files)
    why = f"{size / 1e9:.1f} GB; --packs or remove_packs=true takes them along"
    yield Item("keep", "packs", str(layout.PACKS), why)


def names() -> set[Path]:
    """Return the directories of packs, which hold revisions and nothing but a name without."""
    found = set()
    for path in layout.PACKS.iterdir():
        if path.is_dir() and not path.is_symlink():
            entries = [str(entry.relative_to(layout.PACKS)) for entry in path.iterdir()]
            if not entries or any(matches(name, p) for name in entries for p in PACKED):
                found.add(path)
    return found


# Doing it


def run(*command: str) -> str | None:
    """Run a program; return what it says when it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=STOP_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    words = done.stdout.strip().splitlines()
    return None if done.returncode == 0 else (words[-1] if words else f"status {done.returncode}")


def stop(unit: str) -> str | None:
    """Stop a unit, for good."""
    fault = run("systemctl", "stop", unit) if systemd.show(unit, "ActiveState") else None
    if systemd.show(unit, "LoadState").get("LoadState") == "loaded":
        run("systemctl", "disable", "--quiet", unit)
    run("systemctl", "reset-failed", unit)
    for link in wants(unit):
        link.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            link.parent.rmdir()  # what somebody else has in it keeps it
    return fault if fault and systemd.show(unit, "ActiveState") else None


def take_away(item: Item) -> str | None:
    """Remove a file, an empty directory or a tree; never through a link."""
    path = Path(item.name)
    try:
        if item.what == "tree":
            shutil.rmtree(path)
        elif item.what == "directory":
            path.rmdir()
        else:
            path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return None


def end_processes(account: str) -> None:
    """End what still runs as an account that is about to go."""
    uid = pwd.getpwnam(account).pw_uid
    end = time.monotonic() + END_S
    while left := [it.pid for it in processes.read_all() if it.uid == uid]:
        if time.monotonic() > end:
            return
        cgroup.send(left, signal.SIGKILL)
        time.sleep(0.1)


def remove_account(account: str) -> str | None:
    """Remove an account and its group."""
    if accounts.exists(account):
        end_processes(account)
        if fault := run("userdel", account):
            return fault
    return run("groupdel", account) if group(account) else None


def to_root(owners: Iterable[str]) -> None:
    """Give packs that stay to root: the account they belong to goes."""
    uids = {ids[0] for name in owners if (ids := accounts.ids_of(name))}
    for path in (layout.PACKS, *layout.PACKS.rglob("*")):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid in uids:
                os.chown(path, 0, 0, follow_symlinks=False)


def carry_out(items: Iterable[Item]) -> Iterator[tuple[Item, str | None]]:
    """Do it; yield each thing with what went wrong."""
    stale = False  # whether systemd remembers what is not there any more
    for item in items:
        if item.what == "packs":
            to_root(accounts_of(record()))
        if item.do == "keep":
            continue
        if stale and item.name in late():
            run("systemctl", "daemon-reload")
            stale = False
        stale |= item.name not in late()
        if item.do == "stop":
            yield item, stop(item.name)
        elif item.what == "firewall table":
            yield item, run(firewall.NFT, "delete", "table", *item.name.split())
        elif item.what == "account":
            yield item, remove_account(item.name)
        else:
            yield item, take_away(item)
    if stale:
        run("systemctl", "daemon-reload")


def main(argv: list[str]) -> int:
    """List what would go, or take it away: 0 done or nothing to do, 1 something would not go."""
    parser = argparse.ArgumentParser(
        prog="dsv4 remove",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--yes", action="store_true", help="do it; without, only list it")
    parser.add_argument("--packs", action="store_true", help="take the downloaded packs along")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--token", help="the name of the deploy that does this, which has the lock")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        sys.stderr.write("dsv4 remove: only root can; run sudo dsv4 remove\n")
        return 3
    holder = lock.read_holder(layout.LOCK)
    if options.yes and holder is not None and holder.get("token") != options.token:
        sys.stderr.write(
            f"dsv4 remove: a deploy is at work on this machine: {lock.describe(holder)};"
            " wait for it or stop it, then run again\n"
        )
        return 1
    items = plan(packs=options.packs)
    faults: dict[str, str] = {}
    if options.yes and any(item.do != "keep" for item in items):
        with front.alone("remove", layout.WORK_LOCK):
            items = plan(packs=options.packs)  # the command that was waited for made its share
            faults = {item.name: why for item, why in carry_out(items) if why is not None}
    lines = [f"{item}{f': {faults[item.name]}' if item.name in faults else ''}" for item in items]
    pending = [item for item in items if item.do != "keep"]
    if options.json:
        told = {
            "ok": not faults,
            "done": options.yes,
            "pending": len(faults) if options.yes else len(pending),
            "items": [asdict(item) for item in items],
            "faults": faults,
            "lines": lines,
        }
        print(json.dumps(told, ensure_ascii=False))
    else:
        print("\n".join(lines or ["nothing of ours is here"]))
        if pending and not options.yes:
            sys.stderr.write("dsv4 remove: nothing was touched; --yes does it\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
