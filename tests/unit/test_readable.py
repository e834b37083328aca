"""What a user cannot read is said with the part of the path that is in the way."""

import os
from pathlib import Path

import pytest

from dsv4 import readable

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub cache in a home directory: a snapshot of links to blobs."""
    base = tmp_path_factory.mktemp("home")
    for above in (base, *list(base.parents)[:2]):
        above.chmod(0o755)
    blobs, snapshot = base / "me/cache/blobs", base / "me/cache/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_bytes(b"shard")
    (snapshot / "a.safetensors").symlink_to("../../blobs/1")
    return base


def asked(home: Path) -> str | None:
    return readable.as_user("nobody", [home / "me/cache/snapshots/abc/a.safetensors"])


@needs_root
def test_an_open_way_is_no_obstacle(home: Path) -> None:
    assert asked(home) is None


@needs_root
@pytest.mark.parametrize(
    ("closed", "mode", "words"),
    [
        ("me", 0o750, "me may not be entered (drwxr-x---, root's)"),
        ("me/cache/snapshots", 0o700, "me/cache/snapshots may not be entered (drwx------, root's)"),
        ("me/cache/blobs", 0o700, "me/cache/blobs may not be entered (drwx------, root's)"),
        ("me/cache/blobs/1", 0o600, "me/cache/blobs/1 may not be read (-rw-------, root's)"),
    ],
)
def test_the_first_closed_part_is_named(home: Path, closed: str, mode: int, words: str) -> None:
    (home / closed).chmod(mode)
    assert asked(home) == f"{home}/{words}"


@needs_root
def test_a_directory_that_is_a_link_is_followed(home: Path) -> None:
    real = home / "disk/pack"
    real.mkdir(parents=True)
    (real / "b.safetensors").write_bytes(b"x")
    (home / "link").symlink_to(home / "disk/pack")
    path = home / "link/b.safetensors"
    assert readable.as_user("nobody", [path]) is None
    (home / "disk").chmod(0o700)
    found = readable.as_user("nobody", [path])
    assert found == f"{home}/disk may not be entered (drwx------, root's)"


@needs_root
def test_a_link_to_nothing_and_a_circle_end(home: Path) -> None:
    (home / "gone").symlink_to(home / "nowhere")
    assert "is not there" in (readable.as_user("nobody", [home / "gone"]) or "")
    (home / "x").symlink_to(home / "y")
    (home / "y").symlink_to(home / "x")
    assert "in a circle" in (readable.as_user("nobody", [home / "x"]) or "")


def test_without_the_account_nothing_is_asked(home: Path) -> None:
    assert readable.as_user("no-such-user", [home / "none"]) is None
