"""The way out: what was put on a machine is taken away again, shown first and with nothing else."""

from pyinfra.api import deploy

from deploy import operations, settings


@deploy("Removal")
def apply() -> None:
    """Have nothing of this project on the machine, but for what is kept and named."""
    chosen = settings.current()
    operations.removed(name="Take away what was put there", packs=chosen.remove_packs)
