"""The half of client_overhead.py that runs on the machine: both clients, the same requests."""

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from dsv4 import bench, engine_api, layout, runtime, stream


def ours(client: engine_api.Client, model: str, requests: int, tokens: int) -> dict[str, float]:
    """Return our client's figures, by vLLM's definitions."""
    first, each, total = [], [], 0
    began = time.monotonic()
    for _ in range(requests):
        body = {
            "model": model,
            "prompt": bench.fresh(random.SystemRandom(), 64),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        came = stream.ask(client, engine_api.COMPLETIONS, body)
        assert came.ttft_s is not None
        assert came.tokens_per_s is not None
        first.append(1000 * came.ttft_s)
        each.append(1000 / came.tokens_per_s)
        total += came.usage.completion or 0
    seconds = time.monotonic() - began
    return {
        "ttft_ms": statistics.mean(first),
        "tpot_ms": statistics.mean(each),
        "tokens_per_s": total / seconds,
    }


def theirs(tool: bench.Tool, work: bench.Work) -> dict[str, float]:
    """Return vLLM's figures."""
    found = tool.run(work, 1, random.SystemRandom().randrange(1 << 30))
    return {
        "ttft_ms": found["mean_ttft_ms"],
        "tpot_ms": found["mean_tpot_ms"],
        "tokens_per_s": found["output_throughput"],
    }


def main(argv: list[str]) -> int:
    """Measure with both and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args(argv)
    client = engine_api.Client(options.url, None, 600)
    home = layout.RUNTIMES / str(runtime.link_target(layout.CURRENT))
    tool = bench.Tool(home, options.url, options.model, layout.VIEW_CURRENT, None, layout.USER)
    work = bench.Work(
        streams=(1,),
        prompt_tokens=64,
        output_tokens=options.tokens,
        per_stream=options.requests,
    )
    found: dict[str, Any] = {}
    for turn in range(2):  # the first is not kept: caches and kernels are cold
        found["vllm"] = theirs(tool, work) if turn else None
        found["ours"] = ours(client, options.model, options.requests, options.tokens)
    with bench.Watch(client):
        found["watched"] = theirs(tool, work)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
