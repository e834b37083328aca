"""Let exllamav3's extension compile on aarch64: its x86 code is guarded, not replaced.

Releases up to 1.5.1 have seven files with x86 instructions in them: two questions to the processor,
three files of AVX kernels, and a `pause` in two spinning loops. All of it serves tensor parallelism
over several GPUs and experts computed on the processor; an engine on one GPU never gets there.

Each file of kernels is kept whole between `#if` and `#else`, and behind the `#else` stands, for
every function that other files link to, one that says no: asked for the instruction set it answers
false, told to change the processor's floating point mode it does nothing, and otherwise it raises.
What raises reaches Python as a RuntimeError and the server lives on; an abort would take it down.
The signatures are taken from the definitions in the very file, so they cannot disagree with its
header, and a file that defines other functions than those known here is not touched.

In the loops `pause` becomes `std::this_thread::yield()`. Arm's own `yield` hint does nothing on
cores with one thread each, like all of a GB10's, so the loop would burn its core; giving the core
to a thread that waits is what a pause is for, and both files include <thread> already.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final

from dsv4.patches.engine import Edit, Outcome, Patch, Verdict

FOLDER: Final = "exllamav3/exllamav3_ext"

X86: Final = "defined(__x86_64__) || defined(__i386__) || defined(_M_X64) || defined(_M_IX86)"
MARK: Final = "// dsv4: x86 only"
HEAD: Final = f"#if {X86}  {MARK}\n"

UPSTREAM: Final = re.compile(
    r"^[ \t]*#[ \t]*if\b.*\bdefined\(__(?:x86_64|aarch64)__\)", re.MULTILINE
)
"""A guard as later releases have it: a condition on the processor around the x86 code."""


class Stub(Enum):
    """What stands for a function of the x86 code on another processor."""

    FALSE = "return false;"
    NOTHING = ""
    RAISE = "raise"


@dataclass(frozen=True)
class Kernels:
    """One file of x86 code, and what other files call in it."""

    what: str
    """What the machine cannot do, for the exception's sentence."""
    includes: tuple[str, ...]
    stubs: Mapping[str, Stub]
    later: Mapping[str, Stub]
    """Functions that only some releases have."""
    prefix: str = ""
    """Names without it are in an anonymous namespace."""


REDUCE: Final = "tensor parallelism through the processor"
EXPERTS: Final = "computing experts on the processor"

KERNELS: Final[Mapping[str, Kernels]] = {
    "avx2_target.cpp": Kernels(
        "",
        ("avx2_target.h",),
        {"is_avx2_supported": Stub.FALSE, "is_f16c_supported": Stub.FALSE},
        {},
    ),
    "avx512_target.cpp": Kernels("", ("avx512_target.h",), {"is_avx512_supported": Stub.FALSE}, {}),
    "parallel/all_reduce_cpu_avx2.cpp": Kernels(
        REDUCE,
        ("all_reduce_cpu_avx2.h",),
        {
            "cpu_reduce_parallel": Stub.RAISE,
            "enable_fast_fp": Stub.NOTHING,
            "enable_fast_fp_avx2": Stub.NOTHING,
            "perform_cpu_reduce": Stub.RAISE,
            "perform_cpu_reduce_avx2": Stub.RAISE,
        },
        {},
    ),
    "parallel/all_reduce_cpu_avx512.cpp": Kernels(
        REDUCE,
        ("all_reduce_cpu_avx512.h",),
        {
            "bf16_add_inplace_avx512": Stub.RAISE,
            "bf16_add_twosrc_avx512": Stub.RAISE,
            "fp16_add_inplace_avx512": Stub.RAISE,
            "fp16_add_twosrc_avx512": Stub.RAISE,
            "enable_fast_fp_avx512": Stub.NOTHING,
            "perform_cpu_reduce_avx512": Stub.RAISE,
        },
        {},
    ),
    "cpu/moe_mul1.cpp": Kernels(
        EXPERTS,
        ("moe_mul1.h",),
        {
            "exl3_moe_cpu_set_prof": Stub.NOTHING,
            "exl3_moe_cpu_stage_experts": Stub.RAISE,
            "exl3_moe_cpu_has_avx2": Stub.FALSE,
            "exl3_moe_cpu_has_avx512_vnni": Stub.FALSE,
            "exl3_moe_cpu_has_avx512_vbmi": Stub.FALSE,
            "exl3_moe_cpu_make_layer": Stub.RAISE,
            "exl3_moe_cpu_free_layer": Stub.RAISE,
            "exl3_moe_cpu_forward_raw": Stub.RAISE,
            "exl3_moe_cpu_forward": Stub.RAISE,
        },
        {"exl3_moe_cpu_pool_stress": Stub.RAISE},
        prefix="exl3_moe_cpu_",
    ),
}

PAUSES: Final = ("parallel/all_reduce_cpu.cu", "cpu/moe_handoff.cu")

DEFINITION: Final = re.compile(
    r"^(?P<type>bool|int|int64_t|void)\s+(?P<name>\w+)\s*"
    r"(?P<parameters>\((?:[^(){};]|\([^(){};]*\))*\))\s*\{",
    re.MULTILINE,
)
"""A function as exllamav3 writes it: it begins its line, so `static` and `inline` ones do not."""

PAUSE: Final = re.compile(
    r"^(?P<outer>[ \t]*)#ifdef __linux__\n"
    r"(?P<inner>[ \t]*)__builtin_ia32_pause\(\);\n"
    r"(?P=outer)#else\n"
    r"(?P=inner)_mm_pause\(\);\n"
    r"(?P=outer)#endif\n",
    re.MULTILINE,
)

PAUSE_GUARDED: Final = re.compile(
    r"^(?P<outer>[ \t]*)#if !\(" + re.escape(f"{X86})  {MARK}\n") + r"(?P<inner>[ \t]*)"
    r"std::this_thread::yield\(\);\n"
    r"(?P=outer)#elif defined\(__linux__\)\n"
    r"(?P=inner)__builtin_ia32_pause\(\);\n"
    r"(?P=outer)#else\n"
    r"(?P=inner)_mm_pause\(\);\n"
    r"(?P=outer)#endif\n",
    re.MULTILINE,
)


def drifted(why: str) -> Outcome:
    """Return the verdict on a text that is not the one this was written for."""
    return Outcome(Verdict.DRIFTED, why=why)


def superseded() -> Outcome:
    """Return the verdict on a release with guards of its own."""
    return Outcome(
        Verdict.SUPERSEDED, why="guards its x86 code itself, as releases from 1.5.3 on do"
    )


def stub(kernels: Kernels, kind: Stub, definition: re.Match[str]) -> str:
    """Return the function that stands for one of the x86 code."""
    name = definition["name"]
    body = kind.value
    if kind is Stub.RAISE:
        body = (
            f'TORCH_CHECK(false, "{name}: {kernels.what} needs an x86 processor with AVX2;'
            ' this one has no such instructions");'
        )
    inside = f"    {body}\n" if body else ""
    return f"{definition[0].rstrip('{').rstrip()}\n{{\n{inside}}}\n"


def tail(kernels: Kernels, text: str) -> str | Outcome:
    """Return what stands behind the x86 code of a file, or why its functions are not those known.

    The code may define what other releases do, and nothing that no release we know defines.
    """
    known = {**kernels.stubs, **kernels.later}
    found: dict[str, list[re.Match[str]]] = {}
    for definition in DEFINITION.finditer(text):
        if definition["name"].startswith(kernels.prefix):
            found.setdefault(definition["name"], []).append(definition)
    for name in sorted(kernels.stubs.keys() | found.keys()):
        if name not in known:
            return drifted(f"defines {name}, for which there is no stub")
        if (count := len(found.get(name, []))) != 1:
            return drifted(f"wanted one definition of {name}, found {count}")
    parts = [f"#else  {MARK}\n"]
    parts += [f'#include "{name}"\n' for name in kernels.includes]
    parts += ["#include <c10/util/Exception.h>\n"] if Stub.RAISE in known.values() else []
    in_order = sorted((one.start(), name, one) for name, (one,) in found.items())
    parts += [f"\n{stub(kernels, known[name], one)}" for _, name, one in in_order]
    return "".join([*parts, f"#endif  {MARK}\n"])


def guard_kernels(kernels: Kernels, text: str | None) -> Outcome:
    """Put one file of x86 code between guards, with stubs for the others."""
    if text is None:
        return drifted("is not there")
    inner = text.removeprefix(HEAD)
    if inner != text:
        inner, separator, _ = inner.rpartition(f"#else  {MARK}\n")
        wanted = tail(kernels, inner) if separator else drifted("has lost its stubs")
        if isinstance(wanted, Outcome):
            return wanted
        if text != HEAD + inner + wanted:
            return drifted("has our guard, but not our stubs: it was edited since")
        return Outcome(Verdict.APPLIED)
    if UPSTREAM.search(text):
        return superseded()
    added = tail(kernels, text)
    if isinstance(added, Outcome):
        return added
    ended = text if text.endswith("\n") else f"{text}\n"
    return Outcome(Verdict.APPLIES, HEAD + ended + added)


def guard_pause(text: str | None) -> Outcome:
    """Put the `pause` of a spinning loop between guards, and a yield beside it."""
    if text is None:
        return drifted("is not there")
    wanted, ours = len(PAUSE.findall(text)), len(PAUSE_GUARDED.findall(text))
    builtin = text.count("__builtin_ia32_pause")
    if (wanted, ours, builtin) == (0, 1, 1):
        return Outcome(Verdict.APPLIED)
    if (wanted, ours, builtin) == (1, 0, 1):
        if "#include <thread>\n" not in text:
            return drifted("does not include <thread>")
        return Outcome(
            Verdict.APPLIES,
            PAUSE.sub(
                rf"\g<outer>#if !({X86})  {MARK}\n"
                r"\g<inner>std::this_thread::yield();\n"
                r"\g<outer>#elif defined(__linux__)\n"
                r"\g<inner>__builtin_ia32_pause();\n"
                r"\g<outer>#else\n"
                r"\g<inner>_mm_pause();\n"
                r"\g<outer>#endif\n",
                text,
            ),
        )
    if (wanted, ours, builtin) == (0, 0, 1) and UPSTREAM.search(text):
        return superseded()
    return drifted(f"wanted one x86 pause block, found {wanted} ({builtin} x86 pauses in all)")


AARCH64: Final = Patch(
    name="exllamav3_aarch64",
    summary="exllamav3's extension compiles on aarch64: x86 code guarded, its stubs raise",
    edits=(
        *(
            Edit(f"{FOLDER}/{name}", partial(guard_kernels, kernels))
            for name, kernels in KERNELS.items()
        ),
        *(Edit(f"{FOLDER}/{name}", guard_pause) for name in PAUSES),
    ),
)
