"""Lock files: every package of an environment by version and hash, made by one command.

    python -m deploy.locks [--upgrade] [NAME...]     # tools, or a route; all of them without names
    python -m deploy.locks nightly --from-wheel [PLACE]

Reads `NAME.in` and, if there is one, `NAME.overrides` under files/opt/dsv4/locks, and writes
`NAME.lock` there with uv. Versions already in a lock are kept unless `--upgrade` is given. Indexes
are the machine's own and leave no trace in the lock.

An engine that no index has is in its lock by the hash that its route gives. What it asks for is
written to `NAME.in` by `--from-wheel`, once, where its wheel can be had: PLACE is a path or an
address, the route's own if left out. Until then a release of the engine in `NAME.in` stands in.
"""

import argparse
import email.parser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy import layout, routes
from dsv4 import artefact, store

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
    engine: routes.Source | None = None
    """The engine, where no index has it."""

    def path(self, suffix: str) -> Path:
        """Return one of its files."""
        return layout.LOCAL_LOCKS / f"{self.name}.{suffix}"

    def stand_in(self) -> str | None:
        """Return the release whose requirements are taken for the engine's, if any is."""
        if self.engine is None:
            return None
        pin = rf"^{re.escape(self.engine.name)}==(\S+)$"
        match = re.search(pin, self.path("in").read_text(), re.MULTILINE)
        return match and match[1]


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
    locks = [TOOLS]
    for it in routes.ALL:
        engine = it.engine if it.engine.location else None
        locks.append(Lock(it.name, it.python, it.platform, it.torch_backend, engine))
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
    text = (
        f"# {lock.name}: every package by hash, Python {lock.python}, {where}.\n"
        f"# Made from {lock.name}.in by: python -m deploy.locks {lock.name}\n"
    )
    if lock.engine is None:
        return text
    release = lock.stand_in()
    if release is None:
        return f"{text}# What {lock.engine.name} asks for was read from its wheel.\n"
    return (
        f"{text}# PROVISIONAL. Only the engine itself, {lock.engine.name} {lock.engine.version}, is"
        f" certain.\n# Nobody has read what its wheel asks for; the rest is what release {release}"
        f" asks for.\n# Have its own, where the wheel can be had:"
        f" python -m deploy.locks {lock.name} --from-wheel\n"
    )


def with_engine(text: str, engine: routes.Source) -> str:
    """Return a lock with the engine in it by hash, in the place of its stand-in if there is one."""
    packages = re.split(r"\n(?=\S)", text.strip())
    own = f"{engine.name}=={engine.version} \\\n    --hash=sha256:{engine.sha256}"
    found = {package.partition("==")[0]: package for package in packages}
    return "\n".join(package for _, package in sorted({**found, engine.name: own}.items())) + "\n"


METADATA: Final = re.compile(r"[^/]+\.dist-info/METADATA")


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel asks for; what only its extras want is left out."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            named = [it for it in archive.namelist() if METADATA.fullmatch(it)]
            text = archive.read(named[0]).decode()
    except (zipfile.BadZipFile, IndexError, UnicodeDecodeError) as error:
        raise LockError(f"{wheel.name}: is not a wheel ({error})") from None
    asked = email.parser.HeaderParser().parsestr(text).get_all("Requires-Dist", [])
    wanted = [line for line in asked if not re.search(r"\bextra\b", line.partition(";")[2])]
    if not wanted:
        raise LockError(f"{wheel.name}: its metadata asks for nothing, which no engine does")
    return wanted


def read_engine(engine: routes.Source, place: str) -> list[str]:
    """Return what the engine asks for; its wheel's hash is checked before anything is read."""
    wanted = artefact.Wanted(engine.name, place or str(engine.location), engine.sha256)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return requirements(artefact.fetch(wanted, root=Path(scratch)))
        except (artefact.ArtefactError, OSError) as error:
            raise LockError(str(error)) from None


def from_wheel(lock: Lock, place: str) -> None:
    """Write the `.in` file anew, from the engine's wheel."""
    engine = lock.engine
    if engine is None:
        raise LockError(f"{lock.name}: an index has its engine; leave out --from-wheel")
    lines = [
        f"# What route {lock.name} asks for beside its engine, which no package registry has. From",
        f"# {engine.filename},",
        f"# sha256 {engine.sha256}.",
        *read_engine(engine, place),
        "-r spark.in",
    ]
    store.write_bytes(lock.path("in"), ("\n".join(lines) + "\n").encode())


def command(
    lock: Lock, uv: str, out: Path, wheels: str | None, *, overrides: bool, upgrade: bool
) -> list[str]:
    """Return the uv call. Local wheels, where they hold the right torch, go before its index."""
    words = [uv, "pip", "compile", "--quiet", "--no-python-downloads", "--generate-hashes"]
    words += ["--no-header", "--no-annotate"]
    words += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", lock.python]
    # A package without a wheel for the machine would be built there, unseen until then
    words += ["--only-binary", ":all:"]
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


def resolve(lock: Lock, *, upgrade: bool = False) -> str:
    """Return the lock as it has to be."""
    if lock.engine is not None and lock.stand_in() is None:
        asked = lock.path("in").read_text()
        if str(lock.engine.sha256) not in asked:
            raise LockError(
                f"{lock.name}: {lock.name}.in was not read from the wheel that the route names,"
                f" sha256 {lock.engine.sha256}; run python -m deploy.locks {lock.name} --from-wheel"
            )
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
        text = out.read_text()
    if lock.engine is not None:
        text = with_engine(text, lock.engine)
    parse(text)
    return header(lock) + text


def make(lock: Lock, *, upgrade: bool = False, wheel: str | None = None) -> None:
    """Write one lock; when it cannot be made, what it is made from stays as it was."""
    before = lock.path("in").read_bytes()
    try:
        if wheel is not None:
            from_wheel(lock, wheel)
        text = resolve(lock, upgrade=upgrade)
    except BaseException:
        if lock.path("in").read_bytes() != before:
            store.write_bytes(lock.path("in"), before)
        raise
    store.write_bytes(lock.path("lock"), text.encode())


def main(argv: Sequence[str]) -> int:
    """Make the named locks."""
    parser = argparse.ArgumentParser(prog="python -m deploy.locks", description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take newer versions")
    parser.add_argument(
        "--from-wheel",
        nargs="?",
        const="",
        metavar="PLACE",
        help="read what the engine asks for from its wheel first",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="tools, or a route")
    options = parser.parse_args(argv)
    if options.from_wheel is not None and len(options.names) != 1:
        parser.error("--from-wheel takes one route")
    locks = known()
    for name in options.names or locks:
        try:
            if name not in locks:
                raise LockError(f"{name}: there is no {name}.in; there is: {', '.join(locks)}")
            make(locks[name], upgrade=options.upgrade, wheel=options.from_wheel)
        except LockError as error:
            sys.stderr.write(f"locks: {error}\n")
            return 1
        sys.stderr.write(f"locks: wrote {locks[name].path('lock').relative_to(layout.REPO)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
