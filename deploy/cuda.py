"""One CUDA toolkit for everything: login shells here, units through their environment file."""

from pyinfra.api import deploy

from deploy import layout, operations, settings
from deploy._render import template
from deploy._tree import Absent, Entry, File


def entries(chosen: settings.Settings) -> list[Entry]:
    """Return the login shells' CUDA path, or its absence on a route without CUDA."""
    if not chosen.route_data.needs_cuda:
        return [Absent(path=layout.PROFILE)]
    text = template(layout.PROFILE, home=str(chosen.cuda_home))
    return [File(path=layout.PROFILE, content=text)]


@deploy("CUDA path")
def apply() -> None:
    """Put the toolkit that preflight checked on the path."""
    operations.tree(name="Set the CUDA path", step="cuda", entries=entries(settings.current()))
