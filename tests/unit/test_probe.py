"""The smoke test asserts the answer, and tells apart how an answer can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4 import engine_api, guard, probe
from tests.unit.http_engine import Reply, server

MODELS = {"data": [{"id": "m"}]}

PARIS = guard.Question("The capital of France is", ("Paris",), 8)


def answer(**fields: Any) -> engine_api.Answer:
    return engine_api.answer_of({"choices": [fields]})


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"text": " paris.", "finish_reason": "stop"}, probe.RIGHT),
        ({"text": " London"}, probe.WRONG),
        ({"text": ""}, probe.EMPTY),
        ({"message": {"content": "Paris", "reasoning": None}}, probe.RIGHT),
        ({"message": {"content": None, "reasoning": "It is Paris"}}, probe.RIGHT),
        ({"message": {"content": None, "reasoning_content": "It is Paris"}}, probe.RIGHT),
        (
            {"message": {"content": None, "reasoning": "Let me"}, "finish_reason": "length"},
            probe.BUDGET,
        ),
        ({"message": {"content": None, "reasoning": "Hm"}, "finish_reason": "stop"}, probe.WRONG),
        ({"message": {"content": "London", "reasoning": "Not Paris"}}, probe.WRONG),
        ({"message": None, "text": None}, probe.EMPTY),
        ({"message": {"content": [1]}}, probe.EMPTY),
    ],
)
def test_verdicts(fields: dict[str, Any], verdict: str) -> None:
    """Content may be null, reasoning has two names, and a budget can run out."""
    assert probe.judge(PARIS, answer(**fields))[0] == verdict


def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, *argv: str
) -> tuple[int, dict[str, Any]]:
    asked = [{"prompt": "p", "expect": ["Paris"]}, {"prompt": "q", "expect": ["4"], "chat": True}]
    value = {"url": url, "served_name": "m", "probe": {"questions": asked}}
    (tmp_path / "guard.json").write_text(json.dumps(value))
    status = probe.main(["--guard", str(tmp_path / "guard.json"), "--json", *argv])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, found


def replies(path: str, headers: dict[str, str]) -> Reply:
    if path == "/v1/models":
        return 200, MODELS
    if path == "/v1/chat/completions":
        return 200, {"choices": [{"message": {"content": None, "reasoning": "2+2=4"}}]}
    return 200, {"choices": [{"text": " Paris"}]}


def test_all_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each question goes to its route."""
    with server(replies) as url:
        status, found = run(tmp_path, capsys, url)
    assert (status, found["ok"]) == (0, True)
    assert [a["verdict"] for a in found["answers"]] == [probe.RIGHT, probe.RIGHT]


def test_one_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One wrong answer is a finding."""
    with server(replies) as url:
        status, found = run(tmp_path, capsys, url, "--prompt", "x", "--expect", "London")
    assert (status, found["ok"]) == (1, False)
    assert "'London' is not in 'Paris'" in found["answers"][0]["detail"]


@pytest.mark.parametrize(
    ("models", "status", "kind"),
    [((401, {}), 1, "auth"), ((500, {"error": "x"}), 3, "http"), ((200, {}), 3, "broken")],
)
def test_no_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], models: Reply, status: int, kind: str
) -> None:
    """A refused key is a finding; an engine that cannot be asked leaves it open."""
    with server(lambda path, headers: models) as url:
        got, found = run(tmp_path, capsys, url)
    assert (got, found["error"]["kind"]) == (status, kind)
    assert run(tmp_path, capsys, "http://127.0.0.1:9")[0] == 3


def test_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right answers of a wrong model are no success."""

    def other(path: str, headers: dict[str, str]) -> Reply:
        return (200, {"data": [{"id": "z"}]}) if path == "/v1/models" else replies(path, headers)

    with server(other) as url:
        status, found = run(tmp_path, capsys, url)
    assert (status, found["ok"], found["served"]) == (1, False, ["z"])


def test_without_questions_the_ready_prompt_is_asked() -> None:
    """There is always something to ask."""
    assert probe.questions_of(guard.Guard())[0].prompt == guard.Ready().prompt
    assert probe.questions_of(guard.Guard(questions=(PARIS,))) == (PARIS,)
