"""What the real vLLM would let in and out, asked without starting an engine: run on a lab machine.

    env $(cat /etc/dsv4/environment) VLLM_SERVER_DEV_MODE=1 PYTHONPATH=/opt/dsv4/lib
        RUNTIME/bin/python every_route.py

Builds the server's application as `vllm serve` does, with every task and every option that adds
routes, and asks each of them by each method, through our middleware. Has its loader of images fetch
by URL, as the deployed serve.yaml allows it. Prints one JSON object:

    found, through   the routes there are, and those that a request came through by
    refused          images by URL that the loader refused with the deployed domains
    fetched          what it fetched where a domain is allowed, which leads on to another host
    start_limit_s    vLLM's own limit on a start of its engine
"""

import asyncio
import contextlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import yaml
from fastapi import FastAPI
from starlette.routing import Mount
from vllm import envs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.multimodal.media.connector import MediaConnector
from vllm.tasks import GENERATION_TASKS, POOLING_TASKS
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dsv4 import layout, routes

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
OPTIONS = (
    *("--middleware", routes.MIDDLEWARE),
    *("--enable-tokenizer-info-endpoint", "--enable-scale-out", "--enable-offline-docs"),
)
POOLING = SimpleNamespace(
    get_pooling_task=lambda _: "embed", hf_config=SimpleNamespace(num_labels=1)
)
"""What those routes ask of a model before they are registered."""

PARAMETER = re.compile(r"\{[^}]*\}")


def paths(router: Any, prefix: str = "") -> set[str]:
    """Return the path of every route, those below mounts and included routers as well."""
    found = set()
    for route in getattr(router, "routes", []):
        path = getattr(route, "path", None)
        if isinstance(route, Mount):
            found |= {f"{prefix}{path}", f"{prefix}{path}/x"} | paths(route.app, f"{prefix}{path}")
        elif path is not None:
            found.add(f"{prefix}{path}")
        else:  # FastAPI keeps an included router as one object without a path
            found |= paths(route, prefix) | paths(getattr(route, "router", None), prefix)
            found |= paths(getattr(route, "original_router", None), prefix)
    return found


async def reached(app: FastAPI, scope: dict[str, Any]) -> bool:
    """Say whether a request came through: whatever the engine's side makes of it."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    try:
        await asyncio.wait_for(app(scope, receive, send), 20)
    except Exception:  # there is no engine: what gets as far as wanting one got through
        return True
    if sent and sent[0]["type"] == "websocket.close":
        return sent[0].get("code") != 1008
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return not re.search(rb'"code": "(route|method)_not_served"', body)


class Elsewhere(BaseHTTPRequestHandler):
    """Sends whoever asks for an image to another host, and notes who asked for what."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.headers['Host'].partition(':')[0]}{self.path}")
        self.send_response(302)
        port = self.headers["Host"].rpartition(":")[2]
        self.send_header("Location", f"http://localhost:{port}/inside")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


def media() -> dict[str, Any]:
    """Fetch images by URL, with the deployed domains and with one that is allowed."""
    deployed = yaml.safe_load(layout.SERVE_YAML.read_text())["allowed-media-domains"]
    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    refused = []
    for url in (f"http://127.0.0.1:{server.server_port}/a.png", "file:///etc/hostname"):
        try:
            MediaConnector(allowed_media_domains=deployed).fetch_image(url)
        except (ValueError, RuntimeError):
            refused.append(url.partition(":")[0])
    assert not Elsewhere.asked, Elsewhere.asked
    with contextlib.suppress(Exception):  # what comes back is no image
        MediaConnector(allowed_media_domains=["127.0.0.1"]).fetch_image(
            f"http://127.0.0.1:{server.server_port}/a.png"
        )
    return {"refused": refused, "fetched": Elsewhere.asked}


async def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "x", *OPTIONS])
    args.enable_fault_tolerance = True
    tasks = (*GENERATION_TASKS, *POOLING_TASKS, "transcription", "realtime", "render")
    app = build_app(args, tuple(dict.fromkeys(tasks)), POOLING)
    found = {PARAMETER.sub("x", path) for path in paths(app)}
    through = []
    for path in sorted(found):
        for method in METHODS:
            scope = {
                "type": "http",
                "http_version": "1.1",
                "scheme": "http",
                "method": method,
                "path": path,
                "raw_path": path.encode(),
                "root_path": "",
                "query_string": b"",
                "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 8899),
            }
            if await reached(app, scope):
                through.append(f"{method} {path}")
        socket = {**scope, "type": "websocket", "scheme": "ws", "subprotocols": []}
        if await reached(app, socket):
            through.append(f"websocket {path}")
    found_out = {"found": sorted(found), "through": through, **media()}
    print(json.dumps(found_out | {"start_limit_s": envs.VLLM_ENGINE_READY_TIMEOUT_S}))


asyncio.run(main())
