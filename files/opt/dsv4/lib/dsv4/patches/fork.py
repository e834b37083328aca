"""`fork_loader`: the pack in the archived fork, whose dense layers are FP8.

The fork's files were never seen here. What is wanted of them is what its users' own edits relied
on; anything else is refused.
"""

import ast
from typing import Final

from dsv4.patches import inject
from dsv4.patches.engine import Edit, Outcome, Patch, Verdict
from dsv4.patches.source import (
    Source,
    Unknown,
    fails_closed,
    first_statement,
    is_applied,
    lines,
    superseded,
)
from dsv4.patches.text_weights import (
    HAS_BIASES,
    IMPORTS,
    MODEL,
    TEXT_MODEL,
    knows_image_tokens,
    text_model_load,
)

NAME: Final = "fork_loader"

BLOCK: Final = inject.block("fork_weights") + "\n\n"
CALL: Final = lines(
    """\
weights = _fork_weights(
    weights,
    self.config,
    {
        name
        for name, parameter in self.named_parameters()
        if parameter.dtype == torch.float8_e4m3fn
    },
)
""",
    8,
)

# The pack's first config left the method out; that the biases are there is what tells
ASKED: Final = "getattr(config, 'topk_method', None) == 'noaux_tc'"
ASSUMED: Final = 'getattr(config, "topk_method", "noaux_tc") == "noaux_tc"'


@fails_closed
def transform(text: str | None) -> Outcome:
    """Filter and quantise in front of the loader; take the routing method for granted."""
    if text is None:
        raise Unknown(f"is not there, and so is no {TEXT_MODEL}")
    if is_applied(text, NAME, (BLOCK, CALL, ASSUMED), ("def _fork_weights",)):
        return Outcome(Verdict.APPLIED)
    source = Source(text)
    if knows_image_tokens(source):
        return superseded(HAS_BIASES)
    load = text_model_load(source)
    asked = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Compare) and ast.unparse(node) == ASKED
    ]
    if len(asked) != 1:
        raise Unknown(f"wanted {ASKED} once, found {len(asked)}")
    source.replace(asked[0], ASSUMED)
    source.need(**IMPORTS)
    source.before(source.klass(TEXT_MODEL), BLOCK)
    source.before(first_statement(load), CALL)
    return Outcome(Verdict.APPLIES, source.changed())


PATCH: Final = Patch(
    name=NAME,
    summary="the archived fork loads a vision pack, its dense weights made block-FP8",
    edits=(Edit(MODEL, transform),),
)
