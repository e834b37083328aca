"""Have a pack on disk, pristine, every file by the Hub's own hash; go on where the last try ended.

Ends with 0 when the pack is complete, 1 when a person has to do something (terms, token, disk,
settings), 3 when trying again later may help. The unit starts it again after 3 and not after 1.
"""

import argparse
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial as bound
from pathlib import Path
from typing import Any, Final

from dsv4 import accounts, layout, pack_heads, pack_verify, store, transfer, xet
from dsv4.hub import COMMIT, Hub, Refused, Remote, Unreachable, clean_token, network_settings
from dsv4.pack_heads import Expected
from dsv4.pack_verify import PART_SUFFIX, BadShard, read_header, state_path
from dsv4.sizes import both_units
from dsv4.transfer import DiskFull, Limits, Meter, Partial, Source, Stopped

PUBLIC: Final = "https://huggingface.co"
TRANSPORTS: Final = ("http", "xet")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MOST_WORKERS: Final = 16
MARGIN: Final = 0.02
LARGEST_MARGIN: Final = 1 << 30
"""Room to leave on the disk: 2 % of the pack, at most 1 GiB."""

CLIENTS_OWN: Final = ".cache"
"""Where huggingface_hub keeps its notes and unfinished files when it fetches into a directory."""

REPORT_S: Final = 1.0
SAY_S: Final = 30.0
RATE_OVER_S: Final = 15.0


@dataclass(frozen=True)
class Spec:
    """What to fetch, as /etc/dsv4/fetch.json has it."""

    repo_id: str
    name: str
    revision: str
    endpoint: str = PUBLIC
    transport: str = "http"
    workers: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)
    expected: Expected = field(default_factory=Expected)
    code: tuple[str, ...] = ()


def parse_spec(value: Mapping[str, Any], endpoint: str | None = None) -> Spec:
    """Return a description checked field by field; raise `Refused` naming the wrong one."""

    def text(key: str, pattern: re.Pattern[str], wanted: str) -> str:
        found = value.get(key)
        if not isinstance(found, str) or not pattern.fullmatch(found):
            raise Refused(f"{key}: must be {wanted} (got {found!r}); the deploy writes it")
        return found

    transport = value.get("transport", "http")
    if transport not in TRANSPORTS:
        raise Refused(f"transport: must be {' or '.join(TRANSPORTS)} (got {transport!r})")
    workers = value.get("workers", 4)
    if not isinstance(workers, int) or not 1 <= workers <= MOST_WORKERS:
        raise Refused(f"workers: must be 1 to {MOST_WORKERS} (got {workers!r})")
    return Spec(
        repo_id=text("repo_id", re.compile(r"[^/\s]+/[^/\s]+"), "OWNER/NAME"),
        name=text("name", NAME, "a plain directory name"),
        revision=text("revision", COMMIT, "a commit of 40 hex digits"),
        endpoint=choose_endpoint(value.get("endpoint") or endpoint),
        transport=transport,
        workers=workers,
        environment=network_settings(value.get("environment") or {}),
        expected=parse_expected(value.get("expected") or {}),
        code=tuple(map(str, value.get("code") or ())),
    )


def parse_expected(value: Any) -> Expected:
    """Return what the deploy knows of the pack."""
    try:
        exl3 = value.get("exl3") or {}
        return Expected(
            shards=None if value.get("shards") is None else int(value["shards"]),
            bits=None if exl3.get("bits") is None else int(exl3["bits"]),
            drafts=None if exl3.get("draft_layers") is None else int(exl3["draft_layers"]),
            layer_bits={int(k): int(v) for k, v in (exl3.get("layer_bits") or {}).items()},
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused(f"expected: cannot be read ({error}); the deploy writes it") from error


def choose_endpoint(given: str | None) -> str:
    """Return the hub to ask: the one given, the environment's, or the public one."""
    found = (given or os.environ.get("HF_ENDPOINT") or PUBLIC).strip().rstrip("/")
    if not re.match(r"https?://[^/\s]+", found):
        raise Refused(f"endpoint: must begin with http:// or https:// (got {found!r})")
    return found


def now() -> str:
    """Return the time as state files have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def say(text: str) -> None:
    """Tell the journal."""
    sys.stderr.write(f"dsv4 fetch: {text}\n")
    sys.stderr.flush()


# State of one revision


@dataclass
class Record:
    """REVISION.json: what the hub says of each file, and when its bytes were last found right."""

    path: Path
    repo_id: str
    revision: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    complete: bool = False
    error: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def save(self, *, sync: bool = False) -> None:
        """Write it; a full disk must not hide what we were about to report."""
        value = {
            "repo_id": self.repo_id,
            "revision": self.revision,
            "complete": self.complete,
            "error": self.error,
            "files": self.files,
        }
        with self.lock, contextlib.suppress(OSError):
            store.write_json(self.path, value, sync=sync)

    def trusts(self, root: Path, name: str) -> bool:
        """Return whether this very file was verified before and has not been touched since."""
        known = self.files.get(name, {})
        if not known.get("verified") or not pack_verify.settled(known):
            return False
        try:
            facts = (root / name).stat()
        except OSError:
            return False
        return (facts.st_size, facts.st_mtime_ns) == (known.get("size"), known.get("mtime_ns"))

    def verified(self, root: Path, name: str) -> None:
        """Note that a file's bytes are the hub's."""
        with self.lock:
            self.files[name] |= {
                "verified": now(),
                "unsettled": pack_verify.BOOT,
                "mtime_ns": (root / name).stat().st_mtime_ns,
            }
        self.save()


def open_record(root: Path, spec: Spec) -> Record:
    """Return the revision's record; one that speaks of another repository is refused."""
    record = read_record(root, spec.repo_id)
    if record.repo_id != spec.repo_id:
        raise Refused(
            f"{record.path}: belongs to {record.repo_id}, not to {spec.repo_id}; give this pack"
            f" another name, or remove {root} and its record"
        )
    return record


def read_record(root: Path, repo_id: str) -> Record:
    """Return a revision's record, an empty one when there is none that can be read."""
    path = state_path(root)
    value = store.read_json_or(path, {})
    files = value.get("files")
    rows = files.items() if isinstance(files, dict) else ()
    return Record(
        path,
        str(value.get("repo_id", repo_id)),
        root.name,
        files={name: dict(row) for name, row in rows if isinstance(row, dict)},
        # A directory that was copied or renamed brings another revision's record along
        complete=value.get("complete") is True and value.get("revision") == root.name,
    )


def settle(root: Path, record: Record) -> None:
    """Have on the disk, and not only in memory, whatever was verified; note that it is.

    Apart from the download, which would wait for a disk at each file. Until then a file counts for
    this boot alone: after a power cut it is hashed anew, and brought again only if it suffered.
    """
    open_ones = [name for name, row in record.files.items() if row.get("unsettled")]
    for name in open_ones:
        with (root / name).open("rb") as handle:
            os.fsync(handle.fileno())
            transfer.forget(handle.fileno())
    for directory in {(root / name).parent for name in open_ones} | {root.parent}:
        store.sync_directory(directory)
    if open_ones:
        for name in open_ones:
            del record.files[name]["unsettled"]
        record.save(sync=True)


def adopt(record: Record, remotes: list[Remote]) -> None:
    """Take the hub's listing; what was verified stays so while its hash is the same."""
    known, record.files = record.files, {}
    for remote in remotes:
        row: dict[str, Any] = {
            "size": remote.size,
            "sha256": remote.sha256,
            "blob_sha1": remote.blob_sha1,
            "verified": None,
        }
        old = known.get(remote.name, {})
        if all(old.get(key) == row[key] for key in ("size", "sha256", "blob_sha1")):
            row |= {key: old[key] for key in ("verified", "mtime_ns", "unsettled") if key in old}
        record.files[remote.name] = row
    record.complete = False


# What is there, and whether the rest fits


def sort_out(
    root: Path, remotes: list[Remote], record: Record, meter: Meter, workers: int
) -> list[Remote]:
    """Return the files to bring; verify those that are there, remove what is not the hub's."""

    def is_there(remote: Remote) -> bool:
        path = root / remote.name
        if record.trusts(root, remote.name):
            return True
        if transfer.verify(path, remote, meter):
            record.verified(root, remote.name)
            return True
        if path.is_dir() and not path.is_symlink():
            raise Refused(f"{path}: is a directory where the pack has a file; remove it")
        if path.exists() or path.is_symlink():
            say(f"{remote.name}: not what the hub has; only this file is fetched again")
            path.unlink()
        return False

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(is_there, remotes))
    return [remote for remote, there in zip(remotes, found, strict=True) if not there]


def borrow(root: Path, missing: list[Remote], record: Record) -> list[Remote]:
    """Take what another revision of the pack has, too, and return what is left to bring.

    A link to a verified file, which is never written to again, costs neither a transfer nor space;
    a partial file is taken over as it is.
    """
    left = []
    others = [path for path in root.parent.glob("*/") if path != root and path.is_dir()]
    for remote in missing:
        final = root / remote.name
        final.parent.mkdir(parents=True, exist_ok=True)
        for other in others:
            known = read_record(other, record.repo_id)
            row = known.files.get(remote.name, {})
            same = remote.identity in {row.get("sha256"), row.get("blob_sha1")}
            if same and known.trusts(other, remote.name):
                final.hardlink_to(other / remote.name)
                break
            part = transfer.part_path(other, remote)
            if part.exists() and not transfer.part_path(root, remote).exists():
                part.replace(transfer.part_path(root, remote))
        else:
            left.append(remote)
            continue
        record.verified(root, remote.name)
    return left


def leftovers(root: Path, missing: list[Remote]) -> list[Path]:
    """Return what earlier tries left in this revision, and those of other clients of the hub.

    Nobody else is writing here: a download holds the lock (`alone`).
    """
    wanted = {transfer.part_path(root, remote) for remote in missing}
    notes = root / CLIENTS_OWN
    found = set(root.rglob(f".*{PART_SUFFIX}")) - wanted
    found |= {path for path in root.rglob("*.incomplete") if notes not in path.parents}
    found |= set(root.parent.glob(f".{root.name}.json.*"))
    return sorted(found | {path for path in (notes, xet.home(root)) if path.exists()})


def remove(paths: list[Path]) -> None:
    """Remove files and directories, and say how much that was."""
    if not paths:
        return
    total = 0
    for path in paths:
        inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
        total += sum(item.lstat().st_blocks * 512 for item in inside)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    say(f"removed {len(paths)} leftovers of earlier tries, {both_units(total)}")


def part_sizes(root: Path, missing: list[Remote]) -> int:
    """Return the bytes of those files that arrived earlier."""
    total = 0
    for remote in missing:
        with contextlib.suppress(OSError):
            total += min(transfer.part_path(root, remote).stat().st_size, remote.size)
    return total


def other_parts(root: Path) -> list[Path]:
    """Return partial files of other revisions of the pack: nobody is bringing those now."""
    return [part for part in root.parent.rglob(f".*{PART_SUFFIX}") if root not in part.parents]


def make_room(root: Path, needed: int, total: int) -> None:
    """Raise `DiskFull` unless the rest of the pack fits; other tries' leftovers go first.

    What is reserved for root (`f_bavail` leaves it out) is not free to the fetcher.
    """
    margin = min(int(total * MARGIN), LARGEST_MARGIN)
    for part in other_parts(root):
        if shutil.disk_usage(root).free >= needed + margin:
            return
        say(f"{part}: an unfinished file of another revision, removed for its space")
        part.unlink()
    free = shutil.disk_usage(root).free
    if free < needed + margin:
        raise DiskFull(
            f"{root}: needs {both_units(needed)} more and {both_units(margin)} to spare,"
            f" {both_units(free)} is free there; free {both_units(needed + margin - free)} and"
            " start the download again"
        )


# Progress


class Progress:
    """What a deploy and a person see of the work: a small file, and now and then a line."""

    def __init__(self, path: Path, meter: Meter, total: int) -> None:
        """Report to `path`; a place we may not write to is no reason to stop."""
        self.path, self.meter, self.total = path, meter, total
        self.transport, self.doing = "http", "asking the hub"
        self.samples: deque[tuple[float, int]] = deque([(time.monotonic(), meter.done)])
        self.over = threading.Event()
        self.said_at = time.monotonic()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def rate(self) -> float:
        """Return bytes a second over the last while."""
        moment, done = time.monotonic(), self.meter.done
        self.samples.append((moment, done))
        while len(self.samples) > 2 and moment - self.samples[0][0] > RATE_OVER_S:
            self.samples.popleft()
        began, had = self.samples[0]
        return max(0.0, (done - had) / (moment - began)) if moment > began else 0.0

    def write(self, state: str, error: str | None = None) -> None:
        """Write the file once."""
        rate, left = self.rate(), self.total - self.meter.done
        value = {
            "state": state,
            "done_bytes": self.meter.done,
            "total_bytes": self.total,
            "rate": round(rate),
            "eta_s": round(left / rate) if rate and state == "running" else None,
            "doing": self.doing if state == "running" else None,
            "trouble": self.meter.trouble if state == "running" else None,
            "error": error,
            "transport": self.transport,
            "revision": self.meter.revision,
        }
        with contextlib.suppress(OSError):
            store.write_json(self.path, value, sync=False)

    def run(self) -> None:
        """Report until the work is over."""
        while not self.over.wait(REPORT_S):
            self.write("running")
            if time.monotonic() - self.said_at >= SAY_S:
                self.said_at = time.monotonic()
                say(
                    f"{both_units(self.meter.done)} of {both_units(self.total)},"
                    f" {both_units(self.rate())}/s by {self.transport}"
                )

    def end(self, state: str, error: str | None = None) -> None:
        """Stop reporting and leave the outcome."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        self.write(state, error)


# The work


@contextlib.contextmanager
def alone(packs: Path) -> Iterator[None]:
    """Hold the right to write below `packs`."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(store.hold(packs / layout.FETCH_LOCK, wait=False))
        except BlockingIOError:
            raise Refused(f"{packs}: another download is at work there; wait for it") from None
        yield


def become_owner(packs: Path) -> None:
    """Go on as whoever owns the packs: files of root's there would stop the unit's next run."""
    facts = packs.stat()
    accounts.become(facts.st_uid, facts.st_gid)


def patiently(question: Callable[[], Any], meter: Meter, limits: Limits) -> Any:
    """Return the hub's answer, asking again while that may help."""
    pause = 0.5
    while True:
        try:
            return question()
        except Unreachable as error:
            meter.fails(error)
            if error.wait_s is not None:
                meter.hold(error.wait_s)
            elif meter.idle_s() > limits.patience_s:
                raise
            meter.pause(pause)
            pause = min(transfer.LONGEST_PAUSE_S, pause * 2)


def all_of(jobs: Iterable[Callable[[], None]], meter: Meter, workers: int) -> None:
    """Do all these, several at a time and in this order; the first failure stops the rest."""
    with ThreadPoolExecutor(workers) as pool:
        at_work = [pool.submit(job) for job in jobs]
        try:
            wait(at_work, return_when=FIRST_EXCEPTION)
        finally:
            if any(failed(job) for job in at_work):
                meter.stop.set()
                pool.shutdown(cancel_futures=True)
    errors = [error for job in at_work if (error := failed(job))]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def failed(job: "Future[None]") -> BaseException | None:
    """Return a finished job's error."""
    return job.exception() if job.done() and not job.cancelled() else None


@dataclass
class Work:
    """One run: where it writes, how patient it is, what it reports to."""

    packs: Path
    progress_path: Path
    limits: Limits
    meter: Meter = field(default_factory=lambda: Meter(tell=say))
    progress: Progress | None = None

    def run(self, spec: Spec, token: str | None) -> dict[str, Any]:
        """Have the pack complete and return what was done."""
        root = self.packs / spec.name / spec.revision
        root.mkdir(parents=True, exist_ok=True)
        record = open_record(root, spec)
        total = sum(int(row.get("size") or 0) for row in record.files.values())
        if record.complete and all(record.trusts(root, name) for name in record.files):
            self.meter.done = total
            remove(leftovers(root, []))
            settle(root, record)
            return self.done(root, record, 0)
        try:
            fetched = self.fetch(spec, token, root, record)
        except (Refused, Unreachable, DiskFull, OSError) as error:
            record.error = words_of(error)
            if record.files:
                record.save()
            raise
        return self.done(root, record, fetched)

    def fetch(self, spec: Spec, token: str | None, root: Path, record: Record) -> int:
        """Bring what is missing and return how many files that were."""
        hub = Hub(spec.endpoint, token, self.limits.stall_s)
        meter, limits = self.meter, self.limits
        meter.revision = spec.revision
        # Also over what a killed run left there: whoever follows this one must not read that
        Progress(self.progress_path, meter, 0).write("running")
        remotes = patiently(lambda: hub.files(spec.repo_id, spec.revision), meter, limits)
        if code := pack_verify.program_code((remote.name for remote in remotes), spec.code):
            raise Refused(
                f"{spec.repo_id}: holds program code ({pack_verify.names(code)}), which a model"
                " needs none of; use a pack without, or name each such file in pack_code"
            )
        total = sum(remote.size for remote in remotes)
        self.progress = Progress(self.progress_path, meter, total)
        self.progress.doing = "checking what is there"
        self.progress.write("running")
        self.progress.thread.start()
        adopt(record, remotes)
        record.save()
        missing = sort_out(root, remotes, record, meter, spec.workers)
        missing = borrow(root, missing, record)
        remove(leftovers(root, missing))
        if missing:
            smallest = min(missing, key=lambda remote: remote.size)
            patiently(
                lambda: hub.check_access(spec.repo_id, spec.revision, smallest), meter, limits
            )
            needed = sum(remote.size for remote in missing) - part_sizes(root, missing)
            make_room(root, needed, total)
            meter.done = total - needed
            say(
                f"{spec.repo_id} at {spec.revision}: {len(missing)} of {len(remotes)} files to"
                f" bring, {both_units(needed)} of {both_units(total)}, from {spec.endpoint}"
                f" by {spec.transport}"
            )
            source = Source(hub, spec.repo_id, spec.revision, meter, limits)
            Bringing(spec, source, root, record, self.progress).all(remotes, missing)
        record.complete, record.error = True, None
        record.save()
        return len(missing)

    def done(self, root: Path, record: Record, fetched: int) -> dict[str, Any]:
        """Report the good end."""
        total = sum(int(row["size"]) for row in record.files.values())
        self.meter.done = total
        (self.progress or Progress(self.progress_path, self.meter, total)).end("done")
        say(f"{root}: complete, {len(record.files)} files, {both_units(total)}, all verified")
        return {
            "ok": True,
            "root": str(root),
            "files": len(record.files),
            "bytes": total,
            "files_fetched": fetched,
            "bytes_fetched": self.meter.fetched,
        }

    def fail(self, error: str) -> None:
        """Report the bad end."""
        self.meter.stop.set()
        progress = self.progress or Progress(self.progress_path, self.meter, 0)
        progress.end("failed", error)


@dataclass
class Bringing:
    """The files of one pack on their way, in the order in which they can be judged."""

    spec: Spec
    source: Source
    root: Path
    record: Record
    progress: Progress
    partials: dict[str, Partial] = field(default_factory=dict)

    def all(self, remotes: list[Remote], missing: list[Remote]) -> None:
        """Bring the small files, judge the pack by them and by its shards' headers, bring it."""
        meter, workers = self.source.meter, self.spec.workers
        large = sorted(missing, key=lambda remote: (-remote.size, remote.name))
        small = [remote for remote in missing if not pack_heads.is_shard(remote.name)]
        self.progress.doing = "small files and headers"
        try:
            all_of([bound(self.whole, remote) for remote in small], meter, workers)
            self.judge([remote for remote in remotes if pack_heads.is_shard(remote.name)])
            self.progress.doing = "files"
            self.progress.transport = self.spec.transport
            bulk = [remote for remote in large if remote not in small]
            all_of([bound(self.whole, remote) for remote in bulk], meter, workers)
        finally:
            for part in self.partials.values():
                part.close()
            shutil.rmtree(xet.home(self.root), ignore_errors=True)

    def begun(self, remote: Remote) -> Partial:
        """Return a file's partial, the same one each time: what it holds is hashed once."""
        if remote.name not in self.partials:
            path = transfer.part_path(self.root, remote)
            self.partials[remote.name] = Partial(path, remote, self.source.meter)
        return self.partials[remote.name]

    def whole(self, remote: Remote) -> None:
        """Have one file, verified."""
        final = self.root / remote.name
        if self.progress.transport == "xet":
            outcome = xet.fetch(self.source, self.root, remote)
            if outcome == "failed":
                self.progress.transport = "http"
        if not final.exists():
            self.source.complete(self.begun(remote), final)
        self.record.verified(self.root, remote.name)

    def judge(self, shards: list[Remote]) -> None:
        """Refuse a pack that is not the expected one, before the bulk of it is fetched."""
        found: dict[str, pack_heads.Tensors] = {}

        def read(remote: Remote) -> None:
            found[remote.name] = self.header(remote)

        all_of([bound(read, remote) for remote in shards], self.source.meter, self.spec.workers)
        small = {path.name: path.read_bytes() for path in self.root.glob("*.json")}
        faults = list(pack_heads.faults(found, small, self.spec.expected))
        if faults:
            raise Refused(
                f"{self.spec.repo_id} at {self.spec.revision}: is not the pack expected:"
                f" {'; '.join(faults[:3])}; set pack_revision to another commit, or report it to"
                " its author"
            )

    def header(self, remote: Remote) -> pack_heads.Tensors:
        """Return what a shard holds; a header that makes no sense is fetched once more."""
        final = self.root / remote.name
        try:
            try:
                return read_header(final)[0] if final.exists() else self.fetched_header(remote)
            except BadShard as error:
                if final.exists():
                    raise
                say(f"{remote.name}: {error}; fetching its header again")
                self.begun(remote).restart()
                return self.fetched_header(remote)
        except BadShard as error:
            raise Refused(
                f"{self.spec.repo_id} at {self.spec.revision}: {remote.name} {error}; set"
                " pack_revision to another commit, or report it to its author"
            ) from error

    def fetched_header(self, remote: Remote) -> pack_heads.Tensors:
        """Return what the beginning of a partial file says it holds, fetching just that."""
        part = self.begun(remote)
        first = pack_heads.start(remote.size)
        self.source.have(part, first)
        count = pack_heads.length(part.head(first), remote.size)
        self.source.have(part, count)
        return pack_heads.tensors(part.head(count), remote.size)


def words_of(error: Exception) -> str:
    """Return one clear line about a failure."""
    full = isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}
    if full or isinstance(error, DiskFull):
        text = str(error.filename if isinstance(error, OSError) else error)
        if "start the download again" in text:
            return text
        return f"{text}: the disk is full; free some space and start the download again"
    if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM}:
        return f"{error.filename}: {whose(Path(str(error.filename)))}"
    if isinstance(error, OSError) and error.errno in {errno.EIO, errno.EROFS}:
        return f"{error.filename}: {error.strerror}; the disk fails, see dmesg"
    return str(error)


def whose(path: Path) -> str:
    """Return why we may not touch a path: an earlier try by another user left it, as a rule."""
    # Path.exists() raises where a directory above is closed to us
    there = next((known for known in (path, *path.parents) if os.path.exists(known)), path)  # noqa: PTH110
    try:
        owner = there.owner()
    except (OSError, KeyError):
        owner = "somebody else"
    return (
        f"may not be written, {there} belongs to {owner}; give it back:"
        f" sudo chown -R {layout.USER_FETCH}: {layout.PACKS}/*/"
    )


def exit_code(error: Exception) -> int:
    """Return 3 for what may pass by itself, 1 for what a person has to change."""
    return 3 if isinstance(error, Unreachable) else 1


def read_token(path: Path | None) -> str | None:
    """Return the token: stripped, because a copied line end would be sent as part of it."""
    if path is None or not path.exists():
        return None
    return clean_token(path.read_text(encoding="utf-8", errors="replace"), "the Hub token")


def credential(name: str) -> Path | None:
    """Return what systemd handed over under this name, None when run by hand."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return Path(directory) / name if directory else None


def default_spec() -> Path:
    """Return where the description is: handed over by the unit, or where the deploy put it."""
    handed = credential("fetch.json")
    return handed if handed and handed.exists() else layout.FETCH_JSON


def resolve(options: argparse.Namespace, token: str | None) -> int:
    """Print the commit a repository's branch is at."""
    try:
        os.environ.update(network_settings(json.loads(options.environment or "{}")))
        hub = Hub(choose_endpoint(options.endpoint), token, options.stall_s)
        limits = Limits(options.stall_s, min(options.patience_s, 30.0))
        commit = patiently(
            lambda: hub.resolve(options.resolve, options.revision), Meter(tell=say), limits
        )
    except (Refused, Unreachable) as error:
        say(str(error))
        print(json.dumps({"ok": False, "error": str(error)}))
        return exit_code(error)
    print(json.dumps({"ok": True, "revision": commit}))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dsv4 fetch", description=__doc__)
    parser.add_argument("--spec", type=Path, help="what to fetch (handed over by the unit)")
    parser.add_argument("--token-file", type=Path, help="token of the hub, if it needs one")
    parser.add_argument("--packs", type=Path, default=layout.PACKS)
    parser.add_argument("--progress", type=Path, default=layout.FETCH_PROGRESS)
    parser.add_argument("--endpoint", help="the hub to ask when the description names none")
    parser.add_argument("--environment", help="how to reach the network, for --resolve, as JSON")
    parser.add_argument("--resolve", metavar="REPO", help="print the commit of REPO and stop")
    parser.add_argument("--revision", default="main", help="branch to resolve")
    parser.add_argument("--stall-s", type=float, default=60.0, help="longest silence of a line")
    parser.add_argument(
        "--patience-s", type=float, default=900.0, help="give up after so long without a byte"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Fetch one pack, or resolve one revision."""
    options = parse(argv)
    os.umask(0o022)
    work = Work(options.packs, options.progress, Limits(options.stall_s, options.patience_s))
    try:
        token = read_token(options.token_file or credential("hub_token"))
        if options.resolve:
            return resolve(options, token)
        value = store.read_json(options.spec or default_spec())
        if value is None:
            raise Refused(f"{options.spec or default_spec()}: is not there; the deploy writes it")
        spec = parse_spec(value, options.endpoint)
        os.environ.update(spec.environment)
        become_owner(options.packs)
        signal.signal(signal.SIGTERM, lambda *_: leave(work))
        with alone(options.packs):
            found = work.run(spec, token)
    except (Refused, Unreachable, DiskFull, OSError, store.BrokenState) as error:
        text = words_of(error)
        work.fail(text)
        say(text)
        if options.json:
            print(json.dumps({"ok": False, "error": text}))
        return exit_code(error)
    if options.json:
        print(json.dumps(found))
    return 0


def leave(work: Work) -> None:
    """End at once: what arrived is on disk, and the next run goes on from there."""
    work.meter.stop.set()
    with contextlib.suppress(Exception):
        progress = work.progress or Progress(work.progress_path, work.meter, 0)
        progress.write("failed", "stopped before it was complete")
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
