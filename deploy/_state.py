"""The target's state as the deploy decides by it: one snapshot, read tolerantly.

A machine without our tools yields a snapshot with `known` false: nothing of ours is there, or it
cannot be told, and every decision comes out as "make it so".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class State:
    """A snapshot of one machine, as `dsv4 state --json` prints it."""

    raw: Mapping[str, Any]

    @property
    def known(self) -> bool:
        """Whether our tools answered, in the version this deploy ships."""
        return "paths" in self.raw

    @property
    def machine(self) -> Mapping[str, Any]:
        """What preflight checks."""
        return self._mapping("machine")

    @property
    def library(self) -> str | None:
        """Hash of the tools on the target."""
        return self.raw.get("library")

    @property
    def tools(self) -> str | None:
        """Hash of the lock the tools' environment was made from."""
        return self.raw.get("tools")

    @property
    def runtimes(self) -> Mapping[str, Any]:
        """Runtimes by ID."""
        return self._mapping("runtimes")

    @property
    def current(self) -> str | None:
        """ID of the runtime in service."""
        return self.raw.get("current")

    @property
    def view(self) -> Mapping[str, Any]:
        """The served view: `id` and `pack_root`."""
        return self._mapping("view")

    @property
    def engine(self) -> Mapping[str, Any]:
        """What the engine started from, what differs now, its phase."""
        return self._mapping("engine")

    @property
    def lock(self) -> Mapping[str, Any] | None:
        """Who holds the deploy lock."""
        return self.raw.get("lock")

    @property
    def receipt(self) -> Mapping[str, Any]:
        """The newest deploy receipt."""
        return self._mapping("receipt")

    def path(self, path: str) -> Mapping[str, Any]:
        """Return what is at a path of ours."""
        found: Mapping[str, Any] = self._mapping("paths").get(path, {"kind": "absent"})
        return found

    def unit(self, name: str) -> Mapping[str, str]:
        """Return a unit's live state."""
        found: Mapping[str, str] = self._mapping("units").get(name, {})
        return found

    def groups(self, user: str) -> list[str] | None:
        """Return the groups of an account, None when it does not exist."""
        found = self._mapping("accounts").get(user)
        return None if found is None else list(found)

    def package(self, name: str) -> str | None:
        """Return the installed version of a Debian package."""
        return self._mapping("packages").get(name)

    def revisions(self, name: str) -> list[Mapping[str, Any]]:
        """Return what there is of a pack, revision by revision."""
        return list(self._mapping("packs").get(name, {}).values())

    def pack(self, name: str, revision: str) -> Mapping[str, Any]:
        """Return what is known of one revision of a pack."""
        found: Mapping[str, Any] = self._mapping("packs").get(name, {}).get(revision, {})
        return found

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key)
        return value if isinstance(value, Mapping) else {}
