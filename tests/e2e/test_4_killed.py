"""A deploy that is killed ten times ends where one that was left alone does."""

import random
import signal
import time

from tests.e2e.spark import Spark

SEED = 20260907
"""Fixed, so that a failure can be had again."""
PORTS = {"/etc/dsv4/serve.yaml", "/etc/dsv4/guard.json", "/opt/dsv4/share/prometheus/dsv4.yml"}
"""They hold the port, which is the one thing the two machines differ in."""


def test_ten_kills_and_the_same_end(spark: Spark, rough: Spark) -> None:
    """Whatever it was doing when it died, the next run goes on from there."""
    rng = random.Random(SEED)
    for number in range(10):
        running = rough.begin()
        time.sleep(rng.uniform(1, 4) if number < 5 else rng.uniform(4, 14))
        running.send_signal(signal.SIGKILL)
        running.communicate(timeout=30)
    rough.deploy().require()
    assert "Paris" in rough.ask()
    assert rough.deploy().require().totals["success"] == 0
    ours, theirs = spark.manifest(), rough.manifest()
    for path in ours.keys() | theirs.keys():
        if path in PORTS:
            continue
        if path == "/opt/dsv4/previous":
            continue
        assert ours.get(path) == theirs.get(path), path
