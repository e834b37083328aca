"""The run-book through the real command line, on hosts that do not exist.

Only the command line orders operations by source lines, so only it can show that two hosts share
every operation, that each has one name, and that they come in the order of `deploy/full.py`.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
PYINFRA = str(Path(sys.executable).parent / "pyinfra")
FAKE: dict[str, object] = {"fake_delay": 0, "fake_delay_jitter": 0}


def machine(**found: object) -> dict[str, object]:
    """Return a host whose machine says this of itself; our tools are not there yet."""
    return {**FAKE, "fake_responses": {"DSV4_MACHINE": json.dumps({"machine": found})}}


def run(
    directory: Path,
    hosts: dict[str, dict[str, object]],
    deploy: str = "deploy/full.py",
    mode: str = "--dry",
) -> subprocess.CompletedProcess[str]:
    """Plan a deploy of these hosts with the lab's settings, or carry it out."""
    entries = [(f"@fake/{name}", {"_sudo": True, **data}) for name, data in hosts.items()]
    (directory / "inventory.py").write_text(f"lab = {entries!r}\n")
    return subprocess.run(
        [
            PYINFRA,
            mode,
            "--json",
            *("--group-data", str(REPO / "inventories/group_data")),
            str(directory / "inventory.py"),
            deploy,
        ],
        cwd=REPO,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def steps() -> list[tuple[str, str]]:
    """Return module and function of each line of the run-book."""
    found = []
    for node in ast.parse((REPO / "deploy/full.py").read_text()).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            module, _, function = ast.unparse(node.value.func).partition(".")
            if module != "settings":
                found.append((module, function))
    return found


def names_in_source() -> list[str]:
    """Return the operations' names as the run-book and its steps have them."""
    found: list[str] = []
    for module, function in steps():
        step: Any = getattr(importlib.import_module(f"deploy.{module}"), function)
        source = ast.parse((REPO / f"deploy/{module}.py").read_text())
        body = next(
            node
            for node in source.body
            if isinstance(node, ast.FunctionDef) and node.name == function
        )
        calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
        names = [
            (call.lineno, str(keyword.value.value))
            for call in calls
            for keyword in call.keywords
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
        ]
        found += [f"{step._inner.deploy_name} | {name}" for _, name in sorted(names)]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The plan for two hosts of which nothing is known."""
    return run(tmp_path_factory.mktemp("bare"), {"a": FAKE, "b": {**FAKE, "serve_port": 8900}})


def test_a_bare_host_can_be_planned(bare: subprocess.CompletedProcess[str]) -> None:
    """The first thing an owner does."""
    assert bare.returncode == 0, bare.stderr
    assert "Traceback" not in bare.stderr


def test_both_hosts_share_every_operation(bare: subprocess.CompletedProcess[str]) -> None:
    """One name each, no name twice, one order: that of the run-book."""
    plan = json.loads(bare.stdout)["plan"]
    assert [len(step["names"]) for step in plan] == [1] * len(plan)
    names = [step["names"][0] for step in plan]
    assert len(set(names)) == len(names)
    assert names == names_in_source()


def test_a_bare_host_gets_everything(bare: subprocess.CompletedProcess[str]) -> None:
    """All but what follows from what is not there yet."""
    plan = json.loads(bare.stdout)["plan"]
    quiet = [step["names"][0] for step in plan if not step["hosts_with_change"]]
    assert quiet == [
        "CUDA path | Set the CUDA path",
        "Model download | End a download that is not wanted any more",
        "Model download | Hand over the Hub token",
        "Runtime | Pin files without a published hash",
        "Service | Have an API key",
        "Service | Renew the watchdog",
        "Verify | Verify what is served",
        "Old packs | Remove packs that nothing serves",
    ]
    assert not any(step["hosts_with_conditional_change"] for step in plan)
    hosts = {tuple(step["hosts_with_change"]) for step in plan if step["hosts_with_change"]}
    assert hosts == {("@fake/a", "@fake/b")}


START = """
from deploy import base, preflight, settings

settings.check()
preflight.apply()
base.apply()
"""


def test_a_machine_that_cannot_do_it_is_left_out(tmp_path: Path) -> None:
    """Every reason at once; nothing is run there, and the other machine gets its deploy."""
    wrong = machine(arch="aarch64", reboot_required=True, systemd=False)
    (tmp_path / "start.py").write_text(START)
    hosts = {"a": wrong, "b": machine(arch="x86_64")}
    done = run(tmp_path, hosts, str(tmp_path / "start.py"), "-y")
    assert done.returncode == 1
    operations = json.loads(done.stdout)["results"]["operations"]
    assert len(operations) == 4
    assert all(step["success"] == ["@fake/b"] for step in operations)
    for reason in (
        "architecture: wanted x86_64, found aarch64; route lab is not for this machine",
        "systemd: wanted running, found not running",
        "reboot: wanted none pending, found required; reboot the machine, then deploy",
    ):
        assert f"[@fake/a] {reason}" in done.stderr
    assert "[@fake/b] architecture" not in done.stderr


def test_one_machine_that_cannot_do_it_ends_the_run(tmp_path: Path) -> None:
    """Nothing is left to plan: exit status 1, reasons without a traceback."""
    done = run(tmp_path, {"a": machine(arch="aarch64")})
    assert done.returncode == 1
    assert "[@fake/a] architecture: wanted x86_64, found aarch64" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_can_be_planned_alone(tmp_path: Path) -> None:
    """`pyinfra INVENTORY deploy.service.apply`."""
    done = run(tmp_path, {"a": FAKE}, "deploy.service.apply")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]
