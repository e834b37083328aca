"""What nothing serves goes, what is served or wanted never does."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from dsv4 import layout, pack_gc, store


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three revisions of one pack and one of another; `new` is served, `old` still runs."""
    packs, views = tmp_path / "packs", tmp_path / "views"
    monkeypatch.setattr(layout, "PACKS", packs)
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


def parts(at: Path) -> list[str]:
    return sorted(path.name for path in at.glob("packs/mine/new/.*"))


def test_parts_of_a_download_that_is_over_go(at: Path) -> None:
    (at / "packs/mine/new/.b.safetensors.part").write_bytes(b"x")
    assert run(at, "--remove") == 0
    assert parts(at) == []


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
