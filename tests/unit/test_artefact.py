"""`dsv4 artefact`: one file by its hash, from a mirror or its origin, whole or not at all."""

import io
import json
import random
import socket
import struct
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsv4 import artefact, layout, store
from dsv4.artefact import ArtefactError, Wanted

CONTENT = bytes(range(256)) * 5000
NOISE = random.Random(1).randbytes(20_000)
DIGEST = store.sha256_bytes(CONTENT)
NAME = "vllm-0.28.1+ga5-cp38-abi3-manylinux_2_28_aarch64.whl"


class Server:
    """A file server that can be told to cut connections off, and keeps what it was asked."""

    def __init__(self) -> None:
        """Serve on a loopback port of its own."""
        self.files: dict[str, bytes] = {}
        self.status: dict[str, int] = {}
        self.cut_after: int | None = None
        self.reset = False
        """Whether the connection that is cut off ends with a reset, as a router does it."""
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer with the file, the rest of it, or an error."""
        span = request.headers.get("Range")
        self.asked.append((request.path, span))
        body = self.files.get(request.path)
        if body is None or request.path in self.status:
            request.send_error(self.status.get(request.path, 404))
            return
        start = int(span.removeprefix("bytes=").rstrip("-")) if span else 0
        request.send_response(206 if span else 200)
        request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        part = body[start:]
        if self.cut_after is not None and self.reset:
            linger = struct.pack("ii", 1, 0)
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.wfile.write(part[: self.cut_after])
            self.cut_after = None
            request.connection.close()
            return
        if self.cut_after is not None:
            part, self.cut_after = part[: self.cut_after], None
        request.wfile.write(part)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server for one test."""
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.fixture
def get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Fetch into a directory of this test, without waiting between tries."""
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def fetch(location: str, sha256: str | None = DIGEST, mirror: str | None = None) -> Path:
        return artefact.fetch(Wanted("vllm", location, sha256), mirror, tmp_path / "kept")

    return fetch


def test_a_file_arrives_under_its_own_name(server: Server, get: Callable[..., Path]) -> None:
    """An address writes the plus of a version as %2B; a wheel's name must be right."""
    server.files[f"/c/{NAME.replace('+', '%2B')}"] = CONTENT
    path = get(f"{server.url}/c/{NAME.replace('+', '%2B')}")
    assert path.name == NAME
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_is_there_is_not_fetched_again(server: Server, get: Callable[..., Path]) -> None:
    """By hash: a kept file that was damaged is fetched anew."""
    server.files["/a.whl"] = CONTENT
    path = get(f"{server.url}/a.whl")
    assert get(f"{server.url}/a.whl") == path
    assert len(server.asked) == 1
    path.write_bytes(b"damaged")
    assert get(f"{server.url}/a.whl").read_bytes() == CONTENT


def test_a_cut_connection_goes_on_where_it_was(server: Server, get: Callable[..., Path]) -> None:
    """Bytes that arrived are not asked for again."""
    server.files["/a.whl"] = CONTENT
    server.cut_after = 1000
    assert get(f"{server.url}/a.whl").read_bytes() == CONTENT
    assert server.asked == [("/a.whl", None), ("/a.whl", "bytes=1000-")]


def test_a_connection_that_is_reset_is_tried_again(
    server: Server, get: Callable[..., Path]
) -> None:
    """It has an error number, like a full disk, and unlike that it passes."""
    server.files["/a.whl"] = CONTENT
    server.cut_after, server.reset = 1000, True
    assert get(f"{server.url}/a.whl").read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_a_full_disk_is_not_taken_for_a_missing_file(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    """No mirror and no other route helps; and the next place is not asked."""
    wanted = Wanted("vllm", f"{server.url}/a.whl", DIGEST)
    server.files["/a.whl"] = server.files["/m/a.whl"] = CONTENT
    (tmp_path / "kept").mkdir()
    mirror = f"{server.url}/m"
    part = artefact.part_of(wanted, f"{mirror}/a.whl", tmp_path / "kept")
    part.symlink_to("/dev/full")
    with pytest.raises(ArtefactError, match=r"No space left on device\); make room") as caught:
        get(wanted.location, mirror=mirror)
    assert "wheel_mirror" not in str(caught.value)
    assert [path for path, _ in server.asked] == ["/m/a.whl"]


def test_what_two_places_send_is_never_put_together(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    """A mirror that ends in the middle of another file; the origin is asked for all of it."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    server.files["/a.whl"] = CONTENT
    wanted = Wanted("vllm", f"{server.url}/a.whl", DIGEST)
    (tmp_path / "kept").mkdir()
    artefact.part_of(wanted, f"{mirror}/a.whl", tmp_path / "kept").write_bytes(b"<html>")
    assert get(wanted.location, mirror=str(mirror)).read_bytes() == CONTENT
    assert server.asked == [("/a.whl", None)]
    assert list((tmp_path / "kept").glob(".*")) == []  # and nothing of the other's is left


def test_a_beginning_that_does_not_fit_is_begun_anew(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    """A power cut leaves zeros: nobody changed the file there, and nobody is to be looked for."""
    server.files["/a.whl"] = CONTENT
    wanted = Wanted("vllm", f"{server.url}/a.whl", DIGEST)
    (tmp_path / "kept").mkdir()
    artefact.part_of(wanted, wanted.location, tmp_path / "kept").write_bytes(bytes(1000))
    assert get(wanted.location).read_bytes() == CONTENT
    assert server.asked == [("/a.whl", "bytes=1000-"), ("/a.whl", None)]


def test_an_answer_that_is_a_web_page_is_called_one(
    server: Server, get: Callable[..., Path]
) -> None:
    server.files["/a.whl"] = b"\n<!DOCTYPE html><title>Log in</title>"
    with pytest.raises(ArtefactError, match=r"/a\.whl \(is a web page\); nothing was unpacked"):
        get(f"{server.url}/a.whl")


@pytest.mark.parametrize("name", ["a.whl", "a.tar.gz"])
@pytest.mark.parametrize("what", ["page", "half"])
def test_what_is_no_archive_is_never_pinned(
    server: Server, get: Callable[..., Path], tmp_path: Path, name: str, what: str
) -> None:
    """The first hash seen holds from then on, so it must not be a login page's."""
    body = (wheel() if name == "a.whl" else archive()) if what == "half" else b"<html>Log in</html>"
    server.files[f"/{name}"] = body[: len(body) // 2] if what == "half" else body
    with pytest.raises(ArtefactError, match=f"{name}: what .* sends is .*; nothing was pinned"):
        get(f"{server.url}/{name}", None)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_file_without_a_hash_is_fetched_whole(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    """What an earlier run left of it may be of another file."""
    server.files["/a.tar.gz"] = archive()
    wanted = Wanted("vllm", f"{server.url}/a.tar.gz")
    (tmp_path / "kept").mkdir()
    artefact.part_of(wanted, wanted.location, tmp_path / "kept").write_bytes(bytes(10))
    assert get(wanted.location, None).read_bytes() == archive()


def archive() -> bytes:
    """Return an archive of sources."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        info = tarfile.TarInfo("plugin/random.bin")
        info.size = len(NOISE)
        tar.addfile(info, io.BytesIO(NOISE))
    return data.getvalue()[:4] + bytes(4) + data.getvalue()[8:]  # without the time of day


def wheel() -> bytes:
    """Return a wheel."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("plugin.py", NOISE)
    return data.getvalue()


def test_wrong_bytes_are_refused_before_anyone_looks_inside(
    server: Server, get: Callable[..., Path], tmp_path: Path
) -> None:
    """The file, both hashes, where it came from; nothing is kept."""
    server.files["/a.whl"] = b"other"
    with pytest.raises(ArtefactError) as caught:
        get(f"{server.url}/a.whl")
    text = str(caught.value)
    assert f"a.whl: expected sha256 {DIGEST}, got {store.sha256_bytes(b'other')}" in text
    assert "nothing was unpacked" in text
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_purged_file_says_what_to_do(
    server: Server, get: Callable[..., Path], status: int
) -> None:
    """Nightlies go: the route that needs none and the setting for a copy are named."""
    server.files["/a.whl"] = CONTENT
    server.status["/a.whl"] = status
    with pytest.raises(ArtefactError) as caught:
        get(f"{server.url}/a.whl")
    text = str(caught.value)
    assert f"{server.url}/a.whl (the server answered {status})" in text
    assert "wheel_mirror" in text
    assert "route=stable" in text
    assert len(server.asked) == 1


def test_a_mirror_is_tried_first(server: Server, get: Callable[..., Path], tmp_path: Path) -> None:
    """A directory or an address; the origin when it has no such file."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    server.files["/a.whl"] = CONTENT
    assert get(f"{server.url}/a.whl", mirror=str(mirror)).read_bytes() == CONTENT
    (mirror / "b.whl").write_bytes(CONTENT)
    get("http://127.0.0.1:9/b.whl", mirror=str(mirror))
    server.files[f"/m/{NAME.replace('+', '%2B')}"] = CONTENT
    get(f"http://127.0.0.1:9/{NAME}", mirror=f"{server.url}/m/")
    assert server.asked == [("/a.whl", None), (f"/m/{NAME.replace('+', '%2B')}", None)]


def test_a_dead_line_names_the_innermost_cause(get: Callable[..., Path]) -> None:
    with pytest.raises(ArtefactError, match=r"127\.0\.0\.1:9/a\.whl \(.*refused"):
        get("http://127.0.0.1:9/a.whl")


def test_a_file_on_the_machine_is_taken_by_hash_too(
    get: Callable[..., Path], tmp_path: Path
) -> None:
    """A wheel built elsewhere is named by path; a wrong path is one line."""
    (tmp_path / "own.whl").write_bytes(CONTENT)
    assert get(str(tmp_path / "own.whl")).read_bytes() == CONTENT
    with pytest.raises(ArtefactError, match="No such file"):
        get(str(tmp_path / "none.whl"))
    with pytest.raises(ArtefactError, match="expected sha256"):
        get(str(tmp_path / "own.whl"), "00" * 32)


def test_the_first_hash_seen_is_printed_for_the_deploy(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where nobody publishes one; with it pinned the same file is taken without a question."""
    monkeypatch.setattr(layout, "WHEELS", tmp_path)
    server.files["/plugin.tar.gz"] = sources = archive()
    assert artefact.main(["vllm-exl3", f"{server.url}/plugin.tar.gz"]) == 0
    found = json.loads(capsys.readouterr().out)
    digest = store.sha256_bytes(sources)
    assert found["sha256"] == digest
    assert artefact.fetch(Wanted("x", f"{server.url}/plugin.tar.gz", digest)) == Path(found["path"])
    assert len(server.asked) == 1
    assert artefact.main(["vllm-exl3", f"{server.url}/none.tar.gz"]) == 1
    assert "none.tar.gz is not to be had" in capsys.readouterr().err


def test_the_commit_of_an_archive_is_the_one_git_wrote(tmp_path: Path) -> None:
    """`git archive` leaves it in the tar's header; other archives have none."""
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", pax_headers={"comment": "ab" * 20}) as tar:
        tar.add(__file__, "x")
    assert artefact.commit_of(tmp_path / "a.tar.gz") == "ab" * 20
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        tar.add(__file__, "x")
    assert artefact.commit_of(tmp_path / "b.tar.gz") is None
    assert artefact.commit_of(Path(__file__)) is None
