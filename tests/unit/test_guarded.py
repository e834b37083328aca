"""A program that is watched ends before the machine does, with everything it started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4 import guard, guarded, loaded, memory, watchdog

LIMITS = guard.Memory(sample_ms=20, soft_samples=3)
TEXT = "MemTotal: {0} kB\nMemFree: {1} kB\nMemAvailable: {1} kB\n"

HOG = """
import os, sys, time
path, floor, step, pids = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
child = os.fork()
open(pids, "a").write(f"{os.getpid()}\\n")
if child == 0:
    time.sleep(60)
free = 100.0
while free > floor:
    free -= step
    size = int(free * (1 << 20))
    with open(path + ".new", "w") as file:
        file.write(f"MemTotal: {120 << 20} kB\\nMemFree: {size} kB\\nMemAvailable: {size} kB\\n")
    os.replace(path + ".new", path)
    time.sleep(0.02)
print("had", free, flush=True)
time.sleep(float(sys.argv[5]))
"""


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(TEXT.format(120 << 20, 100 << 20))
    return path


def watch(meminfo: Path) -> guarded.Watch:
    return guarded.Watch(LIMITS, lambda: (meminfo.read_text(), 0.0), time.monotonic())


def hog(meminfo: Path, floor: float, step: float = 2.0, rest: float = 60.0) -> guarded.Ended:
    words = [str(meminfo), str(floor), str(step), str(meminfo.with_name("pids")), str(rest)]
    return guarded.run(
        [sys.executable, "-c", HOG, *words],
        environment=os.environ,
        user=None,
        watch=watch(meminfo),
    )


def alive(meminfo: Path) -> list[int]:
    """Return which of the program's processes are there and not only unburied."""
    found = []
    for pid in map(int, meminfo.with_name("pids").read_text().split()):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [pid] if state not in "ZX" else []
    return found


def gone(meminfo: Path) -> bool:
    until = time.monotonic() + 10
    while alive(meminfo) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(meminfo)


@pytest.mark.parametrize("floor", [2.0, 4.2])
def test_a_program_that_takes_too_much_is_killed_with_its_children(
    meminfo: Path, floor: float
) -> None:
    """Below the hard floor, and at the soft one when it stays there."""
    ended = hog(meminfo, floor, step=1.0)
    assert ended.status == -signal.SIGKILL
    assert "GiB available" in ended.killed
    assert gone(meminfo)


def test_one_that_stays_above_runs_to_its_end(meminfo: Path) -> None:
    """And what it leaves running goes with it."""
    ended = hog(meminfo, 50.0, step=5.0, rest=0.2)
    assert (ended.status, ended.killed) == (0, "")
    assert ended.out.startswith("had ")
    assert gone(meminfo)


def test_what_is_forbidden_meanwhile_ends_it(meminfo: Path) -> None:
    """As when the service is started beside it."""
    asked = iter([None, None, "the service is being started"])
    ended = guarded.run(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        environment=os.environ,
        user=None,
        watch=watch(meminfo),
        forbidden=lambda: next(asked),
    )
    assert (ended.status, ended.killed) == (-signal.SIGKILL, "the service is being started")


@pytest.mark.parametrize("text", ["", "MemTotal: 0 kB\n", "junk"])
def test_without_a_reading_it_does_not_go_on(meminfo: Path, text: str) -> None:
    """One bad reading is skipped; two seconds of them are none at all."""
    found = watch(meminfo)
    begun = found.seen
    meminfo.write_text(text)
    assert found.look(begun + guarded.BLIND_S - 0.1) is None
    reason = found.look(begun + guarded.BLIND_S + 0.1)
    assert reason is not None
    assert "could not be read" in reason
    meminfo.write_text(TEXT.format(120 << 20, 100 << 20))
    assert found.look(begun + guarded.BLIND_S + 0.2) is None


def test_a_fall_that_cannot_be_is_looked_at_once_more(meminfo: Path) -> None:
    """As the watchdog does: a second look that says the same counts."""
    found = watch(meminfo)
    begun = found.seen
    assert found.look(begun) is None
    size = 1 << 20
    texts = iter([TEXT.format(120 << 20, size), meminfo.read_text()])
    found.source = lambda: (next(texts), 0.0)
    assert found.look(begun + 0.02) is None
    meminfo.write_text(TEXT.format(120 << 20, size))
    found.source = lambda: (meminfo.read_text(), 0.0)
    assert "hard floor" in (found.look(begun + 0.04) or "")


def test_it_decides_as_the_watchdog_does(meminfo: Path) -> None:
    found = watch(meminfo)
    config = watchdog.config_of(LIMITS)
    for available in (config.hard, config.hard - 1):
        size = int(available * memory.KIB_PER_GIB)
        meminfo.write_text(TEXT.format(120 << 20, size))
        found.history.clear()
        assert "hard floor" in (found.look(time.monotonic()) or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_it_runs_as_another_user(meminfo: Path) -> None:
    ended = guarded.run(
        ["/bin/sh", "-c", "id -u; id -g; id -G"],
        environment={},
        user=(65534, 65533, [44]),
        watch=watch(meminfo),
    )
    assert ended.out.split() == ["65534", "65533", "65533", "44"]


@pytest.fixture
def orphan() -> Iterator[int]:
    """A process that is bound to a parent that has just been killed."""
    code = "import os, time; from dsv4 import loaded; loaded.bind(os.getppid())\n"
    code += "print(os.getpid(), flush=True); time.sleep(60)"
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    environment = {**os.environ, "PYTHONPATH": str(Path(loaded.__file__).parents[1])}
    argv = [sys.executable, "-c", start, code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        yield pid


def test_nobody_watching_nothing_loaded(orphan: int, tmp_path: Path) -> None:
    """The watch may be killed itself; what it watched then goes on without one, or not at all."""
    (tmp_path / "pids").write_text(str(orphan))
    assert gone(tmp_path / "meminfo")
    with pytest.raises(SystemExit, match="nobody watches"):
        loaded.main(["1"])
