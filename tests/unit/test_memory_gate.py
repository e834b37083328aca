"""The gate waits within its bound and says who is in the way."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import memory, memory_gate, processes

TOTAL = 121.7
NEED = memory_gate.Need(TOTAL, 0.88, 1.5, "cuda")


def meminfo(**rows: float) -> str:
    known = {"MemTotal": TOTAL, "MemFree": 100.0, "MemAvailable": 110.0, **rows}
    return "".join(f"{name}: {int(value * (1 << 20))} kB\n" for name, value in known.items())


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def info(free: float, available: float | None = None) -> memory.MemInfo:
    return memory.parse_meminfo(meminfo(MemFree=free, MemAvailable=available or free))


def wait(
    bound: float, level: Callable[[float], memory.MemInfo | None], need: memory_gate.Need = NEED
) -> tuple[bool, float, float]:
    time = Time()
    return memory_gate.wait(
        need, bound, lambda: level(time.now - 100), clock=time.clock, sleep=time.sleep
    )


def process(pid: int, rss: float, comm: str = "python3") -> processes.Process:
    return processes.Process(pid, 1, 0, comm, f"/usr/bin/{comm} x", rss, 33.0, "")


def test_room_at_once() -> None:
    """Nothing is waited for."""
    assert wait(120, lambda t: info(115)) == (True, 115, 0.0)


def test_memory_that_comes_back() -> None:
    """Freed 20 s after the old engine's end: the start goes on then."""
    passed, have, waited = wait(120, lambda t: info(115 if t >= 20 else 30))
    assert passed
    assert have == 115
    assert 20 <= waited <= 21


def test_memory_that_never_comes_back() -> None:
    """The bound holds."""
    passed, have, waited = wait(120, lambda t: info(30))
    assert (passed, have) == (False, 30)
    assert 120 <= waited <= 121


@given(st.floats(0, 300), st.floats(0, 200))
def test_it_never_waits_past_its_bound(bound: float, back_at: float) -> None:
    """And passes whenever memory is back in time."""
    passed, _, waited = wait(bound, lambda t: info(115 if t >= back_at else 1))
    assert waited <= bound + memory_gate.POLL_S + 0.02
    assert passed or back_at > bound


def test_bad_readings_are_waited_out() -> None:
    """A reading that makes no sense is no refusal."""
    assert wait(10, lambda t: None if t < 2 else info(115))[0]
    passed, have, waited = wait(5, lambda t: None)
    assert (passed, have) == (False, 0.0)
    assert 5 <= waited <= 5.6


def test_a_cpu_engine_takes_what_can_be_reclaimed() -> None:
    """MemAvailable there, MemFree on a GPU."""
    cpu = memory_gate.Need(TOTAL, 0.88, 1.5, "cpu")
    assert wait(1, lambda t: info(5, 115), cpu)[0]
    assert not wait(1, lambda t: info(5, 115))[0]


def test_the_refusal_has_the_arithmetic() -> None:
    """Wanted, have, holder, and what would pass."""
    found = [process(7, 60.0), process(8, 0.1), process(9, 0.2, "VLLM::EngineCor")]
    why = memory_gate.blame(meminfo(MemFree=30, AnonPages=60, Cached=20), found, {})
    text = memory_gate.explain(NEED, 30.0, 120.0, why)
    assert "wanted 108.6 GiB free (0.88 x 121.7 + 1.5), have 30.0 GiB" in text
    assert "pid 7" in text
    assert "pid 9" in text
    assert "pid 8" not in text
    assert "20.0 GiB are page cache of other files" in text
    assert text.endswith("the highest utilisation that passes now is 0.23")
    assert "reboot" not in text


@given(st.floats(1, 130), st.floats(0.5, 130), st.floats(0, 3))
def test_the_utilisation_it_names_passes(total: float, share: float, margin: float) -> None:
    """And one hundredth more does not."""
    have = min(total, share)
    highest = memory.startable_utilisation(total, have, margin)
    if highest > 0:
        assert memory.start_needs(total, highest, margin) <= have + 1e-6
    assert memory.start_needs(total, highest + 0.0101, margin) > have


def test_pinned_by_the_driver() -> None:
    """Said only when neither process nor cache nor an open GPU explains it."""
    text = meminfo(MemFree=30, AnonPages=3, Cached=2, Slab=1)
    daemon = process(5, 0.0, memory_gate.HOLDS_NOTHING)
    pinned = memory_gate.blame(text, [process(7, 0.5), daemon], {5: ["/dev/nvidia0"]})
    said = memory_gate.explain(NEED, 30, 120, pinned)
    assert "pinned by the driver, reboot needed" in said
    assert f"{TOTAL - 30 - 6:.1f} GiB are held by no process" in said
    held = memory_gate.blame(text, [process(7, 0.5)], {7: ["/dev/nvidia0"]})
    said = memory_gate.explain(NEED, 30, 120, held)
    assert "reboot" not in said
    assert "pid 7 (/usr/bin/python3 x), 0.5 GiB, 33 s, has the GPU open" in said


def test_the_handover_kernel_is_recognised() -> None:
    """CmaFree above CmaTotal is its mark."""
    why = memory_gate.blame(meminfo(CmaTotal=0.1, CmaFree=9.3), [], {})
    assert "kho=off" in memory_gate.explain(NEED, 30, 1, why)


def run(tmp_path: Path, text: str) -> int:
    guard, path = tmp_path / "guard.json", tmp_path / "meminfo"
    guard.write_text(json.dumps({"memory": {"gate_wait_s": 0}}))
    path.write_text(text)
    return memory_gate.main(["--guard", str(guard), "--meminfo", str(path), "--json"])


@pytest.mark.parametrize(
    ("text", "status"),
    [(meminfo(MemFree=112), 0), (meminfo(MemFree=10), 1), ("", 3), ("MemTotal: x\n", 3)],
)
def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, status: int) -> None:
    """0 there is room, 1 there is none, 3 nobody can tell; one line each."""
    assert run(tmp_path, text) == status
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is (status == 0)
    assert err.count("dsv4 memory_gate: ") == 1
