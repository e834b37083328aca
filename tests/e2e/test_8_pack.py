"""The download through its unit: gated, killed, rebooted, on a full disk, over a bad line."""

import contextlib
import json
import random
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsv4 import layout
from tests.e2e.spark import Spark
from tests.lab.hub import Hub

UNIT = layout.UNIT_FETCH
REPOSITORY = "lab/big"
TOKEN = "hf_e2eSecret"
SHARDS, SHARD_BYTES = 3, 4 << 20
DROP_IN = f"{layout.SYSTEMD}/{UNIT}.d"  # has to outlive a reboot


@dataclass(frozen=True)
class Download:
    """A gated pack on a hub of this test's own, and the machine's unit told to fetch it."""

    spark: Spark
    hub: Hub
    size: int

    @property
    def commit(self) -> str:
        found = self.hub.catalogue.revision(REPOSITORY, "main")
        assert found
        return found[0]

    def wanted(self, name: str, **spec: Any) -> str:
        """Have the unit's description and token in place as the deploy puts them; return root."""
        value = {
            "schema": 1,
            "repo_id": REPOSITORY,
            "name": name,
            "revision": self.commit,
            "endpoint": f"http://127.0.0.1:{self.hub.server_address[1]}",
            "workers": 3,
            **spec,
        }
        home = layout.PACKS / name
        self.spark.root(
            f"install -d -o {layout.USER_FETCH} -g {layout.USER_FETCH} {home}"
            f" && printf %s {shlex.quote(json.dumps(value))} >{layout.FETCH_JSON}"
            f" && install -m 600 /dev/null {layout.HUB_TOKEN}"
            f" && printf %s {TOKEN} >{layout.HUB_TOKEN} && touch {layout.FETCH_WANTED}"
            f" && rm -f {layout.FETCH_PROGRESS}"
        )
        return f"{home}/{self.commit}"

    def start(self) -> None:
        self.spark.root(f"systemctl reset-failed {UNIT}; systemctl start --no-block {UNIT}")

    def done_bytes(self) -> int:
        """Return what the progress file says, 0 before there is one."""
        found = self.spark.ssh(f"cat {layout.FETCH_PROGRESS} 2>/dev/null || echo {{}}")
        return int(json.loads(found).get("done_bytes", 0))

    def progress(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.spark.ssh(f"cat {layout.FETCH_PROGRESS}"))
        return found

    def wait_done(self, root: str, limit_s: float = 60) -> None:
        self.spark.until(
            lambda: '"complete": true' in self.spark.ssh(f"cat {root}.json", check=False), limit_s
        )
        self.spark.wait_for("inactive", 20, UNIT)

    def assert_same(self, root: str) -> None:
        """Compare with the source, by sha256sum there and here."""
        listing = self.spark.ssh(f"cd {root} && find . -type f | sort | xargs sha256sum")
        found = {line[68:]: line[:64] for line in listing.splitlines()}
        wanted = {
            name: blob.sha256
            for name, blob in self.hub.catalogue.tree(
                self.hub.catalogue.branches(REPOSITORY)["main"]
            ).items()
            if blob.sha256
        }
        assert wanted
        assert {name: found.get(name) for name in wanted} == wanted
        assert not [name for name in found if "/." in f"/{name}"]


def make_pack(root: Path) -> int:
    files = root / REPOSITORY / "files"
    files.mkdir(parents=True)
    noise, placed = random.Random(8), {}
    for number in range(1, SHARDS + 1):
        name = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        row = {"dtype": "U8", "shape": [SHARD_BYTES], "data_offsets": [0, SHARD_BYTES]}
        header = json.dumps({f"t{number}": row}).encode()
        data = len(header).to_bytes(8, "little") + header + noise.randbytes(SHARD_BYTES)
        (files / name).write_bytes(data)
        placed[f"t{number}"] = name
    (files / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (files / "config.json").write_text("{}\n")
    return sum(path.stat().st_size for path in files.iterdir())


@pytest.fixture(scope="module")
def download(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Download]:
    """The unit, with a short patience; what the deploy had put there is put back."""
    root = tmp_path_factory.mktemp("hub")
    size = make_pack(root)
    before = spark.root(f"cat {layout.FETCH_JSON}")
    command = f"[Service]\\nExecStart=\\nExecStart={layout.DSV4} fetch --stall-s 3\\n"
    with Hub(root, 0, TOKEN, None) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            spark.root(
                f"mkdir -p {DROP_IN} && printf '{command}' >{DROP_IN}/e2e.conf"
                " && systemctl daemon-reload"
            )
            yield Download(spark, hub, size)
        finally:
            spark.root(
                f"systemctl stop {UNIT}; rm -rf {DROP_IN} {layout.PACKS}/e2e*"
                f" {layout.HUB_TOKEN} {layout.FETCH_WANTED}; systemctl daemon-reload;"
                f" systemctl reset-failed {UNIT}; printf '%s\\n' {shlex.quote(before)}"
                f" >{layout.FETCH_JSON}",
                check=False,
            )
            hub.shutdown()
            thread.join()


def test_a_bad_line_is_put_up_with(download: Download) -> None:
    """A hub that asks to wait, a connection that stalls, a cut, a damaged byte: each once."""
    root = download.wanted("e2e-line")
    download.hub.faults.set(
        [
            {"kind": "status", "status": 429, "retry_after": 1, "path": "/api/", "times": 1},
            {"kind": "stall", "after": 1 << 20, "path": "00001-of", "times": 3},
            {"kind": "cut", "after": 1 << 20, "path": "00002-of", "times": 3},
            {"kind": "wrong", "at": 2 << 20, "path": "00003-of", "times": 3},
        ]
    )
    download.start()
    download.wait_done(root)
    download.assert_same(root)
    journal = download.spark.root(f"journalctl -u {UNIT} -o cat --no-pager")
    assert "too many requests; it asks to wait 1 s" in journal
    assert "fetching this file again" in journal


def test_the_engine_can_write_neither_pack_nor_record(download: Download) -> None:
    """It parses what the download brought; it must not be able to change what is verified."""
    spark = download.spark
    root = f"{layout.PACKS}/e2e-line/{download.commit}"
    for path in (f"{root}/config.json", f"{root}.json", f"{layout.PACKS}/e2e-line"):
        test = f"setpriv --reuid {layout.USER} --regid {layout.USER} --clear-groups test -w {path}"
        assert spark.root(f"{test} && echo can || echo cannot") == "cannot", path


def test_killed_and_rebooted_it_goes_on_by_itself(download: Download) -> None:
    """The token survives the reboot and is gone afterwards; no byte on disk is asked for again."""
    spark = download.spark
    root = download.wanted("e2e-boot")
    download.hub.counters.report(clear=True)
    download.hub.faults.set([{"kind": "slow", "rate": 400_000, "path": "/resolve/", "times": None}])
    download.start()
    spark.until(lambda: download.done_bytes() > 1_500_000)
    spark.root(f"systemctl kill -s KILL {UNIT}")
    spark.until(lambda: spark.show("SubState", UNIT) == "auto-restart", 20)
    parts = f"cd {root} && find . -name '.*.part' -size +9k -printf '%f %s\\n'"
    had = dict(line.rsplit(" ", 1) for line in spark.ssh(parts).splitlines())
    assert had
    download.hub.counters.report(clear=True)
    download.start()
    spark.until(lambda: download.done_bytes() > 4_000_000)
    asked = download.hub.counters.report(clear=True)["requests"]
    for part, size in had.items():
        name = part.lstrip(".").split(".safetensors")[0]
        first = next(r for r in asked if name in r["path"] and r["method"] == "GET")
        assert first["range"] == f"bytes={size}-"
    spark.root("systemctl reboot", check=False)
    download.hub.faults.set([])
    download.wait_done(root, 120)
    download.assert_same(root)
    asked = download.hub.counters.report(clear=True)["requests"]
    assert any(request["range"] for request in asked)
    assert spark.root(f"ls {layout.HUB_TOKEN} {layout.FETCH_WANTED} 2>/dev/null || true") == ""
    boots = spark.root(f"journalctl -u {UNIT} -o cat --no-pager")
    assert TOKEN not in boots
    assert spark.root(f"grep -rl {TOKEN} /run /var/lib/dsv4 /etc/dsv4 || true") == ""


def test_a_disk_that_fills_up_stops_the_unit_and_it_resumes(download: Download) -> None:
    """It says so, is not started again by itself, and goes on when there is room."""
    spark, home = download.spark, f"{layout.PACKS}/e2e-full"
    mebibytes = (download.size >> 20) + 3
    with contextlib.ExitStack() as after:
        spark.root(f"mkdir -p {home} && mount -t tmpfs -o size={mebibytes}m tmpfs {home}")
        after.callback(spark.root, f"umount -l {home}", check=False)
        root = download.wanted("e2e-full")
        spark.root(f"chown {layout.USER_FETCH}: {home}")
        download.hub.faults.set(
            [{"kind": "slow", "rate": 1_500_000, "path": "/resolve/", "times": None}]
        )
        download.start()
        spark.until(lambda: download.done_bytes() > 1_000_000)
        spark.root(f"dd if=/dev/zero of={home}/filler bs=64k 2>/dev/null", check=False)
        spark.wait_for("failed", 60, UNIT)
        assert "the disk is full; free some space" in download.progress()["error"]
        assert spark.show("ExecMainStatus", UNIT) == "1"
        spark.root(f"rm {home}/filler")
        download.hub.faults.set([])
        download.hub.counters.report(clear=True)
        download.start()
        download.wait_done(root)
        download.assert_same(root)
        assert int(download.hub.counters.report(clear=True)["bytes"]) < download.size


@pytest.mark.parametrize(
    ("kind", "transport", "words"),
    [
        ("xet", "xet", "all verified"),
        ("xet-silent", "http", "xet failed (nothing arrived for 3 s); going on over plain HTTP"),
    ],
)
def test_xet_in_the_unit_s_sandbox(
    download: Download, kind: str, transport: str, words: str
) -> None:
    """The real hf_xet, hardened as the unit is; a storage service that never answers costs 3 s."""
    root = download.wanted(f"e2e-{kind}", transport="xet", workers=1)
    download.hub.counters.report(clear=True)
    download.hub.faults.set([{"kind": kind, "path": "/resolve/", "times": None}])
    download.start()
    download.wait_done(root)
    download.assert_same(root)
    assert download.progress()["transport"] == transport
    plain = int(download.hub.counters.report(clear=True)["bytes"])
    assert (plain < SHARD_BYTES) == (transport == "xet")
    journal = download.spark.root(f"journalctl -u {UNIT} -o cat --no-pager -n 20")
    assert words in journal
    download.hub.faults.set([])
