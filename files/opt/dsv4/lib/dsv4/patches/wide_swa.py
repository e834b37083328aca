"""`wide_swa`: prompts with images on SM120, where windows are wider than the kernel takes.

The vision model's prefill windows have 512 columns. FlashInfer's prefill for SM120 with a second
cache is built for 128, and raises. The limit is FlashInfer's, so the slices are made there, in the
one function that calls the kernel; the version is pinned and its text is known. What only vLLM
knows is whether a batch has images at all: without, no row uses more than the first 128 columns,
and the rest is cut off before the call.
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
    is_applied,
    lines,
    names,
    only,
    parameters,
    superseded,
)

NAME: Final = "wide_swa"
CORE: Final = "flashinfer/mla/_core.py"
KERNEL: Final = "flashinfer/data/csrc/sparse_mla_sm120_prefill.cu"
ATTENTION: Final = "vllm/models/deepseek_v4/nvidia/flashinfer_sparse.py"
WINDOWS: Final = "vllm/v1/attention/backends/mla/sparse_swa.py"

CALLER: Final = "_trtllm_batch_decode_sparse_mla_dsv4_sm120"
CALLEE: Final = "_trtllm_batch_decode_sparse_mla_sm120"
SEGMENT: Final = "_SparseMLASegment"
PASSED: Final = frozenset(
    {
        *("query", "kv_cache", "workspace_buffer", "sparse_mla_segments", "out", "sm_scale"),
        *("sinks", "lse", "return_lse", "kv_scale_format"),
    }
)
LIMIT: Final = "if (topk != 128) return false;"

BLOCK: Final = inject.block("wide_swa") + "\n\n"
SLICES: Final = f"_sparse_mla_in_slices(\n{' ' * 12}{CALLEE},\n{' ' * 12}{SEGMENT},\n"

CHUNK: Final = "swa_indices_chunk = swa_metadata.prefill_swa_indices[query_start:query_end]"
PREFILL: Final = "_forward_prefill"
NARROW: Final = lines(
    """\
# Without an image in the batch no row uses more than the window itself, and the columns
# for images would cost four launches a layer instead of one
if swa_metadata.prefill_left_visible is None:
    swa_indices_chunk = swa_indices_chunk[..., : self.window_size].contiguous()
""",
    12,
)


@fails_closed
def slices(text: str | None) -> Outcome:
    """Route FlashInfer's call of the kernel through the slices."""
    if text is None:
        raise Unknown("is not there")
    if is_applied(text, NAME, (BLOCK, SLICES), ("_sparse_mla_in_slices",)):
        return Outcome(Verdict.APPLIED)
    source = Source(text)
    callee, caller = source.function(CALLEE), source.function(CALLER)
    takes = set(parameters(callee))
    if "lse_scale" in takes:
        return superseded(f"{CALLEE} takes lse_scale: a FlashInfer whose kernel takes any width")
    if takes != PASSED:
        raise Unknown(f"{CALLEE} takes {', '.join(sorted(takes))}")
    call = only(list(calls(caller, CALLEE)), f"{CALLER} calling {CALLEE}")
    passed = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if call.args or set(passed) != PASSED:
        raise Unknown(f"{CALLER} calls {CALLEE} with {', '.join(map(str, passed))}")
    if (passed["lse"], passed["return_lse"]) != ("None", "False"):
        raise Unknown(f"{CALLER} wants the log-sum-exp of {CALLEE}, which slices do not give")
    segment = source.klass(SEGMENT)
    fields = [
        one.target.id
        for one in segment.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    if fields != ["indices", "lengths", "kv_cache"]:
        raise Unknown(f"{SEGMENT} has the fields {', '.join(fields)}")
    start, _ = source.span(call)
    opening = source.text[start : source.span(call.keywords[0].value)[0]]
    if not opening.startswith(f"{CALLEE}(\n"):
        raise Unknown(f"{CALLER} writes its call of {CALLEE} on one line")
    source.insert(start, start + len(f"{CALLEE}(\n"), SLICES)
    source.need(Callable="collections.abc", Any="typing", torch="torch")
    source.before(caller, BLOCK)
    return Outcome(Verdict.APPLIES, source.changed())


@fails_closed
def narrow(text: str | None) -> Outcome:
    """Cut off the columns for images where a batch has none."""
    if text is None:
        raise Unknown("is not there")
    if is_applied(text, NAME, (NARROW,), (": self.window_size].contiguous()",)):
        return Outcome(Verdict.APPLIED)
    source = Source(text)
    methods = [
        method
        for owner in source.tree.body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name == PREFILL
    ]
    prefill = only(methods, f"a method {PREFILL}")
    chunk = only(
        [
            node
            for node in ast.walk(prefill)
            if isinstance(node, ast.Assign) and ast.unparse(node) == CHUNK
        ],
        f"{CHUNK} in {PREFILL}",
    )
    call = only(
        list(calls(prefill, "flashinfer_trtllm_batch_decode_sparse_mla_dsv4")),
        f"{PREFILL} calling the kernel",
    )
    passed = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if passed.get("sparse_indices") != "swa_indices_chunk" or chunk.col_offset != 12:
        raise Unknown(f"{PREFILL} passes {passed.get('sparse_indices')} to the kernel")
    if "window_size" not in names(source.tree):
        raise Unknown("knows no window_size")
    source.after(chunk, NARROW)
    return Outcome(Verdict.APPLIES, source.changed())


def premise(texts: Mapping[str, str | None]) -> Outcome | None:
    """Ask whether windows are ever wide here, and whether the kernel is one that minds."""
    windows = texts[WINDOWS]
    if windows is None:
        return Outcome(Verdict.DRIFTED, why=f"{WINDOWS}: is not there")
    if "prefill_left_visible" not in windows:
        if "vision" in windows:
            return Outcome(
                Verdict.DRIFTED,
                why=f"{WINDOWS}: mentions vision, but no prefill_left_visible, which tells whether"
                " a batch has images",
            )
        return superseded(f"{WINDOWS}: the windows here are never widened for images")
    kernel = texts[KERNEL]
    if kernel is None or LIMIT not in kernel:
        core = texts[CORE]
        if core is not None and f"def {CALLEE}(" in core and "lse_scale: float" in core:
            return superseded(f"{CORE}: this FlashInfer's kernel takes windows of any width")
        found = "is not there" if kernel is None else f"has no `{LIMIT}`"
        return Outcome(Verdict.DRIFTED, why=f"{KERNEL}: {found}: the kernel's limits are not known")
    return None


PATCH: Final = Patch(
    name=NAME,
    summary="prompts with images on SM120: wide windows in slices, merged exactly",
    edits=(Edit(CORE, slices), Edit(ATTENTION, narrow)),
    reads=(WINDOWS, KERNEL, CORE),
    premise=premise,
)
