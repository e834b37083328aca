"""Fetch one file that is known by its hash: from a mirror if there is one, else from its origin.

For what no package index serves: nightly wheels, sources of a commit, wheels an owner built. The
hash is checked before anything looks inside. Where nobody publishes one, `dsv4 artefact` says what
the file's hash is, the deploy pins that, and from then on it is the one that counts.
"""

import argparse
import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from dsv4 import layout, store

PIECE: Final = 1 << 20
TRIES: Final = 5
STALL_S: Final = 60.0
GONE: Final = frozenset({403, 404, 410})
OURS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""Errors of the disk that is written to, which no other place and no patience mends."""


class ArtefactError(Exception):
    """The file is not to be had, or is another one; the text says which and what to do."""


class Gone(Exception):
    """A location answers that it has no such file."""


@dataclass(frozen=True)
class Wanted:
    """One file: where it is published, and what it must be."""

    name: str
    location: str
    """An address, or a path on this machine."""
    sha256: str | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Wanted":
        """Read one from a description."""
        return cls(str(value["name"]), str(value["location"]), value.get("sha256"))

    @property
    def filename(self) -> str:
        """The file's own name; an address writes `+` as %2B."""
        return unquote(Path(urlsplit(self.location).path).name) or self.name


def places(wanted: Wanted, mirror: str | None) -> list[str]:
    """Return where to look, in order; a file on this machine has no mirror."""
    if mirror is None or not is_address(wanted.location):
        return [wanted.location]
    quoted = wanted.filename.replace("+", "%2B") if is_address(mirror) else wanted.filename
    return [f"{mirror.rstrip('/')}/{quoted}", wanted.location]


def is_address(place: str) -> bool:
    """Say whether a place is on the network."""
    return place.startswith(("http://", "https://"))


def cause(error: BaseException) -> str:
    """Return the innermost cause in words; the outer ones only say that it failed."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return cause(reason)
    return str(reason or error) or type(error).__name__


def copy(place: str, part: Path) -> None:
    """Have the file at a place whole at `part`, going on from what is there.

    Raises `Gone`, or OSError for what may be better in a moment.
    """
    if not is_address(place):
        try:
            with Path(place).open("rb") as source, part.open("wb") as target:
                shutil.copyfileobj(source, target, PIECE)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise Gone(error.strerror) from None
        return
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(place, headers={"Accept-Encoding": "identity"})  # noqa: S310
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=STALL_S)  # noqa: S310 - http(s) only
    except urllib.error.HTTPError as error:
        if error.code == 416:  # it ends where we are, or is another file: the hash tells
            part.unlink()
            raise OSError("the file there is shorter than what we have of it") from None
        if error.code in GONE:
            raise Gone(f"the server answered {error.code}") from None
        raise
    with answer, part.open("ab" if answer.status == 206 else "wb") as target:
        expected = answer.headers.get("Content-Length")
        count = 0
        while piece := answer.read(PIECE):
            target.write(piece)
            count += len(piece)
        if expected is not None and count != int(expected):
            raise OSError(f"cut off after {count} of {expected} bytes")


def bring(place: str, part: Path) -> None:
    """Copy with some patience; raises `Gone` or the last OSError."""
    for attempt in range(TRIES):
        try:
            copy(place, part)
            return
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in OURS:
                raise
            if attempt == TRIES - 1:
                raise OSError(cause(error)) from error
            time.sleep(0.5 * 2**attempt)


def fetch(wanted: Wanted, mirror: str | None = None, root: Path | None = None) -> Path:
    """Return the file on disk, its hash checked; without a known hash the one it has counts."""
    # One directory a hash, because the name of a wheel must stay what it is
    root = layout.WHEELS / "sources" if root is None else root
    if wanted.sha256:
        kept = root / wanted.sha256[:16] / wanted.filename
        if store.sha256_file(kept) == wanted.sha256:
            return kept
    root.mkdir(parents=True, exist_ok=True)
    tried = []
    for place in places(wanted, mirror):
        part = part_of(wanted, place, root)
        try:
            found = arrived(wanted, place, part)
        except (Gone, OSError) as error:
            if isinstance(error, OSError) and error.errno in OURS:
                raise ArtefactError(
                    f"{wanted.filename}: cannot be written below {root} ({error.strerror}); make"
                    " room and run the deploy again, which goes on where this ended"
                ) from error
            tried.append(f"{place} ({error})")
            continue
        home = root / found[:16]
        home.mkdir(exist_ok=True)
        with part.open("rb") as handle:
            os.fsync(handle.fileno())
        part.chmod(0o644)
        part.replace(home / wanted.filename)
        store.sync_directory(home)
        for other in places(wanted, mirror):
            part_of(wanted, other, root).unlink(missing_ok=True)
        return home / wanted.filename
    raise ArtefactError(missing(wanted, tried))


def part_of(wanted: Wanted, place: str, root: Path) -> Path:
    """Return where a file grows; each place has its own, or two files would become one."""
    key = hashlib.sha256(f"{place} {wanted.sha256}".encode()).hexdigest()[:16]
    return root / f".{key}.part"


def arrived(wanted: Wanted, place: str, part: Path) -> str:
    """Have the file of a place whole at `part` and return its hash, which is the one wanted.

    Raises ArtefactError for another file, `Gone` or OSError for none.
    """
    if wanted.sha256 is None:
        part.unlink(missing_ok=True)  # nobody could tell two halves of two files from one
    begun = part.exists()
    bring(place, part)
    found = store.sha256_file(part) or ""
    if begun and found != wanted.sha256:
        # What was there may be of a power cut, or of a file that was replaced since
        part.unlink()
        bring(place, part)
        found = store.sha256_file(part) or ""
    fault = what_it_is(part, wanted.filename) if found != wanted.sha256 else ""
    if wanted.sha256 not in {None, found}:
        part.unlink()
        raise ArtefactError(
            f"{wanted.filename}: expected sha256 {wanted.sha256}, got {found} from {place}"
            f"{f' ({fault})' if fault else ''};"
            " nothing was unpacked: find out who changed it, or pin the new hash"
        )
    if fault:
        part.unlink()
        raise ArtefactError(
            f"{wanted.filename}: what {place} sends {fault}; nothing was pinned: see that the"
            " machine reaches it without a login page, then run the deploy again"
        )
    return found


def what_it_is(file: Path, filename: str) -> str:
    """Return why a file is not what its name says; empty when it can be read to its end."""
    with file.open("rb") as handle:
        begin = handle.read(512).lstrip().lower()
    if begin.startswith((b"<!doctype html", b"<html")):
        return "is a web page"
    if filename.endswith(".whl"):
        return "" if zipfile.is_zipfile(file) else "is no whole wheel"
    if filename.endswith((".tar.gz", ".tgz")):
        try:
            with tarfile.open(file) as tar:
                tar.getmembers()
        except (tarfile.TarError, OSError, EOFError, zlib.error):
            return "is no whole archive"
    return ""


def missing(wanted: Wanted, tried: list[str]) -> str:
    """Return what to do about a file that is nowhere."""
    return (
        f"{wanted.name}: {wanted.filename} is not to be had: {'; '.join(tried)}. Put that file into"
        " a directory and name it with wheel_mirror, or take route=stable, which needs no nightly"
        " wheel (nightlies get purged)"
    )


def commit_of(archive: Path) -> str | None:
    """Return the commit that `git archive` wrote into a tar's header, if it did."""
    try:
        with tarfile.open(archive) as tar:
            found = tar.pax_headers.get("comment", "")
    except (tarfile.TarError, OSError, EOFError, zlib.error):
        return None
    return found if re.fullmatch("[0-9a-f]{40}", found) else None


def main(argv: list[str]) -> int:
    """Fetch a file and print its hash, for the deploy to pin."""
    parser = argparse.ArgumentParser(prog="dsv4 artefact", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("location", help="an address, or a path on this machine")
    parser.add_argument("--mirror", help="a directory or address to try first")
    parser.add_argument("--json", action="store_true", help="accepted; the output is always JSON")
    options = parser.parse_args(argv)
    try:
        path = fetch(Wanted(options.name, options.location), options.mirror)
    except (ArtefactError, OSError) as error:
        sys.stderr.write(f"dsv4 artefact: {error}\n")
        return 1
    found = store.sha256_file(path)
    json.dump({"ok": True, "path": str(path), "sha256": found}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
