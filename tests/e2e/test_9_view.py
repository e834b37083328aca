"""The pack on the machine: damage healed, a pack of one's own served, old ones removed."""

import json
from typing import Any

from dsv4 import layout
from tests.e2e.spark import Spark

DSV4 = str(layout.DSV4)
SHARD = "model-00002-of-00004.safetensors"


def served(spark: Spark) -> str:
    """Return the directory of the served pack, as the machine's links say."""
    return spark.root(f"dirname $(readlink {layout.VIEW_CURRENT}/{SHARD})")


def tree(spark: Spark, root: str) -> str:
    """Return everything about a directory that a write to it would change."""
    return spark.root(f"find {root} -printf '%p %y %u %m %s %T@ %l\\n' | sort")


def fetched(spark: Spark) -> str:
    """Return what the last download says it had to bring."""
    lines = spark.root(f"journalctl -u {layout.UNIT_FETCH} -o cat | grep 'to bring'")
    return lines.splitlines()[-1]


def test_other_bytes_are_found_and_only_they_are_fetched_again(spark: Spark) -> None:
    """Four kilobytes in the middle of a shard, with size and time stamp as they were."""
    root = served(spark)
    spark.deploy().require()  # what tests before this have left: a reboot, another test's hub
    spark.root(
        f"cd {root} && touch -r {SHARD} /tmp/stamp && dd if=/dev/zero of={SHARD} bs=4096 seek=9"
        f" count=1 conv=notrunc status=none && touch -r /tmp/stamp {SHARD}"
    )
    assert spark.deploy().require().totals["success"] == 0, "only reading the bytes can tell"
    said = spark.root(f"{DSV4} pack_verify --full --json", check=False)
    found: dict[str, Any] = json.loads(said)
    assert [one["file"] for one in found["findings"]] == [SHARD]
    spark.deploy().require()
    assert ": 1 of " in fetched(spark)
    assert json.loads(spark.root(f"{DSV4} pack_verify --full --json"))["ok"] is True
    assert spark.deploy().require().totals["success"] == 0
    assert "Paris" in spark.ask()


def test_a_chown_is_healed_without_a_download(spark: Spark) -> None:
    """What root's restore or a chown over a parent directory leaves behind."""
    root = served(spark)
    before, brought = tree(spark, root), fetched(spark)
    spark.root(f"chown -R root:root {layout.PACKS} && chmod 666 {root}/config.json")
    spark.deploy().require()
    assert tree(spark, root) == before
    assert fetched(spark) == brought
    owners = spark.root(f"find {layout.PACKS} -mindepth 1 ! -name '.*' -printf '%u\\n' | sort -u")
    assert owners == layout.USER_FETCH
    assert spark.deploy().require().totals["success"] == 0


def test_a_pack_of_ones_own_is_served_and_never_written(spark: Spark) -> None:
    """In a Hub cache in a closed home directory: refused with what is closed, then served.

    By a name outside it, so that only the links tell the unit to show homes to the engine.
    """
    home = spark.ssh("echo $HOME")
    cache = f"{home}/hub/models--me--own"
    snapshot, own = f"{cache}/snapshots/{'a' * 40}", "/srv/own"
    spark.root(
        f"mkdir -p {cache}/blobs {snapshot} && cd {served(spark)} && for name in *; do"
        f" cp $name {cache}/blobs/$name && ln -s ../../blobs/$name {snapshot}/$name; done"
        f" && chown -R $(stat -c %U {home}): {home}/hub && chmod 750 {home}"
        f" && ln -s {snapshot} {own}"
    )
    before = tree(spark, cache)
    refused = spark.deploy("--data", f"pack_dir={own}")
    assert refused.status != 0
    assert f"dsv4 cannot read it: {home} may not be entered" in refused.output
    assert "Paris" in spark.ask()
    spark.root(f"chmod 755 {home}")
    spark.deploy("--data", f"pack_dir={own}").require()
    assert served(spark) == own
    assert "Paris" in spark.ask()
    assert tree(spark, cache) == before
    assert spark.deploy("--data", f"pack_dir={own}").require().totals["success"] == 0
    spark.deploy().require()
    assert served(spark).startswith(str(layout.PACKS))
    spark.root(f"rm -r {home}/hub {own}")


def test_what_nothing_serves_goes_when_asked(spark: Spark) -> None:
    root = served(spark)
    old = f"{layout.PACKS}/lab-tiny/{'b' * 40}"
    spark.root(f"cp -r {root} {old} && cp {root}.json {old}.json && chown -R dsv4-fetch: {old}*")
    assert "would go" in spark.root(f"{DSV4} pack_gc 2>&1")
    assert spark.deploy().require().totals["success"] == 0
    spark.deploy("--data", "pack_gc=true").require()
    names = spark.root(f"ls {layout.PACKS}/lab-tiny").split()
    assert sorted(names) == sorted([root.rpartition("/")[2], root.rpartition("/")[2] + ".json"])
    assert len(spark.root(f"ls -d {layout.VIEWS}/*/").split()) == 2, "the view and its link"
    assert "Paris" in spark.ask()
    assert json.loads(spark.root(f"{DSV4} census --json"))["ok"] is True


def test_the_model_is_counted_once_loaded(spark: Spark) -> None:
    """By the real engine, as the service's user; never beside the service."""
    command = f"{DSV4} census --loaded --json"
    refused: dict[str, Any] = json.loads(spark.root(command, check=False))
    assert "no memory for a second copy" in refused["error"]
    spark.root(f"systemctl stop {layout.UNIT}")
    found: dict[str, Any] = json.loads(spark.root(command))
    spark.root(f"systemctl start {layout.UNIT}")
    assert found["ok"] is True
    held = {row["component"] for row in found["loaded"]["rows"]}
    assert {"attention", "embedding", "norms"} <= held
    assert "unverified" in found["loaded"]["note"]
    owners = f"find {layout.CACHE} ! -user {layout.USER} -printf '%p '"
    assert spark.root(owners).split() == []
