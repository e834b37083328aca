"""The engine: built from a lock beside the one in service, verified, then switched to."""

import json

from pyinfra.api import deploy

from deploy import layout, operations, settings
from deploy._render import template
from deploy._tree import Entry, File


def build_spec(chosen: settings.Settings) -> bytes:
    """Return what dsv4-build reads: every input of the runtime, by hash where it has one."""
    route = chosen.route_data
    spec = {
        "schema": layout.SCHEMA,
        "id": chosen.runtime_id,
        "route": route.name,
        "python": route.python,
        "lock": str(layout.LOCKS / route.lock.name),
        "lock_sha256": route.lock_sha256(),
        "wheel_mirror": str(chosen.wheel_mirror) if chosen.wheel_mirror else None,
        "torch_backend": route.torch_backend,
        "aliases": dict(route.aliases),
        "checks": list(route.checks),
        "compile_only": list(route.compile_only),
        "need_bytes": route.runtime_bytes,
    }
    return json.dumps(spec, indent=1, sort_keys=True).encode() + b"\n"


def entries(chosen: settings.Settings) -> list[Entry]:
    """Return the lock, the description of the build and its unit."""
    lock = chosen.route_data.lock
    return [
        File(path=layout.LOCKS / lock.name, content=lock.read_bytes()),
        File(path=layout.BUILD_JSON, content=build_spec(chosen)),
        File(
            path=layout.SYSTEMD / layout.UNIT_BUILD,
            content=template(layout.SYSTEMD / layout.UNIT_BUILD, layout=layout),
        ),
    ]


@deploy("Runtime")
def apply() -> None:
    """Have the runtime of the chosen route complete and in service."""
    chosen = settings.current()
    identity = chosen.runtime_id
    operations.tree(name="Describe the runtime", step="runtime", entries=entries(chosen))
    operations.units_loaded(name="Load the build unit", units=[layout.UNIT_BUILD], enabled=[])
    operations.runtime_built(name="Build the runtime", identity=identity)
    operations.runtime_in_service(
        name="Put the runtime in service", identity=identity, keep=chosen.runtime_keep
    )
