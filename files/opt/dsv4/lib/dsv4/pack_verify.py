"""Say whether a pack on disk is whole: every shard's structure, the index both ways, sizes, hashes.

A loader takes a shard that is a sign-in page for a header "too large", and fills tensors of a
missing one with whatever the memory held. Here each fault names its file and its likely cause.
Structure and sizes cost one small read a file; `--full` reads every byte.
"""

import argparse
import contextlib
import errno
import gc
import hashlib
import io
import json
import math
import os
import pwd
import re
import signal
import stat
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from dsv4 import accounts, exl3, layout, store
from dsv4.machine import visible_files

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SUFFIX: Final = ".safetensors"
PART_SUFFIX: Final = ".part"
CODE: Final = re.compile(r".*\.(py[cdiowxz]?|whl|egg|so(\.[0-9]+)*|dylib|dll)", re.I | re.S)
"""Names of what Python would run, or the linker load, in any case of letters."""
BOOT: Final = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
HEADER_LIMIT: Final = 100_000_000
"""The format's own bound on a header."""

BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one element; a type that is not here is not checked for size."""

NAME: Final = re.compile(r"[^./\0][^/\0]*")
HASH: Final = re.compile(r"([0-9a-f]{64})|[0-9a-f]{40}")
"""What a hub cache calls a file."""
OF_COUNT: Final = re.compile(r"-of-0*(\d+)\.safetensors$")

UNKNOWN: Final = "it is not a safetensors file"
LOOKS_LIKE: Final = (
    (b"version https://git-lfs", "it is a git-lfs pointer; the file itself was never fetched"),
    (b"\xef\xbb\xbf", "it is text; a proxy or an editor put that in its place"),
    (b"\xff\xfe", "it is text; a proxy or an editor put that in its place"),
    (b"<", "it is a web page; a proxy or sign-in page answered in place of the hub"),
    (b"{", "it is a JSON answer of the hub, most likely an error"),
    (b"PK\x03\x04", "it is a zip archive"),
    (b"\x1f\x8b", "it is compressed; a proxy packed it"),
    (b"\x28\xb5\x2f\xfd", "it is compressed; a proxy packed it"),
    (b"GGUF", "it is a pack in another format (GGUF)"),
)

MOST_SHOWN: Final = 5


@dataclass(frozen=True)
class Finding:
    """One fault: the file it is in, and a clause that says what and why."""

    file: str
    fault: str

    def __str__(self) -> str:
        """Return one line for a person."""
        return f"{self.file}: {self.fault}"


class BadShard(ValueError):
    """A file is no safetensors shard; the text says what it looks like."""


def looks_like(head: bytes) -> str:
    """Return what the beginning of a file that is no shard tells about it."""
    stripped = head.lstrip()
    for mark, cause in LOOKS_LIKE:
        if stripped.startswith(mark):
            return cause
    if head and not any(head):
        return "it begins with zeros; the disk filled up or the machine lost power in mid-write"
    if len(head) > 8 and head[:64].isascii() and head[:64].decode().isprintable():
        return "it is text, most likely a message in place of the file"
    return UNKNOWN


def parse_header(head: bytes, size: int) -> dict[str, Any]:
    """Return the tensors a shard's header lists; `head` is at least the header, if it is one.

    Raises `BadShard`. Offsets are relative to the end of the header, as the format has them.
    """
    if size == 0:
        raise BadShard("is empty; the download never began")
    if size < 8:
        raise BadShard(f"is {size} bytes long; {looks_like(head)}")
    length = int.from_bytes(head[:8], "little")
    if length > HEADER_LIMIT or length < 2:
        raise BadShard(looks_like(head))
    if size < 8 + length:
        raise BadShard(f"is cut short inside its header, by at least {8 + length - size} bytes")
    try:
        header = json.loads(head[8 : 8 + length].decode())
    except (ValueError, RecursionError) as error:
        raise BadShard(f"has a damaged header ({error})") from error
    if not isinstance(header, dict):
        raise BadShard("has a header that is no JSON object")
    header.pop("__metadata__", None)
    # A name that is there twice is silently the last one to every reader
    if head.count(b'"data_offsets"', 0, 8 + length) > len(header) and (
        doubled := doubled_names(head[8 : 8 + length])
    ):
        raise BadShard(f"lists {names(doubled)} twice; it is damaged or was edited")
    return header


def doubled_names(text: str | bytes) -> list[str]:
    """Return the names that any object of a JSON text has more than once."""
    doubled: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            counted = Counter(name for name, _ in pairs)
            doubled.extend(name for name, count in counted.items() if count > 1)
        return value

    json.loads(text, object_pairs_hook=note)
    return doubled


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return how many bytes a tensor takes, None for a type we do not know."""
    bits = BITS.get(dtype)
    return None if bits is None else (math.prod(shape) * bits + 7) // 8


def check_layout(tensors: Mapping[str, Any], data_size: int) -> str | None:
    """Return what is wrong with the tensors' places in the data, None when they fill it exactly."""
    spans = []
    known: dict[tuple[Any, ...], int | None] = {}
    reached, ordered = 0, True
    for name, entry in tensors.items():
        try:
            begin, end = entry["data_offsets"]
            key = (entry["dtype"], *entry["shape"])
            if key not in known:
                if key[0] not in BITS or any(type(n) is not int or n < 0 for n in key[1:]):
                    return f"gives {name} a type or shape that the format has not ({key})"
                known[key] = tensor_bytes(key[0], key[1:])
            wanted = known[key]
            if type(begin) is not int or type(end) is not int:
                return f"describes {name} in a way that is not the format's"
            if begin < 0 or wanted != end - begin:
                return f"gives {name} {end - begin} bytes where its shape needs {wanted}"
        except (KeyError, TypeError, ValueError, AttributeError):
            return f"describes {name} in a way that is not the format's"
        ordered = ordered and begin == reached
        reached = end
        spans.append((begin, end))
    if not ordered:
        spans.sort()
        reached = 0
        for begin, end in spans:
            if begin != reached:
                return f"has tensors that overlap or leave a gap at byte {reached} of its data"
            reached = end
    if reached > data_size:
        return f"is cut short by {reached - data_size} bytes"
    if reached < data_size:
        return f"has {data_size - reached} bytes after its last tensor"
    return None


def open_regular(path: Path) -> io.FileIO:
    """Open a file to read; what is no regular file is refused at once instead of waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.ENXIO, "it is no regular file", str(path))
    return io.FileIO(descriptor)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a shard's tensors and the size of its data; raises `BadShard` or `OSError`."""
    with open_regular(path) as handle:
        size = handle.seek(0, 2)
        handle.seek(0)
        head = handle.read(64)
        length = int.from_bytes(head[:8], "little")
        if 64 < 8 + length <= min(size, 8 + HEADER_LIMIT):
            handle.seek(0)
            head = handle.read(8 + length)
    tensors = parse_header(head, size)
    return tensors, size - 8 - length


def why_unreadable(path: Path, error: OSError) -> str:
    """Return a clause about a file that is named but cannot be read."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which is not there"
    if path.is_dir():
        return "is a directory"
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"cannot be read ({error.strerror})"


Placed: TypeAlias = Mapping[str, Set[str]]
"""An index: the tensors of each shard."""


class BadIndex(ValueError):
    """A file is no index; the text is a clause that says why."""


def parse_index(text: str) -> Placed:
    """Return which tensors are in which shard; raises `BadIndex`.

    The real pack's index has 10 MB and 138,000 names. As one JSON value it takes 50 MB to read, so
    its flat part is read piece by piece; a text that is written in another way, as a whole.
    """
    try:
        placed = _in_pieces(text)
        if placed is None:
            if doubled := doubled_names(text):
                raise BadIndex(f"lists {names(doubled)} twice; fetch it again")
            placed = _by_shard(json.loads(text)["weight_map"].items())
    except BadIndex:
        raise
    except (KeyError, AttributeError, TypeError):
        raise BadIndex("has no weight_map; fetch it again") from None
    except (ValueError, RecursionError) as error:
        cause = looks_like(text[:64].encode())
        if cause == UNKNOWN:
            cause = f"it is no JSON ({error})"
        raise BadIndex(f"is no index: {cause}; fetch it again") from error
    if not placed:
        raise BadIndex("has no weight_map; fetch it again")
    if odd := [shard for shard in placed if not NAME.fullmatch(shard)]:
        raise BadIndex(f"names {odd[0]!r}, which is no name of a file in the pack")
    return placed


def _by_shard(
    pairs: Iterable[tuple[str, Any]], placed: dict[str, set[str]] | None = None
) -> dict[str, set[str]]:
    """Return tensors by shard, added to `placed`; raises `TypeError` for what is no shard."""
    placed = {} if placed is None else placed
    for tensor, shard in pairs:
        held = placed.get(shard)
        if held is None:
            if not isinstance(shard, str):
                raise TypeError(shard)
            held = placed[shard] = set()
        held.add(tensor)
    return placed


PIECE: Final = 256 << 10
WEIGHT_MAP: Final = '"weight_map"'


def _in_pieces(text: str) -> dict[str, set[str]] | None:
    """Return an index read piece by piece; None when it has to be read as a whole."""
    begin = text.find("{", text.find(WEIGHT_MAP) + 1) + 1
    end = text.find("}", begin)
    if begin <= 0 or end < 0 or "\\" in text or text.count(WEIGHT_MAP) != 1:
        return None
    placed: dict[str, set[str]] = {}
    listed = 0
    try:
        # What is around the flat part is an index whose flat part is empty
        if json.loads(f"{text[:begin]}{text[end:]}")["weight_map"] != {}:
            return None
        while begin < end:
            # No string has a quote in it here, so one with a comma behind it ends a string
            cut = text.find('",', min(begin + PIECE, end), end) + 1 or end
            piece = json.loads(f"{{{text[begin:cut]}}}")
            if 4 * len(piece) != text.count('"', begin, cut):
                return None
            _by_shard(piece.items(), placed)
            listed += len(piece)
            begin = cut + 1
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # A name that is in two pieces is not told apart above
    return placed if listed == sum(map(len, placed.values())) else None


def read_index(root: Path) -> tuple[Placed | None, list[Finding]]:
    """Return which tensors are in which shard; None when the pack has no index."""
    try:
        with open_regular(root / INDEX) as handle:
            return parse_index(handle.readall().decode()), []
    except UnicodeDecodeError as error:
        return None, [Finding(INDEX, f"is no index: it is no text ({error}); fetch it again")]
    except FileNotFoundError:
        return None, []
    except OSError as error:
        return None, [Finding(INDEX, why_unreadable(root / INDEX, error))]
    except BadIndex as error:
        return None, [Finding(INDEX, str(error))]


def compare_index(placed: Placed, shards: Mapping[str, Set[str]]) -> Iterator[Finding]:
    """Yield where index and shards disagree, both ways; shards that are not there are not ours."""
    everywhere: set[str] = set()
    for shard, held in sorted(shards.items()):
        listed = placed.get(shard, frozenset())
        if held == listed:
            continue
        everywhere = everywhere or set().union(*placed.values())
        if absent := listed - held:
            yield Finding(shard, f"lacks {names(absent)}, which the index puts there")
        if unknown := held - everywhere:
            yield Finding(shard, f"holds {names(unknown)}, which the index does not know")
        if doubled := (held - listed) & everywhere:
            yield Finding(shard, f"holds {names(doubled)}, which the index puts elsewhere")


def names(tensors: Iterable[str]) -> str:
    """Return a list of names that stays readable when it is long."""
    ordered = sorted(tensors)
    shown = ", ".join(ordered[:MOST_SHOWN])
    more = len(ordered) - MOST_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


@dataclass
class Report:
    """What a check found, and what it counted on the way."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    shards: int = 0
    tensors: int = 0
    bytes: int = 0
    hashed: int = 0
    resumed: int = 0
    """Files that a check before this one, which was stopped, had found right."""
    experts: exl3.Experts = field(default_factory=exl3.Experts)
    """Of an EXL3 pack."""

    def add(self, file: str, fault: str) -> None:
        """Note one fault."""
        self.findings.append(Finding(file, fault))

    @property
    def bad_files(self) -> list[str]:
        """The files to fetch again."""
        return sorted({finding.file for finding in self.findings})


def check_structure(root: Path) -> Report:
    """Return what the shards and the index say about each other."""
    report = Report()
    placed, faults = read_index(root)
    report.findings += faults
    wanted = set(placed) if placed else set()
    present = {path.name for path in root.glob(f"*{SUFFIX}")}
    if not placed and not faults:
        wanted = present or {SINGLE}
        count = max((int(m[1]) for name in present if (m := OF_COUNT.search(name))), default=1)
        if max(len(present), count) > 1:
            report.add(INDEX, f"is missing, and {max(len(present), count)} shards need one")
    if placed:
        for name in sorted(present - wanted):
            report.add(name, "is in no index; a leftover of another revision, remove it")
    differ: dict[str, Set[str]] = {}
    for name in sorted(wanted):
        try:
            tensors, data_size = read_header(root / name)
            report.shards += 1
            report.tensors += len(tensors)
            if fault := check_layout(tensors, data_size):
                report.add(name, fault)
            else:
                report.experts.add(tensors.items())
        except (BadShard, exl3.Mixed) as error:
            report.add(name, str(error))
        except OSError as error:
            report.add(name, why_unreadable(root / name, error))
        else:
            # One header at a time is held; of one that differs, the names
            if placed and tensors.keys() != placed[name]:
                differ[name] = set(tensors)
    if placed:
        report.findings += compare_index(placed, differ)
    return report


def check_sizes(root: Path, wanted: Mapping[str, Mapping[str, Any]], report: Report) -> None:
    """Compare every file the hub named with what is on disk."""
    for name, facts in sorted(wanted.items()):
        path = root / name
        try:
            size = path.stat().st_size
        except OSError as error:
            report.add(name, why_unreadable(path, error))
            continue
        report.files += 1
        report.bytes += size
        expected = facts.get("size")
        if size != expected:
            over = size - int(expected or 0)
            report.add(name, f"is {abs(over)} bytes too {'long' if over > 0 else 'short'}")


def touched(root: Path, files: Mapping[str, Mapping[str, Any]], owner: int | None) -> list[Finding]:
    """Return what changed since the fetcher verified its files: no byte is read.

    `owner` is the fetcher's user; None where there is none. A file that others own or may write to
    may hold other bytes, whatever its time stamp says.
    """
    found = []
    for name, facts in files.items():
        path = root / name
        try:
            now = path.lstat()
        except OSError as error:
            found.append(Finding(name, why_unreadable(path, error)))
            continue
        if not stat.S_ISREG(now.st_mode):
            found.append(Finding(name, "is no regular file any more"))
        elif not facts.get("verified") or not settled(facts):
            found.append(Finding(name, "is to be verified again"))
        elif (now.st_size, now.st_mtime_ns) != (facts.get("size"), facts.get("mtime_ns")):
            found.append(Finding(name, "changed since it was verified"))
        elif owner is not None and now.st_uid != owner:
            found.append(Finding(name, f"belongs to {account(now.st_uid)} now"))
        elif now.st_mode & 0o022 or now.st_mode & 0o444 != 0o444:
            found.append(Finding(name, f"has the mode {stat.S_IMODE(now.st_mode):o}"))
    directories = {root.parent, root, *((root / name).parent for name in files)}
    for path in sorted(one for one in directories if one.is_dir()):
        now, name = path.stat(), os.path.relpath(path, root)
        if owner is not None and now.st_uid != owner:
            found.append(Finding(name, f"belongs to {account(now.st_uid)} now"))
        elif owner is not None and (now.st_mode & 0o022 or now.st_mode & 0o555 != 0o555):
            found.append(Finding(name, f"has the mode {stat.S_IMODE(now.st_mode):o}"))
    return found


def settled(facts: Mapping[str, Any]) -> bool:
    """Say whether a file that was verified is known to be on the disk, or is still of this boot.

    After a power cut a size and a time stamp may outlive the bytes.
    """
    return facts.get("unsettled") in {None, BOOT}


def account(uid: int) -> str:
    """Return the name of a user, or the number of one that has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def hash_of(path: Path, facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return wanted and found hash in the form the hub gave, None when it gave none."""
    if facts.get("sha256"):
        with path.open("rb") as handle:
            return str(facts["sha256"]), hashlib.file_digest(handle, "sha256").hexdigest()
    if facts.get("blob_sha1"):
        data = path.read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
        digest.update(data)
        return str(facts["blob_sha1"]), digest.hexdigest()
    return None


class Progress:
    """Which files a check of every byte has found right so far, kept beside the fetcher's record.

    A hundred gigabytes take minutes: a check that was stopped goes on where it was. A file counts
    only as long as nothing about it changed.
    """

    def __init__(
        self, root: Path, wanted: Mapping[str, Mapping[str, Any]], *, kept: bool = True
    ) -> None:
        """Go on from what is on disk; with `kept` false nothing is written beside the pack."""
        self.root, self.path = root, root.with_name(f"{root.name}.hashed")
        self.kept = kept
        self.lock = threading.Lock()
        noted = store.read_json_or(self.path, {}).get("files") if kept else None
        known = noted if isinstance(noted, dict) else {}
        self.right = {
            name: row for name, row in known.items() if name in wanted and row == self.now(name)
        }
        self.resumed = len(self.right)

    def now(self, name: str) -> list[int] | None:
        """Return what tells that a file is still the one that was read."""
        try:
            found = (self.root / name).stat()
        except OSError:
            return None
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]

    def is_right(self, name: str, before: list[int] | None) -> None:
        """Note a file that was read to its end and not changed meanwhile."""
        if not self.kept or before is None or before != self.now(name):
            return
        with self.lock, contextlib.suppress(OSError):  # who may only read checks all the same
            self.right[name] = before
            store.write_json(self.path, {"files": self.right})

    def over(self) -> None:
        """Forget it: the next check reads everything again."""
        if not self.kept:
            return
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def check_hashes(
    root: Path,
    wanted: Mapping[str, Mapping[str, Any]],
    report: Report,
    workers: int,
    *,
    kept: bool = True,
) -> None:
    """Read every byte and compare with the hub's hashes, largest files first.

    + kept: whether to write down how far it is; not in what belongs to somebody else
    """
    progress = Progress(root, wanted, kept=kept)

    def check(name: str) -> Finding | None:
        before = progress.now(name)
        try:
            pair = hash_of(root / name, wanted[name])
        except OSError as error:
            return Finding(name, why_unreadable(root / name, error))
        if pair is None:
            return Finding(name, "has no hash on record; fetch the pack again to get one")
        if pair[0] != pair[1]:
            return Finding(name, f"holds other bytes than the hub's ({why_other(root / name)})")
        progress.is_right(name, before)
        return None

    done = set(report.bad_files) | set(progress.right)
    todo = sorted(set(wanted) - done, key=lambda name: -int(wanted[name].get("size") or 0))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(workers) as pool:
        report.findings += [finding for finding in pool.map(check, todo) if finding]
    report.hashed = len(todo)
    report.resumed = progress.resumed
    progress.over()


def why_other(path: Path) -> str:
    """Return what the bytes of a file with the right size and the wrong hash tell."""
    zeros = 0
    with path.open("rb") as handle:
        while block := handle.read(1 << 16):
            zeros += len(block) if not any(block) else 0
    if zeros:
        return f"{zeros} of them are runs of zeros: the machine lost power, or a write was cut off"
    return "changed on this machine, or another revision's"


def doubt(root: Path, names_of_files: Iterable[str]) -> None:
    """Have files of a downloaded pack verified again by the next fetch, and fetched if bad.

    For the fetcher's user: the record and its directory are the fetcher's.
    """
    record = state_path(root)
    known = store.read_json_or(record, {})
    files = known.get("files")
    bad = [name for name in names_of_files if isinstance(files, dict) and name in files]
    if not isinstance(files, dict) or not bad:
        return
    for name in bad:
        files[name]["verified"] = None
    store.write_json(record, known)


def program_code(names_of_files: Iterable[str], known: Collection[str] = ()) -> list[str]:
    """Return the files that a pack of weights has no use for, beyond those its owner named."""
    return sorted(name for name in names_of_files if CODE.fullmatch(name) and name not in known)


def served_root(note: Path = layout.VIEW_NOTE) -> Path | None:
    """Return the pack behind the served view."""
    made_from = store.read_json_or(note, {}).get("made_from") or {}
    root = made_from.get("pack_root")
    return Path(root) if isinstance(root, str) else None


def leftovers(root: Path) -> list[str]:
    """Return partial files of an unfinished download."""
    return sorted(str(path.relative_to(root)) for path in root.rglob(f".*{PART_SUFFIX}"))


def state_path(root: Path) -> Path:
    """Return where the fetcher keeps what the hub says of this revision."""
    return root.with_name(f"{root.name}.json")


def named_by_hash(root: Path) -> dict[str, dict[str, Any]]:
    """Return what the names of a hub cache's files say of an adopted pack; empty for others.

    There each file is a link to one that is called by its hash: SHA-256, or for a small one that of
    its git blob.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in visible_files(root):
        real = (root / name).resolve()
        if real.parent.name != "blobs" or not (match := HASH.fullmatch(real.name)):
            return {}
        kind = "sha256" if match[1] else "blob_sha1"
        found[name] = {"size": real.stat().st_size if real.exists() else 0, kind: real.name}
    return found


def check(
    root: Path,
    state: Mapping[str, Any] | None,
    *,
    full: bool,
    workers: int,
    kept: bool = True,
) -> Report:
    """Return everything that is wrong with a pack; `state` is the fetcher's record, if any."""
    report = check_structure(root)
    wanted = (state or {}).get("files", {})
    check_sizes(root, wanted, report)
    if state is not None and not state.get("complete"):
        reason = state.get("error") or "dsv4-fetch has more to do"
        report.add(root.name, f"is not complete: {reason}")
    elif state is not None:
        for name in leftovers(root):
            report.add(name, "is a leftover of a download that is over; remove it")
    if full:
        check_hashes(root, wanted, report, workers, kept=kept)
    return report


def stopped(number: int, _frame: object) -> None:
    """End at once: what was found right so far is on disk."""
    os.write(2, b"dsv4 pack_verify: stopped; run it again to go on where it was\n")
    os._exit(128 + number)


def main(argv: list[str]) -> int:
    """Check one pack."""
    parser = argparse.ArgumentParser(prog="dsv4 pack_verify", description=__doc__)
    parser.add_argument("--pack-root", type=Path, help="directory of a pack; the served one's")
    parser.add_argument("--state", type=Path, help="the fetcher's record (REVISION.json beside it)")
    parser.add_argument("--full", action="store_true", help="compare every byte by hash")
    parser.add_argument("--workers", type=int, default=4, help="files hashed at once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    root = options.pack_root or served_root()
    gc.disable()  # 138,000 headers are a million objects without a cycle; 15 % of the time
    try:
        if root is None or not root.is_dir():
            raise store.BrokenState(f"{root or 'no pack is served'}: give a pack's directory")
        state = store.read_json(options.state or state_path(root))
        ours = state is not None
        if options.full and state is None:
            if not (named := named_by_hash(root)):
                raise store.BrokenState(
                    f"{root}: no record of the hub's hashes beside it, and no hub cache that is"
                    " named by them; only structure can be checked"
                )
            state = {"complete": True, "files": named}
        if options.full:
            signal.signal(signal.SIGINT, stopped)
            signal.signal(signal.SIGTERM, stopped)
            owner = root.parent.stat()
            accounts.become(owner.st_uid, owner.st_gid)
        report = check(root, state, full=options.full, workers=max(1, options.workers), kept=ours)
        if options.full and ours and report.findings and os.access(root.parent, os.W_OK):
            doubt(root, report.bad_files)
    except (store.BrokenState, OSError) as error:
        sys.stderr.write(f"dsv4 pack_verify: {error}\n")
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        return 3
    for finding in report.findings:
        sys.stderr.write(f"dsv4 pack_verify: {finding}\n")
    if options.full and report.findings:
        sys.stderr.write(
            "dsv4 pack_verify: the next deploy fetches what is bad, and nothing else\n"
            if ours
            else "dsv4 pack_verify: the pack is not ours to mend; fetch these files again into it\n"
        )
    if options.json:
        found = {
            "ok": not report.findings,
            "findings": [{"file": f.file, "fault": f.fault} for f in report.findings],
            "files": report.files,
            "shards": report.shards,
            "tensors": report.tensors,
            "bytes": report.bytes,
            "hashed": report.hashed,
            "resumed": report.resumed,
            "layer_bits": report.experts.bits,
        }
        print(json.dumps(found))
    return 1 if report.findings else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
