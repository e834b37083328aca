"""The tools as one upload: the same sources are the same bytes, and arrive whole."""

import base64
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from deploy import bundle, layout
from dsv4 import state


def names(directory: Path) -> list[str]:
    """Return what is in a directory."""
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place that stands for the target's /opt/dsv4."""
    monkeypatch.setattr(layout, "LIB", tmp_path / "lib")
    monkeypatch.setattr(layout, "BIN", tmp_path / "bin")
    monkeypatch.setattr(layout, "DSV4", tmp_path / "bin/dsv4")
    return tmp_path


def install(command: str | None = None, archive: str | None = None) -> int:
    """Run the install as pyinfra does, through sh with the archive on stdin."""
    return subprocess.run(
        ["sh", "-c", command or bundle.install_command()],
        input=(archive or bundle.archive()).encode(),
        stderr=subprocess.DEVNULL,
        check=False,
    ).returncode


def members() -> list[tarfile.TarInfo]:
    """Return what is in the archive."""
    data = base64.b64decode(bundle.archive())
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmembers()


def test_the_archive_depends_on_the_sources_only() -> None:
    """No time of day, no account, no compiled file gets into it."""
    packed = base64.b64decode(bundle.archive())
    assert packed[4:8] == bytes(4), "gzip's header holds a time"
    assert {(m.mtime, m.uid, m.uname) for m in members()} == {(0, 0, "")}
    bundle.archive.cache_clear()
    assert base64.b64decode(bundle.archive()) == packed


def test_the_archive_holds_every_tool_and_the_front() -> None:
    """Under the name that says what is in it."""
    names = {member.name: member.mode for member in members()}
    home = f"dsv4-{bundle.library_hash()}"
    sources = {path.relative_to(layout.LOCAL_LIB) for path in layout.LOCAL_LIB.rglob("*.py")}
    assert names.keys() == {f"{home}/{path}" for path in sources} | {"bin/dsv4"}
    assert names["bin/dsv4"] == 0o755
    assert names[f"{home}/tree.py"] == 0o644


def test_the_archive_passes_a_line_based_terminal() -> None:
    """Short lines of plain letters."""
    lines = bundle.archive().splitlines()
    assert max(map(len, lines)) <= 76
    assert bundle.archive().isascii()


def test_both_sides_compute_the_same_hash(target: Path) -> None:
    """What the target says of its copy is what the deploy says of its own."""
    assert install() == 0
    assert str((target / "lib/dsv4").readlink()) == f"dsv4-{bundle.library_hash()}"
    assert state.library_hash(target / "lib/dsv4") == bundle.library_hash()
    assert os.access(target / "bin/dsv4", os.X_OK)
    assert names(target / "lib") == ["dsv4", f"dsv4-{bundle.library_hash()}"]


def test_again_is_the_same_and_heals(target: Path) -> None:
    """A copy that somebody edited is replaced whole, and nothing is left lying about."""
    install()
    (target / "lib/dsv4/tree.py").write_text("broken")
    (target / "lib/.new").mkdir()
    (target / "lib/.new/litter").touch()
    assert install() == 0
    assert state.library_hash(target / "lib/dsv4") == bundle.library_hash()
    assert names(target / "lib") == ["dsv4", f"dsv4-{bundle.library_hash()}"]


def test_the_version_before_stays_and_older_ones_go(target: Path) -> None:
    """Running guards still import from where they came."""
    for age, name in enumerate(("dsv4-new", "dsv4-old", "dsv4-oldest")):
        home = target / "lib" / name
        home.mkdir(parents=True)
        os.utime(home, (1_000_000 - age,) * 2)
    (target / "lib/dsv4").symlink_to("dsv4-new")
    assert install() == 0
    kept = {"dsv4", "dsv4-new", f"dsv4-{bundle.library_hash()}"}
    assert set(names(target / "lib")) == kept


def test_a_cut_off_upload_changes_nothing(target: Path) -> None:
    """The old version stays in service when the new one does not arrive whole."""
    (target / "lib/dsv4-old").mkdir(parents=True)
    (target / "lib/dsv4").symlink_to("dsv4-old")
    half = bundle.archive()[: len(bundle.archive()) // 2]
    assert install(archive=half) != 0
    assert str((target / "lib/dsv4").readlink()) == "dsv4-old"
    assert not (target / "bin/dsv4").exists()
    assert install() == 0
    assert str((target / "lib/dsv4").readlink()) == f"dsv4-{bundle.library_hash()}"


def test_a_kill_between_any_two_lines_is_healed(target: Path) -> None:
    """Wherever the install stops, the tools in service are whole or the next run makes them so."""
    lines = bundle.install_command().splitlines()
    for stop in range(1, len(lines)):
        install("\n".join([*lines[:stop], "exit 1"]))
        link = target / "lib/dsv4"
        if stop > 1 and link.exists():
            assert state.library_hash(link) == bundle.library_hash()
    assert install() == 0
    assert state.library_hash(target / "lib/dsv4") == bundle.library_hash()
    assert not (target / "lib/.new").exists()
