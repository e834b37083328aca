"""Build the guards' own small environment: uv, psutil, huggingface_hub.

It is apart from the engine's runtime, because what watches the engine must not depend on it. A new
one is built beside, proven by importing, and switched to by a rename.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from dsv4 import layout, store, tree

STAMP: Final = "dsv4-lock"
IMPORTS: Final = "import psutil, huggingface_hub, ssl"
KEPT_BEFORE: Final = 1
"""Running guards still execute from the environment before this one."""


def current(tools: Path = layout.TOOLS) -> str | None:
    """Return the hash of the lock the environment in use was made from, None when unusable."""
    try:
        return (tools / STAMP).read_text().strip() if (tools / "bin/python").exists() else None
    except OSError:
        return None


def bundled_pip() -> Path | None:
    """Return the pip wheel that python3-venv brings, to be run as it is; None where there is none.

    An environment that holds no pip of its own is made 5 s sooner, and nobody installs into it by
    accident.
    """
    return max(Path("/usr/share/python-wheels").glob("pip-*.whl"), default=None)


def build(lock: Path, home: Path) -> None:
    """Make a complete environment at `home` from a lock file with hashes."""
    shutil.rmtree(home, ignore_errors=True)
    wheel = bundled_pip()
    make = [sys.executable, "-m", "venv", *(["--without-pip"] if wheel else []), str(home)]
    subprocess.run(make, check=True, stdout=sys.stderr)
    python = str(home / "bin/python")
    install = [python, str(wheel / "pip")] if wheel else [python, "-m", "pip"]
    install += ["install", "--quiet", "--no-input", "--no-deps", "--no-compile"]
    install += ["--disable-pip-version-check", "--require-hashes", "-r", str(lock)]
    subprocess.run(install, check=True, stdout=sys.stderr)
    # Proven by importing, which also compiles what is used
    subprocess.run([python, "-I", "-c", IMPORTS], check=True, stdout=sys.stderr)
    os.sync()  # the stamp must not outlive, in a power cut, what it stands for
    store.write_bytes(home / STAMP, (store.sha256_file(lock) or "").encode() + b"\n")


def main(argv: list[str]) -> int:
    """Build and switch to the environment of a lock file."""
    parser = argparse.ArgumentParser(prog="dsv4 tools", description=__doc__)
    parser.add_argument("--lock", type=Path, default=layout.LOCKS / "tools.lock")
    options = parser.parse_args(argv)
    wanted = store.sha256_file(options.lock)
    if wanted is None:
        sys.stderr.write(f"dsv4 tools: {options.lock} cannot be read\n")
        return 3
    if current() == wanted:
        return 0
    home = layout.ROOT / f"tools-{wanted[:12]}"
    try:
        if not (home / STAMP).exists():
            build(options.lock, home)
        tree.link_to(layout.TOOLS, home.name)
    except (subprocess.CalledProcessError, OSError) as error:
        shutil.rmtree(home, ignore_errors=True)
        sys.stderr.write(f"dsv4 tools: {error}; the first error is above\n")
        return 1
    old = [path for path in layout.ROOT.glob("tools-*") if path.name != home.name]
    for path in sorted(old, key=lambda path: path.stat().st_mtime)[:-KEPT_BEFORE]:
        shutil.rmtree(path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
