"""Wait until the engine has produced one real token, and say meanwhile how far the load is.

`/health` answers 200 while nothing is generated, so ready means: the right model's name, and text
from it. Runs after the start as the unit's ExecStartPost, as root, so that only root writes the
phase and the engine cannot claim one. `systemctl start` returns when this does, with its verdict.
"""

import argparse
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    cgroup,
    disk,
    engine_api,
    faults,
    fingerprint,
    guard,
    launch,
    layout,
    loads,
    memory,
    phase,
    processes,
    systemd,
    weights,
)
from dsv4.notify import notify

POLL_S: Final = 0.5
LOOK_EVERY_S: Final = 1.0
TELL_EVERY_S: Final = 30.0
CORE_GONE_S: Final = 3.0
QUIET_S: Final = 10.0
TRIES: Final = 3
NUDGE_S: Final = 2.0
NUDGES: Final = 10
SHOWN_RATE: Final = 0.005
GIB: Final = 1 << 30
JOURNAL_LINES: Final = 400
SHOWN: Final = 240


class NotReady(Exception):
    """The engine will not serve; the text says why.

    + retries: how many automatic starts may follow one that ended like this; None for as many as
      after any other failure
    """

    def __init__(self, text: str, retries: int | None = None) -> None:
        super().__init__(text)
        self.retries = retries


# What the engine's own log means

RETRIES: Final = {
    "memory moved while it profiled": 1,
    "driver's memory query failed": 1,
    "refused memory": 1,
    "no room for the KV cache": 0,
}
"""By the names in `faults`: what passes is tried once more, what stays the same is not, and neither
is tried again and again, each time after a load of minutes."""

ERROR_LINE: Final = re.compile(r"\b(\w+(?:Error|Exception)\b.*)")
SAYS_NOTHING: Final = "See root cause above"
REFUSAL: Final = re.compile(
    r"\((?P<have>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired GPU memory"
    r" utilization \((?P<share>[\d.]+), (?P<want>[\d.]+) GiB\)"
)


@dataclass(frozen=True)
class Cause:
    """What a log says about an engine's end; `name` is the fault's, empty for one unknown."""

    text: str
    name: str = ""

    @property
    def retries(self) -> int | None:
        """Return how many automatic starts may follow; None for the usual number."""
        return RETRIES.get(self.name)


def classify(log: str) -> Cause | None:
    """Return what an engine's log says about its end, None when it says nothing.

    The first line that explains it; what comes after is mostly its echo.
    """
    for line in log.splitlines():
        fault = faults.judge(line)
        found = fault and fault.kind == "cause" and fault.pattern.search(line)
        if fault and found:
            said = line[found.start() :].strip()[:SHOWN]
            return Cause(f"{fault.name}: {said}; {share_hint(line) or fault.remedy}", fault.name)
    errors = [line for line in ERROR_LINE.findall(log) if SAYS_NOTHING not in line]
    return Cause(str(errors[-1]).strip()[:SHOWN]) if errors else None


def share_hint(line: str) -> str:
    """Return what to set after the engine's own check of free memory has refused, in figures."""
    found = REFUSAL.search(line)
    if found is None:
        return ""
    have, total, want = (float(found[name]) for name in ("have", "total", "want"))
    return (
        f"wanted {want:.1f} GiB, have {have:.1f}: free {max(0.0, want - have):.1f} GiB more, or set"
        f" serve_gpu_memory_utilization to {memory.startable_utilisation(total, have, 0.0):.2f}"
    )


def journal(invocation: str) -> str:
    """Return the last lines this start has logged."""
    if not invocation:
        return ""
    query = [f"_SYSTEMD_INVOCATION_ID={invocation}", "-o", "cat", "--no-pager"]
    try:
        done = subprocess.run(
            ["journalctl", *query, "-n", str(JOURNAL_LINES)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


# Progress


@dataclass(frozen=True)
class Progress:
    """How far the load is: weight files seen mapped, bytes they have, bytes read from disk."""

    shard: int
    of: int
    gib: float
    rate: float
    mapped: int

    def words(self) -> str:
        """Return it for a status line."""
        rate = f", {self.rate:.2f} GiB/s from disk" if self.rate >= SHOWN_RATE else ""
        return f"{self.shard} of {self.of} weight files, {self.gib:.1f} GiB{rate}"


class Load:
    """Follows which weight files the engine has mapped and how much it reads."""

    def __init__(self, files: dict[str, int]) -> None:
        self.files = files
        self.seen: set[str] = set()
        self.read: dict[int, int] = {}
        self.read_before: tuple[float, int] | None = None
        self.began: float | None = None
        self.moved_at = time.monotonic()

    def look(self, pids: set[int], now: float) -> Progress:
        """Take one look.

        + pids: the engine's, and those that read on its behalf; what one of them has read still
          counts when it is gone
        """
        mapped = processes.mapping(set(self.files), pids=pids)
        new = set(mapped) - self.seen
        self.seen |= new
        for pid in pids:
            self.read[pid] = max(self.read.get(pid, 0), read_bytes(pid))
        read = sum(self.read.values())
        rate = 0.0
        if self.read_before is not None and now > self.read_before[0]:
            rate = max(0, read - self.read_before[1]) / GIB / (now - self.read_before[0])
        self.read_before = (now, read)
        if new or rate >= SHOWN_RATE:
            self.moved_at = now
        if new and self.began is None:
            self.began = now
        gib = sum(self.files[path] for path in self.seen) / GIB
        return Progress(len(self.seen), len(self.files), gib, rate, len(mapped))

    def note(self, ready_s: float, readahead: bool) -> None:
        """Note how long this start took, beside those before it.

        After a cold one the disk is asked what it gives: that says whether the load was slow
        because of it. The engine serves by then, and a second of reading past the page cache is
        nothing to it.
        """
        read_gib = (self.read_before[1] if self.read_before else 0) / GIB
        pack_gib = sum(self.files.values()) / GIB
        cold = loads.kind_of(read_gib, pack_gib) == "cold" and pack_gib >= loads.TELLING_GIB
        loads.note(
            ready_s=ready_s,
            weights_s=None if self.began is None else self.moved_at - self.began,
            read_gib=read_gib,
            pack_gib=pack_gib,
            disk_gib_s=disk.parallel_rate(self.files) if cold else None,
            readahead=readahead,
            runtime=fingerprint.target(layout.CURRENT),
            view=fingerprint.target(layout.VIEW_CURRENT),
        )


def phase_of(progress: Progress, quiet_s: float) -> str:
    """Return where a start is: nothing mapped yet, weights on their way, or all of them read.

    The engine may keep a file mapped after it was read, so a quiet while with all files seen counts
    as read, as does a quiet while with none mapped (small files come and go between two looks).
    """
    if progress.shard == 0:
        return "starting"
    done = progress.shard == progress.of and (progress.mapped == 0 or quiet_s >= QUIET_S)
    return "profiling" if done or (progress.mapped == 0 and quiet_s >= QUIET_S) else "loading"


def read_bytes(pid: int) -> int:
    """Return how much a process has had read from disk."""
    try:
        text = (processes.PROC / str(pid) / "io").read_text()
        return int(dict(line.split(": ") for line in text.splitlines())["read_bytes"])
    except (OSError, ValueError, KeyError):
        return 0


# Life signs


class Life:
    """Whether the engine's processes are still there: the server, and the workers it started."""

    helper_unit = ""

    def __init__(self, main_pid: int, unit: str, helper_unit: str = "") -> None:
        self.main_pid = main_pid
        self.unit = unit
        self.helper_unit = helper_unit
        self.handle: int | None = None
        self.cores: set[int] = set()
        self.core_gone_at: float | None = None
        try:
            self.handle = os.pidfd_open(main_pid)
        except OSError:
            self.handle = None

    def pids(self) -> set[int]:
        """Return the unit's processes, this one aside."""
        return cgroup.pids(cgroup.directories(self.unit)) - {os.getpid()}

    def helpers(self) -> set[int]:
        """Return who reads ahead of the engine."""
        return cgroup.pids(cgroup.directories(self.helper_unit)) if self.helper_unit else set()

    def fault(self, now: float) -> str | None:
        """Return which process is gone. A server is given a moment to end after its worker."""
        if self.handle is None or select.select([self.handle], [], [], 0)[0]:
            return f"the engine ended (pid {self.main_pid})"
        found = {pid for pid in self.pids() if is_core(pid)}
        self.cores |= found
        if not self.cores or found:
            self.core_gone_at = None
            return None
        self.core_gone_at = self.core_gone_at or now
        if now - self.core_gone_at < CORE_GONE_S:
            return None
        return f"the engine's worker ended (pid {', '.join(map(str, sorted(self.cores)))})"


def is_core(pid: int) -> bool:
    """Say whether a process is one of vLLM's workers."""
    try:
        return (processes.PROC / str(pid) / "comm").read_text().startswith(processes.ENGINE_PREFIX)
    except OSError:
        return False


# The question


class Asking:
    """Puts the question until it is answered, and gives up on what waiting cannot change."""

    def __init__(self, config: guard.Guard, client: engine_api.Client) -> None:
        self.config = config
        self.client = client
        self.tries = 0
        self.known_model = False
        self.running: threading.Thread | None = None
        self.outcome: engine_api.Answer | NotReady | None = None

    def poll(self) -> engine_api.Answer | None:
        """Look after an attempt that runs beside us, and start one when none does.

        A request can hang for minutes while the engine compiles or dies, and neither progress nor a
        death must wait for it.
        """
        if self.running is not None and self.running.is_alive():
            return None
        if isinstance(self.outcome, NotReady):
            raise self.outcome
        if self.outcome is None:
            self.running = threading.Thread(target=self.run, daemon=True)
            self.running.start()
            self.running.join(POLL_S)
        return self.outcome if isinstance(self.outcome, engine_api.Answer) else None

    def run(self) -> None:
        """Make one attempt and leave what came of it."""
        try:
            self.outcome = self.attempt()
        except NotReady as error:
            self.outcome = error

    def attempt(self) -> engine_api.Answer | None:
        """Return an answer, None while there is none yet; raise `NotReady` when there will be none.

        + the server does not listen yet, or is slow to list its models: wait
        + another model's name, a key it does not take: final
        + an error, no answer in time, or an empty one: final when it happens again and again
        """
        expected = self.config.served_name
        try:
            if not self.known_model:
                names = self.client.models()
                if expected and expected not in names:
                    raise NotReady(
                        f"wrong model: it serves {', '.join(names) or 'none'}, not {expected};"
                        " another service may be listening on our port",
                        retries=0,
                    )
                self.known_model = True
                expected = expected or (names[0] if names else "")
            answer = self.client.complete(
                expected, self.config.ready.prompt, self.config.ready.max_tokens
            )
        except engine_api.ApiError as error:
            self.judge(error)
            return None
        if answer.produced:
            return answer
        self.count(f"empty answer to {self.config.ready.prompt!r}: no text and no reasoning in it")
        return None

    def judge(self, error: engine_api.ApiError) -> None:
        """Decide whether an error is final."""
        if error.kind == engine_api.AUTH:
            raise NotReady(f"{error}; deploy again, then restart the service", retries=0)
        if error.kind == engine_api.DOWN or (error.kind != engine_api.HTTP and self.starting()):
            return
        self.count(str(error))

    def starting(self) -> bool:
        """Say whether the server has not even listed its models so far."""
        return not self.known_model

    def count(self, text: str) -> None:
        """Count a failed try; the last one is final."""
        self.tries += 1
        if self.tries >= TRIES:
            raise NotReady(f"{text} ({self.tries} tries)")


def tell(name: str, progress: Progress, waited: float) -> None:
    """Say where the start is, to systemd and to whoever reads the phase."""
    notify(f"STATUS={name} for {waited:.0f} s: {progress.words()}")
    detail = {
        "shard": progress.shard,
        "of": progress.of,
        "GiB": round(progress.gib, 2),
        "rate": round(progress.rate, 3),
    }
    phase.write(name, detail)


def wait(
    config: guard.Guard,
    asking: Asking,
    life: Life,
    load: Load,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[engine_api.Answer, float]:
    """Return the first answer and how long it took; raise `NotReady` when there will be none."""
    started = clock()
    looked = told = float("-inf")
    name, progress = "starting", Progress(0, len(load.files), 0.0, 0.0, 0)
    while True:
        now = clock()
        if fault := life.fault(now):
            raise NotReady(f"crash: {fault} while {name} after {now - started:.0f} s")
        if now - looked >= LOOK_EVERY_S:
            looked = now
            progress = load.look(life.pids() | life.helpers(), now)
            name = phase_of(progress, now - load.moved_at)
            tell(name, progress, now - started)
        if now - told >= TELL_EVERY_S:
            told = now
            sys.stderr.write(f"dsv4 ready: {name}: {progress.words()}, {now - started:.0f} s\n")
        answer = asking.poll()
        if answer is not None:
            return answer, clock() - started
        if clock() - started >= config.ready.timeout_s:
            raise NotReady(
                f"timeout: no token after {config.ready.timeout_s:.0f} s, still {name}"
                f" ({progress.words()}); raise service_start_timeout_s if the load was still moving"
            )
        sleep(POLL_S)


def end_engine(pid: int, every_s: float = NUDGE_S, tries: int = NUDGES) -> None:
    """Help along the end of an engine that is stopped while it loads.

    vLLM's server (0.30.0) that gets systemd's signal in that time ends its engine, then waits for
    it for ever: a stop took the unit's whole stop time and left it failed (63 s here, at most 5 s
    with this). A second signal ends it, with a status that counts as clean.
    """
    phase.write("stopping")
    with contextlib.suppress(OSError):
        engine = os.pidfd_open(pid)
        for _ in range(tries):
            if select.select([engine], [], [], every_s)[0]:
                return
            signal.pidfd_send_signal(engine, signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Wait for the first token: 0 when it came, 1 when it will not."""
    parser = argparse.ArgumentParser(prog="dsv4 ready", description=__doc__)
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    parser.add_argument("--pid", type=int, default=int(os.environ.get("MAINPID", "0") or 0))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"ok": False}
    if launch.refused():
        return 1
    try:
        config = guard.read(options.guard)
        if not systemd.as_hook(config.unit, lambda: end_engine(options.pid)):
            return 0
        limit = config.ready.request_timeout_s
        client = engine_api.Client(config.url, engine_api.find_key(), limit)
        helper = config.readahead_unit if config.readahead.enabled else ""
        life = Life(options.pid, config.unit, helper)
        load = Load(weights.weight_files(Path(config.view)))
        answer, seconds = wait(config, Asking(config, client), life, load)
        said = (answer.text or answer.reasoning).strip()[:60]
        text = f"ready after {seconds:.1f} s: {config.served_name} says {said!r}"
        phase.write("ready", {"seconds": round(seconds, 1), "answer": said})
        notify(f"STATUS={text}")
        load.note(seconds, config.readahead.enabled)
        result |= {"ok": True, "seconds": seconds, "answer": said}
        status = 0
    except guard.BrokenGuard as error:
        text, status = str(error), 3
    except NotReady as error:
        text, status, retries = str(error), 1, error.retries
        if text.startswith("crash") and (cause := classify(journal_of_this_start())):
            text, retries = f"{text}: {cause.text}", cause.retries
        phase.write("failed", phase.failure(text, retries))
        notify(f"STATUS=failed: {text}")
        result["reason"] = text
    sys.stderr.write(f"dsv4 ready: {text}\n")
    if options.json:
        print(json.dumps(result))
    return status


def journal_of_this_start() -> str:
    """Return what the engine has logged, once the journal has had a moment to take it."""
    time.sleep(0.5)
    return journal(os.environ.get("INVOCATION_ID", ""))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
