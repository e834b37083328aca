"""An environment with torch for the processor, beside the cache of sources.

The repository's own environment stays small: only the mathematics of the patches wants torch, and
runs with the interpreter here, in a process of its own. It is made when it is missing, and made
anew when what it should hold changes; a half-made one has no stamp and is thrown away.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.sources.wheels import CACHE

TORCH = "torch==2.13.0"
PACKAGES = ("numpy", "pytest==9.2.0", "regex")


def python() -> Path:
    """Return an interpreter that can import torch and pytest."""
    home = CACHE / "torch"
    wanted = " ".join((TORCH, *PACKAGES, f"{sys.version_info.major}.{sys.version_info.minor}"))
    stamp = home / "stamp"
    interpreter = home / "bin/python"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "torch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return interpreter
        shutil.rmtree(home, ignore_errors=True)
        _run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, str(home))
        install = ("-m", "uv", "pip", "install", "--quiet", f"--python={interpreter}")
        # The registry's torch for this platform is the one for CUDA, of several GB. One for the
        # processor is in a directory of wheels, where there is one, else in torch's own index
        found = _wheel_directories()
        try:
            _run(sys.executable, *install, *found, f"{TORCH}+cpu", *PACKAGES)
        except RuntimeError:
            _run(sys.executable, *install, "--torch-backend=cpu", TORCH, *PACKAGES)
        stamp.write_text(wanted)
    return interpreter


def _wheel_directories() -> list[str]:
    """Return where pip was told to look for wheels; uv asks for the same under another name."""
    return [f"--find-links={place}" for place in os.environ.get("PIP_FIND_LINKS", "").split()]


def _run(*command: str) -> None:
    """Run one command; its words are shown only when it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
