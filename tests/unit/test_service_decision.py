"""What is due for the service follows from its state alone."""

from typing import Any

import pytest

from deploy._service import Action, decide
from deploy._state import State

RESTART = ("systemctl restart --no-block dsv4.service",)
START = (
    "systemctl reset-failed dsv4.service 2>/dev/null || true",
    "systemctl start --no-block dsv4.service",
)
STOP = ("systemctl stop dsv4.service",)


def state(
    active: str | None, *, differs: list[str] | None = None, started: bool = True, result: str = ""
) -> State:
    """Return a machine whose service is in that state."""
    unit = {} if active is None else {"active": active, "result": result or "success"}
    engine = {"started": {"inputs": {}} if started else {}, "differs": differs or []}
    return State({"paths": {}, "units": {"dsv4.service": unit}, "engine": engine})


TABLE: list[tuple[State, str, tuple[str, ...], bool]] = [
    # running from what is on disk: nothing, for all but `stopped`
    (state("active"), "running", (), False),
    (state("active"), "keep", (), False),
    (state("active"), "stopped", STOP, False),
    # still starting from what is on disk: only followed
    (state("activating"), "running", (), True),
    (state("activating"), "keep", (), True),
    (state("activating"), "stopped", STOP, False),
    # running or starting from something else: a queued restart, which also reaches a start
    (state("active", differs=["serve_yaml"]), "running", RESTART, True),
    (state("active", differs=["serve_yaml"]), "keep", RESTART, True),
    (state("active", differs=["serve_yaml"]), "stopped", STOP, False),
    (state("activating", differs=["view", "runtime"]), "keep", RESTART, True),
    (state("reloading", differs=["unit"]), "keep", RESTART, True),
    # stopped by its owner: respected unless `running` says otherwise
    (state("inactive"), "keep", (), False),
    (state("inactive", differs=["runtime"]), "keep", (), False),
    (state("inactive"), "running", START, True),
    (state("inactive"), "stopped", (), False),
    # never started in this boot
    (state("inactive", started=False), "keep", START, True),
    (state("inactive", started=False), "running", START, True),
    (state("inactive", started=False), "stopped", (), False),
    # failed, or ended otherwise than by its owner
    (state("failed", result="exit-code"), "keep", START, True),
    (state("failed", result="exit-code"), "running", START, True),
    (state("failed", result="exit-code"), "stopped", (), False),
    (state("inactive", result="exit-code"), "keep", START, True),
    # on its way down
    (state("deactivating"), "running", START, True),
    (state("deactivating"), "stopped", STOP, False),
    # nothing known of it, as on a bare host
    (state(None, started=False), "keep", START, True),
    (state(None, started=False), "stopped", (), False),
    (State({}), "running", START, True),
]


@pytest.mark.parametrize(("found", "wanted", "commands", "follow"), TABLE)
def test_what_is_due(found: State, wanted: Any, commands: tuple[str, ...], follow: bool) -> None:
    """Commands, and whether a start is then to be followed."""
    action = decide(found, wanted)
    assert (action.commands, action.follow) == (commands, follow)
    assert action.why


def test_a_restart_says_what_differs() -> None:
    """The reason names the inputs."""
    action = decide(state("active", differs=["serve_yaml", "view"]), "keep")
    assert action.why == "it started from another serve_yaml, view"


@pytest.mark.parametrize("wanted", ["running", "keep", "stopped"])
def test_the_outcome_is_settled(wanted: Any) -> None:
    """Carrying an action out leads to a state that needs none."""
    after = state("inactive") if wanted == "stopped" else state("active")
    assert decide(after, wanted) == Action(why=decide(after, wanted).why)
