"""Every preset's flags, read by the deployed engine's own parser."""

import shlex

import pytest

from deploy import presets, settings
from dsv4 import serve_flags
from tests.e2e.spark import Spark
from tests.unit.test_flags import REMOTE

pytestmark = pytest.mark.e2e

PYTHON = "/opt/dsv4/current/bin/python"


def rendered() -> dict[str, str]:
    """Return serve.yaml of every preset, each as it is and with everything that adds a flag."""
    found = {}
    for preset in presets.ALL:
        route = "stable" if preset.accelerator == "cuda" else "lab"
        for name, more in (("", {}), ("-open", REMOTE)):
            chosen = settings.load({"route": route, "preset": preset.name, **more})
            found[f"{preset.name}{name}"] = chosen.serve_yaml_text()
    return found


def test_the_engine_takes_every_preset(spark: Spark) -> None:
    """The same release as route stable's, so the flags of its presets too."""
    folder = spark.ssh("mktemp -d")
    for name, text in rendered().items():
        spark.ssh(f"printf %s {shlex.quote(text)} > {folder}/{name}.yaml")
    program = shlex.quote(serve_flags.PARSE)
    home = f"env HOME={folder} VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1"
    spark.ssh(f"{home} {PYTHON} -I -B -c {program} {folder}/*.yaml && rm -r {folder}")


def test_a_flag_it_does_not_know_keeps_a_runtime_out_of_service(spark: Spark) -> None:
    """Asked of the runtime that is to serve; the link stays."""
    before = spark.ssh("readlink /opt/dsv4/current")
    said = spark.root(
        "printf 'model: /x\\nwatchdog-config: 1\\n'"
        " | /opt/dsv4/bin/dsv4 switch $(basename $(readlink /opt/dsv4/current)) --flags - 2>&1"
        " && echo switched",
        check=False,
    )
    assert "unrecognized arguments: --watchdog-config" in said, said
    assert said.endswith("nothing was switched")
    assert spark.ssh("readlink /opt/dsv4/current") == before
