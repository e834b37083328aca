"""/run/dsv4/phase.json: how far a start has come, for readers that must not ask the engine.

Phases: starting, loading, profiling, ready, stopping, stopped, failed. The directory is root's and
every writer is a root hook, so the engine cannot claim a phase it is not in.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dsv4 import layout, store

PHASES: Final = layout.PHASES


def write(
    name: str,
    detail: dict[str, Any] | None = None,
    path: Path = layout.PHASE_JSON,
    invocation: str | None = None,
) -> None:
    """Note a phase; `since` stays what it was while only the detail moves on.

    + invocation: whose phase it is, where that is not this process's own unit

    Failing to write is no reason to fail a start: whoever reads it then sees an older phase.
    """
    before = store.read_json_or(path, {})
    if invocation is None:
        invocation = os.environ.get("INVOCATION_ID", "")
    same = before.get("phase") == name and before.get("invocation") == invocation
    now = datetime.now(UTC).isoformat(timespec="seconds")
    value = {
        "phase": name,
        "detail": detail or {},
        "since": before.get("since", now) if same else now,
        "invocation": invocation,
    }
    try:
        store.write_json(path, value)
    except OSError:
        return


def failure(reason: str, retries: int | None = None) -> dict[str, Any]:
    """Return the detail of a failed start.

    + retries: how many automatic starts may follow those that end for this reason; None for the
      usual number
    """
    return {"reason": reason} if retries is None else {"reason": reason, "retries": retries}


def read_of(invocation: str, path: Path = layout.PHASE_JSON) -> dict[str, Any]:
    """Return the detail that this start has left, empty for another start's."""
    value = store.read_json_or(path, {})
    detail = value.get("detail")
    known = bool(invocation) and value.get("invocation") == invocation
    return detail if known and isinstance(detail, dict) else {}
