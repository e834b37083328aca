"""Fill an environment with uv: exactly what a lock says, or one wheel, each copied and checked.

Files are copied, not linked: uv's hard links share their bytes with its cache, so that an edit in
one runtime would reach every later one.
"""

import http.client
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dsv4 import artefact, layout, store, tools

UV: Final = (str(layout.TOOLS / "bin/uv"), "--cache-dir", str(layout.UV_CACHE))
KEPT_LINES: Final = 400
"""What is kept of a command's output, to say in one line why it failed."""


class InstallError(Exception):
    """A package cannot be installed; the text says which and what to do."""


def call(
    command: Sequence[str],
    what: str,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> None:
    """Run one command with its output in the journal; its failure is ours, in one line."""
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=directory,
    ) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if running.returncode:
        raise InstallError(explain(lines, what, running.returncode))


def explain(lines: Iterable[str], what: str, status: int) -> str:
    """Return why a command failed: what it printed, in our words where we know it."""
    text = "\n".join(lines)
    mismatch = re.search(
        r"Hash mismatch for `(?P<name>[^`]+)`\s+Expected:\s+(?P<expected>[^C]+?)\s+Computed:\s+"
        r"(?P<computed>\S+)",
        text,
    )
    mismatch = mismatch or re.search(
        r"(?P<name>\S+==\S+) from [^\n]*\n\s+Expected (?P<expected>sha256 \S+)\s+Got +"
        r"(?P<computed>\S+)",
        text,
    )
    if mismatch:
        expected = " or ".join(mismatch["expected"].split())
        return (
            f"{mismatch['name']}: expected {expected}, got {mismatch['computed']}; nothing of it"
            " was unpacked: whoever serves it changed it, or the lock is wrong"
        )
    if re.search(r"No space left on device|os error 28\b|Errno 28\b", text):
        return f"{what} failed: no space left on the disk; make room and run the deploy again"
    reason = [
        line.strip().removeprefix("error: ").removeprefix("cause: ")
        for line in text.splitlines()
        if line.strip().startswith(("error: ", "cause: "))
    ]
    shown = f": {reason[0]}" + (f" ({reason[-1]})" if len(reason) > 1 else "") if reason else ""
    return (
        f"{what} failed with status {status}{shown}; the first error is in journalctl -u"
        f" {layout.UNIT_BUILD}"
    )


def create(home: Path, python: str) -> None:
    """Make an empty environment."""
    call(
        [*UV, "venv", "--quiet", "--no-python-downloads", "--python", python, str(home)],
        f"creating a Python {python} environment",
    )


def has_torch(mirror: str | None, lock: str) -> bool:
    """Say whether the wheel directory holds the very torch the lock asks for."""
    pinned = [line.split()[0] for line in lock.splitlines() if line.startswith("torch==")]
    if mirror is None or not pinned:
        return False
    version = pinned[0].removeprefix("torch==")
    return any(Path(mirror).glob(f"torch-{version}-*.whl"))


def can_be_listed(mirror: str) -> bool:
    """Say whether uv can see what a mirror holds; one it cannot read stops it altogether.

    One that is down, or hands out files by name only, still has its turn for what no index has.
    """
    try:
        if artefact.is_address(mirror):
            with urllib.request.urlopen(mirror, timeout=artefact.STALL_S):  # noqa: S310 - http(s)
                return True
        os.scandir(mirror).close()
    except (OSError, http.client.HTTPException) as error:
        print(
            f"dsv4 build: note: wheel_mirror {mirror} has no list of its files"
            f" ({artefact.cause(error)}); the locked packages come from their index",
            flush=True,
        )
        return False
    return True


def locked_command(
    spec: dict[str, Any], home: Path, lock: str, directories: Iterable[Path] = ()
) -> list[str]:
    """Return the uv call that fills an environment with exactly what the lock says.

    `directories` hold wheels that no index has.
    """
    command = [*UV, "pip", "sync", "--require-hashes"]
    command += ["--link-mode", "copy", "--no-progress"]
    # A lock has the hashes of sources too; nothing is compiled that a wheel was meant for
    command += ["--only-binary", ":all:"]
    command += [] if spec.get("compile_only") else ["--compile-bytecode"]
    command += ["--python", str(home / "bin/python")]
    mirror = spec.get("wheel_mirror")
    listed = [mirror] if mirror and can_be_listed(mirror) else []
    for place in [*directories, *listed]:
        command += ["--find-links", str(place)]
    if spec.get("torch_backend") and not has_torch(mirror, lock):
        command += ["--torch-backend", spec["torch_backend"]]
    return [*command, spec["lock"]]


def wheel_command(home: Path, wheel: Path) -> list[str]:
    """Return the uv call that puts one wheel in, in place of what has its name, and no other."""
    command = [*UV, "pip", "install", "--no-deps", "--no-index", "--reinstall", "--no-cache"]
    command += ["--link-mode", "copy", "--no-progress", "--compile-bytecode"]
    return [*command, "--python", str(home / "bin/python"), str(wheel)]


UNMET: Final = re.compile(r"The package `(?P<name>[^`]+)` requires `(?P<wants>[^`]+)`, but (.+)")


def unmet(home: Path, names: Iterable[str]) -> list[str]:
    """Return what packages ask for that is not there, or there in another version.

    Of those named only: a lock overrides what its own packages ask for where they are wrong.
    """
    command = [*UV, "pip", "check", "--python", str(home / "bin/python")]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wanted = {normal(name) for name in names}
    found = UNMET.finditer(f"{done.stdout}\n{done.stderr}")
    return [
        f"{it['name']} asks for {it['wants']}: {it[3].strip().replace('`', '')}"
        for it in found
        if normal(it["name"]) in wanted
    ]


def normal(name: str) -> str:
    """Return a distribution's name in the one form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(name: str, version: str, sha256: str, mirror: str | None, into: Path) -> Path:
    """Return a wheel as an index has it, whole, by its hash: uv keeps only what it unpacked."""
    home = into / sha256[:16]
    kept = next(iter(sorted(home.glob("*.whl"))), None) if home.is_dir() else None
    if kept is not None and store.sha256_file(kept) == sha256:
        return kept
    for own in Path(mirror).glob(f"{name}-{version}-*.whl") if mirror else ():
        if store.sha256_file(own) == sha256:
            home.mkdir(parents=True, exist_ok=True)
            return Path(shutil.copy2(own, home))
    pip = tools.bundled_pip()
    if pip is None:
        raise InstallError("no pip is there to download with; install python3-venv")
    shutil.rmtree(home, ignore_errors=True)
    part = into / f".{sha256[:16]}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    wanted = part / "wanted.txt"
    wanted.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
    command = [sys.executable, str(pip / "pip"), "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--require-hashes"]
    command += ["--find-links", mirror] if mirror else []
    call([*command, "--dest", str(part), "-r", str(wanted)], f"downloading {name} {version}")
    wanted.unlink()
    part.rename(home)
    return next(iter(sorted(home.glob("*.whl"))))


def purge(names: Iterable[str]) -> None:
    """Have uv forget packages, so that the next install brings their bytes anew."""
    wanted = sorted(set(names))
    if wanted:
        call([*UV, "cache", "clean", "--quiet", *wanted], f"purging {', '.join(wanted)}")
