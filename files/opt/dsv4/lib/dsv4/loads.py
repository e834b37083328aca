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


SLOW: Final = 0.5
"""Below this share of what the disk gives, a load is slow for another reason than the disk."""
TELLING_GIB: Final = 1.0
"""A load of less is over before its rate says anything."""


def rate(start: dict[str, Any]) -> float | None:
    """Return how fast a start read its weights from disk, GiB/s; None when it was not noted."""
    read, took = start.get("read_gib"), start.get("weights_s")
    if isinstance(read, int | float) and isinstance(took, int | float) and took > 0:
        return read / took
    return None


def words(start: dict[str, Any]) -> str:
    """Return how long a start took, and how fast it read its weights where it read them."""
    text = f"{float(start['ready_s']):.0f} s to the first token"
    loaded = rate(start)
    return text if start.get("kind") != "cold" or loaded is None else f"{text} ({loaded:.2f} GiB/s)"


def advice(start: dict[str, Any] | None) -> str:
    """Return what to do about a cold load that was far slower than the disk, empty for none."""
    if not start or start.get("kind") != "cold" or start.get("readahead"):
        return ""
    loaded, disk = rate(start), start.get("disk_gib_s")
    if loaded is None or not isinstance(disk, int | float) or start["read_gib"] < TELLING_GIB:
        return ""
    if loaded >= SLOW * disk:
        return ""
    return (
        f"the last cold load read {loaded:.2f} GiB/s where the disk gives {disk:.2f}:"
        " service_readahead: true reads ahead of it (nobody has measured that on a Spark)"
    )


def note(
    *,
    ready_s: float,
    weights_s: float | None,
    read_gib: float,
    pack_gib: float,
    disk_gib_s: float | None = None,
    readahead: bool = False,
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
        "disk_gib_s": None if disk_gib_s is None else round(disk_gib_s, 3),
        "readahead": readahead,
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
