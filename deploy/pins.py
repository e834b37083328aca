"""What was decided once for a host and holds from then on: inventories/pins/HOST.json.

Commit these files: they are why the next deploy, from whichever controller, gets the same bytes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyinfra.api.exceptions import PyinfraError

from dsv4 import store


@dataclass(frozen=True)
class Pins:
    """The pins of one host."""

    packs: dict[str, str] = field(default_factory=dict)
    artefacts: dict[str, str] = field(default_factory=dict)
    """Hashes of files for which nobody publishes one, by address."""

    def revision(self, pack: str) -> str | None:
        """Return the pinned revision of a pack."""
        return self.packs.get(pack)


def path_of(host: str, directory: Path) -> Path:
    """Return the file that holds a host's pins."""
    safe = "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in host)
    return directory / f"{safe}.json"


def read(host: str, directory: Path) -> Pins:
    """Return a host's pins; a file that cannot be read stops the deploy, it is never guessed at."""
    try:
        value = store.read_json(path_of(host, directory)) or {}
    except store.BrokenState as error:
        raise PyinfraError(f"{error}, or restore it from version control") from error
    return Pins(packs=dict(value.get("packs", {})), artefacts=dict(value.get("artefacts", {})))


def pin(host: str, kind: str, name: str, value_seen: str, directory: Path) -> Path:
    """Add a pack's revision (`packs`) or a file's hash (`artefacts`) to a host's pins."""
    path = path_of(host, directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    value: dict[str, Any] = store.read_json(path) or {}
    value[kind] = {**value.get(kind, {}), name: value_seen}
    store.write_json(path, value)
    return path
