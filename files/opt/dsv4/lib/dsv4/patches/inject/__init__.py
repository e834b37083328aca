"""Code that patches put into vLLM and FlashInfer: what is tested here is the text that lands there.

Nothing imports these modules on the target: a patch takes the text below the line `CUT`. They are
modules so that the formatter, the linter, the type checker and the tests see what will run.
"""

from pathlib import Path
from typing import Final

CUT: Final = "# dsv4: from here on this is injected\n"


def block(name: str) -> str:
    """Return the injected part of one module."""
    text = (Path(__file__).parent / f"{name}.py").read_text()
    head, cut, body = text.partition(CUT)
    if not head or not cut or CUT in body:
        raise ValueError(f"{name}: wants the line {CUT.strip()!r} once")
    return body.strip("\n") + "\n"
