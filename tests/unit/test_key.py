"""`dsv4 key`: made on the machine, root's alone, in force at once."""

import json
from pathlib import Path

import pytest

from dsv4 import fingerprint, guard, key, layout, routes, store, systemd
from tests.unit.http_engine import server


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the key is, on this machine."""
    monkeypatch.setattr(layout, "CREDENTIALS", tmp_path / "credentials")
    for name in ("API_KEY", "RECORD_JSON", "KEY_DIGEST", "STARTED_JSON", "GUARD_JSON"):
        monkeypatch.setattr(layout, name, tmp_path / name.lower())
    monkeypatch.setattr(layout, "API_KEY", tmp_path / "credentials/api_key")
    monkeypatch.setattr(layout, "FINGERPRINT_SALT", tmp_path / "salt")
    return tmp_path / "credentials/api_key"


def test_one_is_made_once_and_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert key.main([]) == 1
    assert "there is none" in capsys.readouterr().err
    assert key.main(["create"]) == 0
    made = place.read_text().strip()
    assert len(made) >= 43
    assert key.main(["create"]) == 0
    assert key.main([]) == 0
    assert key.main(["show"]) == 0
    assert capsys.readouterr().out == f"{made}\n{made}\n"
    assert key.main(["show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "key": made}
    assert key.main(["rotate"]) == 0
    assert place.read_text().strip() != made


def test_a_key_that_others_can_read_is_made_private_again(place: Path) -> None:
    """The same key: whoever has it goes on working; replacing it is the owner's decision."""
    assert not key.is_private()
    key.main(["create"])
    made = place.read_text()
    place.chmod(0o644)
    assert not key.is_private()
    assert key.main(["create"]) == 0
    assert key.is_private()
    assert place.read_text() == made


def rotated(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, live: bool, active: str = "active"
) -> tuple[int, str, str]:
    """Rotate beside a server that goes by the digest or, when it is not live, by its own key."""
    key.main(["create"])
    old = key.read()
    key.put_in_force(old, "root")
    fingerprint.salt(layout.FINGERPRINT_SALT)
    store.write_json(layout.STARTED_JSON, {"inputs": {"api_key": "old", "unit": "u"}})

    def answer(path: str, headers: dict[str, str]) -> tuple[int, object]:
        given = headers.get("Authorization", "").removeprefix("Bearer ")
        wanted = layout.KEY_DIGEST.read_text().strip() if live else routes.digest(old)
        return (200, {"data": []}) if routes.digest(given) == wanted else (401, {})

    monkeypatch.setattr(systemd, "show", lambda *_: {"ActiveState": active})
    monkeypatch.setattr(layout, "USER", "root")
    monkeypatch.setattr(key.put_in_force, "__defaults__", ("root",))
    with server(answer) as url:
        monkeypatch.setattr(guard, "read", lambda: guard.Guard(url=url))
        status, said = key.rotate()
    inputs = store.read_json_or(layout.STARTED_JSON, {})["inputs"]
    assert inputs["unit"] == "u"
    assert key.read() != old
    return status, said, inputs["api_key"]


def test_a_new_key_is_in_force_without_a_restart(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proven by asking with both; and the next deploy must not restart the engine for it."""
    status, said, noted = rotated(place, monkeypatch, live=True)
    assert (status, "the old one is dead" in said) == (0, True)
    salt = layout.FINGERPRINT_SALT.read_bytes()
    assert noted == fingerprint.key_digest(place.read_bytes(), salt)
    assert layout.KEY_DIGEST.stat().st_mode & 0o777 == 0o640
    assert key.read() not in layout.KEY_DIGEST.read_text()


def test_a_server_that_does_not_follow_is_said_and_restarted_by_the_next_deploy(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said, noted = rotated(place, monkeypatch, live=False)
    assert status == 1
    assert "systemctl restart dsv4.service" in said
    assert noted == "old"


def test_a_service_that_does_not_run_takes_the_new_key_when_it_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said, _ = rotated(place, monkeypatch, live=True, active="inactive")
    assert (status, "from the start of" in said) == (0, True)
