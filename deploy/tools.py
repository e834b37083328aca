"""The guards' own environment: what watches the engine does not depend on the engine's runtime."""

from pyinfra.api import deploy

from deploy import layout, operations
from deploy._tree import File
from dsv4 import store

LOCK = layout.FILES / "opt/dsv4/locks/tools.lock"


@deploy("Tools")
def apply() -> None:
    """Have uv, psutil and huggingface_hub at the locked versions."""
    content = LOCK.read_bytes()
    entry = File(path=layout.LOCKS / LOCK.name, content=content)
    operations.tree(name="Upload the tools' lock", step="tools", entries=[entry])
    operations.tools_environment(
        name="Build the tools' environment", lock_sha256=store.sha256_bytes(content)
    )
