"""Edit installed source files: all of them or none, and back again to the byte.

A patch is a named set of pure functions from a file's text to a verdict and, when it applies, the
new text. The verdict comes from the text itself and never from a version number: a release that
was rebuilt, or a file that somebody edited, is judged by what it holds.

Nothing is written until every text of every patch is known, compiled and staged on the same file
system. Then a journal is written, and what is left to do are renames. A process killed at any
moment leaves each file old or new; the next `apply` or `revert` reads the journal and finishes what
was begun. The bytes from before are kept beside it, so that `revert` does not depend on a package
index that may have moved on.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Final

from dsv4 import store

KEPT: Final = ".dsv4-patches"
"""Where the engine keeps its record, the bytes from before and the journal, in the root."""

RECORD: Final = "record.json"
JOURNAL: Final = "journal.json"
BEFORE: Final = "before"
STAGED: Final = "staged"
BACK: Final = "back"
"""Like staged, for taking back what could not be finished."""

BOM: Final = b"\xef\xbb\xbf"


class Verdict(StrEnum):
    """What a patch has to do with a text."""

    APPLIES = "applies"
    APPLIED = "applied"
    SUPERSEDED = "superseded"
    DRIFTED = "drifted"


@dataclass(frozen=True)
class Outcome:
    """What a transform says of one text."""

    verdict: Verdict
    text: str | None = None
    """The new text, when the patch applies."""
    why: str = ""
    """One sentence; for superseded and drifted it says what was looked for and found."""

    def __post_init__(self) -> None:
        if (self.text is not None) != (self.verdict is Verdict.APPLIES):
            raise ValueError(f"an outcome that {self.verdict} carries a new text or lacks one")
        if not self.why and self.verdict in {Verdict.SUPERSEDED, Verdict.DRIFTED}:
            raise ValueError(f"an outcome that is {self.verdict} has to say why")


@dataclass(frozen=True)
class Edit:
    """What a patch does to one file."""

    path: str
    """Relative to the root, with forward slashes."""
    transform: Callable[[str | None], Outcome]
    """Pure; None stands for a file that is not there."""


@dataclass(frozen=True)
class Patch:
    """A named change to one or more files."""

    name: str
    summary: str
    edits: tuple[Edit, ...]
    reads: tuple[str, ...] = ()
    """Other files whose texts `premise` is given."""
    premise: Callable[[Mapping[str, str | None]], Outcome | None] | None = None
    """Judges by those files whether the patch is needed and can work; what it returns stands for
    every edit that is not in place already."""


@dataclass(frozen=True)
class Result:
    """What became of one patch: over all its files, and for each."""

    verdict: Verdict
    why: str
    files: Mapping[str, Outcome]


@dataclass(frozen=True)
class Report:
    """What was found, and for `apply` and `revert` what was done."""

    root: Path
    patches: Mapping[str, Result] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """SHA-256 of every file our patches change, `before` and `after`; None: there is no file."""
    written: tuple[str, ...] = ()
    """The files this call wrote or removed."""
    trouble: tuple[str, ...] = ()
    """What is wrong beyond the verdicts: a file changed since, work that was cut off."""

    @property
    def ok(self) -> bool:
        """Whether every patch is in place or not needed, and nothing else is wrong."""
        settled = {Verdict.APPLIED, Verdict.SUPERSEDED}
        return not self.trouble and all(one.verdict in settled for one in self.patches.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {
            "ok": self.ok,
            "root": str(self.root),
            "patches": {
                name: {
                    "verdict": str(one.verdict),
                    "why": one.why,
                    "files": {
                        path: {"verdict": str(outcome.verdict), "why": outcome.why}
                        for path, outcome in one.files.items()
                    },
                }
                for name, one in self.patches.items()
            },
            "files": {path: dict(change) for path, change in self.files.items()},
            "written": list(self.written),
            "trouble": list(self.trouble),
        }


class PatchError(Exception):
    """Patches could not be applied or taken back; no file is half-written.

    `report` holds the verdicts where there are any.
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report


def status(root: Path, patches: Sequence[Patch]) -> Report:
    """Say what each patch has to do with the files in `root`; writes nothing."""
    with _locked(root, shared=True) as home:
        return _plan(home, patches).report()


def apply(root: Path, patches: Sequence[Patch]) -> Report:
    """Apply every patch that applies, or raise `PatchError` with nothing written.

    Patches that are in place or superseded are left alone. Work that an earlier call left
    unfinished is finished first.
    """
    with _locked(root) as home:
        finished = _finish(home)
        plan = _plan(home, patches)
        report = plan.report()
        drifted = [
            f"{name}: {one.why}"
            for name, one in report.patches.items()
            if one.verdict is Verdict.DRIFTED
        ]
        if wrong := [*report.trouble, *drifted]:
            raise PatchError(f"{home}: nothing was changed: {'; '.join(wrong)}", report)
        plan.check()
        changes, record = plan.changes(), plan.record()
        if changes or record != plan.recorded:
            _commit(home, "apply", changes, record, plan.recorded)
        settled = _plan(home, patches).report()
        return Report(
            root=home,
            patches=settled.patches,
            files=settled.files,
            written=tuple(sorted({*finished, *(change.path for change in changes)})),
            trouble=settled.trouble,
        )


def revert(root: Path, known: Sequence[Patch] = ()) -> Report:
    """Put back the bytes from before every patch; refuses when a file was changed since.

    Without the record nothing can be put back. `known` are the patches to look for in files that it
    does not name, so that this is said and not taken for having nothing to do.
    """
    with _locked(root) as home:
        finished = _finish(home)
        record = _read_record(home)
        changes, trouble = [], []
        for path, entry in record.items():
            found = _read(home, path)
            if not found.why and found.sha256 == entry.before:
                continue
            if found.why or found.sha256 != entry.after:
                trouble.append(_changed_since(path, entry, found))
                continue
            data = None if entry.before is None else _kept(home, path, entry.before)
            changes.append(_Change(path, found, data, entry.mode, entry.owner))
        trouble += _without_record(home, known, record)
        if trouble:
            raise PatchError(f"{home}: nothing was changed: {'; '.join(trouble)}")
        if record:
            _commit(home, "revert", changes, {}, record)
        _clean(home)
        files = {path: {"before": e.before, "after": e.before} for path, e in record.items()}
        written = tuple(sorted({*finished, *(change.path for change in changes)}))
        return Report(root=home, files=files, written=written)


def _without_record(home: Path, known: Sequence[Patch], record: Container[str]) -> Iterator[str]:
    """Name the files that hold a patch of which no record is kept."""
    targets = _plan(home, known).targets
    for path, target in targets.items():
        names = [n for n, one in target.outcomes.items() if one.verdict is Verdict.APPLIED]
        if names and path not in record:
            yield (
                f"{path}: holds {', '.join(names)}, but its bytes from before are not kept (no"
                f" record of it in {KEPT}); reinstall its package"
            )


# One file


@dataclass(frozen=True)
class _Found:
    """A file as it is on disk."""

    data: bytes | None = None
    mode: int = 0o644
    owner: tuple[int, int] | None = None
    why: str = ""
    """Why it cannot be patched, where that is known without reading a text."""

    @property
    def sha256(self) -> str | None:
        return None if self.data is None else store.sha256_bytes(self.data)


@dataclass(frozen=True)
class _Entry:
    """What the record says of one file."""

    before: str | None
    after: str | None
    mode: int
    owner: tuple[int, int] | None
    patches: tuple[str, ...]


@dataclass(frozen=True)
class _Change:
    """One file to write, or to remove when `data` is None."""

    path: str
    found: _Found
    data: bytes | None
    mode: int
    owner: tuple[int, int] | None

    @property
    def sha256(self) -> str | None:
        return None if self.data is None else store.sha256_bytes(self.data)


@dataclass(frozen=True)
class _Style:
    """What a text file has besides its text; kept through a change."""

    bom: bool = False
    newline: str = "\n"


def _read(home: Path, path: str) -> _Found:
    """Read one file, or say why it is none we may replace."""
    parts = PurePosixPath(path).parts
    place = home
    for part in parts:
        place = place / part
        if place.is_symlink():
            return _Found(
                why=f"{path}: {place.relative_to(home)} is a symbolic link to"
                f" {place.readlink()}, and what others read through it is not changed; put a copy"
                " in its place"
            )
    try:
        info = place.stat()
        if not stat.S_ISREG(info.st_mode):
            return _Found(why=f"{path}: is no regular file; reinstall its package")
        data = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return _Found()
    except OSError as error:
        return _Found(why=f"{path}: cannot be read ({error.strerror}); reinstall its package")
    return _Found(data, stat.S_IMODE(info.st_mode), (info.st_uid, info.st_gid))


def decode(data: bytes) -> tuple[str, _Style]:
    """Return the text with plain newlines, and what has to be put back when it is written.

    Raises ValueError, with the reason, for bytes whose style could not be kept.
    """
    bom = data.startswith(BOM)
    try:
        text = data[len(BOM) :].decode() if bom else data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from error
    if "\r" not in text:
        return text, _Style(bom)
    pairs = text.count("\r\n")
    if pairs == text.count("\n") == text.count("\r"):
        return text.replace("\r\n", "\n"), _Style(bom, "\r\n")
    raise ValueError(
        f"mixes line ends ({text.count(chr(13))} carriage returns, {text.count(chr(10))} line"
        f" feeds, {pairs} of them pairs)"
    )


def encode(text: str, style: _Style) -> bytes:
    """Return the bytes of a text in the style of the file it came from."""
    if style.newline != "\n":
        text = text.replace("\n", style.newline)
    return (BOM if style.bom else b"") + text.encode()


# All files at once


@dataclass
class _Target:
    """One file on its way through all patches."""

    found: _Found
    entry: _Entry | None
    text: str | None
    style: _Style
    why: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def data(self) -> bytes | None:
        """The bytes after all patches; those found where no patch applies."""
        if not self.changed:
            return self.found.data
        return None if self.text is None else encode(self.text, self.style)

    @property
    def changed(self) -> bool:
        return any(one.verdict is Verdict.APPLIES for one in self.outcomes.values())

    @property
    def ours(self) -> bool:
        """Whether a patch of this set is, or is to be, in the file."""
        ours = {Verdict.APPLIES, Verdict.APPLIED}
        return any(one.verdict in ours for one in self.outcomes.values())


@dataclass
class _Plan:
    """What a set of patches makes of a root."""

    home: Path
    patches: Sequence[Patch]
    targets: dict[str, _Target]
    recorded: dict[str, _Entry]
    interrupted: bool

    def results(self) -> dict[str, Result]:
        """Return one verdict for each patch from those of its files."""
        results = {}
        for patch in self.patches:
            files = {e.path: self.targets[e.path].outcomes[patch.name] for e in patch.edits}
            verdicts = {one.verdict for one in files.values()}
            for verdict in (Verdict.DRIFTED, Verdict.APPLIES, Verdict.APPLIED, Verdict.SUPERSEDED):
                if verdict in verdicts:
                    break
            words = [one.why for one in files.values() if one.verdict is verdict and one.why]
            results[patch.name] = Result(verdict, "; ".join(dict.fromkeys(words)), files)
        return results

    def report(self) -> Report:
        """Return what was found, as others read it."""
        trouble = []
        if self.interrupted:
            trouble.append(
                "an earlier apply or revert was cut off; run `dsv4 patches apply` to finish it"
            )
        else:
            trouble.extend(
                _changed_since(path, entry, found)
                for path, entry, found in self._looked_at()
                if self._foreign(path, entry, found)
            )
        files: dict[str, dict[str, str | None]] = {
            path: {"before": entry.before, "after": entry.after}
            for path, entry in self.recorded.items()
        }
        for path, target in self.targets.items():
            if target.changed or (target.ours and path not in files):
                known = target.entry is not None and target.entry.after == target.found.sha256
                old = target.entry.before if known and target.entry else target.found.sha256
                after = None if target.data is None else store.sha256_bytes(target.data)
                files[path] = {"before": old, "after": after}
        return Report(self.home, self.results(), dict(sorted(files.items())), (), tuple(trouble))

    def _looked_at(self) -> Iterator[tuple[str, _Entry, _Found]]:
        """Yield every recorded file as it is now, in this set or not."""
        for path, entry in self.recorded.items():
            target = self.targets.get(path)
            yield path, entry, target.found if target else _read(self.home, path)

    def _foreign(self, path: str, entry: _Entry, found: _Found) -> bool:
        """Tell whether a recorded file was changed by somebody else, and not by an upgrade.

        An upgrade brings a text without any of our changes: it is a new start, to be judged like
        the first. A text that still holds one of them was edited, and what `revert` would have to
        restore is unknown.
        """
        if not found.why and found.sha256 in {entry.before, entry.after}:
            return False
        target = self.targets.get(path)
        if target is None or not set(entry.patches) <= target.outcomes.keys():
            return True
        return any(one.verdict is Verdict.APPLIED for one in target.outcomes.values())

    def check(self) -> None:
        """Raise `PatchError` unless the new texts are sound; nothing is written yet."""
        for path, target in self.targets.items():
            if not target.changed:
                continue
            names = ", ".join(target.outcomes)
            if path.endswith(".py") and target.text is not None:
                try:
                    with warnings.catch_warnings():
                        # What a release warns about is its own business
                        warnings.simplefilter("ignore")
                        compile(target.text, path, "exec", dont_inherit=True)
                except (SyntaxError, ValueError) as error:
                    raise PatchError(
                        f"{path}: nothing was changed: with {names} it does not compile ({error})"
                    ) from error
        for patch in self.patches:
            for edit in patch.edits:
                target = self.targets[edit.path]
                before = target.outcomes[patch.name].verdict
                if before in {Verdict.APPLIES, Verdict.APPLIED}:
                    again = edit.transform(target.text)
                    if again.verdict is not Verdict.APPLIED:
                        raise PatchError(
                            f"{edit.path}: nothing was changed: {patch.name} calls its own result"
                            f" {again.verdict} ({again.why or 'no reason given'}); the set of"
                            " patches does not fit together"
                        )

    def changes(self) -> list[_Change]:
        """Return the files to write."""
        return [
            _Change(path, target.found, target.data, target.found.mode, target.found.owner)
            for path, target in self.targets.items()
            if target.changed
        ]

    def record(self) -> dict[str, _Entry]:
        """Return what the record will say once the changes are made."""
        record = dict(self.recorded)
        for path, entry, found in self._looked_at():
            if found.sha256 not in {entry.before, entry.after}:
                # Another version came since: what was kept of the one before is of no use
                del record[path]
        for path, target in self.targets.items():
            if not target.changed:
                continue
            known, found = record.get(path), target.found
            ours = {Verdict.APPLIES, Verdict.APPLIED}
            names = [name for name, one in target.outcomes.items() if one.verdict in ours]
            if known is not None and known.after == found.sha256:
                before, mode, owner = known.before, known.mode, known.owner
                names = [*known.patches, *(name for name in names if name not in known.patches)]
            else:
                before, mode, owner = found.sha256, found.mode, found.owner
            after = None if target.data is None else store.sha256_bytes(target.data)
            record[path] = _Entry(before, after, mode, owner, tuple(names))
        return record


def _plan(home: Path, patches: Sequence[Patch]) -> _Plan:
    """Run every transform, in order, on the texts that are there."""
    names = [patch.name for patch in patches]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PatchError(f"{', '.join(twice)}: named more than once; name each patch once")
    recorded = _read_record(home)
    targets: dict[str, _Target] = {}
    for patch in patches:
        premise = _premise(home, patch)
        for edit in patch.edits:
            pure = PurePosixPath(edit.path)
            if pure.is_absolute() or ".." in pure.parts or str(pure) != edit.path:
                raise PatchError(f"{patch.name}: {edit.path} is no plain relative path")
            if edit.path not in targets:
                targets[edit.path] = _target(home, edit.path, recorded.get(edit.path))
            target = targets[edit.path]
            if target.why:
                outcome = _about(Outcome(Verdict.DRIFTED, why=target.why), edit.path, target)
            else:
                outcome = _about(edit.transform(target.text), edit.path, target)
                if premise is not None and outcome.verdict is not Verdict.APPLIED:
                    outcome = premise
            target.outcomes[patch.name] = outcome
            if outcome.verdict is Verdict.APPLIES:
                target.text = outcome.text
    return _Plan(home, patches, targets, recorded, (home / KEPT / JOURNAL).exists())


def _premise(home: Path, patch: Patch) -> Outcome | None:
    """Return what other files say of a patch; None when they leave it to its edits."""
    if patch.premise is None:
        return None
    targets = {path: _target(home, path, None) for path in patch.reads}
    for path, target in targets.items():
        if target.why:
            return _about(Outcome(Verdict.DRIFTED, why=target.why), path, target)
    outcome = patch.premise({path: target.text for path, target in targets.items()})
    if outcome is None:
        return None
    named = [path for path in targets if outcome.why.startswith(f"{path}: ")]
    return _about(outcome, named[0], targets[named[0]]) if named else outcome


def _about(outcome: Outcome, path: str, target: _Target) -> Outcome:
    """Say which file an outcome is about, and for one that is not known, which bytes it has.

    The hash is what a report of an unknown file is worth most for: it tells a release that was
    rebuilt from a file that somebody edited, and two machines apart.
    """
    why, sha256 = outcome.why, target.found.sha256
    if why and not why.startswith(path):
        why = f"{path}: {why}"
    if outcome.verdict is Verdict.DRIFTED and sha256 is not None:
        why = f"{why} (the file has sha256 {sha256})"
    return Outcome(outcome.verdict, outcome.text, why)


def _target(home: Path, path: str, entry: _Entry | None) -> _Target:
    """Read one file as a text."""
    found = _read(home, path)
    text, style, why = None, _Style(), found.why
    if found.data is not None:
        try:
            text, style = decode(found.data)
        except ValueError as error:
            why = f"{path}: {error}; reinstall its package"
    return _Target(found, entry, text, style, why)


def _changed_since(path: str, entry: _Entry, found: _Found) -> str:
    """Return the sentence about a file that is neither as it was nor as we left it."""
    if found.why:
        return found.why
    now = "it is gone" if found.data is None else f"now {found.sha256}"
    return (
        f"{path}: was changed after {', '.join(entry.patches)} (left with sha256 {entry.after},"
        f" {now}); reinstall its package and apply the same patches again"
    )


# What is kept between calls


def _read_record(home: Path) -> dict[str, _Entry]:
    """Return what earlier calls did to the files here."""
    try:
        record = store.read_json(home / KEPT / RECORD)
        return {} if record is None else _entries(record["files"])
    except (store.BrokenState, KeyError, TypeError, ValueError, AttributeError) as error:
        raise PatchError(
            f"{home / KEPT / RECORD}: is broken ({error}), so the bytes from before the patches"
            " are not known; build the runtime anew"
        ) from error


def _entries(files: Mapping[str, Mapping[str, Any]]) -> dict[str, _Entry]:
    """Return the record's entries from JSON."""
    return {
        path: _Entry(
            one["before"],
            one["after"],
            int(one["mode"]),
            None if one["owner"] is None else (int(one["owner"][0]), int(one["owner"][1])),
            tuple(one["patches"]),
        )
        for path, one in files.items()
    }


def _as_json(record: Mapping[str, _Entry]) -> dict[str, Any]:
    """Return the record's entries for JSON."""
    return {
        path: {
            "before": one.before,
            "after": one.after,
            "mode": one.mode,
            "owner": one.owner,
            "patches": one.patches,
        }
        for path, one in record.items()
    }


def _kept(home: Path, path: str, sha256: str) -> bytes:
    """Return the bytes a file had before, checked."""
    place = home / KEPT / BEFORE / sha256
    try:
        data = place.read_bytes()
    except OSError as error:
        raise PatchError(
            f"{path}: its bytes from before the patches are gone ({place}: {error.strerror});"
            " reinstall its package"
        ) from error
    if store.sha256_bytes(data) != sha256:
        raise PatchError(
            f"{path}: its bytes from before the patches are damaged ({place}); reinstall its"
            " package"
        )
    return data


# Writing


@contextlib.contextmanager
def _locked(root: Path, *, shared: bool = False) -> Iterator[Path]:
    """Hold the root for one call at a time; yields its real path."""
    try:
        home = root.resolve(strict=True)
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PatchError(
            f"{root}: is no directory that can be read ({error.strerror}); name the runtime's"
            " site-packages"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield home
    except OSError as error:
        raise PatchError(f"{home}: {error}; make room or rights and run again") from error
    finally:
        os.close(descriptor)


def _commit(
    home: Path,
    action: str,
    changes: Sequence[_Change],
    record: Mapping[str, _Entry],
    recorded: Mapping[str, _Entry],
) -> None:
    """Write all changes and the new record, or none.

    Up to the journal nothing outside the engine's own directory is touched, so a full disk or a
    missing right shows while it still costs nothing.
    """
    journal = home / KEPT / JOURNAL
    try:
        _prepare(home, action, changes, record, STAGED)
    except (OSError, PatchError) as error:
        with contextlib.suppress(OSError):
            journal.unlink(missing_ok=True)
        _clean(home)
        if isinstance(error, PatchError):
            raise
        raise PatchError(
            f"{home}: nothing was changed: {error.filename or home / KEPT} cannot be written"
            f" ({error.strerror})"
        ) from error
    begun: list[_Change] = []
    try:
        for number, change in enumerate(changes):
            begun.append(change)
            _place(home, change.path, _staged(home, change, STAGED, number))
    except OSError as error:
        _undo(home, begun, recorded, error)
    try:
        _conclude(home, record)
    except OSError as error:
        raise PatchError(
            f"{home}: every file is written, but the record is not ({error}); make room or rights,"
            " then run `dsv4 patches apply` again"
        ) from error


def _undo(
    home: Path, begun: Sequence[_Change], recorded: Mapping[str, _Entry], error: OSError
) -> None:
    """Take back what was placed before a rename failed, and raise `PatchError`.

    It is a change like any other, with a journal of its own, which replaces the first: a kill in
    the middle leaves it to be finished backwards instead of forwards.
    """
    words = f"{error.filename2 or error.filename or home} cannot be replaced ({error.strerror})"
    try:
        back = []
        for change in begun:
            now, old = _read(home, change.path), change.found
            if now.why or now.sha256 != old.sha256:
                back.append(_Change(change.path, now, old.data, old.mode, old.owner))
        _prepare(home, "undo", back, recorded, BACK)
        for number, change in enumerate(back):
            _place(home, change.path, _staged(home, change, BACK, number))
        _conclude(home, recorded)
    except (OSError, PatchError) as second:
        raise PatchError(
            f"{home}: {words}, and taking back the others failed too ({second}); every file is old"
            " or new as a whole: make room or rights, then run `dsv4 patches apply` again"
        ) from error
    raise PatchError(f"{home}: nothing was changed: {words}") from error


def _staged(home: Path, change: _Change, folder: str, number: int) -> Path | None:
    """Return where a change's bytes were put; None when the file is to be removed."""
    return None if change.data is None else home / KEPT / folder / str(number)


def _prepare(
    home: Path,
    action: str,
    changes: Sequence[_Change],
    record: Mapping[str, _Entry],
    folder: str,
) -> None:
    """Put on disk all that is needed to finish, and the journal that says so."""
    _stage(home, changes, {entry.before for entry in record.values()}, folder)
    steps = [
        {
            "path": change.path,
            "before": change.found.sha256,
            "after": change.sha256,
            "staged": None if change.data is None else f"{folder}/{number}",
        }
        for number, change in enumerate(changes)
    ]
    journal = {"action": action, "steps": steps, "record": _as_json(record)}
    store.write_json(home / KEPT / JOURNAL, journal)


def _stage(
    home: Path, changes: Sequence[_Change], kept_for: Container[str | None], folder: str
) -> None:
    """Put the new bytes, and those of before that the record needs, in the engine's directory."""
    kept = home / KEPT
    if kept.is_symlink():
        raise PatchError(f"{kept}: is a symbolic link; remove it and run again")
    shutil.rmtree(kept / folder, ignore_errors=True)
    for directory in (kept, kept / BEFORE, kept / folder):
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
    for number, change in enumerate(changes):
        parent = (home / change.path).parent
        if not parent.is_dir():
            raise PatchError(f"{change.path}: nothing was changed: its directory is not there")
        if parent.stat().st_dev != kept.stat().st_dev:
            raise PatchError(
                f"{change.path}: nothing was changed: it lies on another file system than {kept},"
                " where a rename cannot replace it"
            )
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PatchError(
                f"{change.path}: nothing was changed: its directory cannot be written by this"
                " user; run as the runtime's owner"
            )
        if change.found.data is not None and change.found.sha256 in kept_for:
            store.write_bytes(kept / BEFORE / str(change.found.sha256), change.found.data)
        if change.data is not None:
            staged = kept / folder / str(number)
            store.write_bytes(staged, change.data, change.mode)
            if change.owner not in {None, (staged.stat().st_uid, staged.stat().st_gid)}:
                # Only root may give files away; for anyone else the copy is theirs, as it must be
                with contextlib.suppress(PermissionError):
                    os.chown(staged, *(change.owner or ()))
                    staged.chmod(change.mode)
    for directory in (kept, home):
        store.sync_directory(directory)


def _place(home: Path, path: str, staged: Path | None) -> None:
    """Bring one file to its new state in one step, and drop what was compiled from the old.

    That is dropped before too: what was compiled with unchecked hashes would outlive its source if
    the process ended in between, and again after, for whoever imported the old file meanwhile.
    """
    target = home / path
    _drop_bytecode(target)
    if staged is None:
        target.unlink(missing_ok=True)
    else:
        staged.replace(target)
    store.sync_directory(target.parent)
    _drop_bytecode(target)


def _drop_bytecode(target: Path) -> None:
    """Remove what was compiled from a file.

    Python trusts size and time stamp, to the second, or with unchecked hashes nothing at all.
    """
    if target.suffix == ".py":
        for stale in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            stale.unlink(missing_ok=True)


def _conclude(home: Path, record: Mapping[str, _Entry]) -> None:
    """Write down what is now so; the journal goes last."""
    kept = home / KEPT
    if record:
        store.write_json(kept / RECORD, {"files": _as_json(record)})
    else:
        (kept / RECORD).unlink(missing_ok=True)
    (kept / JOURNAL).unlink(missing_ok=True)
    store.sync_directory(kept)
    _clean(home)


def _finish(home: Path) -> list[str]:
    """Finish what a killed call began; returns the files it wrote."""
    path = home / KEPT / JOURNAL
    try:
        journal = store.read_json(path)
        if journal is None:
            _clean(home)
            return []
        action, steps = str(journal["action"]), list(journal["steps"])
        record = _entries(journal["record"])
    except (store.BrokenState, KeyError, TypeError, ValueError, AttributeError) as error:
        raise PatchError(f"{path}: is broken ({error}); build the runtime anew") from error
    todo, trouble = [], []
    for step in steps:
        found = _read(home, step["path"])
        staged = None if step["staged"] is None else home / KEPT / step["staged"]
        if not found.why and found.sha256 == step["after"]:
            todo.append((step["path"], None, True))
        elif found.why or found.sha256 != step["before"]:
            trouble.append(
                found.why
                or f"{step['path']}: was changed while the patches were being written (sha256"
                f" {found.sha256}, wanted {step['before']} or {step['after']})"
            )
        elif staged is not None and not _is(staged, step["after"]):
            trouble.append(f"{step['path']}: what was to be written, {staged}, is gone or damaged")
        else:
            todo.append((step["path"], staged, False))
    if trouble:
        raise PatchError(
            f"{home}: an earlier {action} was cut off and cannot be finished:"
            f" {'; '.join(trouble)}; build the runtime anew"
        )
    written = []
    try:
        for name, staged, there in todo:
            if there:
                _drop_bytecode(home / name)
            else:
                _place(home, name, staged)
                written.append(name)
        _conclude(home, record)
    except OSError as error:
        raise PatchError(
            f"{home}: an earlier {action} was cut off and cannot be finished ({error}); make room"
            " or rights and run again"
        ) from error
    return written


def _is(path: Path, sha256: str) -> bool:
    """Tell whether a file holds what its hash says."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    except OSError:
        return False


def _clean(home: Path) -> None:
    """Remove what no later call needs: what was staged or half-written, and the directory when it
    holds no record. With a journal there, all of it is needed."""
    kept = home / KEPT
    if not kept.is_dir() or (kept / JOURNAL).exists():
        return
    if not (kept / RECORD).exists():
        _forget(home)
        return
    for folder in (STAGED, BACK):
        shutil.rmtree(kept / folder, ignore_errors=True)
    for left in (*kept.glob(f".{JOURNAL}.*"), *kept.glob(f".{RECORD}.*")):
        left.unlink(missing_ok=True)


def _forget(home: Path) -> None:
    """Remove the engine's own directory."""
    shutil.rmtree(home / KEPT, ignore_errors=True)
    store.sync_directory(home)


def digest(report: Report) -> str:
    """Return one hash over what the patches make of which files."""
    text = json.dumps({path: dict(one) for path, one in report.files.items()}, sort_keys=True)
    return store.sha256_bytes(text.encode())
