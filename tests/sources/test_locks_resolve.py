"""The locks are what the registry gives today for their pins: nothing more, nothing else.

Versions in a lock are kept, so a newer release is no difference; one that was withdrawn, or whose
files changed, is.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy import layout, locks

NAMES = [name for name, lock in locks.known().items() if lock.platform]


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_resolves_to_itself(name: str) -> None:
    """For its own machine and Python, to the byte."""
    lock = locks.known()[name]
    assert locks.resolve(lock) == lock.path("lock").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_still_has_every_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes are asked for anew: the resolver keeps those of a lock without looking.

    A release may have got files since, for another Python or machine; none may be gone.
    """
    locked = {it.name: it for it in locks.parse((layout.LOCAL_LOCKS / f"{name}.lock").read_text())}
    copy = tmp_path / "locks"
    shutil.copytree(layout.LOCAL_LOCKS, copy)
    bare = re.sub(r" \\\n +--hash=sha256:\w+", "", (copy / f"{name}.lock").read_text())
    (copy / f"{name}.lock").write_text(bare)
    monkeypatch.setattr(layout, "LOCAL_LOCKS", copy)
    served = {it.name: it for it in locks.parse(locks.resolve(locks.known()[name]))}
    assert {it.name: it.version for it in served.values()} == {
        it.name: it.version for it in locked.values()
    }
    gone = {it.name for it in locked.values() if not {*it.hashes} <= {*served[it.name].hashes}}
    assert not gone


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    """The hashes are what decides: the same package goes in with its own and not with another's."""
    lock = locks.known()["stable"]
    (six,) = (it for it in locks.parse(lock.path("lock").read_text()) if it.name == "six")

    def install(hashes: tuple[str, ...], site: Path) -> subprocess.CompletedProcess[str]:
        wanted = tmp_path / "lock"
        wanted.write_text(f"six=={six.version}" + "".join(f" --hash=sha256:{it}" for it in hashes))
        words = [locks.find_uv(), "pip", "sync", "--require-hashes", "--only-binary", ":all:"]
        words += ["--no-python-downloads", "--no-cache", "--target", str(site)]
        words += ["--python-platform", str(lock.platform), "--python-version", lock.python]
        return subprocess.run([*words, str(wanted)], capture_output=True, text=True, check=False)

    done = install(six.hashes, tmp_path / "good")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "good/six.py").is_file()
    refused = install(tuple(it[::-1] for it in six.hashes), tmp_path / "bad")
    assert refused.returncode != 0
    assert "Hash mismatch" in refused.stderr
    assert not (tmp_path / "bad/six.py").exists()
