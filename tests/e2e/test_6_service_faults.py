"""Faults of the engine and its guards on the deployed unit, with a stand-in engine."""

from collections.abc import Iterator

import pytest

from tests.e2e import memory_faults
from tests.e2e.service_faults import FAULTS, Fault, same_guard
from tests.e2e.service_rig import Rig, standing_in
from tests.e2e.service_states import STATES, WISHES, Step
from tests.e2e.spark import Spark

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def rig(spark: Spark) -> Iterator[Rig]:
    """The deployed machine with the stand-in in service; afterwards the real engine serves."""
    with standing_in(spark) as made:
        yield made
    spark.root("systemctl start dsv4")


@pytest.mark.parametrize(
    "fault", [*FAULTS, *memory_faults.FAULTS], ids=lambda fault: fault.__name__
)
def test_fault(rig: Rig, fault: Fault) -> None:
    """Each fault's docstring is its rule."""
    with same_guard(rig):
        fault(rig)


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: wish.__name__)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_stop_and_restart_do_what_they_say(rig: Rig, state: Step, wish: Step) -> None:
    """In every state the unit can be in, from systemctl and from a deploy alike."""
    with same_guard(rig):
        try:
            state(rig)
            wish(rig)
        finally:
            rig.stop()
