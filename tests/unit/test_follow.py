"""Following a unit: what is made of its state, and what an owner reads meanwhile."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.command import StringCommand
from pyinfra.connectors.util import CommandOutput, OutputLine

from deploy import follow, layout, pins
from tests.fixtures.harness import on_host

REVISION = "0123456789abcdef0123456789abcdef01234567"
SEEN = follow.Seen("packs", "mixedk", "revision", "[0-9a-f]{40}")

SERVICE = {"oneshot": False}
ONESHOT = {"oneshot": True}

VERDICTS: list[tuple[dict[str, str], dict[str, bool], str]] = [
    ({"active": "activating"}, SERVICE, "going"),
    ({"active": "active"}, SERVICE, "done"),
    ({"active": "reloading"}, SERVICE, "going"),
    ({"active": "deactivating"}, SERVICE, "going"),
    ({"active": "failed"}, SERVICE, "failed"),
    ({"active": "inactive", "result": "success"}, SERVICE, "failed"),
    ({}, SERVICE, "failed"),
    # what a queued job will do is not done yet
    ({"active": "active", "job": "117"}, SERVICE, "going"),
    ({"active": "failed", "job": "117"}, SERVICE, "going"),
    ({"active": "inactive", "job": "0", "result": "success"}, ONESHOT, "done"),
    # systemd's own restart means that it failed once
    ({"active": "activating", "restarts": "3"}, SERVICE, "failed"),
    ({"active": "active", "restarts": "3"}, SERVICE, "failed"),
    ({"active": "activating", "restarts": "2"}, SERVICE, "going"),
    ({"active": "activating", "restarts": ""}, SERVICE, "going"),
    # work that ends
    ({"active": "activating"}, ONESHOT, "going"),
    ({"active": "active"}, ONESHOT, "going"),
    ({"active": "inactive", "result": "success"}, ONESHOT, "done"),
    ({"active": "inactive", "result": "exit-code"}, ONESHOT, "failed"),
    ({"active": "failed", "result": "timeout"}, ONESHOT, "failed"),
]


@pytest.mark.parametrize(("unit", "kind", "verdict"), VERDICTS)
def test_verdicts(unit: dict[str, str], kind: dict[str, bool], verdict: str) -> None:
    """With two automatic restarts before the watching began."""
    assert follow.judge(unit, 2, **kind) == verdict


def test_lines_of_progress() -> None:
    """What moved, in units that people compare; nothing known is "starting"."""
    fetch = {"done_bytes": 12_300_000_000, "total_bytes": 101_440_000_000}
    assert follow.fetch_line({"fetch": fetch}) == "12.3 GB of 101.4 GB"
    moving = {**fetch, "rate": 98_000_000.0, "eta_s": 909.0}
    assert follow.fetch_line({"fetch": moving}) == "12.3 GB of 101.4 GB, 98.0 MB/s, 15 min left"
    assert follow.fetch_line({}) == "the download is starting"
    early = {**fetch, "doing": "small files and headers", "transport": "http"}
    assert follow.fetch_line({"fetch": early}) == ("12.3 GB of 101.4 GB (small files and headers)")
    other = {**moving, "doing": "files", "transport": "xet"}
    assert follow.fetch_line({"fetch": other}).endswith("15 min left, by xet")
    waits = {**moving, "trouble": "https://hub: too many requests"}
    assert follow.fetch_line({"fetch": waits}) == (
        "the download waits: https://hub: too many requests"
    )
    assert follow.build_line({"build": {"step": "import it"}}) == "import it"
    assert follow.build_line({}) == "the build is starting"
    unit = {"active": "activating", "sub": "start-post", "status_text": ""}
    assert follow.service_line({"units": {"dsv4.service": unit}}) == "activating (start-post)"
    unit["status_text"] = "loading shard 3 of 48"
    assert follow.service_line({"units": {"dsv4.service": unit}}) == "loading shard 3 of 48"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.6, "60 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min")],
)
def test_durations(seconds: float, words: str) -> None:
    """Seconds while they are few."""
    assert follow.duration(seconds) == words


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This machine as the target: its state tool plays one answer after the other."""
    monkeypatch.setattr(layout, "DSV4", tmp_path / "dsv4")
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    monkeypatch.setattr(follow, "SAY_EVERY_S", 0.0)
    (tmp_path / "journalctl").write_text('#!/bin/sh\necho "journal of $2: RuntimeError"\n')
    (tmp_path / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def play(*answers: object) -> None:
        for number, answer in enumerate(answers):
            text = answer if isinstance(answer, str) else json.dumps(answer)
            (tmp_path / f"answer-{number}").write_text(text + "\n")
        (tmp_path / "dsv4").write_text(
            f"#!/bin/sh\ncd {tmp_path}\nn=$(cat n 2>/dev/null || echo 0)\necho $((n + 1)) >n\n"
            f'[ -e "answer-$n" ] || n={len(answers) - 1}\ncat "answer-$n"\n'
        )
        (tmp_path / "dsv4").chmod(0o755)

    return play


def service(active: str, **more: str) -> dict[str, Any]:
    """Return progress with the service in a state."""
    return {"units": {"dsv4.service": {"active": active, "sub": "x", **more}}}


def run(command: Any) -> bool:
    """Carry out a command as pyinfra does."""
    with on_host("@local", executing=True) as host:
        return bool(command.execute(host.state, host, {}))


def unit(name: str = layout.UNIT, patience_s: float | None = 5) -> follow.Unit:
    """Return the command that follows a unit."""
    line = follow.service_line if name == layout.UNIT else follow.fetch_line
    return follow.Unit(name, line, patience_s)


def test_a_start_is_followed_to_its_end(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Progress is told when it changes, once."""
    caplog.set_level(logging.INFO, "pyinfra")
    loading = service("activating", status_text="loading shard 3 of 48")
    target(service("inactive", job="7"), loading, loading, service("active"))
    assert run(unit())
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if line.endswith("loading shard 3 of 48")]) == 1


def begun(active: str, doing: str | None) -> dict[str, Any]:
    """Return progress with a download at this point."""
    fetch = {"doing": doing, "error": "terms not accepted"}
    return {"units": {"dsv4-fetch.service": {"active": active, "sub": "x"}}, "fetch": fetch}


def past_its_checks(patience_s: float = 5) -> follow.Unit:
    """Return the command that follows a download until its checks are over."""
    return follow.Unit(
        layout.UNIT_FETCH,
        follow.fetch_line,
        patience_s,
        retries=True,
        enough=lambda progress: follow.at(progress, "fetch", "doing") == "files",
    )


def test_a_download_is_followed_until_its_checks_are_over(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What is refused there is refused now; the rest goes on by itself."""
    target(begun("activating", "asking the hub"), begun("activating", "files"))
    assert run(past_its_checks())
    target(begun("activating", "asking the hub"))
    assert run(past_its_checks(0.1))
    assert not caplog.text
    target(begun("failed", None))
    assert not run(past_its_checks())
    assert "terms not accepted" in caplog.text


def test_a_failed_start_says_why(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The recorded reason, then the end of the journal."""
    caplog.set_level(logging.INFO, "pyinfra")
    reason = "wanted 107.1 GiB free, have 90.2"
    failed = {**service("failed"), "phase": {"phase": "failed", "detail": {"reason": reason}}}
    target(service("activating"), failed)
    assert not run(unit())
    assert f"dsv4.service: {reason} (journalctl -u dsv4.service)" in caplog.text
    assert "journal of dsv4.service: RuntimeError" in caplog.text


def test_a_crash_loop_is_not_waited_out(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    """systemd tries again by itself; whoever watches wants to know at once."""
    target(service("activating", restarts="0"), service("activating", restarts="1"))
    assert not run(unit())
    assert "it ended before it was ready" in caplog.text


def test_a_count_that_a_start_set_back_is_followed(target: Any) -> None:
    """What is seen before the queued job is the count of earlier days."""
    before = service("failed", job="7", restarts="3")
    target(before, service("activating", restarts="0"), service("activating", restarts="1"))
    assert not run(unit())


def test_patience_ends_and_the_work_goes_on(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The line says where it is and how to watch it."""
    target(service("activating", status_text="loading shard 3 of 48"))
    assert not run(unit(patience_s=0.05))
    assert "not ready after" in caplog.text
    assert "loading shard 3 of 48; it goes on: journalctl -fu dsv4.service" in caplog.text


def test_a_failed_download_quotes_its_error(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What the fetcher recorded is the reason."""
    state = {"active": "failed", "result": "exit-code"}
    error = "accept the terms of the pack on its page, then run the deploy again"
    target({"units": {"dsv4-fetch.service": state}, "fetch": {"error": error}})
    assert not run(unit(layout.UNIT_FETCH))
    assert error in caplog.text


@pytest.mark.parametrize("phase", [{}, None, {"detail": None}, {"detail": {}}])
def test_a_failure_without_a_reason_is_told(
    target: Any, caplog: pytest.LogCaptureFixture, phase: object
) -> None:
    """State files may hold anything."""
    target({**service("failed"), "phase": phase, "fetch": None, "build": None})
    assert not run(unit())
    assert "it ended before it was ready" in caplog.text


class Line:
    """A connection that breaks a number of times; the answers are real output objects."""

    def __init__(self, breaks: int) -> None:
        self.breaks, self.connected, self.asked = breaks, 0, 0
        self.print_prefix, self.name = "[spark] ", "spark"

    def run_shell_command(self, command: StringCommand, **_: Any) -> tuple[bool, CommandOutput]:
        self.asked += 1
        if self.asked <= self.breaks:
            raise OSError("Socket is closed")
        return True, CommandOutput([OutputLine("stdout", command.get_raw_value())])

    def disconnect(self) -> None:
        self.connected -= 1

    def connect(self, **_: Any) -> None:
        self.connected += 1
        if self.asked == 1:
            raise ConnectionRefusedError("the machine reboots")


def test_a_broken_line_is_opened_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the first new connection fails."""
    monkeypatch.setattr(follow, "RECONNECT_AFTER_S", 0.0)
    line: Any = Line(breaks=3)
    assert follow.ask(line, "dsv4 state", {}) == (True, ["dsv4 state"])
    assert line.asked == 4
    assert caplog.text.count("connection lost (Socket is closed); trying again") == 3


def test_a_line_that_stays_broken_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After five minutes of trying."""
    assert follow.RECONNECTS * follow.RECONNECT_AFTER_S >= 300
    monkeypatch.setattr(follow, "RECONNECT_AFTER_S", 0.0)
    line: Any = Line(breaks=10**6)
    with pytest.raises(OSError, match=r"no connection to .*run the deploy again"):
        follow.ask(line, "dsv4 state", {})
    assert line.asked == follow.RECONNECTS


def test_a_moment_without_an_answer_is_no_verdict(target: Any) -> None:
    """One poll that brought nothing does not make a running unit a failed one."""
    target(service("activating"), "Segmentation fault", service("active"))
    assert run(unit())


def test_a_target_that_never_answers_is_not_waited_for(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A state tool that is broken shows soon."""
    began = time.monotonic()
    target("Traceback")
    assert not run(unit(patience_s=60))
    assert time.monotonic() - began < 30
    assert "dsv4.service: the tools there do not answer" in caplog.text


def test_the_revision_is_asked_and_pinned(
    tmp_path: Path, target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The pin is written here, where it is committed."""
    caplog.set_level(logging.INFO, "pyinfra")
    target({"ok": True, "revision": REVISION})
    assert run(follow.Pin(SEEN, ["fetch", "--resolve", "me/x"], tmp_path / "pins"))
    assert pins.read("@local", tmp_path / "pins").revision("mixedk") == REVISION
    assert "commit it" in caplog.text


@pytest.mark.parametrize(
    "answer", ["", "{}", "[]", "no such repository", '{"revision": ""}', '{"revision": "main"}']
)
def test_no_commit_is_no_pin(
    tmp_path: Path,
    target: Any,
    caplog: pytest.LogCaptureFixture,
    answer: str,
) -> None:
    """The host fails with what the tool said, and nothing is written."""
    target(answer)
    assert not run(follow.Pin(SEEN, ["fetch"], tmp_path / "pins"))
    assert "mixedk: " in caplog.text
    assert not (tmp_path / "pins").exists()
