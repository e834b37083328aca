"""`o_proj_bf16`: an output projection for weights that have no FP8 scales.

The pack keeps its dense weights in BF16. The CUDA path of these vLLM versions reads block scales of
wo_a without asking, and dies in the first forward. All attention backends share one function, so
that is the one place to mend.
"""

import ast
from collections.abc import Mapping
from typing import Final

from dsv4.patches import inject
from dsv4.patches.engine import Edit, Outcome, Patch, Verdict
from dsv4.patches.source import (
    Source,
    Unknown,
    calls,
    fails_closed,
    first_statement,
    is_applied,
    lines,
    names,
    only,
    parameters,
    superseded,
)

NAME: Final = "o_proj_bf16"
PATH: Final = "vllm/models/deepseek_v4/nvidia/ops/o_proj.py"
HELPERS: Final = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"

FUNCTION: Final = "deep_gemm_fp8_o_proj"
QUANTISES: Final = "fused_inv_rope_fp8_quant"
PARAMETERS: Final = frozenset(
    ("o", "positions", "cos_sin_cache", "wo_a", "wo_b", "n_groups", "rope_dim", "o_lora_rank")
)
SCALES: Final = frozenset(f"hasattr(wo_a, '{one}')" for one in ("weight_scale", "weight_scale_inv"))

HELPER: Final = "_fused_inverse_rope_gptj"
HELPER_PARAMETERS: Final = ["o", "positions", "cos_sin_cache", "rope_head_dim"]

BLOCK: Final = inject.block("o_proj") + "\n\n"
CALL: Final = lines(
    """\
# Weights that were loaded as BF16 have no scales to read below
if wo_a.weight.dtype != torch.float8_e4m3fn:
    return _bf16_o_proj(
        o,
        positions,
        cos_sin_cache,
        wo_a,
        wo_b,
        n_groups=n_groups,
        rope_dim=rope_dim,
        o_lora_rank=o_lora_rank,
    )
""",
    4,
)


@fails_closed
def transform(text: str | None) -> Outcome:
    """Give the function a branch for weights that are not FP8."""
    if text is None:
        raise Unknown(f"is not there, and so is no {FUNCTION}")
    if is_applied(text, NAME, (BLOCK, CALL), ("_bf16_o_proj",)):
        return Outcome(Verdict.APPLIED)
    source = Source(text)
    function = source.function(FUNCTION)
    if missing := PARAMETERS - set(parameters(function)):
        raise Unknown(f"{FUNCTION} takes no {', '.join(sorted(missing))}")
    if _has_its_own_branch(function):
        return superseded(f"{FUNCTION} has a branch of its own for weights that are not FP8")
    only(list(calls(function, QUANTISES)), f"{FUNCTION} quantising its input")
    only(list(calls(function, "fp8_einsum")), f"{FUNCTION} calling fp8_einsum")
    if asked := _decides_by_weight(function):
        raise Unknown(f"{FUNCTION} decides by `{asked}`, which may mean BF16 weights too")
    source.need(torch="torch")
    source.before(function, BLOCK)
    source.before(first_statement(function), CALL)
    return Outcome(Verdict.APPLIES, source.changed())


def _decides_by_weight(function: ast.FunctionDef) -> str:
    """Return a condition of the function's own about wo_a, other than the name of its scales.

    Without one, whatever the function does it does to FP8 weights, and a branch in front is right.
    """
    about = {"wo_a"}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and names(node.value) & about:
            about |= {name for target in node.targets for name in names(target)}
    tests = [node.test for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp)]
    tests += [node for node in ast.walk(function) if isinstance(node, ast.Compare)]
    tests += [keyword.value for call in calls(function, QUANTISES) for keyword in call.keywords]
    for words, test in ((ast.unparse(test), test) for test in tests):
        if names(test) & about and words not in SCALES:
            return words
    return ""


def _mentions_dtype_of_weight(function: ast.FunctionDef) -> bool:
    """Tell whether a function asks for `wo_a.weight.dtype`."""
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "wo_a.weight.dtype"
        for node in ast.walk(function)
    )


def _has_its_own_branch(function: ast.FunctionDef) -> bool:
    """Tell whether the function asks for the weight's type and then multiplies without FP8."""
    unquantised = any(
        keyword.arg == "quantize"
        for call in calls(function, QUANTISES)
        for keyword in call.keywords
    )
    return unquantised and _mentions_dtype_of_weight(function) and any(calls(function, "bmm"))


def premise(texts: Mapping[str, str | None]) -> Outcome | None:
    """Want the kernel that the injected code calls, where that code is to be injected."""
    if transform(texts[PATH]).verdict is not Verdict.APPLIES:
        return None
    text = texts[HELPERS]
    try:
        if text is None:
            raise Unknown("is not there")
        if (found := parameters(Source(text).function(HELPER))) != HELPER_PARAMETERS:
            raise Unknown(f"{HELPER} takes {', '.join(found)}, not {', '.join(HELPER_PARAMETERS)}")
    except Unknown as error:
        return Outcome(Verdict.DRIFTED, why=f"{HELPERS}: {error}")
    return None


PATCH: Final = Patch(
    name=NAME,
    summary="output projection for BF16 weights, which have no FP8 scales",
    edits=(Edit(PATH, transform),),
    reads=(PATH, HELPERS),
    premise=premise,
)
