"""How long a route's whole set of patches takes on the real files of its release, as JSON.

Files that are not there yet are fetched. Asserts nothing.
"""

import statistics
import tempfile
import time
from pathlib import Path

from dsv4.patches import PATCHES, engine
from tests.bench import report
from tests.sources import wheels

SETS = {
    "0.28.0": ("o_proj_bf16", "text_loader", "draft_bias_vl"),
    "0.30.0": ("stream_load", "wide_swa"),
}
RUNS = 5


def seconds(release: str, names: tuple[str, ...]) -> float:
    """Return the time one set takes on a fresh copy of a release's files."""
    with tempfile.TemporaryDirectory() as scratch:
        site = wheels.site(release, Path(scratch) / "site-packages")
        begun = time.monotonic()
        engine.apply(site, [PATCHES[name] for name in names])
        return time.monotonic() - begun


def main() -> int:
    """Measure and print."""
    wheels.fetch_all()
    found = {
        release: round(statistics.median(seconds(release, names) for _ in range(RUNS)), 3)
        for release, names in SETS.items()
    }
    return report.show({"apply_s": found, "runs": RUNS})


if __name__ == "__main__":
    raise SystemExit(main())
