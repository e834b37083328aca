"""Locks' wheels, for real: all of them for the Spark's machine, every hash enforced.

It brings 6.6 GB over the network and unpacks them, so it is run by hand.
"""

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deploy import layout, locks, routes
from dsv4 import runtime

NAMES = [lock.name for lock in locks.known().values() if lock.name in {"stable", "latest", "stock"}]
AARCH64 = 183  # e_machine in an ELF header


@dataclass(frozen=True)
class Installed:
    """A route, and its packages in a directory."""

    route: routes.Route
    site: Path


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """Return a directory that does not stay: what is in it is large."""
    with tempfile.TemporaryDirectory(prefix="dsv4-locks-") as name:
        yield Path(name)


@pytest.fixture(scope="module", params=NAMES)
def installed(request: pytest.FixtureRequest, scratch: Path) -> Installed:
    """Install a route's lock; nothing comes from a cache that was there before."""
    route = routes.ROUTES[request.param]
    site = scratch / route.name
    words = [locks.find_uv(), "pip", "sync", "--require-hashes", "--only-binary", ":all:"]
    words += ["--no-python-downloads", "--no-progress", "--link-mode", "hardlink"]
    words += ["--cache-dir", str(scratch / "cache"), "--target", str(site)]
    words += ["--python-platform", route.platform, "--python-version", route.python]
    done = subprocess.run([*words, str(route.lock)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Installed(route, site)


def test_exactly_the_locked_packages_are_there(installed: Installed) -> None:
    """Each has a wheel for the machine whose hash is in the lock; nothing had to be built."""
    wanted = {it.name: it.version for it in locks.parse(installed.route.lock.read_text())}
    found = runtime.versions(installed.site).items()
    assert {name.replace("_", "-").lower(): version for name, version in found} == wanted


def test_the_packages_are_what_their_records_say(installed: Installed) -> None:
    """The build refuses a runtime with a file that is not what a RECORD vouches for."""
    assert runtime.damaged(installed.site, set(), os.cpu_count() or 1) == []


def test_torch_is_the_one_for_cuda_13(installed: Installed) -> None:
    """The registry's torch for aarch64 is the CUDA build; elsewhere that differs by platform."""
    assert (runtime.torch_cuda(installed.site) or "").startswith("13.")


def test_libraries_are_for_the_machine(installed: Installed) -> None:
    """Whatever the engine loads is compiled for aarch64."""
    for package in ("torch", "vllm", "nvidia", "triton", "numpy", "tokenizers"):
        found = [it for it in (installed.site / package).rglob("*.so*") if it.is_file()]
        assert found, package
        for path in found:
            with path.open("rb") as handle:
                head = handle.read(20)
            if head[:4] == b"\x7fELF":
                assert struct.unpack("<H", head[18:20])[0] == AARCH64, path


def test_what_we_read_of_a_wheel_is_what_the_resolver_reads(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock made from the engine's wheel is the one that an index with the engine gives."""
    route = installed.route
    wanted = {it.name: it for it in locks.parse(route.lock.read_text()) if it.name != "vllm"}
    shutil.copytree(layout.LOCAL_LOCKS, tmp_path / "locks")
    monkeypatch.setattr(layout, "LOCAL_LOCKS", tmp_path / "locks")
    (info,) = installed.site.glob("vllm-*.dist-info")
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(info / "METADATA", f"{info.name}/METADATA")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    engine = replace(route.engine, sha256=digest, filename=wheel.name, location=str(wheel))
    lock = replace(locks.known()[route.name], engine=engine)
    locks.make(lock, wheel="")
    assert "What vllm asks for was read from its wheel" in lock.path("lock").read_text()
    found = {it.name: it for it in locks.parse(lock.path("lock").read_text())}
    assert found.pop("vllm").hashes == (digest,)
    assert found == wanted
