"""What has to be done for the service to be in the wanted state, decided by state alone."""

from dataclasses import dataclass
from typing import Final, Literal

from deploy import layout
from deploy._state import State

Wanted = Literal["running", "stopped", "keep"]

UP: Final = {"active", "activating", "reloading"}
DOWN: Final = {"inactive", "failed"}


@dataclass(frozen=True)
class Action:
    """Commands to run, whether a start is then to be followed, and why."""

    commands: tuple[str, ...] = ()
    follow: bool = False
    why: str = "it runs from what is on disk"


def decide(state: State, wanted: Wanted) -> Action:
    """Return what is due.

    `keep` starts a service that was never started in this boot or that failed, restarts one that
    runs from something else than what is on disk, and leaves one alone that its owner stopped.
    Restarts go through systemd without waiting for the job: the unit may be starting for minutes,
    and then only a queued restart takes effect.
    """
    unit = state.unit(layout.UNIT)
    active = unit.get("active", "inactive")
    started = bool(state.engine.get("started"))
    differs = state.engine.get("differs") or []
    if wanted == "stopped":
        if active in DOWN:
            return Action(why="it is stopped")
        return Action((f"systemctl stop {layout.UNIT}",), why="it shall be stopped")
    if active in UP:
        if not differs:
            return Action(follow=active != "active")
        why = f"it started from another {', '.join(differs)}"
        return Action((f"systemctl restart --no-block {layout.UNIT}",), True, why)
    if wanted == "keep" and active == "inactive" and started and unit.get("result") == "success":
        return Action(why="its owner stopped it; `systemctl start dsv4` or service_state=running")
    return Action(
        (
            f"systemctl reset-failed {layout.UNIT} 2>/dev/null || true",
            f"systemctl start --no-block {layout.UNIT}",
        ),
        True,
        f"it is {active}",
    )
