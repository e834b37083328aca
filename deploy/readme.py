"""The parts of README.md that are data: `python -m deploy.readme` writes them anew.

Each stands between `<!-- NAME -->` and `<!-- /NAME -->`. A test fails when one is out of date.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Final

from deploy import layout, routes, settings
from dsv4 import faults


def run_book() -> str:
    """Return deploy/full.py from its first step on, as the README shows it."""
    source = (layout.REPO / "deploy/full.py").read_text()
    return f"```python\n{source[source.index('settings.check()') :]}```\n"


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "faults": faults.table,
    "routes": routes.table,
    "run-book": run_book,
    "settings": settings.table,
}


def render(text: str) -> str:
    """Return the README with its generated parts as they must be."""
    for name, table in TABLES.items():
        opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(opening) != 1 or text.count(closing) != 1:
            raise ValueError(f"README.md: needs the marks of {name} exactly once")
        before, _, rest = text.partition(opening)
        _, _, after = rest.partition(closing)
        text = f"{before}{opening}{table()}{closing}{after}"
    return text


def main() -> int:
    """Rewrite README.md."""
    layout.README.write_text(render(layout.README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
