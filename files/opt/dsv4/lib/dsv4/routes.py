"""What the server answers, and to whom: every other route does not exist (vLLM's `--middleware`).

vLLM registers some seventy routes. Its own key guards those under a few prefixes, and never an
OPTIONS request; among the rest are ones that pause the engine, abort requests or run inference.
This stands in front of all of them, in the engine's process and in the outermost place, and knows
a request by its exact method and path: what is spelt in another way is another route.

    key     required on all but /health, as `Authorization: Bearer KEY` (or `x-api-key: KEY`, which
            Anthropic's clients send). The key in force is the one whose digest stands in
            /run/dsv4, so a new one takes effect at once and the old one is dead, while requests
            in flight go on. The engine's own layer gets the key it was started with.
    no key  the server listens on loopback only, and a web page must not reach it by a name that
            leads to this machine: then the request must be addressed to an IP address or localhost
    stop    while the service is being stopped new requests are turned away, running ones finish

Runs under the engine's Python, standard library only. A wrong setting stops the engine's start.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from dsv4 import layout

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MIDDLEWARE: Final = "dsv4.routes.Allowlist"
VARIABLE: Final = "DSV4_SERVE_ROUTES"
HEALTH: Final = "/health"

ROUTES: Final = {
    HEALTH: "GET",
    "/metrics": "GET",
    "/v1/models": "GET",
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/responses": "POST",
}
"""What clients of the OpenAI and Anthropic interfaces and a Prometheus scrape use."""

EXTRA: Final = {
    "/detokenize": "POST",
    "/load": "GET",
    "/tokenize": "POST",
    "/tokenizer_info": "GET",
    "/version": "GET",
}
"""What an owner can add (`serve_routes`): these ask and change nothing, but tell about the machine
or have no model to wait for, so that anybody with a key can keep the server's processor busy.

Nothing that controls the engine is on either list, nor what reaches the same inference by another
way (/invocations, /inference/v1/generate, /cohere/v2/chat, …)."""


def allowed(extra: Iterable[str]) -> dict[str, str]:
    """Return method by path for the routes served; ValueError for one that cannot be added."""
    found = dict(ROUTES)
    for path in extra:
        if path not in EXTRA:
            raise ValueError(f"{path}: cannot be served; {VARIABLE} takes {', '.join(EXTRA)}")
        found[path] = EXTRA[path]
    return found


def digest(key: str) -> str:
    """Return what a key is known by."""
    return hashlib.sha256(key.encode()).hexdigest()


def credential(headers: Headers) -> str | None:
    """Return the key a request brings; None when it brings none, or more than one."""
    bearers = [value for name, value in headers if name == b"authorization"]
    plain = [value for name, value in headers if name == b"x-api-key"]
    if len(bearers) > 1 or len(plain) > 1:
        return None
    if bearers:
        scheme, _, key = bearers[0].decode("latin-1").strip().partition(" ")
        return key.strip() or None if scheme.lower() == "bearer" else None
    return plain[0].decode("latin-1").strip() or None if plain else None


def is_local_name(host: str) -> bool:
    """Say whether a Host header names this machine in a way that no name server can decide."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class Refused(Exception):
    """A request that goes no further: status, a word for programs, a sentence, further headers."""

    def __init__(
        self, status: HTTPStatus, code: str, text: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.headers = headers or {}


class Key:
    """The key in force: the engine's own until another one's digest is put in its place.

    A file that is there and holds no digest lets nobody in.
    """

    def __init__(self, started_with: str, path: Path = layout.KEY_DIGEST) -> None:
        self.started_with = started_with
        self.path = path
        self.seen: tuple[int, int] | None = None
        self.in_force = digest(started_with)

    def is_this(self, key: str | None) -> bool:
        """Say whether this is the key in force, in a time that tells nothing about it."""
        try:
            found = self.path.stat()
            if (mark := (found.st_ino, found.st_mtime_ns)) != self.seen:
                self.in_force = self.path.read_text().strip()
                self.seen = mark
        except FileNotFoundError:
            self.in_force = digest(self.started_with)
            self.seen = None
        except (OSError, UnicodeDecodeError):
            return False
        if not key:
            return False
        return hmac.compare_digest(digest(key).encode(), self.in_force.encode())


class Gate:
    """The decision about one request, apart from how it is carried out."""

    def __init__(
        self, routes: dict[str, str], key: Key | None, draining: Path = layout.DRAINING
    ) -> None:
        self.routes = routes
        self.key = key
        self.draining = draining

    def check(self, scope: Scope) -> None:
        """Raise `Refused` for a request that must not reach the engine."""
        path = scope["path"]
        raw = scope.get("raw_path")
        # What was escaped, or is matched below a root, is not what it looks like here
        plain = raw in {None, path.encode("latin-1", "replace")} and not scope.get("root_path")
        method = self.routes.get(path) if plain else None
        if method is None:
            raise Refused(
                HTTPStatus.NOT_FOUND,
                "route_not_served",
                f"this server answers {', '.join(self.routes)} and nothing else",
            )
        if scope["method"] != method:
            text = f"{path} is asked with {method}"
            raise Refused(
                HTTPStatus.METHOD_NOT_ALLOWED, "method_not_served", text, {"allow": method}
            )
        if path == HEALTH:
            return
        headers: Headers = scope["headers"]
        if self.key is None:
            self.check_name(headers)
        elif not self.key.is_this(credential(headers)):
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                "invalid_api_key",
                "send the key as `Authorization: Bearer KEY`; `sudo dsv4 key show` on the machine"
                " prints it",
                {"www-authenticate": "Bearer"},
            )
        if method == "POST" and self.draining.exists():
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "stopping",
                "the service is being stopped; requests that run are finished, new ones are not"
                " taken",
                {"retry-after": "30"},
            )

    @staticmethod
    def check_name(headers: Headers) -> None:
        """Refuse a request that came by another machine's name, where no key keeps it out."""
        names = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(names) > 1 or not all(is_local_name(name) for name in names):
            raise Refused(
                HTTPStatus.FORBIDDEN,
                "host_not_served",
                "without a key this server answers to localhost and IP addresses only; set"
                " serve_api_key to reach it by another name",
            )


async def refuse(why: Refused, send: Send) -> None:
    """Answer a request in the form of the OpenAI interface's errors."""
    error = {"message": str(why), "type": why.status.phrase, "code": why.code}
    body = json.dumps({"error": error}).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **why.headers,
    }
    await send(
        {
            "type": "http.response.start",
            "status": why.status.value,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


class Allowlist:
    """The middleware. It takes its settings from the environment the unit gave the engine."""

    def __init__(self, app: App, gate: Gate | None = None) -> None:
        self.app = app
        self.gate = gate or from_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on what may pass."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            # No served route is a WebSocket; closed before it is accepted, it is answered with 403
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self.gate.check(scope)
        except Refused as why:
            await refuse(why, send)
            return
        if self.gate.key is not None:
            scope = {**scope, "headers": with_key(scope["headers"], self.gate.key.started_with)}
        await self.app(scope, receive, send)


def with_key(headers: Headers, key: str) -> Headers:
    """Return a request's headers with the key that the engine's own layer knows."""
    kept = [pair for pair in headers if pair[0] not in {b"authorization", b"x-api-key"}]
    return [*kept, (b"authorization", f"Bearer {key}".encode("latin-1"))]


def from_environment() -> Gate:
    """Return the gate for this engine; ValueError for settings that are none."""
    extra = [path for path in os.environ.get(VARIABLE, "").split(",") if path]
    key = os.environ.get("VLLM_API_KEY")
    return Gate(allowed(extra), Key(key) if key else None)
