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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsv4 import store
from dsv4.hub import Hub, Refused, Remote, Unreachable, innermost

if TYPE_CHECKING:
    import httpx2

PIECE: Final = 1 << 20
MODE: Final = 0o644
WRONG_TRIES: Final = 3
LONGEST_PAUSE_S: Final = 30.0
SLOWEST: Final = 10_000.0
"""Bytes a second below which a connection counts as stalled; a new one is often fast again."""


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
    """What all workers share: bytes that arrived, when the last one did, when to hold still."""

    fetched: int = 0
    done: int = 0
    revision: str = ""
    moved_at: float = field(default_factory=time.monotonic)
    hold_until: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """Count bytes that are on disk now."""
        with self.lock:
            self.fetched += count
            self.done += count
            self.moved_at = time.monotonic()

    def lose(self, count: int) -> None:
        """Take back bytes that turned out useless."""
        with self.lock:
            self.done -= count

    def hold(self, seconds: float) -> None:
        """Keep every worker quiet for a while; that time is nobody's failure."""
        with self.lock:
            self.hold_until = max(self.hold_until, time.monotonic() + seconds)
            self.moved_at = max(self.moved_at, self.hold_until)

    def pause(self, seconds: float) -> None:
        """Wait, at least until the hold is over."""
        self.stop.wait(max(seconds, self.hold_until - time.monotonic(), 0))
        self.check()

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


def verify(path: Path, remote: Remote) -> bool:
    """Return whether the file on disk is the one the hub described."""
    try:
        if path.stat().st_size != remote.size:
            return False
        digest = new_digest(remote)
        with path.open("rb", buffering=0) as handle:
            while piece := handle.read(PIECE):
                digest.update(piece)
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
        self.size = 0
        if os.fstat(self.handle.fileno()).st_size > remote.size:
            self.handle.truncate(0)
        self.handle.seek(0)
        while piece := self.handle.read(PIECE):
            meter.check()
            self.digest.update(piece)
            self.size += len(piece)

    def write(self, data: bytes) -> None:
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

    def restart(self) -> None:
        """Throw away what is there."""
        self.meter.lose(self.size)
        self.handle.truncate(0)
        self.digest = new_digest(self.remote)
        self.size = 0

    def finish(self, final: Path) -> None:
        """Give the file its name, when its bytes are the hub's; raise `WrongBytes` when not."""
        if self.digest.hexdigest() != self.remote.identity:
            found = self.digest.hexdigest()
            self.restart()
            raise WrongBytes(f"{self.remote.name}: got {found}, wanted {self.remote.identity}")
        os.fchmod(self.handle.fileno(), MODE)
        os.fsync(self.handle.fileno())
        self.path.replace(final)
        store.sync_directory(final.parent)

    def close(self) -> None:
        """Keep the partial for another time."""
        self.handle.close()


def check_answer(response: "httpx2.Response", remote: Remote, have: int) -> int:
    """Return at which byte the body begins; raise when it is not this file's."""
    kind = response.headers.get("Content-Type", "").split(";")[0]
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


def receive(hub: Hub, repo_id: str, commit: str, partial: Partial, limits: Limits) -> None:
    """Ask for what is missing and append it; raise when the connection ends before it is whole."""
    remote, meter = partial.remote, partial.meter
    headers = hub.headers()
    if partial.size:
        headers["Range"] = f"bytes={partial.size}-"
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
        since, had = time.monotonic(), partial.size
        for piece in response.iter_raw():
            meter.check()
            partial.write(piece)
            passed = time.monotonic() - since
            if passed > limits.stall_s:
                if (partial.size - had) / passed < SLOWEST:
                    raise Unreachable(f"{remote.name}: the connection slowed to a trickle")
                since, had = time.monotonic(), partial.size
    if partial.size < remote.size:
        raise Unreachable(f"{remote.name}: cut off after {partial.size} of {remote.size} bytes")


def fetch(
    hub: Hub, repo_id: str, commit: str, root: Path, remote: Remote, meter: Meter, limits: Limits
) -> None:
    """Have one file, whole and verified, trying again as long as that makes sense.

    Raises `Refused`, `DiskFull`, `Stopped`, or `Unreachable` when nothing arrived for anyone for
    `limits.patience_s`.
    """
    import httpx2

    partial = Partial(part_path(root, remote), remote, meter)
    failures = wrong = 0
    try:
        while True:
            meter.pause(0)
            before = partial.size
            try:
                if partial.size < remote.size:
                    receive(hub, repo_id, commit, partial, limits)
                partial.finish(root / remote.name)
                return
            except WrongBytes as error:
                wrong += 1
                if wrong >= WRONG_TRIES:
                    raise Refused(
                        f"{error}, {wrong} times; something between here and {hub.endpoint}"
                        " changes the files"
                    ) from error
                continue
            except Unreachable as error:
                failure, wait = error, error.wait_s
            except httpx2.HTTPError as error:
                failure = Unreachable(f"{hub.endpoint}: {remote.name}: {innermost(error)}")
                wait = None
            failures = 0 if partial.size > before else failures + 1
            if wait is not None:
                meter.hold(wait)
            elif meter.idle_s() > limits.patience_s:
                raise failure
            meter.pause(min(LONGEST_PAUSE_S, 0.25 * 2**failures))
    finally:
        with contextlib.suppress(OSError):
            partial.close()
