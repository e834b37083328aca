"""State files are whole, old or new, and reading one never crashes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import store

LIB = Path(store.__file__).parents[1]

BROKEN = {
    "empty": b"",
    "cut off": b'{"schema": 1, "packs"',
    "a list": b"[1, 2]",
    "null": b"null",
    "not text": b"\xff\xfe\x00{}",
    "nested without end": b"[" * 200_000,
}


def names(directory: Path) -> list[str]:
    """Return what is in a directory."""
    return sorted(path.name for path in directory.iterdir())


def test_what_was_written_is_read_back_with_its_schema(tmp_path: Path) -> None:
    """The schema number is added, text survives as it is."""
    store.write_json(tmp_path / "a.json", {"name": "Käse\n", "deep": {"n": [1, None]}})
    assert store.read_json(tmp_path / "a.json") == {
        "schema": 1,
        "name": "Käse\n",
        "deep": {"n": [1, None]},
    }


def test_the_mode_is_the_one_asked_for(tmp_path: Path) -> None:
    """A umask or an older file's mode has no say."""
    path = tmp_path / "secret.json"
    path.write_text("{}")
    path.chmod(0o644)
    store.write_json(path, {}, mode=0o600)
    assert path.stat().st_mode & 0o7777 == 0o600


def test_missing_is_none(tmp_path: Path) -> None:
    """A missing file is "unknown", also below something that is no directory."""
    (tmp_path / "file").write_text("x")
    assert store.read_json(tmp_path / "none.json") is None
    assert store.read_json(tmp_path / "file/none.json") is None
    assert store.read_json_or(tmp_path / "none.json", {"a": 1}) == {"a": 1}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_is_a_finding(tmp_path: Path, content: bytes) -> None:
    """A broken file is named, with what to do; a reader with a default goes on."""
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(store.BrokenState, match=r"state\.json.*run again"):
        store.read_json(path)
    assert store.read_json_or(path, {"a": 1}) == {"a": 1}


def test_a_directory_in_place_of_a_file_is_a_finding(tmp_path: Path) -> None:
    """Whatever is there and is no JSON file is broken."""
    (tmp_path / "state.json").mkdir()
    with pytest.raises(store.BrokenState):
        store.read_json(tmp_path / "state.json")


@given(content=st.binary(max_size=200))
def test_any_bytes_are_an_object_or_broken(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """No content makes a reader crash."""
    path = tmp_path_factory.getbasetemp() / "junk.json"
    path.write_bytes(content)
    try:
        assert isinstance(store.read_json(path), dict)
    except store.BrokenState:
        assert store.read_json_or(path, {}) == {}


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    """What cannot be encoded is found out before anything is replaced."""
    path = tmp_path / "state.json"
    store.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        store.write_json(path, {"a": object()})
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        store.write_bytes(path, b"x")
    assert names(tmp_path) == ["state.json"]


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    """Readers see old or new at any instant, also when the writer dies in the middle."""
    path = tmp_path / "state.json"
    program = (
        "import sys; from pathlib import Path; from dsv4 import store\n"
        "path = Path(sys.argv[1])\n"
        "for n in range(10**9): store.write_json(path, {'n': n, 'fill': str(n) * 20000})\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], env={**os.environ, "PYTHONPATH": str(LIB)}
    )
    try:
        deadline = time.monotonic() + 10
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = []
        for _ in range(50):
            value = json.loads(path.read_bytes())
            assert value["fill"] == str(value["n"]) * 20000
            seen.append(value["n"])
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    value = json.loads(path.read_bytes())
    assert value["fill"] == str(value["n"]) * 20000
    assert value["n"] >= seen[-1] >= seen[0]


def test_hashes(tmp_path: Path) -> None:
    """A file's hash is that of its bytes; what cannot be read has none."""
    (tmp_path / "a").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert store.sha256_file(tmp_path / "a") == store.sha256_bytes(b"abc") == digest
    assert store.sha256_file(tmp_path / "none") is None
    assert store.sha256_file(tmp_path) is None
