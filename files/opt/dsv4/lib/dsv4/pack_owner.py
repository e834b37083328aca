"""Give downloaded packs back to the fetcher's user, and have what others owned read again.

A `chown -R` over a parent directory, or a restore by root, leaves packs that the fetcher cannot
mend and that some other user may have written to. Runs as root in front of each fetch. Owner and
mode are put right; a file that was not the fetcher's counts as unverified from then on.

The tree is the fetcher's, who parses what comes from the network: nothing in it may lead root
elsewhere. Files are opened without following links and changed through that descriptor, a file that
has a further name outside the packs is taken out instead of given away, and the records are written
as the fetcher's user.
"""

import argparse
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsv4 import accounts, layout, pack_verify

KEPT: Final = {layout.FETCH_WANTED.name}
"""The deploy's own mark, root's."""


def files_of(packs: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield each file below: its directory, name, and a descriptor of it that the caller may use.

    Directories come as files named `.`; links and what cannot be opened are left out.
    """
    for where, _, names, handle in os.fwalk(packs, follow_symlinks=False):
        yield Path(where), ".", handle
        for name in names:
            if name in KEPT:
                continue
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(name, flags, dir_fd=handle)
            except OSError:
                continue  # a link, or gone: the fetcher replaces it
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    yield Path(where), name, descriptor
            finally:
                os.close(descriptor)


def mend(packs: Path, uid: int, gid: int) -> list[Path]:
    """Give everything below `packs` to one user, and return the files that were not so."""
    inside = Counter(os.fstat(descriptor).st_ino for _, _, descriptor in files_of(packs))
    mended = []
    for where, name, descriptor in files_of(packs):
        found = os.fstat(descriptor)
        foreign = (found.st_uid, found.st_gid) != (uid, gid)
        is_file = name != "."
        if foreign and is_file and found.st_nlink > inside[found.st_ino]:
            (where / name).unlink()
            mended.append(where / name)
            continue
        if foreign:
            os.fchown(descriptor, uid, gid)
        wrong = found.st_mode & 0o022 or found.st_mode & 0o444 != 0o444
        if wrong or (not is_file and found.st_mode & 0o111 != 0o111):
            os.fchmod(descriptor, 0o644 if is_file else 0o755)
        if is_file and (foreign or wrong):
            mended.append(where / name)
    return sorted(mended)


def by_pack(packs: Path, mended: list[Path]) -> dict[Path, list[str]]:
    """Return the files of each revision's directory, by their names in it."""
    found: dict[Path, list[str]] = {}
    for path in mended:
        parts = path.relative_to(packs).parts
        if len(parts) > 2:
            root = packs.joinpath(*parts[:2])
            found.setdefault(root, []).append(str(path.relative_to(root)))
    return found


def main(argv: list[str]) -> int:
    """Put every downloaded pack right."""
    parser = argparse.ArgumentParser(prog="dsv4 pack_owner", description=__doc__)
    parser.add_argument("--packs", type=Path, default=layout.PACKS)
    parser.add_argument("--user", default=layout.USER_FETCH)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    ids = accounts.ids_of(options.user)
    if ids is None:
        sys.stderr.write(f"dsv4 pack_owner: there is no user {options.user}; deploy first\n")
        return 3
    try:
        mended = by_pack(options.packs, mend(options.packs, *ids)) if options.packs.is_dir() else {}
        accounts.become(*ids)
        for root, names in mended.items():
            pack_verify.doubt(root, names)
    except OSError as error:
        sys.stderr.write(f"dsv4 pack_owner: {error}\n")
        return 3
    for root, names in mended.items():
        sys.stderr.write(
            f"dsv4 pack_owner: {root}: {pack_verify.names(names)} were not {options.user}'s alone;"
            " put right, and to be verified again\n"
        )
    if options.json:
        print(json.dumps({"ok": True, "mended": {str(k): v for k, v in mended.items()}}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
