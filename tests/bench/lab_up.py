"""How long `tests/lab.sh up` takes from nothing, and with warm caches, as JSON.

Uses directories of its own, so that a lab that is there is left alone. Asserts nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench import report

REPO = Path(__file__).resolve().parents[2]


def lab(command: str, environment: dict[str, str]) -> tuple[float, str]:
    """Return wall time and output of one of the lab's commands."""
    begun = time.monotonic()
    done = subprocess.run(
        ["bash", "tests/lab.sh", command, "bench"],
        cwd=REPO,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return time.monotonic() - begun, done.stdout


def steps(output: str) -> dict[str, float]:
    """Return the times the lab itself prints."""
    return {
        what: float(time_s) for what, time_s in re.findall(r"^lab: (.+): ([\d.]+) s$", output, re.M)
    }


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm-only", action="store_true", help="use the caches that are there")
    options = parser.parse_args(argv)
    home = Path(tempfile.mkdtemp(prefix="dsv4-bench-", dir="/var/tmp"))
    environment = os.environ | {"DSV4_LAB_DIR": str(home / "lab")}
    if not options.warm_only:
        environment["DSV4_LAB_CACHE"] = str(home / "cache")
    found: dict[str, Any] = {}
    try:
        if not options.warm_only:
            found["cold_s"], output = lab("up", environment)
            found["cold_steps_s"] = steps(output)
            lab("destroy", environment)
        found["warm_s"], output = lab("up", environment)
        found["warm_steps_s"] = steps(output)
    finally:
        lab("destroy", environment)
        shutil.rmtree(home, ignore_errors=True)
    return report.show(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
