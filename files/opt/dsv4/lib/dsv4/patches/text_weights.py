"""`text_loader` and `draft_bias_vl`: a vision pack in a vLLM that knows the text model only.

Its loader raises at the first tensor it has no place for: the vision tower, the router's biases for
image tokens, and a bias of the hash-routed layers that the text model does not use.
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

MODEL: Final = "vllm/models/deepseek_v4/nvidia/model.py"
DRAFT: Final = "vllm/models/deepseek_v4/nvidia/dspark.py"

TEXT_MODEL: Final = "DeepseekV4ForCausalLM"
LOAD: Final = f"{TEXT_MODEL}.load_weights"
HAS_BIASES: Final = "this model has the router's biases for image tokens (bias_vl) itself"

TEXT_BLOCK: Final = inject.block("text_weights") + "\n\n"
TEXT_CALL: Final = lines("weights = _text_weights(weights, self.config)\n", 8)

IMPORTS: Final = {
    "re": "re",
    "Iterable": "collections.abc",
    "Iterator": "collections.abc",
    "Any": "typing",
    "torch": "torch",
}
"""What the injected filters use."""

REMAP: Final = "_remap_dspark_name"
DRAFT_CALL: Final = lines(
    """\
# The router's bias for image tokens: a draft without images has no parameter for it
if rest == "ffn.gate.bias_vl":
    return None
""",
    8,
)


def knows_image_tokens(source: Source) -> bool:
    """Tell whether the model makes a parameter `bias_vl` of its own."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "bias_vl" for node in ast.walk(source.tree)
    )


def text_model_load(source: Source) -> ast.FunctionDef:
    """Return the text model's `load_weights`, as far as a filter in front of it needs it known."""
    load = source.function(LOAD)
    if parameters(load) != ["self", "weights"]:
        raise Unknown(f"{LOAD} takes {', '.join(parameters(load))}, not self, weights")
    found = [
        call
        for call in calls(load, "load_weights")
        if call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "weights"
    ]
    only(found, f"{LOAD} handing on weights")
    if "_text_weights" in names(load) or "_fork_weights" in names(load):
        raise Unknown(f"{LOAD} is filtered already by another patch of ours; use one of them")
    return load


@fails_closed
def text_loader(text: str | None) -> Outcome:
    """Put a filter in front of the text model's loader."""
    if text is None:
        raise Unknown(f"is not there, and so is no {TEXT_MODEL}")
    if is_applied(text, "text_loader", (TEXT_BLOCK, TEXT_CALL), ("def _text_weights",)):
        return Outcome(Verdict.APPLIED)
    source = Source(text)
    if knows_image_tokens(source):
        return superseded(HAS_BIASES)
    load = text_model_load(source)
    source.need(**IMPORTS)
    source.before(source.klass(TEXT_MODEL), TEXT_BLOCK)
    source.before(first_statement(load), TEXT_CALL)
    return Outcome(Verdict.APPLIES, source.changed())


@fails_closed
def draft_bias_vl(text: str | None) -> Outcome:
    """Leave the image tokens' bias out where the draft's names are mapped."""
    if text is None:
        raise Unknown(f"is not there, and so is no {REMAP}")
    if is_applied(text, "draft_bias_vl", (DRAFT_CALL,), ("ffn.gate.bias_vl",)):
        return Outcome(Verdict.APPLIED)
    source = Source(text)
    owner = only(
        [
            node
            for node in source.tree.body
            if isinstance(node, ast.ClassDef)
            and any(isinstance(one, ast.FunctionDef) and one.name == REMAP for one in node.body)
        ],
        f"a class with {REMAP}",
    )
    remap = source.function(f"{owner.name}.{REMAP}")
    rest = only(
        [
            node
            for node in remap.body
            if isinstance(node, ast.Assign) and ast.unparse(node) == "rest = m.group(2)"
        ],
        f"rest = m.group(2) in {REMAP}",
    )
    source.after(rest, DRAFT_CALL)
    return Outcome(Verdict.APPLIES, source.changed())


def draft_premise(texts: Mapping[str, str | None]) -> Outcome | None:
    """Leave the draft alone where it has the parameter: dropping the tensor would leave it unset.

    The draft is built from the model's own layers, so the model's file tells.
    """
    text = texts[MODEL]
    if text is None:
        return Outcome(
            Verdict.DRIFTED, why=f"{MODEL}: is not there, the draft's layers are not known"
        )
    try:
        known = knows_image_tokens(Source(text))
    except Unknown as error:
        return Outcome(Verdict.DRIFTED, why=f"{MODEL}: {error}")
    return superseded(f"{MODEL}: {HAS_BIASES}, and so does the draft") if known else None


TEXT_LOADER: Final = Patch(
    name="text_loader",
    summary="the text model loads a vision pack, and refuses one it would route wrongly",
    edits=(Edit(MODEL, text_loader),),
)

DRAFT_BIAS_VL: Final = Patch(
    name="draft_bias_vl",
    summary="the draft of the text model loads from a vision pack",
    edits=(Edit(DRAFT, draft_bias_vl),),
    reads=(MODEL,),
    premise=draft_premise,
)
