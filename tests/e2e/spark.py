"""One lab machine as the end-to-end tests see it: deployed by the CLI, looked at through ssh.

State is asserted by what the machine itself says (ssh, HTTP), never through the facts under test.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab import machines, places, state

PYINFRA = str(places.VENV_PYTHON.with_name("pyinfra"))
DEPLOY_LIMIT_S = 600
SHARED = (
    *("-o", "ControlMaster=auto", "-o", "ControlPersist=15"),
    *("-o", f"ControlPath={tempfile.gettempdir()}/dsv4-e2e-{os.getpid()}-%C"),
)
"""One connection for all commands of a test: opening one takes ten times as long as its command."""

OURS = (
    "/opt/dsv4 /etc/dsv4 /var/lib/dsv4 /etc/systemd/system /etc/needrestart/conf.d /etc/profile.d"
)


@dataclass(frozen=True)
class Deployed:
    """How a deploy ended."""

    status: int
    output: str
    totals: dict[str, int] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    def require(self) -> "Deployed":
        """Return itself when it succeeded; fail the test with all it printed otherwise."""
        assert self.status == 0, self.output
        return self


@dataclass(frozen=True)
class Spark:
    """A machine of the lab, and the checkout it is deployed from."""

    name: str
    checkout: Path = places.REPO

    def argv(self, *extra: str, deploy: str = "deploy/full.py") -> list[str]:
        """Return the command line a person would type."""
        return [PYINFRA, "-y", "--json", *extra, "inventories/lab.py", deploy]

    def environment(self) -> dict[str, str]:
        """Return the environment that picks this machine in the lab's inventory."""
        return os.environ | {"DSV4_LAB_MACHINES": self.name}

    def deploy(self, *extra: str, deploy: str = "deploy/full.py") -> Deployed:
        """Run the deploy to its end."""
        done = subprocess.run(
            self.argv(*extra, deploy=deploy),
            cwd=self.checkout,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEPLOY_LIMIT_S,
            check=False,
        )
        return parse(done.returncode, done.stdout, done.stderr)

    def begin(self, *extra: str) -> "subprocess.Popen[str]":
        """Start a deploy and return it, to be killed or waited for."""
        return subprocess.Popen(
            self.argv(*extra),
            cwd=self.checkout,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ssh(self, command: str, *, check: bool = True) -> str:
        """Run a command on the machine as the unprivileged user."""
        program, *options = machines.ssh_argv(self.name)
        done = subprocess.run(
            [program, *SHARED, *options, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def root(self, command: str, *, check: bool = True) -> str:
        """Run a command on the machine as root."""
        return self.ssh(f"sudo sh -c {shlex.quote(command)}", check=check)

    def show(self, prop: str, unit: str = "dsv4.service") -> str:
        """Return one property of a unit."""
        return self.ssh(f"systemctl show -p {prop} --value {unit}")

    def wait_for(self, unit_state: str, limit_s: float = 180, unit: str = "dsv4.service") -> None:
        """Wait until a unit is in a state."""
        self.until(lambda: self.show("ActiveState", unit) == unit_state, limit_s)

    def until(self, condition: Any, limit_s: float = 60) -> None:
        """Wait until a condition holds; fail the test when it never does."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"not so after {limit_s:.0f} s: {condition}"
            time.sleep(0.3)

    @property
    def url(self) -> str:
        """Return where the model answers."""
        return f"http://127.0.0.1:{state.read().machines[self.name].serve_port}"

    def ask(self, prompt: str = "The capital of France is") -> str:
        """Return the model's answer."""
        body = {"model": "lab-tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            return str(json.load(response)["choices"][0]["text"])

    def manifest(self) -> dict[str, str]:
        """Return every path of ours with type, owner, mode and content, as the machine sees it.

        Left out is what records when or how often something happened.
        """
        skip = (
            "/opt/dsv4/runtimes/*/*|/opt/dsv4/tools-*/*|*/__pycache__*|/var/lib/dsv4/cache/*"
            "|/var/lib/dsv4/receipts/*|/var/lib/dsv4/watchdog/*|/var/lib/dsv4/metrics/*"
            "|/var/lib/dsv4/packs/*.json|/var/lib/dsv4/views/*.json|/var/lib/dsv4/loads.json"
            "|/etc/dsv4/record.json|*/.lock"
        )
        prune = " ".join(f"! -path {shlex.quote(pattern)}" for pattern in skip.split("|"))
        listing = self.root(
            f"find {OURS} {prune} -printf '%p\\t%y %u:%g %m %l\\n' 2>/dev/null | sort"
        )
        hashes = self.root(
            f"find {OURS} {prune} -type f -print0 2>/dev/null | xargs -0 -r sha256sum"
        )
        by_path = {line[66:]: line[:64] for line in hashes.splitlines()}
        return {
            path: f"{what} {by_path.get(path, '')}"
            for path, what in (line.split("\t") for line in listing.splitlines())
        }


def parse(status: int, stdout: str, stderr: str) -> Deployed:
    """Read what `pyinfra --json` printed; a run that failed early prints none."""
    try:
        results = json.loads(stdout)["results"]
    except (ValueError, KeyError):
        results = None
    if results is None:
        return Deployed(status, stdout + stderr)
    changed = tuple(
        name
        for operation in results["operations"]
        for name in operation["names"]
        if operation["success"]
    )
    return Deployed(status, stdout + stderr, results["totals"], changed)


def in_lab(command: str, name: str) -> None:
    """Run one of the lab's commands."""
    subprocess.run(
        ["bash", str(places.REPO / "tests/lab.sh"), command, name],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )


def blank(name: str) -> Spark:
    """Return a machine that was never deployed to."""
    in_lab("destroy", name)
    in_lab("prepare", name)
    return Spark(name)
