"""What the cache drop gives up, in which order, and that it claims only what went."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import cache_drop, residency

MIB = 1 << 20


def write(path: Path, size: int, *, synced: bool) -> Path:
    with path.open("wb") as handle:
        handle.write(b"x" * size)
        handle.flush()
        if synced:
            os.fsync(handle.fileno())
    return path


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory on a disk; /tmp may be memory, and nothing can be dropped from that."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture
def pack(disk: Path) -> Path:
    """A view of two shards, and links that lead elsewhere."""
    tmp_path = disk
    (tmp_path / "packs/p").mkdir(parents=True)
    (tmp_path / "view").mkdir()
    for n in (1, 2):
        write(tmp_path / f"packs/p/{n}.safetensors", 4 * MIB, synced=False)
        (tmp_path / f"view/{n}.safetensors").symlink_to(tmp_path / f"packs/p/{n}.safetensors")
    write(tmp_path / "outside", MIB, synced=True)
    (tmp_path / "view/outside").symlink_to(tmp_path / "outside")
    (tmp_path / "view/dangling").symlink_to(tmp_path / "packs/p/none")
    (tmp_path / "view/folder").symlink_to(tmp_path / "packs/p")
    (tmp_path / "view/config.json").write_text("{}")
    (tmp_path / "meminfo").write_text(text(1.2))
    return tmp_path


def text(free: float, total: float = 121.7, available: float = 80.0) -> str:
    rows = {"MemTotal": total, "MemFree": free, "MemAvailable": available, "Cached": 80.0}
    return "".join(f"{name}: {int(value * (1 << 20))} kB\n" for name, value in rows.items())


def run(pack: Path, capsys: pytest.CaptureFixture[str], *argv: str, **memory: object) -> dict:  # type: ignore[type-arg]
    value = {"view": str(pack / "view"), "pack_root": str(pack / "packs"), "memory": memory}
    (pack / "guard.json").write_text(json.dumps(value))
    given = ["--guard", str(pack / "guard.json"), "--meminfo", str(pack / "meminfo"), "--json"]
    status = cache_drop.main([*given, *argv])
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    found: dict[str, object] = json.loads(out)
    assert status == (0 if found["ok"] else 1)
    return {**found, "line": err}


def test_links_into_the_pack_and_nowhere_else(pack: Path) -> None:
    """Only real files, only inside the root, each once."""
    found, left = cache_drop.pack_files(pack / "view", pack / "packs")
    assert [path.name for path in found] == ["1.safetensors", "2.safetensors"]
    assert {link.name: why for link, why in left.items()} == {
        "outside": cache_drop.OUTSIDE,
        "dangling": "gone",
        "folder": "no file",
    }
    found, left = cache_drop.pack_files(pack / "view", pack / "elsewhere")
    assert found == []
    assert set(left.values()) == {cache_drop.OUTSIDE}


def test_every_link_below_the_view_counts(pack: Path) -> None:
    """A pack may have folders; a second link to the same file is the same file."""
    (pack / "view/deep/er").mkdir(parents=True)
    write(pack / "packs/p/deep", MIB, synced=True)
    for n in range(500):
        (pack / f"view/deep/er/{n}").symlink_to(pack / "packs/p/deep")
    found, _ = cache_drop.pack_files(pack / "view", pack / "packs")
    assert [path.name for path in found] == ["1.safetensors", "2.safetensors", "deep"]


def test_cache_is_dropped_even_when_just_written(
    pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dirty pages stay when one only advises; a fresh download is all dirty."""
    found = run(pack, capsys, "--mode", "always")
    assert found["dropped"] == pytest.approx(8 / 1024, rel=0.01)
    assert residency.resident(pack / "packs/p/1.safetensors") == 0
    assert residency.resident(pack / "outside") == MIB


def test_what_is_behind_a_directory_s_link_is_the_pack_s(pack: Path) -> None:
    (pack / "elsewhere").mkdir()
    (pack / "elsewhere/3.safetensors").write_bytes(b"x")
    (pack / "packs/p/sub").symlink_to(pack / "elsewhere")
    (pack / "view/sub").mkdir()
    (pack / "view/sub/3.safetensors").symlink_to(pack / "packs/p/sub/3.safetensors")
    found, _ = cache_drop.pack_files(pack / "view", pack / "packs")
    assert [path.name for path in found] == ["3.safetensors", "1.safetensors", "2.safetensors"]


@pytest.mark.parametrize("served", ["snapshot", "link to it", "links to blobs", "link to links"])
def test_an_adopted_hub_cache_is_dropped_and_nothing_beside_it(
    disk: Path, capsys: pytest.CaptureFixture[str], served: str
) -> None:
    """Its blobs are outside the directory that is served, beside those of other revisions."""
    cache, view = disk / "hub/models--a--b", disk / "view"
    snapshot, other = cache / "snapshots/one", cache / "snapshots/two"
    for directory in (cache / "blobs", snapshot, other, view):
        directory.mkdir(parents=True)
    blobs = [write(cache / f"blobs/{n}", MIB, synced=True) for n in range(5)]
    for n in range(3):
        (snapshot / f"{n}.safetensors").symlink_to(f"../../blobs/{n}")
        (other / f"{n}.safetensors").symlink_to(f"../../blobs/{n + 2}")
    pack = disk / "pack"
    if served == "snapshot":
        pack = snapshot
    elif served == "link to it":
        pack.symlink_to(snapshot)
    else:
        pack.mkdir()
        source = cache / "blobs" if served == "links to blobs" else snapshot
        for path in sorted(source.iterdir())[:3]:
            (pack / f"{path.name.removesuffix('.safetensors')}.safetensors").symlink_to(path)
    for path in sorted(pack.iterdir()):
        (view / path.name).symlink_to(pack / path.name)
    (disk / "guard.json").write_text(
        json.dumps({"view": str(view), "pack_root": str(pack), "memory": {}})
    )
    (disk / "meminfo").write_text(text(1.2))
    given = ["--guard", str(disk / "guard.json"), "--meminfo", str(disk / "meminfo"), "--json"]
    cache_drop.main([*given, "--mode", "always"])
    found = json.loads(capsys.readouterr().out)
    assert (found["files"], found["left"]) == (3, [])
    assert [residency.resident(blob) for blob in blobs] == [0, 0, 0, MIB, MIB]


MAPS = (
    "import mmap,sys;f=open(sys.argv[1],'rb');m=mmap.mmap(f.fileno(),0,prot=1);f.close();"
    "sum(m[n] for n in range(0,len(m),4096))"
)
LOCKS = (
    "import ctypes,os,sys;l=ctypes.CDLL(None,use_errno=True);l.mmap.restype=ctypes.c_void_p;"
    "f=os.open(sys.argv[1],os.O_RDONLY);n=os.fstat(f).st_size;"
    "a=l.mmap(None,ctypes.c_size_t(n),1,1,f,ctypes.c_long(0));os.close(f);"
    "assert l.mlock(ctypes.c_void_p(a),ctypes.c_size_t(n))==0"
)


@contextmanager
def holding(path: Path, how: str = MAPS) -> Iterator[int]:
    """Have another process map a file and touch all of it."""
    argv = [sys.executable, "-c", f"{how};print(flush=True);sys.stdin.read()", str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.communicate()


@pytest.mark.parametrize("how", [MAPS, LOCKS], ids=["mapped", "locked"])
def test_mapped_pages_are_not_claimed(
    pack: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Who maps a file keeps it in memory, and is named; when it lets go, so does the file."""
    with holding(pack / "packs/p/2.safetensors", how) as pid:
        found = run(pack, capsys, "--mode", "always")
        assert found["dropped"] == pytest.approx(4 / 1024, rel=0.01)
        assert found["kept"] == found["stuck"] == pytest.approx(4 / 1024, rel=0.01)
        assert f"still mapped by pid {pid} (python" in found["line"]
        assert found["ok"] is False
    assert run(pack, capsys, "--mode", "always", utilisation=0.001, gate_margin_gib=0.1)["ok"]


def test_a_holder_is_found_under_another_path(
    pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container sees the pack somewhere else; a second name of the file stands for that here."""
    other = pack / "seen from elsewhere"
    other.hardlink_to(pack / "packs/p/1.safetensors")
    with holding(other) as pid:
        assert f"pid {pid} " in run(pack, capsys, "--mode", "always")["line"]


def test_files_in_memory_alone(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pack on a tmpfs cannot be dropped, and what is not dropped is not claimed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        shard = write(Path(name) / "3.safetensors", MIB, synced=True)
        found = cache_drop.measure([shard, pack / "packs/p/1.safetensors"])
        assert found.left == {shard: "in tmpfs, which is memory"}
        assert [file.path.name for file in found.files] == ["1.safetensors"]
    assert "1 file left alone, outside" in run(pack, capsys, "--mode", "always")["line"]


def test_files_that_vanish_or_cannot_be_read(pack: Path) -> None:
    """Each is named with its reason, and the others are dropped all the same."""
    paths, _ = cache_drop.pack_files(pack / "view", pack / "packs")
    paths[0].unlink()
    found = cache_drop.measure(paths)
    assert found.left == {paths[0]: "No such file or directory"}
    gone, stuck = cache_drop.give_up([cache_drop.File(paths[0], MIB, MIB), *found.files], 1e9)
    assert gone == 4 * MIB
    assert [file.path for file in stuck] == [paths[0]]
    many = {Path(f"{n:03}"): "Permission denied" for n in range(200)}
    assert cache_drop.reasons(many) == ["200 files left alone, Permission denied (000, …)"]


def test_a_file_with_two_names_is_one(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its pages are there once, go once and are claimed once."""
    (pack / "packs/p/again.safetensors").hardlink_to(pack / "packs/p/1.safetensors")
    (pack / "view/again.safetensors").symlink_to(pack / "packs/p/again.safetensors")
    found = run(pack, capsys, "--mode", "always")
    assert found["files"] == 2
    assert found["dropped"] == pytest.approx(8 / 1024, rel=0.01)


def test_a_file_with_holes(pack: Path) -> None:
    """Its size says nothing: what is in memory counts, and only what is missing goes."""
    path = pack / "packs/p/sparse"
    with path.open("wb") as handle:
        handle.write(b"x" * 3 * MIB)
        handle.truncate(256 << 30)
    found = cache_drop.measure([path])
    assert found.resident == 3 * MIB
    gone, stuck = cache_drop.give_up(found.files, 1)
    assert (gone, stuck) == (3 * MIB, [])
    assert residency.resident(path) == 0


@pytest.mark.parametrize("wanted", [1, 1e9], ids=["in part", "whole"])
def test_a_file_that_is_replaced_meanwhile(pack: Path, wanted: float) -> None:
    """The new one was not measured: it is neither dropped nor claimed, nor called stuck."""
    path = pack / "packs/p/1.safetensors"
    found = cache_drop.measure([path])
    write(path.with_name("new"), 2 * MIB, synced=True).replace(path)
    assert cache_drop.give_up(found.files, wanted) == (0, [])
    assert residency.resident(path) == 2 * MIB


def test_a_pipe_where_a_file_was(pack: Path) -> None:
    """Opening one waits for its writer: a start would hang there until its time is over."""
    path = pack / "packs/p/1.safetensors"
    found = cache_drop.measure([path])
    path.unlink()
    os.mkfifo(path)
    assert cache_drop.measure([path]).left == {path: "is no regular file"}
    gone, stuck = cache_drop.give_up(found.files, 1e9)
    assert gone == 0
    assert [file.path for file in stuck] == [path]


def test_a_pack_root_that_is_a_link(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Onto a larger disk, as owners do it: what it reaches is the pack."""
    (pack / "packs").rename(pack / "on another disk")
    (pack / "packs").symlink_to(pack / "on another disk")
    found = run(pack, capsys, "--mode", "always")
    assert found["dropped"] == pytest.approx(8 / 1024, rel=0.01)


def test_a_stale_cache_needs_a_drop(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MemAvailable of 78 GiB does not help: MemFree is what CUDA sees."""
    found = run(pack, capsys, utilisation=0.88)
    assert found["dropped"] > 0
    assert "short" in found["line"]
    assert "page cache of other files" in found["line"]


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ({"utilisation": 0.001, "gate_margin_gib": 0.1}, "enough is free"),
        ({"cache_drop": "never"}, "never"),
        ({"device": "cpu", "utilisation": 0.9}, "CPU"),
    ],
)
def test_kept(
    pack: Path, capsys: pytest.CaptureFixture[str], memory: dict[str, object], why: str
) -> None:
    """A warm cache is worth ten minutes; it is kept whenever it may be."""
    found = run(pack, capsys, **memory)
    assert why in found["line"]
    assert residency.resident(pack / "packs/p/1.safetensors") == 4 * MIB


@pytest.mark.parametrize("broken", ["guard", "meminfo", "mode", "view"])
def test_its_own_faults_do_not_stop_a_start(
    pack: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    """As a hook it leaves the decision to the gate that follows; by hand it says so."""
    memory = {"cache_drop": "sometimes"} if broken == "mode" else {}
    value = {"view": "/none" if broken == "view" else str(pack), "memory": memory}
    (pack / "guard.json").write_text("{" if broken == "guard" else json.dumps(value))
    (pack / "meminfo").write_text("" if broken == "meminfo" else text(1))
    given = ["--guard", str(pack / "guard.json"), "--meminfo", str(pack / "meminfo")]
    assert cache_drop.main(given) == 3
    assert "nothing dropped" in capsys.readouterr().err
    monkeypatch.setenv("INVOCATION_ID", "1")
    assert cache_drop.main(given) == 0


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 12 * MIB))
def test_just_enough(sizes: list[int], missing: int) -> None:
    """What is missing goes and at most a piece more, from the end of the last file."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, small_pieces():
        paths = [
            write(Path(name) / f"{n}", size * MIB, synced=True) for n, size in enumerate(sizes)
        ]
        found = cache_drop.measure(paths)
        gone, stuck = cache_drop.give_up(found.files, missing)
        assert stuck == []
        assert gone == found.resident - cache_drop.measure(paths).resident
        assert min(missing, found.resident) <= gone < missing + cache_drop.PIECE
        left = {path: residency.resident(path) for path in paths}
        for file in cache_drop.order(found.files):
            # Those before it are gone, those after it are whole, and its beginning is what stays
            assert residency.resident(file.path, 0, left[file.path]) == left[file.path]


@contextmanager
def small_pieces() -> Iterator[None]:
    """Have files of a few MiB given up as finely as ones of GiB are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache_drop, "PIECE", 2 * MIB)
        yield


def test_order() -> None:
    """The engine loads by name, so the last ones are needed last."""
    files = [cache_drop.File(Path(name), size, 1) for name, size in (("a", 1), ("b", 5), ("c", 5))]
    assert [file.path.name for file in cache_drop.order(files)] == ["c", "b", "a"]


def test_both_ways_to_measure_agree(disk: Path) -> None:
    """cachestat where the kernel has it, mincore everywhere."""
    path = write(disk / "f", 3 * MIB + 5, synced=True)
    with residency.opened(path) as descriptor:
        assert residency.by_mincore(descriptor, 0, path.stat().st_size) >= 3 * MIB
        residency.drop(path, 2 * MIB, 0)
        for start, length in ((0, 2 * MIB), (2 * MIB, MIB), (0, 3 * MIB)):
            found = residency.by_mincore(descriptor, start, length)
            assert found == residency.resident(path, start, length) == 2 * MIB * (start == 0)
    residency.drop(path)
    assert residency.resident(path) == 0
    path.write_bytes(b"")
    assert residency.resident(path) == 0


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--json", "--mode", "always"],
        ["--guard", "/g", "--meminfo", "/m", "--json"],
        ["--mode=never", "--guard=/g"],
        ["--me", "/m"],
    ],
)
def test_every_call_is_read_as_argparse_reads_it(argv: list[str]) -> None:
    """The plain ones without it, for the sake of some ms; with the same outcome."""
    assert cache_drop.parse(argv) == cache_drop.by_argparse(argv)


def test_a_wrong_call() -> None:
    """Usage is the only way to fail."""
    with pytest.raises(SystemExit) as caught:
        cache_drop.main(["--mode", "sometimes"])
    assert caught.value.code == 2
