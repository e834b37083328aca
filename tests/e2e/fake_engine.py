#!/usr/bin/env python3
"""A stand-in for `vllm`, with its faults on demand: `fake_engine.py serve --config FILE`.

Runs alone on the target's own Python. It reads `port`, `host`, `served-model-name` and `model` from
the config file, maps the model's weight files one after the other as a loader does, keeps a child
that calls itself `VLLM::EngineCore` as vLLM's worker does, and answers the OpenAI routes. How it
misbehaves is in the environment:

    FAKE_LOAD_S      seconds a load takes (1)
    FAKE_FAULT       none | hang (completions never answer) | empty | error (500) | wrong_model
                     | reasoning (no text beside it) | crash (ends with status 1 in the load)
                     | refused (vLLM's words for too little memory, status 1) | no_room (its words
                     for a context that does not fit, status 1) | exit0 (in the load)
                     | core_dies (worker ends, server stays) | never (never listens)
    FAKE_IGNORE_TERM   1: SIGTERM is ignored
    FAKE_HOG_MIB       memory the worker takes and touches
    FAKE_HOG_AFTER_S   when it does, seconds from its start (0)
    FAKE_REQUEST_S     seconds an answer takes (0)
    FAKE_HANG_AFTER_S  seconds of serving after which completions never answer
    FAKE_BUSY          1: the counters say that it works on a request and moves on, for ever
    FAKE_LINES         lines it writes at once before a crash (0)

Like vLLM's it ends with status 0 when its worker dies while it serves.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PR_SET_NAME = 15
REFUSAL = (
    "ValueError: Free memory on device cuda:0 (86.8/121.69 GiB) on startup is less than desired"
    " GPU memory utilization (0.88, 107.09 GiB). Decrease GPU memory utilization or reduce GPU"
    " memory used by other processes."
)
NO_ROOM = "ValueError: No available memory for the cache blocks. Try initializing the engine again."
LAST_WORDS = {"crash": "RuntimeError: a made-up crash", "refused": REFUSAL, "no_room": NO_ROOM}


def configuration(argv: list[str]) -> dict[str, str]:
    """Read the flat YAML that the deploy writes."""
    lines = Path(argv[argv.index("--config") + 1]).read_text().splitlines()
    pairs = (line.partition(":") for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def setting(name: str, default: str = "") -> str:
    return os.environ.get(f"FAKE_{name}", default)


def worker(hog_mib: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"VLLM::EngineCore", 0, 0, 0)
    time.sleep(float(setting("HOG_AFTER_S", "0")))
    held = bytearray(hog_mib << 20)
    for place in range(0, len(held), 4096):
        held[place] = 1
    while True:
        time.sleep(3600)


def end_with(child: int) -> None:
    os.waitpid(child, 0)
    os._exit(0)


def load(view: Path, seconds: float) -> None:
    files = sorted(view.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as data:
            sum(data[place] for place in range(0, len(data), 4096))
            time.sleep(seconds / len(files))
    if not files:
        time.sleep(seconds)


def completion(fault: str, chat: bool) -> dict[str, Any]:
    text = "" if fault in {"empty", "reasoning"} else " Paris."
    thought = " It is Paris, I think." if fault == "reasoning" else None
    if chat:
        inner = {"role": "assistant", "content": text or None, "reasoning": thought}
        return {"choices": [{"message": inner, "finish_reason": "stop"}]}
    choice = {"text": text, "reasoning": thought, "finish_reason": "length"}
    return {"object": "text_completion", "choices": [choice], "usage": {"completion_tokens": 8}}


class Handler(BaseHTTPRequestHandler):
    fault = "none"
    model = "fake"
    since = 0.0
    running = 0
    steps = 0

    def metrics(self) -> str:
        busy = setting("BUSY") == "1"
        steps = int(time.monotonic() * 10) if busy else Handler.steps
        rows = {"num_requests_running": Handler.running + busy, "generation_tokens_total": steps}
        return "".join(f'vllm:{name}{{engine="0"}} {value}.0\n' for name, value in rows.items())

    def reply(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.reply(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, {})
        elif self.path == "/metrics":
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + self.metrics().encode())
        elif self.allowed():
            name = "another" if self.fault == "wrong_model" else self.model
            self.reply(200, {"object": "list", "data": [{"id": name}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if not self.allowed():
            return
        Handler.running += 1
        try:
            self.complete()
        finally:
            Handler.running -= 1
            Handler.steps += 1

    def complete(self) -> None:
        hang_after = float(setting("HANG_AFTER_S", "inf"))
        if self.fault == "hang" or time.monotonic() - Handler.since > hang_after:
            time.sleep(3600)
        time.sleep(float(setting("REQUEST_S", "0")))
        if self.fault == "error":
            self.reply(500, {"error": {"message": "EngineCore encountered an issue"}})
            return
        self.reply(200, completion(self.fault, "chat" in self.path))

    def log_message(self, format: str, *args: object) -> None:
        return


def main(argv: list[str]) -> int:
    config = configuration(argv)
    fault = setting("FAULT", "none")
    if setting("IGNORE_TERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    child = os.fork()
    if child == 0:
        worker(int(setting("HOG_MIB", "0")))
    load(Path(config["model"]), float(setting("LOAD_S", "1")))
    if fault in LAST_WORDS:
        for number in range(int(setting("LINES", "0"))):
            sys.stderr.write(f"frame {number}\n")
        print(LAST_WORDS[fault], file=sys.stderr)
        return 1
    if fault == "exit0":
        return 0
    if fault == "core_dies":
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if fault in {"never", "core_dies"}:
        time.sleep(3600)
    Handler.fault, Handler.model = fault, config["served-model-name"]
    Handler.since = time.monotonic()
    threading.Thread(target=end_with, args=(child,), daemon=True).start()
    server = ThreadingHTTPServer((config.get("host", "127.0.0.1"), int(config["port"])), Handler)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
