"""One change is only that change; and a change takes effect whatever the service is doing."""

from tests.e2e.spark import Spark

CONFIGURE = "Service | Configure the service"
RUN = "Service | Run the service"
ASK = "Verify | Verify what is served"
RECEIPT = "Receipt | Leave a receipt"


def limit(spark: Spark) -> str:
    """Return the model length the running engine says it has."""
    import json
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{spark.url}/v1/models", timeout=30) as response:
        return str(json.load(response)["data"][0]["max_model_len"])


def test_one_setting_is_one_file_and_one_restart(spark: Spark) -> None:
    """A changed length: the configuration, a restart, the proof, a receipt; nothing else."""
    before = spark.manifest()
    done = spark.deploy("--data", "serve_max_model_len=1024").require()
    assert set(done.changed) == {CONFIGURE, RUN, ASK, RECEIPT}
    after = spark.manifest()
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    assert changed == {"/etc/dsv4/serve.yaml"}
    assert limit(spark) == "1024"
    assert spark.show("NRestarts") == "0"


def test_a_setting_changed_while_the_model_loads_takes_effect(spark: Spark) -> None:
    """The unit is still starting when the next value comes: a queued restart replaces the start."""
    spark.root("systemctl restart --no-block dsv4")
    spark.wait_for("activating")
    spark.until(lambda: spark.show("MainPID") != "0")
    done = spark.deploy("--data", "serve_max_model_len=1536").require()
    assert RUN in done.changed
    assert limit(spark) == "1536"
    assert spark.deploy("--data", "serve_max_model_len=1536").require().totals["success"] == 0


def test_a_restart_that_was_lost_is_made_up_for(spark: Spark) -> None:
    """The file is in place but the deploy died before the restart: state decides, not events."""
    spark.root("sed -i 's/^max_model_len: .*/max_model_len: 1280/' /etc/dsv4/serve.yaml")
    done = spark.deploy("--data", "serve_max_model_len=1280").require()
    assert limit(spark) == "1280"
    assert RUN in done.changed


def test_back_to_the_inventory(spark: Spark) -> None:
    """Without the override the inventory's value comes back."""
    spark.deploy().require()
    assert limit(spark) == "2048"
    assert spark.deploy().require().totals["success"] == 0


def test_what_somebody_changed_by_hand_is_put_back(spark: Spark) -> None:
    """Owner, mode and content of every file are ours, and so is what was deleted."""
    before = spark.manifest()
    spark.root("chmod 777 /etc/dsv4/guard.json; chown dsv4 /etc/dsv4/environment")
    spark.root("rm /etc/systemd/system/dsv4-watchdog.service /etc/dsv4/record.json")
    spark.deploy().require()
    assert spark.manifest() == before
    assert spark.deploy().require().totals["success"] == 0


def test_a_deliberate_stop_stays_a_stop(spark: Spark) -> None:
    """The owner stopped it: the next deploy leaves it so, until told otherwise."""
    spark.root("systemctl stop dsv4")
    assert spark.deploy().require().totals["success"] == 0
    assert spark.show("ActiveState") == "inactive"
    assert spark.show("ActiveState", "dsv4-watchdog.service") == "inactive"
    spark.deploy("--data", "service_state=running").require()
    assert "Paris" in spark.ask()
