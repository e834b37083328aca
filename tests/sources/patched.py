"""Patched files of the real releases, as modules whose functions can be called."""

import functools
import types
from pathlib import Path
from typing import Any

from dsv4.patches import PATCHES
from dsv4.patches.engine import Verdict
from tests.sources import wheels
from tests.sources.stand_ins import load


def text(release: str, path: str, name: str) -> str:
    """Return one file of a release as a patch leaves it; the patch has to apply to it."""
    (edit,) = (edit for edit in PATCHES[name].edits if edit.path == path)
    outcome = edit.transform(wheels.text(release, path))
    if outcome.verdict is not Verdict.APPLIES or outcome.text is None:
        raise AssertionError(f"{name} on {path} of {release}: {outcome.verdict} {outcome.why}")
    return outcome.text


@functools.cache
def module(release: str, path: str, name: str) -> types.ModuleType:
    """Return a patched file, executed with stand-ins for what it imports of its own package."""
    return load(path, text(release, path, name))


def original(release: str, path: str) -> types.ModuleType:
    """Return a file as the wheel has it, executed likewise."""
    return load(path, wheels.text(release, path))


def real(name: str, **attributes: Any) -> dict[str, types.ModuleType]:
    """Return one module with real contents, to be imported instead of a stand-in."""
    made = types.ModuleType(name)
    made.__dict__.update(attributes)
    return {name: made}


def kept(release: str, path: str) -> Path:
    """Return where a file of a release lies."""
    wheels.text(release, path)
    wheel = next(wheel for wheel in wheels.RELEASES[release] if path in wheel.files)
    return wheel.kept / path
