"""What can be gone back to, and why not."""

from typing import Any

import pytest

from deploy._runtimes import way_back
from deploy._state import State

A, B, C = "lab-aaaaaaaaaaaa", "lab-bbbbbbbbbbbb", "lab-cccccccccccc"


def machine(**changes: Any) -> State:
    """A machine that serves from A, with B before it and an unfinished C."""
    raw = {
        "paths": {},
        "current": A,
        "previous": B,
        "runtimes": {A: {"complete": True}, B: {"complete": True}, C: {"complete": False}},
    }
    return State({**raw, **changes})


def test_without_a_name_it_is_the_one_before() -> None:
    assert way_back(machine(), None) == (B, "")
    assert way_back(machine(current=B, previous=A), None) == (A, "")


def test_a_name_picks_any_complete_one() -> None:
    """The one in service too: that is where a second run of the same command finds it."""
    assert way_back(machine(), B) == (B, "")
    assert way_back(machine(), A) == (A, "")


@pytest.mark.parametrize(
    ("state", "wanted", "says"),
    [
        (State({}), None, "deploy/full.py first"),
        (machine(previous=None), None, f"no runtime before {A}; complete are: {B}"),
        # A switch that was cut off between its two links
        (machine(previous=A), None, f"no runtime before {A}; complete are: {B}"),
        (machine(), "lab-dddddddddddd", "is not on the machine"),
        (machine(), C, "cannot serve: it was never finished"),
        (
            machine(runtimes={B: {"complete": False, "drift": ["a.py was changed"]}}),
            None,
            "cannot serve: a.py was changed; complete are: no others",
        ),
    ],
)
def test_what_cannot_serve_is_refused_with_the_choices(
    state: State, wanted: str | None, says: str
) -> None:
    target, fault = way_back(state, wanted)
    assert target == ""
    assert says in fault
