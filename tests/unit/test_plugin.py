"""A wheel made of an archive of sources: by commit, once, with nothing downloaded."""

import io
import random
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4 import install, plugin, store
from dsv4.plugin import PluginError

COMMIT = "ab" * 20
BACKEND = """\
import os, zipfile
def build_wheel(directory):
    assert os.path.exists("pyproject.toml"), os.getcwd()
    if os.environ.get("PLUGIN_FAILS"):
        raise SystemExit("csrc/moe.cu(12): error: no such thing")
    with open(os.environ["BUILDS"], "a") as log:
        log.write(os.environ["ARCH"] + "\\n")
    name = "vllm_exl3-0.4.2-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.writestr("vllm_exl3.py", "")
    return name
"""
Make = Callable[..., Path]


def archive_of(path: Path, members: dict[str, bytes], commit: str | None = COMMIT) -> Path:
    """Write an archive as `git archive` does."""
    headers = {"comment": commit} if commit else {}
    with tarfile.open(path, "w:gz", pax_headers=headers) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Sources with a build backend that the runtime has."""
    project = b'[build-system]\nbuild-backend = "backend_of_the_runtime"\n'
    return archive_of(tmp_path / "plugin.tar.gz", {"plugin-ab/pyproject.toml": project})


@pytest.fixture
def make(tmp_path: Path, archive: Path) -> Make:
    """Build the archive with a runtime that has the backend."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/backend_of_the_runtime.py").write_text(BACKEND)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path}/lib exec {sys.executable} "$@"\n')
    python.chmod(0o755)

    def build(
        sources: Path = archive, commit: str | None = COMMIT, arch: str = "12.1a", **env: str
    ) -> Path:
        environment = {"BUILDS": str(tmp_path / "builds"), "ARCH": arch, **env}
        wheels = tmp_path / "wheels"
        wheels.mkdir(exist_ok=True)
        return plugin.build(sources, commit, python, wheels, environment, {"arch": arch}, print)

    return build


def builds(tmp_path: Path) -> list[str]:
    """Return what was built for which GPU."""
    log = tmp_path / "builds"
    return log.read_text().split() if log.exists() else []


def test_the_same_sources_are_built_once(make: Make, tmp_path: Path) -> None:
    """A second runtime with the same ingredients takes what is there; others build anew."""
    first = make()
    assert zipfile.ZipFile(first).namelist() == ["vllm_exl3.py"]
    assert make() == first
    assert make(arch="9.0") != first
    assert builds(tmp_path) == ["12.1a", "9.0"]
    first.write_bytes(b"damaged")
    make()
    assert builds(tmp_path) == ["12.1a", "9.0", "12.1a"]


def test_where_it_came_from_lies_beside_it(make: Make, archive: Path) -> None:
    made = store.read_json(make().parent / "made.json")
    assert made is not None
    assert made["sources"] == {
        "archive": "plugin.tar.gz",
        "sha256": store.sha256_file(archive),
        "commit": COMMIT,
    }


def test_another_commit_is_refused(make: Make, tmp_path: Path) -> None:
    """The hash was pinned on first sight; the commit is what was asked for."""
    with pytest.raises(PluginError, match=f"expected commit {'cd' * 20}, got {COMMIT}"):
        make(commit="cd" * 20)
    assert builds(tmp_path) == []


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "top/../../evil"])
def test_an_archive_that_reaches_outside_is_refused(make: Make, tmp_path: Path, name: str) -> None:
    with pytest.raises(PluginError, match="no plain file"):
        make(archive_of(tmp_path / "evil.tar.gz", {name: b"x"}))
    assert not (tmp_path / "evil").exists()


def test_a_link_in_an_archive_is_refused(make: Make, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("top/link")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(PluginError, match="no plain file"):
        make(tmp_path / "link.tar.gz")


@pytest.mark.parametrize("part", [0.0, 0.5, 0.9])
def test_what_is_no_whole_archive_names_the_pin(make: Make, tmp_path: Path, part: float) -> None:
    """A login page that was pinned, or the first half of the file: one line and the way out."""
    noise = random.Random(2).randbytes(5000)
    whole = archive_of(tmp_path / "x.tar.gz", {"x/pyproject.toml": noise}).read_bytes()
    (tmp_path / "x.tar.gz").write_bytes(whole[: int(len(whole) * part)] or b"<html>")
    with pytest.raises(PluginError, match=r"x\.tar\.gz: is no whole archive .*inventories/pins"):
        make(tmp_path / "x.tar.gz", commit=None)


def test_two_trees_are_no_source_tree(make: Make, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="one top directory, got 2"):
        make(archive_of(tmp_path / "two.tar.gz", {"a/x": b"", "b/x": b""}))


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own words are in the journal."""
    with pytest.raises(install.InstallError, match=r"building plugin\.tar\.gz failed"):
        make(PLUGIN_FAILS="yes")
    assert "csrc/moe.cu(12): error" in capfd.readouterr().out
    assert list((tmp_path / "wheels").iterdir()) == []
    assert make().exists()
