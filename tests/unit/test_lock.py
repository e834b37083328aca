"""One deploy at a time: the lock is held while its controller lives, and not a moment longer."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsv4 import __main__ as front
from dsv4 import lock, store

LIB = Path(lock.__file__).parents[1]

CARRIER = """
import subprocess, sys
from pathlib import Path
name, take, path, owner, token = sys.argv[1:]
Path("/proc/self/comm").write_text(name)
done = subprocess.run([sys.executable, "-c", take, path, owner, token], stdout=subprocess.PIPE)
print(done.stdout.decode().strip(), flush=True)
sys.stdin.read()
"""
"""A process named like the one that carries a connection; it lives until its stdin ends."""

TAKE = """
import json, sys
from pathlib import Path
from dsv4 import lock
path, owner, token = sys.argv[1:]
print(json.dumps(lock.acquire(owner, "laptop", token, Path(path))))
"""


@dataclass
class Controller:
    """A run of the deploy with its connection; `answer` is who had the lock, None for nobody."""

    process: subprocess.Popen[str]
    answer: dict[str, Any] | None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the lock is."""
    return tmp_path / "run/deploy.lock"


@pytest.fixture
def connect(path: Path) -> Iterator[Any]:
    """Start controllers, and end them with the test."""
    started = []

    def start(owner: str, token: str, name: str = "sshd") -> Controller:
        process = subprocess.Popen(
            [sys.executable, "-c", CARRIER, name, TAKE, str(path), owner, token],
            env={**os.environ, "PYTHONPATH": str(LIB)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return Controller(process, json.loads(process.stdout.readline()))

    yield start
    for process in started:
        process.kill()
        process.communicate()


def eventually(path: Path, *, held: bool, within_s: float = 5) -> bool:
    """Wait until the lock is held or free."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if (lock.read_holder(path) is not None) is held:
            return True
        time.sleep(0.02)
    return False


def test_nobody_holds_a_lock_that_was_never_taken(path: Path) -> None:
    """A missing file, or a directory for it, means free."""
    assert lock.read_holder(path) is None


@pytest.mark.parametrize("name", ["sshd", "sshd-session"])
def test_the_lock_outlives_the_command_and_ends_with_the_connection(
    path: Path, connect: Any, name: str
) -> None:
    """The command that took it is gone; a kill of the carrier, with no chance to say so, frees."""
    controller = connect("ada", "run-1", name)
    assert controller.answer is None
    time.sleep(0.2)
    held = lock.read_holder(path)
    assert held is not None
    assert (held["owner"], held["host"], held["token"]) == ("ada", "laptop", "run-1")
    assert held["session"] == controller.process.pid
    controller.process.send_signal(signal.SIGKILL)
    controller.process.wait()
    assert eventually(path, held=False)


def test_a_second_controller_is_told_who_has_it(path: Path, connect: Any) -> None:
    """Owner, host and since when; after the first one's death it gets the lock."""
    first = connect("ada", "run-1")
    second = connect("bob", "run-2")
    assert second.answer is not None
    assert "ada on laptop since 20" in lock.describe(second.answer)
    first.process.kill()
    first.process.wait()
    assert eventually(path, held=False)
    assert connect("bob", "run-2").answer is None
    held = lock.read_holder(path)
    assert held is not None
    assert held["owner"] == "bob"


def test_asking_again_within_a_run_is_fine(path: Path, connect: Any) -> None:
    """The token names the run; a new connection of the same run does not lock itself out."""
    assert connect("ada", "run-1").answer is None
    assert connect("ada", "run-1").answer is None


def test_an_orderly_end_frees_as_well(path: Path, connect: Any) -> None:
    """The carrier ends by itself."""
    controller = connect("ada", "run-1")
    controller.process.communicate("")
    assert eventually(path, held=False)


def test_the_flock_decides_and_not_the_text(path: Path) -> None:
    """What a dead holder wrote is no holder; a held lock with broken text has one."""
    path.parent.mkdir()
    store.write_json(path.with_suffix(".json"), {"owner": "ghost"})
    path.touch()
    assert lock.read_holder(path) is None
    with path.open("w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        assert lock.read_holder(path) == {"schema": 1, "owner": "ghost"}
        path.with_suffix(".json").write_text("{")
        found = lock.read_holder(path)
        assert found == {"owner": "unknown"}
        unknown = "unknown on unknown since unknown (session pid unknown)"
        assert lock.describe(found) == unknown


def test_readers_do_not_keep_a_deploy_out(path: Path, connect: Any) -> None:
    """A state fact looks at the lock at any moment; taking it waits that instant out."""
    path.parent.mkdir()
    path.touch()
    program = (
        "import sys; from pathlib import Path; from dsv4 import lock\n"
        "while True: lock.read_holder(Path(sys.argv[1]))\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], env={**os.environ, "PYTHONPATH": str(LIB)}
    )
    try:
        time.sleep(0.2)
        assert connect("ada", "run-1").answer is None
    finally:
        reader.kill()
        reader.wait()


def test_names_of_processes_may_hold_anything() -> None:
    """A name with a parenthesis and spaces does not shift the fields behind it."""
    program = (
        "import sys; from pathlib import Path\n"
        "Path('/proc/self/comm').write_text(') S 1 (x')\n"
        "print('named', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert lock.parent(child.pid) == (") S 1 (x", os.getpid())
        child.communicate(b"")


def test_a_deploy_on_this_machine_is_carried_by_pyinfra() -> None:
    """Without an sshd above, the outermost pyinfra process is what lives as long as the run."""
    inner = "import os; from dsv4 import lock; print(lock.carrier(os.getpid()))"
    outer = (
        "import os, subprocess, sys; from pathlib import Path\n"
        "Path('/proc/self/comm').write_text('pyinfra')\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]])\n"
        "print(os.getpid())"
    )
    done = subprocess.run(
        [sys.executable, "-c", outer, inner],
        env={**os.environ, "PYTHONPATH": str(LIB)},
        capture_output=True,
        text=True,
        check=True,
    )
    found, pyinfra = (int(word) for word in done.stdout.split())
    session = session_above(os.getpid())
    assert found == (pyinfra if session is None else session)


def session_above(pid: int) -> int | None:
    """Return the connection these tests themselves are run through, if any."""
    while pid > 1:
        stat = Path(f"/proc/{pid}/status").read_text().split()
        name, above = stat[1], stat[stat.index("PPid:") + 1]
        if name in lock.SESSIONS:
            return pid
        pid = int(above)
    return None


def test_the_command_refuses_in_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1 and the holder's name, so that pyinfra fails the host with it."""
    path.parent.mkdir()
    store.write_json(path.with_suffix(".json"), {"owner": "ada", "host": "laptop", "since": "now"})
    path.touch()
    monkeypatch.setattr(lock.acquire, "__defaults__", (path,))
    with path.open("w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert lock.main(["--owner", "bob", "--host", "x", "--token", "t"]) == 1
    err = capsys.readouterr().err
    assert "ada on laptop since now" in err
    assert err.count("\n") == 1


def test_changing_commands_run_one_at_a_time(tmp_path: Path) -> None:
    """What a killed deploy left running is waited for, not run into."""
    path = tmp_path / "work.lock"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time\n"
            f"lock = open({str(path)!r}, 'w')\n"
            "fcntl.flock(lock, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\n"
            "time.sleep(60)\n",
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    with (
        pytest.raises(TimeoutError, match="still at work"),
        front.alone("tree", path, patience_s=0.3),
    ):
        pass
    holder.kill()
    holder.wait()
    with front.alone("tree", path, patience_s=5):
        pass
    holder.stdout.close()


def test_every_changing_command_is_a_tool() -> None:
    """A name that is none would be a change nobody guards."""
    assert front.OWNER.keys() | front.INTERNAL >= front.CHANGING
