"""`dsv4 key`: made on the machine, root's alone, shown when root asks."""

from pathlib import Path

import pytest

from dsv4 import key, layout


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the key is, on this machine."""
    monkeypatch.setattr(layout, "CREDENTIALS", tmp_path / "credentials")
    monkeypatch.setattr(layout, "API_KEY", tmp_path / "credentials/api_key")
    monkeypatch.setattr(layout, "RECORD_JSON", tmp_path / "record.json")
    return tmp_path / "credentials/api_key"


def test_one_is_made_once_and_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert key.main([]) == 1
    assert "there is none" in capsys.readouterr().err
    assert key.main(["--create"]) == 0
    made = place.read_text().strip()
    assert len(made) >= 43
    assert key.main(["--create"]) == 0
    assert key.main([]) == 0
    assert capsys.readouterr().out == f"{made}\n"
    assert key.main(["--rotate"]) == 0
    assert place.read_text().strip() != made


def test_a_key_that_others_can_read_is_made_private_again(place: Path) -> None:
    """The same key: whoever has it goes on working; replacing it is the owner's decision."""
    assert not key.is_private()
    key.main(["--create"])
    made = place.read_text()
    place.chmod(0o644)
    assert not key.is_private()
    assert key.main(["--create"]) == 0
    assert key.is_private()
    assert place.read_text() == made
