"""Whether a serving engine still produces tokens, and the end of one that does not.

`/health` answers 200 while nothing is generated. So life is: the counters of the engine's steps and
tokens move, or a question of our own gets a real token. A busy engine is never asked and never
killed while its counters move, however long a prompt takes. One without a token for
`liveness.stall_s` is killed, which systemd counts as a failure and restarts, within the limits of
`launch check`: three times in two hours, then the unit stays failed and says why.

Runs beside the engine's unit when `service_liveness` is set, off by default.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dsv4 import cgroup, engine_api, guard, layout, phase, store, systemd
from dsv4.notify import notify

METRICS_TIMEOUT_S: Final = 10.0
STEPS: Final = (
    "vllm:iteration_tokens_total_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
"""Counters that move with every step of the engine, a piece of a long prompt included."""
WAITING: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
ROW: Final = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)

ALIVE: Final = "alive"
SILENT: Final = "silent"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True)
class Reading:
    """What the engine's own counters say: how far it is, and how many requests it has."""

    steps: tuple[float, ...]
    requests: float


def reading(metrics: str) -> Reading | None:
    """Return what a page of metrics says, summed over engines; None when it says nothing."""
    found: dict[str, float] = {}
    for name, value in ROW.findall(metrics):
        found[name] = found.get(name, 0.0) + float(value)
    if not any(name in found for name in STEPS):
        return None
    steps = tuple(found.get(name, 0.0) for name in STEPS)
    return Reading(steps, sum(found.get(name, 0.0) for name in WAITING))


class Pulse:
    """When the engine was last seen alive, decided from what a look brings."""

    def __init__(self, now: float) -> None:
        self.alive_at = now
        self.steps: tuple[float, ...] | None = None

    def look(self, now: float, found: Reading | None, ask: Callable[[], str]) -> str:
        """Return alive, silent, or unknown; `ask` puts the question, which takes its time."""
        moved = found is not None and self.steps is not None and found.steps != self.steps
        if found is not None:
            self.steps = found.steps
        if moved:
            verdict = ALIVE
        elif found is not None and found.requests > 0:
            verdict = SILENT  # one more request would only queue behind the others
        else:
            verdict = ask()
        if verdict != SILENT:
            self.alive_at = max(self.alive_at, now)
        return verdict

    def silent_for(self, now: float) -> float:
        """Return how long there has been no sign of life, s."""
        return max(0.0, now - self.alive_at)


def ask(client: engine_api.Client, config: guard.Guard) -> str:
    """Ask for a token; what is not the engine's fault is unknown, and counts for it."""
    try:
        answer = client.complete(config.served_name, config.ready.prompt, 1)
    except engine_api.ApiError as error:
        ours = error.kind == engine_api.AUTH or 400 <= error.status < 500
        return UNKNOWN if ours or error.status == 503 else SILENT
    return ALIVE if answer.produced else SILENT


def read_metrics(config: guard.Guard) -> Reading | None:
    """Return the engine's counters; None when they are not to be had."""
    client = engine_api.Client(config.url, engine_api.find_key(), METRICS_TIMEOUT_S)
    try:
        return reading(client.text("/metrics"))
    except engine_api.ApiError:
        return None


def end(config: guard.Guard, invocation: str, seconds: float) -> None:
    """Kill the engine's whole unit, its reason written first."""
    reason = (
        f"hung: no token for {seconds:.0f} s while it was serving; killed by the liveness probe"
    )
    sys.stderr.write(f"dsv4 liveness: {reason}\n")
    phase.write("failed", {"reason": reason}, invocation=invocation)
    struck = cgroup.kill(cgroup.directories(config.unit))
    sys.stderr.write(f"dsv4 liveness: killed {struck} processes of {config.unit}\n")


def serving(config: guard.Guard) -> str | None:
    """Return which start of the unit is serving now; None when none is."""
    state = systemd.show(config.unit, "ActiveState", "InvocationID")
    now = store.read_json_or(layout.PHASE_JSON, {})
    invocation = state.get("InvocationID", "")
    ready = now.get("phase") == "ready" and now.get("invocation") == invocation
    return invocation if state.get("ActiveState") == "active" and ready else None


def run(path: Path) -> None:
    """Look after the engine for as long as this unit runs."""
    pulse, of = Pulse(time.monotonic()), None
    while True:
        config = guard.read(path)
        invocation = serving(config)
        if invocation is None or invocation != of:
            pulse, of = Pulse(time.monotonic()), invocation
        if invocation is not None:
            wait = min(config.ready.request_timeout_s, config.liveness.stall_s)
            client = engine_api.Client(config.url, engine_api.find_key(), wait)
            found = read_metrics(config)
            verdict = pulse.look(time.monotonic(), found, partial(ask, client, config))
            silent = pulse.silent_for(time.monotonic())
            notify(f"STATUS={verdict}; last sign of life {silent:.0f} s ago")
            # What the question was asked of may have been stopped meanwhile
            if silent >= config.liveness.stall_s and serving(config) == invocation:
                end(config, invocation, silent)
        time.sleep(config.liveness.interval_s)


def main(argv: list[str]) -> int:
    """Run until stopped; 3 when what to go by cannot be read."""
    parser = argparse.ArgumentParser(prog="dsv4 liveness", description=__doc__)
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    options = parser.parse_args(argv)
    try:
        run(options.guard)
    except guard.BrokenGuard as error:
        sys.stderr.write(f"dsv4 liveness: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
