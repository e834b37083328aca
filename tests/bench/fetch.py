"""The fetcher against parallel curl on the same loopback hub, and what ten kills cost, as JSON.

Both get the same files over the same number of connections, into the same directory; the fetcher
also hashes every byte, syncs and checks shard headers. Asserts nothing.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from dsv4 import fetch
from tests.bench import report
from tests.lab import places
from tests.lab.hub import Catalogue

REPOSITORY = "lab/bench"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{places.REPO}:{Path(fetch.__file__).parents[1]}"}


def make(source: Path, shards: int, shard_bytes: int) -> None:
    """Write shards that are valid safetensors files of noise."""
    source.mkdir(parents=True)
    noise = random.Random(1)
    piece = noise.randbytes(1 << 20)
    placed = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        span = {"dtype": "U8", "shape": [shard_bytes], "data_offsets": [0, shard_bytes]}
        header = json.dumps({f"t{number}": span}).encode()
        placed[f"t{number}"] = name
        with (source / name).open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            for _ in range(shard_bytes >> 20):
                out.write(piece)
                piece = piece[7:] + piece[:7]
    index = {"metadata": {"total_size": shards * shard_bytes}, "weight_map": placed}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text("{}\n")


class Bench:
    """A hub in a process of its own, and a place to fetch to."""

    def __init__(self, home: Path, workers: int) -> None:
        """Start the hub on what `make` wrote."""
        self.home, self.workers = home, workers
        self.source = home / "hub" / REPOSITORY / "files"
        self.size = sum(path.stat().st_size for path in self.source.iterdir())
        found = Catalogue(home / "hub").revision(REPOSITORY, "main")
        assert found
        self.commit, self.files = found
        pidfile = home / "pid"
        words = [sys.executable, "-m", "tests.lab.hub", "--root", str(home / "hub")]
        self.hub = subprocess.Popen(
            [*words, "--port", "0", "--pidfile", str(pidfile)], env=ENVIRONMENT
        )
        while not pidfile.exists():
            time.sleep(0.02)
        self.endpoint = f"http://127.0.0.1:{pidfile.read_text().split()[1]}"
        self.stats()
        with urllib.request.urlopen(f"{self.endpoint}/api/models/{REPOSITORY}/revision/main"):
            pass  # has the hub know its files' hashes

    def stats(self) -> dict[str, Any]:
        """Return what the hub sent since the last call."""
        with urllib.request.urlopen(f"{self.endpoint}/_lab/stats?clear=1") as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def fault(self, *faults: dict[str, Any]) -> None:
        """Have the hub play these faults."""
        request = urllib.request.Request(f"{self.endpoint}/_lab/fault", json.dumps(faults).encode())
        with urllib.request.urlopen(request):
            pass

    def argv(self, target: Path) -> list[str]:
        """Return the fetcher's command line."""
        target.mkdir(parents=True, exist_ok=True)
        spec = {
            "repo_id": REPOSITORY,
            "name": "bench",
            "revision": self.commit,
            "endpoint": self.endpoint,
            "workers": self.workers,
        }
        (self.home / "spec.json").write_text(json.dumps(spec))
        words = ["-m", "dsv4.fetch", "--spec", str(self.home / "spec.json")]
        places_ = ["--packs", str(target), "--progress", str(self.home / "progress.json")]
        return [sys.executable, *words, *places_]

    def by_curl(self) -> float:
        """Return seconds for `curl --parallel`."""
        target = self.home / "curl"
        target.mkdir()
        config = self.home / "curl.config"
        config.write_text(
            "".join(
                f'url = "{self.endpoint}/{REPOSITORY}/resolve/{self.commit}/{name}"\n'
                f'output = "{target / name}"\n'
                for name in self.files
            )
        )
        words = ["curl", "--silent", "--fail", "--location", "--parallel", "--parallel-max"]
        begun = time.monotonic()
        subprocess.run([*words, str(self.workers), "--config", str(config)], check=True)
        seconds = time.monotonic() - begun
        assert sum(path.stat().st_size for path in target.iterdir()) == self.size
        shutil.rmtree(target)
        return seconds

    def by_fetch(self) -> float:
        """Return seconds for the fetcher, from start to end of the process."""
        target = self.home / "packs"
        argv = self.argv(target)
        begun = time.monotonic()
        subprocess.run(argv, check=True, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        seconds = time.monotonic() - begun
        shutil.rmtree(target)
        return seconds

    def kills(self, count: int) -> dict[str, Any]:
        """Return what a download costs that is killed `count` times at random moments."""
        target = self.home / "killed"
        argv, rng = self.argv(target), random.Random(5)
        self.stats()
        self.fault({"kind": "slow", "rate": 24_000_000, "path": "/resolve/", "times": None})
        for _ in range(count):
            running = subprocess.Popen(argv, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
            time.sleep(rng.uniform(0.2, 2.5))
            running.send_signal(signal.SIGKILL)
            running.wait()
        self.fault()
        subprocess.run(argv, check=True, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        sent = int(self.stats()["bytes"])
        shutil.rmtree(target)
        return {"kills": count, "bytes": self.size, "sent": sent, "ratio": sent / self.size}


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--home", type=Path, help="where to work; a tmpfs leaves the disk out of it"
    )
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--mib", type=int, default=128, help="size of a shard")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.home, prefix="dsv4-bench-") as home:
        make(Path(home) / "hub" / REPOSITORY / "files", options.shards, options.mib << 20)
        bench = Bench(Path(home), options.workers)
        try:
            curl, ours = [], []
            for _ in range(options.runs):
                curl.append(bench.by_curl())
                ours.append(bench.by_fetch())
            killed = bench.kills(10)
        finally:
            bench.hub.terminate()
            bench.hub.wait()
    a, b = statistics.median(curl), statistics.median(ours)
    found = {
        "bytes": bench.size,
        "workers": options.workers,
        "curl_s": [round(value, 2) for value in curl],
        "fetch_s": [round(value, 2) for value in ours],
        "fetch_to_curl": round(a / b, 2),
        "killed": {**killed, "ratio": round(killed["ratio"], 4)},
    }
    return report.show(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
