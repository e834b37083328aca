"""The aarch64 patch: x86 code stays as it is between guards, and what takes its place says no."""

import re

import pytest

from dsv4.patches.engine import Verdict
from dsv4.patches.exllamav3 import AARCH64, FOLDER, X86
from tests.unit import exllamav3_sources as sources

TRANSFORMS = {edit.path.removeprefix(f"{FOLDER}/"): edit.transform for edit in AARCH64.edits}
KERNELS = [name for name in sources.X86 if name.endswith(".cpp")]
PAUSES = [name for name in sources.X86 if name.endswith(".cu")]


def patched(name: str) -> str:
    """Return what the patch makes of a file."""
    outcome = TRANSFORMS[name](sources.X86[name])
    assert outcome.verdict is Verdict.APPLIES, outcome.why
    assert outcome.text is not None
    return outcome.text


def branch(text: str, *, x86: bool) -> str:
    """Return what a preprocessor leaves of a text on a processor, Linux being the system.

    Knows the two conditions that occur; anything else is left as it stands.
    """
    true = {f"({X86})": x86, X86: x86, f"!({X86})": not x86, "defined(__linux__)": True}
    kept, state = [], [True]
    taken = [False]
    for line in text.splitlines(keepends=True):
        words = line.strip().partition("  //")[0]
        if words == "#ifdef __linux__":
            words = "#if defined(__linux__)"
        kind, _, condition = words.partition(" ")
        if kind == "#if":
            state.append(state[-1] and true[condition])
            taken.append(true[condition])
        elif kind == "#elif":
            state[-1] = state[-2] and not taken[-1] and true[condition]
            taken[-1] |= true[condition]
        elif kind == "#else":
            state[-1] = state[-2] and not taken[-1]
        elif kind == "#endif":
            state.pop()
            taken.pop()
        elif state[-1]:
            kept.append(line)
    return "".join(kept)


def test_every_x86_file_is_patched() -> None:
    """Seven files have x86 code; none is left out and no other is touched."""
    assert TRANSFORMS.keys() == sources.X86.keys()


@pytest.mark.parametrize("name", sources.X86)
def test_on_x86_it_is_the_original_code(name: str) -> None:
    """Guards only: what an x86 compiler sees is what it saw before, to the byte."""
    before = branch(sources.X86[name], x86=True)
    after = branch(patched(name), x86=True)
    assert after == (before if before.endswith("\n") else f"{before}\n")


@pytest.mark.parametrize("name", sources.X86)
def test_elsewhere_nothing_of_x86_is_left(name: str) -> None:
    """No header of intrinsics, no intrinsic, no question to an x86 processor, no pause."""
    left = branch(patched(name), x86=False)
    assert not re.search(r"immintrin|_mm|__builtin_(ia32|cpu)", left)


@pytest.mark.parametrize("name", sources.X86)
def test_a_patched_file_is_known_as_such(name: str) -> None:
    """Applying twice changes nothing more."""
    assert TRANSFORMS[name](patched(name)).verdict is Verdict.APPLIED


@pytest.mark.parametrize("name", sources.X86)
def test_a_missing_file_is_drift(name: str) -> None:
    """A release without the file is not the one this was written for."""
    outcome = TRANSFORMS[name](None)
    assert outcome.verdict is Verdict.DRIFTED
    assert "is not there" in outcome.why


@pytest.mark.parametrize("name", KERNELS)
def test_a_patched_file_that_was_edited_is_drift(name: str) -> None:
    """A stub that somebody changed is neither ours nor the original."""
    text = patched(name)
    for edited in (
        text.replace("    return false;\n}\n#endif", "    return true;\n}\n#endif"),
        text.replace("TORCH_CHECK(false", "TORCH_CHECK(true"),
        text.rpartition("#else")[0],
    ):
        if edited != text:
            assert TRANSFORMS[name](edited).verdict is Verdict.DRIFTED


def test_stubs_answer_refuse_or_do_nothing() -> None:
    """What asks gets false, what prepares the processor does nothing, all else raises its name."""
    left = branch(patched("parallel/all_reduce_cpu_avx2.cpp"), x86=False)
    assert re.search(r"void enable_fast_fp\(\)\n\{\n\}\n", left)
    raised = re.findall(r'TORCH_CHECK\(false, "(\w+): ', left)
    assert raised == ["cpu_reduce_parallel", "perform_cpu_reduce", "perform_cpu_reduce_avx2"]
    left = branch(patched("avx2_target.cpp"), x86=False)
    assert left.count("    return false;\n") == 2
    assert "TORCH_CHECK" not in left


def test_stubs_have_the_signatures_of_what_they_stand_for() -> None:
    """They are taken from the definitions, function pointers among the parameters included."""
    left = branch(patched("parallel/all_reduce_cpu_avx2.cpp"), x86=False)
    text = sources.REDUCE_AVX2
    signature = text[text.index("void cpu_reduce_parallel") : text.index("{\n    if (threads)")]
    assert signature in left


@pytest.mark.parametrize("name", PAUSES)
def test_a_pause_becomes_a_yield_in_its_place(name: str) -> None:
    """Elsewhere the loop gives its core away; only that line differs."""
    left = branch(patched(name), x86=False)
    assert left.count("std::this_thread::yield();\n") == 1
    x86 = branch(sources.X86[name], x86=True)
    assert left == x86.replace("__builtin_ia32_pause", "std::this_thread::yield")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("cpu/moe_handoff.cu", sources.HANDOFF_CU * 2, "wanted one x86 pause block, found 2"),
        (
            "cpu/moe_handoff.cu",
            sources.HANDOFF_CU + "void other() { __builtin_ia32_pause(); }\n",
            "found 1 (2 x86 pauses in all)",
        ),
        ("cpu/moe_handoff.cu", "#include <thread>\n", "found 0 (0 x86 pauses in all)"),
        (
            "parallel/all_reduce_cpu.cu",
            sources.REDUCE_CU.removeprefix("#include <thread>\n"),
            "does not include <thread>",
        ),
        (
            "cpu/moe_mul1.cpp",
            sources.EXPERTS + sources.functions({"exl3_moe_cpu_new": "int a"}),
            "defines exl3_moe_cpu_new, for which there is no stub",
        ),
        (
            "cpu/moe_mul1.cpp",
            sources.EXPERTS.replace("exl3_moe_cpu_has_avx2()", "exl3_moe_cpu_has_avx2(int a)")
            + "bool exl3_moe_cpu_has_avx2() { return true; }\n",
            "wanted one definition of exl3_moe_cpu_has_avx2, found 2",
        ),
        (
            "avx2_target.cpp",
            sources.TARGET_AVX2.replace("is_f16c_supported", "is_sse_supported"),
            "wanted one definition of is_f16c_supported, found 0",
        ),
        (
            "avx512_target.cpp",
            sources.TARGET_AVX512 + "bool is_amx_supported()\n{\n    return true;\n}\n",
            "defines is_amx_supported, for which there is no stub",
        ),
    ],
)
def test_another_text_is_drift_with_what_was_counted(name: str, text: str, says: str) -> None:
    """Exact anchors with exact counts: a text that nobody looked at is left alone."""
    outcome = TRANSFORMS[name](text)
    assert outcome.verdict is Verdict.DRIFTED
    assert says in outcome.why


def test_a_function_that_later_releases_have_gets_its_stub() -> None:
    """1.4.7 has one more test hook; where it is defined it has a stub, elsewhere none."""
    name = "cpu/moe_mul1.cpp"
    later = "int64_t exl3_moe_cpu_pool_stress(int threads, int spin)\n{\n    return 0;\n}\n"
    outcome = TRANSFORMS[name](sources.EXPERTS + later)
    assert outcome.text is not None
    assert 'TORCH_CHECK(false, "exl3_moe_cpu_pool_stress: ' in outcome.text
    assert "pool_stress" not in patched(name)


@pytest.mark.parametrize("name", sources.X86)
def test_a_release_with_guards_of_its_own_is_left_alone(name: str) -> None:
    """From 1.5.3 on the files guard their x86 code themselves."""
    if name in KERNELS:
        text = f"#if (defined(__x86_64__) || defined(__i386__))\n{sources.X86[name]}\n#endif\n"
    else:
        arm = '#if defined(__aarch64__) || defined(__arm__)\n    asm volatile("yield");\n'
        text = sources.X86[name].replace("#ifdef __linux__\n", f"{arm}#elif defined(__linux__)\n")
    assert TRANSFORMS[name](text).verdict is Verdict.SUPERSEDED
