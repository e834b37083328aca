"""What the cache drop gives up, in which order, and that it claims only what went."""

import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
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
    assert cache_drop.main([*given, *argv]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    found: dict[str, object] = json.loads(out)
    return {**found, "line": err}


def test_links_into_the_pack_and_nowhere_else(pack: Path) -> None:
    """Only real files, only inside the root, each once."""
    found = cache_drop.pack_files(pack / "view", pack / "packs")
    assert [path.name for path in found] == ["1.safetensors", "2.safetensors"]
    assert cache_drop.pack_files(pack / "view", pack / "elsewhere") == []


def test_cache_is_dropped_even_when_just_written(
    pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dirty pages stay when one only advises; a fresh download is all dirty."""
    found = run(pack, capsys, "--mode", "always")
    assert found["dropped"] == pytest.approx(8 / 1024, rel=0.01)
    assert residency.resident(pack / "packs/p/1.safetensors") == 0
    assert residency.resident(pack / "outside") == MIB


def test_mapped_pages_are_not_claimed(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who maps a file keeps it in memory, and is named."""
    path = pack / "packs/p/2.safetensors"
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as data:
        assert sum(data[n] for n in range(0, len(data), 4096)) > 0
        found = run(pack, capsys, "--mode", "always")
    assert found["dropped"] == pytest.approx(4 / 1024, rel=0.01)
    assert f"pid {os.getpid()}" in found["line"]


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
    pack: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    """The gate that follows decides."""
    memory = {"cache_drop": "sometimes"} if broken == "mode" else {}
    value = {"view": "/none" if broken == "view" else str(pack), "memory": memory}
    (pack / "guard.json").write_text("{" if broken == "guard" else json.dumps(value))
    (pack / "meminfo").write_text("" if broken == "meminfo" else text(1))
    given = ["--guard", str(pack / "guard.json"), "--meminfo", str(pack / "meminfo")]
    assert cache_drop.main(given) == 0
    assert "nothing dropped" in capsys.readouterr().err


sizes = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=12)


@given(sizes, st.integers(-10, 400))
def test_just_enough(pairs: list[tuple[int, int]], missing: int) -> None:
    """Files go largest first, of equals the last loaded; it stops as soon as enough has gone."""
    files = [
        cache_drop.File(Path(f"{n:03}"), max(size, held), held)
        for n, (size, held) in enumerate(pairs)
    ]
    dropped: list[Path] = []
    gone, stuck = cache_drop.give_up(files, missing, dropped.append, lambda path: 0)
    expected = [f for f in cache_drop.order(files) if f.resident]
    assert dropped == [f.path for f in expected][: len(dropped)]
    assert gone == sum(f.resident for f in expected[: len(dropped)])
    assert gone >= missing or len(dropped) == len(expected)
    if dropped:
        assert gone - expected[len(dropped) - 1].resident < missing
    assert stuck == []


def test_order() -> None:
    """The engine loads by name, so the last ones are needed last."""
    files = [cache_drop.File(Path(name), size, 1) for name, size in (("a", 1), ("b", 5), ("c", 5))]
    assert [file.path.name for file in cache_drop.order(files)] == ["c", "b", "a"]


def test_both_ways_to_measure_agree(disk: Path) -> None:
    """cachestat where the kernel has it, mincore everywhere."""
    path = write(disk / "f", 3 * MIB + 5, synced=True)
    with residency.opened(path) as descriptor:
        assert residency.by_mincore(descriptor, path.stat().st_size) >= 3 * MIB
    assert residency.resident(path) == 3 * MIB + 5
    residency.drop(path)
    assert residency.resident(path) == 0
    path.write_bytes(b"")
    assert residency.resident(path) == 0


def test_a_wrong_call() -> None:
    """Usage is the only way to fail."""
    with pytest.raises(SystemExit) as caught:
        cache_drop.main(["--mode", "sometimes"])
    assert caught.value.code == 2
