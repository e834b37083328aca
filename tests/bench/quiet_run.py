"""What a quiet run of deploy/full.py costs: wall time and remote commands, as JSON.

Needs a deployed lab machine (`bash tests/lab.sh up`). Asserts nothing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.bench import report

REPO = Path(__file__).resolve().parents[2]
PYINFRA = REPO / ".venv/bin/pyinfra"


def run(machine: str, *extra: str) -> tuple[float, str]:
    """Return wall time and output of one run."""
    begun = time.monotonic()
    done = subprocess.run(
        [str(PYINFRA), "-y", *extra, "inventories/lab.py", "deploy/full.py"],
        cwd=REPO,
        env=os.environ | {"DSV4_LAB_MACHINES": machine},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return time.monotonic() - begun, done.stdout + done.stderr


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="dsv4-lab")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(argv)
    run(options.machine)  # whatever is still due is done now
    _, debug = run(options.machine, "--debug")
    times, changes = [], []
    for _ in range(options.runs):
        seconds, output = run(options.machine, "--json")
        times.append(seconds)
        changes.append(json.loads(output[output.index("{") : output.rindex("}") + 1]))
    totals = [change["results"]["totals"] for change in changes]
    return report.show(
        {
            "wall_s": report.spread(times),
            "remote_commands": len(re.findall(r"Running command on", debug)),
            "operations": totals[0]["hosts"],
            "changes": [total["success"] for total in totals],
        }
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
