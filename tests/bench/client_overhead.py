"""What our client shows beside vLLM's own, for the same requests to the same server, as JSON.

    PYTHONPATH=.:files/opt/dsv4/lib .venv/bin/python -m tests.bench.client_overhead

Two servers: one here that sends a token every `--token-ms` and so has a known rate, and the engine
of a deployed lab machine. Both clients run on that machine, in turns, one stream. A third figure is
vLLM's own result with and without the looks at memory and /metrics that a bench takes meanwhile.
Asserts nothing.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench import report
from tests.lab import machines, state
from tests.unit import liar

ON_TARGET = Path(__file__).with_name("client_on_target.py")


def on_target(machine: str, *argv: str) -> dict[str, Any]:
    """Run the other half of this bench on the machine and return what it measured."""
    command = shlex.join(
        ["sudo", "env", "PYTHONPATH=/opt/dsv4/lib", "/opt/dsv4/tools/bin/python", "-", *argv]
    )
    done = subprocess.run(
        [*machines.ssh_argv(machine), command],
        input=ON_TARGET.read_text(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def beside(runs: list[dict[str, Any]], one: str, other: str) -> dict[str, Any]:
    """Return how far one client's figures are from the other's, per cent, run by run."""
    found = {}
    for name in ("ttft_ms", "tpot_ms", "tokens_per_s"):
        off = [100 * (run[one][name] / run[other][name] - 1) for run in runs]
        found[name] = {
            one: report.spread([run[one][name] for run in runs], 4),
            other: report.spread([run[other][name] for run in runs], 4),
            "off_percent": report.spread(off, 4),
        }
    return found


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="dsv4-lab")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--token-ms", type=float, default=20.0)
    options = parser.parse_args(argv)
    work = ["--requests", str(options.requests), "--tokens", str(options.tokens)]

    def measured(url: str, model: str) -> list[dict[str, Any]]:
        return [on_target(options.machine, url, model, *work) for _ in range(options.runs)]

    port = state.read().machines[options.machine].serve_port
    with liar.engine(token_s=options.token_ms / 1000) as paced:
        known = measured(paced.url, liar.MODEL)
    real = measured(f"http://127.0.0.1:{port}", "lab-tiny")

    def ratios(runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "ours_beside_vllm": beside(runs, "ours", "vllm"),
            "vllm_watched_beside_alone": beside(runs, "watched", "vllm"),
        }

    return report.show(
        {
            "paced": {"token_ms": options.token_ms, **ratios(known)},
            "engine": ratios(real),
            "work": {"requests": options.requests, "tokens": options.tokens, "runs": options.runs},
        }
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
