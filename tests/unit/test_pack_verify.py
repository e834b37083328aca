"""A damaged pack is told apart file by file, with the likely cause."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from dsv4 import pack_verify, store


def shard(tensors: dict[str, int], **header: Any) -> bytes:
    """Return a shard of byte tensors with these sizes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({**entries, **header}).encode()
    return len(text).to_bytes(8, "little") + text + b"\x07" * at


def write_index(root: Path, placed: dict[str, str]) -> None:
    (root / pack_verify.INDEX).write_text(json.dumps({"weight_map": placed}))


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(shard({"x": 300, "y": 20}))
    (tmp_path / "b.safetensors").write_bytes(shard({"z": 1000}))
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    return tmp_path


def faults(root: Path) -> list[str]:
    return [str(finding) for finding in pack_verify.check_structure(root).findings]


def test_a_whole_pack_has_no_findings(pack: Path) -> None:
    assert faults(pack) == []


WHOLE = shard({"z": 1000})
LENGTH = int.from_bytes(WHOLE[:8], "little")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"abc", "is 3 bytes long"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "lfs pointer"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b'{"error":"Access denied"}', "JSON answer"),
        (b"\x1f\x8b" + b"x" * 30, "compressed"),
        (bytes(4096), "begins with zeros"),
        (WHOLE[: 8 + LENGTH - 5], "cut short inside its header, by at least 5 bytes"),
        (WHOLE[:-17], "cut short by 17 bytes"),
        (WHOLE + b"xyz", "has 3 bytes after"),
        (WHOLE[:8] + b"?" * LENGTH + WHOLE[8 + LENGTH :], "damaged header"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
    ],
)
def test_a_file_that_is_no_shard_says_what_it_is(pack: Path, data: bytes, words: str) -> None:
    (pack / "b.safetensors").write_bytes(data)
    found = faults(pack)
    assert len(found) == 1
    assert found[0].startswith("b.safetensors: ")
    assert words in found[0]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [250], "data_offsets": [0, 999]}, "999 bytes where"),
        ({"dtype": "U8", "shape": [990], "data_offsets": [10, 1000]}, "gap at byte 0"),
        ({"dtype": "U8", "shape": [9]}, "not the format's"),
        ({"dtype": "U8", "shape": "wide", "data_offsets": [0, 4]}, "that the format has not"),
        ([], "not the format's"),
        ({"dtype": "NEW", "shape": [4], "data_offsets": [0, 4]}, "that the format has not"),
    ],
)
def test_places_that_make_no_sense_are_found(pack: Path, entry: Any, words: str) -> None:
    (pack / "b.safetensors").write_bytes(shard({"z": 1000}, z=entry))
    assert words in faults(pack)[0]


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "BF16", "I64"])
def test_types_of_every_width_are_understood(dtype: str) -> None:
    bits = pack_verify.BITS[dtype]
    entry = {"dtype": dtype, "shape": [6], "data_offsets": [0, 6 * bits // 8]}
    assert pack_verify.check_layout({"t": entry}, 6 * bits // 8) is None


def test_overlapping_tensors_are_found() -> None:
    one = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    two = {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]}
    assert "overlap" in str(pack_verify.check_layout({"a": one, "b": two}, 12))


def test_a_missing_shard_is_named_with_what_is_there_instead(pack: Path) -> None:
    (pack / "b.safetensors").unlink()
    assert faults(pack) == ["b.safetensors: is missing"]
    (pack / "b.safetensors").mkdir()
    assert faults(pack) == ["b.safetensors: is a directory"]
    (pack / "b.safetensors").rmdir()
    (pack / "b.safetensors").symlink_to("/nowhere/blob")
    assert faults(pack) == ["b.safetensors: is a link to /nowhere/blob, which is not there"]


def test_index_and_shards_are_compared_both_ways(pack: Path) -> None:
    write_index(pack, {"x": "a.safetensors", "y": "b.safetensors", "w": "b.safetensors"})
    assert faults(pack) == [
        "a.safetensors: holds y, which the index puts elsewhere",
        "b.safetensors: lacks w, y, which the index puts there",
        "b.safetensors: holds z, which the index does not know",
    ]


def test_a_tensor_in_two_shards_is_found(pack: Path) -> None:
    (pack / "b.safetensors").write_bytes(shard({"z": 1000, "x": 300}))
    assert faults(pack) == ["b.safetensors: holds x, which the index puts elsewhere"]


def test_a_shard_of_another_revision_is_a_leftover(pack: Path) -> None:
    (pack / "old.safetensors").write_bytes(shard({"q": 4}))
    assert "leftover of another revision" in faults(pack)[0]


def test_a_broken_or_missing_index_is_a_finding(pack: Path) -> None:
    (pack / pack_verify.INDEX).write_text("<html>")
    assert "is no index" in faults(pack)[0]
    (pack / pack_verify.INDEX).write_text("{}")
    assert "has no weight_map" in faults(pack)[0]
    (pack / pack_verify.INDEX).unlink()
    assert "2 shards need one" in faults(pack)[0]


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / pack_verify.SINGLE).write_bytes(shard({"x": 3}))
    assert faults(tmp_path) == []


def test_an_empty_directory_is_no_pack(tmp_path: Path) -> None:
    assert faults(tmp_path) == ["model.safetensors: is missing"]


def record(root: Path, complete: bool = True) -> dict[str, Any]:
    """Return what the fetcher would have written of these files."""
    files: dict[str, Any] = {}
    for path in root.iterdir():
        data = path.read_bytes()
        small = path.suffix == ".json"
        sha1 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        files[path.name] = {
            "size": len(data),
            "sha256": None if small else hashlib.sha256(data).hexdigest(),
            "blob_sha1": sha1 if small else None,
        }
    return {"complete": complete, "files": files}


def test_right_size_and_wrong_bytes_is_found_by_hash_only(pack: Path) -> None:
    state = record(pack)
    data = bytearray((pack / "b.safetensors").read_bytes())
    data[-500:-400] = bytes(100)
    (pack / "b.safetensors").write_bytes(data)
    assert pack_verify.check(pack, state, full=False, workers=2).findings == []
    report = pack_verify.check(pack, state, full=True, workers=2)
    assert report.bad_files == ["b.safetensors"]
    assert (report.files, report.hashed) == (3, 3)


def test_a_small_file_is_known_by_its_git_blob(pack: Path) -> None:
    state = record(pack)
    write_index(pack, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    text = (pack / pack_verify.INDEX).read_text()
    (pack / pack_verify.INDEX).write_text(text.replace('": "', '" :"'))
    report = pack_verify.check(pack, state, full=True, workers=1)
    assert report.bad_files == [pack_verify.INDEX]


def test_sizes_are_compared_with_the_record(pack: Path) -> None:
    state = record(pack)
    state["files"]["tokenizer.json"] = {"size": 10}
    state["files"][pack_verify.INDEX]["size"] += 7
    found = [str(f) for f in pack_verify.check(pack, state, full=False, workers=1).findings]
    assert found == [
        f"{pack_verify.INDEX}: is 7 bytes too short",
        "tokenizer.json: is missing",
    ]


def test_an_unfinished_download_is_a_finding(pack: Path) -> None:
    report = pack_verify.check(pack, record(pack, complete=False), full=False, workers=1)
    assert "is not complete" in str(report.findings[0])


def test_the_command_reports_in_json_and_by_exit_code(
    pack: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path_factory.mktemp("state") / "revision.json"
    state.write_text(json.dumps(record(pack)))
    argv = ["--pack-root", str(pack), "--state", str(state), "--full", "--json"]
    assert pack_verify.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["hashed"] == 3
    (pack / "b.safetensors").unlink()
    assert pack_verify.main(argv) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert "b.safetensors: is missing" in err
    state.write_text("no json")
    assert pack_verify.main(argv) == 3
    assert pack_verify.main(["--pack-root", "/nowhere"]) == 3
    assert pack_verify.main(["--pack-root", str(pack), "--full"]) == 3


def test_a_name_that_is_twice_in_a_header_is_found(pack: Path) -> None:
    """A reader keeps the last of two; the first one's bytes would belong to nobody."""
    entry = b'"z":{"dtype":"U8","shape":[500],"data_offsets":[0,500]}'
    text = b"{" + entry + b"," + entry.replace(b"[0,500]", b"[500,1000]") + b"}"
    data = len(text).to_bytes(8, "little") + text + bytes(1000)
    (pack / "b.safetensors").write_bytes(data)
    assert faults(pack) == ["b.safetensors: lists z twice; it is damaged or was edited"]


PLACED = {f"t{number}": f"s{number % 3}.safetensors" for number in range(20_000)}
BY_SHARD = {
    f"s{rest}.safetensors": {name for name, shard in PLACED.items() if shard[1] == str(rest)}
    for rest in range(3)
}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"weight_map": PLACED}),
        json.dumps({"metadata": {"total_size": 1}, "weight_map": PLACED}, indent=2),
        json.dumps({"weight_map": PLACED, "metadata": {"x": [1, {"y": "z"}]}}, indent=1),
        json.dumps({"weight_map": PLACED}, separators=(",", ":")),
    ],
)
def test_an_index_is_read_whatever_its_style(text: str) -> None:
    """In pieces where it is long and flat: the pieces are what one value would be."""
    assert len(text) > pack_verify.PIECE
    assert pack_verify.parse_index(text) == BY_SHARD


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({',"': "a.safetensors", "b": "a.safetensors"}, "a comma begins a name"),
        ({'x"y': "a.safetensors", "b\\": "a.safetensors"}, "a name has quotes or a backslash"),
        ({"x}y": "a.safetensors", "{": "a.safetensors"}, "a name has braces"),
        ({"weight_map": "a.safetensors", "ü": "b.safetensors"}, "a name is the key's"),
    ],
)
def test_odd_names_in_an_index_are_read_right(names: dict[str, str], why: str) -> None:
    for padding in (0, 20_000):
        placed = {**dict.fromkeys((f"t{n}" for n in range(padding)), "p.safetensors"), **names}
        wanted: dict[str, set[str]] = {}
        for tensor, shard in placed.items():
            wanted.setdefault(shard, set()).add(tensor)
        for ascii_only in (True, False):
            text = json.dumps({"weight_map": placed}, ensure_ascii=ascii_only)
            assert pack_verify.parse_index(text) == wanted, why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no index"),
        ("[]", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": {"b": "c"}}}', "has no weight_map"),
        ('{"weight_map": {"a": "s.safetensors",}}', "is no index"),
        ('{"weight_map": {"a": "s.safetensors"', "is no index"),
        ('{"weight_map": {"a": "s.safetensors", "a": "t.safetensors"}}', "lists a twice"),
        ("<html>sign in</html>", "is no index"),
    ],
)
def test_what_is_no_index_is_refused(text: str, words: str) -> None:
    with pytest.raises(pack_verify.BadIndex, match=words):
        pack_verify.parse_index(text)


@pytest.fixture
def downloaded(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack as the fetcher leaves it: the record beside it, every file verified."""
    root = tmp_path_factory.mktemp("packs") / "rev"
    pack.rename(root)
    kept = record(root)
    for name, row in kept["files"].items():
        row |= {"verified": "then", "mtime_ns": (root / name).stat().st_mtime_ns}
    store.write_json(pack_verify.state_path(root), kept)
    return root


def full(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    pack_verify.main(["--pack-root", str(root), "--full", "--json", "--workers", "1"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def spoil(path: Path) -> None:
    """Other bytes, with size and time stamp as they were."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_bad_file_is_the_only_one_to_be_fetched_again(
    downloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = store.read_json_or(pack_verify.state_path(downloaded), {})["files"]
    assert pack_verify.touched(downloaded, files, None) == []
    spoil(downloaded / "b.safetensors")
    assert full(downloaded, capsys)["ok"] is False
    files = store.read_json_or(pack_verify.state_path(downloaded), {})["files"]
    assert [name for name, row in files.items() if not row["verified"]] == ["b.safetensors"]
    (finding,) = pack_verify.touched(downloaded, files, None)
    assert str(finding) == "b.safetensors: is to be verified again"


def test_a_check_that_was_stopped_goes_on(
    downloaded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had read is not read again, unless it changed in the meantime."""
    real, read = pack_verify.hash_of, []

    def dying(path: Path, facts: Any) -> Any:
        if path.name == "a.safetensors":
            raise KeyboardInterrupt
        read.append(path.name)
        return real(path, facts)

    monkeypatch.setattr(pack_verify, "hash_of", dying)
    with pytest.raises(KeyboardInterrupt):
        full(downloaded, capsys)
    assert sorted(read) == ["b.safetensors", pack_verify.INDEX]
    monkeypatch.setattr(pack_verify, "hash_of", real)
    found = full(downloaded, capsys)
    assert (found["ok"], found["hashed"], found["resumed"]) == (True, 1, 2)
    assert full(downloaded, capsys)["hashed"] == 3

    monkeypatch.setattr(pack_verify, "hash_of", dying)
    with pytest.raises(KeyboardInterrupt):
        full(downloaded, capsys)
    monkeypatch.setattr(pack_verify, "hash_of", real)
    spoil(downloaded / "b.safetensors")
    found = full(downloaded, capsys)
    assert (found["ok"], found["hashed"]) == (False, 2)


@pytest.fixture
def cache(downloaded: Path, tmp_path: Path) -> Path:
    """The same pack as the hub's own client keeps it: links to blobs that are named by hash."""
    files = store.read_json_or(pack_verify.state_path(downloaded), {})["files"]
    blobs, snapshot = tmp_path / "cache/blobs", tmp_path / "cache/snapshots/rev"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, row in files.items():
        digest = row.get("sha256") or row["blob_sha1"]
        (blobs / digest).write_bytes((downloaded / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_an_adopted_hub_cache_is_verified_by_the_names_of_its_blobs(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is written beside it: it is somebody else's."""
    found = full(cache, capsys)
    assert (found["ok"], found["hashed"]) == (True, 3)
    spoil((cache / "b.safetensors").resolve())
    before = sorted(cache.parents[1].rglob("*"))
    assert pack_verify.main(["--pack-root", str(cache), "--full", "--json"]) == 1
    out, said = capsys.readouterr()
    assert [one["file"] for one in json.loads(out)["findings"]] == ["b.safetensors"]
    assert "not ours to mend" in said
    assert sorted(cache.parents[1].rglob("*")) == before


def test_a_pack_that_is_named_by_nothing_cannot_be_hashed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file that is no blob is enough: half a verdict is none."""
    (cache / "extra.json").write_text("{}")
    assert pack_verify.main(["--pack-root", str(cache), "--full"]) == 3
    assert "only structure can be checked" in capsys.readouterr().err


def test_a_signal_ends_it_at_once(downloaded: Path) -> None:
    """In the middle of a file that never ends."""
    os.mkfifo(downloaded / "c.bin")
    kept = store.read_json_or(pack_verify.state_path(downloaded), {})
    kept["files"]["c.bin"] = {"size": 0, "sha256": "00"}
    store.write_json(pack_verify.state_path(downloaded), kept)
    words = [sys.executable, "-m", "dsv4.pack_verify", "--pack-root", str(downloaded), "--full"]
    library = str(Path(pack_verify.__file__).resolve().parents[1])
    child = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": library}, stderr=PIPE)
    progress = downloaded.with_name("rev.hashed")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(store.read_json_or(progress, {}).get("files", {})) == 3:
            break
        time.sleep(0.02)
    child.terminate()
    _, words_of_it = child.communicate(timeout=60)
    assert child.returncode == 128 + 15
    assert b"run it again" in words_of_it
    assert len(store.read_json_or(progress, {})["files"]) == 3
