"""Every route that the real vLLM registers, asked through our middleware: run on a lab machine.

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=/opt/dsv4/lib RUNTIME/bin/python - < every_route.py

Builds the server's application as `vllm serve` does, with every task and every option that adds
routes, and asks each of them by each method without starting an engine. Prints one JSON object:
the routes found, and those that an application behind the middleware was reached by.
"""

import asyncio
import json
import re
from typing import Any

from fastapi import FastAPI
from starlette.routing import Mount
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tasks import GENERATION_TASKS, POOLING_TASKS
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dsv4 import routes

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
OPTIONS = (
    *("--middleware", routes.MIDDLEWARE),
    *("--enable-tokenizer-info-endpoint", "--enable-scale-out", "--enable-offline-docs"),
)
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


async def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "x", *OPTIONS])
    args.enable_fault_tolerance = True
    tasks = (*GENERATION_TASKS, *POOLING_TASKS, "transcription", "realtime", "render")
    app = build_app(args, tuple(dict.fromkeys(tasks)), None)
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
    print(json.dumps({"found": sorted(found), "through": through}))


asyncio.run(main())
