"""Whether a serving engine is alive: by its counters, or by a token of its own."""

from collections.abc import Callable

import pytest

from dsv4 import guard, liveness
from dsv4.engine_api import Client
from tests.unit.http_engine import server

PAGE = """\
# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_running{{engine="1",model_name="m"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 1.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 9.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 1.25e+06
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} 40.0
vllm:iteration_tokens_total_created{{engine="0"}} 1.7e+09
python_gc_objects_collected_total{{generation="0"}} 5.0
"""


def page(running: float = 2, tokens: float = 24) -> str:
    return PAGE.format(running=running, tokens=tokens)


def test_the_engines_counters_are_read() -> None:
    """Summed over engines; another metric whose name begins alike is another one."""
    assert liveness.reading(page()) == liveness.Reading((40.0, 1.25e6, 24.0), 3.0)
    for text in ("", "<html>", '{"data": []}', "vllm:num_requests_running 0\n"):
        assert liveness.reading(text) is None


def never() -> str:
    raise AssertionError("a busy engine is not asked")


BUSY, IDLE = 2.0, 0.0


def read(steps: float, requests: float) -> liveness.Reading:
    return liveness.Reading((steps,), requests)


def test_a_busy_engine_is_alive_while_it_moves_and_is_not_asked() -> None:
    """However long: an hour of one runaway answer is the engine at work."""
    pulse = liveness.Pulse(0)
    pulse.look(0, read(0, BUSY), never)
    for now in range(60, 3600, 60):
        assert pulse.look(now, read(now, BUSY), never) == liveness.ALIVE
        assert pulse.silent_for(now) == 0


def test_a_busy_engine_that_stands_still_grows_silent() -> None:
    pulse = liveness.Pulse(0)
    pulse.look(0, read(7, BUSY), never)
    for now in range(60, 660, 60):
        assert pulse.look(now, read(7, BUSY), never) == liveness.SILENT
    assert pulse.silent_for(600) == 600
    assert pulse.look(660, read(8, BUSY), never) == liveness.ALIVE
    assert pulse.silent_for(660) == 0


@pytest.mark.parametrize(
    ("said", "silent"), [(liveness.ALIVE, 0), (liveness.UNKNOWN, 0), (liveness.SILENT, 120)]
)
@pytest.mark.parametrize("found", [read(7, IDLE), None])
def test_an_idle_engine_or_one_without_counters_is_asked(
    found: liveness.Reading | None, said: str, silent: float
) -> None:
    """What is not the engine's fault counts for it."""
    pulse = liveness.Pulse(0)
    for now in (0, 60, 120):
        assert pulse.look(now, found, lambda: said) == said
    assert pulse.silent_for(120) == silent


def asked(answer: Callable[[], tuple[int, object]]) -> str:
    config = guard.Guard(served_name="m")
    with server(lambda path, headers: answer()) as url:
        return liveness.ask(Client(url, None, 0.5), config)


@pytest.mark.parametrize(
    ("status", "reply", "verdict"),
    [
        (200, {"choices": [{"text": " x", "finish_reason": "length"}]}, liveness.ALIVE),
        (200, {"choices": [{"text": ""}]}, liveness.SILENT),
        (200, {"choices": []}, liveness.SILENT),
        (200, b"<html>", liveness.SILENT),
        (500, {"error": {"message": "EngineCore encountered an issue"}}, liveness.SILENT),
        (401, {"error": "Unauthorized"}, liveness.UNKNOWN),
        (404, {"error": {"message": "no such model"}}, liveness.UNKNOWN),
        (503, {"error": {"code": "stopping"}}, liveness.UNKNOWN),
    ],
)
def test_a_question_says_whose_fault_it_is(status: int, reply: object, verdict: str) -> None:
    """No token, no life; a key or a name it does not take is ours, and a stop is meant."""
    assert asked(lambda: (status, reply)) == verdict


def test_nobody_there_is_no_life() -> None:
    config = guard.Guard(served_name="m")
    assert liveness.ask(Client("http://127.0.0.1:9", None, 0.5), config) == liveness.SILENT
