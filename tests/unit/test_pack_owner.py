"""What a chown or chmod did to a pack is noticed, put right and read again."""

import os
from pathlib import Path
from typing import Any

import pytest

from dsv4 import pack_owner, pack_verify, state, store

NOBODY = 65534
FETCHER = 4242

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    """One complete pack of the fetcher's."""
    root = tmp_path / "mine/rev"
    (root / "sub").mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    for name in ("a.safetensors", "sub/b.json"):
        (root / name).write_bytes(name.encode())
        facts = (root / name).stat()
        files[name] = {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "verified": "then"}
    store.write_json(root.with_name("rev.json"), {"complete": True, "files": files})
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, FETCHER, FETCHER)
    for above in list(tmp_path.parents)[:2]:
        above.chmod(0o755)
    return tmp_path


def files(packs: Path) -> dict[str, Any]:
    found: dict[str, Any] = store.read_json_or(packs / "mine/rev.json", {})["files"]
    return found


def faults(packs: Path) -> list[str]:
    root = packs / "mine/rev"
    return [str(one) for one in pack_verify.touched(root, files(packs), FETCHER)]


def mend(packs: Path) -> dict[str, list[str]]:
    """As the command does, for a user that needs no account."""
    found = pack_owner.by_pack(packs, pack_owner.mend(packs, FETCHER, FETCHER))
    for root, names in found.items():
        pack_verify.doubt(root, names)
        os.chown(root.with_name("rev.json"), FETCHER, FETCHER)
    return {root.name: names for root, names in found.items()}


@needs_root
def test_an_untouched_pack_is_left_alone(packs: Path) -> None:
    before = (packs / "mine/rev.json").stat().st_ino
    assert faults(packs) == []
    assert mend(packs) == {}
    assert (packs / "mine/rev.json").stat().st_ino == before


@needs_root
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: os.chown(path, NOBODY, NOBODY), "belongs to nobody now"),
        (lambda path: os.chown(path, 54321, NOBODY), "belongs to user 54321 now"),
        (lambda path: path.chmod(0o666), "has the mode 666"),
        (lambda path: path.chmod(0o600), "has the mode 600"),
    ],
)
@pytest.mark.parametrize("name", ["a.safetensors", "sub/b.json"])
def test_a_file_that_others_could_change_is_read_again(
    packs: Path, spoil: Any, words: str, name: str
) -> None:
    spoil(packs / "mine/rev" / name)
    assert faults(packs) == [f"{name}: {words}"]
    assert mend(packs) == {"rev": [name]}
    assert faults(packs) == [f"{name}: is to be verified again"]
    assert [one for one, row in files(packs).items() if row["verified"] is None] == [name]
    assert (packs / "mine/rev.json").stat().st_uid == FETCHER


def test_what_a_power_cut_may_have_cost_is_no_complete_pack(
    packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was verified and not yet on the disk counts for that boot; then it is hashed."""
    record = packs / "mine/rev.json"
    known = store.read_json_or(record, {})
    known["files"]["a.safetensors"]["unsettled"] = pack_verify.BOOT
    store.write_json(record, known)
    assert state.packs(packs, "no-such-user")["mine"]["rev"]["complete"] is True
    monkeypatch.setattr(pack_verify, "BOOT", "the next one")
    found = state.packs(packs, "no-such-user")["mine"]["rev"]
    assert found["complete"] is False
    assert found["error"] == "a.safetensors: is to be verified again"


@needs_root
def test_a_link_is_not_followed(packs: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Or whoever the packs belong to could have root give away any file."""
    other = tmp_path_factory.mktemp("other") / "precious"
    other.write_text("root's")
    shard = packs / "mine/rev/a.safetensors"
    shard.unlink()
    shard.symlink_to(other)
    (packs / "mine/rev/dir").symlink_to(other.parent)
    assert faults(packs) == ["a.safetensors: is no regular file any more"]
    mend(packs)
    assert other.stat().st_uid == 0
    assert other.parent.stat().st_uid == 0


@needs_root
def test_nothing_of_the_fetchers_leads_root_elsewhere(
    packs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A pack's directory that is a link; a second name of a file that is somebody else's."""
    other = tmp_path_factory.mktemp("etc")
    (other / "d").mkdir()
    (other / "d/shadow").write_text("root's")
    (packs / "evil").symlink_to(other)
    os.link(other / "d/shadow", packs / "mine/rev/a.bin")
    mend(packs)
    assert {path.stat().st_uid for path in (other, *other.rglob("*"))} == {0}
    assert not (packs / "mine/rev/a.bin").exists()
    assert (other / "d/shadow").read_text() == "root's"


@needs_root
def test_what_two_revisions_share_is_given_back(packs: Path) -> None:
    """A link between packs is the fetcher's own doing, and not fetched again."""
    (packs / "mine/next").mkdir()
    os.link(packs / "mine/rev/a.safetensors", packs / "mine/next/a.safetensors")
    os.chown(packs / "mine/rev/a.safetensors", 0, 0)
    mend(packs)
    assert (packs / "mine/next/a.safetensors").stat().st_uid == FETCHER
    assert (packs / "mine/next/a.safetensors").stat().st_nlink == 2


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o700, 0o777])
@pytest.mark.parametrize("where", ["mine", "mine/rev", "mine/rev/sub"])
def test_modes_of_directories_are_put_right(packs: Path, mode: int, where: str) -> None:
    (packs / where).chmod(mode)
    assert [line.partition(": ")[2] for line in faults(packs)] == [f"has the mode {mode:o}"]
    mend(packs)
    assert faults(packs) == []
    assert (packs / where).stat().st_mode & 0o777 == 0o755


@needs_root
def test_directories_are_given_back_too(packs: Path) -> None:
    os.chown(packs / "mine/rev", 0, 0)
    assert faults(packs) == [".: belongs to root now"]
    mend(packs)
    assert faults(packs) == []


def command(words: list[str]) -> int:
    """Run it in a process of its own: it goes on as the user it gives the packs to."""
    child = os.fork()
    if child == 0:
        os._exit(pack_owner.main([*words, "--user", "nobody"]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_root
def test_the_command_needs_the_account(packs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--packs", str(packs)]
    assert pack_owner.main([*words, "--user", "no-such-user"]) == 3
    assert "no-such-user" in capfd.readouterr().err
    assert command(words) == 0
    assert (packs / "mine/rev/a.safetensors").stat().st_uid == NOBODY
    assert "were not nobody's alone" in capfd.readouterr().err
    assert command(words) == 0
    assert capfd.readouterr().err == ""


@needs_root
def test_the_deploy_sees_it(packs: Path) -> None:
    """A pack that was touched is not complete, so the next deploy starts the fetcher."""
    os.chown(packs / "mine/rev/a.safetensors", 0, 0)
    user = "nobody"
    for path in (packs / "mine", *(packs / "mine").rglob("*")):
        if path.name != "a.safetensors":
            os.chown(path, NOBODY, NOBODY)
    found = state.packs(packs, user)["mine"]["rev"]
    assert (found["complete"], found["error"]) == (False, "a.safetensors: belongs to root now")
    os.chown(packs / "mine/rev/a.safetensors", NOBODY, NOBODY)
    assert state.packs(packs, user)["mine"]["rev"]["complete"] is True
    (packs / "mine/rev/a.safetensors").write_bytes(b"other bytes!")
    assert state.packs(packs, user)["mine"]["rev"]["complete"] is False
