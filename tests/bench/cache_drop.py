"""How fast the cache drop drops, and what it costs when there is nothing to do, as JSON.

    .venv/bin/python -m tests.bench.cache_drop [--gib 4]     (writes files of 1 GiB each)

The drop is of clean and of just written pages apart: those go to disk first. The whole process is
timed, from exec to exit, by hand: as a hook it also asks systemd whether the unit is being stopped.
Asserts nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dsv4 import residency
from tests.bench import report
from tests.bench.readahead import GIB, fill

LIBRARY = Path(__file__).resolve().parents[2] / "files/opt/dsv4/lib"
IDLE_RUNS = 20


def run(guard: Path, mode: str) -> tuple[float, dict[str, Any]]:
    """Return how long the hook took as a process, seconds, and what it said."""
    argv = [sys.executable, "-P", "-S", "-m", "dsv4", "cache_drop", "--guard", str(guard), "--json"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(LIBRARY)}
    begun = time.monotonic()
    done = subprocess.run(
        [*argv, "--mode", mode], env=environment, capture_output=True, text=True, check=False
    )
    return time.monotonic() - begun, json.loads(done.stdout)


def dropped(guard: Path, paths: list[Path], *, clean: bool) -> dict[str, Any]:
    """Return how a drop of everything went."""
    for path in paths:
        with path.open("rb") as handle:
            if clean:
                os.fsync(handle.fileno())
            while handle.read(16 << 20):
                pass
    resident = sum(residency.resident(path) for path in paths) / GIB
    took, said = run(guard, "always")
    return {
        "resident_gib": round(resident, 3),
        "dropped_gib": round(said["dropped"], 3),
        "seconds": round(said["seconds"], 3),
        "process_s": round(took, 3),
        "gib_s": round(said["dropped"] / said["seconds"], 2),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--dir", default="/var/tmp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        root, view = Path(name) / "pack", Path(name) / "view"
        root.mkdir()
        view.mkdir()
        paths = fill(root, options.gib)
        for path in paths:
            (view / path.name).symlink_to(path)
        guard = Path(name) / "guard.json"
        memory = {"utilisation": 0.01, "gate_margin_gib": 0.01}
        guard.write_text(json.dumps({"view": str(view), "pack_root": str(root), "memory": memory}))
        written = dropped(guard, paths, clean=False)
        clean = [dropped(guard, paths, clean=True) for _ in range(3)]
        idle = [run(guard, "auto")[0] * 1000 for _ in range(IDLE_RUNS)]
    found = {
        "clean": clean,
        "just_written": written,
        "nothing_to_do_ms": report.spread(idle, 1),
    }
    return report.show(found)


if __name__ == "__main__":
    raise SystemExit(main())
