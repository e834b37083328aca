"""Give downloaded packs back to the fetcher's user, and have what others owned read again.

A `chown -R` over a parent directory, or a restore by root, leaves packs that the fetcher cannot
mend and that some other user may have written to. Runs as root in front of each fetch. Owner and
mode are put right; a file that was not the fetcher's counts as unverified from then on.
"""

import argparse
import json
import os
import pwd
import stat
import sys
from pathlib import Path

from dsv4 import layout, pack_verify


def mend(directory: Path, uid: int, gid: int) -> list[str]:
    """Give everything below a directory to one user, and return the files that were not so.

    Every file is opened without following a link and changed through that descriptor: the user it
    goes to may be renaming things here meanwhile.
    """
    mended = []
    for where, folders, names, handle in os.fwalk(directory, follow_symlinks=False):
        base = Path(where).relative_to(directory)
        for name in (*folders, *names):
            try:
                descriptor = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle
                )
            except OSError:
                continue  # a link, or gone: the fetcher replaces it
            try:
                if _put_right(descriptor, uid, gid) and name in names:
                    mended.append(str(base / name))
            finally:
                os.close(descriptor)
        _put_right(handle, uid, gid)
    return sorted(mended)


def _put_right(descriptor: int, uid: int, gid: int) -> bool:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return False
    wrong = (found.st_uid, found.st_gid) != (uid, gid)
    if wrong:
        os.fchown(descriptor, uid, gid)
    mode = 0o755 if stat.S_ISDIR(found.st_mode) else 0o644
    if stat.S_IMODE(found.st_mode) & 0o022 or stat.S_IMODE(found.st_mode) & 0o444 != 0o444:
        os.fchmod(descriptor, mode)
        wrong = True
    return wrong


def main(argv: list[str]) -> int:
    """Put every downloaded pack right."""
    parser = argparse.ArgumentParser(prog="dsv4 pack_owner", description=__doc__)
    parser.add_argument("--packs", type=Path, default=layout.PACKS)
    parser.add_argument("--user", default=layout.USER_FETCH)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        account = pwd.getpwnam(options.user)
    except KeyError:
        sys.stderr.write(f"dsv4 pack_owner: there is no user {options.user}; deploy first\n")
        return 3
    uid, gid = account.pw_uid, account.pw_gid
    mended: dict[str, list[str]] = {}
    try:
        for pack in sorted(options.packs.glob("*/")):
            _put_right_path(pack, uid, gid)
            for root in sorted(pack.glob("*/")):
                if names := mend(root, uid, gid):
                    mended[str(root)] = names
                    pack_verify.doubt(root, names)
            for record in pack.glob("*.json"):
                _put_right_path(record, uid, gid)
    except OSError as error:
        sys.stderr.write(f"dsv4 pack_owner: {error}\n")
        return 3
    for where, names in mended.items():
        sys.stderr.write(
            f"dsv4 pack_owner: {where}: {pack_verify.names(names)} were not {options.user}'s alone;"
            " put right, and to be verified again\n"
        )
    if options.json:
        print(json.dumps({"ok": True, "mended": mended}))
    return 0


def _put_right_path(path: Path, uid: int, gid: int) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _put_right(descriptor, uid, gid)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
