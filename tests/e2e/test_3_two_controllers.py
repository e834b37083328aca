"""One deploy at a time, and a dead controller holds nothing."""

import signal
import time

from tests.e2e.spark import Spark


def test_a_second_controller_is_refused_with_the_name_of_the_first(spark: Spark) -> None:
    """The first is in the middle of a restart; the second learns who it is and changes nothing."""
    first = spark.begin("--data", "serve_max_model_len=1024")
    try:
        spark.until(lambda: spark.show("ActiveState") == "activating")
        second = spark.deploy("--data", "serve_max_model_len=512")
        assert second.status != 0
        assert "deploy lock" in second.output or "another deploy is at work" in second.output
        owner = spark.root("cat /run/dsv4/deploy.json")
        assert '"owner"' in owner
        assert "root" in second.output
    finally:
        output, _ = first.communicate(timeout=300)
    assert first.returncode == 0, output


def test_a_killed_controller_holds_nothing(spark: Spark) -> None:
    """The lock goes with the connection that took it."""
    first = spark.begin()
    spark.until(lambda: spark.show("ActiveState") == "activating", 120)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    time.sleep(1)
    spark.deploy().require()
    assert spark.deploy().require().totals["success"] == 0
