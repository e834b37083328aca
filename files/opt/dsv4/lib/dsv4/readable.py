"""Say what a user cannot read, and which part of a path is in the way.

The engine's message for a shard it may not read is "No such file". A pack in a home directory or in
a Hub cache is behind directories that are closed to others, and its files may be links into more.
"""

import json
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

LINKS: Final = 40
"""As many as the kernel follows."""


def obstacle(path: Path) -> str | None:
    """Return what keeps this process from reading a file: the first part of the way that is closed.

    The way is gone step by step, links included, and at each step the kernel is asked, so that
    lists of access rights count too.
    """
    at, todo, links = Path("/"), [*path.absolute().parts[1:]], 0
    while todo:
        if not os.access(at, os.X_OK):
            return f"{at} may not be entered ({described(at)})"
        part = todo.pop(0)
        if part == "..":
            at = at.parent
            continue
        step = at / part
        if step.is_symlink():
            target, links = step.readlink(), links + 1
            if links > LINKS:
                return f"{path} is a link in a circle"
            at = Path("/") if target.is_absolute() else at
            todo = [*(one for one in target.parts if one != "/"), *todo]
        elif not os.path.lexists(step):
            return f"{step} is not there"
        else:
            at = step
    return None if os.access(at, os.R_OK) else f"{at} may not be read ({described(at)})"


def described(path: Path) -> str:
    """Return a file's mode and owner as `ls` shows them."""
    found = path.stat()
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    return f"{stat.filemode(found.st_mode)}, {owner}'s"


def as_user(user: str, paths: Iterable[Path]) -> str | None:
    """Return the first obstacle for a user, asked in a process that has become that user; as root.

    None when there is none, when there is no such user yet, or when this is not root.
    """
    if os.geteuid() != 0:
        return None
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.initgroups(user, account.pw_gid)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            found = next((text for path in paths if (text := obstacle(path))), None)
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    answered: str | None = json.loads(data) if data else f"{user}: it cannot be told"
    return answered
