"""Ask the engine over HTTP, and tell apart the ways in which it can fail to answer.

`http.client` and not `urllib`: a proxy in the environment has no business between this machine and
itself. Answers are bounded in size, because whoever asks may be root, and in time as a whole: a
server that sends a byte now and then would outlast a limit on each read.
"""

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dsv4 import layout

LIMIT: Final = 4 << 20
STREAM_LIMIT: Final = 64 << 20
CHUNK: Final = 1 << 16
SHOWN: Final = 200

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

DOWN: Final = "down"
TIMEOUT: Final = "timeout"
AUTH: Final = "auth"
HTTP: Final = "http"
BROKEN: Final = "broken"


class ApiError(Exception):
    """No usable answer: `kind` is down, timeout, auth, http or broken."""

    def __init__(self, kind: str, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.kind = kind
        self.status = status


@dataclass(frozen=True)
class Usage:
    """Tokens as the engine counted them; None is what it did not say, which is not nought."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call the model asks for; `arguments` is what the engine sent, meant to be JSON in text."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True)
class Answer:
    """What the model said, apart from what it thought on the way."""

    text: str
    reasoning: str
    finish: str
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)

    @property
    def produced(self) -> bool:
        """Say whether there is at least one token of either."""
        return bool(self.text or self.reasoning)


def find_key() -> str | None:
    """Return the API key this process may use: its credential, the environment, root's file."""
    places = [layout.API_KEY]
    if directory := os.environ.get("CREDENTIALS_DIRECTORY"):
        places.insert(0, Path(directory) / "api_key")
    for place in places:
        try:
            if key := place.read_text().strip():
                return key
        except (OSError, UnicodeDecodeError):
            continue
    return os.environ.get("VLLM_API_KEY") or None


def text_of(*values: Any) -> str:
    """Return the first of several fields that holds text; any of them may be null or missing."""
    return next((value for value in values if isinstance(value, str) and value), "")


def answer_of(reply: Any) -> Answer:
    """Return the answer in a completion or chat completion; raise `ApiError` if there is none."""
    if not isinstance(reply, dict):
        raise ApiError(BROKEN, f"the answer is no object: {str(reply)[:SHOWN]}")
    if reply.get("error") or reply.get("object") == "error":
        raise ApiError(HTTP, f"the engine says: {message_of(reply)}", 200)
    usage = usage_of(reply)
    choice = first_choice(reply)
    if choice is None:
        return Answer("", "", "", usage=usage)
    message = choice.get("message")
    inner = message if isinstance(message, dict) else {}
    return Answer(
        text=text_of(inner.get("content"), choice.get("text")),
        reasoning=text_of(*thoughts_in(inner), *thoughts_in(choice)),
        finish=str(choice.get("finish_reason") or ""),
        calls=tuple(calls_in(inner)),
        usage=usage,
    )


def first_choice(reply: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first choice of an answer or of a chunk; a usage chunk has none."""
    choices = reply.get("choices")
    found = choices[0] if isinstance(choices, list) and choices else None
    return found if isinstance(found, dict) else None


def thoughts_in(part: dict[str, Any]) -> list[Any]:
    """Return what stands under either name that engines give to reasoning."""
    return [part.get("reasoning"), part.get("reasoning_content")]


def calls_in(message: dict[str, Any]) -> Iterator[ToolCall]:
    """Yield the tool calls of a message."""
    found = message.get("tool_calls")
    for call in found if isinstance(found, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            name = str(function.get("name") or "")
            yield ToolCall(str(call.get("id") or ""), name, function.get("arguments"))


def count(value: Any) -> int | None:
    """Return a number of tokens, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def usage_of(reply: dict[str, Any]) -> Usage:
    """Return the tokens an answer or a chunk says it took."""
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("prompt_tokens_details")
    return Usage(
        prompt=count(usage.get("prompt_tokens")),
        completion=count(usage.get("completion_tokens")),
        cached=count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def message_of(value: Any) -> str:
    """Return the words in an error answer."""
    if isinstance(value, dict):
        inner = value.get("error", value)
        found = inner.get("message") if isinstance(inner, dict) else inner
        return str(found or value.get("detail") or value)[:SHOWN]
    return str(value)[:SHOWN]


@dataclass(frozen=True)
class Client:
    """One server."""

    url: str
    key: str | None = None
    timeout: float = 30.0

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection; our own certificate is not checked on the way to ourselves."""
        parts = urlsplit(self.url)
        host = parts.hostname or "127.0.0.1"
        if parts.scheme == "https":
            # The url is our own server's: what its certificate is made out to is for others
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return http.client.HTTPSConnection(
                host, parts.port, timeout=self.timeout, context=context
            )
        return http.client.HTTPConnection(host, parts.port, timeout=self.timeout)

    @contextlib.contextmanager
    def sent(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and have its reply read within the time limit, the last byte included."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection = self.connection()
        ends = time.monotonic() + self.timeout
        timer: threading.Timer | None = None
        try:
            data = json.dumps(body).encode() if body is not None else None
            connection.connect()
            # The connection lets go of it once the headers are there
            timer = threading.Timer(self.timeout, cut, [connection.sock])
            timer.daemon = True
            timer.start()
            connection.request(method, path, data, headers)
            yield connection.getresponse()
            if time.monotonic() >= ends:
                raise TimeoutError
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= ends:
                text = f"no answer from {path} in {self.timeout:.0f} s"
                raise ApiError(TIMEOUT, text) from error
            raise ApiError(DOWN, f"{self.url}: {error or error.__class__.__name__}") from error
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()

    def fetch(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Return the status and the bytes a request is answered with."""
        with self.sent(method, path, body) as response:
            return response.status, response.read(LIMIT + 1)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON a request is answered with; raise `ApiError` for anything else."""
        return decoded(path, *self.fetch(method, path, body))

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, bytes]]:
        """Yield an answer's bytes as they come, each with its time on the monotonic clock.

        Raises `ApiError`, also when the answer is not finished within the time limit.
        """
        with self.sent("POST", path, {**body, "stream": True}) as response:
            if response.status != http.HTTPStatus.OK:
                decoded(path, response.status, response.read(LIMIT + 1))
            size = 0
            while part := response.read1(CHUNK):
                yield time.monotonic(), part
                size += len(part)
                if size > STREAM_LIMIT:
                    raise ApiError(BROKEN, f"{path}: more than {STREAM_LIMIT >> 20} MiB of answer")

    def text(self, path: str) -> str:
        """Return what a route answers in plain text, as /metrics does."""
        status, raw = self.fetch("GET", path)
        if status != http.HTTPStatus.OK:
            decoded(path, status, raw)
        return raw.decode(errors="replace")

    def served(self) -> dict[str, int | None]:
        """Return the names the engine serves, each with its context in tokens where it says so."""
        reply = self.ask("GET", "/v1/models")
        rows = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(rows, list):
            raise ApiError(BROKEN, "/v1/models lists nothing; this is not the engine")
        return {
            str(r.get("id")): count(r.get("max_model_len")) for r in rows if isinstance(r, dict)
        }

    def models(self) -> list[str]:
        """Return the names the engine serves."""
        return list(self.served())

    def complete(self, model: str, prompt: str, max_tokens: int, chat: bool = False) -> Answer:
        """Return the model's answer to a prompt, at temperature 0."""
        if chat:
            return self.chat(model, [{"role": "user", "content": prompt}], max_tokens)
        body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "prompt": prompt}
        return answer_of(self.ask("POST", COMPLETIONS, body))

    def chat(
        self, model: str, messages: list[dict[str, Any]], max_tokens: int, **more: Any
    ) -> Answer:
        """Return the model's answer in a conversation, at temperature 0."""
        body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "messages": messages}
        return answer_of(self.ask("POST", CHAT, {**body, **more}))


def cut(connected: socket.socket | None) -> None:
    """End a connection that took too long; whoever reads from it sees its end."""
    if connected is not None:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)


def decoded(path: str, status: int, raw: bytes) -> Any:
    """Return the JSON of a reply; raise `ApiError` for an error status or what is no JSON."""
    try:
        value = json.loads(raw) if len(raw) <= LIMIT else None
    except ValueError:
        value = None
    words = message_of(value) if value is not None else raw[:SHOWN].decode(errors="replace")
    if status in {401, 403}:
        raise ApiError(AUTH, f"{path} answers {status}: the key is not the engine's", status)
    if status != http.HTTPStatus.OK:
        raise ApiError(HTTP, f"{path} answers {status}: {words}", status)
    if value is None:
        raise ApiError(BROKEN, f"{path} answers no JSON: {words}")
    return value
