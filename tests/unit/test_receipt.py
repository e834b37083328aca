"""Receipts: numbered, complete, without a secret, comparable however broken their neighbours."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from dsv4 import layout, receipt, store

BODY = {"deployed": {"route": "lab"}, "revision": "ab" * 20, "dirty": False, "settings": {"a": 1}}


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything a receipt looks at, in one temporary tree."""
    for name in ("CURRENT", "VIEW_CURRENT", "SERVE_YAML", "ENVIRONMENT", "GUARD_JSON"):
        monkeypatch.setattr(layout, name, tmp_path / getattr(layout, name).name)
    monkeypatch.setattr("dsv4.machine.gpu", lambda: {"driver": "580.95"})
    monkeypatch.setattr("dsv4.receipt.of_runtime", lambda: {"id": "lab-0"})
    return tmp_path / "receipts"


def test_one_is_left_with_everything_to_tell_runs_apart(places: Path) -> None:
    """Schema, number, UTC, revision, runtime, kernel, driver, settings, hashes, results."""
    layout.SERVE_YAML.write_text("a: 1\n")
    path = receipt.leave("deploy", BODY, places)
    found = json.loads(path.read_text())
    assert receipt.NAME.fullmatch(path.name)
    assert found["schema"] == layout.SCHEMA
    assert found["number"] == 1
    assert found["written"].endswith("Z")
    assert (found["kind"], found["revision"], found["dirty"]) == ("deploy", "ab" * 20, False)
    assert (found["runtime"], found["driver"]) == ({"id": "lab-0"}, "580.95")
    assert found["hashes"]["SERVE.yaml".lower()] == store.sha256_file(layout.SERVE_YAML)
    assert found["kernel"]


def test_later_ones_know_what_was_deployed(places: Path) -> None:
    """Verify and bench run on the machine, where the revision is known from the deploy only."""
    first = receipt.leave("deploy", BODY, places)
    second = json.loads(receipt.leave("verify", {"results": {"ok": True}}, places).read_text())
    assert second["deploy"] == first.name
    assert (second["revision"], second["settings"]) == (BODY["revision"], BODY["settings"])
    assert second["number"] == 2


def test_a_clock_that_was_set_back_does_not_hide_the_newest(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number counts, not the time in the name."""
    receipt.leave("deploy", {"deployed": 1}, places)
    monkeypatch.setattr("dsv4.receipt.time.gmtime", lambda: (2001, 1, 1, 0, 0, 0, 0, 1, 0))
    path = receipt.leave("deploy", {"deployed": 2}, places)
    assert "-20010101T" in path.name
    assert receipt.newest("deploy", places) == (path, json.loads(path.read_text()))


def test_old_names_and_broken_files_are_passed_over(places: Path) -> None:
    """One from before receipts had numbers is older than any that has one."""
    places.mkdir()
    store.write_json(places / "20261130T120000.000Z-deploy.json", {"deployed": "old"})
    assert receipt.newest("deploy", places)[1]["deployed"] == "old"
    receipt.leave("deploy", {"deployed": "new"}, places)
    (places / "0009-20261130T120000Z-deploy.json").write_text("{")
    assert receipt.newest("deploy", places)[1]["deployed"] == "new"
    assert receipt.newest("bench", places) == (None, {})
    assert json.loads(receipt.leave("deploy", {}, places).read_text())["number"] == 10


def test_old_ones_go_each_kind_by_itself(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is verified every day keeps the deploy that was."""
    monkeypatch.setattr(receipt, "KEPT", 3)
    receipt.leave("deploy", BODY, places)
    for _ in range(5):
        receipt.leave("verify", {}, places)
    assert [receipt.number_of(path) for path in receipt.all_of(None, places)] == [1, 4, 5, 6]


def compare(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    status = receipt.main(["compare", "--json", *argv])
    text = capsys.readouterr().out
    return status, json.loads(text) if text else {}


def test_two_are_compared(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What changed, what is new, what is gone; quantities with their ratio."""
    cells = [{"streams": 1, "tokens_per_s": 20.0}, {"streams": 2, "tokens_per_s": 30.0}]
    receipt.leave("bench", {**BODY, "results": {"cells": cells}}, places)
    cells = [{"streams": 1, "tokens_per_s": 10.0}, {"streams": 4, "tokens_per_s": 50.0}]
    changed = {**BODY, "settings": {"b": 2}}
    receipt.leave("bench", {**changed, "results": {"cells": cells}}, places)
    status, found = compare(capsys, "--root", str(places), "--kind", "bench")
    assert status == 1
    rows = {row.pop("key"): row for row in found["differences"]}
    speed = "results.cells[streams={}].tokens_per_s"
    assert rows[speed.format(1)] == {"before": 20.0, "after": 10.0, "ratio": 0.5}
    assert rows[speed.format(2)] == {"before": 30.0}
    assert rows[speed.format(4)] == {"after": 50.0}
    assert rows["settings.a"] == {"before": 1}
    assert rows["settings.b"] == {"after": 2}
    assert not {"written", "number", "schema"} & rows.keys()


def test_the_same_is_the_same(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers and times of writing are no difference."""
    for _ in range(2):
        receipt.leave("deploy", BODY, places)
    assert compare(capsys, "--root", str(places))[0] == 0
    assert compare(capsys, "1", "2", "--root", str(places))[0] == 0
    names = [str(path) for path in receipt.all_of(None, places)]
    assert compare(capsys, *names)[0] == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"9" * 5000])
def test_a_broken_or_absent_one_is_said(
    content: bytes, places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3, one line with the file's name, no traceback."""
    receipt.leave("deploy", BODY, places)
    broken = tmp_path / "broken.json"
    broken.write_bytes(content)
    for other in (broken, tmp_path / "absent.json"):
        assert receipt.main(["compare", "1", str(other), "--root", str(places)]) == 3
        said = capsys.readouterr().err
        assert other.name in said
        assert said.count("\n") == 1
    assert receipt.main(["compare", "--root", str(places)]) == 3  # there is only one
    assert receipt.main(["list", "--root", str(places)]) == 0


def test_another_schema_is_compared_as_far_as_it_goes(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said, and what both have is compared."""
    receipt.leave("deploy", BODY, places)
    later = tmp_path / "later.json"
    later.write_text(json.dumps({"schema": 9, "settings": {"a": 2}}))
    assert receipt.main(["compare", "1", str(later), "--root", str(places)]) == 1
    said = capsys.readouterr()
    assert "schema 9" in said.err
    assert "settings.a: 1 -> 2" in said.out


def test_lists_and_things_named_twice_are_told_apart() -> None:
    """Two questions are two findings."""
    found = [{"check": "text", "verdict": "right"}, {"check": "text", "verdict": "wrong"}]
    flat = dict(receipt.flat({"findings": found, "sizes": [1, 2]}))
    assert flat["findings[check=text].verdict"] == "right"
    assert flat["findings[check=text 2].verdict"] == "wrong"
    assert flat["sizes"] == [1, 2]


def test_stdin_is_a_receipt(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the deploy leaves it; what is no object is refused."""
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(BODY)))
    assert receipt.main(["deploy", "--root", str(places)]) == 0
    assert json.loads(Path(capsys.readouterr().out.strip()).read_text())["settings"] == {"a": 1}
    for text in ("", "[1]", "{"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert receipt.main(["deploy", "--root", str(places)]) == 2


def test_where_none_can_be_left_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The findings count; a receipt is worth a line."""
    (tmp_path / "file").write_text("")
    assert receipt.leave_or_say("verify", {}, tmp_path / "file") is None
    assert "no receipt was left" in capsys.readouterr().err
