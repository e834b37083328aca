"""Ask the engine over HTTP, and tell apart the ways in which it can fail to answer.

`http.client` and not `urllib`: a proxy in the environment has no business between this machine and
itself. Answers are bounded in size, because whoever asks may be root.
"""

import http.client
import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dsv4 import layout

LIMIT: Final = 4 << 20
SHOWN: Final = 200

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
class Answer:
    """What the model said, apart from what it thought on the way."""

    text: str
    reasoning: str
    finish: str

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
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Answer("", "", "")
    choice = choices[0]
    message = choice.get("message")
    inner = message if isinstance(message, dict) else {}
    thoughts = [part.get(k) for part in (inner, choice) for k in ("reasoning", "reasoning_content")]
    return Answer(
        text=text_of(inner.get("content"), choice.get("text")),
        reasoning=text_of(*thoughts),
        finish=str(choice.get("finish_reason") or ""),
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

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON a request is answered with; raise `ApiError` for anything else."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection = self.connection()
        try:
            data = json.dumps(body).encode() if body is not None else None
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            raw = response.read(LIMIT + 1)
        except TimeoutError as error:
            raise ApiError(TIMEOUT, f"no answer from {path} in {self.timeout:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(DOWN, f"{self.url}: {error or error.__class__.__name__}") from error
        finally:
            connection.close()
        return decoded(path, response.status, raw)

    def models(self) -> list[str]:
        """Return the names the engine serves."""
        reply = self.ask("GET", "/v1/models")
        rows = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(rows, list):
            raise ApiError(BROKEN, "/v1/models lists nothing; this is not the engine")
        return [str(row.get("id")) for row in rows if isinstance(row, dict)]

    def complete(self, model: str, prompt: str, max_tokens: int, chat: bool = False) -> Answer:
        """Return the model's answer to a prompt, at temperature 0."""
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        if chat:
            body["messages"] = [{"role": "user", "content": prompt}]
            return answer_of(self.ask("POST", "/v1/chat/completions", body))
        body["prompt"] = prompt
        return answer_of(self.ask("POST", "/v1/completions", body))


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
