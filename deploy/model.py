"""The download: begun early as a unit on the target, joined when the rest is ready."""

import json
from pathlib import Path

from pyinfra import host
from pyinfra.api import deploy

from deploy import layout, operations, pins, secrets, settings
from deploy._render import template
from deploy._tree import Dir, Entry, File

UNDECIDED = "0" * 40
"""What a dry run shows for a revision that the first real run pins."""


def revision(chosen: settings.Settings) -> str:
    """Return the pack's revision: the setting's, the pack's own, else this host's pin."""
    if named := named_revision(chosen):
        return named
    return pins.read(host.name, chosen.pins).revision(chosen.pack) or UNDECIDED


def named_revision(chosen: settings.Settings) -> str | None:
    """Return the revision that somebody insists on."""
    return chosen.pack_revision or chosen.pack_data.revision


def root(chosen: settings.Settings) -> Path:
    """Return the directory that holds the pristine pack."""
    if chosen.pack_dir is not None:
        return chosen.pack_dir
    return layout.PACKS / chosen.pack / revision(chosen)


def entries(chosen: settings.Settings) -> list[Entry]:
    """Return the description of the download and its unit."""
    spec = {"schema": layout.SCHEMA, **chosen.fetch_spec(revision(chosen))}
    return [
        Dir(
            path=layout.PACKS / chosen.pack,
            owner=layout.USER_FETCH,
            group=layout.USER_FETCH,
        ),
        File(
            path=layout.FETCH_JSON,
            content=json.dumps(spec, indent=1, sort_keys=True).encode() + b"\n",
        ),
        File(
            path=layout.SYSTEMD / layout.UNIT_FETCH,
            content=template(layout.SYSTEMD / layout.UNIT_FETCH, layout=layout),
        ),
    ]


@deploy("Model download")
def start() -> None:
    """Have the download under way; nothing waits for it here."""
    chosen = settings.current()
    operations.fetch_unwanted(
        name="End a download that is not wanted any more", adopted=chosen.pack_dir is not None
    )
    if chosen.pack_dir is not None:
        return
    pack = chosen.pack_data
    token = secrets.hub_token(chosen)
    operations.revision_pinned(
        name="Pin the pack's revision",
        pack=chosen.pack,
        repo_id=pack.repo_id,
        endpoint=chosen.hub_endpoint,
        environment=chosen.fetch_environment,
        revision=named_revision(chosen),
        pins_dir=chosen.pins,
        token=token,
    )
    operations.tree(name="Describe the download", step="model", entries=lambda: entries(chosen))
    operations.hub_token(
        name="Hand over the Hub token",
        pack=chosen.pack,
        revision=lambda: revision(chosen),
        token=token,
    )
    operations.units_loaded(
        name="Load the download unit", units=[layout.UNIT_FETCH], enabled=[layout.UNIT_FETCH]
    )
    operations.fetch_started(
        name="Start the download", pack=chosen.pack, revision=lambda: revision(chosen)
    )


@deploy("Model")
def join() -> None:
    """Wait for the download to be complete and verified."""
    chosen = settings.current()
    if chosen.pack_dir is None:
        operations.fetch_done(
            name="Join the download", pack=chosen.pack, revision=lambda: revision(chosen)
        )
