"""Which files, directories and links are not as they shall be, and the plan that makes them so."""

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy._state import State


@dataclass(frozen=True, kw_only=True)
class File:
    """A regular file with these bytes."""

    path: Path
    content: bytes
    owner: str = "root"
    group: str = "root"
    mode: str = "644"

    def settled(self, found: dict[str, Any]) -> bool:
        """Say whether what is there is this file."""
        wanted = {"kind": "file", "owner": self.owner, "group": self.group, "mode": self.mode}
        return found == {**wanted, "sha256": hashlib.sha256(self.content).hexdigest()}

    def plan(self) -> dict[str, str]:
        """Return the entry `dsv4 tree` takes."""
        return {
            "path": str(self.path),
            "kind": "file",
            "owner": self.owner,
            "group": self.group,
            "mode": self.mode,
            "base64": base64.b64encode(self.content).decode(),
        }


@dataclass(frozen=True, kw_only=True)
class Dir:
    """A directory; what is in it is nobody's business here."""

    path: Path
    owner: str = "root"
    group: str = "root"
    mode: str = "755"

    def settled(self, found: dict[str, Any]) -> bool:
        """Say whether what is there is this directory."""
        wanted = {"kind": "dir", "owner": self.owner, "group": self.group, "mode": self.mode}
        return found == wanted

    def plan(self) -> dict[str, str]:
        """Return the entry `dsv4 tree` takes."""
        return {
            "path": str(self.path),
            "kind": "dir",
            "owner": self.owner,
            "group": self.group,
            "mode": self.mode,
        }


@dataclass(frozen=True, kw_only=True)
class Absent:
    """Nothing at this path."""

    path: Path

    def settled(self, found: dict[str, Any]) -> bool:
        """Say whether nothing is there."""
        return found == {"kind": "absent"}

    def plan(self) -> dict[str, str]:
        """Return the entry `dsv4 tree` takes."""
        return {"path": str(self.path), "kind": "absent"}


Entry = File | Dir | Absent


def due(state: State, entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries that are not settled, in the order given."""
    return [entry for entry in entries if not entry.settled(dict(state.path(str(entry.path))))]


def plan(step: str, entries: Iterable[Entry]) -> str:
    """Return the JSON that `dsv4 tree` reads from its stdin."""
    return json.dumps({"step": step, "entries": [entry.plan() for entry in entries]})
