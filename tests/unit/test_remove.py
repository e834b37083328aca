"""`dsv4 remove`: what is ours goes, whatever else is there stays and is named."""

import contextlib
import grp
import importlib.util
import json
import os
import pwd
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4 import accounts, firewall, layout, lock, systemd, tree

SOURCE = Path(layout.__file__).with_name("remove.py")
RUNTIME = "lab-0123456789ab"
REVISION = "0123456789abcdef0123456789abcdef01234567"
VIEW = "0123456789abcdef"


class Killed(Exception):
    """The run ends here, as by a SIGKILL."""


@dataclass
class Machine:
    """A machine below a directory: its files are real, its units and accounts are told."""

    root: Path
    remove: Any
    units: dict[str, dict[str, str]] = field(default_factory=dict)
    users: dict[str, SimpleNamespace] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    ran: list[tuple[str, ...]] = field(default_factory=list)

    def at(self, path: Path | str) -> Path:
        """Return where a path of the machine is here."""
        return path if isinstance(path, Path) else self.root / path.lstrip("/")

    def put(self, path: Path | str, text: str = "x") -> Path:
        """Write a file."""
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def record(self, **sections: dict[str, Any]) -> None:
        """Write the record of what was put there."""
        self.put(layout.RECORD_JSON, json.dumps(sections))

    def plan(self, *, packs: bool = False) -> list[Any]:
        """Return what would be done."""
        found: list[Any] = self.remove.plan(packs=packs)
        return found

    def kept(self, *, packs: bool = False) -> set[str]:
        """Return what would be kept, by its place on the machine."""
        prefix = str(self.root)
        kept = (item for item in self.plan(packs=packs) if item.do == "keep")
        return {item.name.removeprefix(prefix) for item in kept}

    def pending(self, *, packs: bool = False) -> list[str]:
        """Return what is still to be done."""
        return [str(item) for item in self.plan(packs=packs) if item.do != "keep"]

    def go(self, *words: str) -> int:
        """Run the tool."""
        status: int = self.remove.main(list(words))
        return status

    def files(self) -> set[str]:
        """Return every path there is on the machine."""
        return {f"/{path.relative_to(self.root)}" for path in self.root.rglob("*")}

    def run(self, *command: str) -> str | None:
        """Stand for the programs that are called."""
        self.ran.append(command)
        match command:
            case ("systemctl", "stop", name):
                if name in self.units:
                    self.units[name]["ActiveState"] = "inactive"
            case ("systemctl", "disable", "--quiet", name):
                self.units[name]["UnitFileState"] = "disabled"
            case ("systemctl", "reset-failed", name):
                if self.units.get(name, {}).get("ActiveState") == "failed":
                    self.units[name]["ActiveState"] = "inactive"
            case ("userdel", name):
                del self.users[name]
            case ("groupdel", name):
                self.groups.discard(name)
        return None


def account(name: str, uid: int = 990, home: str = "/nonexistent") -> SimpleNamespace:
    """Return an account as we make them."""
    shell = "/usr/sbin/nologin"
    return SimpleNamespace(pw_name=name, pw_uid=uid, pw_gid=uid, pw_dir=home, pw_shell=shell)


def loaded_at(root: Path, patch: pytest.MonkeyPatch) -> Any:
    """Return the module as it is on a machine whose / is this directory."""
    for name, value in list(vars(layout).items()):
        if isinstance(value, Path) and name != "GIVEN":
            patch.setattr(layout, name, root / str(value).lstrip("/"))
    spec = importlib.util.spec_from_file_location("dsv4_remove_here", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(importlib.sys.modules, spec.name, module)  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without anything of ours."""
    here = Machine(tmp_path, loaded_at(tmp_path, monkeypatch))

    def show(unit: str, *names: str) -> dict[str, str]:
        return here.units.get(unit, {"ActiveState": "inactive", "LoadState": "not-found"})

    def getpwnam(name: str) -> SimpleNamespace:
        return here.users[name]

    def getgrnam(name: str) -> object:
        if name not in here.groups | here.users.keys():
            raise KeyError(name)
        return object()

    monkeypatch.setattr(firewall, "NFT", str(tmp_path / "nft"))
    monkeypatch.setattr(systemd, "show", show)
    monkeypatch.setattr(pwd, "getpwnam", getpwnam)
    monkeypatch.setattr(grp, "getgrnam", getgrnam)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(here.remove, "SHARED", ())
    monkeypatch.setattr(here.remove, "run", here.run)
    monkeypatch.setattr(here.remove, "end_processes", lambda name: None)
    here.at("/run").mkdir()
    layout.SYSTEMD.mkdir(parents=True)
    return here


@pytest.fixture
def deployed(machine: Machine) -> Machine:
    """A machine with everything that a deploy and some weeks of service leave on it."""
    for path in (
        *(layout.LIB / "dsv4-0123/remove.py", layout.DSV4, layout.LOCKS / "lab.lock"),
        layout.ROOT / "tools-0123/bin/python",
        layout.RUNTIMES / RUNTIME / "manifest.json",
        *(layout.WHEELS / "exllamav3-1.4.5.whl", layout.WHEELS / "exllamav3-1.4.5.whl.json"),
        *(layout.SERVE_YAML, layout.GUARD_JSON, layout.ENVIRONMENT, layout.FETCH_JSON),
        *(layout.BUILD_JSON, layout.API_KEY, layout.VIEW_NOTE, layout.LOADS_JSON),
        layout.CACHE / "triton/kernel",
        *(layout.WATCHDOG_RECORDS / "20261130T1200.json", layout.METRICS_FILE),
        layout.RECEIPTS / "0001-20261130T120000Z-deploy.json",
        *(layout.PACKS / "mixedk" / REVISION / "config.json", layout.FETCH_WANTED),
        *(layout.PACKS / "mixedk" / f"{REVISION}.{end}" for end in ("json", "hashed")),
        *(layout.UV_CACHE / "wheels/a", layout.LOGS / "build.log", layout.STARTED_JSON),
        *(
            layout.FETCH_PROGRESS,
            layout.WORK_LOCK,
            layout.PROFILE,
            layout.TMPFILES,
            layout.NEEDRESTART,
        ),
        *(layout.SYSTEMD / unit for unit in layout.UNITS),
    ):
        machine.put(path)
    for link, target in (
        (layout.LIB / "dsv4", "dsv4-0123"),
        (layout.TOOLS, "tools-0123"),
        (layout.CURRENT, f"runtimes/{RUNTIME}"),
        (layout.PREVIOUS, "runtimes/gone-0123456789ab"),
        (layout.VIEW_CURRENT, VIEW),
    ):
        link.symlink_to(target)
    view = layout.VIEWS / VIEW
    view.mkdir()
    (view / "a.safetensors").symlink_to(layout.PACKS / "mixedk" / REVISION / "a.safetensors")
    wants = layout.SYSTEMD / "multi-user.target.wants"
    wants.mkdir()
    (wants / layout.UNIT).symlink_to(layout.SYSTEMD / layout.UNIT)
    for unit in layout.UNITS:
        machine.units[unit] = {"ActiveState": "inactive", "LoadState": "loaded"}
    machine.units[layout.UNIT] |= {"ActiveState": "active", "UnitFileState": "enabled"}
    machine.units[layout.UNIT_WATCHDOG]["ActiveState"] = "active"
    machine.users = {name: account(name) for name in (layout.USER, layout.USER_FETCH)}
    machine.record(
        paths={str(layout.SERVE_YAML): {"step": "service", "kind": "file"}},
        users={layout.USER: {"step": "base"}, layout.USER_FETCH: {"step": "base"}},
        packages={"psmisc": {"step": "base"}},
    )
    return machine


BARE = {"/etc", "/etc/needrestart", "/etc/needrestart/conf.d", "/etc/profile.d", "/etc/systemd"}
BARE |= {"/etc/systemd/system", "/etc/tmpfiles.d", "/opt", "/run"}
BARE |= {"/var", "/var/cache", "/var/lib", "/var/log"}
"""The system's own directories, of which the fixture makes those it needs."""


def test_everything_goes_and_packs_stay(deployed: Machine) -> None:
    """Nothing is left but the packs, byte for byte, and the directories on the way to them."""
    kept = {path for path in deployed.files() if path.startswith("/var/lib/dsv4/packs")}
    assert deployed.go("--yes") == 0
    assert deployed.files() == BARE | kept | {"/var/lib/dsv4"}
    assert deployed.users == {}


def test_packs_go_along_when_told(deployed: Machine) -> None:
    """Then nothing of ours is left at all."""
    assert deployed.go("--yes", "--packs") == 0
    assert deployed.files() == BARE


def test_the_list_comes_first_and_touches_nothing(
    deployed: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --yes: the same list, no program run, no file changed."""
    before = {path: deployed.at(path).lstat().st_mtime_ns for path in deployed.files()}
    assert deployed.go() == 0
    said = capsys.readouterr()
    assert {path: deployed.at(path).lstat().st_mtime_ns for path in deployed.files()} == before
    assert deployed.ran == []
    assert "--yes does it" in said.err
    shown = said.out.splitlines()
    assert deployed.go("--yes") == 0
    assert capsys.readouterr().out.splitlines() == shown


def test_a_second_run_has_nothing_to_do(
    deployed: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs nothing and leaves nothing, not even a lock; what is kept it still names."""
    deployed.go("--yes")
    deployed.ran.clear()
    left = deployed.files()
    capsys.readouterr()
    assert deployed.go("--yes", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["pending"]) == (True, 0)
    assert [item["what"] for item in found["items"]] == ["packs"]
    assert deployed.ran == []
    assert deployed.files() == left


def test_a_machine_we_never_were_on(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to say and nothing to do."""
    assert machine.go("--yes") == 0
    assert capsys.readouterr().out == "nothing of ours is here\n"
    assert machine.ran == []


FOREIGN = [
    "/opt/dsv4/notes.txt",
    "/opt/dsv4/mine/deep/file",
    "/opt/dsv4/runtimes/my-own-venv/bin/python",
    "/opt/dsv4/wheels/readme",
    "/etc/dsv4/serve.yaml.bak",
    "/etc/dsv4/credentials/other",
    "/var/lib/dsv4/backup.tar",
    "/var/lib/dsv4/receipts/thoughts.md",
    "/var/lib/dsv4/views/mine/config.json",
    "/etc/systemd/system/dsv4.service.d/mine.conf",
]


@pytest.mark.parametrize("path", FOREIGN)
def test_what_is_not_ours_stays_and_is_named(deployed: Machine, path: str) -> None:
    """An owner's file in a directory of ours: it stays with the directories around it."""
    deployed.put(path, "mine")
    named = deployed.kept()
    assert any(path == name or path.startswith(f"{name}/") for name in named)
    assert deployed.go("--yes", "--packs") == 0
    assert deployed.at(path).read_text() == "mine"
    ways = {str(parent) for parent in Path(path).parents} | {path}
    assert deployed.files() - BARE == ways - BARE - {"/"}
    assert deployed.pending(packs=True) == []


@pytest.mark.parametrize("path", ["mine.bin", "mixedk/notes", "mixedk/notacommit/x"])
def test_a_file_of_ones_own_among_packs_outlives_them(deployed: Machine, path: str) -> None:
    """--packs takes what the download made and nothing else."""
    mine = deployed.put(layout.PACKS / path, "mine")
    assert deployed.go("--yes", "--packs") == 0
    assert mine.read_text() == "mine"
    assert not (layout.PACKS / "mixedk" / REVISION).exists()


def test_nothing_is_followed_through_a_link(deployed: Machine) -> None:
    """Neither one that we made nor one that somebody put in place of a directory of ours."""
    elsewhere = deployed.put("/srv/models/config.json").parent
    (layout.RUNTIMES / f"{RUNTIME}/pack").symlink_to(elsewhere)
    (layout.CACHE / "triton/link").symlink_to(elsewhere)
    (layout.LOGS / "build.log").unlink()
    layout.LOGS.rmdir()
    layout.LOGS.symlink_to(elsewhere)
    assert deployed.go("--yes", "--packs") == 0
    assert (elsewhere / "config.json").read_text() == "x"
    assert not layout.LOGS.is_symlink()


def test_what_is_mounted_stays(deployed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of the owner's on the cache: what is beside it goes, the disk's bytes do not."""
    disk = layout.CACHE / "triton"
    text = f"36 35 98:0 / {disk} rw,noatime - ext4 /dev/sdb rw\n"
    monkeypatch.setattr(deployed.remove, "mounts", lambda _: {Path(text.split()[4])})
    deployed.put(layout.CACHE / "beside")
    assert deployed.go("--yes", "--packs") == 0
    assert (disk / "kernel").exists()
    assert not (layout.CACHE / "beside").exists()
    assert f"{disk}".removeprefix(str(deployed.root)) in deployed.kept()


def test_mounts_are_read_with_their_blanks() -> None:
    """The kernel writes a blank as octal."""
    from dsv4 import remove

    text = "36 35 98:0 / /mnt/my\\040disk rw - ext4 /dev/sdb rw\n\n"
    assert remove.mounts(text) == {Path("/mnt/my disk")}


@pytest.mark.parametrize("damage", ["missing", "broken", "sections"])
def test_without_its_record_what_we_know_goes(deployed: Machine, damage: str) -> None:
    """A record that is lost or damaged: our names and the accounts' form have to do."""
    if damage == "missing":
        layout.RECORD_JSON.unlink()
    else:
        layout.RECORD_JSON.write_text("{" if damage == "broken" else '{"paths": 1, "users": []}')
    assert deployed.go("--yes", "--packs") == 0
    assert deployed.files() == BARE
    assert deployed.users == {}


def test_what_an_older_version_put_goes_by_the_record(deployed: Machine) -> None:
    """A path that this version has no name for, and the directory that was made for it."""
    old = deployed.put("/etc/oldplace/dsv4-old.conf")
    unit = deployed.put(layout.SYSTEMD / "dsv4-old.service")
    deployed.units["dsv4-old.service"] = {"ActiveState": "active", "LoadState": "loaded"}
    deployed.record(
        paths={
            str(old): {"step": "base", "kind": "file"},
            str(old.parent): {"step": "base", "kind": "dir", "made": True},
            str(unit): {"step": "service", "kind": "file"},
        }
    )
    assert deployed.go("--yes", "--packs") == 0
    assert deployed.files() == BARE
    assert ("systemctl", "stop", "dsv4-old.service") in deployed.ran


@pytest.mark.parametrize("made", [True, False])
def test_a_directory_of_the_system_stays(deployed: Machine, made: bool) -> None:
    """One that was there before, and one we made in which somebody has put something since."""
    parent = layout.NEEDRESTART.parent
    if made:
        deployed.put(parent / "other.conf")
        deployed.record(paths={str(parent): {"step": "base", "kind": "dir", "made": True}})
    assert deployed.go("--yes") == 0
    assert parent.is_dir()
    assert not layout.NEEDRESTART.exists()


def test_units_are_stopped_first_and_the_engine_before_its_guard(deployed: Machine) -> None:
    """No moment in which the engine runs unguarded; then systemd forgets them."""
    assert deployed.go("--yes") == 0
    stops = [command[2] for command in deployed.ran if command[:2] == ("systemctl", "stop")]
    assert stops == [layout.UNIT, layout.UNIT_WATCHDOG]
    assert ("systemctl", "disable", "--quiet", layout.UNIT) in deployed.ran
    reload = deployed.ran.index(("systemctl", "daemon-reload"))
    assert reload > max(i for i, command in enumerate(deployed.ran) if "stop" in command)
    assert deployed.ran.count(("systemctl", "daemon-reload")) == 1


def test_a_failed_unit_is_forgotten(deployed: Machine) -> None:
    """Else `systemctl --failed` would show it for ever."""
    deployed.units[layout.UNIT] = {"ActiveState": "failed", "LoadState": "loaded"}
    deployed.go("--yes")
    assert ("systemctl", "reset-failed", layout.UNIT) in deployed.ran


def test_a_bench_that_runs_is_stopped(deployed: Machine) -> None:
    """Its unit is transient and has no file."""
    deployed.units[layout.UNIT_BENCH] = {"ActiveState": "activating", "LoadState": "loaded"}
    deployed.go("--yes")
    assert ("systemctl", "stop", layout.UNIT_BENCH) in deployed.ran


def test_an_account_that_is_somebody_elses_stays(deployed: Machine) -> None:
    """A person named dsv4, with a home: neither the record nor its form says it is ours."""
    deployed.users[layout.USER] = account(layout.USER, home="/home/dsv4")
    deployed.record(users={layout.USER_FETCH: {"step": "base"}})
    assert deployed.go("--yes") == 0
    assert deployed.users.keys() == {layout.USER}
    assert ("userdel", layout.USER_FETCH) in deployed.ran


def test_a_group_that_outlives_its_account_goes(deployed: Machine) -> None:
    """userdel leaves one that has another member, as after `adduser somebody dsv4`."""
    deployed.groups.add(layout.USER)
    assert deployed.go("--yes") == 0
    assert ("groupdel", layout.USER) in deployed.ran
    assert deployed.groups == set()


def test_packs_that_stay_belong_to_root(deployed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their account goes, and its number may be given to the next account that is made."""
    me = layout.PACKS.lstat().st_uid
    deployed.users[layout.USER_FETCH] = account(layout.USER_FETCH, uid=me)
    given: list[tuple[str, int, int, bool]] = []

    def chown(path: Path, uid: int, gid: int, *, follow_symlinks: bool = True) -> None:
        given.append((path.name, uid, gid, follow_symlinks))

    monkeypatch.setattr(os, "chown", chown)
    assert deployed.go("--yes") == 0
    assert ("config.json", 0, 0, False) in given
    assert ("packs", 0, 0, False) in given


@pytest.mark.parametrize(
    ("tables", "ours"),
    [
        ("table inet filter\ntable inet dsv4\n", True),
        ("table inet filter\ntable inet dsv4-of-mine\ntable ip dsv4\n", False),
        ("", False),
    ],
)
def test_our_firewall_table_goes(deployed: Machine, tables: str, ours: bool) -> None:
    """It lives in the kernel and in no file, and would drop what comes until the next boot."""
    nft = Path(firewall.NFT)
    nft.write_text(f"#!/bin/sh\nprintf '%s' '{tables}'\n")
    nft.chmod(0o755)
    assert deployed.go("--yes") == 0
    assert ((str(nft), "delete", "table", "inet", "dsv4") in deployed.ran) is ours
    nft.unlink()
    assert deployed.pending() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_what_our_accounts_left_in_tmp_goes(
    deployed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries write there without being asked; others' files and links beside it stay."""
    shared = deployed.at("/tmp")
    ours = deployed.put("/tmp/torchinductor_dsv4/kernel").parent
    theirs = deployed.put("/tmp/theirs")
    monkeypatch.setattr(deployed.remove, "SHARED", (shared, deployed.at("/dev/shm")))
    os.chown(ours, 990, 990)
    (shared / "link").symlink_to(theirs)
    assert deployed.go("--yes") == 0
    assert not ours.exists()
    assert {path.name for path in shared.iterdir()} == {"theirs", "link"}


@pytest.fixture
def killed_at(deployed: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Run a removal that is killed before its n-th deed."""

    def run(deeds: int) -> None:
        carry_out = deployed.remove.carry_out
        left = iter(range(deeds))

        def until(items: Any) -> Iterator[Any]:
            for done in carry_out(items):
                yield done
                if next(left, None) is None:
                    raise Killed

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(deployed.remove, "carry_out", until)
            deployed.go("--yes", "--packs")

    return run


@pytest.mark.parametrize("deeds", range(0, 45, 4))
def test_a_run_that_was_killed_is_finished_by_the_next(
    deployed: Machine, killed_at: Callable[[int], None], deeds: int
) -> None:
    """At whatever deed it ends, the next run finds what is left, and systemd forgets the units."""
    killed_at(deeds)
    deployed.ran.clear()
    due = deployed.pending(packs=True)
    assert deployed.go("--yes", "--packs") == 0
    assert deployed.files() == BARE
    assert deployed.users == {}
    assert not due or ("systemctl", "daemon-reload") in deployed.ran


def test_the_record_is_the_last_to_go(deployed: Machine) -> None:
    """A run that is killed leaves the one file that says what else there was.

    After it only the lock, which is held to the end.
    """
    names = [item.name for item in deployed.plan(packs=True) if item.do == "remove"]
    assert names[-3:] == [str(layout.RECORD_JSON), str(layout.ETC), str(layout.WORK_LOCK)]


def test_what_would_not_go_is_said_and_the_rest_goes(
    deployed: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1, the path and why; whoever puts it right runs it again."""
    take_away = deployed.remove.take_away

    def stubborn(item: Any) -> str | None:
        if item.name == str(layout.TMPFILES):
            return f"Operation not permitted: {item.name}"
        found: str | None = take_away(item)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(deployed.remove, "take_away", stubborn)
        assert deployed.go("--yes", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == {str(layout.TMPFILES): f"Operation not permitted: {layout.TMPFILES}"}
    assert deployed.files() >= {"/etc/tmpfiles.d/dsv4.conf"}
    assert not layout.ROOT.exists()
    assert deployed.go("--yes") == 0
    assert not layout.TMPFILES.exists()


def test_a_deploy_at_work_is_not_undone(
    deployed: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another controller has the lock: nothing is touched; the run that has it goes on."""
    holder = {"owner": "ada", "host": "laptop", "since": "now", "token": "t1"}
    monkeypatch.setattr(lock, "read_holder", lambda path: holder)
    before = deployed.files()
    assert deployed.go("--yes") == 1
    assert "ada on laptop" in capsys.readouterr().err
    assert deployed.files() == before
    assert deployed.go() == 0
    assert deployed.go("--yes", "--token", "t1") == 0
    assert not layout.ROOT.exists()


def test_only_root_can(
    deployed: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not even see all there is."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    before = deployed.files()
    assert deployed.go("--yes") == 3
    assert "sudo dsv4 remove" in capsys.readouterr().err
    assert deployed.files() == before


def test_debian_packages_stay_and_are_named(deployed: Machine) -> None:
    """Others may need them by now; the record knows which came with us."""
    (item,) = [item for item in deployed.plan() if item.what == "Debian packages"]
    assert (item.do, item.name) == ("keep", "psmisc")
    assert not [command for command in deployed.ran if "apt-get" in command]


def test_accounts_are_recognised_as_they_are_made(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a record it is the form of them that counts: what makes them is what knows them."""
    made: list[list[str]] = []

    def note(section: str, names: dict[str, Any]) -> None:
        pass

    def useradd(command: list[str]) -> int:
        made.append(command)
        return 0

    monkeypatch.setattr(tree, "note", note)
    monkeypatch.setattr(accounts, "_run", useradd)
    assert accounts.main([layout.USER]) == 0
    (command,) = made
    home, shell = (command[command.index(word) + 1] for word in ("--home-dir", "--shell"))
    machine.users[layout.USER] = SimpleNamespace(
        pw_uid=990, pw_gid=990, pw_dir=home, pw_shell=shell
    )
    assert "remove account dsv4" in machine.pending()
