"""Lock files: every package of an environment by version and hash, made by one command.

    python -m deploy.locks [--upgrade] [NAME...]     # tools, or a route; all of them without names

Reads `NAME.in` and, if there is one, `NAME.overrides` under files/opt/dsv4/locks, and writes
`NAME.lock` there with uv. Versions already in a lock are kept unless `--upgrade` is given. Indexes
are the machine's own and leave no trace in the lock.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy import layout, routes
from dsv4 import store

UV: Final = "0.13.9"


class LockError(Exception):
    """A lock cannot be made or read; the text says what to do."""


@dataclass(frozen=True)
class Lock:
    """What one lock is made for; without a platform it is for all of them."""

    name: str
    python: str
    platform: str | None = None
    torch_backend: str | None = None

    def path(self, suffix: str) -> Path:
        """Return one of its files."""
        return layout.LOCAL_LOCKS / f"{self.name}.{suffix}"


@dataclass(frozen=True)
class Requirement:
    """One locked package."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


TOOLS: Final = Lock("tools", python="3.11")
"""For the Pythons of all our machines: 3.11 and later, x86-64 and aarch64."""


def known() -> dict[str, Lock]:
    """Return the locks by name: the tools' and one for each route that says what it asks for."""
    locks = [
        TOOLS,
        *(Lock(it.name, it.python, it.platform, it.torch_backend) for it in routes.ALL),
    ]
    return {lock.name: lock for lock in locks if lock.path("in").is_file()}


LINE: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!]+)"
    r"(?: ; (?P<marker>[^\\]*?))?(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})*)"
)


def parse(text: str) -> list[Requirement]:
    """Return what a lock installs; raise `LockError` for anything that is not pinned by hash."""
    found = []
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise LockError(f"not a pinned requirement: {line[:80]}")
        hashes = tuple(re.findall(r"[0-9a-f]{64}", match["hashes"]))
        if not hashes:
            raise LockError(f"{match['name']} has no hash")
        found.append(Requirement(match["name"], match["version"], match["marker"] or "", hashes))
    if not found:
        raise LockError("it is empty")
    return found


def header(lock: Lock) -> str:
    """Return the comment on top of a lock."""
    where = lock.platform or "every platform"
    return (
        f"# {lock.name}: every package by hash, Python {lock.python}, {where}.\n"
        f"# Made from {lock.name}.in by: python -m deploy.locks {lock.name}\n"
    )


def command(
    lock: Lock, uv: str, out: Path, wheels: str | None, *, overrides: bool, upgrade: bool
) -> list[str]:
    """Return the uv call. Local wheels, where they hold the right torch, go before its index."""
    words = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
    words += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", lock.python]
    words += ["--python-platform", lock.platform] if lock.platform else ["--universal"]
    if overrides:
        words += ["--overrides", str(lock.path("overrides"))]
    if wheels is not None:
        words += ["--find-links", wheels]
    elif lock.torch_backend:
        words += ["--torch-backend", lock.torch_backend]
    if upgrade:
        words.append("--upgrade")
    return [*words, "--output-file", str(out), str(lock.path("in"))]


def find_uv() -> str:
    """Return uv: the one beside this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise LockError(f"uv is not there; install it: {sys.executable} -m pip install uv=={UV}")
    return found


def wheel_directories() -> list[str]:
    """Return the wheel directories that pip is told to look at on this machine."""
    text = os.environ.get("PIP_FIND_LINKS", "")
    if not text:
        asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
        text = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return [word for word in text.split() if Path(word).is_dir()]


def wheels_for(lock: Lock, directories: Sequence[str]) -> str | None:
    """Return the directory that holds the torch a lock asks for, if there is one."""
    match = re.search(r"^torch==(\S+)$", lock.path("in").read_text(), re.MULTILINE)
    if match is None:
        return None
    wanted = f"torch-{match[1]}-*.whl"
    return next((name for name in directories if any(Path(name).glob(wanted))), None)


def make(lock: Lock, *, upgrade: bool) -> None:
    """Write one lock, checked."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "lock"
        if lock.path("lock").is_file():
            out.write_bytes(lock.path("lock").read_bytes())
        words = command(
            lock,
            find_uv(),
            out,
            wheels_for(lock, wheel_directories()),
            overrides=lock.path("overrides").is_file(),
            upgrade=upgrade,
        )
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LockError(f"{lock.name}: uv gave up: {done.stderr.strip()}")
        text = header(lock) + out.read_text()
    parse(text)
    store.write_bytes(lock.path("lock"), text.encode())


def main(argv: Sequence[str]) -> int:
    """Make the named locks."""
    parser = argparse.ArgumentParser(prog="python -m deploy.locks", description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take newer versions")
    parser.add_argument("names", nargs="*", metavar="NAME", help="tools, or a route")
    options = parser.parse_args(argv)
    locks = known()
    for name in options.names or locks:
        try:
            if name not in locks:
                raise LockError(f"{name}: there is no {name}.in; there is: {', '.join(locks)}")
            make(locks[name], upgrade=options.upgrade)
        except LockError as error:
            sys.stderr.write(f"locks: {error}\n")
            return 1
        sys.stderr.write(f"locks: wrote {locks[name].path('lock').relative_to(layout.REPO)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
