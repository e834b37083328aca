"""Runtimes: an upgrade that fails touches nothing, one that succeeds can be undone.

An upgrade is a changed pin in the lock of another checkout, as it would be after a `git pull`.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.spark import Spark
from tests.lab import places

PACKAGE, NOW, OTHER, THIRD = "shellingham", "1.5.4", "1.5.3", "1.5.2"
BUILD = "Runtime | Build the runtime"
SWITCH = "Runtime | Put the runtime in service"
BUILDING = "dsv4-build.service"
DROP_IN = "/run/systemd/system/dsv4-build.service.d"
ENOUGH_MB = 3100
"""What the route asks for before it begins, and a little."""


def hash_of(version: str, into: Path) -> str:
    """Return the hash of a wheel as the machine's own index serves it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
    subprocess.run([*pip, f"{PACKAGE}=={version}"], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = into.glob(f"{PACKAGE}-{version}-*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def checkout(home: Path, version: str, digest: str) -> Path:
    """Return a copy of the repository whose lab lock has another pin."""
    names = subprocess.run(
        ["git", "-C", str(places.REPO), "ls-files", "-z"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(places.REPO / name, home / name, follow_symlinks=False)
    lock = home / "files/opt/dsv4/locks/lab.lock"
    text, count = re.subn(
        rf"{PACKAGE}=={re.escape(NOW)} (\\\n    --hash=sha256:\S+ ?)+",
        f"{PACKAGE}=={version} \\\\\n    --hash=sha256:{digest}",
        lock.read_text(),
    )
    assert count == 1
    lock.write_text(text)
    return home


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where wheels are brought to be hashed."""
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="module")
def upgrade(spark: Spark, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Spark:
    """The machine, to be deployed from a checkout with a changed pin."""
    home = checkout(tmp_path_factory.mktemp("upgrade"), OTHER, hash_of(OTHER, wheels))
    return replace(spark, checkout=home)


def current(spark: Spark) -> str:
    """Return the runtime in service."""
    return spark.ssh("readlink /opt/dsv4/current").removeprefix("runtimes/")


def previous(spark: Spark) -> str:
    """Return the one before."""
    return spark.ssh("readlink /opt/dsv4/previous").removeprefix("runtimes/")


def runtimes(spark: Spark) -> list[str]:
    """Return what is on disk."""
    return spark.ssh("ls /opt/dsv4/runtimes").split()


def wait_for_install(spark: Spark) -> None:
    """Wait until the build is in the middle of its install."""
    step = "grep -o 'install the locked' /run/dsv4/build.json"
    spark.until(lambda: spark.ssh(step, check=False) != "", 120)


@contextmanager
def watched(spark: Spark) -> Iterator[list[tuple[float, str]]]:
    """Ask the model again and again meanwhile, and note when it answered what."""
    answers: list[tuple[float, str]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.5):
            began = time.time()
            try:
                answers.append((began, spark.ask()))
            except OSError as error:
                answers.append((began, f"no answer: {error}"))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield answers
    finally:
        over.set()
        asking.join()


def test_a_wrong_hash_stops_before_anything_is_unpacked(spark: Spark, tmp_path: Path) -> None:
    """The file and both hashes are named, and the model goes on answering."""
    spark.wait_for("active")
    before, there = current(spark), runtimes(spark)
    wrong = replace(spark, checkout=checkout(tmp_path, NOW, "00" * 32))
    with watched(spark) as answers:
        done = wrong.deploy()
    assert done.status != 0
    assert f"{PACKAGE}=={NOW}: expected sha256:{'00' * 32}, got sha256:" in done.output
    assert "nothing of it was unpacked" in done.output
    assert answers
    assert all("Paris" in answer for _, answer in answers), answers
    assert current(spark) == before
    for name in set(runtimes(spark)) - set(there):
        assert spark.ssh(f"ls /opt/dsv4/runtimes/{name}/manifest.json", check=False) == ""


def test_a_full_disk_is_said_and_serving_goes_on(upgrade: Spark) -> None:
    """The disk fills in the middle of the install: one line, and room again is all it needs."""
    before = current(upgrade)
    upgrade.root(
        f"mkdir -p {DROP_IN}; printf '[Service]\\nTemporaryFileSystem=/opt/dsv4/runtimes:"
        f"size={ENOUGH_MB}M\\n' >{DROP_IN}/small.conf; systemctl daemon-reload"
    )
    try:
        running = upgrade.begin()
        wait_for_install(upgrade)
        pid = upgrade.show("MainPID", BUILDING)
        # The install goes on writing meanwhile, so what is free is asked again when it was less
        fill = "fallocate -l $(($(df --output=avail -B1 . | tail -1) - 200000000)) filler"
        upgrade.root(
            f"nsenter -t {pid} -m sh -c 'cd /opt/dsv4/runtimes; until {fill}; do :; done' 2>&1"
        )
        output, _ = running.communicate(timeout=300)
    finally:
        upgrade.root(f"rm -r {DROP_IN}; systemctl daemon-reload")
    assert running.returncode != 0
    assert "no space left on the disk; make room and run the deploy again" in output
    assert current(upgrade) == before
    assert "Paris" in upgrade.ask()


def test_a_killed_build_is_taken_up_and_the_model_answers_until_the_switch(
    spark: Spark, upgrade: Spark
) -> None:
    """The next run sweeps up, builds, switches; only the restart interrupts the answers."""
    before = current(spark)
    running = upgrade.begin()
    wait_for_install(upgrade)
    upgrade.root(f"systemctl kill --signal=KILL --kill-whom=all {BUILDING}")
    output, _ = running.communicate(timeout=120)
    assert running.returncode != 0
    assert BUILDING in output
    assert current(spark) == before

    with watched(spark) as answers:
        done = upgrade.deploy().require()
    assert {BUILD, SWITCH} <= set(done.changed)
    after = current(spark)
    assert after != before
    assert previous(spark) == before
    switched = float(spark.ssh("stat -c %.Y /opt/dsv4/current"))
    until = [answer for began, answer in answers if began < switched - 2]
    assert len(until) > 10
    assert all("Paris" in answer for answer in until), until
    assert after in spark.root("cat /run/dsv4/started.json")
    assert f"{PACKAGE}-{OTHER}.dist-info" in spark.ssh(
        "ls /opt/dsv4/current/lib/python3.11/site-packages"
    )
    assert "Paris" in spark.ask()
    assert upgrade.deploy().require().totals["success"] == 0


def test_one_command_goes_back_and_forward_again(spark: Spark, upgrade: Spark) -> None:
    """The links, the environment and the process follow; nothing is built."""
    after, before = current(spark), previous(spark)
    done = upgrade.deploy(deploy="deploy/rollback.py").require()
    assert BUILD not in done.changed
    assert (current(spark), previous(spark)) == (before, after)
    assert before in spark.root("cat /run/dsv4/started.json")
    assert before in spark.root("cat /etc/dsv4/environment")
    assert "Paris" in spark.ask()

    upgrade.deploy("--data", f"rollback_to={after}", deploy="deploy/rollback.py").require()
    assert (current(spark), previous(spark)) == (after, before)
    assert after in spark.root("cat /run/dsv4/started.json")
    assert "Paris" in spark.ask()
    assert upgrade.deploy().require().totals["success"] == 0


def test_what_somebody_changed_inside_is_built_anew(spark: Spark, upgrade: Spark) -> None:
    """A package put in shows on the next run, a byte changed elsewhere when all are checked."""
    site = "/opt/dsv4/current/lib/python3.11/site-packages"
    spark.root(f"printf '# mine\\n' >>{site}/vllm/version.py")
    assert upgrade.deploy().require().totals["success"] == 0
    found = json.loads(spark.root("/opt/dsv4/bin/dsv4 runtime --json", check=False))
    assert found["ok"] is False
    assert "vllm/version.py differs from its RECORD" in found["faults"][0]
    spark.root(f"rm -r {site}/{PACKAGE}-{OTHER}.dist-info")
    # Without a restart: what the engine has loaded is not at issue here
    done = upgrade.deploy("--data", "service_state=stopped").require()
    assert BUILD in done.changed
    assert spark.root(f"tail -n 1 {site}/vllm/version.py") != "# mine"
    assert json.loads(spark.root("/opt/dsv4/bin/dsv4 runtime --json"))["ok"] is True
    assert f"purging {PACKAGE}" not in done.output  # it is in the journal, where it belongs
    assert spark.root("find /opt/dsv4/runtimes -maxdepth 1 -name '*.changed'") == ""


def test_the_oldest_goes_and_cannot_be_gone_back_to(
    spark: Spark, wheels: Path, tmp_path: Path
) -> None:
    """Two are kept: the new one and the one before. What is left is named."""
    oldest, before = previous(spark), current(spark)
    third = replace(spark, checkout=checkout(tmp_path, THIRD, hash_of(THIRD, wheels)))
    third.deploy("--data", "service_state=stopped").require()
    newest = current(spark)
    assert sorted(runtimes(spark)) == sorted([before, newest])
    assert oldest not in spark.root("ls /var/lib/dsv4/cache")
    refused = third.deploy("--data", f"rollback_to={oldest}", deploy="deploy/rollback.py")
    assert refused.status != 0
    assert f"runtime {oldest} is not on the machine; complete are: {before}" in refused.output
    assert current(spark) == newest


def test_back_to_the_checkout(spark: Spark) -> None:
    """The inventory is what counts: the next run goes to what it asks for, and serves."""
    spark.deploy("--data", "service_state=running").require()
    assert "Paris" in spark.ask()
    assert spark.deploy().require().totals["success"] == 0
