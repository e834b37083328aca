"""`dsv4 state`: one command tells everything, on a half-made machine as well."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import state, store

SHOWN = """\
Id=dsv4.service
LoadState=loaded
ActiveState=activating
SubState=start-post
UnitFileState=enabled
NeedDaemonReload=no
Result=success
MainPID=4242
InvocationID=0123456789abcdef
NRestarts=2
StatusText=loading shard 3 of 48 = 6 %
Job=117

Id=dsv4-fetch.service
LoadState=not-found
ActiveState=inactive
"""


def test_units_are_read_as_systemctl_shows_them() -> None:
    """A value may hold an equals sign; what is not shown is empty, never missing."""
    found = state.parse_units(SHOWN)
    assert list(found) == ["dsv4.service", "dsv4-fetch.service"]
    unit = found["dsv4.service"]
    assert (unit["active"], unit["sub"], unit["job"]) == ("activating", "start-post", "117")
    assert unit["status_text"] == "loading shard 3 of 48 = 6 %"
    assert found["dsv4-fetch.service"]["load"] == "not-found"
    assert found["dsv4-fetch.service"]["restarts"] == ""


@given(text=st.one_of(st.text(), st.text("Id=\nxS \r").map(lambda text: SHOWN + text)))
def test_any_output_is_read(text: str) -> None:
    """Junk gives units with text in every field, or none."""
    for unit in state.parse_units(text).values():
        assert set(unit) == set(state.UNIT_FIELDS.values())
        assert all(isinstance(value, str) for value in unit.values())


def test_a_machine_without_systemd_has_no_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a missing systemctl nor one that fails is a crash."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state.units(["dsv4.service"]) == {}
    (tmp_path / "systemctl").write_text("#!/bin/sh\necho nonsense; exit 1")
    (tmp_path / "systemctl").chmod(0o755)
    assert state.units(["dsv4.service"]) == {}


def test_the_library_is_named_by_names_and_bytes(tmp_path: Path) -> None:
    """Compiled files do not count, a rename does."""
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.py").write_text("2")
    before = state.library_hash(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.cpython-311.pyc").write_text("x")
    assert state.library_hash(tmp_path) == before
    (tmp_path / "a.py").write_text("3")
    changed = state.library_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    assert len({before, changed, state.library_hash(tmp_path)}) == 3
    assert len(before) == 12


def test_packs_are_told_by_revision(tmp_path: Path) -> None:
    """A state file without its directory, or a broken one, is no complete pack."""
    pack = tmp_path / "mixedk"
    for name in ("aa", "bb"):
        (pack / name).mkdir(parents=True)
    store.write_json(pack / "aa.json", {"repo_id": "me/x", "complete": True, "error": None})
    store.write_json(pack / "cc.json", {"repo_id": "me/x", "complete": True, "error": None})
    store.write_json(pack / "dd.json", {"complete": False, "error": "no space"})
    (pack / "bb.json").write_text("{")
    found = state.packs(tmp_path)["mixedk"]
    assert {name: value["complete"] for name, value in found.items()} == {
        "aa": True,
        "bb": False,
        "cc": False,
        "dd": False,
    }
    assert found["aa"]["repo_id"] == "me/x"
    assert found["bb"]["error"] == "its state file is broken"
    assert found["dd"]["error"] == "no space"
    assert state.packs(tmp_path / "none") == {}


def test_paths_of_the_record_are_described(tmp_path: Path) -> None:
    """What was taken away by hand shows as absent."""
    (tmp_path / "a").write_bytes(b"x")
    record: dict[str, Any] = {"paths": {str(tmp_path / "a"): {}, str(tmp_path / "b"): {}}}
    found = state.paths(record)
    assert found[str(tmp_path / "a")]["sha256"] == hashlib.sha256(b"x").hexdigest()
    assert found[str(tmp_path / "b")] == {"kind": "absent"}
    assert state.paths({}) == {}


def test_this_machine_has_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is or is not here: one JSON object with every key a deploy decides by."""
    arguments = ["--json", "--port", "1", "--path", "/", "--package", "dpkg", "--package", "no-x"]
    assert state.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["schema"] == 1
    assert set(found["packages"]) == {"dpkg", "no-x"}
    assert found["packages"]["no-x"] is None
    wanted = "machine library tools accounts groups paths units runtimes current previous packs"
    wanted += " view fetch build engine lock receipt hub_token api_key"
    assert set(wanted.split()) <= found.keys()


def test_progress_is_the_moving_parts_only(capsys: pytest.CaptureFixture[str]) -> None:
    """What is polled every two seconds stays small."""
    assert state.main(["--progress"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"ok", "schema", "units", "fetch", "build", "bench", "phase"}


def test_code_that_others_can_change_is_as_good_as_none(tmp_path: Path) -> None:
    """Root's units run it: what anybody can write to is sent anew."""
    library = tmp_path / "dsv4-0123"
    library.mkdir(mode=0o755)
    (library / "a.py").write_text("a")
    (library / "a.py").chmod(0o644)
    (tmp_path / "dsv4").symlink_to(library.name)
    assert state.is_roots_own(tmp_path / "dsv4")
    (library / "a.py").chmod(0o666)
    assert not state.is_roots_own(tmp_path / "dsv4")
    (library / "a.py").chmod(0o644)
    library.chmod(0o777)
    assert not state.is_roots_own(tmp_path / "dsv4")
    assert not state.is_roots_own(tmp_path / "none")
