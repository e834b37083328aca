"""The lab's data, and how its machines are started."""

import json
from pathlib import Path

import pytest

from tests.lab import cgroups, image, keeper, places, state, venv_check


def two_machines() -> state.State:
    return state.State(
        {"dsv4-lab": state.Machine(2222, 8899), "other": state.Machine(2223, 8900, "/srv/wheels")},
        8790,
    )


def test_state_survives_being_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"schema": 1, "later": True} | two_machines().as_json()))
    assert state.read(path) == two_machines()


def test_a_lab_that_was_never_used_is_empty(tmp_path: Path) -> None:
    assert state.read(tmp_path / "state.json") == state.State()


@pytest.mark.parametrize("text", ["", "[]", '{"machines": {"a": {}}}', '{"machines": []}'])
def test_a_broken_state_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="broken"):
        state.read(path)


def test_ports_are_promised_once() -> None:
    taken = two_machines().ports()
    assert taken == {2222, 8899, 2223, 8900, 8790}
    assert state.free_port(2222, taken, lambda port: port != 2224) == 2225


def test_hosts_share_a_hub_and_nothing_else() -> None:
    hosts = dict(state.hosts(two_machines(), None))
    assert list(hosts) == ["dsv4-lab", "other"]
    assert {data["hub_endpoint"] for data in hosts.values()} == {"http://127.0.0.1:8790"}
    for key in ("ssh_port", "serve_port", "ssh_known_hosts_file"):
        assert hosts["dsv4-lab"][key] != hosts["other"][key]
    assert hosts["other"]["wheel_mirror"] == "/srv/wheels"


def test_machines_can_be_picked() -> None:
    assert [name for name, _ in state.hosts(two_machines(), "other, ")] == ["other"]


@pytest.mark.parametrize(
    ("lab", "wanted", "words"),
    [
        (state.State(), None, "no lab machine yet"),
        (two_machines(), "third,other", "no lab machine called third"),
    ],
)
def test_a_machine_that_is_not_there_is_no_quiet_success(
    lab: state.State, wanted: str | None, words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        state.hosts(lab, wanted)


HYBRID = """\
27 22 0:24 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
28 27 0:25 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
29 27 0:26 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
30 27 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
UNIFIED = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_groups_are_found_in_a_hybrid_tree() -> None:
    own = "9:name=systemd:/ci\n4:memory:/limit\n0::/\n"
    assert cgroups.own_groups(HYBRID, own) == [
        Path("/sys/fs/cgroup/systemd/ci"),
        Path("/sys/fs/cgroup/unified"),
    ]


def test_groups_are_found_in_a_unified_tree() -> None:
    assert cgroups.own_groups(UNIFIED, "0::/a/b.scope\n") == [Path("/sys/fs/cgroup/a/b.scope")]


def test_a_host_without_groups_has_none() -> None:
    assert cgroups.own_groups("", "0::/\n") == []


def test_keep_unit_only_where_nobody_gives_scopes() -> None:
    assert "--keep-unit" in keeper.nspawn_argv("m", [], booted=False, capabilities=0)
    assert "--keep-unit" not in keeper.nspawn_argv("m", [], booted=True, capabilities=0)


def test_memory_locks_are_granted_where_the_host_may_lock() -> None:
    status = "Name:\tx\nCapBnd:\t000001fffeffffff\n"
    granted = keeper.nspawn_argv("m", [], False, keeper.bounding_set(status))
    assert "--capability=CAP_IPC_LOCK" in granted
    assert "--capability=CAP_IPC_LOCK" not in keeper.nspawn_argv("m", [], False, 0)


def test_the_host_distribution_is_read_as_shells_write_it() -> None:
    assert image.os_id('PRETTY_NAME="Debian"\nID=debian\nVERSION_ID="12"\n') == "debian"
    assert image.os_id('ID="ubuntu"\nID_LIKE=debian\n') == "ubuntu"


@pytest.mark.parametrize("name", ["dsv4-lab", "a1", "x" * 32])
def test_names_that_work_as_host_names(name: str) -> None:
    assert places.NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a b", "../x", "a_b", "1a", "x" * 33])
def test_names_that_do_not(name: str) -> None:
    assert not places.NAME.fullmatch(name)


def installed(site: Path) -> None:
    (site / "thing-1.dist-info").mkdir()
    (site / "thing.py").write_text("x = 1\n")
    (site / "thing-1.dist-info/RECORD").write_text(
        "thing.py,sha256=abc,6\n__pycache__/thing.cpython-311.pyc,,\nthing-1.dist-info/RECORD,,\n"
    )


def test_a_whole_environment_is_undamaged(tmp_path: Path) -> None:
    installed(tmp_path)
    assert venv_check.damage(tmp_path) == []


def test_missing_and_cut_off_files_are_damage(tmp_path: Path) -> None:
    installed(tmp_path)
    (tmp_path / "thing.py").write_text("x")
    assert venv_check.damage(tmp_path) == ["thing.py"]
    (tmp_path / "thing.py").unlink()
    assert venv_check.damage(tmp_path) == ["thing.py"]


def test_an_environment_without_packages_is_damaged(tmp_path: Path) -> None:
    assert venv_check.damage(tmp_path)
