"""`dsv4 apt`: another package manager is waited for and named, never fought."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4 import apt, layout, store

HOLDER = """
import fcntl, sys
with open(sys.argv[1], "r+") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def free(tmp_path: Path) -> Path:
    """A lock file nobody holds."""
    path = tmp_path / "lock-frontend"
    path.touch()
    return path


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """A lock file held the way dpkg holds it, by a living process."""
    path = tmp_path / "lock"
    path.touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), "unattended-upgrade"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield path, process
        process.communicate("")


Held = tuple[Path, "subprocess.Popen[str]"]


def test_the_holder_of_a_record_lock_is_found(free: Path, held: Held) -> None:
    """dpkg's locks are POSIX record locks, which flock(2) does not see."""
    path, process = held
    assert apt.holder(path) == process.pid
    assert apt.holder(free) is None
    assert apt.holder(free.with_name("missing")) is None


def test_waiting_names_the_holder_and_kills_nobody(free: Path, held: Held) -> None:
    """After the limit: which lock, which process, its command, what to do; nothing is removed."""
    path, process = held
    text = apt.wait_for_locks(0.1, (free, path))
    assert text is not None
    assert f"{path} has been held by pid {process.pid}" in text
    assert "unattended-upgrade" in text
    assert "run the deploy again" in text
    assert path.exists()
    assert process.poll() is None


def test_waiting_ends_when_the_lock_is_free(free: Path, held: Held) -> None:
    """It goes on as soon as the other one is done."""
    path, process = held
    assert apt.wait_for_locks(5, (free,)) is None
    process.communicate("")
    assert apt.wait_for_locks(5, (free, path)) is None


def test_a_process_that_is_gone_has_a_name() -> None:
    """The holder may end between two looks."""
    assert apt.name_of(2**22 + 1) == "gone"
    assert "pytest" in apt.name_of(os.getpid())


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put stand-ins for package tools first on the path; each writes down how it was called."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(layout, "RECORD_JSON", tmp_path / "etc/record.json")
    monkeypatch.setattr(apt.wait_for_locks, "__defaults__", ((),))
    monkeypatch.setattr(apt, "LISTS", tmp_path / "lists")
    (tmp_path / "lists").mkdir()

    def add(name: str, body: str) -> None:
        path = directory / name
        words = '"$(echo "$0 $*" | tr "\\n" " ")"'
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" {words} >>"$CALLS"\n{body}\n')
        path.chmod(0o755)

    for name in ("dpkg", "apt-get", "dpkg-query"):
        add(name, "exit 0")
    return add


def calls(tmp_path: Path) -> list[str]:
    """Return what was called, queries left out."""
    lines = (tmp_path / "calls").read_text().splitlines()
    words = [line.strip().removeprefix(f"{tmp_path}/bin/") for line in lines]
    return [line for line in words if not line.startswith("dpkg-query")]


def test_versions_of_installed_packages_only(programs: Callable[[str, str], None]) -> None:
    """Half-installed, removed with its configuration left, or unknown: all are missing."""
    programs(
        "dpkg-query",
        "printf 'a\\tii \\t1.2-3\\nb\\tiF \\t1\\nc\\trc \\t1\\nd\\tun \\t\\nx\\tii \\t9\\n'"
        "\nexit 1",
    )
    found = apt.installed(["a", "b", "c", "d", "e"])
    assert found == {"a": "1.2-3", "b": None, "c": None, "d": None, "e": None}
    assert apt.installed([]) == {}


def test_nothing_missing_calls_nothing(
    tmp_path: Path, programs: Callable[[str, str], None]
) -> None:
    """A settled machine is left alone, locks and network included."""
    programs("dpkg-query", "printf 'a\\tii \\t1\\n'")
    assert apt.main(["a"]) == 0
    assert calls(tmp_path) == []
    assert not (tmp_path / "etc").exists()


def test_missing_packages_are_installed_without_a_dialog(
    tmp_path: Path, programs: Callable[[str, str], None]
) -> None:
    """Old configuration files are kept, nothing recommended comes along, no service restarts."""
    (tmp_path / "lists/deb_Packages").touch()
    programs("dpkg-query", "printf 'a\\tii \\t1\\n'")
    programs("apt-get", 'env | grep -E "^(DEBIAN|NEEDRESTART)" | sort >"$CALLS.env"')
    assert apt.main(["a", "b"]) == 0
    audit, install = calls(tmp_path)
    assert audit == "dpkg --audit"
    assert install.startswith("apt-get install -y --no-install-recommends")
    assert "DPkg::Lock::Timeout=300" in install
    assert "--force-confold" in install
    assert install.endswith(" b")
    assert (tmp_path / "calls.env").read_text().split() == [
        "DEBIAN_FRONTEND=noninteractive",
        "NEEDRESTART_MODE=l",
        "NEEDRESTART_SUSPEND=1",
    ]
    record = store.read_json(tmp_path / "etc/record.json")
    assert record is not None
    assert record["packages"] == {"b": {"step": "base"}}


def test_half_configured_packages_are_configured_once_first(
    tmp_path: Path, programs: Callable[[str, str], None]
) -> None:
    """An interrupted dpkg is finished, then the install goes on."""
    (tmp_path / "lists/deb_Packages").touch()
    programs("dpkg", 'if [ "$1" = --audit ]; then echo "half-configured: x"; fi')
    assert apt.main(["b"]) == 0
    assert [line.split()[1] for line in calls(tmp_path)] == ["--audit", "--configure", "install"]


def test_stale_lists_are_renewed_and_the_install_tried_again(
    tmp_path: Path, programs: Callable[[str, str], None]
) -> None:
    """A version that left the mirror is no reason to fail."""
    (tmp_path / "lists/deb_Packages").touch()
    programs("apt-get", '[ "$1" = update ] && touch "$CALLS.fresh" || [ -e "$CALLS.fresh" ]')
    assert apt.main(["b"]) == 0
    assert [line.split()[1] for line in calls(tmp_path)][1:] == ["install", "update", "install"]


def test_a_blank_machine_gets_its_lists_first(
    tmp_path: Path, programs: Callable[[str, str], None]
) -> None:
    """Without lists there is nothing to try."""
    assert apt.main(["b"]) == 0
    assert [line.split()[1] for line in calls(tmp_path)][1:] == ["update", "install"]


@pytest.mark.parametrize(
    ("fails", "says"), [("update", "check network and clock"), ("install", "could not install b")]
)
def test_a_failure_says_which_half_failed(
    programs: Callable[[str, str], None],
    capfd: pytest.CaptureFixture[str],
    fails: str,
    says: str,
) -> None:
    """The package tool's own words come first, ours name what to look at."""
    programs("apt-get", f'[ "$1" != {fails} ]')
    assert apt.main(["b"]) == 1
    assert says in capfd.readouterr().err


def test_a_busy_machine_is_not_touched(
    tmp_path: Path,
    programs: Callable[[str, str], None],
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Another apt at work after the limit: exit status 1, its name, nothing called."""
    path, process = held
    monkeypatch.setattr(apt.wait_for_locks, "__defaults__", ((path,),))
    assert apt.main(["--wait", "0", "b"]) == 1
    assert f"pid {process.pid}" in capfd.readouterr().err
    assert calls(tmp_path) == []
