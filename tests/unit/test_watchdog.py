"""When the watchdog acts: levels, slope, dips, bad readings; and what it does to a group."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import cgroup, guard, layout, memory, watchdog
from dsv4.watchdog import KILL, NONE, TERM, Config, Sample, Verdict, decide

CONFIG = Config()
LOCK_GIB = 1.0


def trace(levels: list[float], step: float = 0.1) -> list[Sample]:
    return [Sample(n * step, level, level) for n, level in enumerate(levels)]


def play(levels: list[float], step: float = 0.1, config: Config = CONFIG) -> list[Verdict]:
    """Return each verdict on a trace, with what was decided before taken into account."""
    found: list[Verdict] = []
    asked = None
    samples = trace(levels, step)
    for n, sample in enumerate(samples):
        verdict = decide(samples[max(0, n - 20) : n], sample, config, asked)
        if verdict.action == TERM:
            asked = sample.t
        found.append(verdict)
    return found


def actions(levels: list[float], step: float = 0.1, config: Config = CONFIG) -> list[str]:
    return [verdict.action for verdict in play(levels, step, config)]


# --- the decision


def test_the_recorded_collapse_is_stopped_before_the_floor() -> None:
    """34, 28, 20, 13, 6 GB, 300 ms apart: the machine is gone at the next look."""
    levels = [gb / 1.073741824 for gb in (34, 28, 20, 13, 6)]
    found = play(levels, 0.3)
    assert [verdict.action for verdict in found] == [NONE, NONE, NONE, NONE, KILL]
    assert levels[4] > CONFIG.hard
    assert "falling" in found[4].reason


@pytest.mark.parametrize("rate", [1.0, 5.0, 14.0, 20.0, 30.0, 45.0])
def test_no_constant_fall_gets_past(rate: float) -> None:
    """However fast it falls, the kill has arrived before the machine locks up."""
    levels = [60 - rate * 0.1 * n for n in range(int(600 / rate) + 1)]
    first = next(n for n, action in enumerate(actions(levels)) if action == KILL)
    assert levels[first] - rate * CONFIG.reaction_s > LOCK_GIB
    assert levels[first] <= CONFIG.last_gib + rate * 0.25 + CONFIG.hard


@given(
    start=st.floats(10, 120),
    rates=st.lists(st.floats(0, 20), min_size=60, max_size=200),
)
def test_no_changing_fall_gets_past(start: float, rates: list[float]) -> None:
    """Nor does one that changes its speed, up to well above the fastest on record.

    A fall that starts within one interval is what the hard floor is for.
    """
    levels = [start]
    for rate in rates:
        levels.append(levels[-1] - rate * 0.1)
    found = actions(levels)
    for n, action in enumerate(found):
        if action == KILL:
            assert levels[n] > 0 - CONFIG.hard + 14 * 0.1
            return
        assert levels[n] > CONFIG.hard


@given(st.floats(0, CONFIG.hard), st.lists(st.floats(0, 120), max_size=8))
def test_at_the_hard_floor_nothing_matters_but_the_level(low: float, before: list[float]) -> None:
    """Whatever came before, and whether it was asked to stop or not: kill."""
    history = trace(before)
    sample = Sample(len(before) * 0.1, low, low)
    assert decide(history, sample, CONFIG).action == KILL
    assert decide(history, sample, CONFIG, asked_at=sample.t).action == KILL


@given(st.lists(st.floats(CONFIG.soft + 4.0, 120), min_size=1, max_size=50))
def test_steps_far_above_the_floors_are_nothing(levels: list[float]) -> None:
    """Large allocations are steps. One interval is no slope, and a load takes memory in steps."""
    stepped = [level for level in levels for _ in range(2)]
    assert set(actions(stepped)) == {NONE}


@given(
    depth=st.floats(CONFIG.hard + 0.01, CONFIG.soft),
    length=st.integers(1, CONFIG.soft_samples - 1),
)
def test_a_short_dip_is_nothing(depth: float, length: int) -> None:
    """Below the soft floor for fewer samples than count, then back."""
    down = [8.0 - 0.5 * n for n in range(1, 10) if 8.0 - 0.5 * n > CONFIG.soft]
    assert set(actions([8.0, *down, *[depth] * length, 8.0, 12.0, 30.0])) == {NONE}


@given(st.lists(st.floats(0.03, 0.2), min_size=20, max_size=40))
def test_a_recovering_dip_is_nothing(rises: list[float]) -> None:
    """As long as it rises, a long stay below the soft floor is a recovery."""
    levels = [CONFIG.hard + 0.1]
    for rise in rises:
        levels.append(levels[-1] + rise)
    kept = [level for level in levels if level <= CONFIG.soft]
    assert set(actions(kept)) <= {NONE}


def test_soft_floor_asks_then_kills() -> None:
    """Sustained for five samples: asked once; killed when the grace is over, and no earlier."""
    found = play([20.0] * 5 + [4.8] * 80)
    asked = [n for n, verdict in enumerate(found) if verdict.action == TERM]
    killed = [n for n, verdict in enumerate(found) if verdict.action == KILL]
    assert asked == [5 + CONFIG.soft_samples - 1]
    assert killed[0] == asked[0] + round(CONFIG.term_grace_s / 0.1)
    assert "still there" in found[killed[0]].reason


def test_asked_and_recovered_still_ends() -> None:
    """An engine that took the signal and hangs is not left half-stopped."""
    found = actions([4.8] * 5 + [50.0] * 60)
    assert found[4] == TERM
    assert KILL in found


def test_one_sample_may_be_enough() -> None:
    """soft_samples of 1 acts on the first."""
    config = Config(soft_samples=1)
    assert decide([], Sample(0, 4.9, 4.9), config).action == TERM
    assert decide(trace([20, 20]), Sample(0.2, 4.9, 4.9), config).action == TERM


@given(
    st.lists(st.floats(0, 120), min_size=2, max_size=6),
    st.floats(0, 120),
    st.floats(0, 20),
)
def test_less_memory_never_means_less_action(
    before: list[float], level: float, less: float
) -> None:
    """A kill at some level is a kill at any lower one."""
    history = trace(before)
    now = len(before) * 0.1
    if decide(history, Sample(now, level, level), CONFIG).action == KILL:
        lower = max(0.0, level - less)
        assert decide(history, Sample(now, lower, lower), CONFIG).action == KILL


def test_time_to_the_floor() -> None:
    """Told when it falls, and only then."""
    assert decide(trace([30, 29]), Sample(0.2, 28, 28), CONFIG).to_floor_s == pytest.approx(2.45)
    assert decide(trace([30, 30]), Sample(0.2, 30, 30), CONFIG).to_floor_s is None
    assert decide([], Sample(0, 30, 30), CONFIG).to_floor_s is None


def test_the_equation_is_the_one_of_the_settings() -> None:
    """Floors of the defaults are those the shared equation gives."""
    floors = memory.floors(memory.Limits())
    limits = guard.Memory(hard_floor_gib=floors.hard, soft_floor_gib=floors.soft)
    config = watchdog.config_of(limits)
    assert config.hard == pytest.approx(3.5)
    assert config.soft == pytest.approx(5.0)
    assert config.last_gib == pytest.approx(1.4)
    assert watchdog.config_of(guard.Memory(soft_floor_gib=1)).soft == config.hard


def test_readings_that_cannot_be_true() -> None:
    """Available far below free is a bad reading; a little below is the kernel's reserve."""
    text = "MemTotal: 127600748 kB\nMemFree: {} kB\nMemAvailable: {} kB\n"
    good = memory.parse_meminfo(text.format(20 << 20, 19 << 20))
    bad = memory.parse_meminfo(text.format(20 << 20, 0))
    assert watchdog.sane(good)
    assert not watchdog.sane(bad)


def meminfo(available: float, free: float | None = None) -> str:
    """Return what the kernel says of a Spark, as far as it matters."""
    rows = {"MemTotal": 121.6, "MemFree": available if free is None else free}
    rows |= {"MemAvailable": available, "Buffers": 0.1, "Cached": 2.0, "SwapCached": 0.0}
    return "".join(f"{name + ':':<16}{int(gib * (1 << 20)):>8} kB\n" for name, gib in rows.items())


class World:
    """Time that only sleeping moves, and a meminfo that follows a trace.

    + level: GiB available at a time, or a text that is read instead
    """

    class Over(Exception):
        """The trace has ended."""

    def __init__(self, level: Callable[[float], float | str], seconds: float) -> None:
        self.level = level
        self.ticks = round(seconds * 1000)
        self.now = 0
        self.reads = 0

    def clock(self) -> float:
        return self.now / 1000

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1000)
        if self.now >= self.ticks:
            raise World.Over

    def source(self) -> tuple[str, float]:
        self.reads += 1
        found = self.level(self.clock())
        return (found if isinstance(found, str) else meminfo(found)), 0.0


class Recorder(watchdog.Guardian):
    """A guardian that notes what it would do, to an engine that listens to nothing but a kill."""

    def __init__(self, shared: watchdog.Shared, clock: Callable[[], float]) -> None:
        super().__init__(shared, 0, clock)
        self.done: list[tuple[float, str]] = []

    def act(self, verdict: Verdict, sample: Sample) -> None:
        if verdict.action == TERM:
            self.asked_at = sample.t
        if verdict.action != NONE:
            self.done.append((round(sample.t, 3), verdict.action))
        if verdict.action == KILL:
            raise World.Over


def replay(
    level: Callable[[float], float | str], seconds: float
) -> tuple[list[tuple[float, str]], watchdog.Shared, World]:
    """Run the watchdog's own loop over a trace; return what it did and when."""
    world = World(level, seconds)
    shared = watchdog.Shared(guard.Guard(), CONFIG)
    recorder = Recorder(shared, world.clock)
    with pytest.raises(World.Over):
        watchdog.watch(recorder, world.source, world.clock, world.sleep)
    return recorder.done, shared, world


# --- two hours of memory, replayed

HOURS_2 = 7200.0


def noise(t: float) -> float:
    """Return something between -0.2 and 0.2 that looks like chance and is none."""
    return 0.2 * math.sin(t * 12.9898) * math.cos(t * 78.233)


def steady(t: float) -> float:
    """A served model: 8.3 to 9.1 GiB available, as the recipe reports."""
    return 8.7 + noise(t)


def prefill_spikes(t: float) -> float:
    """A long prompt each minute takes 3.2 GiB for eight seconds."""
    return 9.0 + noise(t) - (3.2 if t % 60 < 8 else 0.0)


def load(t: float) -> float:
    """A load takes the machine's memory in large steps, faster than any other use, and stops."""
    return max(8.7, 115.0 - 4.0 * int(t / 0.3)) + noise(t)


def recovering_dips(t: float) -> float:
    """Every five minutes memory is below the soft floor for a second, and on its way up."""
    into = t % 300
    if into < 0.8:
        return 9.0 - 6.0 * into
    return min(9.0, 4.2 + (into - 0.8) * 0.9)


def sawtooth(t: float) -> float:
    """A cache that grows and is emptied, down to just above the soft floor."""
    return 12.0 - (t % 20) / 20 * 6.8


def slow_leak(t: float) -> float:
    """4 GiB an hour, from 9: the soft floor is reached after an hour."""
    return 9.0 - 4.0 * t / 3600


def collapse(t: float) -> float:
    """20 GiB/s after an hour and a half; the hard floor is crossed 1.325 s later."""
    return 30.0 if t < 5400 else max(0.05, 30.0 - 20.0 * (t - 5400))


def relapse(t: float) -> float:
    """Sinks below the soft floor, rises a little, and sinks again for good."""
    if t < 3600:
        return 9.0
    return 4.9 if t >= 3602 else 4.5 + 0.3 * (t - 3600)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (steady, []),
        (prefill_spikes, []),
        (load, []),
        (recovering_dips, []),
        (sawtooth, []),
        # Below for the first time at 3600.0, five samples later asked, five seconds later killed
        (slow_leak, [(3600.4, TERM), (3605.4, KILL)]),
        # At 4.0 GiB and 20 GiB/s the kill after the next look would be too late: above the floor
        (collapse, [(5401.3, KILL)]),
        (relapse, [(3602.4, TERM), (3607.4, KILL)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_two_hours(level: Callable[[float], float], expected: list[tuple[float, str]]) -> None:
    """72,000 samples: exactly these decisions, at exactly these times."""
    found: list[tuple[float, str]] = []
    history: deque[Sample] = deque(maxlen=CONFIG.soft_samples)
    asked = None
    for n in range(round(HOURS_2 / CONFIG.sample_s)):
        value = level(n / 10)
        sample = Sample(n / 10, value, value)
        verdict = decide(list(history), sample, CONFIG, asked)
        history.append(sample)
        if verdict.action != NONE:
            found.append((sample.t, verdict.action))
        if verdict.action == TERM:
            asked = sample.t
        if verdict.action == KILL:
            break
    assert found == expected


BAD = {
    "empty": "",
    "garbage": "\x00\x01 no memory here\n",
    "truncated in a number": meminfo(8.7)[:60].rstrip() + "\nMemAvailable:    912",
    "without a field": meminfo(8.7).replace("MemAvailable", "MemElse"),
    "zero": meminfo(0.0),
    "only available zero": meminfo(0.0, 20.0),
    "no total": meminfo(8.7).replace("127506841", "0"),
    "negative": meminfo(8.7).replace("MemAvailable:   ", "MemAvailable:  -"),
    "more than there is": meminfo(500.0),
    "a number of 400 digits": meminfo(8.7).replace("MemFree:", "MemFree: " + "9" * 400),
    "a number of 5000 digits": meminfo(8.7).replace("MemFree:", "MemFree: " + "9" * 5000),
    "words": meminfo(8.7).replace("kB", "GiB"),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_readings_are_counted_and_nothing_else(text: str) -> None:
    """For as long as they last: not one is believed, not one ends the loop, none kills."""
    done, shared, world = replay(lambda t: text if 10 <= t < 40 else 8.7, 60)
    assert done == []
    assert shared.bad == 300
    assert world.reads == 600
    assert shared.lowest == pytest.approx(8.7, abs=1e-3)


def test_a_file_that_cannot_be_read() -> None:
    """Nor is that: an error of the kernel, or bytes that are no text."""

    def level(t: float) -> float:
        if 5 <= t < 6:
            raise OSError(5, "Input/output error")
        if 6 <= t < 7:
            return float(b"\xff\xfe".decode())
        return 8.7

    done, shared, _ = replay(level, 10)
    assert done == []
    assert shared.bad == 20


def test_blind_for_a_minute_is_no_guard() -> None:
    """It ends, for systemd to start one that opens the file anew; what it has seen is forgotten
    only then.
    """
    world = World(lambda t: "garbage" if t >= 10 else 8.7, 3600)
    shared = watchdog.Shared(guard.Guard(), CONFIG)
    recorder = Recorder(shared, world.clock)
    watchdog.watch(recorder, world.source, world.clock, world.sleep)
    assert world.clock() == pytest.approx(9.9 + watchdog.BLIND_S, abs=0.2)
    assert recorder.done == []
    # A single reading in a minute is enough to go on
    done, _, _ = replay(lambda t: 8.7 if t % 50 < 0.05 else "garbage", 3600)
    assert done == []


@pytest.mark.parametrize("text", ["", "garbage\n", "MemTotal: 1 kB\nMemFree: 0 kB\n"])
def test_a_watchdog_that_sees_nothing_does_not_say_that_it_guards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Its start fails, and with it the engine's."""
    (tmp_path / "guard.json").write_text('{"user": "root"}')
    (tmp_path / "meminfo").write_text(text)
    argv = ["--guard", str(tmp_path / "guard.json"), "--meminfo", str(tmp_path / "meminfo")]
    assert watchdog.main(argv) == 3
    assert capsys.readouterr().err.endswith("meminfo: says nothing that makes sense\n")
    assert watchdog.main([*argv[:3], str(tmp_path / "none")]) == 3


PSI = b"some avg10=%s avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00\n"


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        (PSI % b"12.34", 12.34),
        (b"", 0.0),
        (b"some", 0.0),
        (PSI % b"", 0.0),
        (PSI % b"x", 0.0),
        (PSI % b"nan", 0.0),
        (PSI % b"-1", 0.0),
        (PSI % b"1e999", 0.0),
        (b"\xff\0" * 90, 0.0),
    ],
)
def test_pressure_is_told_and_never_needed(tmp_path: Path, text: bytes, percent: float) -> None:
    """A kernel without it, and whatever else stands there: 0, and the decision goes on."""
    (tmp_path / "memory").write_bytes(text)
    descriptor = watchdog.open_or_none(str(tmp_path / "memory"))
    assert descriptor is not None
    assert watchdog.read_pressure(descriptor) == percent
    os.close(descriptor)
    assert watchdog.read_pressure(descriptor) == 0.0
    assert watchdog.open_or_none(str(tmp_path / "none")) is None
    assert watchdog.read_pressure(None) == 0.0


def test_one_impossible_fall_is_no_fall() -> None:
    """A single reading of next to nothing beside healthy ones is looked at again, and forgotten."""
    done, shared, world = replay(lambda t: 0.6 if t % 5 == 1.0 else 60.0, 600)
    assert done == []
    assert shared.bad == 120
    assert world.reads == 6000 + 120
    assert shared.lowest == pytest.approx(60.0, abs=1e-3)


def test_an_impossible_fall_that_stays_is_one() -> None:
    """What two looks see is there: the kill comes 20 ms later and not a period."""
    done, _, _ = replay(lambda t: 60.0 if t < 10 else 2.0, 60)
    assert done == [(10.02, KILL)]


def test_bad_readings_do_not_hide_a_collapse() -> None:
    """Every other one is garbage: what is left is enough, and in time."""
    done, _, world = replay(
        lambda t: "garbage" if round(t * 10) % 2 else max(0.1, 60.0 - max(0.0, t - 10) * 14), 60
    )
    ((when, action),) = done
    assert action == KILL
    assert 60.0 - (when - 10) * 14 > LOCK_GIB + 14 * CONFIG.reaction_s
    assert world.reads > 100


def test_two_hours_of_everything() -> None:
    """The loop itself, with readings that make no sense in between, up to a collapse at the end."""
    kinds = list(BAD.values())
    parts = (steady, prefill_spikes, recovering_dips, sawtooth)

    def level(t: float) -> float | str:
        if t >= HOURS_2 - 10:
            return max(0.05, 30.0 - 20.0 * (t - HOURS_2 + 10))
        n = round(t * 10)
        return kinds[n // 13 % len(kinds)] if n % 13 == 5 else parts[int(t / 600) % 4](t)

    done, shared, _ = replay(level, HOURS_2)
    assert done == [(7191.3, KILL)]
    assert shared.bad == len([n for n in range(71900) if n % 13 == 5])
    assert shared.late == 0


# --- acting on a control group


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A version 1 group as files: the kernel's own is played by the test."""
    path = tmp_path / "systemd/system.slice/dsv4.service"
    (path / "below").mkdir(parents=True)
    return path


def sleeper(*code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", ";".join(code)], stdout=subprocess.PIPE)


def test_a_group_is_found_in_each_hierarchy(tmp_path: Path, group: Path) -> None:
    """Version 2 at the root, version 2 beside version 1, and version 1 alone."""
    assert cgroup.directories("dsv4.service", str(tmp_path)) == []
    (group / "cgroup.procs").write_text("1\n")
    two = tmp_path / "system.slice/dsv4.service"
    two.mkdir(parents=True)
    (two / "cgroup.procs").write_text("1\n")
    assert cgroup.directories("dsv4.service", str(tmp_path)) == [str(two), str(group)]


@pytest.mark.parametrize("place", ["models.slice", "models.slice/models-large.slice"])
def test_a_group_is_found_in_its_owners_slice(tmp_path: Path, group: Path, place: str) -> None:
    """`Slice=` in a drop-in must not hide the engine from its watchdog."""
    moved = tmp_path / place / "dsv4.service"
    moved.mkdir(parents=True)
    (moved / "cgroup.procs").write_text("1\n")
    assert cgroup.directories("dsv4.service", str(tmp_path)) == [str(moved)]


def test_a_whole_group_is_killed(group: Path) -> None:
    """Groups below count, and processes of foreign namespaces (0) are no targets."""
    first, second = (sleeper("import time", "time.sleep(60)") for _ in range(2))
    (group / "cgroup.procs").write_text(f"{first.pid}\n0\n")
    (group / "below/cgroup.procs").write_text(f"{second.pid}\n")
    assert cgroup.kill([str(group)]) == 2
    assert first.wait(5) == second.wait(5) == -signal.SIGKILL
    for process in (first, second):
        assert process.stdout is not None
        process.stdout.close()


def test_another_engine_is_not_touched(tmp_path: Path, group: Path) -> None:
    """A second service of the same account has a watchdog of its own."""
    first, second = (sleeper("import time", "time.sleep(60)") for _ in range(2))
    (group / "cgroup.procs").write_text(f"{first.pid}\n")
    beside = group.with_name("dsv4-b.service")
    beside.mkdir()
    (beside / "cgroup.procs").write_text(f"{second.pid}\n")
    assert cgroup.kill(cgroup.directories("dsv4.service", str(tmp_path))) == 1
    assert first.wait(5) == -signal.SIGKILL
    assert second.poll() is None
    second.kill()
    for process in (first, second):
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_who_has_gone_meanwhile_costs_the_others_nothing(group: Path) -> None:
    """A process may end between the list and the signal; the list itself may go, or be odd."""
    gone, left = (sleeper("import time", "time.sleep(60)") for _ in range(2))
    gone.kill()
    gone.wait()
    (group / "cgroup.procs").write_text(f"{gone.pid}\n{left.pid}\n")
    (group / "below/cgroup.procs").write_bytes(b"\0 x\n")
    assert cgroup.owner(gone.pid) is None
    cgroup.kill([str(group), str(group / "none")])
    assert left.wait(5) == -signal.SIGKILL
    for process in (gone, left):
        assert process.stdout is not None
        process.stdout.close()


def shared_for(tmp_path: Path) -> watchdog.Shared:
    return watchdog.Shared(guard.Guard(), Config(term_grace_s=0.3))


class Stage(watchdog.Guardian):
    """A guardian whose unit's group is a directory of the test's."""

    directory = ""

    def engine(self) -> tuple[list[str], set[int]]:
        alive = {pid for pid in cgroup.pids([self.directory]) if cgroup.owner(pid) == self.uid}
        return [self.directory], alive


def test_a_collapse_from_sample_to_record(tmp_path: Path, group: Path) -> None:
    """The engine dies at once; the trip holds the trajectory, and the time until it was gone."""
    engine = sleeper("import time", "time.sleep(60)")
    (group / "cgroup.procs").write_text(f"{engine.pid}\n")
    shared = shared_for(tmp_path)
    stage = Stage(shared, os.getuid())
    stage.directory = str(group)
    start = time.monotonic()
    for n, level in enumerate((30.0, 30.0, 2.0)):
        stage.look(Sample(start + n * 0.01, level, level))
    assert engine.wait(5) == -signal.SIGKILL
    assert engine.stdout is not None
    engine.stdout.close()
    (trip,) = shared.trips
    assert (trip.action, trip.signalled, len(trip.trajectory)) == (KILL, 1, 3)
    assert trip.latency_ms < 250
    (group / "cgroup.procs").write_text("")
    stage.look(Sample(time.monotonic(), 2.0, 2.0))
    assert trip.gone_ms is not None
    assert stage.trip is None
    record = watchdog.record_of(trip, shared, ["pid 1"], 1.0)
    assert json.loads(json.dumps(record))["trajectory"][-1][:2] == [0, 2.0]


def test_without_an_engine_nothing_is_killed(tmp_path: Path, group: Path) -> None:
    """Hooks wait in the same group for memory to come back; they are another user's."""
    hook = sleeper("import time", "time.sleep(60)")
    (group / "cgroup.procs").write_text(f"{hook.pid}\n")
    shared = shared_for(tmp_path)
    stage = Stage(shared, os.getuid() + 1)
    stage.directory = str(group)
    for n in range(5):
        stage.look(Sample(n * 0.1, 0.5, 0.5))
    assert hook.poll() is None
    assert not shared.trips
    hook.kill()
    hook.wait()
    assert hook.stdout is not None
    hook.stdout.close()


def test_an_engine_that_does_not_listen(tmp_path: Path, group: Path) -> None:
    """Asked once, killed after the grace; one record, the last word in it."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    engine = sleeper("import signal,time", ignore, "print(flush=True)", "time.sleep(60)")
    assert engine.stdout is not None
    engine.stdout.readline()
    (group / "cgroup.procs").write_text(f"{engine.pid}\n")
    shared = shared_for(tmp_path)
    stage = Stage(shared, os.getuid())
    stage.directory = str(group)
    start = time.monotonic()
    for n in range(12):
        stage.look(Sample(start + n * 0.1, 4.5, 4.5))
    assert engine.wait(5) == -signal.SIGKILL
    engine.stdout.close()
    assert [trip.action for trip in shared.trips][:2] == [TERM, KILL]
    assert len({trip.name for trip in shared.trips}) == 1


def test_history_is_bounded(tmp_path: Path) -> None:
    """A minute is kept and no more."""
    stage = Stage(shared_for(tmp_path), 1)
    for n in range(2000):
        stage.look(Sample(n * 0.1, 50, 50))
    assert len(stage.history) <= 602


# --- what it writes


def test_metrics_are_prometheus_text() -> None:
    """One help and one type line a name, one value a line, every name of ours described."""
    shared = watchdog.Shared(guard.Guard(), CONFIG, 121.6, Sample(0, 30, 20, 1.5), 12.0)
    shared.latency_s = 0.002
    lines = watchdog.metrics(shared, {TERM: 1, KILL: 2}, "ready", 1e9 + 0.5).splitlines()
    for mark in ("# HELP ", "# TYPE "):
        named = [line.split()[2] for line in lines if line.startswith(mark)]
        assert named == [f"dsv4_{name}" for name in watchdog.METRICS]
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['dsv4_watchdog_trips_total{action="kill"}'] == "2"
    assert float(values["dsv4_memory_available_bytes"]) == 30 * memory.GIB
    assert float(values["dsv4_watchdog_report_time_seconds"]) == 1e9 + 0.5
    phases = {key: value for key, value in values.items() if "engine_phase" in key}
    assert phases.pop('dsv4_engine_phase{phase="ready"}') == "1"
    assert set(phases.values()) == {"0"}


def test_metrics_without_a_sample_claim_nothing() -> None:
    """No reading yet is no reading of zero."""
    text = watchdog.metrics(watchdog.Shared(guard.Guard(), CONFIG), {}, "unknown", 1.0)
    assert "memory_available" not in text
    assert "watchdog_bad_samples_total 0" in text


def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> watchdog.Reporter:
    """Return a reporter that writes here and has not been started."""
    monkeypatch.setattr(layout, "WATCHDOG_RECORDS", tmp_path / "records")
    (tmp_path / "records").mkdir()
    return watchdog.Reporter(watchdog.Shared(guard.Guard(), CONFIG), tmp_path / "guard.json")


def trip(name: str) -> watchdog.Trip:
    return watchdog.Trip(name, KILL, "low", Sample(0, 2, 2), None, 1.0, 2, [Sample(0, 2, 2)])


def test_a_record_waits_for_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that cannot be written is not lost, and is told and counted once."""
    made = reporter(tmp_path, monkeypatch)
    made.shared.trips.append(trip("20261201T000000.000Z"))
    (tmp_path / "records").rmdir()
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            made.write_trips()
    (tmp_path / "records").mkdir()
    made.write_trips()
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["20261201T000000.000Z.json"]
    assert made.trips == {TERM: 0, KILL: 1}
    assert capsys.readouterr().err.count("killed: low") == 1


def test_a_kill_is_told_even_when_the_engine_is_gone_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that writes may have been held up by a disk until after the end."""
    made, one = reporter(tmp_path, monkeypatch), trip("20261201T000000.000Z")
    made.shared.trips.extend([one, one])
    one.gone_ms = 20.0
    made.write_trips()
    assert made.trips[KILL] == 1
    assert capsys.readouterr().err.count("killed: low") == 1


def test_a_clock_that_is_set_back_costs_no_new_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are named by the clock and the oldest names go: but not what was just written."""
    made = reporter(tmp_path, monkeypatch)
    for n in range(watchdog.RECORDS_KEPT):
        (tmp_path / f"records/20261201T0000{n:02}.000Z.json").write_text("{}")
    made.shared.trips.append(trip("19700101T000100.000Z"))
    made.write_trips()
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert names[0] == "19700101T000100.000Z.json"
    made.shared.trips.append(trip("20261202T000000.000Z"))
    made.write_trips()
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert len(names) == watchdog.RECORDS_KEPT + 1
    assert "20261201T000000.000Z.json" not in names


def test_names_of_records_sort() -> None:
    """The newest record is the last by name."""
    names = []
    for _ in range(3):
        names.append(watchdog.stamp())
        time.sleep(0.002)
    assert all(a < b for a, b in pairwise(names))


@pytest.mark.parametrize("argv", [["--guard"], ["--other", "x"], ["x"]])
def test_a_wrong_call(argv: list[str]) -> None:
    """Usage is status 2."""
    assert watchdog.main(argv) == 2


def test_a_locked_watchdog_is_small() -> None:
    """Its modules, fully locked, stay below 20 MiB: nothing heavy has crept in."""
    code = (
        "from dsv4 import watchdog; import gc; gc.collect(); watchdog.lock_memory();"
        "print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])"
    )
    library = str(Path(watchdog.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", code],  # as bin/dsv4 runs it
        env={"PYTHONPATH": library, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 20 * 1024
