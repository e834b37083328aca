"""The flags of `vllm serve`, read from where each release declares them.

python -m tests.sources.serve_flags        write deploy/serve_flags.json anew
"""

import ast
import json
from collections.abc import Iterator

from deploy import flags
from tests.sources import wheels

FRONTEND = {"BaseFrontendArgs", "FrontendArgs"}
"""Classes whose every field becomes a flag."""


def declared(source: str) -> Iterator[str]:
    """Yield the flags that a file declares, without their dashes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "add_argument":
                words = (it.value for it in node.args if isinstance(it, ast.Constant))
                yield from (it[2:] for it in words if isinstance(it, str) and it[:2] == "--")
        elif isinstance(node, ast.ClassDef) and node.name in FRONTEND:
            fields = (it.target for it in node.body if isinstance(it, ast.AnnAssign))
            yield from (it.id.replace("_", "-") for it in fields if isinstance(it, ast.Name))


def of(release: str) -> frozenset[str]:
    """Return the flags of a release."""
    paths = (wheels.ARGUMENTS, wheels.FRONTEND[release])
    return frozenset(flag for path in paths for flag in declared(wheels.text(release, path)))


def table() -> dict[str, list[str]]:
    """Return what deploy/serve_flags.json holds: what all releases know, and what each adds."""
    found = {release: of(release) for release in wheels.RELEASES}
    common = frozenset.intersection(*found.values())
    return {
        flags.COMMON: sorted(common),
        **{release: sorted(known - common) for release, known in found.items()},
    }


if __name__ == "__main__":
    flags.FILE.write_text(json.dumps(table(), indent=1) + "\n")
