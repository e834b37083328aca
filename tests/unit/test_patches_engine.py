"""The patch engine: all files or none, old or new at any moment, and back to the byte."""

import contextlib
import errno
import os
import py_compile
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dsv4 import store
from dsv4.patches import engine
from dsv4.patches.engine import Edit, Outcome, Patch, PatchError, Report, Verdict

LIB: Final = Path(engine.__file__).parents[2]


def swap(old: str, new: str) -> Callable[[str | None], Outcome]:
    """Return a transform that puts one word in the place of another, which is there once."""

    def transform(text: str | None) -> Outcome:
        if text is None:
            return Outcome(Verdict.DRIFTED, why="is not there")
        if new in text:
            return Outcome(Verdict.APPLIED)
        if "settled" in text:
            return Outcome(Verdict.SUPERSEDED, why="says settled by itself")
        if text.count(old) != 1:
            return Outcome(Verdict.DRIFTED, why=f"wanted {old} once, found {text.count(old)}")
        return Outcome(Verdict.APPLIES, text.replace(old, new))

    return transform


def add(new: str) -> Callable[[str | None], Outcome]:
    """Return a transform that adds a file."""

    def transform(text: str | None) -> Outcome:
        if text == new:
            return Outcome(Verdict.APPLIED)
        if text is None:
            return Outcome(Verdict.APPLIES, new)
        return Outcome(Verdict.DRIFTED, why="is there already, with something else in it")

    return transform


FIRST = Patch(
    "first",
    "changes two files",
    (Edit("a.py", swap("one", "uno")), Edit("pkg/b.txt", swap("two", "dos"))),
)
SECOND = Patch(
    "second",
    "changes one of them too, and adds one",
    (Edit("pkg/b.txt", swap("three", "tres")), Edit("pkg/c.py", add("added = True\n"))),
)
BOTH = (FIRST, SECOND)

PLAIN: Final = {"a.py": b"number = 'one'\n", "pkg/b.txt": b"two and three\n", "other": b"\0other\n"}
DONE: Final = {
    "a.py": b"number = 'uno'\n",
    "pkg/b.txt": b"dos and tres\n",
    "pkg/c.py": b"added = True\n",
    "other": b"\0other\n",
}


def fill(root: Path, files: dict[str, bytes] = PLAIN) -> Path:
    """Write files below a directory."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def files(root: Path) -> dict[str, bytes]:
    """Return every file but the engine's own."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {n: p.read_bytes() for n, p in found.items() if not n.startswith(engine.KEPT)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory with the files that the patches change."""
    return fill(tmp_path / "site")


def verdicts(report: Report) -> dict[str, str]:
    """Return each patch's verdict."""
    return {name: str(one.verdict) for name, one in report.patches.items()}


def apply_both(root: Path) -> None:
    """Apply both patches."""
    engine.apply(root, BOTH)


def revert(root: Path) -> None:
    """Take all patches back."""
    engine.revert(root)


# What it does when nothing goes wrong


def test_apply_and_revert(root: Path) -> None:
    """Everything is changed, the report says what and from which bytes to which; revert gives back
    every byte and leaves nothing behind."""
    assert verdicts(engine.status(root, BOTH)) == {"first": "applies", "second": "applies"}
    assert files(root) == PLAIN
    report = engine.apply(root, BOTH)
    assert files(root) == DONE
    assert verdicts(report) == {"first": "applied", "second": "applied"}
    assert report.written == ("a.py", "pkg/b.txt", "pkg/c.py")
    digest = store.sha256_bytes
    assert report.files == {
        "a.py": {"before": digest(PLAIN["a.py"]), "after": digest(DONE["a.py"])},
        "pkg/b.txt": {"before": digest(PLAIN["pkg/b.txt"]), "after": digest(DONE["pkg/b.txt"])},
        "pkg/c.py": {"before": None, "after": digest(DONE["pkg/c.py"])},
    }
    back = engine.revert(root)
    assert back.written == ("a.py", "pkg/b.txt", "pkg/c.py")
    assert files(root) == PLAIN
    assert not (root / engine.KEPT).exists()
    assert engine.revert(root).written == ()


def test_a_second_run_writes_nothing(root: Path) -> None:
    """Not a byte, not a time stamp; and the report is the same."""
    first = engine.apply(root, BOTH)
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    again = engine.apply(root, BOTH)
    assert again.written == ()
    assert (again.files, again.patches, again.trouble) == (first.files, first.patches, ())
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before
    assert engine.status(root, BOTH).files == first.files


def test_the_plan_says_what_apply_will_do(root: Path) -> None:
    """Status before and after name the same hashes."""
    planned = engine.status(root, BOTH)
    assert not planned.ok
    done = engine.apply(root, BOTH)
    assert done.ok
    assert planned.files == done.files
    assert engine.digest(planned) == engine.digest(done)


def test_one_set_after_another(root: Path) -> None:
    """A later patch builds on an earlier one; revert goes back before both."""
    engine.apply(root, [FIRST])
    assert files(root)["pkg/b.txt"] == b"dos and three\n"
    engine.apply(root, [SECOND])
    assert files(root) == DONE
    engine.revert(root)
    assert files(root) == PLAIN


def test_what_is_superseded_is_left_alone(root: Path) -> None:
    """A release that has the change itself is not touched, and the reason is given."""
    fill(root, {"a.py": b"settled = 'one'\n", "pkg/b.txt": b"settled, two\n"})
    before = files(root)
    report = engine.apply(root, [FIRST])
    assert report.ok
    assert report.files == {}
    assert report.patches["first"].verdict is Verdict.SUPERSEDED
    assert report.patches["first"].why == (
        "a.py: says settled by itself; pkg/b.txt: says settled by itself"
    )
    assert files(root) == before
    assert not (root / engine.KEPT).exists()


def test_a_premise_stands_for_edits_that_would_apply(root: Path) -> None:
    """Another file can say that a patch is not needed; it does not unsay one that is in place."""

    def premise(texts: Any) -> Outcome | None:
        if texts == {"other.txt": "modern\n"}:
            return Outcome(Verdict.SUPERSEDED, why="other.txt: is modern")
        return None

    patch = Patch("first", "", FIRST.edits, reads=("other.txt",), premise=premise)
    fill(root, {"other.txt": b"modern\n"})
    found = engine.status(root, [patch]).patches["first"]
    assert (found.verdict, found.why) == (Verdict.SUPERSEDED, "other.txt: is modern")
    fill(root, {"other.txt": b"old\n"})
    engine.apply(root, [patch])
    fill(root, {"other.txt": b"modern\n"})
    assert verdicts(engine.status(root, [patch])) == {"first": "applied"}


# All or nothing


def test_one_patch_that_drifted_stops_all(root: Path) -> None:
    """Nothing of the set is written, and every patch and file that does not fit is named."""
    fill(root, {"pkg/b.txt": b"two three three\n", "pkg/c.py": b"mine\n"})
    before = files(root)
    with pytest.raises(PatchError) as refused:
        engine.apply(root, BOTH)
    words = str(refused.value)
    assert "pkg/b.txt: wanted three once, found 2" in words
    assert "pkg/c.py: is there already" in words
    assert "\n" not in words
    assert files(root) == before
    assert not (root / engine.KEPT).exists()
    assert refused.value.report is not None
    assert verdicts(refused.value.report) == {"first": "applies", "second": "drifted"}


def test_a_result_that_does_not_compile_is_not_written(root: Path) -> None:
    """Python that no interpreter reads never lands."""
    broken = Patch("broken", "", (*FIRST.edits, Edit("pkg/d.py", add("def (:\n"))))
    with pytest.raises(PatchError, match=r"pkg/d\.py: nothing was changed: .* does not compile"):
        engine.apply(root, [broken])
    assert files(root) == PLAIN


def test_patches_that_undo_each_other_are_refused(root: Path) -> None:
    """Each must find itself in place in the end, or the next run would start over."""
    other = Patch("other", "", (Edit("a.py", swap("uno", "one")),))
    with pytest.raises(PatchError, match="does not fit together"):
        engine.apply(root, [FIRST, other])
    assert files(root) == PLAIN


@pytest.mark.parametrize("path", ["/etc/passwd", "../a.py", "pkg/../a.py", "./a.py", "pkg//b.txt"])
def test_only_plain_paths(root: Path, path: str) -> None:
    """No patch reaches out of the root."""
    with pytest.raises(PatchError, match="no plain relative path"):
        engine.apply(root, [Patch("p", "", (Edit(path, add("x\n")),))])


def test_a_patch_named_twice_is_refused(root: Path) -> None:
    """A set is a set."""
    with pytest.raises(PatchError, match="first: named more than once"):
        engine.apply(root, [FIRST, FIRST])


def test_a_new_file_wants_its_directory(root: Path) -> None:
    """A package that is not there is not begun."""
    patch = Patch("p", "", (*FIRST.edits, Edit("absent/x.py", add("x = 1\n"))))
    with pytest.raises(PatchError, match=r"absent/x\.py: nothing was changed: its directory"):
        engine.apply(root, [patch])
    assert files(root) == PLAIN
    assert not (root / engine.KEPT).exists()


def test_a_root_that_is_none(tmp_path: Path) -> None:
    """A mistyped path is said, whatever is asked."""
    for ask in (lambda p: engine.status(p, BOTH), lambda p: engine.apply(p, BOTH), engine.revert):
        with pytest.raises(PatchError, match="is no directory"):
            ask(tmp_path / "absent")


# Files as they come


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_line_ends_and_byte_order_mark_survive(root: Path, bom: bytes, newline: bytes) -> None:
    """The change is made in the file's own style; going back is exact."""
    plain = {name: bom + data.replace(b"\n", newline) for name, data in PLAIN.items()}
    fill(root, {**plain, "other": PLAIN["other"]})
    before = files(root)
    engine.apply(root, [FIRST])
    assert files(root)["a.py"] == bom + b"number = 'uno'" + newline
    assert files(root)["pkg/b.txt"] == bom + b"dos and three" + newline
    assert engine.apply(root, [FIRST]).written == ()
    engine.revert(root)
    assert files(root) == before


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))),
    newline=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    end=st.booleans(),
)
def test_a_text_in_one_style_comes_back_as_it_was(
    lines: list[str], newline: str, bom: bool, end: bool
) -> None:
    """Decoding and encoding without a change is no change."""
    data = (b"\xef\xbb\xbf" if bom else b"") + newline.join([*lines, ""] if end else lines).encode()
    text, style = engine.decode(data)
    assert "\r" not in text
    assert engine.encode(text, style) == data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"one\r\ntwo\n", "mixes line ends"),
        (b"one\rtwo\n", "mixes line ends"),
        (b"one \xff\n", r"is not UTF-8 \(byte 4\)"),
    ],
)
def test_a_file_whose_style_could_not_be_kept_is_refused(
    root: Path, data: bytes, words: str
) -> None:
    """It is named, and nothing is written."""
    fill(root, {"a.py": data})
    before = files(root)
    with pytest.raises(PatchError, match=f"a.py: {words}"):
        engine.apply(root, [FIRST])
    assert files(root) == before


@pytest.mark.parametrize("mode", [0o444, 0o400, 0o755])
def test_modes_survive(root: Path, mode: int) -> None:
    """A read-only file is replaced and stays read-only; going back keeps it so."""
    (root / "a.py").chmod(mode)
    engine.apply(root, [FIRST])
    assert stat.S_IMODE((root / "a.py").stat().st_mode) == mode
    engine.revert(root)
    assert stat.S_IMODE((root / "a.py").stat().st_mode) == mode
    assert files(root) == PLAIN


def test_owners_survive(root: Path) -> None:
    """A file stays its owner's; only root may give files away, anyone else's are theirs."""
    owner = (1234, 4321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(root / "a.py", *owner)
    engine.apply(root, [FIRST])
    info = (root / "a.py").stat()
    assert (info.st_uid, info.st_gid) == owner
    engine.revert(root)
    info = (root / "a.py").stat()
    assert (info.st_uid, info.st_gid) == owner


def test_a_hard_link_elsewhere_is_not_changed(root: Path, tmp_path: Path) -> None:
    """An installer's cache may share the file: it gets a new one instead of new bytes."""
    cache = tmp_path / "cache.py"
    os.link(root / "a.py", cache)
    engine.apply(root, [FIRST])
    assert cache.read_bytes() == PLAIN["a.py"]
    assert files(root)["a.py"] == DONE["a.py"]


@pytest.mark.parametrize("name", ["a.py", "pkg"])
def test_a_symbolic_link_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    """What others read through it is not changed, be it the file or a directory above it."""
    target = tmp_path / "elsewhere"
    (root / name).rename(target)
    (root / name).symlink_to(target)
    before = files(root)
    with pytest.raises(PatchError, match=f"{name} is a symbolic link to .*elsewhere"):
        engine.apply(root, [FIRST])
    assert files(root) == before


def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    """`current` is one."""
    (tmp_path / "current").symlink_to(root)
    engine.apply(tmp_path / "current", BOTH)
    assert files(root) == DONE


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused(root: Path, make: Callable[[Path], None]) -> None:
    """A directory or a pipe in a file's place does not hang and does not crash."""
    (root / "a.py").unlink()
    make(root / "a.py")
    with pytest.raises(PatchError, match=r"a\.py: is no regular file"):
        engine.apply(root, [FIRST])


def test_stale_bytecode_is_removed(root: Path) -> None:
    """What was compiled from the old text goes, also where Python would not look at times."""
    cache = root / "__pycache__"
    keep = [cache / "aa.cpython-311.pyc", cache / "other.cpython-311.pyc"]
    gone = [cache / "a.cpython-311.pyc", cache / "a.cpython-312.opt-1.pyc"]
    for path in (*keep, *gone):
        py_compile.compile(
            str(root / "a.py"),
            cfile=str(path),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    engine.apply(root, [FIRST])
    assert sorted(cache.iterdir()) == keep
    py_compile.compile(str(root / "a.py"), cfile=str(gone[0]))
    engine.revert(root)
    assert sorted(cache.iterdir()) == keep


# Others change things too


def test_a_file_edited_since_is_refused(root: Path) -> None:
    """Neither apply nor revert guesses; a reinstalled file is a new start."""
    engine.apply(root, BOTH)
    edited = DONE["a.py"] + b"# by hand\n"
    (root / "a.py").write_bytes(edited)
    before = files(root)
    words = r"a\.py: was changed after first .*reinstall its package"
    for act in (apply_both, revert):
        with pytest.raises(PatchError, match=words):
            act(root)
    assert files(root) == before
    status = engine.status(root, BOTH)
    assert not status.ok
    assert "was changed after first" in status.trouble[0]
    fill(root, {"a.py": PLAIN["a.py"]})
    engine.apply(root, BOTH)
    assert files(root) == DONE


def test_another_version_is_a_new_start(root: Path) -> None:
    """After an upgrade the new text is patched, and revert goes back to it."""
    engine.apply(root, BOTH)
    newer = {"a.py": b"number = 'one'  # newer\n"}
    fill(root, newer)
    assert engine.status(root, BOTH).trouble == ()
    assert engine.apply(root, BOTH).written == ("a.py",)
    assert files(root)["a.py"] == b"number = 'uno'  # newer\n"
    engine.revert(root)
    assert files(root) == {**PLAIN, **newer}


def test_an_upgrade_that_needs_no_patch_is_forgotten(root: Path) -> None:
    """What was kept of the version before does not come back."""
    engine.apply(root, [FIRST])
    newer = {"a.py": b"settled = 1\n", "pkg/b.txt": b"settled too\n"}
    fill(root, newer)
    assert engine.apply(root, [FIRST]).written == ()
    assert engine.revert(root).written == ()
    assert files(root) == {**PLAIN, **newer}


def test_an_upgrade_of_a_file_that_is_not_asked_about(root: Path) -> None:
    """Another set cannot tell an upgrade from an edit, and says so."""
    engine.apply(root, [FIRST])
    fill(root, {"a.py": b"number = 'one'  # newer\n"})
    with pytest.raises(PatchError, match=r"a\.py: was changed after first"):
        engine.apply(root, [SECOND])


def test_a_lost_record_is_no_drift(root: Path) -> None:
    """The text tells what is in place; what cannot be taken back is not."""
    engine.apply(root, BOTH)
    shutil.rmtree(root / engine.KEPT)
    assert engine.apply(root, BOTH).written == ()
    assert engine.status(root, BOTH).ok
    assert engine.revert(root).written == ()
    assert files(root) == DONE


def test_a_lost_record_is_said_by_revert(root: Path) -> None:
    """Told which patches there are, revert does not take a patched file for an untouched one; one
    that nobody patched is no trouble."""
    assert engine.revert(root, BOTH).written == ()
    engine.apply(root, BOTH)
    assert files(root) == DONE
    shutil.rmtree(root / engine.KEPT)
    with pytest.raises(PatchError, match=r"a\.py: holds first.* before are not kept .*reinstall"):
        engine.revert(root, BOTH)
    assert files(root) == DONE


def test_an_unknown_file_is_named_with_its_hash(root: Path) -> None:
    """So that a release that was rebuilt and an edit by hand can be told apart in a report."""
    fill(root, {"a.py": b"number = 3\n"})
    with pytest.raises(PatchError, match=r"sha256 " + store.sha256_bytes(b"number = 3\n")):
        engine.apply(root, BOTH)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"files": {"a.py": 1}}', b"\xff"])
def test_a_broken_record_is_said(root: Path, data: bytes) -> None:
    """It is a finding, not a crash."""
    engine.apply(root, BOTH)
    (root / engine.KEPT / engine.RECORD).write_bytes(data)
    for act in (apply_both, revert):
        with pytest.raises(PatchError, match="is broken"):
            act(root)


def test_damaged_bytes_from_before_are_not_put_back(root: Path) -> None:
    """Revert gives back what was there, or nothing."""
    engine.apply(root, BOTH)
    kept = root / engine.KEPT / engine.BEFORE / store.sha256_bytes(PLAIN["a.py"])
    kept.write_bytes(b"something else")
    with pytest.raises(PatchError, match=r"a\.py: its bytes from before .* damaged"):
        engine.revert(root)
    assert files(root) == DONE


def test_one_at_a_time(root: Path) -> None:
    """A second call waits for the first."""
    held = threading.Event()
    done = threading.Event()
    early = []

    def hold() -> None:
        with engine._locked(root):
            held.set()
            early.append(done.wait(0.2))

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(5)
    engine.apply(root, BOTH)
    done.set()
    thread.join()
    assert early == [False]
    assert files(root) == DONE


# Cut off at any moment


class Fault:
    """Raise at the nth thing that is done to the file system, and at all that follow if `dead`."""

    EVENTS = frozenset(
        {
            *("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown"),
            *("os.scandir", "os.listdir", "tempfile.mkstemp", "fcntl.flock"),
        }
    )

    def __init__(self) -> None:
        self.count: int | None = None
        self.raises: Callable[[], BaseException] = RuntimeError
        self.dead = self.struck = False
        sys.addaudithook(self)

    def __call__(self, event: str, _: tuple[Any, ...]) -> None:
        if self.count is None or event not in self.EVENTS:
            return
        self.count -= 1
        if self.count == 0 or (self.dead and self.count < 0):
            self.struck = True
            raise self.raises()

    @contextlib.contextmanager
    def at(self, count: int, raises: Callable[[], BaseException], *, dead: bool) -> Iterator[None]:
        self.count, self.raises, self.dead, self.struck = count, raises, dead, False
        try:
            yield
        finally:
            self.count = None


FAULT: Final = Fault()


class Killed(BaseException):
    """A process that does nothing more."""


def no_space() -> OSError:
    """Return what a full disk says."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_old_or_new(root: Path, old: dict[str, bytes], new: dict[str, bytes]) -> bool:
    """Tell whether every file is whole, in one of its two states."""
    found = files(root)
    return all(found.get(name) in {old.get(name), new.get(name)} for name in {*found, *old, *new})


WAYS: Final = [(apply_both, PLAIN, DONE), (revert, DONE, PLAIN)]


@pytest.mark.parametrize(("act", "old", "new"), WAYS)
def test_a_kill_at_any_moment(
    tmp_path: Path,
    act: Callable[[Path], None],
    old: dict[str, bytes],
    new: dict[str, bytes],
) -> None:
    """Each file is old or new; status does not crash; the next call finishes, either way, and
    leaves no more behind than one that was never cut off."""
    moments = 0
    for count in range(1, 500):
        root = fill(tmp_path / str(count))
        if old is DONE:
            engine.apply(root, BOTH)
        try:
            with FAULT.at(count, Killed, dead=True):
                act(root)
        except Killed:
            moments += 1
        else:
            break
        assert is_old_or_new(root, old, new), count
        engine.status(root, BOTH)
        if count % 2:
            engine.apply(root, BOTH)
            assert files(root) == DONE
            left = {path.name for path in (root / engine.KEPT).iterdir()}
            assert left == {engine.RECORD, engine.BEFORE}
        engine.revert(root)
        assert files(root) == PLAIN
        assert not (root / engine.KEPT).exists()
        shutil.rmtree(root)
    assert moments > 40


def test_a_kill_leaves_no_bytecode_of_another_text(tmp_path: Path) -> None:
    """Compiled with unchecked hashes it would run instead of the new file, with nobody noticing."""
    for count in range(1, 500):
        root = fill(tmp_path / str(count))
        compiled = root / "__pycache__" / "a.cpython-311.pyc"
        py_compile.compile(
            str(root / "a.py"),
            cfile=str(compiled),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        try:
            with FAULT.at(count, Killed, dead=True):
                engine.apply(root, BOTH)
        except Killed:
            assert not compiled.exists() or (root / "a.py").read_bytes() == PLAIN["a.py"], count
        else:
            break
    assert not compiled.exists()


@pytest.mark.parametrize(("act", "old", "new"), WAYS)
@pytest.mark.parametrize("dead", [False, True])
def test_a_full_disk_at_any_moment(
    tmp_path: Path,
    act: Callable[[Path], None],
    old: dict[str, bytes],
    new: dict[str, bytes],
    dead: bool,
) -> None:
    """An error is one line that says what is so: all files old, or all new; when the disk stays
    full while it is taken back, each old or new. With room again the next call succeeds."""
    refused = 0
    for count in range(1, 500):
        root = fill(tmp_path / str(count))
        if old is DONE:
            engine.apply(root, BOTH)
        words = ""
        try:
            with FAULT.at(count, no_space, dead=dead):
                act(root)
        except PatchError as error:
            words = str(error)
        if not FAULT.struck:
            break
        refused += bool(words)
        assert "\n" not in words
        assert is_old_or_new(root, old, new), count
        if not dead:
            assert files(root) in (old, new), (count, words)
        if "nothing was changed" in words:
            assert files(root) == old
        engine.apply(root, BOTH)
        assert files(root) == DONE
        engine.revert(root)
        assert files(root) == PLAIN
        assert not (root / engine.KEPT).exists()
        shutil.rmtree(root)
    assert refused > 20


KILLER: Final = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from test_patches_engine import BOTH, FAULT, engine

def die():
    os.kill(os.getpid(), signal.SIGKILL)

with FAULT.at(int(sys.argv[4]), die, dead=False):
    engine.apply(Path(sys.argv[3]), BOTH)
"""


@pytest.mark.parametrize("count", [5, 18, 30, 34, 38, 42, 46, 50])
def test_a_process_that_is_really_killed(root: Path, count: int) -> None:
    """SIGKILL: what it held is free, each file is old or new, and the next call finishes."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", KILLER, str(LIB), here, str(root), str(count)]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    assert is_old_or_new(root, PLAIN, DONE)
    engine.apply(root, BOTH)
    assert files(root) == DONE
    engine.revert(root)
    assert files(root) == PLAIN


def test_what_was_begun_is_reported_and_finished(root: Path) -> None:
    """Between the first rename and the last, status says so; apply finishes even a set that the
    call itself does not name, and says which files it wrote."""
    for count in range(1, 500):
        with contextlib.suppress(Killed), FAULT.at(count, Killed, dead=True):
            engine.apply(root, BOTH)
        if PLAIN != files(root) != DONE:
            break
        assert FAULT.struck
        engine.revert(root)
    status = engine.status(root, BOTH)
    assert not status.ok
    assert status.trouble == (
        "an earlier apply or revert was cut off; run `dsv4 patches apply` to finish it",
    )
    assert "pkg/c.py" in engine.apply(root, [FIRST]).written
    assert files(root) == DONE


def test_a_file_changed_while_it_was_cut_off_is_reported(root: Path) -> None:
    """Half of a set that cannot be finished is not made worse."""
    for count in range(1, 500):
        with contextlib.suppress(Killed), FAULT.at(count, Killed, dead=True):
            engine.apply(root, BOTH)
        if PLAIN != files(root) != DONE:
            break
        engine.revert(root)
    fill(root, {"pkg/b.txt": b"by hand\n"})
    before = files(root)
    with pytest.raises(
        PatchError, match=r"cut off and cannot be finished: pkg/b\.txt: was changed"
    ):
        engine.apply(root, BOTH)
    assert files(root) == before


class Machine(RuleBasedStateMachine):
    """Any order of apply, revert, upgrade, edit and kill.

    The model knows what each file was before patches of ours and what is to come of it; the
    engine is only asked to act, and looked at through the files.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = fill(Path(os.environ["PATCHES_MACHINE"]) / str(id(self)))
        self.base = dict(PLAIN)
        self.version = 0
        self.edited: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def patched(self) -> dict[str, bytes]:
        """Return what both patches make of what is there without them."""
        made = dict(self.base)
        for name, old, new in (("a.py", b"one", b"uno"), ("pkg/b.txt", b"two", b"dos")):
            made[name] = made[name].replace(old, new)
        made["pkg/b.txt"] = made["pkg/b.txt"].replace(b"three", b"tres")
        made["pkg/c.py"] = DONE["pkg/c.py"]
        return made

    @rule()
    def apply(self) -> None:
        if self.edited:
            before = files(self.root)
            with pytest.raises(PatchError, match=r"was changed"):
                engine.apply(self.root, BOTH)
            assert files(self.root) == before
            return
        engine.apply(self.root, BOTH)
        assert files(self.root) == self.patched()
        assert engine.status(self.root, BOTH).ok

    @precondition(lambda self: not self.edited)
    @rule()
    def revert(self) -> None:
        # Finishes what was cut off, and settles what an upgrade left
        engine.apply(self.root, BOTH)
        engine.revert(self.root)
        assert files(self.root) == self.base
        assert not (self.root / engine.KEPT).exists()

    @rule(count=st.integers(1, 90), back=st.booleans())
    def kill(self, count: int, back: bool) -> None:
        with contextlib.suppress(Killed, PatchError), FAULT.at(count, Killed, dead=True):
            if back:
                engine.revert(self.root)
            else:
                engine.apply(self.root, BOTH)

    @precondition(lambda self: not engine.status(self.root, BOTH).trouble)
    @rule(name=st.sampled_from(["a.py", "pkg/b.txt"]))
    def upgrade(self, name: str) -> None:
        self.version += 1
        self.base[name] = PLAIN[name] + b"# version %d\n" % self.version
        fill(self.root, {name: self.base[name]})

    @precondition(lambda self: engine.status(self.root, BOTH).ok)
    @rule(name=st.sampled_from(["a.py", "pkg/b.txt"]))
    def edit(self, name: str) -> None:
        self.edited.add(name)
        fill(self.root, {name: self.patched()[name] + b"# by hand\n"})

    @precondition(lambda self: self.edited)
    @rule()
    def reinstall(self) -> None:
        for name in self.edited:
            fill(self.root, {name: self.base[name]})
        self.edited.clear()

    @invariant()
    def every_file_is_one_it_may_be(self) -> None:
        found, new = files(self.root), self.patched()
        for name in {*found, *new} - self.edited:
            assert found.get(name) in {self.base.get(name), new.get(name)}, name


def test_any_order_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See `Machine`."""
    monkeypatch.setenv("PATCHES_MACHINE", str(tmp_path))
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    machine = settings(max_examples=30, stateful_step_count=25, suppress_health_check=checks)
    run_state_machine_as_test(Machine, settings=machine)
