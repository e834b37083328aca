"""A bench tells a measurement from what only looks like one."""

import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from deploy import plot
from dsv4 import (
    bench,
    bench_report,
    bench_rules,
    engine_metrics,
    layout,
    loads,
    receipt,
    reference,
    store,
)
from tests.unit import vllm_client
from tests.unit.liar import MODEL, Lie, engine

# Counters


def test_counters_are_read_whatever_stands_around_them() -> None:
    """Labels, engines to be added up, comments, times, and lines that are none."""
    text = """# HELP vllm:generation_tokens_total Tokens
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a b}"} 10.0
vllm:generation_tokens_total{engine="1",model_name="m"} 5 1700000000000
vllm:kv_cache_usage_perc 0.25
vllm:broken{engine="0"} x
nonsense
vllm:num_requests_running{engine="0"} NaN
"""
    found = engine_metrics.totals(text)
    assert found[engine_metrics.GENERATED] == 15
    assert found[engine_metrics.KV_USE] == 0.25
    assert "nonsense" not in found


def test_what_is_not_counted_is_unknown_and_not_nought() -> None:
    """An engine without a draft has no acceptance; a restarted one has no difference."""
    nothing = engine_metrics.delta({}, {})
    assert nothing == engine_metrics.Delta(None, None, None, None, None, None)
    before = {engine_metrics.GENERATED: 100.0, engine_metrics.DRAFTED: 30, engine_metrics.DRAFTS: 9}
    after = {
        engine_metrics.GENERATED: 20.0,
        engine_metrics.DRAFTS: 19,
        engine_metrics.DRAFTED: 60,
        engine_metrics.ACCEPTED: 15,
    }
    change = engine_metrics.delta(before, after)
    assert change.generated is None
    assert change.acceptance == 0.5
    assert change.tokens_per_step == 2.5


# Rules

GOOD: dict[str, Any] = {
    "streams": 4,
    "requests": 8,
    "completed": 8,
    "failed": 0,
    "seconds": 20.0,
    "output_tokens": 2048.0,
    "engine_output_tokens": 2048.0,
    "asked_tokens": 2048,
    "tokens_per_s": 102.4,
    "peak_tokens_per_s": 120.0,
    "stream_tokens_per_s": 30.0,
    "ttft_ms": 500.0,
    "cached_share": 0.0,
    "running_peak": 4.0,
    "max_num_seqs": 16,
    "preempted": 0.0,
}


def rules(**changes: Any) -> dict[str, bool]:
    """Return the rules that a changed cell breaks, and whether they are fatal."""
    return {flag.rule: flag.fatal for flag in bench_rules.of_cell({**GOOD, **changes})}


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, {}),
        ({"peak_tokens_per_s": 30.0}, {"peak": False}),
        ({"peak_tokens_per_s": 30.0, "seconds": 1.0}, {}),
        ({"output_tokens": 512.0, "asked_tokens": 512}, {"count": True}),
        ({"engine_output_tokens": 512.0}, {"count": True}),
        ({"engine_output_tokens": 0.0}, {"count": True}),
        ({"engine_output_tokens": None}, {}),
        ({"cached_share": 0.9}, {"prefix cache": True}),
        ({"cached_share": None}, {}),
        ({"failed": 1, "completed": 7}, {"failed": True}),
        ({"completed": 0, "failed": 8}, {"failed": True}),
        ({"ttft_ms": None}, {"not measured": True}),
        ({"ttft_ms": 0.0}, {"not measured": True}),
        ({"tokens_per_s": 0.0}, {"not measured": True}),
        ({"max_num_seqs": 1, "running_peak": 1.0}, {"queued": False}),
        ({"running_peak": 7.0}, {"shared": True}),
        ({"preempted": 3.0}, {"preempted": False}),
        ({"stream_tokens_per_s": 200.0}, {"bursts": False}),
        ({"asked_tokens": 4096}, {"early end": False}),
    ],
)
def test_each_rule(changes: dict[str, Any], broken: dict[str, bool]) -> None:
    """One mistake, one rule, and nothing said of a cell that is right."""
    assert rules(**changes) == broken


def test_a_cold_first_cell_shows_in_its_repeat() -> None:
    """Slower the first time is a compiled kernel; slower the second is something else."""
    slow = {**GOOD, "ttft_ms": 5000.0, "tokens_per_s": 40.0}
    assert {flag.rule for flag in bench_rules.of_repeat(slow, GOOD)} == {"cold"}
    assert {flag.rule for flag in bench_rules.of_repeat(GOOD, slow)} == {"drift"}
    assert list(bench_rules.of_repeat(GOOD, GOOD)) == []
    assert list(bench_rules.of_repeat({}, {})) == []


def test_a_peak_that_cannot_be_one_is_not_shown() -> None:
    """Below the average, or from a run shorter than its buckets."""
    assert bench_rules.judged(dict(GOOD))["peak_tokens_per_s"] == 120.0
    for changes in ({"peak_tokens_per_s": 1.0}, {"seconds": 1.0}):
        cell = bench_rules.judged({**GOOD, **changes})
        assert cell["peak_tokens_per_s"] is None
        assert cell["valid"] is True


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        ({"tokens": 40, "chunks": 10, "ttft_s": 1.0, "answer_s": 2.0}, set()),
        ({"tokens": None, "chunks": 10}, {"usage"}),
        ({"tokens": 2, "chunks": 10}, {"count"}),
        ({"tokens": 9, "chunks": 9, "ttft_s": 1.0, "answer_s": None}, {"budget"}),
        ({"tokens": 9, "chunks": 9, "cached_share": 0.5}, {"prefix cache"}),
    ],
)
def test_each_rule_of_an_answer(answer: dict[str, Any], broken: set[str]) -> None:
    """Tokens by the engine's count, an answer that came, a prompt that was new."""
    assert {flag.rule for flag in bench_rules.of_answer(answer)} == broken


# Beside the reference

SAME: dict[str, Any] = {
    **reference.SETTINGS,
    "vllm": "0.28.1rc1.dev324+ga56654d6d",
    "torch": "2.13.0+cu130",
    "max_num_seqs": 16,
}


def cell(**changes: Any) -> dict[str, Any]:
    """Return a judged cell of one stream."""
    return bench_rules.judged(
        {**GOOD, "streams": 1, "running_peak": 1.0, "tokens_per_s": 27.85, **changes}
    )


def row_of(results: dict[str, Any], what: str) -> reference.Row:
    """Return one row."""
    return next(row for row in reference.rows(results) if row.what == what)


def test_the_same_settings_are_comparable() -> None:
    """A version that only says more is the same version."""
    row = row_of({"settings": SAME, "cells": [cell()]}, "throughput, 1 stream")
    assert (row.comparable, row.ratio, row.differs) == (True, 1.0, ())


@pytest.mark.parametrize("name", [*reference.SETTINGS, "max_num_seqs"])
@pytest.mark.parametrize("value", [None, "other", 7])
def test_another_setting_is_not_comparable(name: str, value: Any) -> None:
    """Each of them, and one nobody knows: named, with both values."""
    results = {"settings": {**SAME, name: value}, "cells": [cell()]}
    row = row_of(results, "throughput, 1 stream")
    assert not row.comparable
    (why,) = row.differs
    assert why.startswith(f"{name} {'unknown' if value is None else value}, not ")
    assert row.ratio == 1.0
    lines = "\n".join(bench_report.beside(results))
    assert f"not comparable, all of it: {why}" in lines


def test_an_invalid_cell_is_not_comparable() -> None:
    """However right the settings are."""
    bad = cell(cached_share=0.9)
    row = row_of({"settings": SAME, "cells": [bad]}, "throughput, 1 stream")
    assert row.differs == ("the measurement is not valid",)


def test_single_streams_are_compared_with_single_stream_settings() -> None:
    """The sweep was reported with 16 sequences, the long answer with one and 512 tokens."""
    answer = {"kind": "prose", "tokens_per_s": 29.9, "tokens": 512}
    results: dict[str, Any] = {"settings": {**SAME, "max_num_seqs": 1}, "answers": [answer]}
    assert row_of(results, "decode of a long answer").comparable
    answer["tokens"] = 20
    assert row_of(results, "decode of a long answer").differs == (
        "an answer of 20 tokens, not 512",
    )


def test_prompts_of_another_length_are_not_the_references() -> None:
    """Within 5 %, or it is not that figure."""
    for tokens, ours in ((900, 3.2), (1200, None)):
        rows = [{"prompt_tokens": tokens, "ttft_s": 3.2}]
        results: dict[str, Any] = {"settings": SAME, "prefill": rows}
        assert row_of(results, "TTFT at 893 prompt tokens").ours == ours


def test_the_table_says_what_was_not_measured_and_what_is_not_valid() -> None:
    """A dash is no nought."""
    cells = [cell(acceptance=None, kv_use=0.004), cell(streams=2, cached_share=0.5)]
    results = {"model": "m", "settings": SAME, "cells": cells, "answers": [{"kind": "prose"}]}
    lines = list(bench_report.table(results))
    text = "\n".join(lines)
    assert "NOT VALID: 2 streams: prefix cache: 50%" in text
    assert "cold load: not measured" in text
    row = next(line for line in lines if line.startswith("1 "))
    assert " - " in row
    assert "0.004" in row


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    """With all figures, with few, with none."""
    full = {"model": "m", "settings": SAME, "cells": [cell(acceptance=0.6)], "workload": {}}
    few: tuple[dict[str, Any], ...] = ({"settings": {}, "cells": []}, {})
    for results in (full, *few):
        path = plot.write(results, tmp_path / "a.png")
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    values = plot.panel(full, *plot.PANELS[0])["data"]["values"]
    assert [v["ratio"] for v in values if v["who"] == plot.OURS] == ["x 1.00"]


# Loads


def test_cold_and_warm_are_told_by_what_was_read(tmp_path: Path) -> None:
    """The newest of each kind, of what is served now; a broken record is none."""
    path = tmp_path / "loads.json"

    def note(read: float, ready: float, view: str = "v") -> None:
        loads.note(
            ready_s=ready,
            weights_s=1.0,
            read_gib=read,
            pack_gib=94.0,
            runtime="r",
            view=view,
            path=path,
        )

    assert loads.newest("r", "v", path) == {"cold": None, "warm": None}
    for read, ready in ((94.0, 700), (0.1, 30), (94.4, 720), (30.0, 300)):
        note(read, ready)
    note(0.0, 5, view="other")
    found = loads.newest("r", "v", path)
    assert (found["cold"]["ready_s"], found["warm"]["ready_s"]) == (720, 30)
    for _ in range(loads.KEPT + 5):
        note(0.0, 6)
    assert len(json.loads(path.read_text())["starts"]) == loads.KEPT
    path.write_text('{"starts": [1, {"kind": []}, null]}')
    assert loads.newest("r", "v", path) == {"cold": None, "warm": None}
    note(0.0, 7)
    assert loads.newest("r", "v", path)["warm"]["ready_s"] == 7


# The whole, against an engine that can lie


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime whose vllm is the stand-in, and everything else a bench looks at."""
    home = tmp_path / "runtimes/lab-0123456789ab"
    (home / "bin").mkdir(parents=True)
    script = Path(vllm_client.__file__)
    (home / "bin/vllm").write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n'
    )
    (home / "bin/vllm").chmod(0o755)
    store.write_json(home / "manifest.json", {"versions": {"vllm": "0.30.0", "vllm-exl3": "1"}})
    (tmp_path / "current").symlink_to("runtimes/lab-0123456789ab")
    (tmp_path / "views").mkdir()
    (tmp_path / "views/current").symlink_to("abc")
    (tmp_path / "serve.yaml").write_text(
        '# flags\nmax-num-seqs: 4\ncompilation-config: "{\\"cudagraph_mode\\": \\"FULL\\"}"\n'
    )
    places = {
        "RUNTIMES": "runtimes",
        "CURRENT": "current",
        "VIEW_CURRENT": "views/current",
        "VIEW_NOTE": "views/current.json",
        "LOADS_JSON": "loads.json",
        "BENCH_PROGRESS": "bench.json",
    }
    for name, place in places.items():
        monkeypatch.setattr(layout, name, tmp_path / place)
    for function in (bench.serve_flags, loads.newest, bench.alone.__wrapped__):  # type: ignore[attr-defined]
        last = (function.__defaults__ or ())[-1].name
        monkeypatch.setattr(function, "__defaults__", (tmp_path / last,))
    monkeypatch.setattr(bench, "SETTLE_S", 0.5)
    monkeypatch.setattr(bench, "SETTLE_POLL_S", 0.02)
    monkeypatch.setattr(bench, "kv_cache_tokens", lambda unit: 1234)
    monkeypatch.setattr("dsv4.runtime_proof.as_engine", lambda user: {})
    monkeypatch.setattr("dsv4.bench.shutil.chown", lambda path, user: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        receipt, "leave_or_say", lambda kind, body: store.write_json(tmp_path / "left", body)
    )
    monkeypatch.setenv("VLLM_API_KEY", "s3cret-key")
    return tmp_path


def run(
    machine: Path, url: str, capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[int, dict[str, Any]]:
    """Return how a small bench ended."""
    value = {"url": url, "served_name": MODEL, "memory": {"soft_floor_gib": 0.01, "device": "cpu"}}
    (machine / "guard.json").write_text(json.dumps(value))
    small = [
        "--streams",
        "1,2",
        "--output-tokens",
        "8",
        "--answer-tokens",
        "64",
        "--prefill",
        "600",
    ]
    given = ["--guard", str(machine / "guard.json"), "--json", *small, *argv]
    status = bench.main(given)
    return status, json.loads(capsys.readouterr().out)


def test_an_honest_engine_gives_valid_figures(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part of the result is there; the key is in the environment and nowhere else."""
    with engine(counters={"kv_cache_usage_perc": 0.25}) as honest:
        status, found = run(machine, honest.url, capsys)
    assert (status, found["ok"]) == (0, True), found
    assert [row["streams"] for row in found["cells"]] == [1, 2]
    for row in found["cells"]:
        assert row["output_tokens"] == row["engine_output_tokens"] == row["requests"] * 8
        assert row["kv_use"] == 0.25
        assert row["available_gib_low"] > 0
        assert row["acceptance"] is None
    assert [row["kind"] for row in found["answers"]] == list(bench.QUESTIONS)
    assert all(row["tokens"] == row["chunks"] for row in found["answers"])
    assert found["prefill"][0]["ttft_s"] > 0
    assert found["prefill"][0]["prompt_tokens"] == pytest.approx(600, rel=0.05)
    assert found["kv_cache_tokens"] == 1234
    assert found["settings"]["vllm"] == "0.30.0"
    assert found["settings"]["cudagraph_mode"] == "FULL"
    assert found["settings"]["max_num_seqs"] == 4
    assert all(not row["comparable"] for row in found["beside"])
    called = json.loads((machine / "called.json").read_text())
    assert called["env"]["OPENAI_API_KEY"] == "s3cret-key"
    assert "s3cret" not in json.dumps([called["argv"], found])
    assert "s3cret" not in (machine / "left").read_text()
    assert json.loads((machine / "bench.json").read_text())["state"] == "done"


def test_every_prompt_is_new(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within a run, and in the run after it: nothing of one is in the cache for the other."""
    with engine() as honest:
        for _ in range(2):
            run(machine, honest.url, capsys)
        asked = [json.dumps(body.get("prompt") or body["messages"]) for body in honest.seen]
    assert len(asked) == len(set(asked))


def from_cache(counters: dict[str, float]) -> Lie:
    """Return the lie of an engine whose prefix cache knows every prompt it has seen."""
    seen: set[str] = set()

    def after(body: dict[str, Any], reply: dict[str, Any]) -> None:
        prompt = json.dumps(body.get("prompt") or body["messages"])
        tokens = reply["usage"]["prompt_tokens"]
        for name, count in (("queries", tokens), ("hits", tokens if prompt in seen else 0)):
            key = f"prefix_cache_{name}_total"
            counters[key] = counters.get(key, 0) + count
        seen.add(prompt)

    return Lie(after=after)


@pytest.mark.parametrize(
    ("lie", "rule"), [(vllm_client.SAME, "prefix cache"), (vllm_client.CHUNKS, "count")]
)
def test_a_client_that_goes_wrong_is_found_out(
    lie: int, rule: str, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same prompt again and again; chunks counted for tokens: the engine's counters know."""
    counters: dict[str, float] = {}
    with engine(from_cache(counters), counters=counters) as known:
        assert run(machine, known.url, capsys)[0] == 0
        status, found = run(machine, known.url, capsys, "--prompt-tokens", str(lie))
    assert (status, found["ok"]) == (1, False)
    assert all(rule in {flag["rule"] for flag in row["flags"]} for row in found["cells"])
    assert not any(row["valid"] for row in found["cells"])


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (vllm_client.FAILS, "ValueError: the model is too shy"),
        (vllm_client.SILENT, "vllm bench serve failed at 1 stream"),
        (vllm_client.HANGS, "took more than"),
    ],
)
def test_a_client_that_fails_is_said_in_one_line(
    lie: int,
    words: str,
    machine: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Status 3, the reason in the progress, nothing left behind."""
    monkeypatch.setattr(bench, "CELL_LIMIT_S", 2.0)
    began = time.monotonic()
    with engine() as honest:
        status, found = run(machine, honest.url, capsys, "--prompt-tokens", str(lie))
    assert status == 3
    assert words in found["error"]
    assert words in json.loads((machine / "bench.json").read_text())["error"]
    assert time.monotonic() - began < 60
    assert not list(machine.glob("dsv4-bench-*"))
    assert not (machine / "left").exists()


def test_what_cannot_be_measured_is_refused(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine, another model, no room in the context, no room in memory, another bench."""
    assert "is it running?" in run(machine, "http://127.0.0.1:9", capsys)[1]["error"]
    with engine(Lie(models={"data": [{"id": "x"}]})) as other:
        assert "x is served" in run(machine, other.url, capsys)[1]["error"]
    with engine() as honest:
        status, found = run(machine, honest.url, capsys, "--prompt-tokens", "9000")
        assert (status, "do not fit" in found["error"]) == (3, True)
        monkeypatch.setattr(bench, "ROOM_GIB", 1e6)
        assert "soft floor" in run(machine, honest.url, capsys)[1]["error"]
        before = (machine / "bench.json").read_text()
        with bench.alone():
            assert "another bench" in run(machine, honest.url, capsys)[1]["error"]
        assert (machine / "bench.json").read_text() == before
        (machine / "current").unlink()
        assert "no runtime" in run(machine, honest.url, capsys)[1]["error"]
    assert bench.main(["--guard", str(machine / "none")]) == 3


@pytest.mark.parametrize("text", ["0", "1,-2", "a", "1.5", "99999999"])
def test_bad_numbers_are_a_wrong_call(text: str) -> None:
    """argparse says so, with status 2."""
    with pytest.raises(SystemExit) as ended:
        bench.main(["--streams", text])
    assert ended.value.code == 2
