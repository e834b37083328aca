"""How long the structural check of a pack of the real one's size takes, and its memory, as JSON.

Forty-eight sparse shards with real headers: offsets, index both ways, duplicates and layer bits are
checked by the tool as a whole process, beside a bare loop that only parses the headers.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench import report
from tests.lab.exl3_pack import SHARDS

RUNS = 7
REPO = Path(__file__).resolve().parents[2]
BARE = """
import json, sys
from pathlib import Path
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with path.open("rb") as file:
        json.loads(file.read(int.from_bytes(file.read(8), "little")))
"""


def run(words: list[str]) -> dict[str, Any]:
    """Return wall and processor seconds and the largest size of one process."""
    begun = time.monotonic()
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{words}: status {child.returncode}")
    return {
        "wall_s": time.monotonic() - begun,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "mib": usage.ru_maxrss / 1024,
    }


def median(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: round(statistics.median(one[key] for one in runs), 3) for key in runs[0]}


def main() -> int:
    """Measure and print."""
    os.environ["PYTHONPATH"] = f"{REPO}:{REPO / 'files/opt/dsv4/lib'}"
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "pack"
        # In a process of its own: a child's largest size is never below its parent's at the fork
        made = [sys.executable, "-m", "tests.lab.exl3_pack", str(root), "--full-size"]
        size = json.loads(subprocess.run(made, stdout=subprocess.PIPE, check=True).stdout)["bytes"]
        tool = [sys.executable, "-m", "dsv4", "pack_verify", "--pack-root", str(root)]
        bare = [sys.executable, "-c", BARE, str(root)]
        # In turn, so that what else the machine does touches both alike
        pairs = [(run(tool), run(bare)) for _ in range(RUNS)]
    ours, theirs = (median(list(column)) for column in zip(*pairs, strict=True))
    found = {
        "check": ours,
        "bare_json_loop": theirs,
        "cpu_ratio": round(ours["cpu_s"] / theirs["cpu_s"], 2),
        "shards": SHARDS,
        "bytes": size,
        "runs": RUNS,
    }
    return report.show(found)


if __name__ == "__main__":
    raise SystemExit(main())
