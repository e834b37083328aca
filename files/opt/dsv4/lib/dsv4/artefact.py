"""Fetch one file that is known by its hash: from a mirror if there is one, else from its origin.

For what no package index serves: nightly wheels, sources of a commit, wheels an owner built. The
hash is checked before anything looks inside. Where nobody publishes one, `dsv4 artefact` says what
the file's hash is, the deploy pins that, and from then on it is the one that counts.
"""

import argparse
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from dsv4 import layout, store

PIECE: Final = 1 << 20
TRIES: Final = 5
STALL_S: Final = 60.0
GONE: Final = frozenset({403, 404, 410})


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
            full = isinstance(error, OSError) and error.errno is not None
            if attempt == TRIES - 1 or (full and not isinstance(error, urllib.error.URLError)):
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
    key = hashlib.sha256(f"{wanted.location} {wanted.sha256}".encode()).hexdigest()[:16]
    part = root / f".{key}.part"
    tried = []
    for place in places(wanted, mirror):
        try:
            bring(place, part)
        except (Gone, OSError) as error:
            tried.append(f"{place} ({error})")
            continue
        found = store.sha256_file(part) or ""
        if wanted.sha256 not in {None, found}:
            part.unlink()
            raise ArtefactError(
                f"{wanted.filename}: expected sha256 {wanted.sha256}, got {found} from {place};"
                " nothing was unpacked: find out who changed it, or pin the new hash"
            )
        home = root / found[:16]
        home.mkdir(exist_ok=True)
        with part.open("rb") as handle:
            os.fsync(handle.fileno())
        part.chmod(0o644)
        part.replace(home / wanted.filename)
        store.sync_directory(home)
        return home / wanted.filename
    raise ArtefactError(missing(wanted, tried))


def missing(wanted: Wanted, tried: list[str]) -> str:
    """Return what to do about a file that is nowhere."""
    return (
        f"{wanted.name}: {wanted.filename} is not to be had: {'; '.join(tried)}. Put that file into"
        " a directory and name it with wheel_mirror, or take route=stable, which needs no nightly"
        " wheel (nightlies get purged)"
    )


def commit_of(archive: Path) -> str | None:
    """Return the commit that `git archive` wrote into a tar's header, if it did."""
    import tarfile

    try:
        with tarfile.open(archive) as tar:
            found = tar.pax_headers.get("comment", "")
    except (tarfile.TarError, OSError, EOFError):
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
