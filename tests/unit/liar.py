"""An engine for tests that answers as the real one does, until it is told to lie.

It knows the pack's smoke question, reads test cards, calls tools, thinks apart and finds needles. A
lie changes one thing: the request before the engine sees it, the reply before it is sent, or how it
is sent. Whatever a lie does, the engine stays polite HTTP.
"""

import base64
import json
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dsv4 import picture

MODEL = "m"
IMAGE_TOKENS = 240
Reply = dict[str, Any]


# What an honest engine does


def pixels(data: bytes) -> list[bytes]:
    """Return the rows of an 8 bit RGB PNG without filters."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, packed, width = 8, b"", 0
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            kind + body
        )
        if kind == b"IHDR":
            width, _, depth, colour = struct.unpack(">IIBB", body[:10])
            assert (depth, colour) == (8, 2)
        if kind == b"IDAT":
            packed += body
        at += 12 + length
    raw, stride = zlib.decompress(packed), 1 + 3 * width
    rows = [raw[i : i + stride] for i in range(0, len(raw), stride)]
    assert all(row[0] == 0 for row in rows)
    return [row[1:] for row in rows]


def read_card(data: bytes) -> tuple[str, str]:
    """Return the number and the colour on a card, by looking at its pixels only."""
    rows = pixels(data)
    dark = [[row[x : x + 3] == b"\0\0\0" for x in range(0, len(row), 3)] for row in rows]
    ys = [y for y, row in enumerate(dark) if any(row)]
    top, height = ys[0], ys[-1] - ys[0] + 1
    scale = height // picture.ROWS
    lines = [dark[top + n * scale + scale // 2] for n in range(picture.ROWS)]
    left = (len(lines[0]) - picture.WIDTH * scale) // 2
    bits = [
        "".join("1" if line[left + n * scale + scale // 2] else "0" for n in range(picture.WIDTH))
        for line in lines
    ]
    known = {glyph: digit for digit, glyph in picture.GLYPHS.items()}
    number = "".join(
        known[" ".join(line[n * 6 : n * 6 + 5] for line in bits)] for n in range(picture.LENGTH)
    )
    middle = len(rows[0]) // 2 // 3 * 3
    found = tuple(rows[picture.SIDE // 2 + picture.SIDE // 6][middle : middle + 3])
    return number, next(name for name, value in picture.COLOURS.items() if value == found)


def parts_of(messages: list[dict[str, Any]]) -> tuple[str, list[bytes]]:
    """Return the words and the images of the last user message."""
    content = [m for m in messages if m["role"] == "user"][-1]["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    words = " ".join(part["text"] for part in parts if part["type"] == "text")
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return words, [base64.b64decode(url.partition(",")[2]) for url in urls]


def said(body: Mapping[str, Any]) -> tuple[str, str, list[dict[str, Any]], int]:
    """Return text, reasoning, tool calls and prompt tokens, as an honest engine has them."""
    messages = body.get("messages") or [{"role": "user", "content": body.get("prompt", "")}]
    words, images = parts_of(messages)
    tokens = len(words.split()) + IMAGE_TOKENS * len(images)
    if images:
        number, colour = read_card(images[0])
        return f"{number}, {colour}", "", [], tokens
    if messages[-1]["role"] == "tool":
        assert messages[-2]["tool_calls"][0]["id"] == messages[-1]["tool_call_id"]
        return f"It shows {messages[-1]['content']}.", "", [], tokens
    if body.get("tools"):
        gauge = re.search(r"gauge (\w+)", words)
        assert gauge
        function = {"name": "read_gauge", "arguments": json.dumps({"gauge": gauge[1]})}
        return "", "", [{"id": "call-1", "type": "function", "function": function}], tokens
    if sums := re.search(r"(\d+) plus (\d+)", words):
        total = int(sums[1]) + int(sums[2])
        thought = f"I add them: {total}" if body.get("chat_template_kwargs") else ""
        return str(total), thought, [], tokens
    if secret := re.search(r"lighthouse is (\d+)", words):
        return f"It is {secret[1]}.", "", [], tokens
    return "Paris is it, and has been for long.", "", [], tokens


def reply_to(body: Mapping[str, Any]) -> Reply:
    """Return the whole answer, as one JSON object."""
    text, reasoning, calls, prompt = said(body)
    budget = int(body.get("max_tokens") or 16)
    if body.get("ignore_eos"):
        text = " ".join(["on"] * budget)
    words = text.split(" ")[:budget]
    message: dict[str, Any] = {"role": "assistant", "content": " ".join(words) or None}
    message["reasoning"] = reasoning or None
    message["tool_calls"] = calls
    finish = "tool_calls" if calls else "length" if len(words) < len(text.split(" ")) else "stop"
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"message": message} if "messages" in body else {"text": message["content"]}
    completion = len(words) + len(reasoning.split())
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"object": "chat.completion", "choices": [choice], "usage": usage}


def events_of(body: Mapping[str, Any], reply: Reply) -> list[Any]:
    """Return the answer as the events of a stream: a role, a token each, the usage."""
    choice = reply["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    chat = "messages" in body
    usage = reply.get("usage") or {}
    found: list[Any] = []
    done = 0

    def piece(finish: str | None = None, **fields: Any) -> dict[str, Any]:
        inner = {"delta": fields} if chat else {"text": fields.get("content", "")}
        counted = {"prompt_tokens": usage.get("prompt_tokens"), "completion_tokens": done}
        each = (body.get("stream_options") or {}).get("continuous_usage_stats")
        return {
            "choices": [{"index": 0, "finish_reason": finish, **inner}],
            "usage": counted if each and usage else None,
        }

    if chat:
        found.append(piece(role="assistant", content=""))
    for name in ("reasoning", "content"):
        for word in (message.get(name) or "").split(" "):
            if word:
                done += 1
                found.append(piece(**{name: f"{word} "}))
    found.append(piece(choice["finish_reason"], content=""))
    if usage:
        found.append({"choices": [], "usage": usage})
    return [*found, "[DONE]"]


# Lies


@dataclass
class Lie:
    """How an answer is made worse."""

    before: Callable[[str, dict[str, Any]], tuple[int, Any] | None] | None = None
    """Answers in place of the engine, or changes the request."""
    after: Callable[[dict[str, Any], Reply], None] | None = None
    """Changes the reply."""
    events: Callable[[list[Any]], list[Any]] | None = None
    """Changes the events of a stream."""
    wire: Callable[[bytes], Iterator[bytes]] | None = None
    """Sends the bytes of a stream in its own way."""
    hang: float = 0.0
    """Seconds before the first byte of an answer."""
    trickle: float = 0.0
    """Seconds between bytes of an answer that is not streamed."""
    models: Any = None


@dataclass
class Liar:
    """A running engine."""

    url: str
    seen: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)


def metrics_text(counters: Mapping[str, float]) -> str:
    """Return the engine's counters as /metrics shows them."""
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    return "".join(f"vllm:{name}{labels} {value}\n" for name, value in counters.items())


@contextmanager
def engine(
    lie: Lie | None = None, token_s: float = 0.0, counters: dict[str, float] | None = None
) -> Iterator[Liar]:
    """An engine that tells this lie, or the truth; `token_s` between the events of a stream.

    `counters` is what /metrics shows, for a lie to add to.
    """
    told = lie or Lie()
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.whole(200, metrics_text(state.counters).encode())
            elif self.path == "/health":
                self.whole(200, b"")
            else:
                known = {"data": [{"id": MODEL, "max_model_len": 8192}]}
                self.whole(200, known if told.models is None else told.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.seen.append(body)
            over.wait(told.hang)
            if told.before and (other := told.before(self.path, body)):
                self.whole(*other)
                return
            reply = reply_to(body)
            for name, count in reply["usage"].items():
                kind = {"prompt_tokens": "prompt", "completion_tokens": "generation"}[name]
                key = f"{kind}_tokens_total"
                state.counters[key] = state.counters.get(key, 0) + count
            if told.after:
                told.after(body, reply)
            if body.get("stream"):
                self.stream(events_of(body, reply))
            else:
                self.whole(200, reply)

        def whole(self, status: int, value: Any) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            step = 1 if told.trickle else max(1, len(data))
            try:
                for at in range(0, len(data), step):
                    self.wfile.write(data[at : at + step])
                    if over.wait(told.trickle):
                        return
            except OSError:
                return

        def stream(self, events: list[Any]) -> None:
            if told.events:
                events = told.events(events)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                for event in events:
                    text = event if isinstance(event, str) else json.dumps(event)
                    data = f"data: {text}\n\n".encode()
                    for part in told.wire(data) if told.wire else [data]:
                        self.wfile.write(part)
                        self.wfile.flush()
                    if over.wait(token_s):
                        return
            except OSError:
                return

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    state = Liar(
        f"http://127.0.0.1:{server.server_port}", counters={} if counters is None else counters
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield state
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def refuse(status: int, message: str, where: Callable[[dict[str, Any]], bool]) -> Lie:
    """Return the lie of refusing some requests."""

    def before(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        return (status, {"error": {"message": message}}) if where(body) else None

    return Lie(before=before)


def has_image(body: dict[str, Any]) -> bool:
    """Say whether a request has an image."""
    return "image_url" in json.dumps(body.get("messages", ""))


def on_message(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Lie:
    """Return the lie that changes the message of each chat answer."""

    def after(body: dict[str, Any], reply: Reply) -> None:
        if message := reply["choices"][0].get("message"):
            change(body, message)

    return Lie(after=after)


def slowly(data: bytes) -> Iterator[bytes]:
    """Yield one byte at a time, with a pause now and then."""
    for at in range(len(data)):
        if at % 40 == 0:
            time.sleep(0.001)
        yield data[at : at + 1]
