"""The real command line, on hosts that do not exist: bad settings stop before the first operation.

The deploy file here does nothing but read settings and change something, so that what is tested is
how a refusal comes out of pyinfra.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import settings

REPO = Path(__file__).resolve().parents[2]
PYINFRA = str(Path(sys.executable).parent / "pyinfra")

DEPLOY = """
from pyinfra.operations import server

from deploy import settings

settings.check()
server.shell(name="Say the port", commands=[f"echo {settings.current().serve_port}"])
"""

HOST = {"fake_delay": 0, "fake_delay_jitter": 0, "route": "lab"}


@pytest.fixture
def pyinfra(tmp_path: Path) -> Any:
    """Return a function that runs pyinfra with a small inventory and deploy."""
    (tmp_path / "deploy_it.py").write_text(DEPLOY)

    def run(hosts: dict[str, dict[str, object]], *options: str) -> subprocess.CompletedProcess[str]:
        entries = [(f"@fake/{name}", {**HOST, **data}) for name, data in hosts.items()]
        (tmp_path / "inventory.py").write_text(f"spark = {entries!r}\n")
        return subprocess.run(
            [
                PYINFRA,
                "--dry",
                "--json",
                *options,
                str(tmp_path / "inventory.py"),
                str(tmp_path / "deploy_it.py"),
            ],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO), "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run


def test_good_settings_make_a_plan(pyinfra: Any) -> None:
    done = pyinfra({"a": {}, "b": {"serve_port": 8900}})
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(done.stdout)["plan"]
    assert step["hosts_with_change"] == ["@fake/a", "@fake/b"]


def test_faults_of_all_hosts_come_at_once_and_nothing_is_planned(pyinfra: Any) -> None:
    done = pyinfra(
        {
            "a": {"serve_gpu_memory_utilization": "0,85", "serve_prot": 1},
            "b": {"pack_dir": "models/x"},
            "c": {"route": "fork"},
            "d": {},
        }
    )
    assert done.returncode == 1
    assert done.stdout == ""
    for line in (
        "pyinfra error: the settings are wrong, nothing was changed:",
        "@fake/a: serve_gpu_memory_utilization: must be between 0.05 and 0.95 (got 0,85: write"
        " 0.85 with a point); set it in inventories/group_data/",
        "@fake/a: serve_prot: is no setting (did you mean serve_port?)",
        "@fake/b: pack_dir: must be an absolute path",
        "@fake/c: route: fork is made of archived wheels that nobody publishes; name yours with",
    ):
        assert line in done.stderr
    assert "@fake/d:" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (REPO / "pyinfra-debug.log").exists()


def test_the_command_line_is_checked_for_all_hosts(pyinfra: Any) -> None:
    """`--data` takes any key; one that is no setting must not be taken in silence."""
    words = {
        "serve_prot=1": "serve_prot: is no setting (did you mean serve_port?)",
        "serve_gpu_memory_utilization=NaN": "must be between 0.05 and 0.95 (got nan); it came from"
        " --data, give it anew there",
        "preset=128k": "preset: must be one of first-boot, 64k",
        "serve_host=0.0.0.0": "set serve_api_key to true",
    }
    done = pyinfra({"a": {}, "b": {}}, *(part for word in words for part in ("--data", word)))
    assert done.returncode == 1
    assert done.stdout == ""
    for fault in words.values():
        (line,) = [line for line in done.stderr.splitlines() if fault in line]
        assert line.strip().startswith("@fake/a, @fake/b: ")
    assert "Traceback" not in done.stderr


def test_values_of_the_command_line_are_read_as_pyinfra_hands_them_over(pyinfra: Any) -> None:
    words = ["serve_port=9000", "serve_enforce_eager=true", "serve_gpu_memory_utilization=0.2"]
    done = pyinfra({"a": {}}, *(part for word in words for part in ("--data", word)))
    assert done.returncode == 0, done.stderr


def test_a_host_left_out_is_checked_without_the_command_line(pyinfra: Any) -> None:
    hosts: dict[str, dict[str, object]] = {
        name: {"ssh_hostname": "127.0.0.1", "ssh_port": port, "serve_port": port + 1000}
        for name, port in {"a": 2222, "b": 2223}.items()
    }
    assert pyinfra(hosts, "--data", "serve_port=9000").returncode == 1
    limited = pyinfra(hosts, "--limit", "@fake/a", "--data", "serve_port=9000")
    assert limited.returncode == 0, limited.stderr
    hosts["b"]["serve_prot"] = 1
    assert pyinfra(hosts, "--limit", "@fake/a").returncode == 1


def test_the_inventory_to_edit_is_right_as_it_stands() -> None:
    """What a newcomer starts from holds settings only, and the values that it says it has."""
    words = [PYINFRA, "--json", "inventories/spark.py", "debug-inventory"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=True)
    (host,) = json.loads(done.stdout)
    assert host["data"]["_sudo"] is True
    chosen = settings.load(host["data"])
    assert (chosen.route, chosen.preset, chosen.pack) == ("nightly", "64k", "mixedk")
