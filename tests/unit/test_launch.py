"""The launcher and the hooks around it."""

import json
import mmap
import os
import pwd
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from dsv4 import fingerprint, guard, launch, lifecycle, phase, processes

RUNTIME = Path("/opt/dsv4/runtimes/abc")


NOBODY = pwd.getpwnam("nobody")

# --- the engine's environment


def test_path_has_the_runtime_and_the_toolkit_first() -> None:
    """The engine compiles at run time and finds ninja and nvcc by PATH."""
    given = {"PATH": "/usr/bin:/opt/dsv4/runtimes/abc/bin", "CUDA_HOME": "/usr/local/cuda-13.0"}
    found = launch.engine_environment(given, RUNTIME, None)
    assert found["PATH"] == "/opt/dsv4/runtimes/abc/bin:/usr/local/cuda-13.0/bin:/usr/bin"
    assert "VLLM_API_KEY" not in found


def test_the_key_is_for_the_engine_and_the_rest_is_not() -> None:
    """What systemd and the tools need is not handed on."""
    given = {
        "CREDENTIALS_DIRECTORY": "/run/credentials/x",
        "NOTIFY_SOCKET": "/run/x",
        "PYTHONPATH": "/somewhere",
        "VLLM_API_KEY": "from the environment file",
        "VLLM_CACHE_ROOT": "/var/lib/dsv4/cache",
    }
    found = launch.engine_environment(given, RUNTIME, "k")
    assert found["VLLM_API_KEY"] == "k"
    assert found["VLLM_CACHE_ROOT"] == "/var/lib/dsv4/cache"
    assert {"CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET"}.isdisjoint(found)
    assert found["PYTHONPATH"] == "/opt/dsv4/lib", "where the list of routes is"
    assert "VLLM_API_KEY" not in launch.engine_environment(given, RUNTIME, None)


@pytest.mark.parametrize("text", ["k3y", "k3y\n", " k3y\r\n"])
def test_key_is_read_without_its_line_end(tmp_path: Path, text: str) -> None:
    """A key written by an editor ends in a newline that is not part of it."""
    (tmp_path / "api_key").write_text(text)
    assert launch.read_key(str(tmp_path)) == "k3y"


@pytest.mark.parametrize("data", [b"", b"\n", b"two words", b"a\nb", "schlüssel".encode(), b"\xff"])
def test_a_key_that_is_none_stops_the_start(tmp_path: Path, data: bytes) -> None:
    """An empty key would leave the server open; one that cannot be sent would lock it."""
    (tmp_path / "api_key").write_bytes(data)
    with pytest.raises(launch.LaunchError, match="api_key"):
        launch.read_key(str(tmp_path))


def test_no_credential_is_no_key(tmp_path: Path) -> None:
    """A unit on loopback has none."""
    assert launch.read_key(None) is None
    assert launch.read_key(str(tmp_path)) is None


def test_refusal_is_read(tmp_path: Path) -> None:
    """A refusal that cannot be read is still one."""
    path = tmp_path / "refused.json"
    assert launch.refused(path) is None
    path.write_text('{"reason": "no"}')
    assert launch.refused(path) == "no"
    path.write_text("{")
    assert launch.refused(path) is not None


def test_wrong_call() -> None:
    """Anything but a hook's name is a wrong call."""
    assert launch.main(["chek"]) == 2
    assert lifecycle.main(["check", "twice"]) == 2


# --- restarts


def test_restarts_outside_the_window_do_not_count() -> None:
    """An engine that falls over once a month is restarted each time."""
    assert lifecycle.earlier_restarts([10.0, 900.0, "x", 1100.0], 1000.0, 200.0) == [900.0]


def restarts(endings: list[int | None], limit: int = 3) -> list[str | None]:
    """Return the verdict on an automatic start after each end, by that end's own `retries`."""
    known: dict[str, Any] = {}
    said = []
    for number, retries in enumerate(endings):
        last = phase.failure("x", retries)
        known, why = lifecycle.judge_restart(known, last, guard.Restarts(limit=limit), number)
        said.append(why)
    return said


def test_what_a_restart_cannot_help_is_not_tried_again() -> None:
    """Refused memory is tried once more, a wrong setting never; each try costs a load."""
    assert restarts([0]) == ["an automatic restart does not help"]
    assert restarts([1, 1]) == [None, "an automatic restart does not help"]
    assert restarts([None, 1, 1])[1:] == [None, "an automatic restart does not help"]
    assert restarts([1, None, 1]) == [None, None, None]
    assert restarts([None] * 4)[2:] == [None, "3 automatic restarts in 120 minutes did not help"]


def test_a_broken_history_counts_as_none() -> None:
    """It is a file in /run, and a start must not end because of it."""
    known, last = {"started_at": "soon", "alike": "x"}, {"retries": "many"}
    assert lifecycle.judge_restart(known, last, guard.Restarts(), 5.0) == (
        {"started_at": [5.0], "alike": 0},
        None,
    )


# --- stale processes


def process(pid: int, parent: int = 1, uid: int = 0, comm: str = "x", unit: str = "other.service"):  # type: ignore[no-untyped-def]
    group = f"0::/system.slice/{unit}\n"
    return processes.Process(pid, parent, uid, comm, comm, 0.0, 0.0, group)


def test_only_what_is_ours_is_stale() -> None:
    """What is in our group or is our user's engine goes; the hook's own line and others' stay."""
    found = [
        process(1, 0),
        process(10, 1, unit="dsv4.service"),  # the hook's wrapper
        process(11, 10, unit="dsv4.service"),  # the hook
        process(20, 1, 990, "python3", "dsv4.service"),
        process(21, 1, 990, "VLLM::EngineCor"),
        process(22, 1, 990, "bash"),
        process(23, 1, 1000, "VLLM::EngineCor"),
        process(24, 1, 990, "VLLM::Worker", "session-3.scope"),
        process(25, 1, 0, "python3", "dsv4.service.d"),
    ]
    stale = lifecycle.stale(found, guard.Guard(), 990, 11)
    assert [p.pid for p in stale] == [20, 21, 24]
    # With the GPU open its name does not matter; its user still does
    stale = lifecycle.stale(found, guard.Guard(), 990, 11, on_gpu={11, 22, 23, 25})
    assert [p.pid for p in stale] == [20, 21, 22, 24]


def test_a_group_below_the_units_is_the_units() -> None:
    """Hierarchies of both versions are read, and only whole names match."""
    text = "9:name=systemd:/x/system.slice/dsv4.service/sub\n0::/\n"
    inside = processes.Process(1, 0, 0, "a", "a", 0.0, 0.0, text)
    assert processes.in_unit(inside, "dsv4.service")
    assert not processes.in_unit(inside, "v4.service")


# --- the port


def test_port_and_its_holder() -> None:
    """A listener is seen and named; a free port is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not lifecycle.can_bind("127.0.0.1", port)
        assert any(f"pid {os.getpid()} " in line for line in lifecycle.port_holders(port))
    assert lifecycle.can_bind("127.0.0.1", port)
    assert lifecycle.port_holders(port) == []


def test_listeners_are_told_from_connections() -> None:
    """Only state 0A listens; ports are hexadecimal."""
    head = "  sl  local_address rem_address   st tx rx tr tm->when retrnsmt uid timeout inode\n"
    row = " 0: 0100007F:22C3 00000000:0000 {} 00:00 00:00 00000000 0 0 {} 1 0\n"
    table = head + row.format("0A", 77) + row.format("01", 78)
    assert lifecycle.listening_inodes([table, head], 0x22C3) == {"socket:[77]"}
    assert lifecycle.listening_inodes([table], 80) == set()


def test_a_connection_that_lingers_is_no_holder() -> None:
    """After a crash the port is in TIME_WAIT for a minute; that must not stop the next start."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first is the one that lingers
        client.close()
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    states = [line.split()[3] for line in lines if line.split()[1].endswith(f":{port:04X}")]
    assert states == ["06"], "TIME_WAIT"
    assert lifecycle.port_holders(port) == []
    assert lifecycle.can_bind("127.0.0.1", port)
    assert lifecycle.can_bind("0.0.0.0", port)


# --- shared memory


def test_what_a_dead_engine_left_in_shared_memory_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only ours, only files, and only what no process has open or mapped."""
    dead, held, mapped, others = (tmp_path / name for name in ("psm_1", "sem.2", "psm_3", "x"))
    for path in (dead, held, mapped, others):
        path.write_bytes(bytes(1 << 20))
    os.chown(others, NOBODY.pw_uid, NOBODY.pw_gid)
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(others)
    with held.open("rb"), mapped.open("rb") as handle:
        area = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        handle.close()
        lifecycle.clean_shm(os.getuid(), tmp_path)
        area.close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"sem.2", "psm_3", "x", "directory", "link"}
    assert "removed 1 leftovers" in capsys.readouterr().err
    lifecycle.clean_shm(NOBODY.pw_uid, tmp_path)
    assert not others.exists()


# --- the pack


def shard(path: Path, size: int = 64, cut: int = 0) -> None:
    header = json.dumps(
        {
            "__metadata__": {"a": "b"},
            "t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + b"x" * size
    path.write_bytes(data[: len(data) - cut])


@pytest.fixture
def view(tmp_path: Path) -> Path:
    """A view of three shards with an index, behind links."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    pack = tmp_path / "packs/name/rev"
    made = tmp_path / "views/v1"
    pack.mkdir(parents=True)
    made.mkdir(parents=True)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name in names:
        shard(pack / name)
        (made / name).symlink_to(pack / name)
    weights = {"weight_map": {f"t{n}": name for n, name in enumerate(names)}}
    (made / lifecycle.INDEX).write_text(json.dumps(weights))
    return made


def test_a_whole_pack_has_no_fault(view: Path) -> None:
    """Sizes come from the headers when the downloader has left none."""
    assert lifecycle.view_faults(view, NOBODY) == []
    assert os.geteuid() == os.getuid()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "is a link that leads nowhere"),
        ("unlinked", "is missing"),
        ("directory", "is no regular file"),
        ("unreadable", "may not be read by the engine's user"),
        ("hidden", "may not be read by the engine's user"),
        ("cut", "instead of"),
        ("empty", "is no safetensors file"),
        ("page", "is no safetensors file"),
        ("longer", "instead of"),
    ],
)
def test_each_fault_of_a_shard_is_named(view: Path, fault: str, words: str) -> None:
    """One line names the file and what is wrong with it."""
    link = view / "model-00002-of-00003.safetensors"
    real = link.resolve()
    if fault == "missing":
        real.unlink()
    elif fault == "unlinked":
        link.unlink()
    elif fault == "directory":
        real.unlink()
        real.mkdir()
    elif fault == "unreadable":
        real.chmod(0o600)
    elif fault == "hidden":
        real.parent.chmod(0o700)
    elif fault == "cut":
        shard(real, cut=3)
    elif fault == "empty":
        real.write_bytes(b"")
    elif fault == "page":
        real.write_bytes(b"<!DOCTYPE html><html>not found</html>")
    else:
        real.write_bytes(real.read_bytes() + b"x")
    (line,) = lifecycle.view_faults(view, NOBODY)
    assert f"{link.name} {words}" in line or f"{link.name} has" in line
    assert words in line


def test_sizes_of_the_downloader_count(view: Path) -> None:
    """A file that is whole by its own header can still be another one."""
    root = (view / "model-00001-of-00003.safetensors").resolve().parent
    files = {"model-00003-of-00003.safetensors": {"size": 5}}
    root.with_name("rev.json").write_text(json.dumps({"schema": 1, "files": files}))
    (line,) = lifecycle.view_faults(view, NOBODY)
    assert "model-00003-of-00003.safetensors has" in line


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {}}'])
def test_a_broken_index_is_a_finding(view: Path, text: str) -> None:
    """An index that is none stops the start and does not crash it."""
    (view / lifecycle.INDEX).write_text(text)
    (line,) = lifecycle.view_faults(view, NOBODY)
    assert str(view) in line


def test_runtime_must_be_complete(tmp_path: Path) -> None:
    """The manifest is written last, so without one there is no runtime."""
    assert "manifest.json" in str(lifecycle.runtime_fault(tmp_path))
    (tmp_path / "manifest.json").write_text("{")
    assert lifecycle.runtime_fault(tmp_path) is not None
    (tmp_path / "manifest.json").write_text("{}")
    assert lifecycle.runtime_fault(tmp_path) is None


# --- why it ended


@pytest.mark.parametrize(
    ("result", "code", "status", "words"),
    [
        ("success", "exited", "0", None),
        ("signal", "killed", "KILL", "SIGKILL"),
        ("signal", "", "", "a signal"),
        ("timeout", "", "", "TimeoutStartSec"),
        ("oom-kill", "killed", "KILL", "OOM killer"),
        ("exit-code", "exited", "3", "exited 3"),
        ("start-limit-hit", "", "", "start-limit-hit"),
    ],
)
def test_every_end_has_words(result: str, code: str, status: str, words: str | None) -> None:
    """systemd's result in words; a deliberate stop needs none."""
    found = lifecycle.why_ended(result, code, status, None)
    assert found is None if words is None else words in str(found)
    assert lifecycle.why_ended("exit-code", "exited", "243", None) == lifecycle.SETUP["243"]
    trip = lifecycle.why_ended(result, code, status, {"reason": "floor"})
    assert trip == "stopped by the watchdog: floor"


def test_own_launcher_is_what_is_recorded() -> None:
    """The fingerprint's launcher is the file that is run."""
    assert [path.name for path in fingerprint.CODE if path.is_file()] == ["launch.py", "routes.py"]
