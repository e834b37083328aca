"""The fetcher against a loopback hub: what arrived is kept, what is wrong is named."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsv4 import fetch, transfer
from dsv4.hub import Refused
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


def make_source(root: Path, shard_bytes: int) -> Path:
    source = root / REPOSITORY / "files"
    (source / "extra").mkdir(parents=True)
    noise = random.Random(8899)
    for number in range(1, 4):
        name = f"model-{number:05d}-of-00003.safetensors"
        (source / name).write_bytes(noise.randbytes(shard_bytes + number))
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


def test_killed_again_and_again_it_fetches_no_byte_twice(tmp_path: Path) -> None:
    """A kill may lose what was under way between two machines, and nothing that was on disk."""
    noise = random.Random(5)
    with serving(tmp_path, shard_bytes=10 << 20) as lab:
        lab.fault(kind="slow", rate=3_000_000)
        for _ in range(5):
            with lab.process() as running:
                began = lab.hub.counters.bytes_sent
                for _ in range(400):
                    if lab.hub.counters.bytes_sent > began + 500_000:
                        break
                    time.sleep(0.01)
                time.sleep(noise.uniform(0.0, 0.4))
                running.send_signal(signal.SIGKILL)
        parts = list(lab.root.glob(".*.part"))
        assert parts
        lab.hub.faults.set([])
        assert lab.fetch() == 0
        lab.assert_complete()
        requests = lab.hub.counters.report(clear=False)["requests"]
        assert any(request["range"] for request in requests)
        assert lab.size <= lab.served() <= lab.size * 1.02


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
    assert sum(path.endswith(SHARD) for path in asked) == 3
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


def test_stopped_by_the_unit_it_leaves_at_once_and_goes_on_later(tmp_path: Path) -> None:
    with serving(tmp_path, shard_bytes=4 << 20) as lab:
        lab.fault(kind="slow", rate=1_000_000)
        with lab.process() as running:
            for _ in range(400):
                if lab.hub.counters.bytes_sent > 500_000:
                    break
                time.sleep(0.01)
            running.terminate()
            assert running.wait(2) == 128 + signal.SIGTERM
        assert lab.progress()["state"] == "failed"
        lab.hub.faults.set([])
        assert lab.fetch() == 0
        assert lab.served() <= lab.size * 1.02


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
            for _ in range(400):
                if lab.hub.counters.bytes_sent > 300_000:
                    break
                time.sleep(0.01)
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
        ({"transport": "xet"}, "transport: must be http"),
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
    assert fetch.both_units(101_440_000_000) == "101.4 GB (94.5 GiB)"
