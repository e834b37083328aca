"""The list of what the server answers: exact, deny by default, and with the key in force."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4 import routes

KEY = "the-key-of-the-start"
OTHER = "another-key"

# Read out of vllm/entrypoints in the wheels of 0.28.0, 0.30.0 and 0.33.0
REGISTERED = """
POST /abort_requests|POST /classify|POST /cohere/v2/chat|POST /cohere/v2/chat/render
POST /collective_rpc|POST /detokenize|GET /docs|GET /openapi.json|GET /redoc
POST /fault_tolerance/apply|GET /fault_tolerance/status|POST /finish_weight_update
POST /generative_scoring|GET /get_world_size|GET /health|POST /inference/v1/abort_requests
POST /inference/v1/generate|POST /init_weight_transfer_engine|POST /invocations|GET /is_paused
POST /is_scaling_elastic_ep|GET /is_sleeping|GET /kv_event_sources|GET /load|GET /metrics
POST /pause|GET /ping|POST /ping|POST /pooling|GET /ready|GET /readyz
POST /release_kv_cache_memory|POST /rerank|POST /reset_encoder_cache|POST /reset_mm_cache
POST /reset_prefix_cache|POST /resume|POST /scale_elastic_ep|POST /score|GET /server_info
POST /shutdown_weight_transfer_engine|POST /sleep|POST /start_draft_weight_update
POST /start_profile|POST /start_weight_update|GET /static/swagger-ui.css|POST /stop_profile
POST /tokenize|GET /tokenizer_info|POST /update_weight_version|POST /update_weights
POST /v1/audio/transcriptions|POST /v1/audio/translations|POST /v1/chat/completions
POST /v1/chat/completions/batch|POST /v1/chat/completions/derender
POST /v1/chat/completions/render|POST /v1/completions|POST /v1/completions/derender
POST /v1/completions/render|POST /v1/decisions|POST /v1/embeddings|POST /v1/load_lora_adapter
POST /v1/messages|POST /v1/messages/count_tokens|POST /v1/messages/render|GET /v1/models
POST /v1/rerank|POST /v1/responses|POST /v1/responses/render|GET /v1/responses/resp_1
POST /v1/responses/resp_1/cancel|POST /v1/score|POST /v1/systemone
POST /v1/unload_lora_adapter|POST /v2/embed|POST /v2/rerank|GET /version|POST /wake_up
POST /weight_checker|GET /weight_info
"""
SERVED = {
    "GET /health",
    "GET /metrics",
    "GET /v1/models",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get")


class Server:
    """The middleware in front of an application that says yes to everything."""

    def __init__(self, gate: routes.Gate) -> None:
        self.reached: list[dict[str, Any]] = []
        self.middleware = routes.Allowlist(self.app, gate)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | list[tuple[str, str]] | None = None,
        **scope: Any,
    ) -> tuple[int, dict[str, Any]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        given = headers.items() if isinstance(headers, dict) else headers or []
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in given]
        whole = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(errors="surrogateescape"),
            "root_path": "",
            "headers": pairs,
            **scope,
        }
        asyncio.run(self.middleware(whole, None, send))  # type: ignore[arg-type]
        if sent[0]["type"] == "websocket.close":
            return 403, {}
        return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.fixture
def digest_file(tmp_path: Path) -> Path:
    return tmp_path / "api_key.sha256"


@pytest.fixture
def draining(tmp_path: Path) -> Path:
    return tmp_path / "draining"


@pytest.fixture
def locked(digest_file: Path, draining: Path) -> Server:
    """A server with a key."""
    return Server(routes.Gate(routes.allowed(()), routes.Key(KEY, digest_file), draining))


@pytest.fixture
def open_(draining: Path) -> Server:
    """A server on loopback, without one."""
    return Server(routes.Gate(routes.allowed(()), None, draining))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def registered() -> Iterator[tuple[str, str]]:
    for entry in REGISTERED.replace("\n", "|").split("|"):
        if entry:
            method, path = entry.split(" ")
            yield method, path


@pytest.mark.parametrize(("method", "path"), list(registered()))
def test_every_route_of_vllm(method: str, path: str, locked: Server, open_: Server) -> None:
    """What is not on the list does not exist, with a key, without, and whatever the method."""
    served = f"{method} {path}" in SERVED
    assert (locked.ask(method, path, bearer(KEY))[0] == 200) == served
    assert (open_.ask(method, path)[0] == 200) == served
    for other in METHODS:
        if f"{other} {path}" not in SERVED:
            status, body = locked.ask(other, path, bearer(KEY))
            assert status in {404, 405}, other
            assert body["error"]["code"] in {"route_not_served", "method_not_served"}
    assert len(locked.reached) == served


def test_the_key_is_asked_for_everywhere_but_at_health(locked: Server) -> None:
    for entry in SERVED:
        method, path = entry.split(" ")
        assert locked.ask(method, path)[0] == (200 if path == "/health" else 401)
        assert locked.ask(method, path, bearer(OTHER))[0] == (200 if path == "/health" else 401)


TRICKS = [
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/v1/models//",
    "/V1/models",
    "/v1/Models",
    "/v1/./models",
    "/x/../v1/models",
    "/v1/models;a=b",
    "/v1/models%00",
    "/v1/models ",
    " /v1/models",
    "v1/models",
    "",
    "*",
    "/",
    "http://127.0.0.1/v1/models",
    "http://x/pause",
    "/metrics/",
    "/metricsx",
    "/metrics/../pause",
    "/health/../pause",
    "/health/",
    "/healthz",
    "/v1/models\n",
    "/v1/models?x",
    "\\v1\\models",
    "/v1/mode\u217cs",
    "/v1/models\udcff",
]


@pytest.mark.parametrize("path", TRICKS)
def test_what_is_spelt_in_another_way_is_another_route(path: str, locked: Server) -> None:
    assert locked.ask("GET", path, bearer(KEY))[0] == 404
    assert locked.reached == []


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        ("/v1/models", b"/v1/%6dodels"),
        ("/v1/models", b"/v1%2Fmodels"),
        ("/v1/models", b"/%2e/v1/models"),
        ("/health", b"/%68ealth"),
        ("/v1/models", b""),
    ],
)
def test_what_was_escaped_is_another_route(path: str, raw: bytes, locked: Server) -> None:
    """A router may match what was decoded; the list matches what was sent."""
    assert locked.ask("GET", path, bearer(KEY), raw_path=raw)[0] == 404


def test_a_root_path_serves_nothing(locked: Server) -> None:
    """Behind one, the path that is matched is another one than the path that was sent."""
    for path in ("/v1/models", "/api/v1/models", "/health"):
        assert locked.ask("GET", path, bearer(KEY), root_path="/api")[0] == 404
    assert locked.ask("GET", "/v1/models", bearer(KEY), root_path="")[0] == 200


def test_headers_change_neither_path_nor_method(locked: Server) -> None:
    for name in ("x-http-method-override", "x-method-override", "x-original-url", "x-rewrite-url"):
        headers = {**bearer(KEY), name: "/v1/models" if "url" in name else "GET"}
        assert locked.ask("POST", "/pause", headers)[0] == 404
        assert locked.ask("POST", "/v1/models", headers)[0] == 405


def test_no_browser_asks_first(locked: Server, open_: Server) -> None:
    """A preflight is how a page of another site would come in; vLLM's own layers let it through."""
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    for server in (locked, open_):
        assert server.ask("OPTIONS", "/v1/chat/completions", headers)[0] == 405
        assert server.ask("OPTIONS", "/pause", headers)[0] == 404
        assert server.reached == []


@pytest.mark.parametrize("kind", ["websocket", "webtransport", "unknown"])
def test_nothing_but_http(kind: str, locked: Server) -> None:
    assert locked.ask("GET", "/v1/realtime", bearer(KEY), type=kind)[0] == 403
    assert locked.ask("GET", "/v1/models", bearer(KEY), type=kind)[0] == 403
    assert locked.reached == []


def test_the_server_itself_starts(locked: Server) -> None:
    """The protocol's own start and end are no requests."""
    locked.ask("", "", type="lifespan")
    assert len(locked.reached) == 1


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ([("authorization", f"Bearer {KEY}")], True),
        ([("authorization", f"bearer  {KEY} ")], True),
        ([("x-api-key", KEY)], True),
        ([("authorization", f"Basic {KEY}"), ("x-api-key", KEY)], False),
        ([("authorization", f"Bearer {OTHER}"), ("x-api-key", KEY)], False),
        ([("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {OTHER}")], False),
        ([("x-api-key", KEY), ("x-api-key", KEY)], False),
        ([("authorization", KEY)], False),
        ([("authorization", "Bearer")], False),
        ([("authorization", "Bearer ")], False),
        ([("authorization", f"Bearer {KEY[:-1]}")], False),
        ([("authorization", f"Bearer {KEY}x")], False),
        ([("authorization", f"Bearer {KEY.upper()}")], False),
        ([("authorization", "Bearer \xff\xfe")], False),
        ([("cookie", f"key={KEY}")], False),
        ([("x-api-key", "")], False),
    ],
)
def test_one_key_in_one_place(headers: list[tuple[str, str]], taken: bool, locked: Server) -> None:
    status, body = locked.ask("GET", "/v1/models", headers)
    assert status == (200 if taken else 401)
    assert KEY not in json.dumps(body)


def test_the_engine_is_handed_the_key_of_its_start(locked: Server, digest_file: Path) -> None:
    """Its own layer knows no other; what the client sent is not handed on."""
    digest_file.write_text(routes.digest(OTHER) + "\n")
    status, _ = locked.ask("POST", "/v1/messages", {"x-api-key": OTHER, "host": "a"})
    assert status == 200
    assert dict(locked.reached[0]["headers"]) == {
        b"host": b"a",
        b"authorization": f"Bearer {KEY}".encode(),
    }


def test_a_new_key_counts_at_once_and_the_old_one_is_dead(
    locked: Server, digest_file: Path
) -> None:
    """By the file that root writes; gone, the engine's own counts; broken, none does."""

    def taken(key: str) -> bool:
        return locked.ask("GET", "/v1/models", bearer(key))[0] == 200

    assert (taken(KEY), taken(OTHER)) == (True, False)
    for new, old in ((OTHER, KEY), ("third", OTHER), (KEY, "third")):
        made = digest_file.with_suffix(".new")
        made.write_text(routes.digest(new) + "\n")
        made.replace(digest_file)
        assert (taken(new), taken(old)) == (True, False)
    for broken in (b"", b"\n", b"\xff", b"not a digest", routes.digest("").encode()):
        digest_file.write_bytes(broken)
        assert not taken(KEY)
        assert not taken("not a digest")
    assert locked.ask("GET", "/v1/models")[0] == 401
    digest_file.unlink()
    digest_file.mkdir()
    assert not taken(KEY)
    digest_file.rmdir()
    assert taken(KEY)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8899", "[::1]:8899", "localhost", "LOCALHOST:1", "::1"]
)
def test_without_a_key_this_machines_own_names_are_served(host: str, open_: Server) -> None:
    assert open_.ask("GET", "/v1/models", {"host": host})[0] == (403 if host == "::1" else 200)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8899", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_without_a_key_a_page_cannot_come_by_its_own_name(
    host: str, open_: Server, locked: Server
) -> None:
    """A name server may send a page's name to this machine; the browser then takes it for its own.
    With a key it has nothing to ask with."""
    status, body = open_.ask("POST", "/v1/completions", {"host": host})
    assert (status, body["error"]["code"]) == (403, "host_not_served")
    assert open_.ask("GET", "/health", {"host": host})[0] == 200
    assert locked.ask("POST", "/v1/completions", {"host": host, **bearer(KEY)})[0] == 200


def test_two_hosts_are_none(open_: Server) -> None:
    assert open_.ask("GET", "/v1/models", [("host", "127.0.0.1"), ("host", "::1")])[0] == 403


def test_a_stop_turns_new_requests_away(locked: Server, draining: Path) -> None:
    draining.touch()
    status, body = locked.ask("POST", "/v1/completions", bearer(KEY))
    assert (status, body["error"]["code"]) == (503, "stopping")
    assert locked.ask("POST", "/v1/completions")[0] == 401, "a stranger learns nothing"
    assert locked.ask("GET", "/metrics", bearer(KEY))[0] == 200
    draining.unlink()
    assert locked.ask("POST", "/v1/completions", bearer(KEY))[0] == 200


def test_what_can_be_added_and_what_cannot() -> None:
    """An owner's own routes are of a short list; a misspelt one stops the engine's start."""
    found = Server(routes.Gate(routes.allowed(["/tokenize", "/version"]), None))
    assert found.ask("POST", "/tokenize")[0] == 200
    assert found.ask("GET", "/version")[0] == 200
    assert found.ask("GET", "/load")[0] == 404
    for path in ("/pause", "/v1/load_lora_adapter", "/tokenize/", "tokenize", "/invocations"):
        with pytest.raises(ValueError, match="cannot be served"):
            routes.allowed([path])
    assert not routes.EXTRA.keys() & routes.ROUTES.keys()


def test_settings_come_from_the_units_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(routes.VARIABLE, "/version,/load")
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    gate = routes.from_environment()
    assert gate.key is not None
    assert {"/version", "/load"} <= gate.routes.keys()
    monkeypatch.delenv("VLLM_API_KEY")
    monkeypatch.delenv(routes.VARIABLE)
    gate = routes.from_environment()
    assert gate.key is None
    assert gate.routes == routes.ROUTES
    monkeypatch.setenv(routes.VARIABLE, "/collective_rpc")
    with pytest.raises(ValueError, match="/collective_rpc"):
        routes.from_environment()
