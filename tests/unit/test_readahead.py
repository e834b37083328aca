"""What is read ahead of a load, what is dropped behind it, and when all of that ends."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import disk, guard, loads, memory, processes, readahead, residency, weights

MIB = 1 << 20
LOADER = (
    "import mmap,sys\n"
    "held={}\n"
    "for line in sys.stdin:\n"
    "    what,name=line.split()\n"
    "    if what=='map':\n"
    "        f=open(name,'rb');held[name]=mmap.mmap(f.fileno(),0,prot=1);f.close()\n"
    "    else:\n"
    "        held.pop(name).close()\n"
    "    print(flush=True)\n"
)


def plan(*sizes: int, window: int) -> readahead.Plan:
    return readahead.Plan(
        [readahead.Shard(Path(f"/{n}"), size) for n, size in enumerate(sizes)], window
    )


def read_all(made: readahead.Plan) -> list[tuple[str, int, int]]:
    found = []
    while (piece := made.next()) is not None:
        found.append((piece.shard.path.name, piece.start, piece.length))
    return found


# --- the plan


def test_nothing_before_the_engine_has_mapped_a_file() -> None:
    """Page cache would count against the engine's own check of free memory."""
    made = plan(4 * MIB, 4 * MIB, window=64 * MIB)
    made.look([])
    assert made.next() is None
    made.look(["/0"])
    assert made.next() is not None


def test_the_mapped_file_first_then_the_next_within_the_window() -> None:
    """What is mapped counts as a whole, whoever read it."""
    made = plan(20 * MIB, 20 * MIB, 20 * MIB, window=50 * MIB)
    made.look(["/0"])
    assert read_all(made) == [
        ("0", 0, 16 * MIB),
        ("0", 16 * MIB, 4 * MIB),
        ("1", 0, 16 * MIB),
        ("1", 16 * MIB, 4 * MIB),
    ]
    assert [shard.path.name for shard in made.look(["/1"])] == ["0"]
    made.shards[0].brought = 0
    assert read_all(made) == [("2", 0, 16 * MIB), ("2", 16 * MIB, 4 * MIB)]


def test_nothing_is_dropped_once_the_engine_has_come_to_the_last_file() -> None:
    """From then on it may begin to profile, when free memory must not rise."""
    made = plan(4 * MIB, 4 * MIB, 4 * MIB, window=64 * MIB)
    made.look(["/0"])
    read_all(made)
    made.look(["/0", "/1"])
    assert [shard.path.name for shard in made.look(["/1", "/2"])] == ["0"]
    assert made.look(["/2"]) == []
    assert made.look([]) == []
    assert made.over


def test_nothing_happens_while_nothing_is_mapped() -> None:
    """Between two files, or at the end of a load whose last file nobody saw: it may be profiling,
    when neither more nor less may be in memory.
    """
    made = plan(4 * MIB, 4 * MIB, 4 * MIB, window=64 * MIB)
    made.look(["/0"])
    first = made.next()
    assert first is not None
    assert made.look([]) == []
    assert made.next() is None
    assert not made.is_late(first)
    assert [shard.path.name for shard in made.look(["/1"])] == ["0"]
    made.shards[0].brought = 0
    assert made.is_late(first)
    assert made.next() is not None


def test_a_file_larger_than_the_window() -> None:
    """It is read no further than the window: its mapped pages cannot be dropped."""
    made = plan(100 * MIB, 4 * MIB, window=40 * MIB)
    made.look(["/0"])
    assert sum(length for _, _, length in read_all(made)) == 32 * MIB
    assert made.peak <= made.window


def test_files_that_came_and_went_between_two_looks() -> None:
    """They are passed: neither read any more nor kept."""
    made = plan(4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, window=12 * MIB)
    made.look(["/0"])
    read_all(made)
    assert [shard.path.name for shard in made.look(["/2"])] == ["0", "1"]


def test_what_was_in_memory_before_is_not_ours_to_drop() -> None:
    """A warm cache stays for the next start."""
    made = plan(4 * MIB, 4 * MIB, 4 * MIB, window=64 * MIB)
    made.look(["/0"])
    piece = made.next()
    assert piece is not None
    made.was_there(piece)
    assert made.look(["/1"]) == []


sizes = st.lists(st.integers(1, 60 * MIB), min_size=1, max_size=8)


@given(sizes, st.integers(16 * MIB, 100 * MIB), st.data())
def test_never_more_than_the_window(sizes: list[int], window: int, data: st.DataObject) -> None:
    """Whatever the engine maps and when: what we brought in and what it maps stay within it."""
    made = plan(*sizes, window=window)
    for _ in range(data.draw(st.integers(1, 12))):
        mapped = data.draw(st.sets(st.sampled_from(range(len(sizes))), max_size=2))
        for shard in made.look([f"/{n}" for n in mapped]):
            assert not shard.mapped
            shard.brought, shard.done = 0, shard.size
        for _ in range(data.draw(st.integers(0, 20))):
            if made.next() is not None:
                brought = sum(shard.brought for shard in made.shards)
                assert min(made.held, brought) <= window
    assert all(0 <= shard.brought <= shard.size for shard in made.shards)


# --- reading, with real files and a real loader


@pytest.fixture
def shards() -> Iterator[list[Path]]:
    """Four files on a disk, none of them in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        paths = [Path(name) / f"{n}.safetensors" for n in range(4)]
        for path in paths:
            path.write_bytes(b"x" * (4 * MIB))
            residency.drop(path)
        yield paths


class Loader:
    """A process that maps and lets go of files as it is told."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self.child = child

    def say(self, what: str, path: Path) -> None:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(f"{what} {path}\n".encode())
        self.child.stdin.flush()
        self.child.stdout.readline()


@contextmanager
def loader() -> Iterator[Loader]:
    argv = [sys.executable, "-c", LOADER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield Loader(child)
        child.kill()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("not so after ten seconds")


def reader_of(paths: list[Path], window: int) -> readahead.Reader:
    made = [readahead.Shard(path, path.stat().st_size) for path in paths]
    return readahead.Reader(readahead.Plan(made, window))


def test_it_follows_a_real_loader(shards: list[Path]) -> None:
    """The next files come into memory unasked, those behind leave it, the last ones stay."""
    names = {str(path) for path in shards}
    with loader() as engine, reader_of(shards, 8 * MIB) as reader:

        def look() -> None:
            reader.look(processes.mapping(names, pids={engine.child.pid}))

        look()
        time.sleep(0.1)
        assert [residency.resident(path) for path in shards] == [0, 0, 0, 0]
        engine.say("map", shards[0])
        look()
        until(lambda: residency.resident(shards[1]) == 4 * MIB)
        assert residency.resident(shards[2]) == 0
        for n in range(1, 4):
            engine.say("drop", shards[n - 1])
            engine.say("map", shards[n])
            look()
            # A piece that was being read meanwhile is dropped when it has come
            until(lambda n=n: residency.resident(shards[n - 1]) == 0)  # type: ignore[misc]
            until(lambda n=n: residency.resident(shards[min(n + 1, 3)]) == 4 * MIB)  # type: ignore[misc]
        until(lambda: reader.plan.over)
        engine.say("drop", shards[3])
        look()
        assert residency.resident(shards[3]) == 4 * MIB
    assert reader.plan.peak <= 8 * MIB
    assert reader.totals.read == 16 * MIB
    assert reader.totals.dropped == 12 * MIB


@contextmanager
def most_cached(paths: list[Path]) -> Iterator[Callable[[], int]]:
    """Note from outside the most of these files that was ever in memory."""
    found, over = [0], threading.Event()

    def sample() -> None:
        while not over.wait(0.005):
            found[0] = max(found[0], sum(residency.resident(path) for path in paths))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: found[0]
    finally:
        over.set()
        thread.join()


def test_the_page_cache_never_has_more_than_the_window(shards: list[Path]) -> None:
    """As the kernel counts it: the mapped file and the next, never three; and none is left over
    but those of the end.
    """
    names = {str(path) for path in shards}
    window = 9 * MIB
    with (
        most_cached(shards) as most,
        loader() as engine,
        reader_of(shards, window) as reader,
    ):
        for n, path in enumerate(shards):
            engine.say("map", path)
            if n:
                engine.say("drop", shards[n - 1])
            reader.look(processes.mapping(names, pids={engine.child.pid}))
            there = shards[: n + 2][-2:] if n < 3 else shards[3:]
            until(lambda there=there: all(residency.resident(it) == 4 * MIB for it in there))  # type: ignore[misc]
            time.sleep(0.1)  # for whoever would read further
        assert [residency.resident(path) for path in shards] == [0, 0, 0, 4 * MIB]
        assert 8 * MIB <= most() <= window


def test_a_file_that_cannot_be_read(shards: list[Path]) -> None:
    """It is the engine's to complain about; the others are read."""
    with loader() as engine, reader_of(shards, 64 * MIB) as reader:
        engine.say("map", shards[0])
        shards[1].unlink()
        reader.look([str(shards[0])])
        until(lambda: residency.resident(shards[3]) == 4 * MIB)
    assert reader.totals.failed == {"1.safetensors": "No such file or directory"}


def test_a_pause(shards: list[Path]) -> None:
    """Nothing is read while memory is short."""
    with reader_of(shards, 64 * MIB) as reader:
        reader.paused.set()
        reader.look([str(shards[0])])
        time.sleep(0.2)
        assert residency.resident(shards[0]) == 0
        reader.paused.clear()
        until(lambda: residency.resident(shards[3]) == 4 * MIB)


def test_memory_that_runs_short_in_the_middle(shards: list[Path], tmp_path: Path) -> None:
    """By the machine's own figures: nothing more comes in until there is room again, and the end of
    the load is noticed meanwhile.
    """
    names, state = tmp_path / "meminfo", {"phase": "loading"}
    rows = "MemTotal: 120000000 kB\nMemFree: {0} kB\nMemAvailable: {0} kB\n"
    names.write_text(rows.format(3 << 20))
    with reader_of(shards, 64 * MIB) as reader:
        seen = readahead.Sight(
            phase=lambda: state["phase"],
            pids=lambda: {1},
            mapped=lambda pids: [str(shards[0])],
            short=lambda: readahead.is_short(guard.Memory(), names),
        )
        ended: list[str] = []
        thread = threading.Thread(target=lambda: ended.append(readahead.follow(reader, seen)))
        thread.start()
        time.sleep(0.6)
        assert sum(residency.resident(path) for path in shards) == 0
        names.write_text(rows.format(30 << 20))
        until(lambda: residency.resident(shards[3]) == 4 * MIB)
        names.write_text("")
        until(reader.paused.is_set)
        state["phase"] = "profiling"
        thread.join(5)
        assert ended == ["the phase is profiling"]
    assert not [thread for thread in reader.threads if thread.is_alive()]


# --- when it ends


def follow(
    phases: Iterable[str],
    pids: Iterable[set[int]] = (),
    mapped: Iterable[list[str]] = (),
    short: Iterable[bool] = (),
) -> tuple[str, int, readahead.Reader]:
    """Return why it ended and after how many looks; the last value of each list goes on."""
    counted = 0

    def each(values: Iterable[object], otherwise: object) -> Callable[..., object]:
        left, last = iter(values), [otherwise]

        def value(*_: object) -> object:
            last[0] = next(left, last[0])
            return last[0]

        return value

    def sleep(seconds: float) -> None:
        nonlocal counted
        counted += 1
        assert counted < 1000, "it never ends"

    reader = readahead.Reader(plan(MIB, MIB, window=8 * MIB))
    seen = readahead.Sight(
        phase=each(phases, "missing"),  # type: ignore[arg-type]
        pids=each(pids, {1}),  # type: ignore[arg-type]
        mapped=each(mapped, []),  # type: ignore[arg-type]
        short=each(short, False),  # type: ignore[arg-type]
    )
    why = readahead.follow(reader, seen, clock=lambda: counted * readahead.LOOK_S, sleep=sleep)
    return why, counted, reader


@pytest.mark.parametrize("phase", ["profiling", "ready", "stopping", "failed", "missing", "odd"])
def test_gone_when_the_load_is_over(phase: str) -> None:
    """At the next look, whatever ended it, and also when nobody can tell."""
    why, looks, _ = follow(["starting", "loading", phase])
    assert why == f"the phase is {phase}"
    assert looks == 2


def test_gone_with_the_engine() -> None:
    """The phase stays what it was when everything is killed at once."""
    assert follow(["loading"], pids=[set(), {7}, {7}, set()])[:2] == ("the engine is gone", 3)


def test_another_start_s_phase_is_waited_out() -> None:
    """It begins together with the first hook, which has not written yet."""
    assert follow(["stopped", "stopped", "loading", "profiling"])[1] == 3
    why, looks, _ = follow(["stopped"])
    assert why == "the phase is stopped"
    assert looks * readahead.LOOK_S == pytest.approx(readahead.PATIENCE_S, rel=0.02)


def test_gone_when_all_is_read() -> None:
    """Also with the last file still mapped: nothing is left to do."""
    reader = readahead.Reader(plan(MIB, window=8 * MIB))
    reader.plan.look(["/0"])
    reader.plan.next()
    seen = readahead.Sight(lambda: "loading", lambda: {1}, lambda pids: ["/0"], lambda: False)
    assert readahead.follow(reader, seen) == "all is read"


def test_a_full_window_is_looked_at_again_soon() -> None:
    """The disk has nothing to do until it is seen that the engine has gone on."""
    reader = readahead.Reader(plan(16 * MIB, 16 * MIB, 16 * MIB, window=32 * MIB))
    state, naps = {"phase": "loading"}, []
    seen = readahead.Sight(lambda: state["phase"], lambda: {1}, lambda pids: ["/0"], lambda: False)

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if reader.plan.next() is None:
            state["phase"] = "profiling" if len(naps) > 4 else "loading"

    readahead.follow(reader, seen, sleep=sleep)
    assert naps == [readahead.LOOK_S] * 3 + [readahead.SOON_S] * 2


def test_a_pause_is_counted() -> None:
    """For whoever wonders why the load was slow all the same."""
    _, _, reader = follow(["loading"] * 9 + ["ready"], short=[True] * 6 + [False])
    assert reader.totals.paused_s == pytest.approx(6 * readahead.LOOK_S)
    assert not reader.paused.is_set()


@pytest.mark.parametrize(
    ("device", "free", "available", "short"),
    [
        ("cuda", 30, 40, False),
        ("cuda", 3.4, 40, True),
        ("cpu", 0.5, 40, False),
        ("cpu", 0.5, 4.9, True),
        ("cuda", 4.0, 4.9, True),
    ],
)
def test_the_watchdog_s_floors(
    tmp_path: Path, device: str, free: float, available: float, short: bool
) -> None:
    """A GPU is refused memory by MemFree, a processor by what can be had at all."""
    rows = {"MemTotal": 121.6, "MemFree": free, "MemAvailable": available}
    text = "".join(f"{k}: {int(val * memory.KIB_PER_GIB)} kB\n" for k, val in rows.items())
    (tmp_path / "meminfo").write_text(text)
    assert readahead.is_short(guard.Memory(device=device), tmp_path / "meminfo") is short


def test_memory_nobody_can_tell_of_is_short(tmp_path: Path) -> None:
    """Bringing more in on a guess could freeze the machine."""
    assert readahead.is_short(guard.Memory(), tmp_path / "none")


def test_nothing_to_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3, in one line."""
    assert readahead.main(["--guard", str(tmp_path / "none")]) == 3
    (tmp_path / "g").write_text(f'{{"user": "root", "view": "{tmp_path}"}}')
    assert readahead.main(["--guard", str(tmp_path / "g")]) == 3
    assert capsys.readouterr().err.count("\n") == 2


# --- order, the disk's rate, and what follows from it


def test_files_are_in_the_order_of_loading(tmp_path: Path) -> None:
    """As vLLM sorts: 2 before 10; and only what the index names."""
    blobs = tmp_path / "blobs"
    view = tmp_path / "view"
    blobs.mkdir()
    view.mkdir()
    for n, name in enumerate(("m-10.safetensors", "m-2.safetensors", "other.safetensors")):
        (blobs / f"{9 - n}").write_bytes(b"x" * n)
        (view / name).symlink_to(blobs / f"{9 - n}")
    (view / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m-10.safetensors", "b": "m-2.safetensors"}}'
    )
    assert weights.weight_files(view) == {str(blobs / "8"): 1, str(blobs / "9"): 0}
    assert list(weights.weight_files(view)) == [str(blobs / "8"), str(blobs / "9")]
    assert weights.weight_files(tmp_path / "none") == {}


def test_the_disk_s_rate_is_asked_past_the_cache() -> None:
    """What is cached does not count, and nothing is cached by asking."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        path = Path(name) / "f"
        path.write_bytes(os.urandom(40 * MIB))
        residency.drop(path)
        assert (disk.parallel_rate({str(path): 40 * MIB}) or 0) > 0
        assert residency.resident(path) == 0
    assert disk.parallel_rate({str(path): 40 * MIB}) is None
    assert disk.parallel_rate({}) is None


def start(**values: object) -> dict[str, object]:
    cold = {"kind": "cold", "read_gib": 94.0, "weights_s": 470.0, "disk_gib_s": 3.2}
    return {**cold, "readahead": False, **values}


def test_advice() -> None:
    """Only for a cold load far below what this disk was seen to give."""
    assert "0.20 GiB/s where the disk gives 3.20: service_readahead" in loads.advice(start())
    for other in (
        None,
        start(readahead=True),
        start(kind="warm"),
        start(weights_s=40.0),
        start(weights_s=None),
        start(weights_s=0),
        start(disk_gib_s=None),
        start(read_gib=0.5),
        {},
    ):
        assert loads.advice(other) == "", other
