"""Building the extension: known by hash, resumed after a kill, cached by what went into it."""

import base64
import csv
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from dsv4 import extension, store
from dsv4.extension import ExtensionError
from tests.unit import exllamav3_sources

LIB = Path(extension.__file__).parents[1]

COMPILER = """\
#!/bin/sh
# Stands in for g++ and nvcc. An object holds its source's text, a module those of its objects; a
# source that is waited for is not done before someone says so.
here={here}
case "$*" in *--version*) echo "{name} $(cat $here/version)"; exit 0 ;; esac
source= out= link=
for word; do
    case $last in -c) source=$word ;; -o) out=$word ;; esac
    case $word in -shared) link=yes ;; esac
    last=$word
done
if [ -n "$link" ]; then
    echo link >>$here/calls
    cat $(printf '%s\\n' "$@" | grep '\\.o$') >"$out"
    exit 0
fi
echo "{name} $source" >>$here/calls
echo "begin $source" >>$here/times
if grep -qx "$source" $here/waits; then
    echo half >"$out"
    touch $here/waiting
    sleep 30
fi
sleep 0.05
echo "end $source" >>$here/times
if grep -q BROKEN "$source"; then
    echo "In file included from $source:1:" >&2
    echo "$source:7:5: warning: an error: is not this one [-Wall]" >&2
    echo "$source:9:10: fatal error: immintrin.h: No such file or directory" >&2
    echo "compilation terminated." >&2
    exit 1
fi
cp "$source" "$out"
"""

PYTHON = """\
#!/bin/sh
# Stands in for the runtime's Python: says what it is, and loads a module that has its function
here={here}
case "$3" in
    *sysconfig*) cat $here/probe.json ;;
    *"import torch, exllamav3_ext"*)
        grep -q 'void exl3_moe()' $here/wheels/.exllamav3_ext.*/out/*.so && exit
        echo 'Traceback (most recent call last):' >&2
        echo '  File "<string>", line 1, in <module>' >&2
        echo "AttributeError: module 'exllamav3_ext' has no attribute 'exl3_moe'" >&2
        exit 1
        ;;
esac
"""


@dataclass
class Machine:
    """A place with compilers, a Python with torch, and a wheel of sources."""

    home: Path
    environment: dict[str, str]
    sha256: str
    said: list[str] = field(default_factory=list)

    @property
    def source(self) -> Path:
        return self.home / "exllamav3-1.4.5-py3-none-any.whl"

    @property
    def wheels(self) -> Path:
        return self.home / "wheels"

    @property
    def log(self) -> Path:
        return self.home / "log/build.log"

    def build(self, jobs: int = 2) -> Path:
        return extension.build(
            self.source,
            self.sha256,
            self.home / "python",
            self.wheels,
            self.environment,
            jobs,
            self.log,
            self.said.append,
        )

    def calls(self) -> list[str]:
        """Return what the compilers were called for since the last question."""
        path = self.home / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def rewrite(self, changes: dict[str, str]) -> None:
        """Have other sources."""
        self.sha256 = exllamav3_sources.write_wheel(self.source, changes)

    def left(self) -> list[str]:
        """Return what is in the directory of wheels, but for the lock."""
        return sorted(path.name for path in self.wheels.iterdir() if path.suffix != ".lock")


def program(path: Path, text: str) -> None:
    """Write something that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine on which everything is in order."""
    program(tmp_path / "bin/g++", COMPILER.format(here=tmp_path, name="g++"))
    program(tmp_path / "cuda/bin/nvcc", COMPILER.format(here=tmp_path, name="nvcc"))
    program(tmp_path / "python", PYTHON.format(here=tmp_path))
    for name in ("cat", "cp", "grep", "sleep", "touch"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    (tmp_path / "version").write_text("13.0")
    (tmp_path / "waits").touch()
    for name in ("torch/include/torch/extension.h", "include/Python.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0+cu130'\ndebug = False\n")
    probe = {
        "tag": "cp312",
        "platform": "linux_aarch64",
        "suffix": ".cpython-312-aarch64-linux-gnu.so",
        "include": [str(tmp_path / "include")] * 2,
        "torch": str(tmp_path / "torch"),
    }
    (tmp_path / "probe.json").write_text(json.dumps(probe))
    environment = {
        "PATH": f"{tmp_path}/bin",
        "CUDA_HOME": str(tmp_path / "cuda"),
        "TORCH_CUDA_ARCH_LIST": "12.1a",
    }
    found = Machine(tmp_path, environment, "")
    found.rewrite({})
    return found


SOURCES = len(exllamav3_sources.X86) + 3
"""Of the stand-in release: all but the header."""


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_wheel_comes_out_that_an_installer_takes(machine: Machine) -> None:
    """Name, version and tags agree everywhere, and RECORD vouches for every byte."""
    wheel = machine.build()
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert name == "dsv4-exllamav3-ext"
    assert [str(tag) for tag in tags] == ["cp312-cp312-linux_aarch64"]
    files = contents(wheel)
    info = f"dsv4_exllamav3_ext-{version}.dist-info"
    metadata = files[f"{info}/METADATA"].decode()
    assert f"Name: {name}\nVersion: {version}\n" in metadata
    assert "Requires-Dist: torch==2.13.0\n" in metadata
    assert b"Tag: cp312-cp312-linux_aarch64\n" in files[f"{info}/WHEEL"]
    assert files[f"{info}/LICENSE"] == b"MIT License\n"
    recorded = {
        row[0]: row[1:] for row in csv.reader(io.StringIO(files[f"{info}/RECORD"].decode()))
    }
    assert recorded.keys() == files.keys()
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        own = path == f"{info}/RECORD"
        assert recorded[path] == (["", ""] if own else [f"sha256={digest}", str(len(data))])
    assert "exllamav3_ext.cpython-312-aarch64-linux-gnu.so" in files


def test_an_index_cannot_have_the_version(machine: Machine) -> None:
    """A local version that does not read as a number keeps its name through every normalisation."""
    wheel = machine.build()
    _, version, _, _ = parse_wheel_filename(wheel.name)
    assert version.public == "1.4.5"
    assert version.local is not None
    assert wheel.name.split("-")[1] == str(version) == f"1.4.5+{version.local}"


def test_it_is_compiled_as_the_recipe_says(machine: Machine) -> None:
    """All sources, each by its compiler, for the GPU; the link line has none of the arithmetic."""
    machine.build()
    log = machine.log.read_text()
    lines = [line for line in log.splitlines() if line.startswith("$ ")]
    assert len(lines) == SOURCES + 2
    for line in lines:
        words = line.split()
        if words[-4:-3] == ["-c"] and words[-3].endswith(".cu"):
            assert words[1] == f"{machine.home}/cuda/bin/nvcc"
            assert {"--use_fast_math", "-O3", "-lineinfo"} <= set(words)
            assert "-gencode=arch=compute_121a,code=sm_121a" in words
        elif words[-4:-3] == ["-c"]:
            assert words[1] == "g++"
            assert {"-Ofast", "-g0", "-fPIC", "-std=c++20", "-I."} <= set(words)
        elif "-shared" in words:
            assert "-Ofast" not in words
            assert {"-ltorch_cuda", "-ltorch_python", "-lcudart"} <= set(words)
    assert "-march" not in log


def test_the_longest_job_begins_first(machine: Machine) -> None:
    """Begun last, it would run alone."""
    machine.build(jobs=1)
    assert machine.calls()[0] == "g++ bindings.cpp"


def test_the_x86_code_is_patched_before_it_is_compiled(machine: Machine) -> None:
    """What the compilers get has the guards; the note says what was done."""
    wheel = machine.build()
    module = contents(wheel)["exllamav3_ext.cpython-312-aarch64-linux-gnu.so"].decode()
    assert module.count("#else  // dsv4: x86 only\n") == 5
    assert module.count("std::this_thread::yield();") == 2
    note = store.read_json(wheel.with_suffix(".json"))
    assert note is not None
    assert note["patch"]["verdict"] == "applied"
    assert note["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert note["source"]["sha256"] == machine.sha256
    assert (note["torch"], note["arch_list"], note["source"]["files"]) == (
        *("2.13.0+cu130", "12.1a"),
        SOURCES,
    )


def test_the_same_is_not_compiled_twice(machine: Machine) -> None:
    """The second deploy takes the wheel; not even the compilers have to be there for that."""
    wheel = machine.build()
    machine.calls()
    (machine.home / "cuda/bin/nvcc").unlink()
    assert machine.build() == wheel
    assert machine.calls() == []
    assert machine.said[-1] == f"take {wheel.name}, compiled before from the same sources"


def test_the_same_sources_make_the_same_bytes(machine: Machine) -> None:
    """A wheel built anew has the hash of the one before, whatever the clock says."""
    wheel = machine.build()
    before = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        assert {one.date_time for one in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    wheel.unlink()
    assert machine.build().read_bytes() == before


@pytest.mark.parametrize("how", ["damaged", "no note", "another's note"])
def test_a_wheel_that_is_not_the_one_in_its_note_is_built_anew(machine: Machine, how: str) -> None:
    """Bytes count, not names."""
    wheel = machine.build()
    before = wheel.read_bytes()
    note = wheel.with_suffix(".json")
    if how == "damaged":
        wheel.write_bytes(before[:-1])
    elif how == "no note":
        note.unlink()
    else:
        store.write_json(note, {**(store.read_json(note) or {}), "key": "0" * 16})
    machine.calls()
    assert machine.build().read_bytes() == before
    assert len(machine.calls()) == SOURCES + 1


def test_nothing_but_the_wheel_and_its_note_is_left(machine: Machine) -> None:
    """Objects of hundreds of megabytes, and what an earlier pin left, go with the success."""
    (machine.wheels / ".exllamav3_ext.0123456789abcdef/objects").mkdir(parents=True)
    wheel = machine.build()
    assert machine.left() == sorted([wheel.name, wheel.with_suffix(".json").name])
    assert wheel.stat().st_mode & 0o777 == 0o644


def test_a_wrong_hash_stops_before_anything_is_unpacked(machine: Machine) -> None:
    """The file and both hashes are named; no byte of the archive was written."""
    right, machine.sha256 = machine.sha256, "0" * 64
    with pytest.raises(ExtensionError) as caught:
        machine.build()
    for part in (str(machine.source), right, "0" * 64, "nothing of it was unpacked"):
        assert part in str(caught.value)
    assert machine.left() == []
    assert machine.calls() == []


def test_a_source_that_is_not_there_is_one_line(machine: Machine) -> None:
    """A mirror lost it: the file is named."""
    machine.source.unlink()
    with pytest.raises(ExtensionError, match=r"any\.whl: expected .* cannot be read"):
        machine.build()


def test_an_archive_that_is_no_wheel_is_one_line(machine: Machine) -> None:
    """The hash can be right and the file be something else."""
    machine.source.write_bytes(b"no archive")
    machine.sha256 = hashlib.sha256(b"no archive").hexdigest()
    with pytest.raises(ExtensionError, match="is no wheel"):
        machine.build()


def test_the_number_of_sources_is_that_of_the_release(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that lacks a file fails when it is called: a search that finds fewer is refused."""
    monkeypatch.setattr(extension, "SOURCES", {machine.sha256: SOURCES + 1})
    with pytest.raises(
        ExtensionError, match=f"wanted .* {SOURCES + 1} sources .* found {SOURCES} "
    ):
        machine.build()
    monkeypatch.setattr(extension, "SOURCES", {machine.sha256: SOURCES})
    machine.build()


def test_sources_that_the_patch_does_not_know_are_refused(machine: Machine) -> None:
    """Drift names the patch and the file before the first compiler runs."""
    machine.rewrite({"avx2_target.cpp": "bool is_sse_supported() { return true; }\n"})
    with pytest.raises(ExtensionError) as caught:
        machine.build()
    assert "exllamav3_aarch64" in str(caught.value)
    assert "avx2_target.cpp" in str(caught.value)
    assert machine.calls() == []


def test_half_guarded_sources_are_refused(machine: Machine) -> None:
    """Some files as from one release and some as from another fit no release."""
    guarded = f"#if defined(__x86_64__)\n{exllamav3_sources.TARGET_AVX512}#endif\n"
    machine.rewrite({"avx512_target.cpp": guarded})
    with pytest.raises(ExtensionError, match="some files guard their x86 code and some do not"):
        machine.build()


def test_a_failure_is_the_first_real_error_with_the_log(machine: Machine) -> None:
    """Not the warning before it, not the words after it; what was compiled is kept."""
    machine.rewrite({"helper.c": "BROKEN\n"})
    with pytest.raises(ExtensionError) as caught:
        machine.build()
    assert "helper.c:9:10: fatal error: immintrin.h: No such file or directory" in str(caught.value)
    assert str(machine.log) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(machine.wheels.glob("*.whl"))
    assert "an error: is not this one" in machine.log.read_text()


def test_after_a_failure_only_what_is_missing_is_compiled(machine: Machine) -> None:
    """The objects of a run that failed are the next run's."""
    machine.rewrite({"quant/exl3_moe.cu": "BROKEN\n"})
    with pytest.raises(ExtensionError):
        machine.build(jobs=1)
    first = machine.calls()
    with pytest.raises(ExtensionError):
        machine.build(jobs=1)
    assert machine.calls() == ["nvcc quant/exl3_moe.cu"]
    assert len(first) == SOURCES


def test_a_module_without_the_engine_s_function_is_no_result(machine: Machine) -> None:
    """It is loaded, with torch, and asked for exl3_moe before there is a wheel."""
    machine.rewrite({"quant/exl3_moe.cu": "void other() {}\n"})
    with pytest.raises(ExtensionError, match="has no attribute 'exl3_moe'"):
        machine.build()
    assert not list(machine.wheels.glob("*.whl"))


def start(machine: Machine) -> subprocess.Popen[bytes]:
    """Run the command in a process of its own, as the unit does."""
    options = ["--source", machine.source, "--sha256", machine.sha256, "--wheels", machine.wheels]
    options += ["--python", machine.home / "python", "--jobs", "1", "--log", machine.log, "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "dsv4.extension", *map(str, options)],
        env={**machine.environment, "PYTHONPATH": str(LIB)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


@pytest.fixture
def sweep(machine: Machine) -> Iterator[None]:
    """End the compilers that a killed build left behind; they are ours."""
    yield
    for line in subprocess.run(
        ["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        number, _, words = line.strip().partition(" ")
        if str(machine.home) in words:
            os.kill(int(number), signal.SIGKILL)


@pytest.mark.usefixtures("sweep")
def test_a_killed_build_goes_on_where_it_was(machine: Machine) -> None:
    """Half an object is none, new time stamps mean nothing, the lock is gone with its holder."""
    (machine.home / "waits").write_text("cpu/moe_mul1.cpp\n")
    running = start(machine)
    wait_for(machine.home / "waiting")
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    begun = machine.calls()
    assert 2 < len(begun) < SOURCES
    assert begun[-1] == "g++ cpu/moe_mul1.cpp"
    (half,) = machine.wheels.glob(".exllamav3_ext.*/objects/*.half.o")
    assert half.read_bytes() == b"half\n"
    # The runtime was made anew in between
    for path in (machine.home / "torch").rglob("*"):
        os.utime(path)
    (machine.home / "waits").write_text("")
    wheel = machine.build()
    done = len(begun) - 1
    assert machine.said[0] == (
        f"compile exllamav3_ext: {done} of {SOURCES} are there from an earlier run"
    )
    assert len(machine.calls()) == SOURCES - done + len(["link"])
    assert b"half" not in contents(wheel)["exllamav3_ext.cpython-312-aarch64-linux-gnu.so"]


@pytest.mark.parametrize("what", ["header", "compiler", "torch"])
def test_objects_of_other_ingredients_are_not_used(machine: Machine, what: str) -> None:
    """A header, a compiler or a torch that changed makes other objects of the same source."""
    machine.rewrite({"quant/exl3_moe.cu": "BROKEN\n"})
    with pytest.raises(ExtensionError):
        machine.build(jobs=1)
    machine.calls()
    changes = {"quant/exl3_moe.cu": "BROKEN\n"}
    if what == "header":
        changes["quant/exl3_moe.cuh"] = "void exl3_moe(int);\n"
    elif what == "compiler":
        (machine.home / "version").write_text("13.1")
    else:
        (machine.home / "torch/version.py").write_text("__version__ = '2.13.1+cu130'\n")
    machine.rewrite(changes)
    with pytest.raises(ExtensionError):
        machine.build(jobs=1)
    assert len(machine.calls()) == SOURCES


@pytest.mark.parametrize("jobs", [1, 3])
def test_no_more_compilers_run_than_memory_allows(machine: Machine, jobs: int) -> None:
    """A job takes gigabytes, so the bound is one."""
    machine.build(jobs=jobs)
    running = most = 0
    for line in (machine.home / "times").read_text().splitlines():
        running += 1 if line.startswith("begin") else -1
        most = max(most, running)
    assert most == jobs


def test_the_first_failure_ends_the_others(machine: Machine) -> None:
    """Nobody waits minutes for compilers whose work is not wanted."""
    slow = COMPILER.format(here=machine.home, name="nvcc").replace("sleep 0.05", "sleep 30")
    program(machine.home / "cuda/bin/nvcc", slow)
    machine.rewrite({"cpu/moe_mul1.cpp": exllamav3_sources.EXPERTS + "// BROKEN\n"})
    begun = time.monotonic()
    with pytest.raises(ExtensionError, match=r"cpu/moe_mul1\.cpp:9:10: fatal error"):
        machine.build(jobs=SOURCES)
    assert time.monotonic() - begun < 10


def test_one_build_at_a_time(machine: Machine) -> None:
    """A second one waits for the first, says so, and finds what it made."""
    machine.wheels.mkdir()
    with (machine.wheels / ".exllamav3_ext.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        waiting = threading.Thread(target=machine.build)
        waiting.start()
        deadline = time.monotonic() + 10
        while not machine.said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert machine.said == ["wait for another build of exllamav3_ext, which is under way"]
        assert machine.calls() == []
    waiting.join(20)
    assert list(machine.wheels.glob("*.whl"))


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("cuda/bin/nvcc", "nvcc: does not answer .*; name the toolkit with CUDA_HOME"),
        ("bin/g++", "g[+][+]: does not answer .*; install g[+][+]"),
        ("include/Python.h", "Python.h: is not there; install that Python's headers"),
        ("torch/include/torch/extension.h", "extension.h: is not there; install torch again"),
        ("torch/version.py", "torch: is no torch .*; install it again"),
        ("python", "python: does not answer .*; give the runtime's python"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_compiled(
    machine: Machine, missing: str, says: str
) -> None:
    """Each tool is asked under the environment that will call it."""
    (machine.home / missing).unlink()
    with pytest.raises(ExtensionError, match=says):
        machine.build()
    assert machine.calls() == []


def test_an_environment_without_a_toolkit_or_a_torch_is_refused(machine: Machine) -> None:
    """What is not named cannot be guessed."""
    del machine.environment["CUDA_HOME"]
    with pytest.raises(ExtensionError, match="CUDA_HOME: is not set"):
        machine.build()
    probe = json.loads((machine.home / "probe.json").read_text())
    (machine.home / "probe.json").write_text(json.dumps({**probe, "torch": None}))
    with pytest.raises(ExtensionError, match="has no torch; install the runtime's packages"):
        machine.build()


def test_a_python_that_fails_says_its_last_line(machine: Machine) -> None:
    """A broken environment is told from a missing one."""
    program(machine.home / "python", "#!/bin/sh\necho 'ImportError: no sysconfig' >&2\nexit 3\n")
    with pytest.raises(ExtensionError, match=r"status 3 \(ImportError: no sysconfig\)"):
        machine.build()


# The parts


@pytest.mark.parametrize(
    ("arch_list", "flags"),
    [
        ("12.1a", ["-gencode=arch=compute_121a,code=sm_121a"]),
        ("9.0", ["-gencode=arch=compute_90,code=sm_90"]),
        (
            "9.0;12.1+PTX",
            [
                "-gencode=arch=compute_90,code=sm_90",
                "-gencode=arch=compute_121,code=sm_121",
                "-gencode=arch=compute_121,code=compute_121",
            ],
        ),
        (" 9.0 12.0f ", [f"-gencode=arch=compute_{n},code=sm_{n}" for n in ("90", "120f")]),
    ],
)
def test_an_architecture_list_is_read_as_torch_reads_it(arch_list: str, flags: list[str]) -> None:
    """Semicolons or spaces, a letter for a family, PTX besides."""
    assert list(extension.arch_flags(arch_list)) == flags


@pytest.mark.parametrize("arch_list", ["", "native", "sm_121a", "121a", "12.1a;", "12.1A", "12"])
def test_a_list_that_names_no_gpu_is_refused(arch_list: str) -> None:
    """The compiler would choose one of its own, and the first kernel would fail."""
    with pytest.raises(ExtensionError, match=r"TORCH_CUDA_ARCH_LIST: wanted .* 12\.1a for a"):
        extension.arch_flags(arch_list)


INGREDIENTS = ("ab" * 32, "cd" * 32, "2.13.0+cu130", "12.1a", "cp312", "linux_aarch64")


def test_every_ingredient_names_another_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources, patch, torch, GPU, Python, machine and our own flags; the same make the same."""
    name = extension.key(*INGREDIENTS)
    assert name == extension.key(*INGREDIENTS)
    others = ("ef" * 32, "01" * 32, "2.13.1+cu130", "9.0", "cp313", "linux_x86_64")
    names = {name}
    for place, other in enumerate(others):
        changed = list(INGREDIENTS)
        changed[place] = other
        names.add(extension.key(*changed))
    monkeypatch.setattr(extension, "CXX", (*extension.CXX, "-fno-math-errno"))
    names.add(extension.key(*INGREDIENTS))
    assert len(names) == 8


@pytest.mark.parametrize(
    ("cores", "available", "jobs"),
    [(20, 118.0, 20), (20, 20.0, 6), (20, 10.0, 1), (20, 3.0, 1), (2, 20.0, 2), (1, 118.0, 1)],
)
def test_jobs_leave_memory_alone(cores: int, available: float, jobs: int) -> None:
    """SAFETY: jobs = max(1, min(cores, (MemAvailable - 8 GiB) / 2))."""
    assert extension.jobs_for(cores, available) == jobs


GNU = """\
In file included from ../torch/include/c10/util/Half.h:12,
                 from cpu/moe_mul1.cpp:2:
../torch/include/c10/util/Half.h:341:1: warning: 'x' may be used uninitialized
cpu/moe_mul1.cpp:12:10: fatal error: immintrin.h: No such file or directory
   12 | #include <immintrin.h>
      |          ^~~~~~~~~~~~~
compilation terminated.
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (GNU, "cpu/moe_mul1.cpp:12:10: fatal error: immintrin.h: No such file or directory"),
        (
            "avx2_target.cpp: In function 'bool is_avx2_supported()':\n"
            "avx2_target.cpp:9:26: error: '__builtin_cpu_supports' was not declared in this scope\n"
            '    9 |         avx2_supported = __builtin_cpu_supports("avx2");\n',
            "avx2_target.cpp:9:26: error: '__builtin_cpu_supports' was not declared in this scope",
        ),
        (
            'cpu/moe_handoff.cu(153): error: identifier "__builtin_ia32_pause" is undefined\n'
            "      __builtin_ia32_pause();\n      ^\n\n1 error detected in the compilation of x.\n",
            'cpu/moe_handoff.cu(153): error: identifier "__builtin_ia32_pause" is undefined',
        ),
        (
            'quant/exl3_moe.cu(12): warning #177-D: variable "x" was declared\n'
            "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'\n",
            "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
        ),
        (
            "nvcc fatal   : Unsupported gpu architecture 'compute_121a'\n",
            "nvcc fatal   : Unsupported gpu architecture 'compute_121a'",
        ),
        (
            "/usr/bin/ld: b.o: in function `f': undefined reference to `exl3_moe_cpu_forward'\n"
            "collect2: error: ld returned 1 exit status\n",
            "/usr/bin/ld: b.o: in function `f': undefined reference to `exl3_moe_cpu_forward'",
        ),
        (
            "/usr/bin/ld: cannot find -lcudart: No such file or directory\n"
            "collect2: error: ld returned 1 exit status\n",
            "/usr/bin/ld: cannot find -lcudart: No such file or directory",
        ),
        (
            "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n",
            "g++: fatal error: Killed signal terminated program cc1plus",
        ),
        (
            "sh: 1: cicc: not found\n",
            "sh: 1: cicc: not found",
        ),
        ("", ""),
    ],
)
def test_the_first_real_error_is_found(text: str, error: str) -> None:
    """In each compiler's own words."""
    assert extension.first_error(text) == error


def test_it_is_found_far_above_the_end() -> None:
    """The cause stands at line 40 of 4000, and the rest talks of errors too."""
    noise = "quant/a.cu(7): warning #20014-D: calling a host function: error: is what this is not\n"
    after = "ninja: build stopped: subcommand failed.\nRuntimeError: Error compiling objects\n"
    text = noise * 40 + GNU + (noise * 100 + after) * 40
    assert extension.first_error(text).endswith("immintrin.h: No such file or directory")


def test_memory_that_ran_out_says_what_to_do() -> None:
    """The compiler says that it was killed; why and what then is for us to say."""
    output = "g++: fatal error: Killed signal terminated program cc1plus\n"
    text = str(extension.failure("bindings.cpp", output, 1, Path("/var/log/dsv4/build.log")))
    assert "fewer --jobs" in text
    assert "/var/log/dsv4/build.log" in text
    assert "signal 9" in str(extension.failure("bindings.cpp", "", -9, Path("build.log")))


# The command


def command(machine: Machine, *more: str) -> int:
    options = ["--source", machine.source, "--sha256", machine.sha256, "--wheels", machine.wheels]
    options += ["--python", machine.home / "python"]
    return extension.main([*map(str, options), *more])


def test_the_command_answers_with_the_wheel(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object with ok on stdout, words on stderr; the log lies beside the wheel."""
    monkeypatch.setenv("PATH", machine.environment["PATH"])
    monkeypatch.setenv("CUDA_HOME", machine.environment["CUDA_HOME"])
    assert command(machine, "--arch", "9.0", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["ok"]
    assert store.sha256_file(Path(found["wheel"])) == found["sha256"]
    assert err.startswith("dsv4 extension: compile exllamav3_ext: ")
    assert "compute_90" in (machine.wheels / "exllamav3_ext.log").read_text()


def test_the_command_fails_in_one_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1, the reason on stderr and in the object."""
    monkeypatch.setenv("CUDA_HOME", machine.environment["CUDA_HOME"])
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert command(machine, "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] in err
    assert err.count("\n") == 1
    assert "TORCH_CUDA_ARCH_LIST" in err
