"""How fast a pack's bytes are verified, beside sha256sum in parallel on the same files, as JSON."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dsv4 import pack_verify, store
from tests.bench import report
from tests.lab import exl3_pack

RUNS = 3
FILES, FILE_BYTES = 8, 256 << 20


def make(root: Path) -> None:
    """Write shards of random bytes, and the record the fetcher would have made of them."""
    files = {}
    root.mkdir()
    for number in range(FILES):
        name = f"s{number}.safetensors"
        begin, _ = exl3_pack.header({f"t{number}": ("U8", (FILE_BYTES,))})
        (root / name).write_bytes(begin + os.urandom(FILE_BYTES))
        size, digest = (root / name).stat().st_size, store.sha256_file(root / name)
        files[name] = {"size": size, "sha256": digest}
    placed = {f"t{number}": f"s{number}.safetensors" for number in range(FILES)}
    (root / pack_verify.INDEX).write_text(json.dumps({"weight_map": placed}))
    store.write_json(pack_verify.state_path(root), {"complete": True, "files": files})


def seconds(words: list[str]) -> float:
    """Return the time a command takes."""
    begun = time.monotonic()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - begun


def main() -> int:
    """Measure and print."""
    cores = len(os.sched_getaffinity(0))
    os.environ["PYTHONPATH"] = str(Path(pack_verify.__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        root = Path(scratch) / "pack"
        make(root)
        tool = [sys.executable, "-m", "dsv4", "pack_verify", "--pack-root", str(root), "--full"]
        tool += ["--workers", str(cores)]
        paths = " ".join(str(path) for path in sorted(root.glob("*.safetensors")))
        plain = ["sh", "-c", f"printf '%s\\n' {paths} | xargs -P {cores} -n 1 sha256sum"]
        pairs = [(seconds(tool), seconds(plain)) for _ in range(RUNS)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    gb = FILES * FILE_BYTES / 1e9
    found = {
        "pack_verify_gb_s": round(gb / ours, 2),
        "sha256sum_gb_s": round(gb / theirs, 2),
        "ratio": round(theirs / ours, 2),
        "bytes": FILES * FILE_BYTES,
        "workers": cores,
        "runs": RUNS,
    }
    return report.show(found)


if __name__ == "__main__":
    raise SystemExit(main())
