"""The service with a stand-in engine, on any machine one can run a root command on.

Puts a runtime of our own beside the deployed ones, whose `vllm` is `fake_engine.py`, and takes it
away again. Unit, hooks, watchdog and probe stay the deployed ones. Faults come in as a drop-in's
environment, so that nothing the deploy owns is edited, but for guard.json, which is put back.
"""

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

ENGINE = Path(__file__).with_name("fake_engine.py")
UNIT = "dsv4.service"
WATCHDOG = "dsv4-watchdog.service"
SYSTEMD = "/etc/systemd/system"
HOME = "/opt/dsv4/runtimes/fake"
MEMINFO = "/run/dsv4-fake-meminfo"
GIB_KB = 1 << 20


class Machine(Protocol):
    """What the rig needs of a machine."""

    def root(self, command: str, *, check: bool = True) -> str:
        """Run a shell command as root and return its output."""
        ...


def meminfo(available: float, free: float | None = None, total: float = 121.6) -> str:
    """Return a /proc/meminfo that says so, in GiB."""
    free = available if free is None else free
    rows = {"MemTotal": total, "MemFree": free, "MemAvailable": available, "Cached": 1.0}
    return "".join(f"{name}: {int(value * GIB_KB)} kB\n" for name, value in rows.items())


class Rig:
    """One machine whose service runs the stand-in engine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def root(self, command: str, *, check: bool = True) -> str:
        return self.machine.root(command, check=check)

    def write(self, path: str, data: str, mode: str = "644") -> None:
        text = base64.b64encode(data.encode()).decode()
        self.root(
            f"mkdir -p $(dirname {path}) && echo {text} | base64 -d > {path} && chmod {mode} {path}"
        )

    def overwrite(self, path: str, data: str) -> None:
        """Change a file's content and not the file: what has it open reads the new content."""
        text = base64.b64encode(data.encode()).decode()
        self.root(f"echo {text} | base64 -d > {path}.new && cat {path}.new > {path}")

    def show(self, prop: str, unit: str = UNIT) -> str:
        return self.root(f"systemctl show -p {prop} --value {unit}").strip()

    def pid(self, unit: str = UNIT) -> int:
        return int(self.show("MainPID", unit))

    def phase(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.root("cat /run/dsv4/phase.json"))
        return value

    def reason(self) -> str:
        return str(self.phase()["detail"].get("reason", ""))

    def log(self, seconds: int = 120) -> str:
        return self.root(f"journalctl -o cat --no-pager --since -{seconds}s -u 'dsv4*'")

    def trips(self) -> list[dict[str, Any]]:
        text = self.root("cat /var/lib/dsv4/watchdog/*.json 2>/dev/null || true").strip()
        decoder, found = json.JSONDecoder(), []
        while text:
            value, end = decoder.raw_decode(text)
            found.append(value)
            text = text[end:].lstrip()
        return found

    def until(self, what: str, condition: Any, seconds: float = 30.0) -> float:
        """Wait until a condition holds; return how long it took."""
        started = time.monotonic()
        while not condition():
            waited = time.monotonic() - started
            assert waited < seconds, f"{what}: not after {waited:.0f} s\n{self.log(30)[-3000:]}"
            time.sleep(0.05)
        return time.monotonic() - started

    def until_state(self, state: str, seconds: float = 30.0, unit: str = UNIT) -> float:
        return self.until(
            f"{unit} {state}", lambda: self.show("ActiveState", unit) == state, seconds
        )

    def fault(self, restart_s: float = 1, stop_s: float = 6, **environment: str | float) -> None:
        """Choose how the engine behaves from the next start on."""
        lines = [f"Environment=FAKE_{name}={value}" for name, value in environment.items()]
        times = [f"RestartSec={restart_s}s", f"TimeoutStopSec={stop_s}s"]
        self.write(f"{SYSTEMD}/{UNIT}.d/fake.conf", "\n".join(["[Service]", *times, *lines, ""]))
        self.root("systemctl daemon-reload")

    def guard(self, **changes: Any) -> None:
        """Change guard.json: sections are merged."""
        value = json.loads(self.root("cat /etc/dsv4/guard.json"))
        for name, change in changes.items():
            value[name] = {**value.get(name, {}), **change} if isinstance(change, dict) else change
        self.write("/etc/dsv4/guard.json", json.dumps(value))

    def watchdog_reads(self, text: str | None) -> None:
        """Give the watchdog another meminfo (None: the machine's own again)."""
        drop_in = f"{SYSTEMD}/{WATCHDOG}.d/fake.conf"
        if text is None:
            self.root(f"rm -f {drop_in}; systemctl daemon-reload")
            return
        self.write(MEMINFO, text)
        command = f"/opt/dsv4/bin/dsv4 watchdog --meminfo {MEMINFO}"
        self.write(drop_in, f"[Service]\nExecStart=\nExecStart={command}\n")
        self.root("systemctl daemon-reload")

    def start(self) -> tuple[bool, float]:
        """Start the service: whether systemd says that it serves, and how long that took."""
        self.root(f"systemctl reset-failed {UNIT} {WATCHDOG} 2>/dev/null", check=False)
        started = time.monotonic()
        said = self.root(f"systemctl start {UNIT} && echo yes || echo no")
        return said.strip().endswith("yes"), time.monotonic() - started

    def stop(self) -> None:
        self.root(f"systemctl stop {UNIT}")

    def end(self) -> None:
        """Stop an engine that does not listen, without giving it the time it has for that."""
        self.root(f"systemctl kill -s KILL {UNIT}; systemctl stop {UNIT}", check=False)


@contextmanager
def standing_in(machine: Machine) -> Iterator[Rig]:
    """Have the stand-in engine in service, and put everything back afterwards."""
    rig = Rig(machine)
    before = rig.root("readlink /opt/dsv4/current").strip()
    rig.stop()
    rig.root("cp -a /etc/dsv4/guard.json /etc/dsv4/.guard.json.real")
    rig.write(f"{HOME}/bin/vllm", ENGINE.read_text(), "755")
    rig.write(f"{HOME}/manifest.json", '{"schema": 1, "route": "fake"}')
    rig.root("ln -sfn runtimes/fake /opt/dsv4/current")
    rig.fault()
    try:
        yield rig
    finally:
        rig.root(f"systemctl stop {UNIT} {WATCHDOG}", check=False)
        rig.root(f"rm -rf {HOME} {SYSTEMD}/{UNIT}.d/fake.conf {SYSTEMD}/{WATCHDOG}.d/fake.conf")
        # The directories as well: what is not the product's, its removal leaves
        dirs = " ".join(f"{home}/systemd/system/dsv4*.service.d" for home in ("/etc", "/run"))
        rig.root(f"rmdir --ignore-fail-on-non-empty {dirs} 2>/dev/null", check=False)
        rig.root("mv /etc/dsv4/.guard.json.real /etc/dsv4/guard.json")
        rig.root(f"ln -sfn {before} /opt/dsv4/current")
        rig.root(
            f"systemctl daemon-reload; systemctl reset-failed {UNIT} {WATCHDOG} 2>/dev/null",
            check=False,
        )
