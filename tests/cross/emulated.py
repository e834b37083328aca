"""A Python for aarch64 with torch, which runs here under emulation.

Its interpreter and C library come from Debian, unpacked and not installed, torch and what it loads
from the registry, by the hashes in a route's lock. Programs that it starts are this machine's own,
so the extension's build calls the real compilers from within it.

Debian 12's Python is 3.11. A Spark's runtime has 3.12, and a wheel is for one of them: to make one
for a Spark, name an aarch64 CPython 3.12 with DSV4_CROSS_PYTHON (its `bin/python3.12`), as
`uv python install cpython-3.12-linux-aarch64-gnu --install-dir DIRECTORY` brings it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy import layout, locks
from tests.lab import image
from tests.sources.wheels import CACHE

QEMU = "qemu-aarch64-static"
SUITE = "bookworm"
DEBIAN_PYTHON = "3.11"
DEBIAN = (f"python{DEBIAN_PYTHON}", f"libpython{DEBIAN_PYTHON}-dev", "libgomp1", "libstdc++6")

LOCK = "stable"
"""The route whose torch is compiled against."""
PACKAGES = (
    *("torch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "numpy"),
    *("setuptools", "sympy", "typing-extensions"),
    *("nvidia-cublas", "nvidia-cuda-cupti", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
    *("nvidia-cudnn-cu13", "nvidia-cufft", "nvidia-cufile", "nvidia-curand", "nvidia-cusolver"),
    *("nvidia-cusparse", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13", "nvidia-nvjitlink"),
    *("nvidia-nvshmem-cu13", "nvidia-nvtx"),
)
"""What importing torch loads; the lock's networkx is not for Debian's Python, nor is it loaded."""

HOME = CACHE / "cross"


def run(command: Sequence[str | Path], *, stdin: str | None = None) -> str:
    """Run one command; its words are in the error when it fails."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def debian_root() -> Path:
    """Return a directory with Debian's files for aarch64 that a Python needs."""
    name = hashlib.sha256(f"{SUITE} {DEBIAN}".encode()).hexdigest()[:12]
    root = HOME / f"root-{name}"
    if root.is_dir():
        return root
    growing, packages = HOME / ".root", HOME / ".packages"
    for left in (growing, packages):
        shutil.rmtree(left, ignore_errors=True)
    source = image.archive()
    command: list[str | Path] = ["debootstrap", "--arch=arm64", "--variant=minbase"]
    command += ["--download-only", f"--include={','.join(DEBIAN)}", SUITE, packages]
    run([*command, *([source.mirror] if source else [])])
    growing.mkdir()
    for package in sorted((packages / "var/cache/apt/archives").glob("*.deb")):
        run(["dpkg-deb", "--extract", package, growing])
    # Debian's own chooses by architecture among directories a cross compiler does not look at
    include = growing / "usr/include"
    here = f"python{DEBIAN_PYTHON}/pyconfig.h"
    shutil.copyfile(include / "aarch64-linux-gnu" / here, include / here)
    shutil.rmtree(packages)
    growing.rename(root)
    return root


PROCESSOR = """\
processor\t: {number}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def describe_processors(root: Path) -> None:
    """Have the emulated machine say that its processors are Arm's.

    The emulator shows this machine's own /proc and /sys, from which a library in torch learns that
    they are of no kind it knows, and ends the process while it is loaded.
    """
    numbers = range(os.cpu_count() or 1)
    (root / "proc").mkdir(exist_ok=True)
    text = "".join(PROCESSOR.format(number=number) for number in numbers)
    (root / "proc/cpuinfo").write_text(text)
    for number in numbers:
        place = root / f"sys/devices/system/cpu/cpu{number}/regs/identification/midr_el1"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("0x00000000410fd0c1\n")


def interpreter() -> tuple[Path, Path]:
    """Return the interpreter, and the directory that stands for `/` when it loads a library."""
    root = debian_root()
    chosen = os.environ.get("DSV4_CROSS_PYTHON")
    return Path(chosen) if chosen else root / f"usr/bin/python{DEBIAN_PYTHON}", root


def pins() -> str:
    """Return the packages with the versions and hashes of the lock."""
    wanted = set(PACKAGES)
    text = (layout.LOCAL_LOCKS / f"{LOCK}.lock").read_text()
    found = [one for one in locks.parse(text) if one.name in wanted]
    if {one.name for one in found} != wanted:
        missing = wanted - {one.name for one in found}
        raise RuntimeError(f"{LOCK}.lock lacks {', '.join(sorted(missing))}")
    return "".join(
        f"{one.name}=={one.version} "
        + " ".join(f"--hash=sha256:{digest}" for digest in one.hashes)
        + "\n"
        for one in found
    )


def install(site: Path, version: str, words: Sequence[str | Path], stdin: str | None) -> None:
    """Have uv put packages for aarch64 into a directory."""
    command: list[str | Path] = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
    command += ["--target", site, "--python-platform", "aarch64-manylinux_2_36", "--no-deps"]
    command += ["--python-version", version, "--link-mode", "copy", "--no-progress"]
    run([*command, *words], stdin=stdin)


def python() -> tuple[Path, str]:
    """Return a program that is a Python for aarch64 with torch, and its version as in 3.11."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        real, root = interpreter()
        describe_processors(root)
        version = real.name.removeprefix("python")
        wanted = pins()
        made_of = f"{real} {version} {root} {wanted}"
        venv = HOME / f"venv-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
        program = venv / "python"
        if not program.exists():
            for old in HOME.glob("venv-*"):
                shutil.rmtree(old)
            site = venv / f"lib/python{version}/site-packages"
            site.mkdir(parents=True)
            (venv / "bin").mkdir()
            (venv / "bin/python").symlink_to(real)
            (venv / "pyvenv.cfg").write_text(f"home = {real.parent}\n")
            install(site, version, ["--require-hashes", "--requirements", "-"], wanted)
            half = venv / "python.half"
            half.write_text(f'#!/bin/sh\nexec {QEMU} -L {root} {venv}/bin/python "$@"\n')
            half.chmod(0o755)
            half.rename(program)
    return program, version
