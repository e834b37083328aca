"""The weight files of the served pack, in the order the engine loads them."""

import re
from pathlib import Path

from dsv4 import lifecycle


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that puts 2 before 10, as vLLM's loader sorts."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def weight_files(view: Path) -> dict[str, int]:
    """Return the weight files that a view must have: real path and size, in order of loading.

    Empty when the view cannot be read: whoever follows a load then has nothing to follow.
    """
    try:
        paths = [(view / name).resolve() for name in sorted(lifecycle.shards(view), key=natural)]
        return {str(path): path.stat().st_size for path in paths}
    except (OSError, ValueError):
        return {}
