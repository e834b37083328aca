"""Restarts are decided by what a process started from, never by time."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4 import fingerprint


@pytest.fixture
def sources(tmp_path: Path) -> fingerprint.Sources:
    """A machine with everything an engine starts from."""
    for name in ("runtimes/a", "runtimes/b", "views/v1", "views/v2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runtimes/a/manifest.json").write_text('{"route": "lab"}')
    (tmp_path / "runtimes/b/manifest.json").write_text('{"route": "lab"}')
    (tmp_path / "current").symlink_to("runtimes/a")
    (tmp_path / "view").symlink_to("views/v1")
    (tmp_path / "dsv4.service").write_text(
        "[Service]\n"
        + "".join(
            f"LoadCredential={name}:{tmp_path / name}\n"
            for name in ("api_key", "tls_cert", "tls_key")
        )
    )
    (tmp_path / "serve.yaml").write_text("port: 8899\n")
    (tmp_path / "environment").write_text("A=1\n")
    (tmp_path / "guard.json").write_text('{"allowed_networks": ["10.0.0.0/8"], "port": 1}\n')
    (tmp_path / "launch.py").write_text("pass\n")
    (tmp_path / "routes.py").write_text("pass\n")
    (tmp_path / "api_key").write_text("secret\n")
    (tmp_path / "tls_cert").write_text("certificate\n")
    (tmp_path / "tls_key").write_text("its key\n")
    found = fingerprint.Sources(
        unit=tmp_path / "dsv4.service",
        serve_yaml=tmp_path / "serve.yaml",
        environment=tmp_path / "environment",
        guard=tmp_path / "guard.json",
        runtime=tmp_path / "current",
        view=tmp_path / "view",
        code=(tmp_path / "launch.py", tmp_path / "routes.py"),
        salt=tmp_path / "salt",
    )
    fingerprint.salt(found.salt)
    return found


def started(sources: fingerprint.Sources) -> dict[str, object]:
    return {"schema": 1, "inputs": fingerprint.wanted(sources)}


def test_nothing_changed(sources: fingerprint.Sources) -> None:
    """The same bytes are the same process, whatever their time stamps say."""
    before = started(sources)
    os.utime(sources.serve_yaml, (0, 0))
    assert fingerprint.differs(before, fingerprint.wanted(sources)) == []


FILES = {
    "dsv4.service": "unit",
    "serve.yaml": "serve_yaml",
    "environment": "environment",
    "guard.json": "networks",
    "launch.py": "launcher",
    "routes.py": "launcher",
    "api_key": "api_key",
    "tls_cert": "tls",
    "tls_key": "tls",
}


@pytest.mark.parametrize(("name", "called"), FILES.items())
def test_a_changed_file_is_named(sources: fingerprint.Sources, name: str, called: str) -> None:
    """Each file is an input."""
    before = started(sources)
    path = sources.unit.with_name(name)
    path.write_text(path.read_text() + "# more")
    assert fingerprint.differs(before, fingerprint.wanted(sources)) == [called]


@pytest.mark.parametrize(("name", "called"), FILES.items())
def test_a_file_that_went_away_differs(
    sources: fingerprint.Sources, name: str, called: str
) -> None:
    """Missing is a state too, and never a crash."""
    before = started(sources)
    sources.unit.with_name(name).unlink()
    assert called in fingerprint.differs(before, fingerprint.wanted(sources))


def test_of_the_guards_settings_only_the_networks_are_an_input(
    sources: fingerprint.Sources,
) -> None:
    """They are set in the kernel at a start; the guards read the rest anew."""
    before = started(sources)
    sources.guard.write_text('{"port": 2, "allowed_networks": ["10.0.0.0/8"]}')
    assert fingerprint.differs(before, fingerprint.wanted(sources)) == []
    sources.guard.write_text('{"port": 2, "allowed_networks": ["10.1.0.0/16"]}')
    assert fingerprint.differs(before, fingerprint.wanted(sources)) == ["networks"]


def test_links_are_inputs(sources: fingerprint.Sources) -> None:
    """Another runtime or view with the same content is another one."""
    before = started(sources)
    for link, target in ((sources.runtime, "runtimes/b"), (sources.view, "views/v2")):
        link.unlink()
        link.symlink_to(target)
    assert fingerprint.differs(before, fingerprint.wanted(sources)) == ["runtime", "view"]


def test_a_rebuilt_runtime_is_another(sources: fingerprint.Sources) -> None:
    """The same ID with another manifest is not what the process started from."""
    before = started(sources)
    (sources.runtime / "manifest.json").write_text('{"route": "stable"}')
    assert fingerprint.differs(before, fingerprint.wanted(sources)) == ["runtime"]


def test_drop_ins_belong_to_the_unit(sources: fingerprint.Sources) -> None:
    """An owner's own drop-in changes what systemd starts."""
    before = started(sources)
    drop_ins = sources.unit.with_name("dsv4.service.d")
    drop_ins.mkdir()
    (drop_ins / "own.conf").write_text("[Service]\nNice=5\n")
    assert fingerprint.differs(before, fingerprint.wanted(sources)) == ["unit"]


def test_a_key_the_unit_does_not_take_is_no_input(sources: fingerprint.Sources) -> None:
    """On loopback a key may lie on disk unused."""
    sources.unit.write_text("[Service]\n")
    assert fingerprint.wanted(sources)["api_key"] == fingerprint.ABSENT
    assert fingerprint.wanted(sources)["tls"] == fingerprint.ABSENT


def test_the_key_is_not_in_the_record(sources: fingerprint.Sources) -> None:
    """Everybody may read the record, so a short key must not be found by trying."""
    mine = fingerprint.wanted(sources)["api_key"]
    other = replace(sources, salt=sources.salt.with_name("salt2"))
    fingerprint.salt(other.salt)
    assert fingerprint.wanted(other)["api_key"] != mine
    assert sources.salt.stat().st_mode & 0o777 == 0o600
    assert fingerprint.salt(sources.salt) == sources.salt.read_bytes()


@pytest.mark.parametrize("value", [None, {}, {"inputs": None}, {"inputs": ["x"]}])
def test_no_record_means_everything_differs(
    sources: fingerprint.Sources, value: dict[str, object] | None
) -> None:
    """A process nobody recorded, or recorded in another form, is not known to be current."""
    wanted = fingerprint.wanted(sources)
    assert fingerprint.differs(value, wanted) == list(wanted)
