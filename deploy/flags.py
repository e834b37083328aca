"""Which flags `vllm serve` takes, by release: read from the releases' own sources.

serve_flags.json holds them and `python -m tests.sources.serve_flags` makes it. A flag that a
route's release does not know is refused here, before a machine is touched; the engine of a built
runtime is asked itself before it is put in service (`dsv4 switch --flags`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).with_name("serve_flags.json")
COMMON: Final = "all"
TABLE: Final[Mapping[str, list[str]]] = json.loads(FILE.read_text())
RELEASES: Final = tuple(release for release in TABLE if release != COMMON)


def number(version: str) -> tuple[int, ...] | None:
    """Return a version as numbers that compare, None when it is none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in match.groups()) if match else None


def known(version: str) -> frozenset[str] | None:
    """Return the flags that an engine takes, None when nobody has read its sources.

    Of a build between two releases, such as a nightly, those that both have.
    """
    if version in RELEASES:
        return frozenset(TABLE[COMMON] + TABLE[version])
    wanted = number(version)
    if wanted is None:
        return None
    before = [it for it in RELEASES if (number(it) or ()) < wanted]
    after = [it for it in RELEASES if (number(it) or ()) >= wanted]
    if not before or not after:
        return None
    return frozenset(TABLE[COMMON]) | (frozenset(TABLE[before[-1]]) & frozenset(TABLE[after[0]]))


def unknown(version: str, flags: Iterable[str]) -> list[str]:
    """Return which of these flags an engine does not take; none where nobody can say."""
    found = known(version)
    return [] if found is None else sorted(set(flags) - found)
