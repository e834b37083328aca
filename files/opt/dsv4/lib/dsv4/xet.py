"""Bring one file by xet, the hub's own way of transfer, in a process that can be given up.

huggingface_hub and hf_xet do it, in a child of its own: whether they use xet is decided by their
environment when they are imported, and a xet transfer that stalls does not return. The fetcher
looks at the bytes on disk, ends a child that writes none, and goes on over plain HTTP. What such a
child has written is lost: its file has holes.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from dsv4 import layout, transfer
from dsv4.hub import Remote
from dsv4.transfer import Source

Outcome = Literal["done", "elsewhere", "failed"]

NOT_BY_XET: Final = 4
"""The child's status when the hub offers this file over plain HTTP only."""

LOOK_S: Final = 0.5


def home(root: Path) -> Path:
    """Return where a revision's children work: on the pack's own mount, removed afterwards."""
    return root.with_name(f".{root.name}.xet")


def environment(scratch: Path) -> dict[str, str]:
    """Return a child's environment: ours, with xet allowed and everything it keeps in `scratch`.

    xet ignores XDG_CACHE_HOME, and what it would cache is on disk as the file itself.
    """
    known = {key: value for key, value in os.environ.items() if key != "HF_HUB_DISABLE_XET"}
    return known | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "HF_HOME": str(scratch / "home"),
        "HF_XET_CACHE": str(scratch / "cache"),
        "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0",
        "HF_XET_TELEMETRY_ENABLED": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def written(directory: Path) -> int:
    """Return the bytes on disk below a directory; a file's length says nothing of its holes."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def fetch(source: Source, root: Path, remote: Remote) -> Outcome:
    """Have one file by xet, verified; say why when it is to be brought another way."""
    scratch = home(root) / remote.identity[:16]
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    meter, arrived = source.meter, 0
    log = scratch / "log"
    question = {
        "endpoint": source.hub.endpoint,
        "token": source.hub.token,
        "repo_id": source.repo_id,
        "revision": source.commit,
        "name": remote.name,
        "to": str(scratch / "file"),
    }
    try:
        with log.open("wb") as out, meter.turn():
            child = subprocess.Popen(
                [sys.executable, "-m", "dsv4.xet"],
                env=environment(scratch),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=out,
            )
            with child:
                try:
                    arrived, stalled = watch(child, question, scratch, source)
                finally:
                    child.kill()
        if child.returncode == 0 and take(scratch / "file" / remote.name, root, remote, source):
            meter.add(remote.size - arrived)
            part = transfer.part_path(root, remote)
            if part.exists():  # its header, which was read by itself
                meter.lose(part.stat().st_size)
                part.unlink()
            return "done"
        meter.lose(arrived)
        if child.returncode == NOT_BY_XET:
            return "elsewhere"
        lines = log.read_text(errors="replace").strip().splitlines()
        why = lines[-1][:200] if lines else "no reason given"
        if stalled:
            why = f"nothing arrived for {source.limits.stall_s:.0f} s"
        elif child.returncode == 0:
            why = "its bytes are not the hub's"
        meter.tell(f"{remote.name}: xet failed ({why}); going on over plain HTTP")
        return "failed"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def watch(
    child: "subprocess.Popen[bytes]",
    question: Mapping[str, str | None],
    scratch: Path,
    source: Source,
) -> tuple[int, bool]:
    """Return how many bytes arrived until the child ended or stalled, and which of both it was."""
    meter, limits = source.meter, source.limits
    assert child.stdin
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(question).encode() + b"\n")
        child.stdin.flush()
    size = had = 0
    since = time.monotonic()
    while child.poll() is None:
        meter.check()
        before, size = size, written(scratch / "file")
        meter.add(size - before)
        passed = time.monotonic() - since
        if passed > limits.stall_s:
            if (size - had) / passed < transfer.SLOWEST:
                return size, True
            since, had = time.monotonic(), size
        meter.stop.wait(min(LOOK_S, limits.stall_s / 4))
    return size, False


def take(path: Path, root: Path, remote: Remote, source: Source) -> bool:
    """Give a file its name in the pack when its bytes are the hub's."""
    if not transfer.verify(path, remote, source.meter):
        return False
    path.chmod(transfer.MODE)
    path.replace(root / remote.name)
    return True


def follow_parent() -> None:
    """End when the parent does: its end of the pipe is closed then, however it ended."""
    sys.stdin.read()
    os._exit(1)


def main(argv: list[str]) -> int:
    """Bring the file that one line on standard input asks for."""
    if argv or os.isatty(0):
        sys.stderr.write(f"dsv4 xet: is a part of `{layout.DSV4} fetch`, which starts it\n")
        return 2
    question = json.loads(sys.stdin.readline())
    threading.Thread(target=follow_parent, daemon=True).start()
    import huggingface_hub

    name, revision = question["name"], question["revision"]
    known = {"endpoint": question["endpoint"], "token": question["token"] or False}
    url = huggingface_hub.hf_hub_url(
        question["repo_id"], name, revision=revision, endpoint=question["endpoint"]
    )
    facts = huggingface_hub.get_hf_file_metadata(url, **known)
    if facts.xet_file_data is None or importlib.util.find_spec("hf_xet") is None:
        return NOT_BY_XET
    huggingface_hub.hf_hub_download(
        question["repo_id"], name, revision=revision, local_dir=question["to"], **known
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
