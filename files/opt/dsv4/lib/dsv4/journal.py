"""The journal as lines in order: what was said, when, in which boot, by which unit."""

import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

FIELDS: Final = (
    *("MESSAGE", "_SYSTEMD_UNIT", "UNIT", "SYSLOG_IDENTIFIER", "_TRANSPORT"),
    *("__REALTIME_TIMESTAMP",),
)
KERNEL: Final = "kernel"
LIMIT: Final = 20_000
TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Line:
    """One line of a log; `at` in seconds since 1970, `boot` 0 for this one and -1 for the last."""

    text: str
    unit: str = ""
    at: float = 0.0
    boot: int = 0


def message(value: Any) -> str:
    """Return a journal field as text; one with bytes that are none comes as numbers."""
    if isinstance(value, list):
        return bytes(number & 255 for number in value if isinstance(number, int)).decode(
            errors="replace"
        )
    return str(value or "")


def parse(output: str, boot: int) -> Iterator[Line]:
    """Yield the lines of `journalctl -o json`; a record that is cut off is left out."""
    for record in output.splitlines():
        try:
            entry = json.loads(record)
            at = int(entry.get("__REALTIME_TIMESTAMP") or 0) / 1e6
        except (ValueError, AttributeError, TypeError):
            continue
        # What systemd says of a unit names it in UNIT, what the unit says itself in _SYSTEMD_UNIT
        unit = message(entry.get("UNIT") or entry.get("_SYSTEMD_UNIT"))
        if entry.get("_TRANSPORT") == KERNEL:
            unit = KERNEL
        for text in message(entry.get("MESSAGE")).splitlines():
            yield Line(text, unit, at, boot)


def ask(*words: str) -> str:
    """Return what journalctl prints, nothing when it cannot be asked."""
    try:
        done = subprocess.run(
            ["journalctl", "--no-pager", "--quiet", *words],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def of(units: Iterable[str], boot: int) -> list[Line]:
    """Return what these units and the kernel said in one boot, oldest first."""
    chosen = [word for unit in units for word in ("-u", unit)]
    common = (
        "-b",
        str(boot),
        "-n",
        str(LIMIT),
        "-o",
        "json",
        f"--output-fields={','.join(FIELDS)}",
    )
    found = [*parse(ask(*common, *chosen), boot), *parse(ask(*common, "-k"), boot)]
    return sorted(found, key=lambda line: line.at)  # stable: lines of one unit keep their order


def last_of(boot: int, count: int = 40) -> list[str]:
    """Return the last lines of a boot, whoever said them."""
    return ask("-b", str(boot), "-n", str(count), "-o", "cat").splitlines()
