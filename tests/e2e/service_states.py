"""Every state the unit can be in, and what an owner or a deploy asks of it then.

`STATES` bring the unit into a state and leave it in the middle of it; `WISHES` are a stop and a
restart, by systemctl and by what the deploy would run, which it decides from the machine's state.
"""

import json
import time
from collections.abc import Callable

from deploy import _service
from deploy._state import State
from tests.e2e.service_rig import UNIT, Rig

SERVES = {"LOAD_S": 0.2}


def sub(rig: Rig, state: str, seconds: float = 20) -> None:
    rig.until(f"{UNIT} {state}", lambda: rig.show("SubState") == state, seconds)


def first_hook(rig: Rig) -> None:
    rig.fault(**SERVES)
    rig.root(f"systemctl start --no-block {UNIT}")
    sub(rig, "start-pre")


def memory_gate(rig: Rig) -> None:
    rig.fault(**SERVES)
    rig.guard(memory={"utilisation": 3.0, "gate_wait_s": 60})
    before = rig.root("date +%s").strip()
    rig.root(f"systemctl start --no-block {UNIT}")
    words = f"journalctl -o cat --no-pager --since @{before} -u {UNIT}"
    rig.until("the gate", lambda: "waiting for memory" in rig.root(words))
    rig.guard(memory={"utilisation": 0.1})


def loading(rig: Rig) -> None:
    rig.fault(LOAD_S=60)
    rig.root(f"systemctl start --no-block {UNIT}")
    sub(rig, "start-post")


def ready(rig: Rig) -> None:
    rig.fault(**SERVES)
    assert rig.start()[0], rig.log(30)


def stopping(rig: Rig) -> None:
    rig.fault(**SERVES, IGNORE_TERM=1, stop_s=3)
    assert rig.start()[0], rig.log(30)
    rig.root(f"systemctl stop --no-block {UNIT}")
    sub(rig, "stop-sigterm")


def draining(rig: Rig) -> None:
    """Requests that run are waited for, before the engine is told anything."""
    rig.fault(**SERVES, BUSY=1)
    rig.guard(stop={"drain_s": 3})
    assert rig.start()[0], rig.log(30)
    rig.root(f"systemctl stop --no-block {UNIT}")
    sub(rig, "stop")


def failed(rig: Rig) -> None:
    rig.fault(**SERVES, FAULT="crash")
    rig.guard(restarts={"limit": 0})
    assert not rig.start()[0]
    sub(rig, "failed")
    rig.guard(restarts={"limit": 3})


def waiting(rig: Rig) -> None:
    """Between an automatic restart and the failure before it."""
    rig.fault(**SERVES, restart_s=60)
    assert rig.start()[0], rig.log(30)
    rig.root(f"kill -9 {rig.pid()}")
    sub(rig, "auto-restart")


def decided(rig: Rig, wanted: _service.Wanted) -> None:
    """Do what a deploy does in this state."""
    state = State(json.loads(rig.root("/opt/dsv4/bin/dsv4 state --json")))
    for command in _service.decide(state, wanted).commands:
        rig.root(command)


def stop_by_hand(rig: Rig) -> None:
    rig.root(f"systemctl stop {UNIT}")
    is_down(rig)


def stop_by_deploy(rig: Rig) -> None:
    decided(rig, "stopped")
    is_down(rig)


def restart_by_hand(rig: Rig) -> None:
    before = rig.pid()
    rig.fault(**SERVES, restart_s=60)
    rig.root(f"systemctl restart {UNIT}")
    is_up(rig, before)


def restart_by_deploy(rig: Rig) -> None:
    before = rig.pid()
    # Not sooner than now: a reload applies it to a wait under way, and what starts by itself then
    # starts from what is on disk
    rig.fault(**SERVES, CHANGED=1, restart_s=60)
    decided(rig, "running")
    is_up(rig, before)


def is_down(rig: Rig) -> None:
    """It is over, stays over, and holds nothing."""
    time.sleep(1.5)  # the rig's automatic restarts come after one second
    assert rig.show("ActiveState") in {"inactive", "failed"}, rig.log(20)
    assert rig.show("Job") in {"", "0"}
    assert rig.pid() == 0
    assert rig.root("pgrep -c VLLM:: || true").strip() == "0"


def is_up(rig: Rig, before: int) -> None:
    """Another engine serves, one only, started by hand as far as the limit goes."""
    rig.until_state("active")
    sub(rig, "running")
    assert rig.pid() not in {0, before}
    assert "FAKE_LOAD_S=0.2" in rig.root(f"tr '\\0' '\\n' < /proc/{rig.pid()}/environ")
    assert rig.root("pgrep -c VLLM::").strip() == "1"
    assert rig.show("NRestarts") == "0"
    assert rig.phase()["phase"] == "ready"


Step = Callable[[Rig], None]
STATES: tuple[Step, ...] = (
    *(first_hook, memory_gate, loading, ready),
    *(draining, stopping, failed, waiting),
)
WISHES: tuple[Step, ...] = (stop_by_hand, stop_by_deploy, restart_by_hand, restart_by_deploy)
