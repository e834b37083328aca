"""What a streamed answer shows while it comes: first token, first word of the answer, rate.

A chunk is no token: a draft model's come several at a time. Tokens are what the engine counts, and
what it did not count is None here, never nought. The first token is the first text of any of the
three fields that hold some (`content`, `reasoning`, `reasoning_content`), so that a chunk with only
a role is none; the first token of the *answer* is apart, because a model may think for a minute.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from dsv4 import engine_api
from dsv4.engine_api import ApiError, Usage, first_choice, message_of, text_of, thoughts_in

DONE: Final = "[DONE]"
OPTIONS: Final = {"include_usage": True, "continuous_usage_stats": True}
"""Usage in the last chunk, and where the engine can, in each."""


class Lines:
    """Server-sent events from bytes: any line end, fields cut anywhere, comments left out."""

    def __init__(self) -> None:
        self.rest = b""
        self.data: list[str] = []

    def feed(self, part: bytes) -> Iterator[str]:
        """Yield the data of each event that is now complete."""
        whole = self.rest + part
        # A line end may be cut in two: a carriage return at the very end waits for what follows
        held = b"\r" if whole.endswith(b"\r") else b""
        lines = whole[: len(whole) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *complete, last = lines.split(b"\n")
        self.rest = last + held
        for line in complete:
            yield from self.line(line.decode(errors="replace").removeprefix("\ufeff"))

    def line(self, line: str) -> Iterator[str]:
        """Take one line; an empty one ends an event."""
        if not line:
            if self.data:
                yield "\n".join(self.data)
            self.data = []
        elif line.startswith("data:"):
            self.data.append(line.removeprefix("data:").removeprefix(" "))

    def end(self) -> Iterator[str]:
        """Yield what a server that hung up in mid-event had sent."""
        yield from self.line(self.rest.decode(errors="replace").strip())
        yield from self.line("")


@dataclass
class Streamed:
    """One answer. Times are seconds on the monotonic clock; None: it never came."""

    began: float
    first: float | None = None
    first_answer: float | None = None
    last: float | None = None
    ended: float | None = None
    text: str = ""
    reasoning: str = ""
    finish: str = ""
    chunks: int = 0
    """Events with text in them."""
    usage: Usage = field(default_factory=Usage)
    tokens_at_first: int | None = None
    tokens_at_last: int | None = None
    done: bool = False

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token, of reasoning or answer."""
        return None if self.first is None else self.first - self.began

    @property
    def answer_s(self) -> float | None:
        """Seconds to the first token of the answer itself."""
        return None if self.first_answer is None else self.first_answer - self.began

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second between the first token and the last; None when nobody counted them."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        if self.tokens_at_first is not None and self.tokens_at_last is not None:
            counted = self.tokens_at_last - self.tokens_at_first
        elif self.usage.completion is not None:
            # Without a count beside each chunk the first one is taken for one token
            counted = self.usage.completion - 1
        else:
            return None
        return counted / (self.last - self.first) if counted > 0 else None

    def take(self, event: str, at: float) -> None:
        """Take one event; raise `ApiError` for an error in it or for what is no JSON."""
        if event.strip() == DONE:
            self.done = True
            return
        try:
            value = json.loads(event)
        except ValueError:
            raise ApiError(
                engine_api.BROKEN, f"the stream holds no JSON: {event[: engine_api.SHOWN]}"
            ) from None
        if not isinstance(value, dict):
            raise ApiError(engine_api.BROKEN, f"the stream holds no object: {event[:80]}")
        if value.get("error") or value.get("object") == "error":
            raise ApiError(engine_api.HTTP, f"the engine says: {message_of(value)}", 200)
        # The usage first: the chunk that has the final one has no choices
        usage = engine_api.usage_of(value)
        if usage != Usage():
            self.usage = usage
        choice = first_choice(value)
        if choice is not None:
            self.piece(choice, usage, at)

    def piece(self, choice: dict[str, Any], usage: Usage, at: float) -> None:
        """Take one piece of the answer."""
        for name in ("delta", "message"):
            inner = choice.get(name)
            if isinstance(inner, dict):
                break
        else:
            inner = {}
        text = text_of(inner.get("content"), choice.get("text"))
        thought = text_of(*thoughts_in(inner), *thoughts_in(choice))
        if finish := choice.get("finish_reason"):
            self.finish = str(finish)
        if not text and not thought:
            return
        self.text += text
        self.reasoning += thought
        self.chunks += 1
        self.last = at
        self.tokens_at_last = usage.completion
        if self.first is None:
            self.first, self.tokens_at_first = at, usage.completion
        if text and self.first_answer is None:
            self.first_answer = at

    def answer(self) -> engine_api.Answer:
        """Return it as an answer that came in one piece would be."""
        return engine_api.Answer(self.text, self.reasoning, self.finish, (), self.usage)


def read(parts: Iterable[tuple[float, bytes]], began: float) -> Streamed:
    """Return what a stream showed; raise `ApiError` for one that broke off or held an error.

    An engine that answers a streaming request in one piece is read as well: one event, without the
    framing.
    """
    found, lines = Streamed(began), Lines()
    at, whole = began, b""
    for at, part in parts:
        whole = whole + part if not found.chunks and len(whole) < engine_api.LIMIT else whole
        for event in lines.feed(part):
            found.take(event, at)
    for event in lines.end():
        found.take(event, at)
    if not found.chunks and not found.done and whole.lstrip()[:1] == b"{":
        found.take(whole.decode(errors="replace"), at)
        found.done = bool(found.finish)
    found.ended = at
    if not found.done and not found.finish:
        raise ApiError(
            engine_api.BROKEN,
            f"the stream broke off after {found.chunks} pieces of text, without an end",
        )
    return found


def ask(client: engine_api.Client, path: str, body: dict[str, Any]) -> Streamed:
    """Put one request and read its answer as it comes."""
    began = time.monotonic()
    return read(client.stream(path, {**body, "stream_options": OPTIONS}), began)
