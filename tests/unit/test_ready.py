"""Ready is one real token; each way of not getting there has its own words."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4 import engine_api, guard, ready, weights
from tests.unit.http_engine import Reply, server

MODELS = {"data": [{"id": "m"}]}
TOKEN = {"choices": [{"text": " Paris", "finish_reason": "length"}]}


class Alive(ready.Life):
    """An engine that lives as long as the test says."""

    def __init__(self, faults: list[str | None] | None = None) -> None:
        self.faults = faults or []

    def pids(self) -> set[int]:
        return set()

    def fault(self, now: float) -> str | None:
        return self.faults.pop(0) if self.faults else None


def outcome(
    url: str, life: ready.Life | None = None, request_s: float = 5, timeout_s: float = 10
) -> str:
    """Return what the model said, or why it is not ready."""
    limits = guard.Ready(timeout_s=timeout_s, request_timeout_s=request_s)
    config = guard.Guard(url=url, served_name="m", ready=limits)
    client = engine_api.Client(url, None, request_s)
    asking, load = ready.Asking(config, client), ready.Load({})
    try:
        answer, _ = ready.wait(
            config, asking, life or Alive(), load, sleep=lambda _: time.sleep(0.01)
        )
    except ready.NotReady as error:
        return str(error)
    return answer.text or answer.reasoning


def engine(completion: Reply, models: Reply = (200, MODELS)) -> Callable[..., Reply]:
    return lambda path, headers: models if path == "/v1/models" else completion


def test_a_token_is_ready() -> None:
    """Text, or reasoning without text, under either of its names."""
    with server(engine((200, TOKEN))) as url:
        assert outcome(url) == " Paris"
    for field in ("reasoning", "reasoning_content"):
        with server(engine((200, {"choices": [{"text": None, field: "hm"}]}))) as url:
            assert outcome(url) == "hm"


@pytest.mark.parametrize(
    ("completion", "models", "words"),
    [
        ((200, {"choices": []}), (200, MODELS), "empty answer"),
        ((200, {"choices": [{"text": ""}]}), (200, MODELS), "empty answer"),
        ((200, {"error": {"message": "dead"}}), (200, MODELS), "the engine says: dead"),
        ((500, {"error": {"message": "boom"}}), (200, MODELS), "answers 500: boom"),
        ((404, b"<html>no</html>"), (200, MODELS), "answers 404: <html>no</html>"),
        ((200, b"<html>hello</html>"), (200, MODELS), "answers no JSON"),
        ((200, [1]), (200, MODELS), "the answer is no object"),
        ((200, TOKEN), (200, {"data": [{"id": "other"}]}), "wrong model: it serves other, not m"),
        ((200, TOKEN), (200, {"data": []}), "wrong model: it serves none"),
        ((200, TOKEN), (401, {"error": "Unauthorized"}), "the key is not the engine's"),
        ((401, {"error": "Unauthorized"}), (200, MODELS), "the key is not the engine's"),
        ((200, TOKEN), (404, {"detail": "Not Found"}), "/v1/models answers 404: Not Found"),
    ],
)
def test_what_waiting_cannot_change_ends_it(completion: Reply, models: Reply, words: str) -> None:
    """Each is told apart, and long before the limit."""
    with server(engine(completion, models)) as url:
        started = time.monotonic()
        assert words in outcome(url)
        assert time.monotonic() - started < 5


def test_an_engine_that_answers_nothing_after_health() -> None:
    """The models are listed, and no token comes."""

    def hang(path: str, headers: dict[str, str]) -> Reply:
        if path == "/v1/models":
            return 200, MODELS
        time.sleep(5)
        return 200, TOKEN

    with server(hang) as url:
        assert "no answer from /v1/completions in 0 s (3 tries)" in outcome(url, request_s=0.2)


def test_errors_that_pass_are_waited_for() -> None:
    """A server that is not up yet, or stumbles once, is no failure."""
    calls: list[str] = []

    def stumbling(path: str, headers: dict[str, str]) -> Reply:
        calls.append(path)
        if path == "/v1/models":
            return 200, MODELS
        return (503, {"error": "warming up"}) if len(calls) < 4 else (200, TOKEN)

    with server(stumbling) as url:
        assert outcome(url) == " Paris"


def test_timeout_says_timeout() -> None:
    """Nobody listens: a timeout, and not a crash."""
    text = outcome("http://127.0.0.1:9", timeout_s=0.3)
    assert text.startswith("timeout: no token after 0 s, still starting")


def test_a_death_says_crash() -> None:
    """Seen at once, even while a request hangs."""

    def hang(path: str, headers: dict[str, str]) -> Reply:
        time.sleep(5)
        return 200, MODELS

    with server(hang) as url:
        started = time.monotonic()
        text = outcome(url, Alive([None, "the engine ended (pid 7)"]), request_s=5)
        assert text.startswith("crash: the engine ended (pid 7) while starting")
        assert time.monotonic() - started < 3


def test_the_key_is_sent() -> None:
    """A server with a key gets it."""
    heard: list[str | None] = []

    def listen(path: str, headers: dict[str, str]) -> Reply:
        heard.append(headers.get("Authorization"))
        return 200, MODELS

    with server(listen) as url:
        assert engine_api.Client(url, "k").models() == ["m"]
    assert heard == ["Bearer k"]


def test_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment says about proxies is for other machines."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with server(engine((200, TOKEN))) as url:
        assert engine_api.Client(url).models() == ["m"]


def test_an_endless_answer_is_cut() -> None:
    """Whoever asks is root, and reads a bounded amount."""
    with (
        server(engine((200, b"[" + b"1," * engine_api.LIMIT))) as url,
        pytest.raises(engine_api.ApiError, match="no JSON"),
    ):
        engine_api.Client(url).complete("m", "p", 1)


# --- life and load


def test_a_real_death_is_seen() -> None:
    """By the process itself, not by what it answers."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    life = ready.Life(child.pid, "no-such-unit.service")
    try:
        assert life.fault(0.0) is None
        child.kill()
        child.wait()
        assert f"pid {child.pid}" in str(life.fault(0.1))
    finally:
        if life.handle is not None:
            os.close(life.handle)
    assert "the engine ended" in str(ready.Life(child.pid, "x").fault(0.0))


def test_load_follows_mapped_files(tmp_path: Path) -> None:
    """A weight file counts once it was mapped; what is mapped now is told apart."""
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    for path in (first, second):
        path.write_bytes(b"x" * 8192)
    code = (
        "import mmap,sys;f=open(sys.argv[1],'rb');m=mmap.mmap(f.fileno(),0,prot=1);m[0];"
        "print(flush=True);sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(first)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    load = ready.Load(weights.weight_files(tmp_path))
    before = load.look({child.pid}, 1.0)
    child.communicate()
    after = load.look(set(), 2.0)
    assert (before.shard, before.of, before.mapped) == (1, 2, 1)
    assert (after.shard, after.mapped, after.gib) == (1, 0, 8192 / ready.GIB)


@pytest.mark.parametrize(
    ("shard", "mapped", "quiet", "phase"),
    [
        (0, 0, 99, "starting"),
        (1, 1, 0, "loading"),
        (1, 0, 1, "loading"),
        (1, 1, 99, "loading"),
        (1, 0, 99, "profiling"),
        (3, 0, 0, "profiling"),
        (3, 3, 1, "loading"),
        (3, 3, 99, "profiling"),
    ],
)
def test_phases(shard: int, mapped: int, quiet: float, phase: str) -> None:
    """Profiling must not be missed: read-ahead has to be gone by then."""
    progress = ready.Progress(shard, 3, 1.0, 0.0, mapped)
    assert ready.phase_of(progress, quiet) == phase


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "x\n(EngineCore pid=7) ValueError: Free memory on device cuda:0 (86.8/121.69 GiB) on"
            " startup is less than desired GPU memory utilization (0.88, 107.09 GiB).\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "refused memory: Free memory on device cuda:0",
        ),
        (
            "AssertionError: Error in memory profiling. Initial free memory 3, current free memory"
            " 9",
            "a second try usually works",
        ),
        ("ValueError: No available memory for the cache blocks.", "no room for the KV cache"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "out of memory"),
        ("ptxas fatal : Value 'sm_121a' is not defined for option 'gpu-name'", "TRITON_PTXAS_PATH"),
        (
            "KeyError: 'x'\nRuntimeError: Engine core initialization failed. See root cause above.",
            "KeyError: 'x'",
        ),
        ("INFO all is well", ""),
        ("", ""),
    ],
)
def test_the_log_says_why(log: str, words: str) -> None:
    """The cause and not its last echo; nothing where nothing is known."""
    found = ready.classify(log)
    assert words in (found.text if found else "")
    assert bool(found) == bool(words)


def test_an_engine_that_needs_a_second_signal_gets_it(tmp_path: Path) -> None:
    """A server stopped in mid-load ends its engine on the first signal and itself on the second."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, sys, time\n"
        "def first(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGTERM, first)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        server.terminate()
        ready.end_engine(server.pid, every_s=0.2)
        assert server.wait(5) == -signal.SIGTERM


def test_ending_an_engine_that_is_gone_is_nothing(tmp_path: Path) -> None:
    """The process may end between the stop and this."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ready.end_engine(gone.pid, every_s=0.1)
