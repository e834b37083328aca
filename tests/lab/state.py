"""Names and ports of the lab's machines: one small JSON file, and what the inventory makes of it.

Reading needs the standard library only: pyinfra loads this through `inventories/lab.py`.
"""

import json
import socket
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.lab import places


@dataclass
class Machine:
    """What the lab decided about one machine, once; it keeps its ports across `down` and `up`."""

    ssh_port: int
    serve_port: int
    wheel_mirror: str | None = None


@dataclass
class State:
    """Every machine by name, and the port of the one hub they share."""

    machines: dict[str, Machine] = field(default_factory=dict)
    hub_port: int | None = None

    def ports(self) -> set[int]:
        """Return every port already promised to something."""
        used = {self.hub_port} if self.hub_port else set()
        for machine in self.machines.values():
            used |= {machine.ssh_port, machine.serve_port}
        return used

    def as_json(self) -> dict[str, Any]:
        """Return the form that is written."""
        return {
            "hub_port": self.hub_port,
            "machines": {name: asdict(machine) for name, machine in self.machines.items()},
        }


def parse(value: object) -> State:
    """Read a state file's content; keys of a later version are ignored."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    state = State(hub_port=value.get("hub_port"))
    for name, entry in value.get("machines", {}).items():
        state.machines[name] = Machine(
            ssh_port=int(entry["ssh_port"]),
            serve_port=int(entry["serve_port"]),
            wheel_mirror=entry.get("wheel_mirror"),
        )
    return state


def read(path: Path = places.STATE) -> State:
    """Return the lab's state; no file is an empty lab."""
    try:
        return parse(json.loads(path.read_text()))
    except FileNotFoundError:
        return State()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"{path}: broken ({error!r}); remove it and {places.HOME}, then run tests/lab.sh up"
        ) from error


def is_free(port: int) -> bool:
    """Tell whether nothing listens on a loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port(lowest: int, taken: Collection[int], free: Callable[[int], bool] = is_free) -> int:
    """Return the lowest port from `lowest` that nobody has and nothing listens on."""
    for port in range(lowest, lowest + 1000):
        if port not in taken and free(port):
            return port
    raise SystemExit(f"no free port in {lowest}-{lowest + 999}; stop something that listens there")


def host_data(state: State, name: str) -> dict[str, Any]:
    """Return what pyinfra must know of one machine and only the lab can tell."""
    machine = state.machines[name]
    return {
        "ssh_hostname": "127.0.0.1",
        "ssh_port": machine.ssh_port,
        "ssh_user": places.USER,
        "ssh_key": str(places.SSH_KEY),
        "ssh_known_hosts_file": str(places.MACHINES / name / "known_hosts"),
        "ssh_strict_host_key_checking": "yes",
        "hub_endpoint": f"http://127.0.0.1:{state.hub_port}" if state.hub_port else None,
        "wheel_mirror": machine.wheel_mirror,
        "serve_port": machine.serve_port,
        "pins_dir": str(places.PINS),
    }


def hosts(state: State, wanted: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the inventory: the machines named in `wanted` (comma separated), or all."""
    names = [name.strip() for name in (wanted or "").split(",") if name.strip()]
    unknown = [name for name in names if name not in state.machines]
    if unknown or not state.machines:
        what = f"no lab machine called {', '.join(unknown)}" if unknown else "no lab machine yet"
        known = ", ".join(sorted(state.machines)) or "none"
        raise SystemExit(f"{what} (there is: {known}); run: bash tests/lab.sh up [NAME]")
    return [(name, host_data(state, name)) for name in names or sorted(state.machines)]
