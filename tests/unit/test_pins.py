"""Pins: what was decided once for a host holds."""

import json
from pathlib import Path

import pytest
from pyinfra.api.exceptions import PyinfraError

from deploy import pins
from dsv4 import store

REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_a_host_without_pins_has_none(tmp_path: Path) -> None:
    """The first run pins."""
    assert pins.read("spark", tmp_path) == pins.Pins()
    assert pins.read("spark", tmp_path).revision("mixedk") is None


def test_a_pin_is_read_back(tmp_path: Path) -> None:
    """In one file a host, in a form that can be committed and compared."""
    path = pins.pin("spark", "packs", "mixedk", REVISION, tmp_path / "pins")
    assert path == tmp_path / "pins/spark.json"
    assert pins.read("spark", tmp_path / "pins").revision("mixedk") == REVISION
    text = path.read_text()
    assert text.endswith("\n")
    assert json.loads(text) == {"schema": 1, "packs": {"mixedk": REVISION}}


def test_pins_of_other_packs_and_unknown_keys_stay(tmp_path: Path) -> None:
    """Adding one loses nothing, not even what a later version wrote."""
    store.write_json(tmp_path / "spark.json", {"packs": {"a": "1"}, "later": {"x": 1}})
    pins.pin("spark", "packs", "b", REVISION, tmp_path)
    assert store.read_json(tmp_path / "spark.json") == {
        "schema": 1,
        "packs": {"a": "1", "b": REVISION},
        "later": {"x": 1},
    }


def test_hosts_do_not_share_pins(tmp_path: Path) -> None:
    """Each host has its file."""
    pins.pin("one", "packs", "a", REVISION, tmp_path)
    assert pins.read("two", tmp_path) == pins.Pins()


@pytest.mark.parametrize(
    "host", ["@local", "@fake/web-1", "../../etc/passwd", "2001:db8::1", "user@host name"]
)
def test_a_file_name_stays_in_its_directory(tmp_path: Path, host: str) -> None:
    """A host's name can be anything."""
    assert pins.path_of(host, tmp_path).parent == tmp_path
    pins.pin(host, "packs", "a", REVISION, tmp_path)
    assert pins.read(host, tmp_path).revision("a") == REVISION


def test_a_broken_file_stops_and_is_never_guessed_at(tmp_path: Path) -> None:
    """A lost pin would silently mean another revision."""
    (tmp_path / "spark.json").write_text("{")
    with pytest.raises(PyinfraError, match=r"spark\.json.*version control"):
        pins.read("spark", tmp_path)
    with pytest.raises(store.BrokenState):
        pins.pin("spark", "packs", "a", REVISION, tmp_path)
    assert (tmp_path / "spark.json").read_text() == "{"
