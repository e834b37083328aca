"""The service: configuration, units, watchdog, and a start that ends with a real token."""

import json

from pyinfra.api import deploy

from deploy import facts, layout, operations, settings, units
from deploy._render import template
from deploy._state import State
from deploy._tree import Entry, File

UNITS = (
    layout.UNIT,
    layout.UNIT_WATCHDOG,
    layout.UNIT_UNGUARDED,
    layout.UNIT_READAHEAD,
    layout.UNIT_LIVENESS,
)

PROMETHEUS_KEY = "/etc/prometheus/dsv4.key"
"""Where a copy of the key is for Prometheus, which may not read the service's; the owner's."""


def engine_unit(chosen: settings.Settings, state: State) -> units.EngineUnit:
    """Return what the unit templates are filled with, for these settings on this machine."""
    own_pack = () if chosen.pack_dir is None else (str(chosen.pack_dir),)
    # Where its links lead, as far as the machine was asked; its name tells until then
    apart = (state.machine.get("pack_dir") or {}).get("apart") or {}
    # The proof of a start asks at the address the server listens on
    own = () if chosen.loopback or chosen.listens_everywhere else (chosen.serve_host,)
    at_home = any(path.startswith(("/home/", "/root/", "/run/user/")) for path in own_pack)
    at_home = at_home or any(place in apart for place in ("/home", "/root", "/run/user"))
    return units.EngineUnit(
        model=chosen.served_name,
        groups=tuple(state.raw.get("groups", [])),
        credentials=credentials(chosen),
        liveness=chosen.service_liveness,
        start_timeout_s=units.start_timeout(
            chosen.memory_gate_wait_s, chosen.service_start_timeout_s
        ),
        stop_timeout_s=chosen.service_drain_s + units.STOP_SPARE_S,
        modules=units.CUDA_MODULES if chosen.route_data.needs_cuda else (),
        device_allow=units.CUDA_DEVICES if chosen.route_data.needs_cuda else (),
        ip_allow=(
            ()
            if chosen.serve_media_domains
            else ("localhost", *own, *(str(net) for net in chosen.serve_allowed_subnets))
        ),
        own_address=own,
        protect_home="read-only" if at_home else "yes",
        mounts=(str(layout.ROOT), str(layout.VAR), *own_pack),
    )


def credentials(chosen: settings.Settings) -> tuple[tuple[str, str], ...]:
    """Return what systemd hands the engine: root's files, which its user cannot read."""
    given = (
        ("api_key", layout.API_KEY if chosen.serve_api_key else None),
        ("tls_cert", chosen.serve_tls_cert),
        ("tls_key", chosen.serve_tls_key),
    )
    return tuple((name, str(path)) for name, path in given if path is not None)


def scrape(chosen: settings.Settings) -> bytes:
    """Return what Prometheus is to be told of this machine."""
    scheme, _, address = chosen.url.partition("://")
    return template(
        layout.SCRAPE,
        scheme=scheme,
        address=address,
        key=chosen.serve_api_key,
        copy=PROMETHEUS_KEY,
        layout=layout,
    )


def entries(chosen: settings.Settings, state: State) -> list[Entry]:
    """Return everything the engine starts from, and the units that guard it."""
    guard = json.dumps(chosen.guard(), indent=1, sort_keys=True)
    toolkit = (state.machine.get("toolkit") or {}).get("nvcc")
    unit = engine_unit(chosen, state)
    return [
        File(
            path=layout.SERVE_YAML,
            content=chosen.serve_yaml_text().encode(),
            group=layout.USER,
            mode="640",
        ),
        File(path=layout.GUARD_JSON, content=guard.encode() + b"\n"),
        File(path=layout.SCRAPE, content=scrape(chosen)),
        File(
            path=layout.ENVIRONMENT,
            content=chosen.environment_text(toolkit, state.current).encode(),
            group=layout.USER,
            mode="640",
        ),
        *(
            File(
                path=layout.SYSTEMD / name,
                content=template(layout.SYSTEMD / name, unit=unit, layout=layout),
            )
            for name in UNITS
        ),
    ]


@deploy("Service")
def apply() -> None:
    """Have the service running from what is on disk, or as its owner left it."""
    chosen = settings.current()
    operations.api_key(
        name="Have an API key", wanted=chosen.serve_api_key, rotate=chosen.rotate_key
    )
    operations.tree(
        name="Configure the service",
        step="service",
        entries=lambda: entries(chosen, facts.current()),
    )
    stopped = chosen.service_state == "stopped"
    readahead = [layout.UNIT_READAHEAD] if chosen.service_readahead else []
    operations.units_loaded(
        name="Load the service units",
        units=UNITS,
        enabled=[*([] if stopped else [layout.UNIT]), *readahead],
        disabled=[  # a reboot does not undo it either
            *([layout.UNIT] if stopped else []),
            *([] if readahead else [layout.UNIT_READAHEAD]),
        ],
    )
    operations.watchdog_current(name="Renew the watchdog")
    operations.service_running(
        name="Run the service",
        wanted=chosen.service_state,
        patience_s=units.start_timeout(chosen.memory_gate_wait_s, chosen.service_start_timeout_s),
    )
