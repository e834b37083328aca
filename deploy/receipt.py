"""The receipt: what is deployed now, from which revision of this repository, on what machine."""

import subprocess
from typing import Any, Final

from pyinfra.api import deploy

from deploy import facts, layout, operations, settings


def revision() -> dict[str, Any]:
    """Return the revision of this repository, and whether what is deployed from it differs.

    Without git, or outside a checkout, both are None: the hash of the tools tells versions apart.
    """
    head, changes = (git(*words) for words in (("rev-parse", "HEAD"), ("status", "-s", *PARTS)))
    return {"revision": head or None, "dirty": None if changes is None else bool(changes)}


PARTS: Final = ("--", "deploy", "files", "templates", "inventories", "requirements.txt")
"""What a deploy is made of; a changed test changes no machine."""


def git(*words: str) -> str | None:
    """Return what git says of this repository, None when it says nothing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(layout.REPO), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def body(chosen: settings.Settings) -> dict[str, Any]:
    """Return the deploy's part of a receipt; `deployed` is what a later run compares by.

    Kernel, driver and hashes are the target's to say (`dsv4.receipt`).
    """
    state = facts.current()
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
        **revision(),
        "settings": chosen.plain(),
    }


@deploy("Receipt")
def apply() -> None:
    """Leave a receipt when what is deployed changed."""
    chosen = settings.current()
    operations.receipt(name="Leave a receipt", body=lambda: body(chosen))
