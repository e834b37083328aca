"""The memory equation, with the numbers SAFETY gives for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import memory
from dsv4.memory import Limits

TOTAL = 121.63
"""GiB a GB10 shows."""

MEMINFO = """\
MemTotal:       127600748 kB
MemFree:         1258291 kB
MemAvailable:   81788928 kB
Cached:         83886080 kB
Dirty:               512 kB
HugePages_Total:       0
CmaTotal:         131072 kB
CmaFree:           65536 kB
"""


def test_the_floors_are_those_of_the_safety_page() -> None:
    """1 GiB, 14 GiB/s, 150 ms and 0.4 GiB make 3.5 GiB; the soft floor lies 1.5 above."""
    found = memory.floors(Limits())
    assert found.hard == pytest.approx(3.5)
    assert found.soft == pytest.approx(5.0)


def test_slower_sampling_raises_the_floors() -> None:
    """What falls between two samples is part of the floor: a second costs 14 GiB."""
    slow = memory.floors(Limits(sample_ms=1000))
    assert slow.hard == pytest.approx(1.0 + 14 * 1.05 + 0.4)


def test_steady_headroom() -> None:
    """What the engine and the host leave, and what it must be."""
    assert memory.steady_headroom(TOTAL, 0.88, Limits()) == pytest.approx(TOTAL * 0.12 - 5.9)
    assert memory.needed_headroom(16_384, Limits()) == pytest.approx(6.0)
    assert memory.serving_headroom(16_384, Limits()) == pytest.approx(5.0)
    assert memory.serving_headroom(262_144, Limits()) == pytest.approx(17.0)


@pytest.mark.parametrize(
    ("context", "gib"), [(0, 0.0), (65_536, 0.0), (131_072, 4.0), (262_144, 12.0)]
)
def test_long_prompts_need_their_own_room(context: int, gib: float) -> None:
    """64k ran with the usual headroom, 128k died with 10 GiB and finished with 20."""
    assert memory.prefill_gib(context) == pytest.approx(gib)


@pytest.mark.parametrize(("utilisation", "passes"), [(0.80, True), (0.90, True), (0.92, False)])
def test_the_reported_utilisations(utilisation: float, passes: bool) -> None:
    """0.92, which a report used, leaves less than the watchdog needs to stay quiet."""
    left = memory.steady_headroom(TOTAL, utilisation, Limits())
    assert (left >= memory.needed_headroom(65_536, Limits())) is passes


@given(
    total=st.floats(8, 2048),
    context=st.integers(256, 1_048_576),
    host=st.floats(0, 64),
)
def test_the_highest_utilisation_passes_and_the_next_does_not(
    total: float, context: int, host: float
) -> None:
    """What a refusal proposes is accepted, and is the most that is."""
    limits = Limits(host_use_gib=host)
    best = memory.highest_utilisation(total, context, limits)
    needed = memory.needed_headroom(context, limits)
    assert 0 <= best < 1
    if best > 0:
        assert memory.steady_headroom(total, best, limits) >= needed - 1e-6
    assert memory.steady_headroom(total, best + 0.0101, limits) < needed


@given(total=st.floats(1, 2048), free=st.floats(0, 2048), margin=st.floats(0, 16))
def test_the_gates_proposal_starts(total: float, free: float, margin: float) -> None:
    """What the gate proposes as utilisation would start with what is free now."""
    best = memory.startable_utilisation(total, free, margin)
    if best > 0:
        assert memory.start_needs(total, best, margin) <= free + 1e-6
    assert memory.start_needs(total, best + 0.0101, margin) > free - 1e-6 or best == 0


@pytest.mark.parametrize(
    ("available", "cores", "jobs"),
    [(110, 20, 20), (28, 20, 10), (12, 20, 2), (9, 20, 1), (2, 20, 1), (110, 2, 2), (8, 20, 1)],
)
def test_compile_jobs(available: float, cores: int, jobs: int) -> None:
    """max(1, min(cores, (MemAvailable - 8 GiB) / 2))."""
    assert memory.compile_jobs(available, cores) == jobs


def test_meminfo_is_read() -> None:
    """Kibibytes become GiB; what CUDA sees is MemFree, page cache counts as used there."""
    info = memory.parse_meminfo(MEMINFO)
    assert info.total == pytest.approx(121.69, abs=0.01)
    assert info.available == pytest.approx(78.0)
    assert info.cached == pytest.approx(80.0)
    assert info.cma_total > info.cma_free
    assert memory.free_for_engine(info, "cuda") == pytest.approx(1.2)
    assert memory.free_for_engine(info, "cpu") == pytest.approx(78.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        MEMINFO.replace("MemAvailable", "MemElse"),
        MEMINFO.replace("MemFree:         1258291", "MemFree:       227600748"),
        MEMINFO.replace("127600748", "0"),
        MEMINFO.replace("127600748", "²"),
        MEMINFO.replace("1258291", "0"),
        MEMINFO.replace(" kB", ""),
        MEMINFO.replace(" kB", " MB"),
        MEMINFO.replace("81788928", "-81788928"),
        MEMINFO[:40],
    ],
)
def test_bad_samples_are_told_apart(text: str) -> None:
    """A watchdog skips such a sample; it must not take a missing field for zero."""
    with pytest.raises(memory.BadMemInfo):
        memory.parse_meminfo(text)


def test_a_text_that_was_cut_off_is_never_less_memory() -> None:
    """Wherever it ends: either the whole figure is in it, or it is a bad sample."""
    whole = memory.parse_meminfo(MEMINFO)
    for end in range(len(MEMINFO)):
        try:
            found = memory.parse_meminfo(MEMINFO[:end])
        except memory.BadMemInfo:
            continue
        assert found.available == whole.available
        assert found.free == whole.free


def test_a_number_no_machine_has() -> None:
    """Neither too long for a float nor too long for Python to read."""
    for digits in (13, 400, 5000):
        with pytest.raises(memory.BadMemInfo):
            memory.parse_meminfo(MEMINFO.replace("1258291", "1" * digits))


NAMES = st.sampled_from(["MemTotal", "MemFree", "MemAvailable", "Cached", "x", ""])
LINES = st.builds("{}:{}{}".format, NAMES, st.text(max_size=3), st.text("0123456789²٣-. kB"))


@given(text=st.one_of(st.text(), st.lists(LINES, max_size=8).map("\n".join)))
def test_any_text_is_a_sample_or_a_bad_one(text: str) -> None:
    """No text makes the watchdog crash, and a sample is never absurd."""
    try:
        info = memory.parse_meminfo(text)
    except memory.BadMemInfo:
        return
    assert 0 <= info.free <= info.total
    assert 0 <= info.available <= info.total


def test_this_machines_meminfo() -> None:
    """The real file parses."""
    assert memory.read_meminfo().total > 0
