"""The live picture: a row each, whatever lies on the disk."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dsv4 import findings, guard, layout, status
from dsv4.findings import Finding
from dsv4.status import Picture, Place

RUNS = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "UnitFileState": "enabled",
    "Result": "success",
    "NRestarts": "0",
    "ActiveEnterTimestamp": "Tue 2026-12-01 02:42:44 UTC",
    "Description": "vLLM, serving DSV4-Flash",
    "NeedDaemonReload": "no",
}
MEMINFO = "MemTotal: 127600748 kB\nMemFree: 9000000 kB\nMemAvailable: {} kB\nCached: 2000000 kB\n"


class Staged(Picture):
    """A picture of a machine that is made up."""

    def __init__(
        self, place: Place, units: Mapping[str, Mapping[str, str]], metrics: str = ""
    ) -> None:
        super().__init__(place)
        self.__dict__["units"] = units
        self.__dict__["guard"] = guard.Guard()
        self.__dict__["deployed"] = (None, {})
        self.__dict__["metrics"] = {n: float(v) for n, v in json.loads(metrics or "{}").items()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A machine's files, empty as yet."""
    for name in ("STARTED_JSON", "PHASE_JSON", "FETCH_PROGRESS", "BUILD_PROGRESS", "VIEW_NOTE"):
        monkeypatch.setattr(layout, name, tmp_path / f"{name.lower()}.json")
    monkeypatch.setattr(layout, "WATCHDOG_RECORDS", tmp_path / "watchdog")
    monkeypatch.setattr(layout, "CURRENT", tmp_path / "current")
    monkeypatch.setattr(layout, "PREVIOUS", tmp_path / "previous")
    monkeypatch.setattr(layout, "RUNTIMES", tmp_path / "runtimes")
    monkeypatch.setattr(layout, "VIEW_CURRENT", tmp_path / "view")
    monkeypatch.setattr(layout, "LOADS_JSON", tmp_path / "loads.json")
    (tmp_path / "watchdog").mkdir()
    (tmp_path / "meminfo").write_text(MEMINFO.format(10_000_000))
    return Place(True, tmp_path, (tmp_path / "lib",), tmp_path / "reboot", tmp_path / "module")


def units(**engine: str) -> dict[str, dict[str, str]]:
    """Return the units of a machine that serves, the engine's changed so."""
    return {layout.UNIT: {**RUNS, **engine}, layout.UNIT_WATCHDOG: {**RUNS}}


def only(rows: Any) -> Finding:
    """Return the one row there is."""
    (row,) = list(rows)
    assert isinstance(row, Finding)
    return row


def test_a_machine_without_anything_of_ours_gives_a_picture(place: Place) -> None:
    """Every row answers, none with a traceback: files that are not there are findings."""
    found = status.take(place)
    assert {finding.check for finding in found} >= {"runtime", "pack", "memory", "machine"}
    assert not [finding for finding in found if "Error(" in finding.text]
    assert findings.status(found) == 1


def test_a_row_that_cannot_be_looked_up_is_told_under_its_own_name(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without guard.json: the rows that go by it say so once each, with one word on what to do."""
    monkeypatch.setattr(layout, "ETC", place.proc)
    monkeypatch.setattr(guard.read, "__defaults__", (place.proc / "guard.json",))
    broken = {row.check: row for row in status.take(place) if row.verdict == "broken"}
    assert broken.keys() >= {"model", "memory"}
    assert not [name for name in broken if "_" in name]
    for row in broken.values():
        assert str(row.shown()["line"]).count("deploy again") == 1


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"\xff\xfe", b"null", b'{"detail": 7}'])
def test_a_broken_file_costs_its_own_row(place: Place, content: bytes) -> None:
    """Each file that the rows read, broken in each way, and the other rows are there as before."""
    names = {finding.check for finding in status.take(place)}
    for path in (layout.STARTED_JSON, layout.PHASE_JSON, layout.FETCH_PROGRESS, layout.VIEW_NOTE):
        path.write_bytes(content)
    (layout.WATCHDOG_RECORDS / "20261201T000000.000Z.json").write_bytes(content)
    found = status.take(place)
    assert {finding.check for finding in found} >= names - {"watchdog", "service"}
    assert not [finding for finding in found if "Traceback" in finding.text]


@pytest.mark.parametrize(
    ("engine", "phase", "state", "words"),
    [
        ({}, {}, "ok", "serves since Tue"),
        (
            {"ActiveState": "activating", "StatusText": "loading for 9 s"},
            {},
            "ok",
            "loading for 9 s",
        ),
        (
            {"ActiveState": "activating", "SubState": "auto-restart"},
            {"phase": "failed", "detail": {"reason": "out of memory"}},
            "fault",
            "waits for its next start: out of memory",
        ),
        ({"ActiveState": "inactive"}, {"phase": "stopped"}, "ok", "stopped by its owner"),
        (
            {"ActiveState": "failed", "Result": "exit-code"},
            {"phase": "failed", "detail": {"reason": "no room"}},
            "fault",
            "failed (exit-code): no room",
        ),
        ({"LoadState": "not-found"}, {}, "fault", "not-found"),
    ],
)
def test_the_service_row(
    place: Place, engine: dict[str, str], phase: dict[str, Any], state: str, words: str
) -> None:
    """What systemd and the last phase say, in one line."""
    if phase:
        layout.PHASE_JSON.write_text(json.dumps(phase))
    row = next(iter(status.service(Staged(place, units(**engine)))))
    assert row.state == state
    assert words in row.text


def test_a_changed_unit_file_is_told(place: Place) -> None:
    """systemd runs what it has read, not what is on disk."""
    rows = list(status.service(Staged(place, units(NeedDaemonReload="yes"))))
    assert [row.verdict for row in rows] == ["ok", "not loaded"]


def test_memory_beside_the_floors(place: Place) -> None:
    """Between the floors and what is available: below the soft one it is a finding."""
    assert only(status.memory_now(Staged(place, units()))).state == "ok"
    (place.proc / "meminfo").write_text(MEMINFO.format(4_000_000))
    low = only(status.memory_now(Staged(place, units())))
    assert (low.state, low.verdict) == ("fault", "below the soft floor")
    assert "asks at 5.00 and kills at 3.50" in low.text
    idle = {layout.UNIT: {**RUNS, "ActiveState": "inactive"}}
    assert only(status.memory_now(Staged(place, idle))).state == "ok"


def test_reserved_memory_is_told(place: Place) -> None:
    """The mark of a kernel that keeps memory for handover."""
    text = MEMINFO.format(10_000_000) + "CmaTotal: 100 kB\nCmaFree: 9000000 kB\n"
    (place.proc / "meminfo").write_text(text)
    rows = list(status.memory_now(Staged(place, units())))
    assert rows[-1].verdict == "handover"
    assert "kho=off" in rows[-1].remedy


def test_the_watchdog_row_tells_its_last_act(place: Place) -> None:
    """Dead beside a running engine, silent, or well with what it did last."""
    dead = {**units(), layout.UNIT_WATCHDOG: {**RUNS, "ActiveState": "failed"}}
    assert only(status.watchdog(Staged(place, dead))).verdict == "dead"
    stale = Staged(place, units(), '{"watchdog_report_time_seconds": 1000}')
    assert only(status.watchdog(stale)).verdict == "silent"
    record = {"action": "kill", "reason": "3.1 GiB available", "trajectory": [[0, 1, 2, 3]]}
    path = layout.WATCHDOG_RECORDS / "20261201T000000.000Z.json"
    path.write_text(json.dumps(record))
    row = only(status.watchdog(Staged(place, units())))
    assert (row.state, row.figures["last"]["action"]) == ("ok", "kill")
    assert "last kill at 20261201T000000.000Z: 3.1 GiB available" in row.text
    assert "trajectory" not in row.figures["last"]


COLD = {"kind": "cold", "ready_s": 520.2, "weights_s": 470.0, "read_gib": 94.0, "disk_gib_s": 3.2}
WARM = {"kind": "warm", "ready_s": 41.0, "weights_s": 28.0, "read_gib": 0.2}


@pytest.mark.parametrize(
    ("starts", "loader", "words", "advised"),
    [
        ([], "auto", None, False),
        ([COLD, WARM], "auto", "cold 520 s to the first token (0.20 GiB/s), warm 41 s", True),
        ([COLD], "instanttensor", "cold 520 s", False),
        ([COLD, {**COLD, "readahead": True}], "auto", "cold 520 s", False),
        ([{**COLD, "weights_s": 30.0}], "auto", "(3.13 GiB/s)", False),
        ([{**COLD, "view": "another"}, WARM], "auto", "warm 41 s", False),
        ([WARM], "auto", "warm 41 s", False),
        (["odd", 7, {"kind": []}], "auto", None, False),
    ],
)
def test_reading_ahead_is_recommended_after_a_slow_cold_load(
    place: Place, starts: list[Any], loader: str, words: str | None, advised: bool
) -> None:
    """Of what is served now, where it is off and would have something to do; never as a fault."""
    of = {"runtime": "absent", "view": "absent"}
    known = [{**of, **start} if isinstance(start, dict) else start for start in starts]
    layout.LOADS_JSON.write_text(json.dumps({"schema": 1, "starts": known}))
    at = Staged(place, units())
    at.__dict__["settings"] = {"serve_load_format": loader}
    rows = list(status.load(at))
    assert ["service_readahead: true" in row.text for row in rows] == [advised] * len(rows)
    assert all(row.state == "ok" for row in rows)
    assert [words in row.text for row in rows if words] == [True] * (words is not None)


def test_libraries_that_were_replaced_are_named() -> None:
    """Of the maps of a process: libraries only, and no shared memory or temporary files."""
    maps = (
        "7f00-7f01 r-xp 0 08:01 1 /usr/lib/aarch64-linux-gnu/libssl.so.3 (deleted)\n"
        "7f01-7f02 r--p 0 08:01 2 /usr/lib/aarch64-linux-gnu/libssl.so.3 (deleted)\n"
        "7f02-7f03 r-xp 0 08:01 3 /usr/lib/libc.so.6\n"
        "7f03-7f04 rw-s 0 00:01 4 /dev/shm/psm_1 (deleted)\n"
        "7f04-7f05 rw-s 0 00:01 5 /memfd:x.so (deleted)\n"
        "7f05-7f06 rw-p 0 00:00 0 [heap]\n"
    )
    assert status.deleted(maps) == {"/usr/lib/aarch64-linux-gnu/libssl.so.3"}


def test_a_reboot_is_asked_for(place: Place) -> None:
    """A pending upgrade, and a driver whose halves are of two versions."""
    assert only(status.reboot(Picture(place))).state == "ok"
    place.reboot.write_text("*** System restart required ***\n")
    Path(f"{place.reboot}.pkgs").write_text("linux-base\nlinux-base\n")
    row = only(status.reboot(Picture(place)))
    assert row.verdict == "reboot"
    assert "(linux-base)" in row.text
    library = place.libraries[0] / "aarch64-linux-gnu"
    library.mkdir(parents=True)
    (library / "libnvidia-ml.so.580.99.01").touch()
    (library / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.99.01")
    place.module.write_text("580.95.05\n")
    row = only(status.reboot(Picture(place)))
    assert row.verdict == "driver mismatch"
    assert "driver 580.95.05, its library is 580.99.01" in row.text


@pytest.mark.parametrize(
    ("unit", "progress", "state", "words"),
    [
        (
            {"ActiveState": "activating", "SubState": "start"},
            {"state": "running", "done_bytes": 41_000_000_000, "total_bytes": 101_440_000_000},
            "ok",
            "41.0 of 101.4 GB",
        ),
        (
            {"ActiveState": "failed", "Result": "exit-code"},
            {"error": "the disk is full"},
            "fault",
            "the disk is full",
        ),
        (
            {"ActiveState": "failed", "Result": "exit-code"},
            {},
            "fault",
            "dsv4-fetch.service failed (exit-code)",
        ),
        # complete, by its own words, and tried again for ever: that is not at work
        (
            {"ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code"},
            {"state": "done", "done_bytes": 5, "total_bytes": 5, "error": None},
            "fault",
            "waits for its next try: dsv4-fetch.service failed (exit-code)",
        ),
    ],
)
def test_the_download_row(
    place: Place, unit: dict[str, str], progress: dict[str, Any], state: str, words: str
) -> None:
    """How far it is, or why it is not."""
    layout.FETCH_PROGRESS.write_text(json.dumps(progress))
    row = only(status.background(Staged(place, {layout.UNIT_FETCH: unit})))
    assert (row.check, row.state) == ("download", state)
    assert words in row.text


def test_what_differs_from_the_last_receipt_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ours it is a fault; a kernel that was upgraded is what to think of when something is."""
    monkeypatch.setattr("platform.release", lambda: "6.11.0-2")
    for name in ("SERVE_YAML", "ENVIRONMENT", "GUARD_JSON"):
        monkeypatch.setattr(layout, name, place.proc / getattr(layout, name).name)
    receipt: dict[str, Any] = {"revision": "ab" * 20, "kernel": "6.11.0-1"}

    def row() -> Finding:
        picture = Staged(place, units())
        picture.__dict__["deployed"] = ("0003-x-deploy.json", receipt)
        return only(status.since_receipt(picture))

    assert row().state == "ok"
    assert "kernel 6.11.0-1 -> 6.11.0-2" in row().text
    receipt["kernel"] = "6.11.0-2"
    assert row().text == "as in 0003-x-deploy.json (revision abababababab)"
    # A receipt that knows of no hash says nothing about the file
    layout.SERVE_YAML.write_text("port: 1\n")
    assert row().state == "ok"
    receipt["hashes"] = {"serve.yaml": "0" * 64}
    assert "serve.yaml 000000000000 -> " in row().text
    layout.CURRENT.symlink_to("runtimes/lab-0123456789ab")
    receipt["deployed"] = {"runtime": "lab-ba9876543210"}
    assert (row().state, row().verdict) == ("fault", "differs")
    assert "lab-ba9876543210 -> lab-0123456789ab" in row().text


def test_without_a_receipt_nothing_can_differ(place: Place) -> None:
    """A machine on which no deploy came to its end says so."""
    assert only(status.since_receipt(Staged(place, units()))).state != "fault"


def test_what_was_never_recorded_does_not_differ() -> None:
    """An older receipt knows less; that is no change."""
    pairs = {"a": (None, "1"), "b": ("1", "1"), "c": ("1", "2")}
    assert status.differing(pairs) == ["c 1 -> 2"]


def test_the_exit_status_is_that_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine, whatever it is: one JSON object, `ok` and status agree."""
    result = status.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (result == 0)
    assert {"check", "state", "verdict", "text", "line"} <= found["findings"][0].keys()
    status.main([])
    assert len(capsys.readouterr().out.splitlines()) >= len(found["findings"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be")
def test_what_others_may_not_see_is_said(place: Place) -> None:
    """Without root: the key's and the settings' fingerprints are left out, and that is said."""
    layout.STARTED_JSON.write_text(json.dumps({"inputs": {"unit": "x"}}))
    picture = Staged(Place(False, *list(vars(place).values())[1:]), units())
    row = only(status.started_from(picture))
    assert row.verdict in {"needed", "ok"}
    assert "api_key" not in row.figures["differs"]
