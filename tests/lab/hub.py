"""A loopback hub: enough of the Hub's API for the real huggingface_hub, and faults on demand.

`ROOT/OWNER/NAME/files` is the branch main of one repository, `ROOT/OWNER/NAME/branches/B` another
branch. A commit's id is a hash of the branch's content, so an unchanged repository keeps its id.
What a test needs beyond the Hub lies under `/_lab/`: faults to play, and the bytes served so far.

Faults are JSON objects, posted as a list to `/_lab/fault` (an empty list clears them):
`{"kind": K, "path": REGEX, "times": N or null, …}`; the first that matches a request is played.
+ slow: `rate` bytes a second; stall: nothing more after `after` bytes of the body
+ cut: close the connection after `after` bytes
+ status: answer `status`, with `retry_after` seconds when given
+ wrong: invert one byte at offset `at` of the file
+ html: a page in place of the file; norange: ignore Range
+ xet: offer files of the large kind by xet, too; xet-wrong, xet-refused, xet-silent: from a storage
  service that sends other bytes, turns everything down, or never answers
+ redirect: send files of the large kind to another host name, as the Hub sends them to its CDN
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_SUFFIXES: Final = {".safetensors", ".bin", ".gguf"}
LARGE_BYTES: Final = 10 << 20
"""What the Hub keeps as LFS objects: known suffixes, and anything above this."""

PIECE: Final = 1 << 16
CHUNK, CHUNK_HEAD = 1 << 16, 8
"""How large the chunks of a file are in its xorb, and how long the head of each."""

HTML: Final = b"<!DOCTYPE html>\n<html><body>Sign in to this network</body></html>\n"
XET: Final = ("xet", "xet-wrong", "xet-refused", "xet-silent")
STALL_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class Blob:
    """One file of a branch, as the Hub describes it."""

    name: str
    path: Path
    size: int
    sha1: str
    sha256: str | None

    @property
    def etag(self) -> str:
        """The Hub's ETag: SHA-256 of a large file, git blob SHA-1 of a small one."""
        return self.sha256 or self.sha1

    def sibling(self) -> dict[str, Any]:
        """Return the file's row in the description of its repository."""
        row: dict[str, Any] = {"rfilename": self.name, "size": self.size, "blobId": self.sha1}
        if self.sha256:
            size = len(pointer(self.sha256, self.size))
            row["lfs"] = {"sha256": self.sha256, "size": self.size, "pointerSize": size}
        return row

    def entry(self) -> dict[str, Any]:
        """Return the file's row in a tree listing."""
        row: dict[str, Any] = {
            "type": "file",
            "oid": self.sha1,
            "size": self.size,
            "path": self.name,
        }
        if self.sha256:
            row["lfs"] = {
                "oid": self.sha256,
                "size": self.size,
                "pointerSize": len(pointer(self.sha256, self.size)),
            }
        return row


def pointer(sha256: str, size: int) -> bytes:
    """Return the text that git holds in place of a large file."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    return text.encode()


def git_sha1(data: bytes) -> str:
    """Return git's id of a blob."""
    head = b"blob %d\0" % len(data)
    return hashlib.sha1(head + data, usedforsecurity=False).hexdigest()


@dataclass
class Catalogue:
    """The repositories under a root; a file is hashed again only when it changed."""

    root: Path
    known: dict[Path, tuple[tuple[int, int], Blob]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def blob(self, base: Path, path: Path) -> Blob:
        """Return one file's description."""
        facts = path.stat()
        key = (facts.st_size, facts.st_mtime_ns)
        if path in self.known and self.known[path][0] == key:
            return self.known[path][1]
        size = facts.st_size
        if path.suffix in LARGE_SUFFIXES or size > LARGE_BYTES:
            with path.open("rb") as handle:
                sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
            sha1 = git_sha1(pointer(sha256, size))
        else:
            sha256, sha1 = None, git_sha1(path.read_bytes())
        blob = Blob(str(path.relative_to(base)), path, size, sha1, sha256)
        self.known[path] = (key, blob)
        return blob

    def branches(self, repository: str) -> dict[str, Path]:
        """Return branch names and their directories; empty for no such repository."""
        home = self.root / repository
        found = {"main": home / "files"} if (home / "files").is_dir() else {}
        return found | {path.name: path for path in home.glob("branches/*") if path.is_dir()}

    def tree(self, base: Path) -> dict[str, Blob]:
        """Return a branch's files by name."""
        with self.lock:
            blobs = [self.blob(base, path) for path in sorted(base.rglob("*")) if path.is_file()]
        return {blob.name: blob for blob in blobs}

    def revision(self, repository: str, wanted: str) -> tuple[str, dict[str, Blob]] | None:
        """Return commit id and files of a branch or a commit id, None when there is none."""
        for branch, base in self.branches(repository).items():
            files = self.tree(base)
            text = "".join(f"{blob.sha1} {name}\n" for name, blob in files.items())
            commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            if wanted in {branch, commit}:
                return commit, files
        return None


@dataclass
class Counters:
    """What was asked for and sent, for tests to assert on."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    bytes_sent: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)

    def sent(self, count: int) -> None:
        """Count bytes of file bodies that left."""
        with self.lock:
            self.bytes_sent += count

    def asked(self, method: str, path: str, range_header: str | None) -> None:
        """Note one request."""
        with self.lock:
            self.requests.append({"method": method, "path": path, "range": range_header})

    def report(self, clear: bool) -> dict[str, Any]:
        """Return the counts, and start over when asked to."""
        with self.lock:
            found = {"bytes": self.bytes_sent, "requests": list(self.requests)}
            if clear:
                self.bytes_sent, self.requests = 0, []
        return found


class Faults:
    """The faults to play; each may be bounded in number."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: list[dict[str, Any]] = []

    def set(self, faults: list[dict[str, Any]]) -> None:
        """Replace all faults."""
        with self.lock:
            self.active = faults

    def take(self, path: str) -> dict[str, Any]:
        """Return the first fault for this path, an empty mapping for none."""
        with self.lock:
            for fault in self.active:
                if fault.get("times") != 0 and re.search(fault.get("path", ""), path):
                    if fault.get("times") is not None:
                        fault["times"] -= 1
                    return fault
        return {}


class Hub(ThreadingHTTPServer):
    """The server and what its requests share."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, root: Path, port: int, token: str | None, stranger: str | None) -> None:
        self.catalogue = Catalogue(root)
        self.token = token
        self.stranger = stranger
        self.counters = Counters()
        self.faults = Faults()
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay quiet about clients that went away; tests kill them on purpose."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Refusal(Exception):
    """An answer in the Hub's error form: status, code for the client, words."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return first and last byte of a single range, None for none; ValueError when outside."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
    if not match:
        return None
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if first > last:
        raise ValueError(header)
    return first, last


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the counters tell."""

    def do_GET(self) -> None:
        """Answer a GET."""
        self.answer()

    def do_HEAD(self) -> None:
        """Answer a HEAD."""
        self.answer()

    def do_POST(self) -> None:
        """Take the faults to play."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if urlsplit(self.path).path == "/_lab/fault":
            self.server.faults.set(json.loads(body))
            self.send_json({"ok": True})
        else:
            self.send_json({"error": "no such control"}, HTTPStatus.NOT_FOUND)

    def answer(self) -> None:
        """Route one request; a refusal has the Hub's headers."""
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        try:
            if parts[0] == "_lab":
                self.lab(parts[1:], parse_qs(url.query))
            elif parts[0] == "_cdn":
                self.cdn(parts)
            elif parts[0].startswith("_xet"):
                self.xet(parts)
            else:
                self.hub(url.path, parts)
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self.send_json({"error": str(refusal)}, refusal.status, headers)

    def lab(self, parts: list[str], query: dict[str, list[str]]) -> None:
        """Answer the tests' own questions."""
        if parts == ["stats"]:
            self.send_json(self.server.counters.report("clear" in query))
        elif parts == ["health"]:
            self.send_json({"ok": True})
        else:
            raise Refusal(HTTPStatus.NOT_FOUND, None, "no such control")

    def hub(self, path: str, parts: list[str]) -> None:
        """Answer as the Hub."""
        self.server.counters.asked(self.command, path, self.headers.get("Range"))
        fault = self.server.faults.take(path)
        if fault.get("kind") == "status":
            self.refuse_for(fault)
        elif fault.get("kind") == "html":
            self.send_page()
        elif parts[:2] == ["api", "whoami-v2"]:
            self.whoami()
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            blobs = "blobs" in parse_qs(urlsplit(self.path).query)
            self.api("/".join(parts[2:4]), parts[4:], blobs=blobs)
        elif len(parts) >= 5 and parts[2] == "resolve":
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), fault)
        else:
            raise Refusal(HTTPStatus.NOT_FOUND, None, "Sorry, we can't find the page")

    def refuse_for(self, fault: dict[str, Any]) -> None:
        """Play an error status."""
        headers = {}
        if "retry_after" in fault:
            headers["Retry-After"] = str(fault["retry_after"])
        self.send_json({"error": "fault"}, int(fault["status"]), headers)

    def bearer(self) -> str | None:
        """Return the token sent along; an unknown one is refused as the Hub does."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ").strip() or None
        if token and self.server.token and token not in {self.server.token, self.server.stranger}:
            raise Refusal(
                HTTPStatus.UNAUTHORIZED, None, "Invalid credentials in Authorization header"
            )
        return token

    def whoami(self) -> None:
        """Say whose token it is."""
        if not self.bearer():
            raise Refusal(HTTPStatus.UNAUTHORIZED, None, "Invalid username or password.")
        self.send_json({"type": "user", "name": "lab", "auth": {"type": "access_token"}})

    def find(self, repository: str, revision: str) -> tuple[str, dict[str, Blob]]:
        """Return a revision, or refuse in the Hub's words."""
        token = self.bearer()
        if not self.server.catalogue.branches(repository):
            status = HTTPStatus.NOT_FOUND if token else HTTPStatus.UNAUTHORIZED
            raise Refusal(status, "RepoNotFound", "Repository not found")
        found = self.server.catalogue.revision(repository, revision)
        if found is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def api(self, repository: str, rest: list[str], *, blobs: bool) -> None:
        """Answer about a repository: itself, a revision of it (with sizes if asked), its tree."""
        what, revision = (rest[0], rest[1]) if len(rest) >= 2 else ("revision", "main")
        commit, files = self.find(repository, revision)
        if what == "tree":
            self.send_json([blob.entry() for blob in files.values()])
        elif what == "revision":
            self.send_json(
                {
                    "_id": commit[:24],
                    "id": repository,
                    "modelId": repository,
                    "sha": commit,
                    "private": False,
                    "gated": "auto" if self.server.token else False,
                    "disabled": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": [
                        blob.sibling() if blobs else {"rfilename": name}
                        for name, blob in files.items()
                    ],
                }
            )
        else:
            raise Refusal(HTTPStatus.NOT_FOUND, None, "Sorry, we can't find the page")

    def resolve(self, repository: str, revision: str, name: str, fault: dict[str, Any]) -> None:
        """Send a file, or where to get it."""
        token = self.bearer()
        if self.server.token and token != self.server.token:
            status = HTTPStatus.FORBIDDEN if token else HTTPStatus.UNAUTHORIZED
            advice = "Visit its page to ask for access." if token else "Please log in."
            raise Refusal(
                status, "GatedRepo", f"Access to model {repository} is restricted. {advice}"
            )
        commit, files = self.find(repository, revision)
        blob = files.get(name)
        if blob is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if blob.sha256:
            headers["X-Linked-ETag"] = f'"{blob.sha256}"'
            headers["X-Linked-Size"] = str(blob.size)
        port = self.server.server_address[1]
        if str(fault.get("kind")).startswith("xet") and blob.sha256:
            headers["X-Xet-Hash"] = blob.sha256
            headers["X-Xet-Refresh-Route"] = f"http://127.0.0.1:{port}/_{fault['kind']}/token"
        if fault.get("kind") == "redirect" and blob.sha256:
            headers["Location"] = f"http://localhost:{port}/_cdn/{repository}/{commit}/{name}"
            self.send_bytes(b"", HTTPStatus.FOUND, headers)
        else:
            self.send_file(blob, headers, fault)

    def cdn(self, parts: list[str]) -> None:
        """Send a large file as object storage does: no Hub headers, and no foreign credentials."""
        if "Authorization" in self.headers:
            raise Refusal(HTTPStatus.BAD_REQUEST, None, "Unsupported Authorization Type")
        found = self.server.catalogue.revision("/".join(parts[1:3]), parts[3])
        blob = found[1].get("/".join(parts[4:])) if found else None
        if blob is None:
            raise Refusal(HTTPStatus.NOT_FOUND, None, "NoSuchKey")
        fault = self.server.faults.take("/".join(parts))
        self.send_file(blob, {"ETag": '"object-storage"'}, fault)

    def xet(self, parts: list[str]) -> None:
        """Grant access to a storage service, and be that service."""
        port = self.server.server_address[1]
        here = f"http://127.0.0.1:{port}/{parts[0]}"
        if parts[1:] == ["token"]:
            headers = {
                "X-Xet-Cas-Url": here,
                "X-Xet-Access-Token": "lab",
                "X-Xet-Token-Expiration": str(int(time.time()) + 3600),
            }
            self.send_json({}, headers=headers)
        elif parts[0] == "_xet-silent":
            self.close_connection = True
            self.wait_for_the_client_to_go()
        elif parts[0] == "_xet-refused":
            raise Refusal(HTTPStatus.FORBIDDEN, None, "no access")
        elif parts[1:3] == ["v1", "reconstructions"]:
            self.reconstruction(self.by_sha256(parts[3]), here)
        elif parts[1] == "xorb":
            self.xorb(self.by_sha256(parts[2]), wrong=parts[0] == "_xet-wrong")
        else:
            raise Refusal(HTTPStatus.NOT_FOUND, None, "not found")

    def by_sha256(self, wanted: str) -> Blob:
        """Return the large file with this hash, which stands for its xet hash here."""
        for _, blob in self.server.catalogue.known.values():
            if blob.sha256 == wanted:
                return blob
        raise Refusal(HTTPStatus.NOT_FOUND, None, "not found")

    def reconstruction(self, blob: Blob, here: str) -> None:
        """Say of which chunks the asked part of a file is made, all of one xorb of its own."""
        try:
            first, last = parse_range(self.headers.get("Range"), blob.size) or (0, blob.size - 1)
        except ValueError:
            raise Refusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, None, "beyond it") from None
        begin, end = first // CHUNK, last // CHUNK + 1
        chunks = {"start": begin, "end": end}
        stop = min(end * CHUNK, blob.size) + end * CHUNK_HEAD
        span = {"start": begin * (CHUNK + CHUNK_HEAD), "end": stop - 1}
        place = {"range": chunks, "url": f"{here}/xorb/{blob.sha256}", "url_range": span}
        term = {
            "hash": blob.sha256,
            "unpacked_length": min(end * CHUNK, blob.size) - begin * CHUNK,
            "range": chunks,
        }
        self.send_json(
            {
                "offset_into_first_range": first - begin * CHUNK,
                "terms": [term],
                "fetch_info": {blob.sha256: [place]},
            }
        )

    def xorb(self, blob: Blob, *, wrong: bool) -> None:
        """Send chunks of a file as xet stores them: a head of eight bytes each, not compressed."""
        out = bytearray()
        with blob.path.open("rb") as handle:
            while piece := handle.read(CHUNK):
                length = len(piece).to_bytes(3, "little")
                body = bytes([piece[0] ^ 0xFF]) + piece[1:] if wrong else piece
                out += b"\0" + length + b"\0" + length + body
        first, last = parse_range(self.headers.get("Range"), len(out)) or (0, len(out) - 1)
        place = {"Content-Range": f"bytes {first}-{last}/{len(out)}"}
        self.send_bytes(bytes(out[first : last + 1]), HTTPStatus.PARTIAL_CONTENT, place)

    def send_file(self, blob: Blob, headers: dict[str, str], fault: dict[str, Any]) -> None:
        """Send a file or the asked range of it, playing the fault."""
        wanted = None if fault.get("kind") == "norange" else self.headers.get("Range")
        try:
            span = parse_range(wanted, blob.size)
        except ValueError:
            self.send_bytes(
                b"",
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                {"Content-Range": f"bytes */{blob.size}"},
            )
            return
        first, last = span or (0, blob.size - 1)
        self.send_response(HTTPStatus.PARTIAL_CONTENT if span else HTTPStatus.OK)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(last - first + 1))
        if span:
            self.send_header("Content-Range", f"bytes {first}-{last}/{blob.size}")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and blob.size:
            self.send_body(blob, first, last - first + 1, fault)

    def send_body(self, blob: Blob, first: int, count: int, fault: dict[str, Any]) -> None:
        """Send the bytes; a connection whose body is not complete is closed."""
        kind = fault.get("kind")
        with blob.path.open("rb") as handle:
            if kind in {None, "redirect", "norange", *XET}:
                self.wfile.flush()
                self.server.counters.sent(self.connection.sendfile(handle, first, count))
                return
            handle.seek(first)
            # A slow line gets small pieces, so that a killed client loses little that was counted
            largest = PIECE if kind != "slow" else max(1024, min(PIECE, int(fault["rate"]) // 200))
            limit = min(count, int(fault.get("after", count)))
            sent = 0
            while sent < limit:
                piece = handle.read(min(largest, limit - sent))
                at = int(fault.get("at", -1)) - first - sent
                if kind == "wrong" and 0 <= at < len(piece):
                    piece = piece[:at] + bytes([piece[at] ^ 0xFF]) + piece[at + 1 :]
                self.wfile.write(piece)
                self.server.counters.sent(len(piece))
                sent += len(piece)
                if kind == "slow":
                    time.sleep(len(piece) / float(fault["rate"]))
        if sent < count:
            self.close_connection = True
            if kind == "stall":
                self.wait_for_the_client_to_go()

    def wait_for_the_client_to_go(self) -> None:
        """Keep the connection open and silent, as a stalled transfer does."""
        self.connection.settimeout(STALL_SECONDS)
        with contextlib.suppress(OSError):
            self.connection.recv(1)

    def send_page(self) -> None:
        """Send what a sign-in page of a network sends in place of everything."""
        self.send_bytes(HTML, HTTPStatus.OK, {"Content-Type": "text/html"})

    def send_json(
        self, value: Any, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None
    ) -> None:
        """Send a JSON answer."""
        kind = {"Content-Type": "application/json; charset=utf-8"}
        self.send_bytes(json.dumps(value).encode(), status, kind | (headers or {}))

    def send_bytes(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def main(argv: list[str]) -> int:
    """Serve until told to stop; the pid file appears when the port answers."""
    parser = argparse.ArgumentParser(prog="hub", description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--pidfile", type=Path, help="holds pid and port once the hub answers")
    parser.add_argument("--token", help="make every repository gated; this token may read them")
    parser.add_argument("--stranger-token", help="a valid token that accepted no terms")
    options = parser.parse_args(argv)
    hub = Hub(options.root.resolve(), options.port, options.token, options.stranger_token)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        if options.pidfile:
            temporary = options.pidfile.with_suffix(".new")
            temporary.write_text(f"{os.getpid()} {hub.server_address[1]}\n")
            temporary.replace(options.pidfile)
        hub.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        if options.pidfile:
            options.pidfile.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
