"""Create the system accounts our processes run as.

No home is made and no login is possible. Supplementary groups are those the machine has: `video`
and `render` give access to the GPU's device files on a Spark and may be missing elsewhere.
"""

import argparse
import grp
import os
import pwd
import subprocess
import sys

from dsv4 import tree


def groups_of(user: str) -> list[str]:
    """Return the supplementary groups of an account, sorted."""
    return sorted(group.gr_name for group in grp.getgrall() if user in group.gr_mem)


def ids_of(user: str) -> tuple[int, int] | None:
    """Return an account's user and group number, None when there is no such account."""
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        return None
    return found.pw_uid, found.pw_gid


def become(uid: int, gid: int) -> None:
    """Go on as another user for good, when this is root.

    What follows works in a tree of that user's, where a name may lead anywhere.
    """
    if os.geteuid() == 0 and uid != 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)


def exists(user: str) -> bool:
    """Say whether there is such an account."""
    return ids_of(user) is not None


def present(groups: list[str]) -> list[str]:
    """Return those of the groups that this machine has."""
    names = {group.gr_name for group in grp.getgrall()}
    return [group for group in groups if group in names]


def main(argv: list[str]) -> int:
    """Make each USER[:GROUP,GROUP…] as asked for."""
    parser = argparse.ArgumentParser(prog="dsv4 accounts", description=__doc__)
    parser.add_argument("accounts", nargs="+", metavar="USER[:GROUP,…]")
    options = parser.parse_args(argv)
    for account in options.accounts:
        user, _, wanted = account.partition(":")
        if not exists(user):
            tree.note("users", {user: {"step": "base"}})
            command = ["useradd", "--system", "--user-group", "--no-create-home"]
            command += ["--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", user]
            if (status := _run(command)) != 0:
                return status
        missing = sorted(set(present(wanted.split(","))) - set(groups_of(user)))
        if missing and (status := _run(["usermod", "-a", "-G", ",".join(missing), user])) != 0:
            return status
    return 0


def _run(command: list[str]) -> int:
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.stderr.write(f"dsv4 accounts: {' '.join(command)} ended with {done.returncode}\n")
    return 1 if done.returncode else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
