"""What the live picture costs: `dsv4 status` on the machine and deploy/status.py, as JSON.

    PYTHONPATH=.:files/opt/dsv4/lib .venv/bin/python -m tests.bench.status

Needs a deployed lab machine (`bash tests/lab.sh up`). Asserts nothing; the aim is 2 s or less.
"""

import argparse
import os
import subprocess
import sys
import time

from tests.bench import report
from tests.bench.quiet_run import PYINFRA, REPO
from tests.lab import machines

TIMED = """
import subprocess, sys, time
for _ in range(int(sys.argv[1])):
    begun = time.monotonic()
    subprocess.run(["/opt/dsv4/bin/dsv4", *sys.argv[2:]], stdout=subprocess.DEVNULL)
    print(time.monotonic() - begun)
"""


def on_target(machine: str, runs: int, *words: str, root: bool) -> list[float]:
    """Return how long one of the tools takes on the machine, without the connection."""
    argv = [*(["sudo"] if root else []), "python3", "-", str(runs), *words]
    done = subprocess.run(
        [*machines.ssh_argv(machine), *argv],
        input=TIMED,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(line) for line in done.stdout.splitlines()]


def deploys(machine: str, runs: int) -> list[float]:
    """Return how long the deploy takes that shows the same."""
    times = []
    for _ in range(runs):
        begun = time.monotonic()
        subprocess.run(
            [str(PYINFRA), "-y", "inventories/lab.py", "deploy/status.py"],
            cwd=REPO,
            env=os.environ | {"DSV4_LAB_MACHINES": machine},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
        times.append(time.monotonic() - begun)
    return times


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="dsv4-lab")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args(argv)
    found = {
        "dsv4_status_s": report.spread(
            on_target(options.machine, options.runs, "status", root=False)
        ),
        "sudo_dsv4_status_s": report.spread(
            on_target(options.machine, options.runs, "status", root=True)
        ),
        "deploy_status_s": report.spread(deploys(options.machine, options.runs)),
    }
    return report.show(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
