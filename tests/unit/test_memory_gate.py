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
) -> memory_gate.Waited:
    time = Time()
    return memory_gate.wait(
        need, bound, lambda: level(time.now - 100), clock=time.clock, sleep=time.sleep
    )


def process(pid: int, rss: float, comm: str = "python3") -> processes.Process:
    return processes.Process(pid, 1, 0, comm, f"/usr/bin/{comm} x", rss, 33.0, "")


def test_room_at_once() -> None:
    """Nothing is waited for."""
    assert wait(120, lambda t: info(115)) == memory_gate.Waited(True, 115, 0.0)


def test_memory_that_comes_back() -> None:
    """Freed 20 s after the old engine's end: the start goes on then."""
    found = wait(120, lambda t: info(115 if t >= 20 else 30))
    assert found.passed
    assert found.have == 115
    assert 20 <= found.seconds <= 21


def test_memory_that_never_comes_back() -> None:
    """The bound holds."""
    found = wait(120, lambda t: info(30))
    assert (found.passed, found.have, found.rise) == (False, 30, 0)
    assert 120 <= found.seconds <= 121


def test_memory_that_is_still_coming_back() -> None:
    """0.3 GiB/s are not enough in time, and are no reason to reboot."""
    found = wait(120, lambda t: info(30 + 0.3 * t))
    assert not found.passed
    assert found.rise == pytest.approx(3.0, abs=0.2)
    why = memory_gate.blame(meminfo(MemFree=66), [], set(), {})
    said = memory_gate.explain(NEED, found, why)
    assert "coming back (3.0 GiB in the last 10 s)" in said
    assert "reboot" not in said
    assert not memory_gate.lost(NEED, found, why)


@given(st.floats(0, 300), st.floats(0, 200))
def test_it_never_waits_past_its_bound(bound: float, back_at: float) -> None:
    """And passes whenever memory is back in time."""
    found = wait(bound, lambda t: info(115 if t >= back_at else 1))
    assert found.seconds <= bound + memory_gate.POLL_S + 0.02
    assert found.passed or back_at > bound


def test_bad_readings_are_waited_out() -> None:
    """A reading that makes no sense is no refusal."""
    assert wait(10, lambda t: None if t < 2 else info(115)).passed
    found = wait(5, lambda t: None)
    assert (found.passed, found.have) == (False, 0.0)
    assert 5 <= found.seconds <= 5.6


def test_a_cpu_engine_takes_what_can_be_reclaimed() -> None:
    """MemAvailable there, MemFree on a GPU."""
    cpu = memory_gate.Need(TOTAL, 0.88, 1.5, "cpu")
    assert wait(1, lambda t: info(5, 115), cpu).passed
    assert not wait(1, lambda t: info(5, 115)).passed


def refused(have: float = 30.0, rise: float = 0.0) -> memory_gate.Waited:
    return memory_gate.Waited(False, have, 120.0, rise)


def test_room_to_start_and_none_to_serve() -> None:
    """Free enough for CUDA, and the watchdog would end what it let start: refused, with why."""
    need = memory_gate.Need(TOTAL, 0.88, 1.5, "cuda", headroom=5.0)
    assert wait(1, lambda t: info(110, 113), need).passed
    found = wait(1, lambda t: info(110, 111), need)
    assert not found.passed
    text = meminfo(MemFree=110, MemAvailable=111)
    said = memory_gate.explain(need, found, memory_gate.blame(text, [process(7, 6.0)], set(), {}))
    assert "with the engine's share taken 3.9 GiB would be left, and 5.0 are needed" in said
    assert "pid 7" in said
    assert said.endswith("the highest utilisation that passes now is 0.87")
    assert info(110, 111).available >= TOTAL * 0.87 + 5.0


def test_the_refusal_has_the_arithmetic() -> None:
    """Wanted, have, the figures that are mixed up, holder, and what would pass."""
    found = [process(7, 60.0), process(8, 0.1), process(9, 0.2, "VLLM::EngineCor")]
    text = meminfo(MemFree=30, AnonPages=60, Cached=20, CmaTotal=0.5, CmaFree=0.2)
    said = memory_gate.explain(NEED, refused(), memory_gate.blame(text, found, set(), {}))
    assert "wanted 108.6 GiB free (0.88 x 121.7 + 1.5), have 30.0 GiB" in said
    assert "MemFree 30.0, MemAvailable 110.0, page cache 20.0, CMA 0.5 (0.2 free) GiB" in said
    assert "pid 7" in said
    assert "pid 9" in said
    assert "pid 8" not in said
    assert "20.0 GiB are page cache of other files" in said
    assert said.endswith("the highest utilisation that passes now is 0.23")
    assert "reboot" not in said


@given(st.floats(1, 130), st.floats(0.5, 130), st.floats(0, 3))
def test_the_utilisation_it_names_passes(total: float, share: float, margin: float) -> None:
    """And one hundredth more does not."""
    have = min(total, share)
    highest = memory.startable_utilisation(total, have, margin)
    if highest > 0:
        assert memory.start_needs(total, highest, margin) <= have + 1e-6
    assert memory.start_needs(total, highest + 0.0101, margin) > have


NOTHING = meminfo(MemFree=30, AnonPages=3, Cached=2, Slab=1)
"""85.7 GiB are used, and nothing in it says by what."""


def test_pinned_by_the_driver() -> None:
    """Said when neither process nor cache nor what is on the GPU explains it."""
    daemon = process(5, 0.0, memory_gate.HOLDS_NOTHING)
    pinned = memory_gate.blame(NOTHING, [process(7, 0.5), daemon], {5}, {})
    said = memory_gate.explain(NEED, refused(), pinned)
    assert "pinned by the driver, reboot needed" in said
    assert f"{TOTAL - 30 - 6:.1f} GiB are held by no process" in said
    assert memory_gate.lost(NEED, refused(), pinned)


def test_a_holder_whose_share_is_unknown_may_have_it_all() -> None:
    """Whoever has the device open or mapped is named, and no reboot is asked for."""
    held = memory_gate.blame(NOTHING, [process(7, 0.5)], {7}, {})
    said = memory_gate.explain(NEED, refused(), held)
    assert "reboot" not in said
    assert "pid 7 (/usr/bin/python3 x), 0.5 GiB, 33 s old, has the GPU open" in said
    assert not memory_gate.lost(NEED, refused(), held)


def test_what_is_on_the_gpu_is_taken_off() -> None:
    """nvidia-smi knows shares by process: a desktop with 1 GiB explains 1 GiB and not 85."""
    desktop, server = process(7, 0.5, "Xorg"), process(8, 0.4)
    small = memory_gate.blame(NOTHING, [desktop], {7}, {7: 1.0})
    assert small.pinned == pytest.approx(TOTAL - 30 - 6 - 1)
    assert memory_gate.lost(NEED, refused(), small)
    large = memory_gate.blame(NOTHING, [desktop, server], {7, 8}, {7: 1.0, 8: 84.0})
    assert large.pinned < memory_gate.UNACCOUNTED_GIB
    assert large.holders[0].startswith("pid 8")
    assert large.holders[0].endswith("84.0 GiB on the GPU")
    assert "reboot" not in memory_gate.explain(NEED, refused(), large)


def test_a_reboot_must_be_enough() -> None:
    """Pinned memory is told, but a start is given up for good only when it is what is missing."""
    text = meminfo(MemFree=30, AnonPages=70, Cached=2)
    why = memory_gate.blame(text, [process(7, 70.0)], set(), {})
    assert "reboot needed" in memory_gate.explain(NEED, refused(), why)
    assert not memory_gate.lost(NEED, refused(), why)


def test_the_handover_kernel_is_recognised() -> None:
    """CmaFree above CmaTotal is its mark, and what it keeps is nobody's fault else."""
    text = meminfo(MemFree=100, AnonPages=11, Cached=1, CmaTotal=0.1, CmaFree=9.4)
    why = memory_gate.blame(text, [], set(), {})
    said = memory_gate.explain(NEED, refused(100), why)
    assert "kho=off" in said
    assert "reboot needed" not in said


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
