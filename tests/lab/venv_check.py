"""Tell whether an environment still is what was installed: `python venv_check.py SITE_PACKAGES`.

Looks at every file that every installed package lists, for being there and its size: a cut-off
installation, a full disk and a clean-up of somebody's show here, in a fraction of a second.
"""

import csv
import sys
from pathlib import Path


def damage(site: Path) -> list[str]:
    """Return the listed files of `site` that are missing or have another size."""
    found = []
    records = sorted(site.glob("*.dist-info/RECORD"))
    if not records:
        return [str(site)]
    for record in records:
        with record.open(newline="") as lines:
            for name, _, size in csv.reader(lines):
                # Compiled files come and go with the interpreter
                if not name.endswith(".pyc") and not _is_whole(site / name, size):
                    found.append(name)
    return found


def _is_whole(path: Path, size: str) -> bool:
    try:
        there = path.stat().st_size
    except OSError:
        return False
    return not size or there == int(size)


if __name__ == "__main__":
    missing = damage(Path(sys.argv[1]))
    if missing:
        raise SystemExit(f"{missing[0]} and {len(missing) - 1} more files are damaged")
