"""What an engine process starts from, as hashes: the only ground on which a restart is decided.

The last hook before the start records them; the deploy compares them with what is on disk. Time
stamps play no part, because they lie after clock steps and rollbacks.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsv4 import layout

ABSENT: Final = "absent"
SALT_BYTES: Final = 32
LOADS: Final = "LoadCredential="
TLS: Final = ("tls_cert", "tls_key")
CODE: Final = tuple(Path(__file__).with_name(name) for name in ("launch.py", "routes.py"))
"""Our code in the engine's process."""


@dataclass(frozen=True)
class Sources:
    """Where each input is."""

    unit: Path = layout.SYSTEMD / layout.UNIT
    serve_yaml: Path = layout.SERVE_YAML
    environment: Path = layout.ENVIRONMENT
    guard: Path = layout.GUARD_JSON
    runtime: Path = layout.CURRENT
    view: Path = layout.VIEW_CURRENT
    code: tuple[Path, ...] = CODE
    salt: Path = layout.FINGERPRINT_SALT


def digest(parts: Iterable[bytes | None]) -> str:
    """Return one hash over several contents, each kept apart; `absent` when the first is None."""
    whole = hashlib.sha256()
    for index, part in enumerate(parts):
        if part is None and index == 0:
            return ABSENT
        whole.update(hashlib.sha256(part or b"").digest())
    return whole.hexdigest()


def key_digest(key: bytes | None, salt: bytes | None) -> str:
    """Return a hash that says whether a key changed and tells nobody what it is.

    The record is readable by all, and an owner may have chosen a short key, so the hash is keyed
    with bytes only root can read.
    """
    if key is None:
        return ABSENT
    return hmac.new(salt or b"", key.strip(), hashlib.sha256).hexdigest() if salt else "unknown"


def joined(parts: Iterable[bytes | None]) -> bytes | None:
    """Return several files as one, None when there are none."""
    return b"".join(part or b"" for part in parts) or None


def content(path: Path) -> bytes | None:
    """Return a file's bytes, None when there is none to read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def target(link: Path) -> str:
    """Return the name a link points at."""
    try:
        return link.readlink().name
    except OSError:
        return ABSENT


def salt(path: Path) -> bytes:
    """Return this boot's salt, made on first use."""
    if (found := content(path)) and len(found) == SALT_BYTES:
        return found
    made = os.urandom(SALT_BYTES)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(made)
    return made


def credentials(unit: Iterable[bytes | None]) -> dict[str, Path]:
    """Return the files a unit takes as credentials, by name.

    One that lies on disk while the unit does not take it is none of the engine's inputs.
    """
    lines = [line for part in unit for line in (part or b"").decode(errors="replace").splitlines()]
    pairs = (line.split("=", 1)[1].partition(":") for line in lines if line.startswith(LOADS))
    return {name: Path(path) for name, _, path in pairs}


def networks(guard: bytes | None) -> bytes | None:
    """Return who may reach the port, which a start's first hook tells the kernel; None: no rule.

    The rest of guard.json is read anew whenever it is needed.
    """
    try:
        found = json.loads(guard or b"{}").get("allowed_networks")
    except (ValueError, AttributeError):
        return None
    return json.dumps(found).encode() if found else None


def wanted(sources: Sources | None = None) -> dict[str, str]:
    """Return the fingerprint of what is on disk now: what a restart would start from."""
    at = sources or Sources()
    drop_ins = sorted(at.unit.with_name(f"{at.unit.name}.d").glob("*.conf"))
    manifest = content(at.runtime / "manifest.json")
    unit = [content(at.unit), *(content(path) for path in drop_ins)]
    given = credentials(unit)
    secrets = {name: content(path) for name, path in given.items()}
    tls = [secrets.get(name) for name in TLS]
    return {
        "unit": digest(unit),
        "serve_yaml": digest([content(at.serve_yaml)]),
        "environment": digest([content(at.environment)]),
        "networks": digest([networks(content(at.guard))]),
        "runtime": f"{target(at.runtime)}:{digest([manifest])[:16]}",
        "view": target(at.view),
        "launcher": digest([content(path) for path in at.code]),
        "api_key": key_digest(secrets.get("api_key"), content(at.salt)),
        "tls": key_digest(joined(tls), content(at.salt)),
    }


def differs(started: Mapping[str, Any] | None, now: Mapping[str, str]) -> list[str]:
    """Return which inputs the running process does not have; all of them when nobody knows.

    `started` is the whole of started.json. An input it does not name is one that an older version
    did not record, so nobody can say that it is the same.
    """
    inputs = (started or {}).get("inputs")
    known = inputs if isinstance(inputs, dict) else {}
    return [name for name, value in now.items() if known.get(name) != value]
