"""First token, first word of the answer, rate: from streams as servers really send them."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import engine_api, stream
from dsv4.engine_api import ApiError
from tests.unit.liar import MODEL, Lie, engine, refuse, slowly


def chunk(usage: Any = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": finish}], "usage": usage}


def used(completion: int) -> dict[str, Any]:
    return {"prompt_tokens": 5, "completion_tokens": completion}


def read(*events: Any, step: float = 1.0) -> stream.Streamed:
    """Read events that come one a second, the first one second after the request."""
    parts = [
        (
            (number + 1) * step,
            f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode(),
        )
        for number, event in enumerate(events)
    ]
    return stream.read(parts, 0.0)


LAST = {"choices": [], "usage": used(4)}


def test_the_role_is_no_token() -> None:
    """The first text is the first token; the usage comes in a chunk without choices."""
    came = read(
        chunk(role="assistant", content=""),
        chunk(content="a"),
        chunk(content="b"),
        chunk(content="", finish="stop"),
        LAST,
        "[DONE]",
    )
    assert (came.ttft_s, came.answer_s, came.chunks) == (2.0, 2.0, 2)
    assert came.usage.completion == 4
    assert (came.text, came.finish, came.done) == ("ab", "stop", True)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_a_token_and_no_answer(name: str) -> None:
    """Time to the first token and to the first word of the answer are two figures."""
    came = read(
        chunk(**{name: "hm"}),
        chunk(**{name: "so", "content": None}),
        chunk(content="42", finish="stop"),
        "[DONE]",
    )
    assert (came.ttft_s, came.answer_s) == (1.0, 3.0)
    assert (came.reasoning, came.text) == ("hmso", "42")


def test_a_budget_that_ends_in_reasoning_has_no_answer_time() -> None:
    """Not measured is None, never nought."""
    came = read(chunk(reasoning="hm"), chunk(reasoning="hm", finish="length"), "[DONE]")
    assert (came.ttft_s, came.answer_s, came.tokens_per_s) == (1.0, None, None)


@pytest.mark.parametrize("at_a_time", [1, 4, 16])
def test_tokens_are_counted_and_not_chunks(at_a_time: int) -> None:
    """Whatever comes in a chunk, the rate is that of the tokens after the first chunk."""
    chunks = [
        chunk(used((n + 1) * at_a_time), content="x " * at_a_time, finish=None) for n in range(5)
    ]
    came = read(*chunks, {"choices": [], "usage": used(5 * at_a_time)}, "[DONE]")
    assert came.chunks == 5
    assert came.tokens_per_s == pytest.approx(at_a_time)


def test_without_a_count_there_is_no_rate() -> None:
    """No usage, or a null one in every chunk: no rate, and no estimate from chunks."""
    for usage in (None, {}, {"completion_tokens": None}, {"completion_tokens": "4"}):
        came = read(chunk(usage, content="a"), chunk(usage, content="b", finish="stop"), "[DONE]")
        assert came.usage.completion is None
        assert came.tokens_per_s is None


def test_only_a_last_usage_gives_the_rate_after_the_first_token() -> None:
    """As vLLM's own benchmark has it: tokens but one, over the time between first and last."""
    came = read(chunk(content="a"), chunk(content="b"), chunk(content="c"), LAST, "[DONE]")
    assert came.tokens_per_s == pytest.approx(3 / 2)


@given(st.data())
def test_bytes_may_be_cut_anywhere(data: st.DataObject) -> None:
    """In the middle of a line end, of a letter, of an event."""
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    events = [chunk(content="é"), chunk(reasoning_content="ü"), chunk(content="漢", finish="stop")]
    lines = [": a comment", "event: x", "id: 3"]
    for event in events:
        text = json.dumps(event, ensure_ascii=False)
        lines += [f"data:{data.draw(st.sampled_from([' ', '']))}{text}", ""]
    whole = ("\ufeff" + end.join([*lines, "data: [DONE]", "", ""])).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    bounds = [0, *cuts, len(whole)]
    parts = [(1.0, whole[a:b]) for a, b in itertools.pairwise(bounds)]
    came = stream.read(parts, 0.0)
    assert (came.text, came.reasoning, came.done) == ("é漢", "ü", True)


def test_an_event_may_have_several_lines() -> None:
    """They are one text, as the standard has it."""
    text = 'data: {"choices": [{"delta":\ndata: {"content": "a"}, "finish_reason": "stop"}]}\n\n'
    assert stream.read([(1.0, text.encode())], 0.0).text == "a"


def test_a_server_that_does_not_stream_is_read_too() -> None:
    """The whole answer at once: one chunk, so no rate between tokens."""
    reply = {
        "choices": [{"message": {"content": "Paris"}, "finish_reason": "stop"}],
        "usage": used(3),
    }
    came = stream.read([(2.0, json.dumps(reply).encode())], 0.0)
    assert (came.text, came.ttft_s, came.tokens_per_s) == ("Paris", 2.0, None)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([b'data: {"error": {"message": "died"}}\n\n'], "the engine says: died"),
        ([b'{"error": {"message": "died"}}'], "the engine says: died"),
        ([b'data: {"object": "error", "message": "died"}\n\n'], "the engine says: died"),
        ([b"data: <html>\n\n"], "holds no JSON"),
        ([b"data: [1]\n\n"], "holds no object"),
        ([b""], "broke off after 0 pieces"),
        ([b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'], "broke off after 1 pieces"),
        ([b"<html>Bad gateway</html>"], "broke off after 0 pieces"),
    ],
)
def test_what_is_no_answer_is_an_error(parts: list[bytes], words: str) -> None:
    """An error in the middle, a page in place of events, an end that never came."""
    with pytest.raises(ApiError, match=words):
        stream.read([(1.0, part) for part in parts], 0.0)


def ask(lie: Lie | None, limit: float = 5.0, token_s: float = 0.0) -> stream.Streamed:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "France?"}]}
    with engine(lie, token_s) as served:
        client = engine_api.Client(served.url, None, limit)
        return stream.ask(client, engine_api.CHAT, body)


def test_a_real_stream() -> None:
    """Through a socket: tokens, times and the rate."""
    came = ask(None, token_s=0.02)
    assert came.text.startswith("Paris")
    assert came.usage.completion == came.chunks == 8
    assert came.tokens_per_s is not None
    assert came.ttft_s is not None


def test_byte_by_byte() -> None:
    """However small the pieces."""
    assert ask(Lie(wire=slowly)).text.startswith("Paris")


def test_a_stream_that_stalls_ends_at_the_limit() -> None:
    """Tokens come and then nothing more: the limit is on the whole."""
    with pytest.raises(ApiError) as caught:
        ask(None, limit=0.4, token_s=1.0)
    assert caught.value.kind == engine_api.TIMEOUT


def test_a_refusal_keeps_its_words() -> None:
    """What is wrong with the request stands in the body."""
    with pytest.raises(ApiError, match="answers 400: too hot"):
        ask(refuse(400, "too hot", lambda body: True))
