"""How long each start took, and how much of the pack came from the disk: cold or warm.

`ready` notes every start that ended with a token; the bench reports the newest cold and the newest
warm one of what is served now.
"""

import time
from pathlib import Path
from typing import Any, Final

from dsv4 import layout, store

KEPT: Final = 50
COLD_FROM: Final = 0.5
WARM_TO: Final = 0.1
"""Shares of the pack's bytes that the engine had read from disk; between them is neither."""


def kind_of(read_gib: float, pack_gib: float) -> str:
    """Return cold, warm or mixed."""
    share = read_gib / pack_gib if pack_gib else 0.0
    return "cold" if share >= COLD_FROM else "warm" if share <= WARM_TO else "mixed"


def note(
    *,
    ready_s: float,
    weights_s: float | None,
    read_gib: float,
    pack_gib: float,
    runtime: str,
    view: str,
    path: Path = layout.LOADS_JSON,
) -> None:
    """Add a start; failing to write is no reason to fail it."""
    starts = store.read_json_or(path, {}).get("starts")
    known = [start for start in starts if isinstance(start, dict)] if starts else []
    start = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kind": kind_of(read_gib, pack_gib),
        "ready_s": round(ready_s, 1),
        "weights_s": None if weights_s is None else round(weights_s, 1),
        "read_gib": round(read_gib, 3),
        "pack_gib": round(pack_gib, 3),
        "runtime": runtime,
        "view": view,
    }
    try:
        store.write_json(path, {"starts": [*known, start][-KEPT:]})
    except OSError:
        return


def newest(runtime: str, view: str, path: Path = layout.LOADS_JSON) -> dict[str, Any]:
    """Return the newest cold and the newest warm start of this runtime with this view."""
    starts = store.read_json_or(path, {}).get("starts")
    found: dict[str, Any] = {"cold": None, "warm": None}
    for start in starts if isinstance(starts, list) else []:
        if not isinstance(start, dict):
            continue
        kind, of = str(start.get("kind")), (start.get("runtime"), start.get("view"))
        if kind in found and of == (runtime, view):
            found[kind] = start
    return found
