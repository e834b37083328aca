"""Compile exllamav3's extension from the sources in its wheel, and pack it as a wheel of its own.

    python -m dsv4.extension --source WHEEL --sha256 HEX --python PYTHON --wheels DIR [--arch 12.1a]

The sources are known by hash before they are unpacked, and patched for aarch64. The compilers are
called from here, with the flags that torch's own builder would give them. That builder goes by time
stamps, and a runtime made anew has new ones on each of torch's headers, so a build that was cut off
would begin again. Here an object has its place under a hash of all that goes into it, and gets
there by a rename: the next run compiles what is missing, whatever the clock says.

The wheel installs beside the untouched package, whose loader looks for a compiled module before it
compiles one. Torch's just-in-time builder is never called, so the lock files that a killed one
leaves behind, and that make the next one wait for ever, are none of our concern; our own lock goes
with the process that holds it.
"""

import argparse
import base64
import contextlib
import csv
import fcntl
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from dsv4 import layout, memory, store
from dsv4.patches import engine
from dsv4.patches.exllamav3 import AARCH64, FOLDER

MODULE: Final = "exllamav3_ext"
DISTRIBUTION: Final = "dsv4_exllamav3_ext"
"""A name and a local version that no index has, so that no release can take the wheel's place."""

CHECK: Final = f"import torch, {MODULE}; {MODULE}.exl3_moe"
"""The extension needs the libraries that importing torch loads."""
ASK_TIMEOUT_S: Final = 600

SUFFIXES: Final = (".c", ".cpp", ".cu")
FIRST: Final = "bindings.cpp"
"""The longest job: begun last, it would run on while the other cores have nothing left to do."""

COMMON: Final = (
    f"-DTORCH_EXTENSION_NAME={MODULE}",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-std=c++20",
)
CXX: Final = (
    "-fPIC",
    "-Ofast",
    # With debug information the bindings take 5.1 GiB to compile, without it 3.5
    "-g0",
)
NVCC: Final = (
    # As torch's builder has them: its own half types bring these operators
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
    "--compiler-options=-fPIC",
    # As exllamav3's own
    "-lineinfo",
    "-O3",
    "--use_fast_math",
    # Unused variables, and host code that device code calls where it is never run
    "-diag-suppress=177,20012",
)
LINK: Final = ("-shared",)
"""Without -Ofast, which here adds code that changes the arithmetic of the whole process."""
LIBRARIES: Final = (
    *("c10", "torch", "torch_cpu", "torch_python"),
    *("cudart", "c10_cuda", "torch_cuda"),
)


class ExtensionError(Exception):
    """The extension cannot be built; one line: what is wrong, what it got, what to do."""


SOURCES: Final[Mapping[str, int]] = {
    # 1.4.5
    "7e153739673ab6c80abe556e05e170568f3770e3235fcb2bc9d3ecabc289b658": 131,
}
"""How many files there are to compile, by the SHA-256 of exllamav3's wheel, where it was counted: a
search that finds fewer would end in a module that lacks a function when it is called."""


# What is compiled


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder; an interpreter's bytecode is left out."""
    return {
        path.relative_to(folder).as_posix(): store.sha256_file(path) or ""
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


def digest_of(hashes: Mapping[str, str]) -> str:
    """Return one hash over the names and hashes of files."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(hashes.items()))
    return store.sha256_bytes(text.encode())


def sources_of(folder: Path) -> list[str]:
    """Return the files to compile, by name, the longest job first."""
    names = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    ]
    return sorted(names, key=lambda name: (name != FIRST, name))


@dataclass(frozen=True)
class Unpacked:
    """The sources of a release, in a place of ours."""

    folder: Path
    version: str
    licence: bytes


def unpack(wheel: Path, sha256: str, into: Path) -> Unpacked:
    """Put the extension's sources under `into`, from a wheel whose hash is right."""
    found = store.sha256_file(wheel)
    if found != sha256:
        state = f"got {found}" if found else "it cannot be read"
        raise ExtensionError(
            f"{wheel}: expected sha256 {sha256}, {state}; nothing of it was unpacked: fetch it anew"
        )
    version, licence = "", b""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = PurePosixPath(member.filename)
                if name.match("*.dist-info/METADATA"):
                    text = archive.read(member).decode()
                    match = re.search(r"^Version: (\S+)$", text, re.MULTILINE)
                    version = match[1] if match else ""
                elif name.name == "LICENSE" and ".dist-info/" in member.filename:
                    licence += archive.read(member)
                elif name.is_relative_to(FOLDER) and ".." not in name.parts and name.suffix:
                    place = into / name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(archive.read(member))
    except (zipfile.BadZipFile, ValueError) as error:
        raise ExtensionError(f"{wheel}: is no wheel ({error}); fetch it anew") from error
    count = len(sources_of(into / FOLDER))
    wanted = SOURCES.get(sha256, count)
    if not version or not count or count != wanted:
        raise ExtensionError(
            f"{wheel}: wanted exllamav3's wheel with {wanted or 'some'} sources under {FOLDER},"
            f" found {count} in version {version or 'unknown'}; fetch it anew"
        )
    return Unpacked(into / FOLDER, version, licence)


def patch(root: Path) -> dict[str, Any]:
    """Patch the sources below `root`; return what was done and a hash over what came out."""
    try:
        report = engine.apply(root, [AARCH64])
    except engine.PatchError as error:
        raise ExtensionError(
            f"{AARCH64.name}: {error}; name another release of exllamav3, or compile it as it is"
            " on another machine and use exllamav3_wheel"
        ) from error
    result = report.patches[AARCH64.name]
    verdicts = {str(outcome.verdict) for outcome in result.files.values()}
    if len(verdicts) != 1:
        raise ExtensionError(
            f"{AARCH64.name}: some files guard their x86 code and some do not"
            f" ({', '.join(sorted(verdicts))}); fetch exllamav3's wheel anew"
        )
    after = {path: str(change["after"]) for path, change in report.files.items()}
    return {"name": AARCH64.name, "verdict": str(result.verdict), "sha256": digest_of(after)}


# What it is compiled with


@dataclass(frozen=True)
class Target:
    """The Python that shall load the extension, and its torch."""

    tag: str
    """As in a wheel's name: cp312."""
    platform: str
    """As in a wheel's name: linux_aarch64."""
    suffix: str
    """What the file name of a compiled module ends with."""
    include: tuple[str, ...]
    torch: Path
    torch_version: str


PROBE: Final = """
import importlib.util, json, sys, sysconfig
torch = importlib.util.find_spec("torch")
print(json.dumps({
    "tag": "cp%d%d" % sys.version_info[:2],
    "platform": sysconfig.get_platform().replace("-", "_").replace(".", "_"),
    "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "include": [sysconfig.get_path("include"), sysconfig.get_path("platinclude")],
    "torch": list(torch.submodule_search_locations)[0] if torch else None,
}))
"""


def ask(command: Sequence[str], environment: Mapping[str, str], remedy: str) -> str:
    """Return what a program prints; raise with `remedy` when it cannot be run."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ASK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExtensionError(f"{command[0]}: does not answer ({error}); {remedy}") from error
    if done.returncode:
        raise ExtensionError(
            f"{command[0]}: failed with status {done.returncode}"
            f" ({last_line(done.stderr) or 'it said nothing'}); {remedy}"
        )
    return done.stdout


def target_of(python: Path, environment: Mapping[str, str]) -> Target:
    """Ask an interpreter what a module for it has to be; torch is not imported for that."""
    text = ask([str(python), "-I", "-c", PROBE], environment, "give the runtime's python")
    found = json.loads(text)
    if found["torch"] is None:
        raise ExtensionError(f"{python}: has no torch; install the runtime's packages first")
    torch = Path(found["torch"])
    try:
        version = re.search(r"^__version__ = '([^']+)'", (torch / "version.py").read_text(), re.M)
    except OSError as error:
        raise ExtensionError(f"{torch}: is no torch ({error}); install it again") from error
    target = Target(
        found["tag"],
        found["platform"],
        found["suffix"],
        tuple(dict.fromkeys(found["include"])),
        torch,
        version[1] if version else "",
    )
    wanted = [(torch / "include/torch/extension.h", "install torch again")]
    if not any((Path(name) / "Python.h").is_file() for name in target.include):
        wanted.append((Path(target.include[0]) / "Python.h", "install that Python's headers"))
    for path, remedy in wanted:
        if not path.is_file():
            raise ExtensionError(f"{path}: is not there; {remedy}")
    return target


def arch_flags(arch_list: str) -> tuple[str, ...]:
    """Return nvcc's flags for a list of architectures as torch writes it: 12.1a, or 9.0;12.0+PTX.

    Raises `ExtensionError` for what is none: without it nvcc would choose one of its own.
    """
    flags = []
    for entry in re.split(r"[;\s]+", arch_list.strip()):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", entry)
        if match is None:
            raise ExtensionError(
                f"TORCH_CUDA_ARCH_LIST: wanted the GPU's architecture, as 12.1a for a GB10, got"
                f" {arch_list!r}"
            )
        number = match[1] + match[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(flags)


@dataclass(frozen=True)
class Job:
    """One object to compile."""

    source: str
    command: tuple[str, ...]
    """Without the names of the source and the object."""
    key: str
    """Of all that goes into the object."""


@dataclass(frozen=True)
class Tools:
    """The compilers, and what they find in which place."""

    cxx: str
    nvcc: str
    cuda_home: Path
    versions: tuple[str, ...]
    arch: tuple[str, ...]

    @property
    def includes(self) -> list[Path]:
        """The toolkit's headers; some releases keep those for C++ in a directory of their own."""
        places = [self.cuda_home / "include", self.cuda_home / "include/cccl"]
        return [place for place in places if place.is_dir()]

    @property
    def libraries(self) -> list[Path]:
        """The toolkit's libraries."""
        return [path for name in ("lib64", "lib") if (path := self.cuda_home / name).is_dir()]


def tools_of(environment: Mapping[str, str]) -> Tools:
    """Return the compilers that an environment names, each asked who it is."""
    home = environment.get("CUDA_HOME", "")
    if not home:
        raise ExtensionError("CUDA_HOME: is not set; name the toolkit's directory")
    nvcc = f"{home}/bin/nvcc"
    cxx = environment.get("CXX", "g++")
    versions = (
        ask([cxx, "--version"], environment, "install g++").partition("\n")[0],
        last_line(ask([nvcc, "--version"], environment, "name the toolkit with CUDA_HOME")),
    )
    arch = arch_flags(environment.get("TORCH_CUDA_ARCH_LIST", ""))
    return Tools(cxx, nvcc, Path(home), versions, arch)


def job(source: str, digest: str, target: Target, tools: Tools) -> Job:
    """Return how one source is compiled, from within its folder.

    The places of torch and the toolkit do not go into the key: what is there is known by version.
    """
    cuda = source.endswith(".cu")
    flags = (*COMMON, *NVCC, *tools.arch) if cuda else (*COMMON, *CXX)
    program = (tools.nvcc, "-ccbin", tools.cxx) if cuda else (tools.cxx,)
    system = [
        *(target.torch / "include", target.torch / "include/torch/csrc/api/include"),
        *tools.includes,
        *target.include,
    ]
    ingredients = [source, digest, flags, tools.versions]
    ingredients += [target.torch_version, target.tag, target.platform]
    return Job(
        source,
        (*program, *flags, "-I.", *(word for name in system for word in ("-isystem", str(name)))),
        hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:32],
    )


def link_command(objects: Sequence[Path], target: Target, tools: Tools, out: Path) -> list[str]:
    """Return how the objects become one module."""
    command = [tools.cxx, *LINK, *map(str, objects)]
    command += [f"-L{place}" for place in (target.torch / "lib", *tools.libraries)]
    return [*command, *(f"-l{name}" for name in LIBRARIES), "-o", str(out)]


def jobs_for(cores: int, available_gib: float) -> int:
    """Return how many compilers may run at once."""
    return memory.compile_jobs(available_gib, cores)


# Compile

ERRORS: Final = (
    # The first of these that a line of a log matches is why the build failed
    re.compile(r"^\S.*:\d+(?::\d+)?: (?:fatal )?error:"),
    re.compile(r"^\S.*\(\d+\): (?:catastrophic )?error\b"),
    re.compile(
        r"^\S*(?:cc1plus|g\+\+|gcc|nvcc|ptxas|cicc|cudafe\+\+|nvlink)[ :].*\b(?:error|fatal)\b"
    ),
    re.compile(r"No space left on device|undefined reference to|cannot find -l|Killed"),
    re.compile(r"internal compiler error|file not recognized|MemoryError|Cannot allocate memory"),
)
HINTS: Final = (
    ("No space left on device", "make room on the disk"),
    ("Killed", "memory ran out: stop what else uses it, or compile with fewer --jobs"),
    ("Cannot allocate memory", "memory ran out: stop what else uses it"),
)


def last_line(text: str) -> str:
    """Return the last line with something on it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def first_error(text: str) -> str:
    """Return the line of a compiler's output that says why it failed.

    It stands far above the end: what follows are consequences, notes and the words of whoever
    called the compiler. Without one that looks like it, the last line has to do.
    """
    for line in text.splitlines():
        if any(pattern.search(line) for pattern in ERRORS):
            return line.strip()
    return last_line(text)


def failure(what: str, output: str, status: int, log: Path) -> ExtensionError:
    """Return the one line about a command that failed."""
    error = first_error(output)
    if not error:
        number = f"signal {-status}" if status < 0 else f"status {status}"
        error = f"it ended with {number} and said nothing"
    hint = next((hint for text, hint in HINTS if text in error), "")
    return ExtensionError(
        f"{what}: {error}; {f'{hint}; ' if hint else ''}the log is {log}; what was compiled is"
        " kept, and a second run goes on from there"
    )


class Compiler:
    """Runs compilers, several at once, each in a process group that can be ended with it."""

    def __init__(self, environment: Mapping[str, str], log: IO[str], where: Path) -> None:
        self.environment = {**environment}
        self.log = log
        self.where = where
        """Where the log is, for people."""
        self.guard = threading.Lock()
        self.running: set[int] = set()
        self.stopped = False

    def run(self, command: Sequence[str], what: str, directory: Path) -> None:
        """Run one command; its output goes to the log in one piece."""
        begun = time.monotonic()
        with self.guard:
            if self.stopped:
                raise ExtensionError(f"{what}: was not begun, because another one failed")
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
            self.running.add(process.pid)
        output, _ = process.communicate()
        with self.guard:
            self.running.discard(process.pid)
            stopped = self.stopped
            if not stopped:
                words = f"{what}: {time.monotonic() - begun:.1f} s, status {process.returncode}"
                self.log.write(f"== {words}\n$ {shlex.join(command)}\n{output}")
                self.log.flush()
        if process.returncode:
            if stopped:
                raise ExtensionError(f"{what}: was ended, because another one failed")
            raise failure(what, output, process.returncode, self.where)

    def stop(self) -> None:
        """End what runs, begin nothing more."""
        with self.guard:
            self.stopped = True
            for group in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)


def compile_all(
    jobs: Sequence[Job],
    folder: Path,
    objects: Path,
    workers: int,
    compiler: Compiler,
    say: Callable[[str], None],
) -> list[Path]:
    """Compile what is missing; return the objects in the order of the jobs.

    The first failure ends the others, and is the one that is raised.
    """
    objects.mkdir(parents=True, exist_ok=True)
    places = {one: objects / f"{one.key}.o" for one in jobs}
    missing = [one for one in jobs if not places[one].is_file()]
    done = len(jobs) - len(missing)
    if done:
        say(f"compile {MODULE}: {done} of {len(jobs)} are there from an earlier run")

    def compile_one(one: Job) -> None:
        nonlocal done
        half = objects / f"{one.key}.half.o"
        compiler.run([*one.command, "-c", one.source, "-o", str(half)], one.source, folder)
        with half.open("rb") as handle:
            os.fsync(handle.fileno())
        half.rename(places[one])
        with compiler.guard:
            done += 1
            count = done
        if count % 10 == 0 or count == len(jobs):
            say(f"compile {MODULE}: {count} of {len(jobs)}")

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(compile_one, one) for one in missing]
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for one in finished:
                one.result()
        except BaseException:
            compiler.stop()
            raise
    store.sync_directory(objects)
    return [places[one] for one in jobs]


# Pack


def record_line(name: str, data: bytes) -> tuple[str, str, str]:
    """Return what a wheel's RECORD says of one file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return name, f"sha256={digest}", str(len(data))


def wheel_name(version: str, name: str, target: Target) -> str:
    """Return the file name of the wheel; the key is in its local version."""
    return f"{DISTRIBUTION}-{version}+k{name}-{target.tag}-{target.tag}-{target.platform}.whl"


def pack(wheel: Path, module: bytes, licence: bytes, target: Target) -> None:
    """Write the wheel: the same content gives the same bytes, whenever that is."""
    tag = "-".join(wheel.stem.split("-")[2:])
    version = wheel.name.split("-")[1]
    info = f"{DISTRIBUTION}-{version}.dist-info"
    metadata = (
        "Metadata-Version: 2.1\n"
        f"Name: {DISTRIBUTION.replace('_', '-')}\n"
        f"Version: {version}\n"
        "Summary: exllamav3's extension, compiled\n"
        "License: MIT\n"
        f"Requires-Dist: torch=={target.torch_version.partition('+')[0]}\n"
    )
    about = f"Wheel-Version: 1.0\nGenerator: dsv4\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = {
        f"{MODULE}{target.suffix}": module,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": about.encode(),
        **({f"{info}/LICENSE": licence} if licence else {}),
    }
    record = io.StringIO()
    lines = csv.writer(record, lineterminator="\n")
    lines.writerows(record_line(name, data) for name, data in files.items())
    lines.writerow((f"{info}/RECORD", "", ""))
    half = wheel.with_name(f".{wheel.name}.half")
    with half.open("wb") as handle:
        with zipfile.ZipFile(handle, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in {**files, f"{info}/RECORD": record.getvalue().encode()}.items():
                entry = zipfile.ZipInfo(name)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (0o100755 if name.startswith(MODULE) else 0o100644) << 16
                archive.writestr(entry, data)
        handle.flush()
        os.fchmod(handle.fileno(), 0o644)
        os.fsync(handle.fileno())
    half.rename(wheel)
    store.sync_directory(wheel.parent)


# All of it


def key(
    source_sha256: str,
    patch_hash: str,
    torch_version: str,
    arch_list: str,
    python_tag: str,
    platform: str,
) -> str:
    """Return what names the wheel: of all that goes into it, our flags included."""
    ingredients = [source_sha256, patch_hash, torch_version, sorted(arch_flags(arch_list))]
    ingredients += [python_tag, platform, COMMON, CXX, NVCC, LINK, LIBRARIES]
    return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:16]


def kept(wheel: Path, name: str) -> bool:
    """Say whether a wheel is there, whole and made of the same ingredients."""
    note = store.read_json_or(wheel.with_suffix(".json"), {})
    digest = note.get("sha256")
    return note.get("key") == name and digest is not None and store.sha256_file(wheel) == digest


@contextlib.contextmanager
def alone(wheels: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Let one build at a time into a directory; yields a place for sources, gone afterwards.

    The lock goes with the process that holds it, so that a killed one is in nobody's way.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    with (wheels / f".{MODULE}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"wait for another build of {MODULE}, which is under way")
            fcntl.flock(handle, fcntl.LOCK_EX)
        place = wheels / f".{MODULE}.new"
        shutil.rmtree(place, ignore_errors=True)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def build(
    source: Path,
    source_sha256: str,
    python: Path,
    wheels: Path,
    environment: Mapping[str, str],
    jobs: int,
    log: Path,
    say: Callable[[str], None],
) -> Path:
    """Return the wheel with the compiled extension; one made before of the same is not made again.

    `source` is exllamav3's wheel, `python` has torch beside it. The compilers are those that
    `environment` names (CUDA_HOME, CXX, PATH), for the GPUs in TORCH_CUDA_ARCH_LIST. The wheel lies
    in `wheels` with a note of the same name, which ends in .json and says what it was made of.
    """
    with alone(wheels, say) as fresh:
        unpacked = unpack(source, source_sha256, fresh)
        patched = patch(fresh)
        target = target_of(python, environment)
        name = key(
            source_sha256,
            patched["sha256"],
            target.torch_version,
            environment.get("TORCH_CUDA_ARCH_LIST", ""),
            target.tag,
            target.platform,
        )
        wheel = wheels / wheel_name(unpacked.version, name, target)
        if kept(wheel, name):
            say(f"take {wheel.name}, compiled before from the same sources")
            return wheel
        tools = tools_of(environment)
        work = wheels / f".{MODULE}.{name}"
        work.mkdir(exist_ok=True)
        for place in ("sources", "out", "tmp"):
            shutil.rmtree(work / place, ignore_errors=True)
        for place in ("out", "tmp"):
            (work / place).mkdir()
        fresh.rename(work / "sources")
        module = work / "out" / f"{MODULE}{target.suffix}"
        begun = time.monotonic()
        count = compile_module(module, work, target, tools, python, environment, jobs, log, say)
        pack(wheel, module.read_bytes(), unpacked.licence, target)
        store.write_json(
            wheel.with_suffix(".json"),
            {
                "key": name,
                "wheel": wheel.name,
                "sha256": store.sha256_file(wheel),
                "source": {
                    "name": source.name,
                    "version": unpacked.version,
                    "sha256": source_sha256,
                    "files": count,
                },
                "patch": patched,
                "torch": target.torch_version,
                "arch_list": environment["TORCH_CUDA_ARCH_LIST"],
                "python": target.tag,
                "platform": target.platform,
                "compilers": tools.versions,
                "flags": {"common": COMMON, "cxx": CXX, "nvcc": NVCC, "link": LINK},
                "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(time.monotonic() - begun),
                "jobs": jobs,
            },
        )
        for left in wheels.glob(f".{MODULE}.*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
        return wheel


def compile_module(
    module: Path,
    work: Path,
    target: Target,
    tools: Tools,
    python: Path,
    environment: Mapping[str, str],
    workers: int,
    log: Path,
    say: Callable[[str], None],
) -> int:
    """Make the module of the sources in `work` and prove that it loads; return their number."""
    folder = work / "sources" / FOLDER
    digest = digest_of(hashes_of(folder))
    jobs = [job(source, digest, target, tools) for source in sources_of(folder)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as handle:
        # What a killed compiler leaves half done is swept away with the place
        compiler = Compiler({**environment, "TMPDIR": str(work / "tmp")}, handle, log)
        objects = compile_all(jobs, folder, work / "objects", workers, compiler, say)
        say(f"link {MODULE}")
        compiler.run(link_command(objects, target, tools, module), "link", folder)
        say(f"import {MODULE}")
        program = f"import sys; sys.path.insert(0, {str(module.parent)!r}); {CHECK}"
        compiler.run([str(python), "-I", "-c", program], CHECK, folder)
    return len(jobs)


def main(argv: list[str]) -> int:
    """Build the extension; 1 with one line when it cannot be done."""
    parser = argparse.ArgumentParser(prog="dsv4 extension", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="exllamav3's wheel")
    parser.add_argument("--sha256", required=True, help="of that wheel")
    parser.add_argument("--python", type=Path, required=True, help="which has torch beside it")
    parser.add_argument("--wheels", type=Path, default=layout.WHEELS, help="where the wheel goes")
    parser.add_argument("--arch", help="GPUs to compile for; 12.1a is a GB10")
    parser.add_argument("--jobs", type=int, help="compilers at once; by memory when not given")
    parser.add_argument("--log", type=Path, help="by default beside the wheel")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    environment = dict(os.environ)
    environment.setdefault("CUDA_HOME", "/usr/local/cuda")
    if options.arch:
        environment["TORCH_CUDA_ARCH_LIST"] = options.arch
    cores = len(os.sched_getaffinity(0))
    jobs = options.jobs or jobs_for(cores, memory.read_meminfo().available)

    def say(words: str) -> None:
        sys.stderr.write(f"dsv4 extension: {words}\n")

    found: dict[str, Any] = {"ok": False}
    try:
        wheel = build(
            options.source,
            options.sha256,
            options.python,
            options.wheels.resolve(),
            environment,
            jobs,
            (options.log or options.wheels / f"{MODULE}.log").resolve(),
            say,
        )
        found = {"ok": True, "wheel": str(wheel), "sha256": store.sha256_file(wheel)}
    except (ExtensionError, OSError) as error:
        found["error"] = str(error)
        say(str(error))
    if options.json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
    elif found["ok"]:
        sys.stdout.write(f"{found['wheel']}\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
