"""Bring one file over HTTP, so that no byte that arrived is asked for twice.

huggingface_hub starts an interrupted file at byte 0. Here each file grows in a hidden partial file
of its own, written without a buffer: after a kill at any instruction, its size is what arrived, and
the next try asks for the rest by Range. The name of the partial holds the hash it is to have. Only
a file whose every byte was hashed gets its own name.
"""

import contextlib
import errno
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsv4.hub import Hub, Refused, Remote, Unreachable, innermost

if TYPE_CHECKING:
    import socket

    import httpx2

PIECE: Final = 1 << 20
WRITE_BACK: Final = 64 << 20
"""How much may wait in memory for the disk: a served model needs that memory itself."""

MODE: Final = 0o644
WRONG_TRIES: Final = 3
LONGEST_PAUSE_S: Final = 30.0
LISTEN_S: Final = 1.0
"""How often a silent line looks up whether the download is over."""

SLOWEST: Final = 10_000.0
"""Bytes a second below which a connection counts as stalled; a new one is often fast again."""

MOVED: Final = 256 << 10
"""Bytes on disk that count as a sign of life; a trickle must not keep a dead download going."""

SAY_AGAIN_S: Final = 30.0


class DiskFull(Exception):
    """No room for the next byte."""


class WrongBytes(Exception):
    """A whole file arrived, and it is not the one the hub described."""


class Stopped(Exception):
    """Another file's failure ended the download."""


@dataclass(frozen=True)
class Limits:
    """How long to put up with what."""

    stall_s: float = 60.0
    patience_s: float = 900.0


@dataclass
class Meter:
    """What all workers share: bytes that arrived, when some last did, when to hold still."""

    fetched: int = 0
    done: int = 0
    revision: str = ""
    workers: int = 1 << 10
    """How many may talk to the hub at once; halved each time it says that is too much."""
    trouble: str | None = None
    """Why nothing moves at the moment."""
    tell: Callable[[str], None] = lambda _: None
    moved_at: float = field(default_factory=time.monotonic)
    moved_bytes: int = 0
    hold_until: float = 0.0
    at_work: int = 0
    told: dict[str, float] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """Count bytes that are on disk now."""
        with self.lock:
            self.fetched += count
            self.done += count
            self.moved_bytes += count
        if self.moved_bytes >= MOVED:
            self.moved()

    def moved(self) -> None:
        """Note a sign of life."""
        with self.lock:
            self.moved_bytes, self.trouble = 0, None
            self.moved_at = max(self.moved_at, time.monotonic())

    def lose(self, count: int) -> None:
        """Take back bytes that turned out useless."""
        with self.lock:
            self.done -= count

    def fails(self, error: Unreachable) -> None:
        """Note that a question got no usable answer; say so, though not every second."""
        text = str(error)
        with self.lock:
            self.trouble = text
            if error.crowded:
                self.workers = max(1, min(self.workers, self.at_work + 1) // 2)
            moment = time.monotonic()
            known = self.told.get(text)
            if known is not None and moment - known < SAY_AGAIN_S:
                return
            self.told[text] = moment
        self.tell(f"{text}; trying again")

    def hold(self, seconds: float) -> None:
        """Keep every worker quiet for a while; that time is nobody's failure."""
        with self.lock:
            self.hold_until = max(self.hold_until, time.monotonic() + seconds)
            self.moved_at = max(self.moved_at, self.hold_until)

    def pause(self, seconds: float) -> None:
        """Wait, at least until the hold is over."""
        self.stop.wait(max(seconds, self.hold_until - time.monotonic(), 0))
        self.check()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Talk to the hub when it is one's turn: no more at once than it puts up with."""
        while True:
            with self.lock:
                if self.at_work < self.workers:
                    self.at_work += 1
                    break
            self.pause(0.05)
        try:
            yield
        finally:
            with self.lock:
                self.at_work -= 1

    def check(self) -> None:
        """Raise when the download is over."""
        if self.stop.is_set():
            raise Stopped

    def idle_s(self) -> float:
        """Return for how long nothing has arrived for anyone."""
        return time.monotonic() - self.moved_at


def part_path(root: Path, remote: Remote) -> Path:
    """Return where a file grows."""
    final = root / remote.name
    return final.with_name(f".{final.name}.{remote.identity[:16]}.part")


def new_digest(remote: Remote) -> "hashlib._Hash":
    """Return the running hash in the form the hub uses for this file."""
    if remote.sha256:
        return hashlib.sha256()
    head = b"blob %d\0" % remote.size
    return hashlib.sha1(head, usedforsecurity=False)


def forget(descriptor: int) -> None:
    """Give the file's pages back, and have those begin to be written that still must be.

    Page cache counts as used where CUDA looks, and a hundred gigabytes of it slow down whatever
    the machine serves meanwhile.
    """
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def verify(path: Path, remote: Remote, meter: Meter) -> bool:
    """Return whether the file on disk is the one the hub described."""
    try:
        if path.stat().st_size != remote.size:
            return False
        digest = new_digest(remote)
        with path.open("rb", buffering=0) as handle:
            while piece := handle.read(PIECE):
                meter.check()
                digest.update(piece)
            forget(handle.fileno())
    except OSError:
        return False
    return digest.hexdigest() == remote.identity


class Partial:
    """A file that grows, and the hash of what it holds."""

    def __init__(self, path: Path, remote: Remote, meter: Meter) -> None:
        """Open or begin the partial; hash what an earlier try left."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.remote, self.meter = path, remote, meter
        self.handle = path.open("a+b", buffering=0)
        self.digest = new_digest(remote)
        self.size = self.written_back = 0
        if os.fstat(self.handle.fileno()).st_size > remote.size:
            self.handle.truncate(0)
        self.handle.seek(0)
        while piece := self.handle.read(PIECE):
            meter.check()
            self.digest.update(piece)
            self.size += len(piece)

    def head(self, count: int) -> bytes:
        """Return the first bytes of it."""
        return os.pread(self.handle.fileno(), count, 0)

    def write(self, data: bytes | memoryview) -> None:
        """Append, and hash what is on disk; a full disk keeps what fitted."""
        view = memoryview(data)[: self.remote.size - self.size]
        while view:
            try:
                count = self.handle.write(view) or 0
            except OSError as error:
                if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    raise DiskFull(str(self.path)) from error
                raise
            self.digest.update(view[:count])
            self.size += count
            self.meter.add(count)
            view = view[count:]
        if self.size - self.written_back >= WRITE_BACK:
            forget(self.handle.fileno())
            self.written_back = self.size

    def restart(self) -> None:
        """Throw away what is there."""
        self.meter.lose(self.size)
        self.handle.truncate(0)
        self.digest = new_digest(self.remote)
        self.size = self.written_back = 0

    def finish(self, final: Path) -> None:
        """Give the file its name, when its bytes are the hub's; raise `WrongBytes` when not.

        It is not waited for here until they are on the disk: see `fetch.settle`.
        """
        if self.digest.hexdigest() != self.remote.identity:
            found = self.digest.hexdigest()
            self.restart()
            raise WrongBytes(f"{self.remote.name}: got {found}, wanted {self.remote.identity}")
        os.fchmod(self.handle.fileno(), MODE)
        self.path.replace(final)
        self.meter.moved()

    def close(self) -> None:
        """Keep the partial for another time."""
        with contextlib.suppress(OSError):
            self.handle.close()


def check_answer(response: "httpx2.Response", remote: Remote, have: int) -> int:
    """Return at which byte the body begins; raise when it is not this file's."""
    kind = response.headers.get("Content-Type", "").split(";")[0]
    if (packed := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise Unreachable(f"{remote.name}: arrives packed ({packed}); a proxy changes it")
    if response.status_code == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if not span or int(span[1]) != have or span[2] not in {str(remote.size), "*"}:
            raise Unreachable(f"{remote.name}: the answer to a range request makes no sense")
        return have
    length = response.headers.get("Content-Length")
    if length is not None and int(length) != remote.size:
        raise Unreachable(
            f"{remote.name}: got {length} bytes of {kind or 'unknown type'} where the file has"
            f" {remote.size}; a proxy or a sign-in page answers in place of the hub"
        )
    return 0


def receive(
    hub: Hub, repo_id: str, commit: str, partial: Partial, until: int, limits: Limits
) -> None:
    """Ask for the bytes up to `until` that are missing, and append them.

    Raises when the connection ends before they are all there.
    """
    remote = partial.remote
    headers = hub.headers()
    if partial.size or until < remote.size:
        last = until - 1 if until < remote.size else ""
        headers["Range"] = f"bytes={partial.size}-{last}"
    url = hub.url(repo_id, commit, remote.name)
    with hub.session.stream("GET", url, headers=headers, timeout=limits.stall_s) as response:
        if response.status_code == 416:
            partial.restart()
            raise Unreachable(f"{remote.name}: the hub knows no byte {partial.size} of it")
        if response.status_code >= 400:
            failure = hub.explain(response, repo_id, commit)
            if response.history and isinstance(failure, Refused):
                # Behind a redirect it is storage that refuses: a link that ran out
                raise Unreachable(f"{remote.name}: storage answered {response.status_code}")
            raise failure
        if check_answer(response, remote, partial.size) == 0 and partial.size:
            partial.restart()
        append(response, partial, until, limits)
    if partial.size < until:
        raise Unreachable(f"{remote.name}: cut off after {partial.size} of {remote.size} bytes")


def append(response: "httpx2.Response", partial: Partial, until: int, limits: Limits) -> None:
    """Write the body, and raise when it comes too slowly to go on waiting for it."""
    since, had = time.monotonic(), partial.size
    for piece in body(response, until - partial.size, partial.remote.name, limits, partial.meter):
        partial.write(piece)
        passed = time.monotonic() - since
        if passed > limits.stall_s:
            if (partial.size - had) / passed < SLOWEST:
                raise Unreachable(f"{partial.remote.name}: the connection slowed to a trickle")
            since, had = time.monotonic(), partial.size


def body(
    response: "httpx2.Response", count: int, name: str, limits: Limits, meter: Meter
) -> Iterator[bytes | memoryview]:
    """Yield what comes, at most `count` bytes; the last view is overwritten by the next.

    The library hands out 64 KiB at a time, through a parser, at half the speed of a fast line. So
    of a long body it gives the first piece, which is all that it has read by then, and the rest is
    read from its socket; the connection is not used again.
    """
    pieces = response.iter_raw()
    line = socket_of(response) if count > PIECE else None
    if line is None:
        # Read to its end, so that the connection is used again, unless it was asked for less
        more = int(response.headers.get("Content-Length", count)) > count
        for piece in pieces:
            meter.check()
            yield piece
            count -= len(piece)
            if more and count <= 0:
                return
        return
    first = next(pieces, b"")
    yield first
    count -= len(first)
    buffer = memoryview(bytearray(PIECE))
    line.settimeout(min(LISTEN_S, limits.stall_s))
    heard = time.monotonic()
    while count > 0:
        meter.check()
        try:
            size = line.recv_into(buffer, min(PIECE, count))
        except TimeoutError:
            if time.monotonic() - heard > limits.stall_s:
                raise Unreachable(f"{name}: nothing arrived for {limits.stall_s:.0f} s") from None
            continue
        if size == 0:
            return
        heard = time.monotonic()
        count -= size
        yield buffer[:size]


def socket_of(response: "httpx2.Response") -> "socket.socket | None":
    """Return the socket a body comes from, None where it is wrapped in some encoding."""
    plain = "Content-Length" in response.headers and response.http_version == "HTTP/1.1"
    stream = response.extensions.get("network_stream")
    found: socket.socket | None = stream.get_extra_info("socket") if plain and stream else None
    return found


@dataclass(frozen=True)
class Source:
    """Where the files of one pack come from, and how patient to be with it."""

    hub: Hub
    repo_id: str
    commit: str
    meter: Meter
    limits: Limits

    def have(self, partial: Partial, until: int) -> None:
        """Have the first `until` bytes of a file, trying again as long as that makes sense.

        Raises `Refused`, `DiskFull`, `Stopped`, or `Unreachable` when nothing arrived for anyone
        for `limits.patience_s`.
        """
        import httpx2

        meter, failures = self.meter, 0
        while partial.size < until:
            meter.pause(0)
            before = partial.size
            try:
                with meter.turn():
                    receive(self.hub, self.repo_id, self.commit, partial, until, self.limits)
                return
            except Unreachable as error:
                failure = error
            except (httpx2.HTTPError, ConnectionError, TimeoutError) as error:
                place = f"{self.hub.endpoint}: {partial.remote.name}"
                failure = Unreachable(f"{place}: {innermost(error)}")
            failures = 0 if partial.size > before else failures + 1
            meter.fails(failure)
            if failure.wait_s is not None:
                meter.hold(failure.wait_s)
            elif meter.idle_s() > self.limits.patience_s:
                raise failure
            meter.pause(min(LONGEST_PAUSE_S, 0.25 * 2**failures))

    def complete(self, partial: Partial, final: Path) -> None:
        """Have the whole file under its own name; raises as `have` does."""
        for tries in range(1, WRONG_TRIES + 1):
            self.have(partial, partial.remote.size)
            try:
                partial.finish(final)
                return
            except WrongBytes as error:
                self.meter.tell(f"{error}; fetching this file again")
                if tries == WRONG_TRIES:
                    raise Refused(
                        f"{error}, {tries} times; something between here and {self.hub.endpoint}"
                        " changes the files"
                    ) from error
