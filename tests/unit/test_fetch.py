"""The fetcher against a loopback hub: what arrived is kept, what is wrong is named."""

import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial as bound
from pathlib import Path
from typing import Any

import pytest

from dsv4 import fetch, pack_verify, sizes, transfer, xet
from dsv4.hub import Refused, Unreachable
from tests.lab.hub import Hub

LIBRARY = Path(fetch.__file__).parents[1]
REPOSITORY = "lab/pack"
SHARD = "model-00002-of-00003.safetensors"


@dataclass
class Lab:
    """A hub with one repository, and a place to fetch to."""

    hub: Hub
    source: Path
    target: Path

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.hub.server_address[1]}"

    @property
    def revision(self) -> str:
        found = self.hub.catalogue.revision(REPOSITORY, "main")
        assert found
        return found[0]

    @property
    def root(self) -> Path:
        return self.target / "packs/pack" / self.revision

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.source.rglob("*") if path.is_file())

    def argv(self, *more: str, **spec: Any) -> list[str]:
        """Return the command's arguments; what is given replaces parts of the description."""
        value = {
            "schema": 1,
            "repo_id": REPOSITORY,
            "name": "pack",
            "revision": self.revision,
            "endpoint": self.endpoint,
            "transport": "http",
            "workers": 4,
            **spec,
        }
        (self.target / "packs").mkdir(parents=True, exist_ok=True)
        path = self.target / "spec.json"
        path.write_text(json.dumps(value))
        where = ["--spec", str(path), "--packs", str(self.target / "packs")]
        where += ["--progress", str(self.target / "progress.json")]
        return [*where, "--stall-s", "1", "--patience-s", "3", "--json", *more]

    def fetch(self, *more: str, **spec: Any) -> int:
        """Run the fetcher in this process."""
        before = signal.getsignal(signal.SIGTERM)
        try:
            return fetch.main(self.argv(*more, **spec))
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextlib.contextmanager
    def process(self, *more: str, **spec: Any) -> Iterator["subprocess.Popen[str]"]:
        """Run the fetcher as the unit does."""
        with subprocess.Popen(
            [sys.executable, "-m", "dsv4.fetch", *self.argv(*more, **spec)],
            env={**os.environ, "PYTHONPATH": str(LIBRARY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            try:
                yield running
            finally:
                running.kill()

    def fault(self, **fault: Any) -> None:
        """Play one fault."""
        self.hub.faults.set([{"times": None, "path": "/resolve/", **fault}])

    def served(self) -> int:
        """Return the bytes of files sent since the last call."""
        return int(self.hub.counters.report(clear=True)["bytes"])

    def progress(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.target / "progress.json").read_text())
        return value

    def record(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.root.with_suffix(".json").read_text())
        return value

    def assert_complete(self) -> None:
        """Compare with the source, by an independent route."""
        for path in self.source.rglob("*"):
            if path.is_file():
                assert (self.root / path.relative_to(self.source)).read_bytes() == path.read_bytes()
        assert not list(self.root.rglob(".*"))
        assert self.record()["complete"] is True


def shard(name: str, data: bytes, dtype: str = "U8", shape: list[int] | None = None) -> bytes:
    """Return a shard that holds one tensor."""
    row = {"dtype": dtype, "shape": shape or [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({name: row}).encode()
    return len(header).to_bytes(8, "little") + header + data


def make_source(root: Path, shard_bytes: int) -> Path:
    source = root / REPOSITORY / "files"
    (source / "extra").mkdir(parents=True)
    noise = random.Random(8899)
    placed = {}
    for number in range(1, 4):
        name = f"model-{number:05d}-of-00003.safetensors"
        (source / name).write_bytes(shard(f"t{number}", noise.randbytes(shard_bytes + number)))
        placed[f"t{number}"] = name
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (source / "config.json").write_text('{"a": 1}\n')
    (source / "empty.txt").write_bytes(b"")
    (source / "extra/notes.md").write_text("in a folder\n")
    return source


@contextlib.contextmanager
def serving(tmp_path: Path, shard_bytes: int = 1 << 20, **accounts: str | None) -> Iterator[Lab]:
    source = make_source(tmp_path / "hub", shard_bytes)
    tokens = {"token": None, "stranger": None, **accounts}
    with Hub(tmp_path / "hub", 0, **tokens) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            (tmp_path / "target").mkdir()
            yield Lab(hub, source, tmp_path / "target")
        finally:
            hub.shutdown()
            thread.join()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with serving(tmp_path) as found:
        yield found


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return value


def test_a_pack_is_fetched_whole_and_the_next_run_asks_for_nothing(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab.fetch() == 0
    lab.assert_complete()
    assert last(capsys)["bytes_fetched"] == lab.size == lab.served()
    assert {path.stat().st_mode & 0o777 for path in lab.root.rglob("*") if path.is_file()} == {
        0o644
    }
    assert (lab.root / "extra").stat().st_mode & 0o777 == 0o755
    assert lab.progress()["state"] == "done"
    assert lab.progress()["done_bytes"] == lab.progress()["total_bytes"] == lab.size
    assert lab.fetch() == 0
    assert last(capsys)["bytes_fetched"] == 0
    assert lab.hub.counters.report(clear=True)["requests"] == []


def test_the_record_has_the_hub_s_hashes(lab: Lab) -> None:
    assert lab.fetch() == 0
    files = lab.record()["files"]
    assert len(files[SHARD]["sha256"]) == 64
    assert files[SHARD]["blob_sha1"] is None
    assert len(files["config.json"]["blob_sha1"]) == 40
    assert all(row["verified"].endswith("Z") for row in files.values())


def on_disk(lab: Lab) -> dict[str, int]:
    """Return the bytes there are of each file, under its own name or in its partial."""
    found = {}
    for path in lab.root.rglob("*"):
        if path.is_file():
            name = path.name.split(".safetensors")[0].lstrip(".")
            found[name] = path.stat().st_size
    return found


def first_asked(lab: Lab) -> dict[str, int]:
    """Return at which byte the first question since the last call began, by file."""
    found: dict[str, int] = {}
    for request in lab.hub.counters.report(clear=True)["requests"]:
        if request["method"] == "GET" and "/resolve/" in request["path"]:
            name = Path(request["path"]).name.split(".safetensors")[0]
            start = re.match(r"bytes=(\d+)-", request["range"] or "bytes=0-")
            assert start
            found.setdefault(name, int(start[1]))
    return found


def test_killed_again_and_again_it_asks_for_no_byte_it_has(tmp_path: Path) -> None:
    """A kill may lose what was under way between two machines, and nothing that was on disk.

    Judged by what is asked for and not by what the hub sent: how much lies in the sockets at the
    moment of a kill is the load's doing (the share of it is measured by tests/bench/fetch.py).
    """
    noise = random.Random(5)
    with serving(tmp_path, shard_bytes=10 << 20) as lab:
        lab.fault(kind="slow", rate=3_000_000)
        had: dict[str, int] = {}
        for _ in range(5):
            with lab.process() as running:
                wait_until(bound(has_grown, lab, sum(on_disk(lab).values())))
                time.sleep(noise.uniform(0.0, 0.4))
                running.send_signal(signal.SIGKILL)
                running.wait()
            asked = first_asked(lab)
            assert {name: asked[name] for name in asked if name in had} == {
                name: had[name] for name in asked if name in had
            }
            assert sum(on_disk(lab).values()) > sum(had.values())
            had = on_disk(lab)
        assert list(lab.root.glob(".*.part"))
        lab.hub.faults.set([])
        assert lab.fetch() == 0
        lab.assert_complete()
        asked = first_asked(lab)
        assert any(asked.values())
        assert all(start == had[name] for name, start in asked.items() if name in had)


def has_grown(lab: Lab, before: int) -> bool:
    return sum(on_disk(lab).values()) > before + 500_000


def wait_until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_not_on_the_disk_at_a_power_cut_is_hashed_anew(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size and a time stamp may outlive bytes; the next run of the same boot settles them."""
    assert lab.fetch() == 0
    lab.served()
    data = (lab.root / SHARD).read_bytes()
    facts = (lab.root / SHARD).stat()
    (lab.root / SHARD).write_bytes(bytes(len(data)))
    os.utime(lab.root / SHARD, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    monkeypatch.setattr(pack_verify, "BOOT", "the next one")
    assert lab.fetch() == 0
    lab.assert_complete()
    assert lab.served() == len(data)
    assert all(row["unsettled"] for row in lab.record()["files"].values())
    assert lab.fetch() == 0
    assert not any("unsettled" in row for row in lab.record()["files"].values())
    monkeypatch.setattr(pack_verify, "BOOT", "a third one")
    assert lab.fetch() == 0
    assert lab.served() == 0


def test_only_a_damaged_file_is_fetched_again(lab: Lab) -> None:
    assert lab.fetch() == 0
    lab.served()
    data = bytearray((lab.root / SHARD).read_bytes())
    data[5000:9096] = bytes(4096)
    (lab.root / SHARD).write_bytes(data)
    assert lab.fetch() == 0
    lab.assert_complete()
    assert lab.served() == len(data)


def test_a_file_whose_record_was_lost_is_hashed_not_fetched(lab: Lab) -> None:
    assert lab.fetch() == 0
    lab.served()
    lab.root.with_suffix(".json").unlink()
    assert lab.fetch() == 0
    assert lab.served() == 0
    lab.assert_complete()


def test_a_hub_that_asks_to_wait_is_not_asked_before(lab: Lab) -> None:
    lab.fault(kind="status", status=429, retry_after=1, times=2, path=SHARD)
    began = time.monotonic()
    assert lab.fetch() == 0
    assert time.monotonic() - began >= 1
    asked = [r["path"] for r in lab.hub.counters.report(clear=True)["requests"]]
    assert sum(path.endswith(SHARD) for path in asked) == 2 + 2  # refused; header and rest
    lab.assert_complete()


def test_the_listing_too_waits_as_told(lab: Lab) -> None:
    argv = lab.argv()
    lab.fault(kind="status", status=503, retry_after=1, times=1, path="/api/")
    assert fetch.main(argv) == 0
    lab.assert_complete()


def test_a_connection_that_is_cut_goes_on_where_it_was(lab: Lab) -> None:
    lab.fault(kind="cut", after=300_000, path=SHARD, times=3)
    assert lab.fetch() == 0
    lab.assert_complete()
    assert lab.served() == lab.size


def test_a_connection_that_stalls_is_opened_again(lab: Lab) -> None:
    lab.fault(kind="stall", after=300_000, path=SHARD, times=1)
    assert lab.fetch() == 0
    lab.assert_complete()
    assert lab.served() == lab.size


def test_a_trickle_counts_as_a_stall(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SLOWEST", 1e9)
    lab.fault(kind="slow", rate=200_000, path=SHARD, times=1)
    assert lab.fetch() == 0
    asked = lab.hub.counters.report(clear=True)["requests"]
    ranges = [r["range"] for r in asked if r["path"].endswith(SHARD) and r["method"] == "GET"]
    assert len(ranges) == 2
    lab.assert_complete()


def test_a_hub_that_is_asked_too_much_is_asked_by_fewer(lab: Lab) -> None:
    meter = transfer.Meter(at_work=7)
    for left in (4, 2, 1, 1):
        meter.fails(Unreachable("429", crowded=True))
        assert meter.workers == left
    meter.fails(Unreachable("503"))
    assert meter.workers == 1


def test_a_trickle_is_no_sign_of_life(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """However often a connection brings a few bytes, the download ends when that is all."""
    lab.fault(kind="cut", after=100, path=SHARD)
    assert lab.fetch("--patience-s", "1") == 3
    assert SHARD in last(capsys)["error"]


def test_a_trouble_is_shown_while_it_lasts() -> None:
    said: list[str] = []
    meter = transfer.Meter(tell=said.append)
    for _ in range(3):
        meter.fails(Unreachable("https://hub: status 503"))
    assert said == ["https://hub: status 503; trying again"]
    assert meter.trouble == "https://hub: status 503"
    meter.add(transfer.MOVED)
    assert meter.trouble is None


def test_a_hub_that_ignores_ranges_is_served_from_the_start(lab: Lab) -> None:
    lab.hub.faults.set(
        [
            {"kind": "cut", "after": 1000, "path": SHARD, "times": 1},
            {"kind": "norange", "path": SHARD, "times": None},
        ]
    )
    assert lab.fetch() == 0
    lab.assert_complete()


def test_wrong_bytes_are_fetched_again(lab: Lab) -> None:
    lab.fault(kind="wrong", at=7000, path=SHARD, times=1)
    assert lab.fetch() == 0
    lab.assert_complete()


def test_a_hub_that_keeps_sending_wrong_bytes_is_refused(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.fault(kind="wrong", at=7000, path=SHARD)
    assert lab.fetch() == 1
    assert SHARD in last(capsys)["error"]
    assert not (lab.root / SHARD).exists()
    assert lab.progress()["state"] == "failed"
    assert SHARD in lab.record()["error"]


def test_a_sign_in_page_never_becomes_a_file(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.fault(kind="html", path=SHARD)
    assert lab.fetch("--patience-s", "0.3") == 3
    assert "sign-in page" in last(capsys)["error"]
    assert not (lab.root / SHARD).exists()
    lab.hub.faults.set([])
    assert lab.fetch() == 0
    lab.assert_complete()


def test_a_page_in_place_of_the_api_is_named(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    argv = lab.argv("--patience-s", "0.3")
    lab.fault(kind="html", path="/api/")
    assert fetch.main(argv) == 3
    assert "not as a hub does" in last(capsys)["error"]


def test_large_files_may_come_from_elsewhere_without_the_token(tmp_path: Path) -> None:
    with serving(tmp_path, token="good") as lab:
        lab.fault(kind="redirect")
        (tmp_path / "token").write_text("good\n")
        assert lab.fetch("--token-file", str(tmp_path / "token")) == 0
        lab.assert_complete()


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", "gated and no token was given"),
        ("stranger\r\n", "has not accepted the terms"),
        ("mistyped", "does not accept the token"),
    ],
)
def test_a_gated_pack_says_what_is_missing_before_byte_0(
    tmp_path: Path, token: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, token="good", stranger="stranger") as lab:
        (tmp_path / "token").write_text(token)
        assert lab.fetch("--token-file", str(tmp_path / "token")) == 1
        out, err = capsys.readouterr()
        assert words in json.loads(out)["error"]
        assert words in err
        assert lab.served() == 0


def test_a_token_never_shows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, token="hf_secret") as lab:
        (tmp_path / "token").write_text("hf_secret")
        assert lab.fetch("--token-file", str(tmp_path / "token")) == 0
        written = [path for path in lab.target.rglob("*") if path.is_file()]
        assert not any(b"hf_secret" in path.read_bytes() for path in written)
        assert "hf_secret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"revision": "0" * 40}, "has no revision 0000"),
        ({"repo_id": "lab/other"}, "no such repository"),
    ],
)
def test_what_is_not_there_is_named(
    lab: Lab, spec: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab.fetch(**spec) == 1
    assert words in last(capsys)["error"]


def test_a_hub_that_is_not_there_gives_the_innermost_cause(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab.fetch("--patience-s", "0.2", endpoint="http://127.0.0.1:9") == 3
    assert "Connection refused" in last(capsys)["error"]


def test_two_downloads_never_meet(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    argv = lab.argv()
    with fetch.alone(lab.target / "packs"):
        assert fetch.main(argv) == 1
    assert "another download is at work" in last(capsys)["error"]


def test_leftovers_that_belong_to_no_file_are_removed(lab: Lab) -> None:
    lab.root.mkdir(parents=True)
    (lab.root / f".{SHARD}.0000.part").write_bytes(b"old")
    assert lab.fetch() == 0
    lab.assert_complete()


def test_a_record_of_another_repository_is_refused(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.root.parent.mkdir(parents=True)
    lab.root.with_suffix(".json").write_text('{"repo_id": "someone/else", "files": {}}')
    assert lab.fetch() == 1
    assert "belongs to someone/else" in last(capsys)["error"]


def test_a_record_of_another_revision_vouches_for_nothing(lab: Lab) -> None:
    """A directory was copied under this revision's name, record and all."""
    assert lab.fetch() == 0
    lab.served()
    other = lab.root.with_name("f" * 40)
    lab.root.rename(other)
    record = json.loads(lab.root.with_suffix(".json").read_text())
    record["revision"] = other.name
    del record["files"][SHARD]
    (other / SHARD).unlink()
    other.rename(lab.root)
    lab.root.with_suffix(".json").write_text(json.dumps(record))
    assert lab.fetch() == 0
    lab.assert_complete()
    assert lab.record()["revision"] == lab.revision


def test_stopped_by_the_unit_it_leaves_at_once_and_goes_on_later(tmp_path: Path) -> None:
    with serving(tmp_path, shard_bytes=4 << 20) as lab:
        lab.fault(kind="slow", rate=1_000_000)
        with lab.process() as running:
            wait_until(lambda: lab.hub.counters.bytes_sent > 500_000)
            running.terminate()
            assert running.wait(20) == 128 + signal.SIGTERM
        assert lab.progress()["state"] == "failed"
        lab.hub.faults.set([])
        assert lab.fetch() == 0
        assert lab.served() <= lab.size * 1.02


# The pack judged by its headers


def exl3_source(lab: Lab, bits: dict[int, int]) -> None:
    """Put one EXL3 expert into each shard, at these bits by layer."""
    placed = {}
    for number, (layer, of_layer) in enumerate(bits.items(), 1):
        tensor = f"layers.{layer}.ffn.experts.0.w1.trellis"
        name = f"model-{number:05d}-of-00003.safetensors"
        width = of_layer * 16
        data = random.Random(layer).randbytes((1 << 20) // width * width * 2)
        shape = [len(data) // width // 2, 1, width]
        (lab.source / name).write_bytes(shard(tensor, data, "I16", shape))
        placed[tensor] = name
    index = lab.source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    config = {"num_hidden_layers": len(bits), "topk_method": "noaux_tc"}
    (lab.source / "config.json").write_text(json.dumps(config))


EXL3 = {"shards": 3, "exl3": {"bits": 2, "layer_bits": {"1": 3}}}


def test_a_pack_as_expected_costs_no_byte_more_for_having_been_judged(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    exl3_source(lab, {0: 2, 1: 3, 2: 2})
    assert lab.fetch(expected=EXL3) == 0
    assert last(capsys)["bytes_fetched"] == lab.size == lab.served()
    lab.assert_complete()


def lose_a_shard(lab: Lab) -> None:
    (lab.source / SHARD).unlink()


def add_a_shard(lab: Lab) -> None:
    (lab.source / "more.safetensors").write_bytes(shard("more", bytes(1 << 20)))


def lose_the_index(lab: Lab) -> None:
    (lab.source / "model.safetensors.index.json").unlink()


def rename_a_tensor(lab: Lab) -> None:
    (lab.source / SHARD).write_bytes(shard("t9", bytes(1 << 20)))


def put_a_pointer(lab: Lab) -> None:
    (lab.source / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def cut_a_shard(lab: Lab) -> None:
    data = (lab.source / SHARD).read_bytes()
    (lab.source / SHARD).write_bytes(data[:-5])


def three_bits_where_two_are_expected(lab: Lab) -> None:
    exl3_source(lab, {0: 3, 1: 3, 2: 2})


def without_topk_method(lab: Lab) -> None:
    exl3_source(lab, {0: 2, 1: 3, 2: 2})
    (lab.source / "config.json").write_text('{"num_hidden_layers": 3}')


def with_code(lab: Lab) -> None:
    (lab.source / "modeling.py").write_text("import os\n")


@pytest.mark.parametrize(
    ("spoil", "expected", "words"),
    [
        (lose_a_shard, {}, f"index.json names {SHARD}, which the hub has not"),
        (lose_a_shard, {"shards": 3}, "2 shards where 3 are expected"),
        (add_a_shard, {}, "more.safetensors is in no index"),
        (lose_the_index, {}, "is missing, and 3 shards need one"),
        (rename_a_tensor, {}, f"{SHARD}: lacks t2"),
        (put_a_pointer, {}, f"{SHARD} it is a git-lfs pointer"),
        (cut_a_shard, {}, f"{SHARD} is cut short by 5 bytes"),
        (lambda _: None, EXL3, "no shard holds EXL3 experts"),
        (three_bits_where_two_are_expected, EXL3, "layer 0 has 3 bits, not 2"),
        (without_topk_method, EXL3, "topk_method must be noaux_tc"),
        (with_code, {}, "holds program code (modeling.py)"),
    ],
)
def test_a_pack_that_is_not_the_one_expected_is_refused_before_its_bulk(
    lab: Lab,
    spoil: Callable[[Lab], None],
    expected: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(lab)
    assert lab.fetch(expected=expected) == 1
    assert words in last(capsys)["error"]
    assert lab.served() < 100_000


def test_a_header_that_was_damaged_on_its_way_is_fetched_again(lab: Lab) -> None:
    lab.fault(kind="wrong", at=9, path=SHARD, times=1)
    assert lab.fetch() == 0
    lab.assert_complete()


# Leftovers and other revisions


def test_what_another_revision_has_is_not_fetched_again(lab: Lab) -> None:
    assert lab.fetch() == 0
    before = lab.root
    lab.served()
    (lab.source / "config.json").write_text('{"a": 2}\n')
    assert lab.root != before
    assert lab.fetch() == 0
    lab.assert_complete()
    assert lab.served() == len('{"a": 2}\n')
    assert (before / "config.json").read_text() == '{"a": 1}\n'


def test_what_arrived_for_another_revision_is_gone_on_with(lab: Lab) -> None:
    cut = {"kind": "cut", "after": 500_000, "path": SHARD, "times": 2}
    lab.hub.faults.set([cut, {"kind": "status", "status": 503, "path": SHARD, "times": None}])
    assert lab.fetch("--patience-s", "0.3") == 3
    lab.served()
    (lab.source / "config.json").write_text('{"a": 2}\n')
    lab.hub.faults.set([])
    assert lab.fetch() == 0
    lab.assert_complete()
    assert 0 < lab.served() < (lab.source / SHARD).stat().st_size


def test_leftovers_of_other_clients_and_killed_writes_are_removed(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = lab.root / ".cache/huggingface/download/x.1234.incomplete"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(bytes(300_000))
    (lab.root / f"{SHARD}.incomplete").write_bytes(b"1")
    (lab.root.parent / f".{lab.root.name}.json.k1ll3d").write_bytes(b"{")
    xet.home(lab.root).mkdir()
    assert lab.fetch() == 0
    lab.assert_complete()
    assert sorted(path.name for path in lab.root.parent.iterdir()) == [
        lab.root.name,
        f"{lab.root.name}.json",
    ]
    assert "removed 4 leftovers of earlier tries, 0.3 MB" in capsys.readouterr().err


def test_what_belongs_to_another_user_is_said_with_the_way_out(tmp_path: Path) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "new"))
    assert fetch.words_of(error) == (
        f"{tmp_path}/new: may not be written, {tmp_path} belongs to root; give it back:"
        " sudo chown -R dsv4-fetch: /var/lib/dsv4/packs/*/"
    )


def test_a_failure_that_cannot_be_looked_into_is_still_said(tmp_path: Path) -> None:
    """Where `stat` fails for another reason than absence: closed to us, or no name at all."""
    path = tmp_path / ("x" * 300)
    with pytest.raises(OSError, match="too long"):
        path.exists()
    words = fetch.words_of(PermissionError(errno.EACCES, "Permission denied", str(path)))
    assert f"{tmp_path} belongs to root" in words


# Xet


def test_a_file_the_hub_has_not_in_xet_comes_over_plain_http(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab.fetch("--stall-s", "30", transport="xet") == 0
    lab.assert_complete()
    assert lab.progress()["transport"] == "xet"
    assert "xet failed" not in capsys.readouterr().err


def test_xet_brings_what_the_hub_has_in_xet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real hf_xet, and a storage service that speaks to it."""
    with serving(tmp_path, token="good") as lab:
        (tmp_path / "token").write_text("good")
        lab.fault(kind="xet")
        token = ["--token-file", str(tmp_path / "token")]
        assert lab.fetch("--stall-s", "30", *token, transport="xet", workers=2) == 0
        lab.assert_complete()
        assert lab.progress()["transport"] == "xet"
        assert lab.progress()["done_bytes"] == lab.size
        assert lab.served() < 200_000  # small files and headers; the rest came by xet
        assert "xet failed" not in capsys.readouterr().err
        assert not xet.home(lab.root).exists()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("xet-refused", "403"),
        ("xet-silent", "nothing arrived for 3 s"),
        ("xet-wrong", "its bytes are not the hub's"),
    ],
)
def test_a_xet_transfer_that_fails_or_stalls_goes_on_over_plain_http(
    lab: Lab, fault: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real hf_xet, sent to a server that refuses all, never answers, or sends other bytes."""
    lab.fault(kind=fault)
    assert (
        lab.fetch("--stall-s", "3" if fault == "xet-silent" else "30", transport="xet", workers=1)
        == 0
    )
    lab.assert_complete()
    assert lab.progress()["transport"] == "http"
    error = capsys.readouterr().err
    assert error.count("xet failed") == 1
    assert words in error
    assert "going on over plain HTTP" in error
    assert not xet.home(lab.root).exists()


# Space


@contextlib.contextmanager
def small_disk(directory: Path, mebibytes: int) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    size = f"size={mebibytes}m,mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_pack_that_does_not_fit_is_refused_before_byte_0(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(lab.target / "packs", 2):
        assert lab.fetch() == 1
        error = last(capsys)["error"]
        assert "GiB" in error or "MiB" in error
        assert "is free there" in error
        assert lab.served() == 0


def test_leftovers_of_another_revision_make_room(lab: Lab) -> None:
    with small_disk(lab.target / "packs", 5):
        other = lab.root.with_name("f" * 40)
        other.mkdir(parents=True)
        (other / ".model.safetensors.abcd.part").write_bytes(bytes(3 << 20))
        assert lab.fetch() == 0
        assert not list(other.iterdir())


def test_a_disk_that_fills_up_stops_cleanly_and_goes_on_later(tmp_path: Path) -> None:
    with serving(tmp_path, shard_bytes=2 << 20) as lab, small_disk(lab.target / "packs", 8):
        lab.fault(kind="slow", rate=2_000_000)
        with lab.process() as running:
            wait_until(lambda: lab.hub.counters.bytes_sent > 300_000)
            filler = lab.target / "packs/filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as out:
                while True:
                    out.write(bytes(1 << 16))
            out_text, err_text = running.communicate(timeout=20)
        assert running.returncode == 1
        assert "the disk is full" in json.loads(out_text)["error"]
        assert "Traceback" not in err_text
        filler.unlink()
        lab.hub.faults.set([])
        assert lab.fetch() == 0
        lab.assert_complete()
        assert lab.served() <= lab.size * 1.02 + 4 * 65536


# Resolving, and the description


def test_a_branch_is_resolved_to_a_commit(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["--resolve", REPOSITORY, "--endpoint", lab.endpoint]) == 0
    assert last(capsys) == {"ok": True, "revision": lab.revision}
    assert fetch.main(["--resolve", "lab/none", "--endpoint", lab.endpoint]) == 1
    assert "no such repository" in last(capsys)["error"]
    assert fetch.main(["--resolve", "not a name", "--endpoint", lab.endpoint]) == 1


GOOD: dict[str, Any] = {"repo_id": "o/n", "name": "pack", "revision": "a" * 40}


def test_a_description_has_defaults() -> None:
    spec = fetch.parse_spec(GOOD)
    assert (spec.endpoint, spec.workers) == (fetch.choose_endpoint(None), 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repo_id": "just-a-name"}, "repo_id: must be OWNER/NAME"),
        ({"name": "../x"}, "name: must be a plain directory name"),
        ({"name": ".."}, "name: must be"),
        ({"revision": "main"}, "revision: must be a commit of 40"),
        ({"endpoint": "127.0.0.1:1"}, "endpoint: must begin with"),
        ({"transport": "pigeon"}, "transport: must be http or xet"),
        ({"expected": {"shards": "many"}}, "expected: cannot be read"),
        ({"workers": 0}, "workers: must be 1 to 16"),
        ({"environment": {"PATH": "/x"}}, "PATH is not for the download"),
    ],
)
def test_a_wrong_field_of_a_description_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        fetch.parse_spec({**GOOD, **change})


def test_a_missing_or_broken_description_is_told_apart(tmp_path: Path) -> None:
    argv = ["--packs", str(tmp_path), "--progress", str(tmp_path / "p.json"), "--spec"]
    assert fetch.main([*argv, str(tmp_path / "none.json")]) == 1
    (tmp_path / "broken.json").write_text("{")
    assert fetch.main([*argv, str(tmp_path / "broken.json")]) == 1


def test_sizes_are_given_in_both_units() -> None:
    assert sizes.both_units(101_440_000_000) == "101.4 GB (94.5 GiB)"
