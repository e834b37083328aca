"""`stream_load`: load a vision pack tensor by tensor instead of all of it at once.

The vision class sorts the weights to bring the language model's together, and so holds every tensor
of the pack: more than the machine has beside the model it is filling.
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
    names,
    only,
    superseded,
)
from dsv4.patches.text_weights import MODEL, knows_image_tokens

NAME: Final = "stream_load"
FILES: Final = (
    "vllm/models/deepseek_v4/nvidia/vl_model.py",
    "vllm/models/deepseek_v4/common/vl_model.py",
)
"""Where the class has been: it moved between the nightly and 0.30.0, and left its name behind."""

VISION_MODEL: Final = "DeepseekV4ForConditionalGeneration"
LOAD: Final = f"{VISION_MODEL}.load_weights"
STREAMS: Final = "stream_language_model_first"
BY_NAME: Final = "lambda x: x[0]"

BLOCK: Final = inject.block("stream_load") + "\n\n"
OURS: Final = "_language_model_first"


@fails_closed
def transform(text: str | None) -> Outcome:
    """Stream where the class sorts."""
    if text is None:
        return superseded(f"is not there; no {VISION_MODEL} to mend in it")
    if is_applied(text, NAME, (BLOCK,), (f"def {OURS}",)):
        load = Source(text).function(LOAD)
        if len(list(calls(load, OURS))) == 1 and not any(calls(load, "sorted")):
            return Outcome(Verdict.APPLIED)
        raise Unknown(f"has {OURS} in it, but {LOAD} does not use it once; reinstall its package")
    source = Source(text)
    if not source.classes(VISION_MODEL):
        return _without_the_class(source)
    load = source.function(LOAD)
    found = list(calls(load, "sorted"))
    if not found and any(calls(load, STREAMS)):
        return superseded(f"{LOAD} streams by itself ({STREAMS})")
    if not found:
        raise Unknown(
            f"{LOAD} (line {load.lineno}) neither sorts the weights, which is what {NAME} mends,"
            f" nor streams them by {STREAMS}; where it streams in a way of its own, {NAME} does not"
            " belong in this set"
        )
    by_name = only(found, f"{LOAD} sorting weights")
    if (
        len(by_name.args) != 1
        or [keyword.arg for keyword in by_name.keywords] != ["key"]
        or ast.unparse(by_name.keywords[0].value) != BY_NAME
        or not (names(by_name.args[0]) & {"mapped", "hf_to_vllm_mapper"})
    ):
        raise Unknown(f"{LOAD} sorts in another way: {ast.unparse(by_name)}")
    # iter(sorted(...)) where there is one; an iterator needs none around it
    around = [call for call in calls(load, "iter") if call.args == [by_name]]
    source.replace(around[0] if around else by_name, f"{OURS}({source.of(by_name.args[0])})")
    source.need(Iterable="collections.abc", Iterator="collections.abc", torch="torch")
    source.before(source.klass(VISION_MODEL), BLOCK)
    return Outcome(Verdict.APPLIES, source.changed())


def _without_the_class(source: Source) -> Outcome:
    """Judge a file that has no vision model: it may pass on another file's."""
    passed_on = any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").endswith("common.vl_model")
        and any(alias.name == VISION_MODEL for alias in node.names)
        for node in source.tree.body
    )
    if passed_on:
        return superseded(f"passes on the {VISION_MODEL} of common/vl_model.py")
    raise Unknown(f"wanted a class {VISION_MODEL} once, or that of common/vl_model.py, found none")


def premise(texts: Mapping[str, str | None]) -> Outcome | None:
    """Fail where the model reads images but its vision class is in none of the known places."""
    if any(texts[path] is not None for path in FILES):
        return None
    text = texts[MODEL]
    try:
        if text is None:
            raise Unknown("is not there")
        if knows_image_tokens(Source(text)):
            raise Unknown(
                f"knows image tokens, but {VISION_MODEL} is neither in {' nor in '.join(FILES)}"
            )
    except Unknown as error:
        return Outcome(Verdict.DRIFTED, why=f"{MODEL}: {error}")
    return superseded(f"{MODEL}: the text model only; there is no {VISION_MODEL}")


PATCH: Final = Patch(
    name=NAME,
    summary="a vision pack is loaded tensor by tensor, the language model first",
    edits=tuple(Edit(path, transform) for path in FILES),
    reads=(*FILES, MODEL),
    premise=premise,
)
