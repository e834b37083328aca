"""The changes we make to installed sources, each known by name and judged by the text it meets."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from dsv4.patches import exllamav3, fork, o_proj, stream_load, text_weights, wide_swa
from dsv4.patches.engine import Patch

ALL: Final = (
    o_proj.PATCH,
    text_weights.TEXT_LOADER,
    text_weights.DRAFT_BIAS_VL,
    stream_load.PATCH,
    wide_swa.PATCH,
    fork.PATCH,
    exllamav3.AARCH64,
)

PATCHES: Final[Mapping[str, Patch]] = {patch.name: patch for patch in ALL}


def fingerprint(names: Iterable[str]) -> str:
    """Return a hash that changes when what these patches do may have changed.

    It is that of the whole package: a patch is more than one file of it.
    """
    here = Path(__file__).parent
    parts = [*(PATCHES[name].name for name in names)]
    for path in sorted(here.rglob("*.py")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        parts.append(f"{path.relative_to(here)} {digest}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def main(argv: list[str]) -> int:
    """Run the command (see `dsv4.patches.__main__`)."""
    from dsv4.patches import __main__ as command

    return command.main(argv)
