"""exllamav3's real sources against aarch64: what does not compile there does, once it is patched.

The compilers are real: Debian's cross compiler, and CUDA's from its wheels. They make objects for
aarch64 and sm_121a of every host file and of the two patched kernels' files; the other 107 kernel
files hold no x86 code and are compiled in the layer `cross`.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsv4 import extension
from dsv4.patches import engine
from dsv4.patches.engine import Verdict
from dsv4.patches.exllamav3 import AARCH64, FOLDER, KERNELS
from tests.sources import aarch64
from tests.sources.aarch64 import Compiled

HOST = (
    "avx2_target.cpp",
    "avx512_target.cpp",
    "bindings.cpp",
    "cpu/moe_mul1.cpp",
    "cuda_drv.cpp",
    "cuda_host.cpp",
    "generator/strings.cpp",
    "hadamard.cpp",
    "libtorch/attention.cpp",
    "libtorch/blocksparse_mlp.cpp",
    "libtorch/dsv4_attn.cpp",
    "libtorch/dsv4_compressor.cpp",
    "libtorch/gated_delta_net.cpp",
    "libtorch/gated_rmsnorm.cpp",
    "libtorch/linear.cpp",
    "libtorch/mla_attention.cpp",
    "libtorch/mlp.cpp",
    "parallel/all_reduce_cpu_avx2.cpp",
    "parallel/all_reduce_cpu_avx512.cpp",
    "sam.cpp",
    "stloader.cpp",
    "triton_kernel.cpp",
)

FAILURES = {
    "avx2_target.cpp": "__builtin_cpu_supports",
    "avx512_target.cpp": "__builtin_cpu_supports",
    "cpu/moe_handoff.cu": "__builtin_ia32_pause",
    "cpu/moe_mul1.cpp": "immintrin.h: No such file",
    "parallel/all_reduce_cpu.cu": "__builtin_ia32_pause",
    "parallel/all_reduce_cpu_avx2.cpp": "immintrin.h: No such file",
    "parallel/all_reduce_cpu_avx512.cpp": "immintrin.h: No such file",
}
"""The files that do not compile as they are, and what the first error speaks of."""

PATCHED = tuple(FAILURES)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of 1.4.5 as they are."""
    return aarch64.unpacked("1.4.5", tmp_path_factory.mktemp("original"), patched=False)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of 1.4.5 with the patch."""
    return aarch64.unpacked("1.4.5", tmp_path_factory.mktemp("patched"), patched=True)


@pytest.fixture(scope="module")
def failed(original: Path) -> Mapping[str, Compiled]:
    """What became of the unpatched files."""
    return aarch64.compile_sources(original, list(FAILURES))


@pytest.fixture(scope="module")
def compiled(patched: Path) -> Mapping[str, Compiled]:
    """What became of the patched tree: the longest job first."""
    others = [name for name in (*HOST, *PATCHED) if name != extension.FIRST]
    return aarch64.compile_sources(patched, [extension.FIRST, *dict.fromkeys(others)])


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Compiled]:
    """What became of the patched files of 1.4.7, which has one function more."""
    folder = aarch64.unpacked("1.4.7", tmp_path_factory.mktemp("later"), patched=True)
    return aarch64.compile_sources(folder, list(PATCHED))


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("1.4.5", Verdict.APPLIES),
        ("1.4.7", Verdict.APPLIES),
        ("1.5.3", Verdict.SUPERSEDED),
        ("1.6.5", Verdict.SUPERSEDED),
    ],
)
def test_each_release_has_its_verdict(tmp_path: Path, version: str, verdict: Verdict) -> None:
    """Releases with x86 code are patched in all seven files; from 1.5.3 on they guard it."""
    aarch64.unpacked(version, tmp_path, patched=False)
    found = engine.status(tmp_path, [AARCH64]).patches[AARCH64.name]
    assert {one.verdict for one in found.files.values()} == {verdict}, found.why
    assert found.verdict is verdict
    assert len(found.files) == len(PATCHED)


def test_all_sources_are_there(original: Path) -> None:
    """131 files: 22 for the host compiler, which are those named here, and 109 for CUDA's."""
    sources = extension.sources_of(original)
    assert len(sources) == extension.SOURCES[aarch64.EXLLAMAV3["1.4.5"]] == 131
    assert sorted(name for name in sources if not name.endswith(".cu")) == sorted(HOST)


@pytest.mark.parametrize("name", FAILURES)
def test_unpatched_it_does_not_compile(failed: Mapping[str, Compiled], name: str) -> None:
    """The patch is needed, for the reason it gives."""
    assert failed[name].status != 0
    assert FAILURES[name] in extension.first_error(failed[name].output)


@pytest.mark.parametrize("name", dict.fromkeys((*HOST, *PATCHED)))
def test_patched_it_compiles(compiled: Mapping[str, Compiled], name: str) -> None:
    """Every host file, and both patched files of kernels, become objects for aarch64."""
    assert compiled[name].status == 0, extension.first_error(compiled[name].output)
    header = compiled[name].object.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.parametrize("name", PATCHED)
def test_the_later_release_compiles_too(later: Mapping[str, Compiled], name: str) -> None:
    """A verdict that says so is no promise until a compiler agrees."""
    assert later[name].status == 0, extension.first_error(later[name].output)


def symbols(path: Path, kind: str) -> set[str]:
    """Return the names a linker sees in an object: `defined`, or `undefined`."""
    done = subprocess.run(
        ["aarch64-linux-gnu-nm", f"--{kind}-only", "--extern-only", "--format=posix", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[0] for line in done.stdout.splitlines()}


def about(names: set[str], mangled: set[str]) -> set[str]:
    """Return the mangled names of functions with one of these names in no namespace."""
    wanted = {f"_Z{len(name)}{name}" for name in names}
    return {one for one in mangled if any(one.startswith(begin) for begin in wanted)}


def test_stubs_have_the_very_names_their_callers_link_to(
    compiled: Mapping[str, Compiled], patched: Path
) -> None:
    """A stub with another signature would leave the module without the function it needs."""
    declared = {
        match
        for header in (
            *("avx2_target.h", "avx512_target.h", "cpu/moe_mul1.h"),
            *("parallel/all_reduce_cpu_avx2.h", "parallel/all_reduce_cpu_avx512.h"),
        )
        for match in re.findall(
            r"^(?:void|bool|int64_t)\s+(\w+)\s*\(", (patched / header).read_text(), re.MULTILINE
        )
    }
    stubs = {name for kernels in KERNELS.values() for name in kernels.stubs}
    assert declared == stubs
    defined = set().union(*(symbols(compiled[name].object, "defined") for name in KERNELS))
    assert len(about(stubs, defined)) == len(stubs)
    callers = [one.object for name, one in compiled.items() if name not in KERNELS]
    called = about(stubs, set().union(*(symbols(path, "undefined") for path in callers)))
    assert len(called) > 10
    assert called <= defined


def preprocessed(path: Path, processor: str) -> str:
    """Return what is left of a file for a processor, its own conditions alone decided.

    Includes are taken out before, and nothing is predefined but the system and the processor.
    """
    text = re.sub(r"^\s*#include.*$", "", path.read_text(), flags=re.MULTILINE)
    done = subprocess.run(
        [
            *(aarch64.CXX, "-E", "-P", "-undef", "-x", "c++"),
            *("-D__linux__", "-D__GNUC__=12", f"-D{processor}", "-"),
        ],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("name", PATCHED)
def test_for_x86_it_is_the_original(original: Path, patched: Path, name: str) -> None:
    """Only guards were added: an x86 compiler reads what it read before."""
    before = preprocessed(original / name, "__x86_64__")
    assert len(before) > 100
    assert preprocessed(patched / name, "__x86_64__") == before


@pytest.mark.parametrize("name", PATCHED)
def test_for_aarch64_no_x86_code_is_left(patched: Path, name: str) -> None:
    """Nor is it hidden behind what this compiler happens not to define."""
    left = preprocessed(patched / name, "__aarch64__")
    assert not re.search(r"\b_mm\d*_|__builtin_(?:ia32|cpu)_", left)


def test_nothing_else_in_the_tree_is_changed(original: Path, patched: Path) -> None:
    """Seven files, and no other."""
    before, after = extension.hashes_of(original), extension.hashes_of(patched)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == set(PATCHED)
    assert {edit.path for edit in AARCH64.edits} == {f"{FOLDER}/{name}" for name in PATCHED}
