"""How a bench tells what it measured: one JSON object, with the machine and its load."""

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

LOAD_BEFORE: Final = round(os.getloadavg()[0], 2)
"""As the bench found the machine, before its own work."""


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Return the least, the median and the most."""
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def show(found: Mapping[str, Any]) -> int:
    """Print it, and return the exit status: figures are never a failure."""
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    machine = {
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "load_before": LOAD_BEFORE,
        "load_after": round(os.getloadavg()[0], 2),
    }
    json.dump({**found, "on": machine}, sys.stdout, indent=1)
    print()
    return 0
