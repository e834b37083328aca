"""From a blank machine to an answer, and no change the second time."""

import json

from tests.e2e.spark import PYINFRA, Spark
from tests.lab import places, state


def test_a_dry_run_on_the_bare_machine_succeeds(spark: Spark) -> None:
    """A first look changes nothing and needs nothing of ours to be there."""
    before = spark.manifest()
    done = spark.deploy("--dry")
    assert done.status == 0, done.output
    assert spark.manifest() == before


def test_the_first_run_ends_with_a_serving_model(spark: Spark) -> None:
    """One command, from blank to the right answer."""
    spark.deploy().require()
    assert "Paris" in spark.ask()
    assert spark.show("ActiveState") == "active"
    assert spark.show("ActiveState", "dsv4-watchdog.service") == "active"


def test_the_second_run_changes_nothing(spark: Spark) -> None:
    """A settled machine is left alone: no change counted, no file touched, no restart."""
    before, started = spark.manifest(), spark.show("InvocationID")
    done = spark.deploy().require()
    assert done.totals["success"] == 0, done.changed
    assert done.totals["error"] == 0
    assert spark.manifest() == before
    assert spark.show("InvocationID") == started


def test_the_engine_is_an_unprivileged_hardened_process(spark: Spark) -> None:
    """The engine runs as its own user, may not gain privileges, and cannot write the pack."""
    pid = spark.show("MainPID")
    status = spark.root(f"cat /proc/{pid}/status")
    assert "NoNewPrivs:\t1" in status
    assert spark.root(f"stat -c %U /proc/{pid}") == "dsv4"
    refused = spark.root(
        "sudo -u dsv4 touch /var/lib/dsv4/packs/x /var/lib/dsv4/views/x /opt/dsv4/x 2>&1; true"
    )
    assert refused.count("Permission denied") == 3, refused


def test_the_engine_has_the_environment_that_was_meant(spark: Spark) -> None:
    """systemd reads the file in its own way; what it hands over is what stands there."""
    text = spark.root("grep -v '^#' /etc/dsv4/environment")
    given = spark.root(f"tr '\\0' '\\n' < /proc/{spark.show('MainPID')}/environ").splitlines()
    assert set(text.splitlines()) <= set(given)
    names = {line.partition("=")[0] for line in given}
    assert not names & {"CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "HF_TOKEN", "VLLM_API_KEY"}


def test_it_listens_on_loopback_only(spark: Spark) -> None:
    """No setting of the lab opens it, so nothing else may be bound."""
    port = state.read().machines[spark.name].serve_port
    listening = spark.root(f"ss -Hltn sport = :{port} | awk '{{print $4}}'")
    assert listening.split() == [f"127.0.0.1:{port}"]


def test_no_secret_and_no_json_in_the_unit(spark: Spark) -> None:
    """Values a unit file would mangle live in vLLM's own config file."""
    unit = spark.root("cat /etc/systemd/system/dsv4.service")
    assert "{" not in unit


def test_a_receipt_says_what_is_deployed(spark: Spark) -> None:
    """The first run left one, and one of the proof; the quiet second run none."""
    names = spark.root("ls /var/lib/dsv4/receipts").split()
    assert [name.rpartition("-")[2] for name in names] == ["verify.json", "deploy.json"]
    receipt = json.loads(spark.root(f"cat /var/lib/dsv4/receipts/{names[1]}"))
    assert receipt["deployed"]["route"] == "lab"
    assert receipt["deployed"]["runtime"] == spark.root("basename $(readlink /opt/dsv4/current)")
    copies = places.REPO / ".receipts" / spark.name
    assert {name: json.loads((copies / name).read_text()) for name in names}[names[1]] == receipt


def test_a_step_runs_alone(spark: Spark) -> None:
    """Each module of the run-book is a deploy of its own."""
    done = spark.deploy(deploy="deploy.service.apply").require()
    assert done.totals["success"] == 0


def test_bad_settings_stop_before_the_machine_is_touched(spark: Spark) -> None:
    """A comma for a point, and a key that is none: both named, nothing changed."""
    before = spark.manifest()
    done = spark.deploy("--data", "serve_gpu_memory_utilization=0,85", "--data", "serve_prot=8899")
    assert done.status != 0
    assert "serve_gpu_memory_utilization" in done.output
    assert "serve_prot" in done.output
    assert "Traceback" not in done.output
    assert spark.manifest() == before


def test_the_lab_asks_the_same_question(spark: Spark) -> None:
    """What `lab.sh up` prints at its end comes from this same machine."""
    assert places.VENV_PYTHON.with_name("pyinfra").exists()
    assert PYINFRA
    assert spark.ask() == spark.ask()
