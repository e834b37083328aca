"""After a reboot the machine serves again by itself, and nothing is left to deploy."""

from tests.e2e.spark import Spark


def test_it_serves_again_after_a_reboot(spark: Spark) -> None:
    """No deploy is needed, and the next one has nothing to do."""
    before = spark.show("InvocationID")
    spark.root("systemctl reboot", check=False)

    def started_anew() -> bool:
        text = spark.root("cat /run/dsv4/started.json 2>/dev/null", check=False)
        return '"invocation"' in text and before not in text

    spark.until(started_anew, 180)
    spark.wait_for("active")
    assert "Paris" in spark.ask()
    done = spark.deploy().require()
    assert set(done.changed) <= {"Verify | Verify what is served"}
    assert spark.deploy().require().totals["success"] == 0
