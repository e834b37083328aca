"""What a second runtime costs beside the first, with warm caches: seconds and disk, as JSON.

Needs a deployed lab machine (`bash tests/lab.sh up`). Builds the runtime in service once more under
another name, and deletes it. Asserts nothing.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time

from tests.bench import report
from tests.lab import machines

NAME = "lab-bbbbbbbbbbbb"
SPEC = "/run/dsv4-bench.json"
HOME = f"/opt/dsv4/runtimes/{NAME}"


def root(machine: str, command: str) -> str:
    """Run a command on the machine as root."""
    done = subprocess.run(
        [*machines.ssh_argv(machine), f"sudo sh -c {shlex.quote(command)}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def used_bytes(machine: str) -> int:
    """Return what the disk holds."""
    return int(root(machine, "df --output=used -B1 /opt/dsv4 | tail -1"))


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="dsv4-lab")
    options = parser.parse_args(argv)
    spec = json.loads(root(options.machine, "cat /etc/dsv4/build.json"))
    try:
        text = shlex.quote(json.dumps({**spec, "id": NAME}))
        root(options.machine, f"rm -rf {HOME}; printf %s {text} >{SPEC}; sync")
        before, begun = used_bytes(options.machine), time.monotonic()
        root(options.machine, f"/opt/dsv4/bin/dsv4 build --spec {SPEC} >/dev/null")
        seconds = time.monotonic() - begun
        found = {
            "build_s": round(seconds, 1),
            "extra_disk_gb": round((used_bytes(options.machine) - before) / 1e9, 2),
            "route": spec["route"],
        }
    finally:
        root(options.machine, f"rm -rf {HOME} {SPEC}")
    return report.show(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
