"""The served directory: links to the pristine pack, with its configuration put right."""

from pyinfra.api import deploy

from deploy import model, operations, settings


def arguments(chosen: settings.Settings) -> list[str]:
    """Return what the view's builder is told besides where the pack is."""
    if not chosen.pack_data.exl3:
        return []
    return ["--exl3-policy", chosen.route_data.dense_policy]


@deploy("Serving view")
def apply() -> None:
    """Have the view of the chosen pack in place."""
    chosen = settings.current()
    operations.view_served(
        name="Build the serving view",
        pack_root=lambda: model.root(chosen),
        arguments=arguments(chosen),
    )
