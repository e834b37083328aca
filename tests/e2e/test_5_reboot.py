"""After a reboot the machine serves again by itself, and nothing is left to deploy."""

from tests.e2e.spark import Spark


def test_it_serves_again_after_a_reboot(spark: Spark) -> None:
    """No deploy is needed, and the next one has nothing to do."""
    boot = spark.root("cat /proc/sys/kernel/random/boot_id; cat /run/dsv4/started.json")
    spark.root("systemctl reboot", check=False)
    spark.until(
        lambda: (
            "boot_id" in (now := spark.root("cat /run/dsv4/started.json", check=False))
            and now not in boot
        ),
        180,
    )
    spark.wait_for("active")
    assert "Paris" in spark.ask()
    done = spark.deploy().require()
    assert set(done.changed) <= {"Verify | Ask the model"}
    assert spark.deploy().require().totals["success"] == 0
