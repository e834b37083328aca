"""Who runs and who uses what, read from the real /proc, of processes the test has started."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsv4 import processes


@contextmanager
def child(code: str) -> Iterator[int]:
    """Have a child that has come as far as printing a line."""
    command = [
        sys.executable,
        "-S",
        "-c",
        f"{code}; print(flush=True); import time; time.sleep(60)",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_dead_process_is_nobody() -> None:
    """It waits for its parent to notice, takes no signal and holds nothing."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        end = time.monotonic() + 10
        while (
            "Z" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        ):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert processes.read_process(process.pid) is None
        assert process.pid not in {it.pid for it in processes.read_all()}


@pytest.mark.parametrize(
    ("status", "dead"),
    [
        ({"State": "Z (zombie)", "Threads": "1"}, True),
        # Its first thread has ended, the others hold all of its memory
        ({"State": "Z (zombie)", "Threads": "7"}, False),
        ({"State": "D (disk sleep)", "Threads": "1"}, False),
        ({}, False),
    ],
)
def test_who_is_dead(status: dict[str, str], dead: bool) -> None:
    assert processes.is_dead(status) is dead


def test_an_open_file_and_a_mapped_one_are_used(tmp_path: Path) -> None:
    """A descriptor may be closed while the mapping stays."""
    device, other = tmp_path / "nvidia0", tmp_path / "other"
    for path in (device, other):
        path.write_bytes(bytes(8192))
    opens = f"f=open({str(device)!r})"
    maps = f"import mmap; f=open({str(device)!r}); m=mmap.mmap(f.fileno(), 0, prot=1); f.close()"
    with child(opens) as one, child(maps) as two, child(opens.replace("nvidia0", "other")) as three:
        found = processes.using(f"{tmp_path}/nvidia")
        assert {one, two} <= found
        assert three not in found
        assert processes.mapping({str(device)}) == {str(device): {two}}
        assert processes.mapping({str(device)}, pids={one}) == {}


def test_the_largest_are_found() -> None:
    """By resident memory, with the rest of what is known of them."""
    with child("x=bytearray(300<<20); x[::4096]=bytes(len(x[::4096]))") as pid:
        found = processes.top(10_000)
        (hog,) = [it for it in found if it.pid == pid]
        assert 0.28 < hog.rss < 0.4
        assert hog.uid == os.getuid()
        assert hog.age < 60


def test_the_unit_is_the_innermost() -> None:
    """Of a user's service, that one and not the user's manager."""
    text = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/ollama.service\n"
    process = processes.Process(7, 1, 1000, "ollama", "ollama serve", 3.0, 9.0, text)
    assert process.unit == "ollama.service"
    assert str(process) == "pid 7 (ollama serve) in ollama.service, 3.0 GiB, 9 s old"
    bare = processes.Process(7, 1, 1000, "ollama", "", 3.0, 9.0, "1:name=systemd:/\n0::/\n")
    assert str(bare) == "pid 7 (ollama), 3.0 GiB, 9 s old"
