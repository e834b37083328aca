"""What the hooks need of systemd: a unit's properties, and to give way to a stop."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Final

ASKED: Final = 5


def show_all(units: Iterable[str], names: Iterable[str]) -> str:
    """Return the properties of units as systemctl prints them; empty where systemd is silent."""
    import subprocess  # by hand nobody asks systemd, and it takes 6 ms

    try:
        done = subprocess.run(
            ["systemctl", "show", "--no-pager", "-p", ",".join(names), *units],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def show(unit: str, *names: str) -> dict[str, str]:
    """Return a unit's properties; empty where systemd does not answer."""
    return dict(line.partition("=")[::2] for line in show_all([unit], names).splitlines())


def is_stopping(unit: str) -> bool:
    """Say whether somebody has stopped the unit while it was starting.

    The signal goes to every process of the unit, and so to a `systemctl` that one of them has just
    started to ask this.
    """
    for _ in range(ASKED):
        if state := show(unit, "ActiveState").get("ActiveState"):
            return state == "deactivating"
        time.sleep(0.05)
    return False


def is_hook() -> bool:
    """Say whether systemd runs this as part of a unit, and not somebody by hand."""
    return "INVOCATION_ID" in os.environ


def as_hook(unit: str, meanwhile: Callable[[], None] | None = None) -> bool:
    """Prepare to give way to a stop; say whether this hook shall do its work at all.

    + meanwhile: what to do about the stop before giving way

    systemd sends SIGTERM to the hook of a unit that its owner stops, and takes it for no failure
    (`SuccessExitStatus`), but then has the next hook run in the middle of the stop: that one stands
    aside. A hook that was sent the signal by anybody else has failed. By hand, outside a unit,
    neither applies.
    """
    if not is_hook():
        return True

    def end(number: int, frame: object) -> None:
        stopped = is_stopping(unit)
        if stopped and meanwhile is not None:
            meanwhile()
        os._exit(0 if stopped else 1)

    signal.signal(signal.SIGTERM, end)
    return not is_stopping(unit)
