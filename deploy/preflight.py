"""Preflight: look before anything is touched, and stop a machine that cannot do the job."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from pyinfra import context, host, logger
from pyinfra.api import deploy

from deploy import _preflight, facts, layout, model, settings
from deploy._state import State


def job(chosen: settings.Settings, state: State) -> _preflight.Job:
    """Return what the checks need to know of the settings and of what is there already."""
    built = state.runtimes.get(chosen.runtime_id, {}).get("complete")
    runtime_bytes = 0 if built else chosen.route_data.runtime_bytes
    pack = state.pack(chosen.pack, model.revision(chosen))
    fetched = chosen.pack_dir is not None or pack.get("complete")
    pack_bytes = bytes_to_come(chosen.pack_data.bytes or 0, state.revisions(chosen.pack))
    return _preflight.Job(
        route=chosen.route_data,
        port=chosen.serve_port,
        cuda_home=str(chosen.cuda_home),
        need_bytes={
            str(layout.ROOT): runtime_bytes,
            # uv unpacks into its cache, from which a runtime is copied
            str(layout.UV_CACHE): runtime_bytes,
            str(layout.VAR): 0 if fetched else pack_bytes,
        },
        now=time.time(),
        token=facts.run().token,
        headroom_fault=chosen.headroom_fault,
        pack_dir=None if chosen.pack_dir is None else str(chosen.pack_dir),
    )


def bytes_to_come(whole: int, revisions: Iterable[Mapping[str, Any]]) -> int:
    """Return what is still to be written of a pack, at least.

    What an earlier revision has, too, is linked and takes no space. How much that is only the
    fetcher can tell, which refuses by itself, to the byte, before it brings anything.
    """
    return max(0, whole - max((int(found.get("bytes") or 0) for found in revisions), default=0))


@deploy("Preflight")
def apply() -> None:
    """Check the machine; one that fails is left out of this run, with every reason at once."""
    state = facts.current()
    findings = _preflight.examine(job(settings.current(), state), state)
    for finding in findings:
        if finding.ok is None:
            logger.info(f"{host.print_prefix}{finding.line()}")
        elif finding.ok and finding.advice:
            logger.warning(f"{host.print_prefix}{finding.line()}")
    failures = [finding for finding in findings if finding.ok is False]
    for finding in failures:
        logger.error(f"{host.print_prefix}{finding.line()}")
    if failures:
        context.state.fail_hosts({context.ctx_host.get()})
