"""What nothing serves goes, what is served or wanted never does."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from dsv4 import layout, pack_gc, store


@pytest.fixture
def at(tmp_path: Path) -> Path:
    """Three revisions of one pack and one of another; `new` is served, `old` still runs."""
    packs, views = tmp_path / "packs", tmp_path / "views"
    for name in ("mine/older", "mine/old", "mine/new", "mine/wanted", "theirs/one"):
        (packs / name).mkdir(parents=True)
        (packs / name / "a.safetensors").write_bytes(os.urandom(8192))
        store.write_json(packs / f"{name}.json", {"complete": True})
    for view, root in (("v0", "mine/older"), ("v1", "mine/old"), ("v2", "mine/new")):
        (views / view).mkdir(parents=True)
        (views / view / "a.safetensors").symlink_to(packs / root / "a.safetensors")
    (views / "current").symlink_to("v2")
    made_from = {"pack_root": str(packs / "mine/new")}
    store.write_json(views / "current.json", {"id": "v2", "made_from": made_from})
    store.write_json(tmp_path / "started.json", {"inputs": {"view": "v1"}})
    store.write_json(tmp_path / "fetch.json", {"name": "mine", "revision": "wanted"})
    return tmp_path


def run(at: Path, *more: str) -> int:
    words = ["--packs", str(at / "packs"), "--views", str(at / "views")]
    words += ["--spec", str(at / "fetch.json"), "--started", str(at / "started.json")]
    words += ["--user", "root"]
    return pack_gc.main([*words, *more])


def tree(at: Path) -> set[str]:
    found = {str(path.relative_to(at)) for path in at.glob("packs/*/*")}
    return found | {str(path.relative_to(at)) for path in at.glob("views/v*")}


GOES = {"packs/mine/older", "packs/mine/older.json", "packs/theirs/one", "packs/theirs/one.json"}


def test_it_lists_and_touches_nothing(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(at)
    assert run(at, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {str(Path(row["path"]).relative_to(at)) for row in found["found"]} == GOES | {"views/v0"}
    assert found["bytes"] >= 2 * 8192
    assert tree(at) == before


def test_it_removes_what_it_listed(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(at)
    assert run(at, "--remove") == 0
    assert "MiB" in capsys.readouterr().err
    assert before - tree(at) == GOES | {"views/v0"}
    assert run(at, "--remove", "--json") == 0
    assert json.loads(capsys.readouterr().out)["found"] == []


def test_a_download_at_work_keeps_every_pack(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(at)
    with store.hold(at / "packs" / layout.FETCH_LOCK):
        assert run(at, "--remove") == 0
    assert "at work" in capsys.readouterr().err
    assert before - tree(at) == {"views/v0"}


def test_an_adopted_pack_is_no_leftover_of_ours(at: Path) -> None:
    """With pack_dir the served files are elsewhere; the downloads are then served by nothing."""
    elsewhere = at / "home/me/pack"
    elsewhere.mkdir(parents=True)
    (elsewhere / "a.safetensors").write_bytes(b"x")
    link = at / "views/v2/a.safetensors"
    link.unlink()
    link.symlink_to(elsewhere / "a.safetensors")
    store.write_json(
        at / "views/current.json", {"id": "v2", "made_from": {"pack_root": str(elsewhere)}}
    )
    assert run(at, "--remove") == 0
    assert (elsewhere / "a.safetensors").exists()
    assert "packs/mine/new" not in tree(at)
    assert "packs/mine/old" in tree(at)


def adopt(at: Path, directory: Path) -> None:
    """Have a directory served, as the deploy does with `pack_dir`."""
    (at / "views/v2/a.safetensors").unlink()
    (at / "views/v2/a.safetensors").symlink_to(directory / "a.safetensors")
    made_from = {"pack_root": str(directory)}
    store.write_json(at / "views/current.json", {"id": "v2", "made_from": made_from})


def arrange(at: Path, how: str) -> Path:
    """Return a directory that is in some way the pack `theirs/one`."""
    one, mine = at / "packs/theirs/one", at / "home"
    mine.mkdir()
    if how == "a link to it":
        (mine / "pack").symlink_to(one)
    elif how == "a link to a link to it":
        (mine / "hop").symlink_to(one)
        (mine / "pack").symlink_to("hop")
    elif how == "through a link to the packs":
        (mine / "all").symlink_to(at / "packs/theirs")
        return mine / "all/one"
    elif how == "links to its files":
        (mine / "pack").mkdir()
        (mine / "pack/a.safetensors").symlink_to(one / "a.safetensors")
    elif how == "relative links to its files":
        (mine / "pack").mkdir()
        (mine / "pack/a.safetensors").symlink_to("../../packs/theirs/../theirs/one/a.safetensors")
    elif how == "a link in it that leads out again":
        (one / "a.safetensors").rename(mine / "blob")
        (one / "a.safetensors").symlink_to(mine / "blob")
        (mine / "pack").mkdir()
        (mine / "pack/a.safetensors").symlink_to(one / "a.safetensors")
    elif how == "a file only the pack has, in a directory behind a link":
        (one / "sub").mkdir()
        (one / "sub/deep.bin").write_bytes(b"x")
        (mine / "pack").mkdir()
        (mine / "pack/a.safetensors").write_bytes(b"x")
        (mine / "pack/more").symlink_to(one / "sub")
    return mine / "pack"


WAYS_THE_VIEW_SHOWS = [
    "a link to it",
    "a link to a link to it",
    "through a link to the packs",
    "links to its files",
    "relative links to its files",
    "a link in it that leads out again",
]
WAYS = [*WAYS_THE_VIEW_SHOWS, "a file only the pack has, in a directory behind a link"]
"""A view links files, and the last one's is not in it."""


@pytest.mark.parametrize(
    ("how", "seen_by"),
    [
        *((how, "the note") for how in WAYS),
        *((how, "the view") for how in WAYS_THE_VIEW_SHOWS),
    ],
)
def test_what_a_served_directory_reaches_stays(at: Path, how: str, seen_by: str) -> None:
    """Whichever way it gets there: a name tells nothing about the bytes behind it."""
    adopt(at, arrange(at, how))
    if seen_by == "the view":
        (at / "views/current.json").unlink()
    before = {path: os.path.lexists(path) for path in (at / "packs/theirs").rglob("*")}
    assert run(at, "--remove") == 0
    assert {path: os.path.lexists(path) for path in before} == before
    assert "packs/mine/older" not in tree(at), "what is not reached goes"
    assert (at / "packs/theirs/one.json").exists()


def test_links_where_packs_are_stay(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody moved a pack, or a whole model's packs, to another disk and linked them."""
    for name in ("packs/mine/older", "packs/theirs"):
        moved = at / f"disk2-{Path(name).name}"
        (at / name).rename(moved)
        (at / name).symlink_to(moved)
    assert run(at, "--remove") == 0
    assert (at / "disk2-older/a.safetensors").exists()
    assert (at / "disk2-theirs/one/a.safetensors").exists()
    assert (at / "packs/mine/older.json").exists()
    said = capsys.readouterr().err
    assert f"{at}/packs/mine/older: left alone, it is no download of ours (a link)" in said
    assert f"{at}/packs/theirs: left alone" in said


def test_what_has_no_record_of_ours_stays(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be anybody's, and cannot be fetched again; half of a removal is ours."""
    (at / "packs/mine/older.json").unlink()
    (at / "packs/mine/.removing-gone/sub").mkdir(parents=True)
    (at / "packs/mine/notes").mkdir()
    assert run(at, "--remove", "--json") == 0
    out, said = capsys.readouterr()
    assert (at / "packs/mine/older/a.safetensors").exists()
    assert (at / "packs/mine/notes").is_dir()
    assert not (at / "packs/mine/.removing-gone").exists()
    assert "packs/mine/older: left alone" in said
    left = [str(at / "packs/mine/notes"), str(at / "packs/mine/older")]
    assert json.loads(out)["left"] == left


STATE = ("fetch.json", "started.json", "views/current.json")
BROKEN = ("{", "", "[]", "null", '"x"', "{}\0")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, text) for name in STATE for text in BROKEN),
        ("fetch.json", '{"name": 1}'),  # an object, and only a download has to be named in it
    ],
)
def test_when_what_stays_cannot_be_told_nothing_goes(
    at: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (at / name).write_text(text)
    before = tree(at)
    assert run(at, "--remove", "--json") == 3
    out, said = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert str(at / name) in said
    assert tree(at) == before


def parts(at: Path) -> list[str]:
    return sorted(path.name for path in at.glob("packs/mine/*/.*"))


@pytest.mark.parametrize(
    ("record", "stays"),
    [
        ({"complete": True}, False),
        ({"complete": False, "files": {}}, True),
        ({}, True),
        ({"complete": "yes"}, True),
        (None, True),
    ],
)
@pytest.mark.parametrize("revision", ["wanted", "new", "old"])
def test_partial_files_go_only_from_what_is_complete(
    at: Path, record: dict[str, Any] | None, stays: bool, revision: str
) -> None:
    """An unfinished download goes on from them, if it takes a week to be told to."""
    (at / f"packs/mine/{revision}/.b.safetensors.part").write_bytes(b"x")
    if record is None:
        (at / f"packs/mine/{revision}.json").write_text("{")
    else:
        store.write_json(at / f"packs/mine/{revision}.json", record)
    assert run(at, "--remove") == 0
    assert parts(at) == ([".b.safetensors.part"] if stays else [])


def test_an_unfinished_download_of_what_is_not_wanted_goes(at: Path) -> None:
    (at / "packs/mine/older/.b.safetensors.part").write_bytes(b"x")
    store.write_json(at / "packs/mine/older.json", {"complete": False})
    (at / "packs/mine/older.hashed").write_text("{}")
    assert run(at, "--remove") == 0
    assert not list((at / "packs/mine").glob("older*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="goes on as another user")
def test_packs_are_removed_as_their_owner(at: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing in the fetcher's tree may have root remove what is not the fetcher's."""
    nobody = 65534
    for above in (at, *list(at.parents)[:2]):
        above.chmod(0o755)
    for path in (at / "packs", *(at / "packs").rglob("*")):
        os.chown(path, nobody, nobody)
    roots = at / "packs/mine/older/roots"
    roots.mkdir()
    (roots / "own").write_text("root's")

    def as_nobody() -> int:
        child = os.fork()
        if child == 0:
            os._exit(run(at, "--remove", "--user", "nobody"))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert as_nobody() == 3
    assert "Permission denied" in capfd.readouterr().err
    assert not (at / "views/v0").exists(), "views are root's, and went first"
    assert list(at.glob("packs/mine/*older/roots/own"))
    os.chown(next(at.glob("packs/mine/*older/roots")), nobody, nobody)
    assert as_nobody() == 0
    assert not list(at.glob("packs/mine/*older"))
    assert (at / "packs/mine/new/a.safetensors").exists()


def test_without_the_account_no_pack_goes(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(at)
    assert run(at, "--remove", "--user", "no-such-user") == 3
    assert "no-such-user" in capsys.readouterr().err
    assert tree(at) == before


def removing(at: Path, stop_after: int) -> None:
    """Remove in a process that dies after so many files."""
    unlink, count = os.unlink, 0

    def counting(*arguments: Any, **named: Any) -> None:
        nonlocal count
        count += 1
        if count > stop_after:
            os._exit(9)
        unlink(*arguments, **named)

    os.unlink = counting
    run(at, "--remove")


@pytest.mark.parametrize("stop_after", [0, 1, 2, 3, 4])
def test_killed_in_between_the_next_run_finishes(at: Path, stop_after: int) -> None:
    child = multiprocessing.get_context("fork").Process(target=removing, args=(at, stop_after))
    child.start()
    child.join()
    assert run(at, "--remove") == 0
    left = {path.name for path in (at / "packs/mine").iterdir()}
    assert left == {"old", "old.json", "new", "new.json", "wanted", "wanted.json"}
    assert [path.name for path in (at / "packs/theirs").iterdir()] == []


def test_nothing_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert run(tmp_path, "--remove") == 0
