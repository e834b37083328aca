"""The receipt: what is deployed now, from which revision of this repository, on what machine."""

import subprocess
from typing import Any

from pyinfra.api import deploy

from deploy import facts, layout, operations, settings


def revision() -> str:
    """Return the revision of this repository, with a mark when files differ from it."""
    done = subprocess.run(
        ["git", "-C", str(layout.REPO), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def body(chosen: settings.Settings) -> dict[str, Any]:
    """Return a receipt: `deployed` is what a later run compares by, the rest is circumstance."""
    state = facts.current()
    gpu = state.machine.get("gpu") or {}
    return {
        "deployed": {
            "route": chosen.route,
            "preset": chosen.preset,
            "pack": chosen.pack,
            "runtime": state.current,
            "view": state.view.get("id"),
            "wanted": {
                # The key's hash is salted anew at each boot
                name: value
                for name, value in (state.engine.get("wanted") or {}).items()
                if name != "api_key"
            },
            "library": state.library,
        },
        "revision": revision(),
        "kernel": state.machine.get("kernel"),
        "driver": gpu.get("driver"),
        "settings": chosen.plain(),
    }


@deploy("Receipt")
def apply() -> None:
    """Leave a receipt when what is deployed changed."""
    chosen = settings.current()
    operations.receipt(name="Leave a receipt", body=lambda: body(chosen))
