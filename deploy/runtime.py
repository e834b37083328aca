"""The engine: built from a lock beside the one in service, verified, then switched to."""

import json
from dataclasses import asdict
from typing import Any

from pyinfra import context, host, logger
from pyinfra.api import deploy

from deploy import _runtimes, facts, layout, operations, pins, routes, settings
from deploy._render import template
from deploy._tree import Entry, File


def fetched(name: str, source: routes.Source, known: pins.Pins) -> dict[str, Any]:
    """Return a file that no index has, as the build fetches it; pinned where nobody has a hash."""
    location = str(source.location)
    return {
        "name": name,
        "location": location,
        "sha256": source.sha256 or known.artefacts.get(location),
        "commit": source.commit,
    }


def parts(chosen: settings.Settings, known: pins.Pins) -> dict[str, Any]:
    """Return what comes beside the lock: wheels no index has, the extension, the plugin."""
    route = chosen.route_data
    found: dict[str, Any] = {"wheels": [], "replace": []}
    if route.engine.location:
        # One the owner supplies takes the place of the lock's, one of ours is in the lock by hash
        where = "replace" if chosen.engine_wheel else "wheels"
        found[where] = [fetched("vllm", route.engine, known)]
    if route.exllamav3 is not None:
        own = route.exllamav3.is_wheel
        found["extension"] = (
            {"wheel": fetched("exllamav3", route.exllamav3, known)}
            if own
            else {
                "compile": True,
                "name": route.exllamav3.name,
                "version": route.exllamav3.version,
                "sha256": route.exllamav3.sha256,
            }
        )
    if route.plugin is not None and route.plugin.location:
        found["plugin"] = fetched("vllm-exl3", route.plugin, known)
    return found


def build_spec(chosen: settings.Settings, known: pins.Pins) -> bytes:
    """Return what dsv4-build reads: every input of the runtime, by hash where it has one."""
    route = chosen.route_data
    spec = {
        "schema": layout.SCHEMA,
        "id": chosen.runtime_id,
        "route": route.name,
        "python": route.python,
        "lock": str(layout.LOCKS / route.lock.name),
        "lock_sha256": route.lock_sha256(),
        "wheel_mirror": chosen.wheel_mirror,
        "torch_backend": route.torch_backend,
        "torch_cuda": route.torch_cuda,
        "aliases": dict(route.aliases),
        "patches": list(route.patches),
        "checks": list(route.checks),
        "compile_only": list(route.compile_only),
        "need_bytes": route.runtime_bytes,
        "inputs": {
            "lock": route.lock_sha256(),
            **{
                part: asdict(source)
                for part in ("engine", "exllamav3", "plugin")
                if (source := getattr(route, part)) is not None
            },
        },
        **parts(chosen, known),
    }
    if route.arch is not None and route.machine.toolkit is not None:
        spec |= {
            "toolkit": {"release": list(route.machine.toolkit), "arch": route.arch},
            "cuda_home": str(chosen.cuda_home),
            "build_env": dict(route.build_env),
            "stop_service": chosen.build_stops_service,
            "soft_floor_gib": round(chosen.floors.soft, 3),
        }
    return json.dumps(spec, indent=1, sort_keys=True).encode() + b"\n"


def entries(chosen: settings.Settings, known: pins.Pins) -> list[Entry]:
    """Return the lock, the description of the build and its unit."""
    lock = chosen.route_data.lock
    return [
        File(path=layout.LOCKS / lock.name, content=lock.read_bytes()),
        File(path=layout.BUILD_JSON, content=build_spec(chosen, known)),
        File(
            path=layout.SYSTEMD / layout.UNIT_BUILD,
            content=template(layout.SYSTEMD / layout.UNIT_BUILD, layout=layout),
        ),
    ]


def unpinned(chosen: settings.Settings) -> dict[str, str]:
    """Return the files for which nobody publishes a hash: where they are, by name."""
    route = chosen.route_data
    sources = [it for it in (route.engine, route.exllamav3, route.plugin) if it is not None]
    return {it.name: str(it.location) for it in sources if it.unpinned()}


@deploy("Runtime")
def apply() -> None:
    """Have the runtime of the chosen route complete and in service."""
    chosen = settings.current()
    identity = chosen.runtime_id
    operations.artefacts_pinned(
        name="Pin files without a published hash",
        locations=unpinned(chosen),
        mirror=chosen.wheel_mirror,
        pins_dir=chosen.pins,
    )
    operations.tree(
        name="Describe the runtime",
        step="runtime",
        entries=lambda: entries(chosen, pins.read(host.name, chosen.pins)),
    )
    operations.units_loaded(name="Load the build unit", units=[layout.UNIT_BUILD], enabled=[])
    operations.runtime_built(name="Build the runtime", identity=identity)
    operations.runtime_in_service(
        name="Put the runtime in service",
        identity=identity,
        keep=chosen.runtime_keep,
        flags=chosen.serve_yaml_text(),
    )


@deploy("Rollback")
def back() -> None:
    """Have a runtime that served before in service again; a host without one is left out."""
    chosen, state = settings.current(), facts.current()
    target, fault = _runtimes.way_back(state, chosen.rollback_to)
    if fault:
        logger.error(f"{host.print_prefix}rollback: {fault}")
        context.state.fail_hosts({context.ctx_host.get()})
        return
    operations.runtime_in_service(
        name="Go back to a runtime", identity=target, keep=max(2, len(state.runtimes))
    )
