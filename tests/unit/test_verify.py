"""Verify tells an engine that works from one that only looks as if it did."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4 import capabilities, engine_api, image_probe, layout, picture, probe, verify
from dsv4.engine_api import Answer
from tests.unit import liar
from tests.unit.liar import MODEL, Lie, engine, has_image, on_message, refuse

PARIS = {"prompt": "The capital of France is", "expect": ["Paris"], "max_tokens": 8}
OFFERS = {"vision": True, "tool_parser": "p", "reasoning_parser": "p"}


@pytest.fixture(autouse=True)
def _no_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "VERIFIED_JSON", tmp_path / "verified.json")
    monkeypatch.setattr(layout, "WATCHDOG_RECORDS", tmp_path / "watchdog")
    monkeypatch.setattr(verify, "TRIP_WAIT_S", 0.2)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def run(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *argv: str, **offers: Any
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status and the findings by check, of everything but the runtime."""
    value = {"url": url, "served_name": MODEL, "offers": {**OFFERS, **offers}}
    value["probe"] = {"questions": [PARIS]}
    (tmp_path / "guard.json").write_text(json.dumps(value))
    checks = [f"--only={name}" for name in verify.CHECKS if name != "runtime"]
    given = ["--guard", str(tmp_path / "guard.json"), "--json", "--no-receipt", *checks, *argv]
    status = verify.main(given)
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (status == 0)
    return status, {finding["check"]: finding for finding in found["findings"]}


def test_an_honest_engine_is_found_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything it is meant to do, done: no finding is a fault, none is left out."""
    with engine() as honest:
        status, found = run(honest.url, tmp_path, capsys, "--needle", "3000")
    assert status == 0, found
    assert {name: it["state"] for name, it in found.items()} == dict.fromkeys(
        ("engine", "text", "stream", "image", "tools", "reasoning", "needle"), "ok"
    )
    rows = found["needle"]["figures"]["rows"]
    assert [row["depth"] for row in rows] == [0.1, 0.5, 0.9]
    assert all(2500 < row["prompt_tokens"] < 3500 for row in rows)
    figures = found["image"]["figures"]
    assert figures["tokens_with"] - figures["tokens_without"] == liar.IMAGE_TOKENS


def drop_images(path: str, body: dict[str, Any]) -> None:
    """Take images out of a request, as a proxy that knows better does."""
    for message in body.get("messages", []):
        if isinstance(message["content"], list):
            kept = [part for part in message["content"] if part["type"] == "text"]
            message["content"] = kept


def say(text: str | None, **fields: Any) -> Lie:
    """Return the lie of one answer to every image."""

    def change(body: dict[str, Any], message: dict[str, Any]) -> None:
        if has_image(body):
            message |= {"content": text, **fields}

    return on_message(change)


def to_reasoning(body: dict[str, Any], message: dict[str, Any]) -> None:
    """Have the whole answer in the reasoning."""
    if has_image(body):
        message |= {"reasoning": message["content"], "content": None}


def budget_gone(body: dict[str, Any], reply: dict[str, Any]) -> None:
    """Have the budget end in the middle of a thought."""
    choice = reply["choices"][0]
    if has_image(body):
        choice["message"] |= {"reasoning": "Let me look at", "content": None}
        choice["finish_reason"] = "length"


def no_usage(body: dict[str, Any], reply: dict[str, Any]) -> None:
    """Count nothing, and see nothing."""
    del reply["usage"]
    if has_image(body):
        reply["choices"][0]["message"]["content"] = "A red square and 12345."


IMAGES: list[tuple[str, Lie, str]] = [
    ("images are dropped", Lie(before=lambda p, b: drop_images(p, b)), "ignored"),
    ("no usage, one answer", Lie(after=no_usage), "ignored"),
    ("one answer to both", say("A red square and the number 12345."), "wrong"),
    ("an empty answer", say("", reasoning=""), "empty"),
    ("null", say(None), "empty"),
    ("every colour at once", say("23456 red green blue yellow"), "wrong"),
    ("in the reasoning", on_message(to_reasoning), "answered from reasoning"),
    ("budget", Lie(after=budget_gone), "budget"),
    ("400", refuse(400, "m is not a multimodal model", has_image), "unsupported"),
    ("at most none", refuse(400, "At most 0 image(s) may be provided", has_image), "unsupported"),
    ("422", refuse(422, "content type image_url is not known", has_image), "unsupported"),
    ("501", refuse(501, "vision is not implemented", has_image), "unsupported"),
    ("too long", refuse(400, "exceeds the maximum context length of images", has_image), "error"),
    ("another 400", refuse(400, "bad temperature", has_image), "error"),
    ("busy", refuse(503, "overloaded", has_image), "error"),
    ("OOM", refuse(500, "CUDA out of memory. Tried to allocate", has_image), "out of memory"),
    ("OOM with 200", refuse(200, "torch.OutOfMemoryError: CUDA", has_image), "out of memory"),
    ("error with 200", refuse(200, "something broke", has_image), "error"),
    ("engine dead", refuse(500, "EngineCore encountered an issue", has_image), "error"),
]


@pytest.mark.parametrize(("name", "lie", "verdict"), IMAGES, ids=[name for name, *_ in IMAGES])
def test_each_way_to_fail_with_images_has_a_verdict(
    name: str, lie: Lie, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict is about the image; all else is fine and found fine."""
    with engine(lie) as lying:
        status, found = run(lying.url, tmp_path, capsys, "--only=image")
    assert found["image"]["verdict"] == verdict, found["image"]
    good = verdict == "answered from reasoning"
    assert (status == 0) is good
    assert bool(found["image"]["remedy"]) is not good


def test_a_text_model_has_to_refuse_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refusal is right; an answer that is made up is a fault also there."""
    with engine(refuse(400, "m is not a multimodal model", has_image)) as text_only:
        assert run(text_only.url, tmp_path, capsys, vision=False)[0] == 0
    with engine(Lie(before=lambda p, b: drop_images(p, b))) as making_up:
        status, found = run(making_up.url, tmp_path, capsys, vision=False)
    assert (status, found["image"]["verdict"]) == (1, "ignored")
    assert "made up" in found["image"]["remedy"]


def test_cards_cannot_be_guessed_and_can_be_read() -> None:
    """Two cards share nothing, the next two are others, and the pixels say what the card says."""
    chance = random.Random(1)
    pairs = [picture.cards(chance) for _ in range(50)]
    assert len({card for pair in pairs for card in pair}) >= 99
    for first, second in pairs[:8]:
        assert first.number != second.number
        assert first.colour != second.colour
        for card in (first, second):
            assert liar.read_card(picture.png(card)) == (card.number, card.colour)


CARD = picture.Card("23456", "blue")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("23456, blue", image_probe.OK),
        ("The number is 2 3 4 5 6 and the square is Blue.", image_probe.OK),
        ("23,456 on blue", image_probe.OK),
        ("**23456** - *blue*", image_probe.OK),
        ("234567 blue", image_probe.WRONG),
        ("123456 blue", image_probe.WRONG),
        ("23456", image_probe.WRONG),
        ("23456 red", image_probe.WRONG),
        ("23456 red or blue", image_probe.WRONG),
        ("blueish 23456", image_probe.WRONG),
    ],
)
def test_what_counts_as_read(text: str, verdict: str) -> None:
    """The number whole, the colour alone, in whatever words around them."""
    assert image_probe.judge(CARD, Answer(text, "", "stop"))[0] == verdict


# Text and streams


def blank(body: dict[str, Any], reply: dict[str, Any]) -> None:
    """Answer without a choice."""
    reply["choices"] = []


def london(body: dict[str, Any], reply: dict[str, Any]) -> None:
    """Answer wrong."""
    reply["choices"][0]["text"] = "London"


def is_text(body: dict[str, Any]) -> bool:
    """Say whether a request is a plain completion."""
    return "prompt" in body


TEXTS: list[tuple[str, Lie, str, str]] = [
    ("wrong", Lie(after=london), probe.WRONG, probe.WRONG),
    ("error with 200", refuse(200, "no", is_text), probe.ERROR, probe.ERROR),
    ("500", refuse(500, "no", is_text), probe.ERROR, probe.ERROR),
    ("no JSON", Lie(before=lambda p, b: (200, b"<html>")), probe.ERROR, probe.ERROR),
    ("no object", Lie(before=lambda p, b: (200, b"[]")), probe.ERROR, probe.ERROR),
    ("nothing", Lie(before=lambda p, b: (200, b"")), probe.ERROR, probe.ERROR),
    ("hangs", Lie(hang=30), probe.ERROR, probe.ERROR),
]


@pytest.mark.parametrize(("name", "lie", "text", "streamed"), TEXTS, ids=[n for n, *_ in TEXTS])
def test_each_way_to_fail_with_text_has_a_verdict(
    name: str,
    lie: Lie,
    text: str,
    streamed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """/health says 200 in all of them."""
    began = time.monotonic()
    value = {"url": "", "served_name": MODEL, "probe": {"questions": [PARIS]}}
    with engine(lie) as lying:
        value["url"] = lying.url
        (tmp_path / "guard.json").write_text(json.dumps(value))
        argv = ["--guard", str(tmp_path / "guard.json"), "--json", "--no-receipt"]
        limit = "0.5" if lie.hang else "30"
        status = verify.main([*argv, "--timeout", limit, "--only=text", "--only=stream"])
    found = {it["check"]: it for it in json.loads(capsys.readouterr().out)["findings"]}
    assert status == 1
    assert (found["text"]["verdict"], found["stream"]["verdict"]) == (text, streamed)
    assert found["text"]["remedy"]
    assert time.monotonic() - began < 20


def test_an_answer_without_choices_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 with nothing in it."""
    with engine(Lie(before=lambda p, b: (200, {"choices": []}))) as lying:
        status, found = run(lying.url, tmp_path, capsys)
    assert (status, found["text"]["verdict"]) == (1, probe.EMPTY)


def test_an_engine_that_is_not_there_or_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not running leaves it open (3); another model's name is a fault."""
    status, found = run("http://127.0.0.1:9", tmp_path, capsys)
    assert (status, found["engine"]["state"]) == (3, "unknown")
    with engine(Lie(models={"data": [{"id": "other"}]})) as other:
        status, found = run(other.url, tmp_path, capsys)
    assert (status, found["engine"]["verdict"]) == (1, "wrong model")
    assert "text" not in found


def test_a_trickle_does_not_outlast_the_limit() -> None:
    """A byte now and then resets no clock: the limit is on the whole answer."""
    with engine(Lie(trickle=0.05)) as slow:
        client = engine_api.Client(slow.url, None, 0.5)
        began = time.monotonic()
        with pytest.raises(engine_api.ApiError, match="no answer from") as caught:
            client.complete(MODEL, "x", 4)
        assert caught.value.kind == engine_api.TIMEOUT
        assert time.monotonic() - began < 5


# Tools


def as_text(body: dict[str, Any], message: dict[str, Any]) -> None:
    """Have the call in the text, as a model writes it that no parser listens to."""
    if message["tool_calls"]:
        message["tool_calls"] = []
        message["content"] = '<\uff5ctool\u2581calls\u2581begin\uff5c>read_gauge {"gauge": "amber"}'


def call_of(**changes: Any) -> Lie:
    """Return the lie that changes the model's call."""

    def change(body: dict[str, Any], message: dict[str, Any]) -> None:
        for call in message["tool_calls"]:
            call["function"] |= changes

    return on_message(change)


def no_call(body: dict[str, Any], message: dict[str, Any]) -> None:
    """Answer at once."""
    if message["tool_calls"]:
        message |= {"tool_calls": [], "content": "It shows about 7."}


def forgets(body: dict[str, Any], message: dict[str, Any]) -> None:
    """Answer with something else than the tool gave."""
    if body["messages"][-1]["role"] == "tool":
        message["content"] = "It shows 12."


def has_tools(body: dict[str, Any]) -> bool:
    """Say whether a request offers tools."""
    return bool(body.get("tools"))


CALLS: list[tuple[str, Lie, str]] = [
    ("as text", on_message(as_text), capabilities.AS_TEXT),
    ("no call", on_message(no_call), capabilities.NONE),
    ("another name", call_of(name="rm"), capabilities.BAD_CALL),
    ("no JSON", call_of(arguments='{"gauge": '), capabilities.BAD_CALL),
    ("an object", call_of(arguments={"gauge": "amber"}), capabilities.BAD_CALL),
    ("null", call_of(arguments=None), capabilities.BAD_CALL),
    ("another gauge", call_of(arguments='{"gauge": "x"}'), capabilities.BAD_CALL),
    ("a list", call_of(arguments='["amber"]'), capabilities.BAD_CALL),
    ("forgets", on_message(forgets), capabilities.WRONG),
    ("400", refuse(400, '"auto" tool choice requires a parser', has_tools), "unsupported"),
    ("500", refuse(500, "boom", has_tools), "error"),
    ("200", refuse(200, "boom", has_tools), "error"),
]


@pytest.mark.parametrize(("name", "lie", "verdict"), CALLS, ids=[name for name, *_ in CALLS])
def test_each_way_to_fail_with_tools_has_a_verdict(name: str, lie: Lie, verdict: str) -> None:
    """There and back: the call, its arguments, and what the result was used for."""
    with engine(lie) as lying:
        client = engine_api.Client(lying.url, None, 5)
        came = capabilities.tools(client, MODEL, random.Random(3))
    assert came.verdict == verdict, came
    assert came.remedy


# Reasoning


@pytest.mark.parametrize(
    ("message", "finish", "verdict"),
    [
        ({"content": "42", "reasoning": "hm"}, "stop", capabilities.OK),
        ({"content": "42", "reasoning_content": "hm"}, "stop", capabilities.OK),
        ({"content": "42", "reasoning": None, "reasoning_content": "hm"}, "stop", capabilities.OK),
        ({"content": "<think>hm</think>42"}, "stop", capabilities.LEAKED),
        ({"content": "hm</think>42", "reasoning": "x"}, "stop", capabilities.LEAKED),
        ({"content": "42"}, "stop", capabilities.NONE),
        ({"content": None, "reasoning": "hm 42"}, "stop", capabilities.SWALLOWED),
        ({"content": "", "reasoning": "hm"}, "length", capabilities.BUDGET),
        ({"content": None}, "stop", capabilities.EMPTY),
        ({"content": "41", "reasoning": "hm"}, "stop", capabilities.WRONG),
        ({"content": "1,042", "reasoning": "hm"}, "stop", capabilities.OK),
    ],
)
def test_reasoning_comes_apart_or_the_way_it_does_not_is_named(
    message: dict[str, Any], finish: str, verdict: str
) -> None:
    """Both names of the field, null content, tags in the answer, a budget that ran out."""
    expect = "1042" if message.get("content") == "1,042" else "42"
    reply = {"choices": [{"message": message, "finish_reason": finish}]}
    came = capabilities.judge_reasoning(engine_api.answer_of(reply), expect)
    assert came.verdict == verdict
    assert came.good or came.remedy


# A needle


def loses(body: dict[str, Any], message: dict[str, Any]) -> None:
    """Read no further than the middle."""
    words = str(body["messages"][-1]["content"])
    if "lighthouse is" in words[len(words) * 2 // 3 :]:
        message["content"] = "It is not said."


def test_a_needle_that_is_lost_is_said_with_its_depth() -> None:
    """What was found before is kept, and the prompt's length is the engine's own count."""
    with engine(on_message(loses)) as lying:
        client = engine_api.Client(lying.url, None, 5)
        came = capabilities.needle(client, MODEL, 2000, random.Random(1), time.monotonic)
    assert came.verdict == capabilities.WRONG
    assert "90%" in came.detail
    assert [row["found"] for row in came.figures["rows"]] == [True, True, False]
    with engine(refuse(500, "CUDA out of memory", lambda b: len(str(b)) > 9000)) as full:
        client = engine_api.Client(full.url, None, 5)
        came = capabilities.needle(client, MODEL, 4000, random.Random(1), time.monotonic)
    assert came.verdict == capabilities.MEMORY
    assert "serve_gpu_memory_utilization" in came.remedy


def test_a_proven_start_is_noted_and_a_failed_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deploy asks again until it is right."""
    with engine(say("nothing")) as lying:
        run(lying.url, tmp_path, capsys, "--record", "i1")
    assert not layout.VERIFIED_JSON.exists()
    with engine() as honest:
        run(honest.url, tmp_path, capsys, "--record", "i1")
    assert json.loads(layout.VERIFIED_JSON.read_text())["invocation"] == "i1"


def test_an_engine_that_the_watchdog_stopped_ran_out_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The connection breaks and says nothing; the record that appears meanwhile says why."""
    records = tmp_path / "watchdog"
    records.mkdir()
    (records / "1.json").write_text('{"reason": "long ago"}')

    def before(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if not has_image(body):
            return None
        (records / "2.json").write_text('{"reason": "1.2 GiB available"}')
        return 500, {"error": {"message": "the engine is dead"}}

    with engine(Lie(before=before)) as dying:
        status, found = run(dying.url, tmp_path, capsys)
    assert (status, found["image"]["verdict"]) == (1, "out of memory")
    assert "1.2 GiB available" in found["image"]["text"]
    assert found["tools"]["state"] == "ok"


def test_no_guard_no_verdict(tmp_path: Path) -> None:
    """Without a configuration nothing can be told."""
    assert verify.main(["--guard", str(tmp_path / "none"), "--json"]) == 3
