"""The served directory: links to the pristine pack, with its configuration put right."""

from typing import cast

from pyinfra.api import deploy

from deploy import model, operations, settings
from dsv4.pack_config import Policy


def policy(chosen: settings.Settings) -> Policy | None:
    """Return how the route serves what is no routed expert; None for a pack without EXL3."""
    return cast("Policy", chosen.route_data.dense_policy) if chosen.pack_data.exl3 else None


@deploy("Serving view")
def apply() -> None:
    """Have the view of the chosen pack in place."""
    chosen = settings.current()
    operations.view_served(
        name="Build the serving view",
        pack_root=lambda: model.root(chosen),
        policy=policy(chosen),
        code=chosen.pack_code,
    )


@deploy("Old packs")
def collect() -> None:
    """Have packs and views gone that nothing serves, when asked (`pack_gc`)."""
    operations.packs_collected(
        name="Remove packs that nothing serves", wanted=settings.current().pack_gc
    )
