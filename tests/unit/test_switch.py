"""`dsv4 switch`: only links move, only complete runtimes serve, the oldest go."""

import fcntl
import io
import os
import pwd
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4 import layout, runtime, serve_flags, store, switch

Make = Callable[..., Path]


@pytest.fixture
def opt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runtimes and their links are."""
    for name in ("RUNTIMES", "CURRENT", "PREVIOUS", "CACHE", "STARTED_JSON"):
        monkeypatch.setattr(layout, name, tmp_path / getattr(layout, name).name)
    layout.RUNTIMES.mkdir()
    return tmp_path


@pytest.fixture
def make(opt: Path) -> Make:
    """Make runtimes; each is older than the next."""
    made: list[str] = []

    def add(name: str, *, complete: bool = True) -> Path:
        home = opt / "runtimes" / name
        site = home / "lib/python3.12/site-packages"
        site.mkdir(parents=True)
        if complete:
            store.write_json(home / runtime.MANIFEST, {"records": runtime.records(site)})
        made.append(name)
        os.utime(home, (1_000_000 + len(made),) * 2)
        return home

    return add


def links(opt: Path) -> tuple[str | None, str | None]:
    """Return what current and previous say, as text."""
    names = ("current", "previous")
    paths = [opt / name for name in names]
    current, previous = (str(p.readlink()) if p.is_symlink() else None for p in paths)
    return current, previous


def there(opt: Path) -> list[str]:
    """Return the runtimes on disk."""
    return sorted(path.name for path in (opt / "runtimes").glob("[!.]*"))


def test_the_first_runtime_has_no_previous(opt: Path, make: Make) -> None:
    """Links are relative, so that the tree can be looked at from outside."""
    make("a")
    assert switch.main(["a"]) == 0
    assert links(opt) == ("runtimes/a", None)


def test_the_one_before_is_kept_for_a_rollback(opt: Path, make: Make) -> None:
    """Switching again to the same one does not lose it."""
    make("a")
    make("b")
    assert switch.main(["a"]) == 0
    assert switch.main(["b"]) == 0
    assert switch.main(["b"]) == 0
    assert links(opt) == ("runtimes/b", "runtimes/a")


def test_back_is_a_switch_like_any_other(opt: Path, make: Make) -> None:
    """A rollback makes the newer one the previous."""
    make("a")
    make("b")
    switch.main(["a"])
    switch.main(["b"])
    assert switch.main(["a"]) == 0
    assert links(opt) == ("runtimes/a", "runtimes/b")


@pytest.mark.parametrize("what", ["absent", "unfinished", "drifted"])
def test_what_is_not_complete_is_refused(
    opt: Path, make: Make, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """The serving one is untouched, and the line says why."""
    make("a")
    switch.main(["a"])
    if what != "absent":
        home = make("b", complete=what == "drifted")
        if what == "drifted":
            (home / "lib/python3.12/site-packages/later-1.dist-info").mkdir()
    assert switch.main(["b"]) == 1
    assert links(opt) == ("runtimes/a", None)
    err = capsys.readouterr().err
    assert "runtime b is not complete: " in err
    assert ("packages were added" if what == "drifted" else "no manifest") in err


def test_the_oldest_go_and_those_in_service_stay(opt: Path, make: Make) -> None:
    """Three are kept: current, previous and the newest of the others."""
    for name in ("a", "b", "c", "d", "e"):
        make(name)
    switch.main(["a", "--keep", "9"])
    assert switch.main(["b", "--keep", "3"]) == 0
    assert there(opt) == ["a", "b", "e"]


def test_without_a_previous_the_same_number_is_kept(opt: Path, make: Make) -> None:
    """A link that is not there counts as nothing."""
    for name in ("a", "b", "c"):
        make(name)
    assert switch.main(["c", "--keep", "2"]) == 0
    assert there(opt) == ["b", "c"]


@pytest.mark.parametrize("keep", ["0", "-1", "1"])
def test_those_in_service_survive_any_number(opt: Path, make: Make, keep: str) -> None:
    """Current and previous are never cleared away."""
    for name in ("a", "b", "c"):
        make(name)
    switch.main(["a", "--keep", "9"])
    assert switch.main(["b", "--keep", keep]) == 0
    assert there(opt) == ["a", "b"]


def test_an_interrupted_switch_is_healed(opt: Path, make: Make) -> None:
    """A temporary link left by a killed run is in nobody's way."""
    make("a")
    (opt / ".current.dsv4-new").symlink_to("runtimes/gone")
    assert switch.main(["a"]) == 0
    assert sorted(path.name for path in opt.iterdir()) == ["current", "runtimes"]


def test_one_that_was_deleted_is_no_way_back(opt: Path, make: Make) -> None:
    """Its link hangs in the air; the runtime before it still serves, and stays."""
    for name in "abc":
        make(name)
    for name in "ab":
        assert switch.main([name]) == 0
    shutil.rmtree(opt / "runtimes/b")
    assert switch.main(["c", "--keep", "2"]) == 0
    assert links(opt) == ("runtimes/c", "runtimes/a")
    assert there(opt) == ["a", "c"]


def test_what_a_killed_rebuild_left_goes_with_a_switch(opt: Path, make: Make) -> None:
    """No build is started for a runtime that is complete, so that nobody else would sweep it."""
    make("a")
    aside = runtime.aside_of(opt / "runtimes/a")
    (aside / "bin").mkdir(parents=True)
    assert switch.main(["a"]) == 0
    assert not aside.exists()


def test_what_was_compiled_for_a_runtime_goes_with_it(opt: Path, make: Make) -> None:
    """Kernels are kept apart for each runtime; without it nobody can use them."""
    for name in ("a", "b", "c"):
        make(name)
        (opt / f"cache/{name}-cuda-13.0/triton").mkdir(parents=True)
    switch.main(["a", "--keep", "9"])
    assert switch.main(["b", "--keep", "2"]) == 0
    assert there(opt) == ["a", "b"]
    assert sorted(path.name for path in (opt / "cache").iterdir()) == [
        "a-cuda-13.0",
        "b-cuda-13.0",
    ]


def test_an_unfinished_one_goes_before_an_old_one(opt: Path, make: Make) -> None:
    """A broken build left it; an old complete one can still be gone back to."""
    for name in ("a", "b"):
        make(name)
    make("c", complete=False)
    switch.main(["b", "--keep", "2"])
    assert there(opt) == ["a", "b"]


def test_nothing_is_cleared_while_a_build_is_at_work(opt: Path, make: Make) -> None:
    """The unfinished directory is the build's; the link moves all the same."""
    for name in ("a", "b"):
        make(name)
    make("new", complete=False)
    switch.main(["a", "--keep", "9"])
    with (opt / "runtimes/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert switch.main(["b", "--keep", "2"]) == 0
    assert links(opt) == ("runtimes/b", "runtimes/a")
    assert there(opt) == ["a", "b", "new"]


def test_what_the_engine_still_runs_from_stays(opt: Path, make: Make) -> None:
    """Two switches without a restart: its files are neither link's."""
    for name in ("a", "b", "c"):
        make(name)
    store.write_json(layout.STARTED_JSON, {"inputs": {"runtime": "a:0123"}})
    switch.main(["b", "--keep", "9"])
    switch.main(["c", "--keep", "2"])
    assert there(opt) == ["a", "b", "c"]


def test_a_directory_in_the_links_place_is_one_line(
    opt: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither link moves, so that a switch is never half done."""
    make("a")
    (opt / "current").mkdir()
    assert switch.main(["a"]) == 1
    assert "a directory is in the way, move it elsewhere" in capsys.readouterr().err
    assert links(opt) == (None, None)


# --- the engine is asked first


@pytest.fixture
def engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make a runtime whose Python takes `-I -B -c PROGRAM FILE` and runs this line of shell."""
    monkeypatch.setattr(layout, "USER", pwd.getpwuid(os.getuid()).pw_name)

    def add(line: str) -> Path:
        home = make("new")
        (home / "bin").mkdir()
        program = home / "bin/python"
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
        return home

    return add


def test_flags_the_engine_takes(
    opt: Path, engine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the very text, as a file, and an environment of nobody's."""
    engine(f'cp "$5" {opt}/seen; env > {opt}/environment')
    monkeypatch.setattr(sys, "stdin", io.StringIO("port: 8899\n"))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert switch.main(["new", "--flags", "-"]) == 0
    assert links(opt) == ("runtimes/new", None)
    assert (opt / "seen").read_text() == "port: 8899\n"
    assert "secret" not in (opt / "environment").read_text()


def test_flags_the_engine_does_not_take(
    opt: Path, engine: Callable[[str], Path], make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing moves, and its own words are the reason."""
    make("old")
    assert switch.main(["old"]) == 0
    engine("echo usage: vllm >&2; echo 'vllm: error: unrecognized arguments: --new' >&2; exit 2")
    (opt / "serve.yaml").write_text("new: 1\n")
    assert switch.main(["new", "--flags", str(opt / "serve.yaml")]) == 1
    assert links(opt) == ("runtimes/old", None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "dsv4 switch: the engine of runtime new does not take the flags in /etc/dsv4/serve.yaml:"
        " vllm: error: unrecognized arguments: --new; nothing was switched"
    )


def test_an_engine_that_cannot_be_asked(
    opt: Path, make: Make, engine: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does anything move when there is no answer, or no text to ask about."""
    home = engine("exec sleep 5")
    assert serve_flags.fault(home, "port: 1\n", patience_s=0.2) is not None
    (home / "bin/python").unlink()
    (opt / "serve.yaml").write_text("port: 1\n")
    for source in (str(opt / "serve.yaml"), str(opt / "none.yaml")):
        assert switch.main(["new", "--flags", source]) == 1
    assert links(opt) == (None, None)
    err = capsys.readouterr().err
    assert "cannot be asked" in err
    assert "none.yaml: cannot be read" in err
