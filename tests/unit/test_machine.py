"""`dsv4 machine`: read on any machine, with "unknown" for what it does not tell."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import machine

GB10 = """\
case "$1" in
    --query-gpu=*memory*) echo "[N/A], [N/A], [N/A], 0" ;;
    --query-gpu=*) echo "NVIDIA GB10, 580.95.05, 12.1" ;;
    --query-compute-apps=*) echo "4242, python, 19135"; echo "4243, /usr/bin/x, [N/A]" ;;
esac
"""

Smi = Callable[[str], None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Give the machine an nvidia-smi that answers as told; until then it has none."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    if shutil.which("nvidia-smi"):
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def install(body: str) -> None:
        path = tmp_path / "bin/nvidia-smi"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return install


def test_a_gb10_is_described_without_asking_for_memory(smi: Smi) -> None:
    """Its memory fields are [N/A]; driver, capability and processes are told."""
    smi(GB10)
    found = machine.gpu()
    assert (found["smi_status"], found["name"]) == (0, "NVIDIA GB10")
    assert (found["driver"], found["compute_cap"]) == ("580.95.05", "12.1")
    assert [(p["pid"], p["name"], p["mib"]) for p in found["processes"]] == [
        (4242, "python", 19135),
        (4243, "/usr/bin/x", None),
    ]


@pytest.mark.parametrize("none", ["[N/A]", "N/A", "Not Supported", "[Not Supported]", ""])
def test_every_spelling_of_nothing_is_unknown(smi: Smi, none: str) -> None:
    """A field nobody has is None and never a crash."""
    smi(f'echo "{none}, {none}, {none}"')
    found = machine.gpu()
    assert (found["name"], found["driver"], found["compute_cap"]) == (None, None, None)
    assert found["processes"] == []


def test_a_failing_nvidia_smi_is_quoted(smi: Smi) -> None:
    """Its own words go on to preflight, which knows what a mismatch needs."""
    smi("echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18")
    found = machine.gpu()
    assert found["smi_status"] == 18
    assert "Driver/library version mismatch" in found["smi_text"]
    assert found["processes"] == []


def test_no_nvidia_smi_is_a_state(smi: Smi) -> None:
    """An absent program is 127, as in a shell."""
    found = machine.gpu()
    assert (found["smi_status"], found["smi_text"], found["name"]) == (127, "", None)


def test_a_program_that_hangs_is_given_up() -> None:
    """A driver that hangs must not hang the deploy."""
    assert machine.run(["sleep", "5"], timeout=0.1) == (124, "")


@given(text=st.text())
def test_any_csv_is_read(text: str) -> None:
    """Fields are text or None."""
    for row in machine.gpu_rows(text):
        assert all(cell is None or cell.strip().lower() not in {"[n/a]", ""} for cell in row)


def cuda(root: Path, version_json: str | None = None, release: str | None = None) -> Path:
    """Make a toolkit that says what it is told to say."""
    (root / "bin").mkdir(parents=True)
    if version_json is not None:
        (root / "version.json").write_text(version_json)
    if release is not None:
        nvcc = root / "bin/nvcc"
        nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}"')
        nvcc.chmod(0o755)
    return root


def test_a_link_to_another_toolkit_is_resolved(tmp_path: Path) -> None:
    """Whatever /usr/local/cuda points at is what is described: link, headers and compiler."""
    (tmp_path / "cuda").symlink_to("cuda-12.8")
    cuda(tmp_path / "cuda-12.8", '{"cuda": {"version": "12.8.1"}}', "12.8")
    (tmp_path / "cuda-12.8/bin/ptxas").touch()
    found = machine.toolkit(str(tmp_path / "cuda"))
    assert found == {
        "home": str(tmp_path / "cuda"),
        "resolved": str(tmp_path / "cuda-12.8"),
        "version": "12.8.1",
        "nvcc": "12.8",
        "ptxas": True,
        "dangling": False,
    }


def test_mixed_toolkits_show_both_versions(tmp_path: Path) -> None:
    """Headers and compiler are asked separately, because they can differ."""
    found = machine.toolkit(str(cuda(tmp_path / "cuda", '{"cuda": {"version": "13.0.2"}}', "13.3")))
    assert (found["version"], found["nvcc"]) == ("13.0.2", "13.3")


def test_a_dangling_link_is_told_from_no_toolkit(tmp_path: Path) -> None:
    """Both have nothing, and need different remedies."""
    (tmp_path / "cuda").symlink_to("cuda-13.0")
    assert machine.toolkit(str(tmp_path / "cuda"))["dangling"]
    absent = machine.toolkit(str(tmp_path / "none"))
    assert (absent["dangling"], absent["resolved"], absent["nvcc"]) == (False, None, None)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", "{}", '{"cuda": {}}', '{"cuda": "13"}', '{"cuda": {"version": 1}}']
)
def test_a_version_file_that_says_nothing_is_unknown(tmp_path: Path, text: str) -> None:
    """The compiler still answers for itself."""
    found = machine.toolkit(str(cuda(tmp_path / "cuda", text, "13.0")))
    assert (found["version"], found["nvcc"]) == (None, "13.0")


def test_a_compiler_that_does_not_run_is_none(tmp_path: Path) -> None:
    """A file without execute permission, or one that fails, is no compiler."""
    home = cuda(tmp_path / "cuda", release="13.0")
    (home / "bin/nvcc").chmod(0o644)
    assert machine.toolkit(str(home))["nvcc"] is None
    (home / "bin/nvcc").chmod(0o755)
    (home / "bin/nvcc").write_text("#!/bin/sh\necho release 13.0; exit 1")
    assert machine.toolkit(str(home))["nvcc"] is None


def test_space_is_told_for_paths_that_are_not_there_yet(tmp_path: Path) -> None:
    """The mount is the one of the nearest parent; root's reserve does not count."""
    found = machine.mount_of(str(tmp_path / "not/there/yet"))
    space = os.statvfs(tmp_path)
    assert found["device"] == tmp_path.stat().st_dev
    assert found["path"] == str(tmp_path / "not/there/yet")
    assert abs(found["free"] - space.f_bavail * space.f_frsize) < 2**30
    assert found["total"] == space.f_blocks * space.f_frsize


def families() -> list[socket.AddressFamily]:
    """Return the protocols this machine has on its loopback."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return [socket.AF_INET]
    return [socket.AF_INET, socket.AF_INET6]


@pytest.mark.parametrize("family", families())
def test_who_listens_is_named(family: socket.AddressFamily) -> None:
    """On either protocol: pid and command; a free port has nobody."""
    with socket.socket(family) as server:
        server.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        port = server.getsockname()[1]
        assert machine.listener(port) is None
        server.listen()
        found = machine.listener(port)
        comm = Path("/proc/self/comm").read_text().strip()
        assert found is not None
        assert (found["pid"], found["command"]) == (os.getpid(), comm)
    assert machine.listener(port) is None


def test_the_system_is_read_from_os_release() -> None:
    """Quotes go, what is no assignment is left out."""
    text = '# comment\nID=ubuntu\nVERSION_ID="24.04"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\nnonsense\n'
    found = machine.os_release(text)
    assert (found["ID"], found["VERSION_ID"]) == ("ubuntu", "24.04")
    assert machine.os_release(None) == {}


@given(text=st.text())
def test_any_os_release_is_read(text: str) -> None:
    """Junk gives a mapping of text."""
    assert all(isinstance(value, str) for value in machine.os_release(text).values())


@given(text=st.one_of(st.text(), st.text("Mem: 0123²٣\n kB")))
def test_any_meminfo_is_read(text: str) -> None:
    """Junk gives numbers or nothing."""
    assert all(isinstance(value, int) for value in machine.kibibytes(text).values())


def test_the_whole_description_of_this_machine(smi: Smi) -> None:
    """Everything preflight decides by has a key, and all of it is JSON."""
    found = machine.describe(0, ["/", "/not/there"], "/not/there")
    assert json.loads(json.dumps(found)) == found
    assert found["arch"] == os.uname().machine
    assert found["kernel"] == os.uname().release
    assert found["memory_kib"]["MemTotal"] > 0
    assert [mount["path"] for mount in found["mounts"]] == ["/", "/not/there"]
    assert found["listener"] is None
    assert found["gpu"]["smi_status"] == 127


@pytest.fixture
def own_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a hub cache, a public directory, and a directory for short-lived files."""
    (tmp_path / "home/me/cache/blobs").mkdir(parents=True)
    (tmp_path / "home/me/cache/blobs/b").write_text("x")
    (tmp_path / "srv").mkdir()
    (tmp_path / "short").mkdir()
    monkeypatch.setattr(machine, "APART", (f"{tmp_path}/home", f"{tmp_path}/short"))
    return tmp_path


def made(at: Path, how: str) -> Path:
    """Return a pack's directory."""
    blob, pack = at / "home/me/cache/blobs/b", at / "srv/pack"
    if how == "in the open":
        pack.mkdir()
        (pack / "b").write_text("x")
    elif how == "in a home":
        return blob.parent
    elif how == "a link to a home":
        pack.symlink_to(blob.parent)
    elif how == "through a link to a home":
        (at / "data").symlink_to(at / "home/me")
        return at / "data/cache/blobs"
    elif how == "of links into a home":
        pack.mkdir()
        (pack / "b").symlink_to("../../home/me/cache/blobs/b")
    elif how == "of links, in a folder":
        (pack / "deep").mkdir(parents=True)
        (pack / "deep/b").symlink_to(blob)
    elif how == "by way of a link in a home":
        (at / "srv/real").mkdir()
        (at / "srv/real/b").write_text("x")
        (at / "home/me/hop").symlink_to(at / "srv/real")
        pack.symlink_to(at / "home/me/hop")
    elif how == "where a home really is":
        (at / "home").rename(at / "srv/homes")
        (at / "home").symlink_to("srv/homes")
        return at / "srv/homes/me/cache/blobs"
    elif how == "of a link to short-lived":
        pack.mkdir()
        (at / "short/b").write_text("x")
        (pack / "b").symlink_to(at / "short/b")
    return pack


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("in the open", []),
        ("in a home", ["home"]),
        ("a link to a home", ["home"]),
        ("through a link to a home", ["home"]),
        ("of links into a home", ["home"]),
        ("of links, in a folder", ["home"]),
        ("by way of a link in a home", ["home"]),
        ("where a home really is", ["home"]),
        ("of a link to short-lived", ["short"]),
    ],
)
def test_where_a_pack_s_files_really_are(own_pack: Path, how: str, where: list[str]) -> None:
    """A sandbox goes by what is opened on the way and not by the name in the settings."""
    found = machine.adopted(str(made(own_pack, how)))
    assert found["directory"] is True
    assert list(found["apart"]) == [f"{own_pack}/{name}" for name in where]


def test_an_own_pack_that_makes_no_sense_is_described(own_pack: Path) -> None:
    """Nothing there, a file, a link in a circle: no traceback."""
    (own_pack / "circle").symlink_to("circle")
    for name in ("none", "circle", "home/me/cache/blobs/b"):
        assert machine.adopted(str(own_pack / name))["directory"] is False
    assert machine.describe(0, [], "/x", "/not/there")["pack_dir"]["directory"] is False
    assert machine.describe(0, [], "/x")["pack_dir"] is None


def test_it_runs_from_stdin_without_anything_of_ours(tmp_path: Path) -> None:
    """The deploy sends this one file to a bare machine: the standard library must do."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-", "--port", "1", "--path", "/", "--cuda-home", "/x"],
        input=Path(machine.__file__).read_text(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["ok"] is True
    assert answer["machine"]["hostname"] == socket.gethostname()
