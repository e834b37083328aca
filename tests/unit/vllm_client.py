"""A stand-in for `vllm bench serve`: the same arguments, the same result file, few lines.

It asks the server for real, one request after the other, and writes what vLLM's own client writes.
`BENCH_LIE` in its prompts' length tells it how to fail: 901 fails, 902 hangs, 903 writes no result,
904 counts chunks, 905 asks the same prompt again and again.
"""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

FAILS, HANGS, SILENT, CHUNKS, SAME = range(901, 906)


def main(argv: list[str]) -> int:
    """Ask and write."""
    options = {name: argv[at + 1] for at, name in enumerate(argv[:-1]) if name.startswith("--")}
    out = Path(options["--result-dir"])
    (out.parent / "called.json").write_text(json.dumps({"argv": argv, "env": dict(os.environ)}))
    lie = int(options["--random-input-len"])
    if lie == FAILS:
        print("Traceback (most recent call last):\nValueError: the model is too shy", flush=True)
        return 1
    if lie == HANGS:
        time.sleep(600)
    if lie == SILENT:
        return 0
    count, length = int(options["--num-prompts"]), int(options["--random-output-len"])
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    began, tokens = time.monotonic(), 0
    for number in range(count):
        word = 0 if lie == SAME else number
        body = {
            "model": options["--model"],
            "prompt": f"{options['--seed']} {word}",
            "max_tokens": length,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{options['--base-url']}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with opener.open(request, timeout=30) as response:
            tokens += json.load(response)["usage"]["completion_tokens"]
    seconds = max(1e-3, time.monotonic() - began)
    if lie == CHUNKS:
        tokens //= 4
    found = {
        "duration": seconds,
        "completed": count,
        "failed": 0,
        "total_input_tokens": 2 * count,
        "total_output_tokens": tokens,
        "output_throughput": tokens / seconds,
        "max_output_tokens_per_s": tokens / seconds,
        "mean_ttft_ms": 10.0,
        "p95_ttft_ms": 12.0,
        "mean_tpot_ms": 20.0,
        "mean_e2el_ms": 100.0,
    }
    (out / options["--result-filename"]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
