"""What compiles exllamav3 for aarch64 on an x86-64 machine: compilers, headers, the sources.

CUDA's compiler and headers, and torch's headers for aarch64, are in wheels on the package registry.
What is needed of them (125 MB of 1.5 GB) is read by byte range and kept, laid out as a toolkit is,
in the directory that DSV4_SOURCES_CACHE names. So no toolkit has to be installed, and one that is
cannot change what is found. The C++ compiler is Debian's cross compiler.

    python -m tests.sources.aarch64              fetch all of it, and say how much that was
    python -m tests.sources.aarch64 exllamav3    only the wheels of exllamav3 (9 MB)
"""

import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4 import extension, memory
from dsv4.patches import engine
from dsv4.patches.exllamav3 import AARCH64
from tests.sources import wheels
from tests.sources.wheels import CACHE, Wheel

CXX = "aarch64-linux-gnu-g++"
X86 = "x86_64-manylinux_2_28"
ARM = "aarch64-manylinux_2_28"

CUDA = "nvidia/cu13/"

KEEP_S = 14 * 86400
"""How long a result is kept that no run asks for: each change of the patch makes new ones."""


@dataclass(frozen=True)
class Tree:
    """Files of one wheel: those that begin with one of some words."""

    name: str
    version: str
    platform: str
    sha256: str
    wanted: tuple[str, ...]
    digest: str
    """Of these files; see `extension.digest_of`."""


def cuda(name: str, version: str, sha256: str, digest: str, machine: str = ARM) -> Tree:
    """Return the headers of a part of CUDA; its programs too, where they run here."""
    wanted = (f"{CUDA}include/", f"{CUDA}lib/libcudart.so.13")
    return Tree(name, version, machine, sha256, (CUDA,) if machine == X86 else wanted, digest)


TORCH = Tree(
    "torch",
    "2.13.0",
    ARM,
    "572df8be8ffb4599c88cbd6a0726f1f854f4da65d2e3c09f0e2c2283333cd6d4",
    ("torch/include/", "torch/version.py"),
    "515a0a1ae12c24238bdcb5b4ceeffa28f7eb3e6b4dcccd8fe1e6bfa88530307e",
)

TREES = (
    TORCH,
    cuda(
        "nvidia-cublas",
        "13.1.1.3",
        "b7a210458267ac818974c53038fbec2e969d5c99f305ab15c72522fa9f001dd5",
        "011d8edce5adadc1fa90cfa643cfa5d6ca6dafbef998bfda583c6d7d289901c9",
    ),
    cuda(
        "nvidia-cuda-cccl",
        "13.0.85",
        "6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c",
        "dd3679a9c7de0a1f721c174e8b835a50e0eee1632a29e6a6faeeba5db438a543",
    ),
    cuda(
        "nvidia-cuda-crt",
        "13.0.88",
        "ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003",
        "beb6556616921d5b2f6bfb07bb7e22e82f1d282bbddad6f2d6b8a355d25a7068",
    ),
    cuda(
        "nvidia-cuda-runtime",
        "13.0.96",
        "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
        "f2759808eeb618793e9de4c94cac299f5d765da320ec240f96e5315b057f065d",
    ),
    cuda(
        "nvidia-curand",
        "10.4.0.35",
        "133df5a7509c3e292aaa2b477afd0194f06ce4ea24d714d616ff36439cee349a",
        "7db9abea7441aea6fed6c0440551c46a70359fa6c5d4fd9f10ddb201aaa165a1",
    ),
    cuda(
        "nvidia-cusolver",
        "12.0.4.66",
        "02c2457eaa9e39de20f880f4bd8820e6a1cfb9f9a34f820eb12a155aa5bc92d2",
        "d197171402a25c71fa489a2b3f1ad1d46058112372d89b88e41e8a9d580afdce",
    ),
    cuda(
        "nvidia-cusparse",
        "12.6.3.3",
        "80bcc4662f23f1054ee334a15c72b8940402975e0eab63178fc7e670aa59472c",
        "15b7369d4656e8a7a1f25c5772ef00594a8189ddc5e5ec56a792462cd0ac9141",
    ),
    cuda(
        "nvidia-nvtx",
        "13.0.85",
        "cb7780edb6b14107373c835bf8b72e7a178bac7367e23da7acb108f973f157a6",
        "26f256cb79551e7274ff5cba0a1a6d5c02887cf9605dff5e61c3599586eeccba",
    ),
    cuda(
        "nvidia-cuda-nvcc",
        "13.0.88",
        "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
        "f44ee477ab28669b2787cee2af5de6851d7b2d1be89c5615fdfef128f1122fe0",
        X86,
    ),
    cuda(
        "nvidia-nvvm",
        "13.0.88",
        "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
        "6b61cd17ae0be3edf3e59e1aa670c28801e86d711ce4de89e25b5898379e6112",
        X86,
    ),
)

EXLLAMAV3 = {
    "1.4.5": "7e153739673ab6c80abe556e05e170568f3770e3235fcb2bc9d3ecabc289b658",
    "1.4.7": "d9fd5bdd913d5a3d920f997cee7726264d7c0d380ad68da7e1b6070e921de179",
    "1.5.3": "e5798559bae4285075ac81e6185383142de2a8fb291f1d4aed7be485773e82a3",
    "1.6.5": "550c0d04c755f249840e5c1edc26b0e80c7342c33b5d99ad17479abb407e8ded",
}
"""The wheels of its releases by version."""


# Fetch


def address(name: str, version: str, sha256: str, machine: str) -> str:
    """Ask uv where a wheel is, which has to be the one with this hash."""
    words = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--no-header"]
    words += ["--format=pylock.toml", "--only-binary=:all:", "--python-version=3.12"]
    answer = subprocess.run(
        [*words, f"--python-platform={machine}", "-"],
        input=f"{name}=={version}\n",
        check=True,
        capture_output=True,
        text=True,
    )
    (found,) = tomllib.loads(answer.stdout)["packages"][0]["wheels"]
    if found["hashes"]["sha256"] != sha256:
        raise ValueError(
            f"{name} {version}: the registry's wheel has sha256 {found['hashes']['sha256']},"
            f" wanted {sha256}"
        )
    return str(found["url"])


def fetch(tree: Tree, into: Path) -> None:
    """Lay out a tree's files under a directory, known by their digest."""
    url = address(tree.name, tree.version, tree.sha256, tree.platform)
    hashes = {}
    wheel = Wheel(tree.name, tree.version, tree.sha256, {})
    # By range where a little of it is wanted
    opened = wheels._downloaded if tree.wanted == (CUDA,) else wheels._open
    with opened(url, wheel) as handle, zipfile.ZipFile(handle) as archive:
        # In their order in the file, so that what is read ahead is what comes next
        for member in sorted(archive.infolist(), key=lambda one: one.header_offset):
            if member.is_dir() or not member.filename.startswith(tree.wanted):
                continue
            data = archive.read(member)
            hashes[member.filename] = hashlib.sha256(data).hexdigest()
            place = into / member.filename
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            if "/bin/" in member.filename:
                place.chmod(0o755)
    found = extension.digest_of(hashes)
    if found != tree.digest:
        raise ValueError(
            f"{tree.name} {tree.version}: its files have digest {found}, wanted {tree.digest}"
        )


def python_headers(into: Path) -> None:
    """Copy the headers of the Python that runs here.

    A header of Debian's chooses another one by architecture, which is not there for a foreign one;
    that of this machine does as well, for nothing in it that torch looks at differs.
    """
    source = Path(sysconfig.get_path("include"))
    if not (source / "Python.h").is_file():
        raise FileNotFoundError(f"{source}/Python.h: install that Python's headers (python3-dev)")
    shutil.copytree(source, into)
    shutil.copyfile(sysconfig.get_config_h_filename(), into / "pyconfig.h")


@functools.cache
def toolkit() -> Path:
    """Return a directory with `nvidia/cu13`, a toolkit, and headers of torch and Python."""
    if platform.machine() != "x86_64":
        raise RuntimeError(f"the compilers of this layer are for x86_64, not {platform.machine()}")
    made_of = [tree.digest for tree in TREES] + [sys.version, sysconfig.get_path("include")]
    name = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]
    home = CACHE / f"aarch64-{name}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "aarch64.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.is_dir():
            for old in CACHE.glob("aarch64-*"):
                shutil.rmtree(old)
            half = CACHE / f".aarch64-{name}"
            shutil.rmtree(half, ignore_errors=True)
            with ThreadPoolExecutor(len(TREES)) as pool:
                list(pool.map(lambda tree: fetch(tree, half), TREES))
            # Wheels have no links, and the linker looks for the name without a version
            (half / CUDA / "lib/libcudart.so").symlink_to("libcudart.so.13")
            python_headers(half / "python")
            half.rename(home)
    return home


@functools.cache
def exllamav3(version: str) -> Path:
    """Return the wheel of a release, known by its hash."""
    sha256 = EXLLAMAV3[version]
    path = CACHE / f"exllamav3-{version}-py3-none-any.whl"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        wheel = Wheel("exllamav3", version, sha256, {})
        url = address("exllamav3", version, sha256, X86)
        with wheels._downloaded(url, wheel) as handle:
            handle.seek(0)
            wheels._keep(path, handle.read())
    return path


# Compile


@dataclass(frozen=True)
class Compiled:
    """What became of one source."""

    status: int
    output: str
    object: Path


def target() -> extension.Target:
    """Return the Python and the torch that are compiled for, as far as headers say it."""
    home = toolkit()
    return extension.Target(
        "cp312", "linux_aarch64", ".so", (str(home / "python"),), home / "torch", "2.13.0+cu130"
    )


def tools() -> extension.Tools:
    """Return the compilers, for a GB10."""
    environment = {
        **os.environ,
        "CUDA_HOME": str(toolkit() / CUDA.rstrip("/")),
        "CXX": CXX,
        "TORCH_CUDA_ARCH_LIST": "12.1a",
    }
    found = extension.tools_of(environment)
    # The toolkit's place has no `targets` for aarch64; its headers are named on the command line
    return replace(found, cuda_home=Path(environment["CUDA_HOME"]))


def unpacked(version: str, into: Path, *, patched: bool) -> Path:
    """Unpack a release's sources; return their folder."""
    found = extension.unpack(exllamav3(version), EXLLAMAV3[version], into)
    if patched:
        engine.apply(into, [AARCH64])
    return found.folder


def compile_sources(folder: Path, sources: list[str]) -> Mapping[str, Compiled]:
    """Compile sources as the recipe does, without optimising host code; known results are kept.

    An error does not depend on the optimiser, and half of the time does.
    """
    kept = CACHE / "objects"
    kept.mkdir(parents=True, exist_ok=True)
    made_for, made_with = target(), tools()
    digest = extension.digest_of(extension.hashes_of(folder))
    headers = toolkit().name

    def compile_one(source: str) -> Compiled:
        one = extension.job(source, digest, made_for, made_with)
        words = one.command if source.endswith(".cu") else (*one.command, "-O0")
        key = hashlib.sha256(json.dumps([one.key, headers, words[-1]]).encode()).hexdigest()[:32]
        note, made = kept / f"{key}.json", kept / f"{key}.o"
        if not note.is_file():
            half = kept / f"{key}.half.o"
            done = subprocess.run(
                [*words, "-c", source, "-o", str(half)],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                half.replace(made)
            wheels._keep(note, json.dumps([done.returncode, done.stdout + done.stderr]).encode())
        status, output = json.loads(note.read_text())
        for path in (note, made):
            if path.exists():
                os.utime(path)
        return Compiled(status, output, made)

    for old in kept.iterdir():
        if time.time() - old.stat().st_mtime > KEEP_S:
            old.unlink()
    jobs = extension.jobs_for(os.cpu_count() or 1, memory.read_meminfo().available)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(sources, pool.map(compile_one, sources), strict=True))


if __name__ == "__main__":
    if "exllamav3" not in sys.argv[1:]:
        sys.stdout.write(f"{toolkit()}\n")
    sys.stdout.write("".join(f"{exllamav3(version)}\n" for version in EXLLAMAV3))
    sys.stdout.write(f"{wheels.Ranges.read_bytes / 1e6:.1f} MB read by ranges\n")
