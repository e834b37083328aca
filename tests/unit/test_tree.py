"""`dsv4 tree`: paths are put in place whole, once, and remembered."""

import base64
import grp
import io
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import layout, store, tree

LIB = Path(tree.__file__).parents[1]
ME = pwd.getpwuid(os.getuid()).pw_name
MINE = grp.getgrgid(os.getgid()).gr_name

ROOT = os.getuid() == 0


def names(directory: Path) -> list[str]:
    """Return what is in a directory."""
    return sorted(path.name for path in directory.iterdir())


def entry(path: Path, kind: str = "file", **more: Any) -> dict[str, Any]:
    """Return a plan's entry that belongs to whoever runs the tests."""
    if "content" in more:
        more["base64"] = base64.b64encode(more.pop("content")).decode()
    return {"path": str(path), "kind": kind, "owner": ME, "group": MINE, **more}


def put(path: Path, kind: str = "file", **more: Any) -> bool:
    """Put one entry in place."""
    return tree.put(tree.parse(entry(path, kind, **more)))


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the record."""
    monkeypatch.setattr(layout, "ETC", tmp_path / "etc")
    monkeypatch.setattr(layout, "RECORD_JSON", tmp_path / "etc/record.json")
    return tmp_path / "etc"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, etc: Path) -> Any:
    """Run the tool with a plan on its stdin."""

    def call(plan: object) -> int:
        text = plan if isinstance(plan, str) else json.dumps(plan)
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return tree.main([])

    return call


def test_a_file_is_put_once(tmp_path: Path) -> None:
    """Content and mode are those asked for; the second time nothing is touched."""
    path = tmp_path / "a"
    assert put(path, content=b"one\n", mode="640")
    assert path.read_bytes() == b"one\n"
    assert path.stat().st_mode & 0o7777 == 0o640
    inode = path.stat().st_ino
    assert not put(path, content=b"one\n", mode="640")
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("change", [{"content": b"two\n"}, {"content": b"one\n", "mode": "600"}])
def test_a_change_replaces_the_whole_file(tmp_path: Path, change: dict[str, Any]) -> None:
    """Whoever has the old file open keeps reading the old one."""
    path = tmp_path / "a"
    put(path, content=b"one\n")
    with path.open("rb") as reader:
        assert put(path, **change)
        assert reader.read() == b"one\n"
    assert path.read_bytes() == change["content"]
    assert names(tmp_path) == ["a"]


def test_a_file_gets_its_owner(tmp_path: Path) -> None:
    """Owner and group are put right even where only they are wrong, or nothing is touched."""
    path = tmp_path / "a"
    put(path, content=b"x")
    if not ROOT:
        with pytest.raises(PermissionError):
            put(path, content=b"y", owner="nobody", group="nogroup")
        assert path.read_bytes() == b"x"
        assert names(tmp_path) == ["a"]
        return
    assert put(path, content=b"x", owner="nobody", group="nogroup")
    assert (path.owner(), path.group()) == ("nobody", "nogroup")
    assert not put(path, content=b"x", owner="nobody", group="nogroup")


def test_special_bits_are_kept(tmp_path: Path) -> None:
    """A directory with setgid and the sticky bit compares as what it is."""
    assert put(tmp_path / "d", "dir", mode="3770")
    assert not put(tmp_path / "d", "dir", mode="3770")
    assert (tmp_path / "d").stat().st_mode & 0o7777 == 0o3770


def test_a_link_in_the_way_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """A link somebody planted must not make us write elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "a").symlink_to(victim)
    assert put(tmp_path / "a", content=b"ours")
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"ours"
    assert victim.read_text() == "untouched"


def test_a_planted_temporary_name_is_not_followed(tmp_path: Path) -> None:
    """Not even when it stands where our temporary file goes."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / ".a.dsv4-new").symlink_to(victim)
    assert put(tmp_path / "a", content=b"ours")
    assert victim.read_text() == "untouched"
    assert names(tmp_path) == ["a", "victim"]


def test_what_an_interrupted_run_left_is_swept_away(tmp_path: Path) -> None:
    """A temporary file of a killed run neither disturbs nor stays."""
    (tmp_path / ".a.dsv4-new").write_bytes(b"hal")
    assert put(tmp_path / "a", content=b"whole")
    assert names(tmp_path) == ["a"]


def test_a_killed_writer_leaves_old_or_new(tmp_path: Path) -> None:
    """At whatever instant it dies, the path holds one of the two whole contents."""
    path = tmp_path / "a"
    contents = [b"a" * 2_000_000, b"b" * 2_000_000]
    program = (
        "import sys; from pathlib import Path; from dsv4 import tree\n"
        "path, owner, group = Path(sys.argv[1]), sys.argv[2], sys.argv[3]\n"
        "for n in range(10**9):\n"
        "    tree.put(tree.Entry(path, 'file', owner, group, content=b'ab'[n % 2:n % 2 + 1]"
        " * 2_000_000))\n"
    )
    for wait in (0.0, 0.003, 0.007):
        writer = subprocess.Popen(
            [sys.executable, "-c", program, str(path), ME, MINE],
            env={**os.environ, "PYTHONPATH": str(LIB)},
        )
        deadline = time.monotonic() + 10
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert path.read_bytes() in contents
        put(path, content=b"after")
        assert names(tmp_path) == ["a"]
        path.unlink()


def test_a_file_for_a_package_that_is_not_there_gets_its_directory(tmp_path: Path) -> None:
    """A drop-in is in place before the program that reads it."""
    assert put(tmp_path / "needrestart/conf.d/x.conf", content=b"x")
    assert not put(tmp_path / "needrestart/conf.d/x.conf", content=b"x")


def test_a_directory_in_the_way_of_a_file_is_refused(tmp_path: Path) -> None:
    """Nobody's directory is taken away to make room for a file or a link."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/kept").write_text("x")
    with pytest.raises(OSError, match="a directory is in the way"):
        put(tmp_path / "a", content=b"x")
    with pytest.raises(OSError, match="a directory is in the way"):
        put(tmp_path / "a", "link", target="b")
    assert (tmp_path / "a/kept").exists()


def test_a_directory_is_made_with_its_parents_and_its_content_stays(tmp_path: Path) -> None:
    """Only the directory itself is put right."""
    path = tmp_path / "x/y"
    assert put(path, "dir", mode="750")
    (path / "kept").write_text("x")
    path.chmod(0o700)
    assert put(path, "dir", mode="750")
    assert path.stat().st_mode & 0o7777 == 0o750
    assert not put(path, "dir", mode="750")
    assert (path / "kept").exists()


@pytest.mark.parametrize("what", ["file", "link", "dangling"])
def test_something_in_the_way_of_a_directory_is_refused(tmp_path: Path, what: str) -> None:
    """A link to a directory counts as something else: whose directory would it be?"""
    if what == "file":
        (tmp_path / "a").write_text("x")
    else:
        (tmp_path / "a").symlink_to(tmp_path if what == "link" else tmp_path / "none")
    before = tree.describe(tmp_path / "a")
    with pytest.raises(OSError, match="something else is in the way"):
        put(tmp_path / "a", "dir")
    assert tree.describe(tmp_path / "a") == before


def test_a_link_never_is_without_a_target(tmp_path: Path) -> None:
    """It is moved by a rename, also over a file or a dangling link."""
    link = tmp_path / "current"
    assert put(link, "link", target="runtimes/one")
    assert not put(link, "link", target="runtimes/one")
    assert put(link, "link", target="runtimes/two")
    assert str(link.readlink()) == "runtimes/two"
    link.unlink()
    link.write_text("a file")
    assert put(link, "link", target="runtimes/two")
    assert names(tmp_path) == ["current"]


def test_absent_takes_away_whatever_is_there(tmp_path: Path) -> None:
    """Files, trees and links go; what a link points at stays."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir/sub").mkdir(parents=True)
    (tmp_path / "dir/sub/x").write_text("x")
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "dangling").symlink_to("none")
    for name in ("file", "dir", "link", "dangling"):
        assert put(tmp_path / name, "absent")
        assert not put(tmp_path / name, "absent")
    assert names(tmp_path) == ["kept"]


def test_describe_tells_kinds_apart(tmp_path: Path) -> None:
    """The form the deploy compares by, including what is none of ours."""
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "f").chmod(0o604)
    os.mkfifo(tmp_path / "p")
    assert tree.describe(tmp_path / "f") == {
        "kind": "file",
        "owner": ME,
        "group": MINE,
        "mode": "604",
        "sha256": store.sha256_bytes(b"abc"),
    }
    assert tree.describe(tmp_path / "none") == {"kind": "absent"}
    assert tree.describe(tmp_path / "f/below") == {"kind": "absent"}
    assert tree.describe(tmp_path / "p")["kind"] == "other"


def test_an_owner_without_a_name_is_a_number(tmp_path: Path) -> None:
    """A file of a deleted account is described and put right."""
    (tmp_path / "f").write_bytes(b"x")
    if ROOT:
        os.chown(tmp_path / "f", 54321, 54321)
    assert tree.describe(tmp_path / "f")["owner"] == ("54321" if ROOT else ME)
    assert put(tmp_path / "f", content=b"x") is ROOT


@pytest.mark.parametrize(
    ("given_entry", "says"),
    [
        ({}, "path must be absolute"),
        ({"path": "etc/x", "kind": "file"}, "path must be absolute"),
        ({"path": "/etc/../x", "kind": "file"}, r"without \.\."),
        ({"path": "/", "kind": "absent"}, "must name one place"),
        ({"path": "/a\0b", "kind": "file"}, "path must be absolute"),
        ({"path": "/x", "kind": "socket"}, "kind must be one of dir, file, link, absent"),
        ({"path": "/x", "kind": "file", "mode": "9"}, "/x: "),
        ({"path": "/x", "kind": "file", "mode": "-1"}, "mode must be 0 to 7777"),
        ({"path": "/x", "kind": "file", "mode": "10000"}, "mode must be 0 to 7777"),
        ({"path": "/x", "kind": "file", "base64": "%%%"}, "/x: "),
        ({"path": "/x", "kind": "file", "base64": 5}, "/x: "),
        ("/x", "an entry must be an object"),
        (None, "an entry must be an object"),
    ],
)
def test_a_bad_entry_says_what_is_wrong(given_entry: Any, says: str) -> None:
    """The path is named where there is one."""
    with pytest.raises(tree.BadPlan, match=says):
        tree.parse(given_entry)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "path": st.one_of(JSON, st.text("/.a\0", min_size=1, max_size=6)),
        "kind": st.one_of(JSON, st.sampled_from(tree.KINDS)),
        "owner": JSON,
        "group": JSON,
        "mode": st.one_of(JSON, st.text("01237-9 _", max_size=5)),
        "base64": JSON,
        "target": JSON,
    },
)


@given(junk=st.one_of(JSON, ENTRY))
def test_any_entry_is_checked_or_refused(junk: Any) -> None:
    """No entry gets through that could name a place outside, or raises anything but `BadPlan`."""
    try:
        found = tree.parse(junk)
    except tree.BadPlan:
        return
    assert found.path.is_absolute()
    assert found.path.name
    assert ".." not in found.path.parts
    assert 0 <= found.mode <= 0o7777


def test_a_plan_is_carried_out_and_recorded(
    tmp_path: Path, etc: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record names every path with its step; a second run changes nothing."""
    plan = {
        "step": "base",
        "entries": [entry(tmp_path / "d", "dir"), entry(tmp_path / "d/f", content=b"secret-byte")],
    }
    assert run(plan) == 0
    changed = [str(tmp_path / "d"), str(tmp_path / "d/f")]
    out = capsys.readouterr().out
    assert json.loads(out) == {"ok": True, "changed": changed}
    assert "secret-byte" not in out
    record = store.read_json(etc / "record.json")
    assert record is not None
    assert record["paths"][changed[1]] == {"step": "base", "kind": "file"}
    assert run(plan) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == []


def test_the_record_grows_and_forgets_what_was_taken_away(
    tmp_path: Path, etc: Path, run: Any
) -> None:
    """A later step adds to it; an absent path is no longer ours."""
    run({"step": "one", "entries": [entry(tmp_path / "a", content=b"")]})
    run({"step": "two", "entries": [entry(tmp_path / "b", content=b"")]})
    tree.note("packages", {"ninja-build": {"step": "base"}})
    run({"step": "two", "entries": [{"path": str(tmp_path / "a"), "kind": "absent"}]})
    record = store.read_json(etc / "record.json")
    assert record is not None
    assert list(record["paths"]) == [str(tmp_path / "b")]
    assert record["packages"] == {"ninja-build": {"step": "base"}}


def test_the_record_is_written_before_the_paths(
    tmp_path: Path, etc: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails in the middle has recorded what it may have left."""
    plan = {
        "step": "s",
        "entries": [
            entry(tmp_path / "a", content=b""),
            entry(tmp_path / "b", content=b""),
        ],
    }
    (tmp_path / "b").mkdir()
    assert run(plan) == 1
    assert "run the deploy again" in capsys.readouterr().err
    record = store.read_json(etc / "record.json")
    assert record is not None
    assert set(record["paths"]) == {str(tmp_path / "a"), str(tmp_path / "b")}


def test_an_unknown_owner_is_one_line(
    tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """An account that does not exist yet is named."""
    plan = {"step": "s", "entries": [{**entry(tmp_path / "a"), "owner": "nobody-like-this"}]}
    assert run(plan) == 1
    assert "nobody-like-this" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "{",
        "[]",
        "5",
        '{"step": "x"}',
        '{"entries": []}',
        '{"step": "x", "entries": [5]}',
        '{"step": "x", "entries": "abc"}',
        '{"step": "x", "entries": 7}',
    ],
)
def test_an_unusable_plan_touches_nothing(
    etc: Path, run: Any, capsys: pytest.CaptureFixture[str], plan: str
) -> None:
    """Exit status 2, one line, no record."""
    assert run(plan) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not etc.exists()


def test_a_broken_record_is_made_anew(tmp_path: Path, etc: Path, run: Any) -> None:
    """It is state, not a reason to stop: the next deploy fills it again."""
    etc.mkdir()
    (etc / "record.json").write_text("{")
    assert run({"step": "s", "entries": [entry(tmp_path / "a", content=b"")]}) == 0
    record = store.read_json(etc / "record.json")
    assert record is not None
    assert list(record["paths"]) == [str(tmp_path / "a")]


def test_a_link_does_not_take_the_place_of_a_directory(tmp_path: Path) -> None:
    """What is in it is somebody's: one line that names it, and nothing was moved."""
    (tmp_path / "current").mkdir()
    (tmp_path / "current/mine").touch()
    with pytest.raises(OSError, match="a directory is in the way, move it elsewhere"):
        tree.link_to(tmp_path / "current", "runtimes/a")
    assert [path.name for path in tmp_path.iterdir()] == ["current"]
