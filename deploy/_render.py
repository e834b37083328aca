"""Templates, rendered strictly: a name that is not given is an error, never an empty word."""

from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from deploy import layout


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(layout.TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - unit files and shell profiles, not HTML
    )


def template(target: Path, **context: Any) -> bytes:
    """Return the bytes for a target path; the tree under templates/ mirrors the target."""
    name = f"{str(target).lstrip('/')}.j2"
    return _environment().get_template(name).render(**context).encode()
