"""Day two: does it work, how fast is it, what was it before. Against the real engine."""

import json
from typing import Any

import pytest

from tests.e2e.spark import Spark
from tests.lab import places

DSV4 = "/opt/dsv4/bin/dsv4"
RECEIPTS = "/var/lib/dsv4/receipts"


@pytest.fixture(scope="module")
def served(spark: Spark) -> Spark:
    """The machine with a served model, also when these tests run by themselves."""
    if spark.ssh("systemctl is-active dsv4", check=False) != "active":
        spark.deploy("--data", "service_state=running").require()
    spark.deploy().require()  # a start by hand, in tests before these, is proven by the next deploy
    return spark


def newest(spark: Spark, kind: str) -> tuple[str, dict[str, Any]]:
    """Return the newest receipt of a kind: its name and what the machine has in it."""
    name = spark.root(f"ls {RECEIPTS} | grep -- -{kind}.json | tail -n 1")
    return name, json.loads(spark.root(f"cat {RECEIPTS}/{name}"))


def copy_of(spark: Spark, name: str) -> dict[str, Any]:
    """Return the controller's copy of a receipt."""
    found: dict[str, Any] = json.loads(
        (spark.checkout / ".receipts" / spark.name / name).read_text()
    )
    return found


def verify(spark: Spark, *argv: str) -> dict[str, Any]:
    """Return what `dsv4 verify` finds on the machine."""
    words = " ".join(argv)
    found: dict[str, Any] = json.loads(spark.root(f"{DSV4} verify --json {words}", check=False))
    return found


def test_verify_proves_the_runtime_and_the_answers(served: Spark) -> None:
    """Each finding is shown; the receipt is here and there, and nothing was changed."""
    before = served.manifest()
    done = served.deploy(deploy="deploy/verify.py").require()
    for words in (
        "every file is as it was built",
        "torch is there",
        "'The capital of France is' -> 'Paris.'",
        "ok: stream: first token after",
        "ok: image: refused, as it should be",
    ):
        assert words in done.output
    name, receipt = newest(served, "verify")
    assert copy_of(served, name) == receipt
    assert receipt["results"]["ok"] is True
    assert receipt["runtime"]["id"] == served.root("basename $(readlink /opt/dsv4/current)")
    assert receipt["kernel"] == served.ssh("uname -r")
    assert len(receipt["revision"]) == 40
    assert served.manifest() == before


def test_a_changed_byte_is_a_finding(served: Spark) -> None:
    """In a file that nothing imports; put back, all is well again."""
    path = "/opt/dsv4/current/lib/python3.11/site-packages/vllm/collect_env.py"
    served.root(f"cp -p {path} /run/kept; printf '\\n' >>{path}")
    try:
        found = verify(served, "--only runtime", "--no-receipt")
    finally:
        served.root(f"cp -p /run/kept {path}; rm /run/kept")
    assert found["ok"] is False
    (finding,) = [it for it in found["findings"] if it["state"] == "fault"]
    assert "vllm/collect_env.py differs from its RECORD" in finding["text"]
    assert verify(served, "--only runtime", "--no-receipt")["ok"] is True
    assert served.deploy().require().totals["success"] == 0


def test_a_bench_of_the_real_engine(served: Spark) -> None:
    """vLLM's own client and ours agree with the engine's counters; a picture lies beside."""
    few = ("--data", "bench_streams=1,2", "--data", "bench_output_tokens=24")
    done = served.deploy(*few, deploy="deploy/bench.py")
    name, receipt = newest(served, "bench")
    results = receipt["results"]
    assert done.status == (0 if results["ok"] else 1), done.output
    assert [cell["streams"] for cell in results["cells"]] == [1, 2]
    for cell in results["cells"]:
        assert cell["completed"] == cell["requests"]
        assert cell["output_tokens"] == 24 * cell["requests"]
        assert cell["engine_output_tokens"] == cell["output_tokens"]
        assert cell["ttft_ms"] > 0
        assert cell["acceptance"] is None  # there is no draft
        assert "count" not in {flag["rule"] for flag in cell["flags"]}
    for answer in results["answers"]:
        assert "error" not in answer
        assert answer["tokens"] > 0
        assert 0 < answer["ttft_s"] <= answer["answer_s"]
    assert results["prefill"][0]["prompt_tokens"] == pytest.approx(893, rel=0.05)
    # What was in the page cache at its last start is up to the tests before
    assert any(load and load["ready_s"] > 0 for load in results["loads"].values())
    assert results["kv_cache_tokens"] > 0
    assert "not comparable" in done.output
    assert copy_of(served, name) == receipt
    picture = places.REPO / ".receipts" / served.name / name.replace(".json", ".png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The unit is transient: nothing of it is left
    assert served.show("LoadState", "dsv4-bench.service") == "not-found"
    assert served.deploy().require().totals["success"] == 0


def test_receipts_are_compared(served: Spark) -> None:
    """A changed setting shows by its name; nothing else of the settings does."""
    running = ("--data", "service_state=running")
    served.deploy(*running, "--data", "memory_soft_samples=7").require()
    served.deploy(*running, "--data", "memory_soft_samples=6").require()
    text = served.root(f"{DSV4} receipt compare --json", check=False)
    served.deploy().require()
    rows = {row["key"]: row for row in json.loads(text)["differences"]}
    changed = rows.pop("settings.memory_soft_samples")
    assert (changed["before"], changed["after"]) == (7, 6)
    assert not [key for key in rows if key.startswith("settings.")]
    assert "hashes.guard.json" in rows


def test_a_stopped_service_leaves_the_answer_open(served: Spark) -> None:
    """Nothing is wrong and nothing is proven: status 3, and what to do."""
    served.root("systemctl stop dsv4")
    status = served.root(f"{DSV4} verify --only text --no-receipt 2>&1; echo $?")
    served.root("systemctl start dsv4")
    assert status.splitlines()[-1] == "3"
    assert "is it running?" in status
