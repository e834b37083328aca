"""What the machine says of itself, and the way out. Last on its machine: nothing is left of us."""

import json
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.spark import Deployed, Spark, parse
from tests.unit.test_metrics_share import vllm_names

DSV4 = "/opt/dsv4/bin/dsv4"
REMOVE = "deploy/remove.py"
SEARCH = (
    "find / /run /dev/shm /var/cache /var/lib -xdev \\( -path /proc -o -path /sys -o"
    " -path /var/cache/dsv4/uv \\) -prune -o \\( -iname '*dsv4*' -o -nouser -o -nogroup \\) -print"
)
"""Names of ours anywhere, and files whose account is gone. Left out is the lab's own mount."""
NAMES_OF_THE_MACHINE = {
    *("hostname", "hosts", "ssh_host_ed25519_key.pub"),  # the lab's name for it begins like ours
    *("passwd-", "group-", "shadow-", "gshadow-"),  # Debian's own copies from before a userdel
}
KEPT = ("/var/lib/dsv4", "/var/cache/dsv4")


@pytest.fixture(scope="module")
def served(spark: Spark) -> Spark:
    """The machine with a served model, also when these tests run by themselves."""
    if spark.ssh("systemctl is-active dsv4", check=False) != "active":
        spark.deploy("--data", "service_state=running").require()
    spark.deploy().require()  # what tests before these left open is settled
    return spark


def planned(spark: Spark, deploy: str) -> Deployed:
    """Run a dry run as a person does, who is shown what would be done (with -y nobody is)."""
    done = subprocess.run(
        [word for word in spark.argv("--dry", deploy=deploy) if word != "-y"],
        cwd=spark.checkout,
        env=spark.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return parse(done.returncode, done.stdout, done.stderr)


def test_a_healthy_machine_says_so(served: Spark) -> None:
    """Here and there in the same words; nothing is found, and no deploy lock is taken for it."""
    assert served.root("systemctl list-units --failed --no-legend 'dsv4*'") == ""
    status = served.deploy(deploy="deploy/status.py").require()
    doctor = served.deploy(deploy="deploy/doctor.py").require()
    there = json.loads(served.root(f"{DSV4} status --json"))
    assert there["ok"] is True
    rows = {row["check"]: row for row in there["findings"]}
    assert rows.keys() >= {"service", "model", "runtime", "pack", "memory", "watchdog", "receipt"}
    assert f"[{served.name}] {rows['runtime']['line']}" in status.output
    said = served.root(f"{DSV4} doctor")
    assert said.splitlines()[0] == "nothing is wrong that this tool knows of"
    assert f"[{served.name}] {said.splitlines()[0]}" in doctor.output
    assert json.loads(served.root(f"{DSV4} doctor --json"))["causes"] == []


def test_an_owner_without_root_is_told_what_cannot_be_seen(served: Spark) -> None:
    """`dsv4 status` needs none; what it does not see it does not call fine."""
    there = json.loads(served.ssh(f"{DSV4} status --json", check=False))
    hidden = [row for row in there["findings"] if row["state"] == "skipped"]
    assert any("sudo dsv4 status" in row["text"] for row in hidden)
    assert not [row for row in there["findings"] if row["state"] == "fault"]


def test_the_engine_gives_the_metrics_that_the_dashboard_asks_for(served: Spark) -> None:
    """The record that the dashboard is tested with is what this engine says."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{served.url}/metrics", timeout=30) as response:
        text = response.read().decode()
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[:1] != "#"}
    assert {name for name in vllm_names() if "spec_decode" not in name} <= names
    scrape = served.ssh("cat /opt/dsv4/share/prometheus/dsv4.yml")
    assert f"127.0.0.1:{served.url.rpartition(':')[2]}" in scrape
    assert json.loads(served.ssh("cat /opt/dsv4/share/grafana/dsv4.json"))["title"]


def test_a_dry_removal_shows_and_changes_nothing(served: Spark) -> None:
    """Everything that would go, by name; the service goes on."""
    before, pid = served.manifest(), served.show("MainPID")
    done = planned(served, REMOVE)
    assert done.status == 0, done.output
    for line in ("stop unit dsv4.service", "remove account dsv4", "keep packs /var/lib/dsv4/packs"):
        assert line in done.output
    assert served.manifest() == before
    assert served.show("MainPID") == pid


def test_after_a_removal_nothing_is_left_but_what_is_kept(served: Spark) -> None:
    """No file, account, unit, process or log setting; the packs, byte for byte and root's."""
    packs = "cd /var/lib/dsv4/packs && find . -type f -print0 | sort -z | xargs -0 sha256sum"
    before = served.root(packs)
    done = served.deploy(deploy=REMOVE).require()
    assert done.changed == ("Removal | Take away what was put there",)
    left = served.root(SEARCH).splitlines()
    assert sorted(set(left)) == sorted(KEPT)
    assert served.root("ls -A /var/lib/dsv4") == "packs"
    assert served.root(packs) == before
    assert served.root("find /var/lib/dsv4 ! -user root -o ! -group root") == ""
    assert served.ssh("getent passwd | grep dsv4; getent group | grep dsv4", check=False) == ""
    assert served.ssh("systemctl list-units --all --no-legend 'dsv4*'") == ""
    assert served.ssh("systemctl list-unit-files --no-legend 'dsv4*'", check=False) == ""
    named = served.root("grep -rl dsv4 /etc", check=False).split()
    assert {path for path in named if Path(path).name not in NAMES_OF_THE_MACHINE} == set()
    for name in ("vllm", "VLLM", "/opt/dsv4"):
        assert served.root(f"pgrep -af {name} | grep -v pgrep", check=False) == ""


def test_a_second_removal_finds_nothing(served: Spark) -> None:
    """No change, and no trace of having looked."""
    done = served.deploy(deploy=REMOVE).require()
    assert done.totals["success"] == 0
    assert sorted(set(served.root(SEARCH).splitlines())) == sorted(KEPT)
    failed = served.deploy(deploy="deploy/status.py")
    assert failed.status == 1
    assert "run deploy/full.py first" in failed.output
