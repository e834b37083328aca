"""guard.json is read tolerantly, and a wrong value is named."""

import json
from pathlib import Path

import pytest

from dsv4 import guard


def test_defaults_fill_what_is_missing(tmp_path: Path) -> None:
    """Unknown keys are for a newer version, missing ones have defaults."""
    path = tmp_path / "guard.json"
    value = {"schema": 9, "port": 1, "memory": {"utilisation": 1, "new": 2}, "future": {"a": 1}}
    path.write_text(json.dumps(value))
    found = guard.read(path)
    assert found.port == 1
    assert found.memory == guard.Memory(utilisation=1.0)
    assert found.ready == guard.Ready()
    assert found.watchdog_unit == "dsv4-watchdog.service"


def test_questions() -> None:
    """What the probe asks is a list of objects."""
    asked = [{"prompt": "p", "expect": ["Paris"], "chat": True, "max_tokens": 3}, {}]
    found = guard.parse({"probe": {"questions": asked}})
    assert found.questions == (guard.Question("p", ("Paris",), 3, True), guard.Question())


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"port": "8899"}, "port"),
        ({"port": 1.5}, "port"),
        ({"port": True}, "port"),
        ({"unit": 3}, "unit"),
        ({"memory": []}, "memory"),
        ({"memory": {"hard_floor_gib": "3,5"}}, "memory.hard_floor_gib"),
        ({"memory": {"hard_floor_gib": float("nan")}}, "memory.hard_floor_gib"),
        ({"memory": {"soft_floor_gib": float("-inf")}}, "memory.soft_floor_gib"),
        ({"memory": {"sample_ms": float("inf")}}, "memory.sample_ms"),
        ({"memory": {"hard_floor_gib": -1}}, "memory.hard_floor_gib"),
        ({"port": float("nan")}, "port"),
        ({"ready": {"max_tokens": None, "prompt": 4}}, "ready.prompt"),
        ({"probe": {"questions": {}}}, "probe"),
        ({"probe": 3}, "probe"),
        ({"probe": {"questions": [{"chat": 1}]}}, "probe.questions[0].chat"),
    ],
)
def test_a_wrong_value_is_named(value: dict[str, object], key: str) -> None:
    """The key is named, with what it got."""
    with pytest.raises(guard.BrokenGuard) as caught:
        guard.parse(value)
    assert str(caught.value).startswith(f"{key}:")


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_broken_file_is_a_finding(tmp_path: Path, text: str) -> None:
    """So is a missing one; neither is a crash."""
    path = tmp_path / "guard.json"
    with pytest.raises(guard.BrokenGuard, match="deploy again"):
        guard.read(path)
    path.write_text(text)
    with pytest.raises(guard.BrokenGuard, match="deploy again"):
        guard.read(path)
