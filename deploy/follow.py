"""Follow hours-long work on the target by short commands, so that a dropped line stops nothing.

The work itself is a systemd unit there. Here it is only watched: a poll every second, a line
of progress when something moved, a new connection when the old one broke, and at the end one
sentence about what came out.
"""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from paramiko import SSHException
from pyinfra import logger
from pyinfra.api import HiddenValue
from pyinfra.api.command import PyinfraCommand, StringCommand

from deploy import facts, layout, pins
from dsv4 import store

if TYPE_CHECKING:
    from pyinfra.api.arguments import ConnectorArguments
    from pyinfra.api.host import Host
    from pyinfra.api.state import State as Pyinfra

POLL_S: Final = 1.0
SAY_EVERY_S: Final = 10.0
SILENT_POLLS: Final = 15
"""Answers without the unit in a row after which the target's tools count as broken."""
RECONNECTS: Final = 30
RECONNECT_AFTER_S: Final = 10.0

REASONS: Final = {
    layout.UNIT: ("phase", "detail", "reason"),
    layout.UNIT_FETCH: ("fetch", "error"),
    layout.UNIT_BUILD: ("build", "error"),
    layout.UNIT_BENCH: ("bench", "error"),
}
"""Where in the progress each unit leaves why it failed."""

Verdict = Literal["going", "done", "failed"]
Line = Callable[[Mapping[str, Any]], str]


def at(value: object, *keys: str) -> Any:
    """Return what lies under these keys, None where the target's record has another shape."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def gigabytes(count: float) -> str:
    """Return a number of bytes as people compare them with a disk's label."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Return a time to wait in words."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def fetch_line(progress: Mapping[str, Any]) -> str:
    """Return where the download is."""
    fetch = progress.get("fetch", {})
    if fetch.get("trouble"):
        return f"the download waits: {fetch['trouble']}"
    if not fetch.get("total_bytes"):
        return "the download is starting"
    text = f"{gigabytes(fetch.get('done_bytes', 0))} of {gigabytes(fetch['total_bytes'])}"
    if fetch.get("rate"):
        text += f", {gigabytes(fetch['rate'])}/s"
    if fetch.get("eta_s"):
        text += f", {duration(fetch['eta_s'])} left"
    if fetch.get("transport") not in {None, "http"}:
        text += f", by {fetch['transport']}"
    if fetch.get("doing") not in {None, "files"}:
        text += f" ({fetch['doing']})"
    return text


def build_line(progress: Mapping[str, Any]) -> str:
    """Return where the build is."""
    return str(progress.get("build", {}).get("step") or "the build is starting")


def bench_line(progress: Mapping[str, Any]) -> str:
    """Return where the bench is."""
    return str(at(progress, "bench", "step") or "the bench is starting")


def service_line(progress: Mapping[str, Any]) -> str:
    """Return where the start is: what the unit says of itself."""
    unit = progress.get("units", {}).get(layout.UNIT, {})
    if unit.get("job", "0") not in {"", "0"} and unit.get("active") != "activating":
        return "the start is queued"  # what the unit says is still of the start before
    return unit.get("status_text") or f"{unit.get('active')} ({unit.get('sub')})"


def judge(
    unit: Mapping[str, str], restarts: int, *, oneshot: bool, retries: bool = False
) -> Verdict:
    """Return whether a unit is at work, has done what it was started for, or has failed.

    A queued job means that what is seen is the unit before the job. A unit that systemd restarts
    by itself has failed at least once, which whoever is watching wants to know at once, unless
    trying again is how it works (`retries`).
    """
    active = unit.get("active")
    if retries and unit.get("sub") == "auto-restart":
        return "going"
    restarted = int(unit.get("restarts") or 0) > restarts or unit.get("sub") == "auto-restart"
    if restarted and not retries:
        return "failed"
    if unit.get("job", "0") not in {"", "0"}:
        return "going"
    if active in {"failed", None}:
        return "failed"
    if active == "active":
        return "done" if not oneshot else "going"
    if active == "inactive":
        return "done" if oneshot and unit.get("result") == "success" else "failed"
    return "going"


def ask(host: "Host", words: str, arguments: "ConnectorArguments") -> tuple[bool, list[str]]:
    """Run one short command, on a new connection when the old one broke.

    Raises OSError, which pyinfra takes as this host's failure and not as the whole run's, when the
    line stays down.
    """
    for _ in range(RECONNECTS):
        try:
            status, output = host.run_shell_command(StringCommand(words), **arguments)
            return status, output.stdout_lines or output.stderr_lines
        except (OSError, EOFError, SSHException, AttributeError) as error:
            # AttributeError: what pyinfra's client raises after a connect that failed
            logger.warning(f"{host.print_prefix}connection lost ({error}); trying again")
            reconnect(host)
    raise OSError(f"no connection to {host.name} after {RECONNECTS} tries; run the deploy again")


def reconnect(host: "Host") -> None:
    """Open the connection again, after a pause; a failure shows in the next command.

    The deploy lock goes with the connection that took it, so it is to be taken again.
    """
    time.sleep(RECONNECT_AFTER_S)
    try:
        host.disconnect()
        host.connect(show_errors=False, raise_exceptions=True)
    except Exception as error:
        logger.debug("reconnecting to %s: %s", host.name, error)
    facts.unlock(host)


class Unit(PyinfraCommand):
    """Wait for a unit on the target and show how far it is."""

    def __init__(
        self,
        unit: str,
        line: Line,
        patience_s: float | None = None,
        *,
        retries: bool = False,
        enough: Callable[[Mapping[str, Any]], bool] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        """Follow `unit`, described by `line`, for at most `patience_s` seconds.

        With `enough`, what is waited for is that alone, and waiting in vain is no failure. `poll_s`
        is for work that looking at it would disturb.
        """
        super().__init__()
        self.enough = enough
        self.unit, self.line, self.patience_s, self.retries = unit, line, patience_s, retries
        self.poll_s = poll_s

    def __repr__(self) -> str:
        """Return what is shown in debug output."""
        return f"Unit({self.unit})"

    def execute(
        self, state: "Pyinfra", host: "Host", connector_arguments: "ConnectorArguments"
    ) -> bool:
        """Return whether the unit came to a good end; say why when it did not."""
        began, said, last = time.monotonic(), 0.0, ""
        restarts = sys.maxsize
        silent = 0
        while True:
            progress = self.progress(host, connector_arguments)
            unit = at(progress, "units", self.unit)
            if not unit and silent < SILENT_POLLS:
                silent += 1
                time.sleep(POLL_S)
                continue
            silent, unit = 0, unit or {}
            # A start by hand sets the count back, so the lowest seen is what it began with
            restarts = min(restarts, int(unit.get("restarts") or 0))
            oneshot = self.unit != layout.UNIT
            verdict = judge(unit, restarts, oneshot=oneshot, retries=self.retries)
            if verdict == "done" or (self.enough and verdict == "going" and self.enough(progress)):
                return True
            if verdict == "failed":
                self.explain(host, connector_arguments, progress)
                return False
            waited = time.monotonic() - began
            if self.patience_s is not None and waited > self.patience_s:
                if self.enough:
                    return True
                logger.error(
                    f"{host.print_prefix}{self.unit}: not ready after {duration(waited)}:"
                    f" {self.line(progress)}; it goes on: journalctl -fu {self.unit}"
                )
                return False
            text = self.line(progress)
            if text != last and time.monotonic() - said > SAY_EVERY_S:
                logger.info(f"{host.print_prefix}{text}")
                said, last = time.monotonic(), text
            time.sleep(self.poll_s)

    def progress(self, host: "Host", arguments: "ConnectorArguments") -> Mapping[str, Any]:
        """Return the moving parts of the target's state."""
        _, lines = ask(host, f"{layout.DSV4} state --json --progress", arguments)
        try:
            found = json.loads(lines[-1])
        except (IndexError, ValueError):
            found = {}
        return found if isinstance(found, dict) else {}

    def explain(
        self, host: "Host", arguments: "ConnectorArguments", progress: Mapping[str, Any]
    ) -> None:
        """Print the reason, then the end of the unit's journal."""
        _, lines = ask(host, f"journalctl -u {self.unit} -n 15 -o cat --no-pager", arguments)
        reason = at(progress, *REASONS[self.unit]) or (
            "it ended before it was ready" if progress else "the tools there do not answer"
        )
        for line in lines:
            logger.info(f"{host.print_prefix}    {line}")
        logger.error(f"{host.print_prefix}{self.unit}: {reason} (journalctl -u {self.unit})")


@dataclass(frozen=True)
class Seen:
    """What is pinned the first time it is seen, and what it must look like."""

    kind: str
    """Which pins it is among: `packs` or `artefacts`."""
    name: str
    key: str
    """Where the tool's answer has it."""
    pattern: str


class Pin(PyinfraCommand):
    """Ask a tool on the target for what is to hold from now on, and pin its answer here.

    A pack's default branch is at some commit, a file has some hash: the first one seen is it.
    """

    def __init__(
        self, seen: Seen, words: Sequence[str], directory: Path, token: HiddenValue | None = None
    ) -> None:
        """Run the tool with these words, and keep its answer in `directory`."""
        super().__init__()
        self.seen, self.words, self.directory, self.token = seen, words, directory, token

    def __repr__(self) -> str:
        """Return what is shown in debug output."""
        return f"Pin({self.seen.name})"

    def execute(
        self, state: "Pyinfra", host: "Host", connector_arguments: "ConnectorArguments"
    ) -> bool:
        """Write the pin on this machine; false when the tool gave no answer."""
        command = f"{layout.DSV4} {shlex.join(self.words)} --json"
        if self.token is not None:
            command += " --token-file /dev/stdin"
            connector_arguments = {**connector_arguments, "_stdin": self.token.unmask()}
        status, lines = ask(host, command, connector_arguments)
        seen, found = self.seen, ""
        try:
            found = str(json.loads(lines[-1])[seen.key])
        except (IndexError, ValueError, KeyError, TypeError):
            status = False
        if not status or not re.fullmatch(seen.pattern, found):
            logger.error(f"{host.print_prefix}{seen.name}: {' '.join(lines) or 'no answer'}")
            return False
        try:
            path = pins.pin(host.name, seen.kind, seen.name, found, self.directory)
        except (OSError, store.BrokenState) as error:
            logger.error(f"{host.print_prefix}{seen.name}: {error}")
            return False
        logger.info(f"{host.print_prefix}{seen.name} pinned to {found} in {path}; commit it")
        facts.forget()
        return True
