"""The deploy's side of files and directories: it compares in the form the target describes."""

import grp
import json
import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import _tree
from deploy._state import State
from deploy._tree import Absent, Dir, Entry, File
from dsv4 import tree

ME = pwd.getpwuid(os.getuid()).pw_name
MINE = grp.getgrgid(os.getgid()).gr_name


def entries(root: Path) -> list[Entry]:
    """Return one entry of each kind, owned by whoever runs the tests."""
    return [
        Dir(path=root / "d", owner=ME, group=MINE, mode="750"),
        File(path=root / "d/f", content=b"\x00bytes\xff", owner=ME, group=MINE, mode="640"),
        Absent(path=root / "gone"),
    ]


def seen(entries: list[Entry]) -> State:
    """Return the state a target reports of these paths."""
    return State({"paths": {str(e.path): tree.describe(e.path) for e in entries}})


def carry_out(plan: str) -> None:
    """Do what the target does with a plan."""
    for entry in json.loads(plan)["entries"]:
        tree.put(tree.parse(entry))


def test_what_the_target_made_of_a_plan_is_settled(tmp_path: Path) -> None:
    """Both sides speak of the same things: a plan carried out leaves nothing due."""
    wanted = entries(tmp_path)
    (tmp_path / "gone").mkdir()
    assert _tree.due(seen(wanted), wanted) == wanted
    carry_out(_tree.plan("base", wanted))
    assert _tree.due(seen(wanted), wanted) == []


@pytest.mark.parametrize("spoil", ["content", "mode", "kind", "missing"])
def test_a_file_that_differs_in_anything_is_due(tmp_path: Path, spoil: str) -> None:
    """Each part counts, and only the entry concerned is due."""
    wanted = entries(tmp_path)
    carry_out(_tree.plan("base", wanted))
    path = tmp_path / "d/f"
    if spoil == "content":
        path.write_bytes(b"other")
    elif spoil == "mode":
        path.chmod(0o644)
    else:
        path.unlink()
        if spoil == "kind":
            path.symlink_to("/dev/null")
    assert _tree.due(seen(wanted), wanted) == [wanted[1]]


def test_owners_count(tmp_path: Path) -> None:
    """A file that belongs to somebody else is due."""
    wanted = entries(tmp_path)
    carry_out(_tree.plan("base", wanted))
    file = wanted[1]
    state = State({"paths": {str(file.path): {**tree.describe(file.path), "owner": "mallory"}}})
    assert _tree.due(state, [file]) == [file]


def test_on_a_machine_of_which_nothing_is_known_all_is_due(tmp_path: Path) -> None:
    """Except that nothing has to go: what is not there is absent."""
    wanted = entries(tmp_path)
    assert _tree.due(State({}), wanted) == wanted[:2]
    assert _tree.due(State({"paths": "broken"}), wanted) == wanted[:2]


def test_order_is_kept(tmp_path: Path) -> None:
    """A directory comes before what is in it."""
    plan = json.loads(_tree.plan("base", entries(tmp_path)))
    assert plan["step"] == "base"
    kinds = [entry["kind"] for entry in plan["entries"]]
    assert kinds == ["dir", "file", "absent"]


@given(content=st.binary(), name=st.text(st.characters(codec="utf-8", exclude_characters="/\0")))
def test_any_content_and_name_survive_the_journey(content: bytes, name: str) -> None:
    """JSON and base64 carry bytes and names of any kind unchanged."""
    path = Path("/x") / f"a{name}"
    (entry,) = json.loads(_tree.plan("s", [File(path=path, content=content)]))["entries"]
    parsed = tree.parse(entry)
    assert (parsed.path, parsed.content, parsed.mode) == (path, content, 0o644)
