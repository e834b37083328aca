"""One memory equation for presets, overrides, the gate and the watchdog.

The GPU of a GB10 takes its memory from the same pool as the host, and the machine locks up near
1 GiB available without an OOM kill. All sizes are GiB, times are milliseconds, rates GiB/s.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

GIB: Final = 1 << 30
KIB_PER_GIB: Final = 1 << 20

SOFT_ABOVE_HARD_GIB: Final = 1.5
"""How far the soft floor lies above the hard one: room for one TERM to be answered."""

PREFILL_FREE_TOKENS: Final = 65_536
PREFILL_GIB_PER_64K: Final = 4.0
"""Extra headroom of a long prefill. Field reports: 128k tokens died with about 9 GiB available and
finished with about 18; 64k ran with 8.3 to 9.1. A line through those points, not a measurement."""


@dataclass(frozen=True)
class Limits:
    """The constants of the equation; each is a setting with its source."""

    lock_gib: float = 1.0
    fall_gib_s: float = 14.0
    sample_ms: float = 100.0
    reaction_ms: float = 50.0
    spare_gib: float = 0.4
    soft_above_gib: float = SOFT_ABOVE_HARD_GIB
    host_use_gib: float = 5.9
    headroom_margin_gib: float = 1.0


@dataclass(frozen=True)
class Floors:
    """Where the watchdog kills (`hard`) and where it asks first (`soft`), MemAvailable in GiB."""

    hard: float
    soft: float


def floors(limits: Limits) -> Floors:
    """Return the floors: lock level, plus what is lost before a kill arrives, plus a spare."""
    lost = limits.fall_gib_s * (limits.sample_ms + limits.reaction_ms) / 1000
    hard = limits.lock_gib + lost + limits.spare_gib
    return Floors(hard=hard, soft=hard + limits.soft_above_gib)


def prefill_gib(context_tokens: int) -> float:
    """Return the headroom a prompt of this length needs beyond a short one's."""
    over = max(0, context_tokens - PREFILL_FREE_TOKENS)
    return over / PREFILL_FREE_TOKENS * PREFILL_GIB_PER_64K


def steady_headroom(total_gib: float, utilisation: float, limits: Limits) -> float:
    """Return what stays available while the engine holds its share and the host its own."""
    return total_gib * (1 - utilisation) - limits.host_use_gib


def needed_headroom(context_tokens: int, limits: Limits) -> float:
    """Return the least steady headroom at which the watchdog stays quiet in normal use."""
    return serving_headroom(context_tokens, limits) + limits.headroom_margin_gib


def highest_utilisation(total_gib: float, context_tokens: int, limits: Limits) -> float:
    """Return the highest utilisation, in hundredths rounded down, that leaves enough headroom."""
    needed = needed_headroom(context_tokens, limits) + limits.host_use_gib
    return max(0.0, int((1 - needed / total_gib) * 100 + 1e-9) / 100)


def lowest_utilisation(total_gib: float, weights_gib: float) -> float:
    """Return the lowest utilisation, in hundredths rounded up, that could hold the weights."""
    return math.ceil(weights_gib / total_gib * 100 - 1e-9) / 100


def compile_jobs(available_gib: float, cores: int) -> int:
    """Return how many compilers may run at once: 2 GiB each after 8 GiB that stay untouched."""
    return max(1, min(cores, int((available_gib - 8) / 2)))


def serving_headroom(context_tokens: int, limits: Limits) -> float:
    """Return what must be left when the engine has its share, or the watchdog ends it in use.

    What a start is held to; settings are held to `needed_headroom`, which has a margin on top.
    """
    return floors(limits).soft + prefill_gib(context_tokens)


def start_needs(total_gib: float, utilisation: float, margin_gib: float) -> float:
    """Return what must be free before the engine starts: its share, and room for what runs on."""
    return total_gib * utilisation + margin_gib


def startable_utilisation(total_gib: float, free_gib: float, margin_gib: float) -> float:
    """Return the highest utilisation, in hundredths rounded down, that `free_gib` lets start."""
    return max(0.0, int(((free_gib - margin_gib) / total_gib) * 100 + 1e-9) / 100)


@dataclass(frozen=True)
class MemInfo:
    """One sample of /proc/meminfo, GiB."""

    total: float
    free: float
    available: float
    cached: float
    dirty: float
    cma_total: float
    cma_free: float


class BadMemInfo(ValueError):
    """The text is no /proc/meminfo; a watchdog skips such a sample, a gate waits for the next."""


DIGITS: Final = 12
"""What a size in KiB can have: a petabyte is absurd, and longer numbers do not fit a float."""


NEEDED: Final = frozenset({"MemTotal", "MemFree", "MemAvailable"})
TOLD: Final = NEEDED | {"Cached", "Dirty", "CmaTotal", "CmaFree"}


def sizes(text: str, wanted: frozenset[str] | None = None) -> dict[str, float]:
    """Return the sizes that /proc/meminfo names, GiB.

    + wanted: stop when these are found, which for a watchdog's few is after five of fifty lines

    A size without its unit is none: in a text that was cut off, the last number may have lost
    digits, and would look like memory that is gone.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if wanted is not None and name not in wanted:
            continue
        words = rest.split()
        if words[1:] == ["kB"] and words[0].isdecimal() and len(words[0]) <= DIGITS:
            found[name] = int(words[0]) / KIB_PER_GIB
            if wanted is not None and len(found) == len(wanted):
                break
    return found


def parse_meminfo(text: str, wanted: frozenset[str] = TOLD) -> MemInfo:
    """Return the fields we decide by; raise `BadMemInfo` when a needed one is missing or absurd.

    + wanted: at least `NEEDED`; what is left out reads as 0
    """
    values = sizes(text, wanted)
    try:
        total, free, available = (values[k] for k in ("MemTotal", "MemFree", "MemAvailable"))
    except KeyError as error:
        raise BadMemInfo(f"meminfo has no {error.args[0]}") from None
    # A running kernel never gives its last page away: all zero is a file that is not filled
    if total <= 0 or free <= 0 or free > total or available > total:
        raise BadMemInfo(f"meminfo is absurd: total {total}, free {free}, available {available}")
    return MemInfo(
        total=total,
        free=free,
        available=available,
        cached=values.get("Cached", 0.0),
        dirty=values.get("Dirty", 0.0),
        cma_total=values.get("CmaTotal", 0.0),
        cma_free=values.get("CmaFree", 0.0),
    )


def free_for_engine(info: MemInfo, device: str) -> float:
    """Return what the engine's own start check will see as free, GiB.

    A model, not a measurement: a hook must not open a CUDA context. On a GB10 the figure CUDA gives
    follows MemFree, because page cache counts as used until somebody drops it. A CPU engine takes
    what the kernel can reclaim, which is MemAvailable.
    """
    return info.available if device == "cpu" else info.free


def free_kind(device: str) -> str:
    """Return what `free_for_engine` is, in words."""
    return "MemAvailable" if device == "cpu" else "MemFree, a model of what CUDA sees"


def read_meminfo(path: Path = Path("/proc/meminfo")) -> MemInfo:
    """Return one sample; see `parse_meminfo` for what it raises."""
    return parse_meminfo(path.read_text())
