"""Measure how fast the served model is: `dsv4 bench [--json]`, as root on the machine.

A sweep over streams by vLLM's own `vllm bench serve`, every prompt new and each number of streams
warmed up first; answers of a single stream by our own client, which tells reasoning from answer;
long prompts; and beside them what only the engine and the machine know: tokens it made, what its
cache had, drafts it took, key-value cache in use, the lowest available memory, cold and warm loads.
Then rules look for figures that are not what they seem, and the reference figures stand beside.

The prompts are random, so a draft model guesses worse than it does in a conversation.
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    bench_report,
    bench_rules,
    capabilities,
    engine_api,
    engine_metrics,
    guard,
    layout,
    loads,
    machine,
    memory,
    receipt,
    reference,
    runtime,
    runtime_proof,
    store,
    stream,
    systemd,
)

STREAMS: Final = (1, 2, 4, 8, 16)
PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 256
PER_STREAM: Final = 2
LEAST: Final = 4
"""Requests of a cell, at least, and for each stream."""
ANSWER_TOKENS: Final = 512
WARM_TOKENS: Final = 16
PREFILL: Final = (893, 14227)
CHARACTERS: Final = 4.0
"""Of text to a token, before anything was counted; a sample then says it."""
SAMPLE: Final = 400
ROOM_GIB: Final = 1.5
"""Memory that vLLM's client may take: it imports the engine's libraries; half a GiB was seen."""
LOOK_S: Final = 0.1
ASK_S: Final = 0.5
SETTLE_S: Final = 3.0
SETTLE_POLL_S: Final = 0.2
CELL_LIMIT_S: Final = 3600.0
ANSWER_LIMIT_S: Final = 900.0
"""For one request of our own client: 512 tokens at a tenth of the slowest rate reported."""

QUESTIONS: Final = {
    "counting": "Count from 1 to 200, the numbers only, one a line.",
    "code": "Write a Python class for a priority queue with an addressable heap, with doc strings.",
    "prose": "Write a story of about 400 words about a lighthouse keeper and a storm.",
}


class BenchError(Exception):
    """It cannot be measured; one line that says why and what to do."""


@dataclass(frozen=True)
class Work:
    """What is measured."""

    streams: tuple[int, ...] = STREAMS
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    per_stream: int = PER_STREAM
    answer_tokens: int = ANSWER_TOKENS
    prefill: tuple[int, ...] = PREFILL
    seed: int = 0

    def requests(self, streams: int) -> int:
        """Return how many requests a cell has."""
        return max(LEAST, streams * self.per_stream)


# What the machine and the engine show meanwhile


@dataclass
class Watch:
    """Looks at memory and at the engine's gauges while something is measured."""

    client: engine_api.Client
    available_low: float | None = None
    kv_use: float | None = None
    running: float | None = None
    waiting: float | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watch":
        self.threads = [
            threading.Thread(target=self.every, args=(period, look), daemon=True)
            for period, look in ((LOOK_S, self.memory), (ASK_S, self.gauges))
        ]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def every(self, period: float, look: Callable[[], None]) -> None:
        """Look until it is over; a look that fails is none."""
        while True:
            with contextlib.suppress(OSError, ValueError, engine_api.ApiError):
                look()
            if self.over.wait(period):
                return

    def memory(self) -> None:
        """Take one look at memory."""
        now = memory.read_meminfo().available
        self.available_low = now if self.available_low is None else min(now, self.available_low)

    def gauges(self) -> None:
        """Take one look at the engine."""
        seen = counters(self.client)
        for name, key in (
            ("kv_use", engine_metrics.KV_USE),
            ("running", engine_metrics.RUNNING),
            ("waiting", engine_metrics.WAITING),
        ):
            if key in seen:
                before = getattr(self, name)
                setattr(self, name, seen[key] if before is None else max(before, seen[key]))


def counters(client: engine_api.Client) -> dict[str, float]:
    """Return the engine's counters; empty where it does not show them."""
    try:
        return engine_metrics.totals(client.text("/metrics"))
    except engine_api.ApiError:
        return {}


def settled(client: engine_api.Client) -> dict[str, float]:
    """Return the counters once nothing runs and they stand still: they trail the last answer."""
    end = time.monotonic() + SETTLE_S
    before = counters(client)
    while time.monotonic() < end:
        time.sleep(SETTLE_POLL_S)
        now = counters(client)
        still = now.get(engine_metrics.GENERATED) == before.get(engine_metrics.GENERATED)
        if still and not now.get(engine_metrics.RUNNING):
            return now
        before = now
    return before


# The sweep, by vLLM's own client


@dataclass(frozen=True)
class Tool:
    """vLLM's benchmark in the runtime in service, and how it is called."""

    home: Path
    url: str
    model: str
    tokenizer: Path
    key: str | None
    user: str

    def argv(self, work: Work, streams: int, seed: int, out: Path) -> list[str]:
        """Return the command line; the key is not in it."""
        return [
            str(self.home / "bin/vllm"),
            *("bench", "serve", "--backend", "openai", "--endpoint", engine_api.COMPLETIONS),
            *("--base-url", self.url, "--model", self.model, "--tokenizer", str(self.tokenizer)),
            *("--dataset-name", "random", "--random-input-len", str(work.prompt_tokens)),
            *("--random-output-len", str(work.output_tokens), "--ignore-eos"),
            *("--num-prompts", str(work.requests(streams)), "--max-concurrency", str(streams)),
            *("--temperature", "0", "--seed", str(seed), "--disable-tqdm"),
            # Older releases ask the first prompt twice, the second time from the prefix cache
            *("--ready-check-timeout-sec", "0"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95"),
            *("--save-result", "--result-dir", str(out), "--result-filename", "cell.json"),
            *(["--insecure"] if self.url.startswith("https") else []),
        ]

    def environment(self, home: Path) -> dict[str, str]:
        """Return its environment; the key is vLLM's own way to take one."""
        own = {
            **runtime_proof.environment(),
            "PATH": f"{self.home}/bin:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        return {**own, "OPENAI_API_KEY": self.key} if self.key else own

    def run(self, work: Work, streams: int, seed: int) -> dict[str, Any]:
        """Return the result of one cell as vLLM writes it; raise `BenchError` without one."""
        place = Path(tempfile.mkdtemp(prefix="dsv4-bench-"))
        try:
            if os.geteuid() == 0:
                shutil.chown(place, self.user)
            with subprocess.Popen(
                self.argv(work, streams, seed, place),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=place,
                env=self.environment(place),
                start_new_session=True,
                **runtime_proof.as_engine(self.user),
            ) as running:
                try:
                    said, _ = running.communicate(timeout=CELL_LIMIT_S)
                except subprocess.TimeoutExpired:
                    raise BenchError(
                        f"{bench_report.streams({'streams': streams})} took more than"
                        f" {CELL_LIMIT_S / 60:.0f} min; measure less: fewer streams, or shorter"
                        " answers"
                    ) from None
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(running.pid, signal.SIGKILL)
            found = store.read_json_or(place / "cell.json", {})
            if running.returncode != 0 or not found:
                words = bench_report.streams({"streams": streams})
                raise BenchError(f"vllm bench serve failed at {words}: {cause(said)}")
            return found
        except OSError as error:
            raise BenchError(f"vllm bench serve cannot be started: {error}") from error
        finally:
            shutil.rmtree(place, ignore_errors=True)


def cause(said: str) -> str:
    """Return the line of a client's output that says why it failed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"^(\w+\.)*\w*(Error|Exception)\b", line)]
    return (errors or lines or ["it said nothing"])[-1][:300]


def figure(found: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of vLLM's result; None when it is missing or no finite number."""
    value = found.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


def cell_of(
    found: Mapping[str, Any],
    work: Work,
    streams: int,
    change: engine_metrics.Delta,
    watch: Watch,
    max_num_seqs: int | None,
) -> dict[str, Any]:
    """Return one cell: what the client saw and what the engine and the machine showed."""
    tpot, requests = figure(found, "mean_tpot_ms"), work.requests(streams)
    completed = figure(found, "completed") or 0
    return {
        "streams": streams,
        "requests": requests,
        "completed": int(completed),
        "failed": int(figure(found, "failed") or 0),
        "seconds": figure(found, "duration"),
        "prompt_tokens": figure(found, "total_input_tokens"),
        "output_tokens": figure(found, "total_output_tokens"),
        "asked_tokens": completed * work.output_tokens,
        "engine_output_tokens": change.generated,
        "tokens_per_s": figure(found, "output_throughput"),
        "peak_tokens_per_s": figure(found, "max_output_tokens_per_s"),
        "stream_tokens_per_s": 1000 / tpot if tpot else None,
        "ttft_ms": figure(found, "mean_ttft_ms"),
        "ttft_p50_ms": figure(found, "p50_ttft_ms"),
        "ttft_p95_ms": figure(found, "p95_ttft_ms"),
        "tpot_ms": tpot,
        "itl_p95_ms": figure(found, "p95_itl_ms"),
        "e2el_ms": figure(found, "mean_e2el_ms"),
        "acceptance": change.acceptance,
        "tokens_per_step": change.tokens_per_step,
        "cached_share": change.cached_share,
        "preempted": change.preempted,
        "kv_use": watch.kv_use,
        "running_peak": watch.running,
        "waiting_peak": watch.waiting,
        "available_gib_low": watch.available_low,
        "max_num_seqs": max_num_seqs,
    }


# One stream, by our own client


def fresh(chance: random.Random, tokens: int, per_token: float = CHARACTERS) -> str:
    """Return a text nobody sent before, of about so many tokens."""
    text = f"Note {chance.getrandbits(64):016x}."
    for line in capabilities.hay(chance, tokens):
        if len(text) >= tokens * per_token:
            break
        text += f" {line}"
    return text


def warm(client: engine_api.Client, model: str, streams: int, tokens: int) -> None:
    """Have kernels compiled and graphs captured for this many streams; what comes is not kept."""
    chance = random.SystemRandom()

    def one(_: int) -> None:
        body = {
            "model": model,
            "prompt": fresh(chance, tokens),
            "max_tokens": WARM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        client.ask("POST", engine_api.COMPLETIONS, body)

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(one, range(streams)))


def streamed(
    client: engine_api.Client, model: str, prompt: str, tokens: int, *, chat: bool = True
) -> stream.Streamed:
    """Return one streamed answer, at temperature 0."""
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
    if not chat:
        return stream.ask(client, engine_api.COMPLETIONS, {**body, "prompt": prompt})
    messages = [{"role": "user", "content": prompt}]
    return stream.ask(client, engine_api.CHAT, {**body, "messages": messages})


def answered(
    client: engine_api.Client, model: str, kind: str, question: str, tokens: int
) -> dict[str, Any]:
    """Return what one answer of a single stream showed; a fault is part of the result."""
    nonce = f"{random.SystemRandom().getrandbits(64):016x}"
    before = settled(client)
    try:
        came = streamed(client, model, f"({nonce}) {question}", tokens)
    except engine_api.ApiError as error:
        return {"kind": kind, "error": f"{error.kind}: {error}", "flags": []}
    change = engine_metrics.delta(before, settled(client))
    prompt, cached = came.usage.prompt, came.usage.cached
    answer = {
        "kind": kind,
        "ttft_s": came.ttft_s,
        "answer_s": came.answer_s,
        "tokens_per_s": came.tokens_per_s,
        "tokens": came.usage.completion,
        "chunks": came.chunks,
        "prompt_tokens": prompt,
        "cached_share": cached / prompt if cached is not None and prompt else change.cached_share,
        "reasoning_chars": len(came.reasoning),
        "finish": came.finish,
        "acceptance": change.acceptance,
        "tokens_per_step": change.tokens_per_step,
    }
    return {**answer, "flags": [flag.plain() for flag in bench_rules.of_answer(answer)]}


def prefilled(client: engine_api.Client, model: str, tokens: int) -> dict[str, Any]:
    """Return how long the first token of an answer to a long prompt took."""
    chance = random.SystemRandom()
    try:
        sample = fresh(chance, SAMPLE)
        counted = client.chat(model, [{"role": "user", "content": sample}], 1).usage.prompt
        per_token = len(sample) / counted if counted else CHARACTERS
        came = streamed(client, model, fresh(chance, tokens, per_token), 8)
    except engine_api.ApiError as error:
        return {"asked_tokens": tokens, "error": f"{error.kind}: {error}"}
    return {
        "asked_tokens": tokens,
        "prompt_tokens": came.usage.prompt,
        "ttft_s": came.ttft_s,
    }


# What it was measured on


def serve_flags(path: Path = layout.SERVE_YAML) -> dict[str, Any]:
    """Return the flags in serve.yaml: the deploy writes a key and one JSON value a line."""
    found: dict[str, Any] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return found
    for line in lines:
        key, mark, value = line.partition(": ")
        if mark and not line.startswith("#"):
            with contextlib.suppress(ValueError):
                found[key] = json.loads(value)
    return found


def inner(flags: Mapping[str, Any], flag: str, key: str) -> Any:
    """Return a value of a flag that is itself JSON."""
    try:
        value = json.loads(flags.get(flag) or "{}")
    except (TypeError, ValueError):
        return None
    return value.get(key) if isinstance(value, dict) else None


def settings_of(config: guard.Guard, last: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything a reference's settings are compared with; None is unknown."""
    flags = serve_flags()
    home = layout.RUNTIMES / (runtime.link_target(layout.CURRENT) or "none")
    versions = store.read_json_or(home / runtime.MANIFEST, {}).get("versions") or {}
    named = {name.lower().replace("-", "_"): version for name, version in versions.items()}
    packed = store.read_json_or(layout.VIEW_NOTE, {}).get("made_from") or {}
    cuda = config.memory.device == "cuda"
    return {
        "gpu": machine.gpu().get("name") if cuda else "none, the engine runs on the processor",
        "pack": repository_of(Path(str(packed.get("pack_root") or "/nonexistent"))),
        **{
            name: named.get(name)
            for name in ("vllm", "exllamav3", "flashinfer_python", "torch", "vllm_exl3")
        },
        "max_model_len": flags.get("max-model-len"),
        "max_num_seqs": flags.get("max-num-seqs"),
        "gpu_memory_utilization": flags.get("gpu-memory-utilization"),
        "kv_cache_dtype": flags.get("kv-cache-dtype", "auto"),
        "max_num_batched_tokens": flags.get("max-num-batched-tokens"),
        "cudagraph_mode": (
            "none (eager)"
            if flags.get("enforce-eager")
            else inner(flags, "compilation-config", "cudagraph_mode")
        ),
        "num_speculative_tokens": inner(flags, "speculative-config", "num_speculative_tokens") or 0,
        "route": (last.get("deployed") or {}).get("route"),
        "preset": (last.get("deployed") or {}).get("preset"),
    }


def repository_of(pack_root: Path) -> str | None:
    """Return the hub repository a downloaded pack is of; None for an adopted directory."""
    found = store.read_json_or(pack_root.with_name(f"{pack_root.name}.json"), {}).get("repo_id")
    return str(found) if found else None


KV_LINE: Final = re.compile(r"KV cache size: ([\d,]+) tokens")


def kv_cache_tokens(unit: str) -> int | None:
    """Return the size of the key-value cache as this start of the engine logged it."""
    invocation = systemd.show(unit, "InvocationID").get("InvocationID")
    if not invocation:
        return None
    query = [f"_SYSTEMD_INVOCATION_ID={invocation}", "-o", "cat", "--no-pager"]
    try:
        done = subprocess.run(
            ["journalctl", *query, "-g", "KV cache size"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = KV_LINE.findall(done.stdout)
    return int(found[-1].replace(",", "")) if found else None


# The whole


Progress = Callable[[str], None]


def sweep(
    tool: Tool,
    client: engine_api.Client,
    work: Work,
    max_num_seqs: int | None,
    say: Progress,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the cells, and the first one when its repeat shows that it was cold."""
    raw: list[dict[str, Any]] = []
    plan = [*work.streams, work.streams[0]]
    for number, streams in enumerate(plan):
        words = bench_report.streams({"streams": streams})
        again = ", again" if number == len(plan) - 1 else ""
        say(f"{words}{again} ({number + 1} of {len(plan)})")
        warm(client, tool.model, streams, work.prompt_tokens)
        before = settled(client)
        with Watch(client) as watch:
            found = tool.run(work, streams, work.seed + number)
        change = engine_metrics.delta(before, settled(client))
        raw.append(cell_of(found, work, streams, change, watch, max_num_seqs))
    *cells, repeat = raw
    flags = tuple(bench_rules.of_repeat(cells[0], repeat))
    first = bench_rules.judged(cells[0], flags)
    if any(flag.rule == "cold" for flag in flags):
        kept = [repeat, *cells[1:]]
        return [bench_rules.judged(cell) for cell in kept], first
    return [first, *(bench_rules.judged(cell) for cell in cells[1:])], None


def room_fault(config: guard.Guard) -> str | None:
    """Return why the client's memory would bring the watchdog near, None when it fits."""
    available = memory.read_meminfo().available
    left, floor = available - ROOM_GIB, config.memory.soft_floor_gib
    if left >= floor:
        return None
    return (
        f"{available:.1f} GiB are available and the client takes up to {ROOM_GIB:g}, which would"
        f" leave {left:.1f}, below the watchdog's soft floor of {floor:.1f}; lower"
        " serve_gpu_memory_utilization and deploy again"
    )


def measure(config: guard.Guard, work: Work, say: Progress) -> dict[str, Any]:
    """Return the results; raise `BenchError` when there can be none."""
    key = engine_api.find_key()
    client = engine_api.Client(config.url, key, ANSWER_LIMIT_S)
    try:
        served = engine_api.Client(config.url, key, 10).served()
    except engine_api.ApiError as error:
        raise BenchError(f"{error}; is it running? `systemctl status {config.unit}`") from error
    model = config.served_name or next(iter(served), "")
    if model not in served:
        raise BenchError(f"{', '.join(served) or 'nothing'} is served at {config.url}, not {model}")
    context = served[model]
    need = work.prompt_tokens + work.output_tokens
    if context is not None and need > context:
        raise BenchError(f"{need} tokens of prompt and answer do not fit the context of {context}")
    name = runtime.link_target(layout.CURRENT)
    if name is None:
        raise BenchError("no runtime is in service; run the deploy")
    if fault := room_fault(config):
        raise BenchError(fault)
    last = receipt.newest("deploy")[1]
    settings = settings_of(config, last)
    view = layout.VIEW_CURRENT
    tool = Tool(layout.RUNTIMES / name, config.url, model, view, key, config.user)
    answers = []
    for kind, question in QUESTIONS.items():
        say(f"one stream, {kind}")
        budget = min(work.answer_tokens, (context or 1 << 20) - 256)
        answers.append(answered(client, model, kind, question, budget))
    prefill = []
    for tokens in work.prefill:
        if context is None or tokens * 1.1 + 64 <= context:
            say(f"a prompt of {tokens} tokens")
            prefill.append(prefilled(client, model, tokens))
    cells, discarded = sweep(tool, client, work, settings["max_num_seqs"], say)
    return {
        "ok": all(cell["valid"] for cell in cells),
        "model": model,
        "workload": {
            "prompt_tokens": work.prompt_tokens,
            "output_tokens": work.output_tokens,
            "requests_per_stream": work.per_stream,
            "dataset": "random",
            "seed": work.seed,
        },
        "settings": settings,
        "cells": cells,
        "discarded": discarded,
        "answers": answers,
        "prefill": prefill,
        "loads": loads.newest(name, runtime.link_target(view) or ""),
        "kv_cache_tokens": kv_cache_tokens(config.unit),
    }


@contextlib.contextmanager
def alone(path: Path = layout.BENCH_LOCK) -> Iterator[None]:
    """Let one bench run at a time; raise `BenchError` for a second one."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BenchError(
                f"another bench is running; follow it with `journalctl -fu {layout.UNIT_BENCH}`"
            ) from None
        yield


def numbers(text: str) -> tuple[int, ...]:
    """Return the positive whole numbers of a comma separated list."""
    found = tuple(int(word) for word in text.split(",") if word.strip())
    if not all(0 < number <= 1 << 20 for number in found):
        raise ValueError(text)
    return found


def main(argv: list[str]) -> int:
    """Measure: 0 when all of it is valid, 1 when not, 3 when it could not be measured."""
    parser = argparse.ArgumentParser(prog="dsv4 bench", description=__doc__)
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    parser.add_argument("--streams", type=numbers, default=STREAMS, metavar="1,2,4")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS)
    parser.add_argument("--requests-per-stream", type=int, default=PER_STREAM)
    parser.add_argument("--answer-tokens", type=int, default=ANSWER_TOKENS)
    parser.add_argument("--prefill", type=numbers, default=PREFILL, metavar="893,14227")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    work = Work(
        streams=options.streams or STREAMS,
        prompt_tokens=max(1, options.prompt_tokens),
        output_tokens=max(2, options.output_tokens),
        per_stream=max(1, options.requests_per_stream),
        answer_tokens=max(16, options.answer_tokens),
        prefill=options.prefill,
        # Another one each time: the prompts of a run before are in the prefix cache
        seed=random.SystemRandom().randrange(1 << 30),
    )

    def say(text: str) -> None:
        sys.stderr.write(f"dsv4 bench: {text}\n")
        progress({"state": "running", "step": text})

    try:
        config = guard.read(options.guard)
        with alone():
            try:
                results = measure(config, work, say)
            except BaseException as error:
                progress({"state": "failed", "error": str(error) or type(error).__name__})
                raise
            left = receipt.leave_or_say("bench", {"results": results})
            progress({"state": "done", "receipt": left})
    except (BenchError, guard.BrokenGuard, OSError, engine_api.ApiError) as error:
        sys.stderr.write(f"dsv4 bench: {error}\n")
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        return 3
    for line in bench_report.table(results):
        sys.stderr.write(f"{line}\n")
    if options.json:
        beside = [row.plain() for row in reference.rows(results)]
        print(json.dumps({**results, "beside": beside, "receipt": left}, ensure_ascii=False))
    return 0 if results["ok"] else 1


def progress(value: dict[str, Any]) -> None:
    """Say how far it is, to whoever follows; not being able to is no fault."""
    with contextlib.suppress(OSError):
        store.write_json(layout.BENCH_PROGRESS, value)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
