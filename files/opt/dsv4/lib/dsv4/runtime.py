"""What is true of a runtime on disk: complete, changed since, in service.

A runtime is complete when its manifest is there, and unchanged while the hash over its packages'
RECORD files and over the files we patched still is what the manifest says. That costs a few
milliseconds, so every deploy checks it; reading all of a runtime's bytes is for the build.
"""

import base64
import csv
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from dsv4 import layout, store

MANIFEST: Final = "manifest.json"


def site_packages(home: Path) -> Path | None:
    """Return the runtime's library directory, None when there is none."""
    return next(iter(sorted(home.glob("lib/python3*/site-packages"))), None)


def metadata_hash(site: Path) -> str:
    """Return one hash over the names and RECORDs of all installed distributions."""
    whole = hashlib.sha256()
    for info in sorted(site.glob("*.dist-info")):
        whole.update(info.name.encode() + b"\0")
        whole.update((store.sha256_file(info / "RECORD") or "none").encode() + b"\0")
    return whole.hexdigest()


def versions(site: Path) -> dict[str, str]:
    """Return distribution names and versions as their metadata directories say."""
    pairs = (info.name.removesuffix(".dist-info") for info in site.glob("*.dist-info"))
    return {name: version for name, _, version in (pair.rpartition("-") for pair in pairs)}


def recorded(site: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file a RECORD vouches for, with its SHA-256 (urlsafe base64, no padding).

    Compiled bytecode is left out: some wheels carry theirs, and the install compiled it anew.
    """
    for record in sorted(site.glob("*.dist-info/RECORD")):
        with record.open(newline="") as handle:
            for row in csv.reader(handle):
                if len(row) < 2 or row[0].endswith(".pyc"):
                    continue
                if row[1].startswith("sha256="):
                    yield site / row[0], row[1].removeprefix("sha256=")


def damaged(site: Path, patched: set[Path], workers: int) -> list[str]:
    """Return the files that are not what their RECORD says; patched ones are known to differ."""

    def check(pair: tuple[Path, str]) -> str | None:
        path, expected = pair
        if path in patched:
            return None
        try:
            with path.open("rb") as handle:
                digest = hashlib.file_digest(handle, "sha256").digest()
        except OSError:
            return f"{path} is missing"
        found = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        return None if found == expected else f"{path} differs from its RECORD"

    with ThreadPoolExecutor(workers) as pool:
        return [fault for fault in pool.map(check, recorded(site)) if fault]


def examine(home: Path) -> dict[str, Any]:
    """Return what the deploy needs to know of one runtime directory."""
    try:
        manifest = store.read_json(home / MANIFEST)
    except store.BrokenState as error:
        return {"complete": False, "drift": [str(error)]}
    if manifest is None:
        return {"complete": False, "drift": []}
    site = site_packages(home)
    drift = []
    if site is None or metadata_hash(site) != manifest.get("metadata_hash"):
        drift.append("packages were added, removed or replaced after it was built")
    for name, digest in manifest.get("patched", {}).items():
        if store.sha256_file(home / name) != digest:
            drift.append(f"{name} was changed after it was patched")
    return {"complete": not drift, "drift": drift, "route": manifest.get("route")}


def link_target(link: Path) -> str | None:
    """Return the ID a runtime link points at."""
    try:
        return link.readlink().name
    except OSError:
        return None


def all_of(root: Path = layout.RUNTIMES) -> dict[str, dict[str, Any]]:
    """Return every runtime directory by ID."""
    homes = sorted(path for path in root.glob("[!.]*") if path.is_dir()) if root.is_dir() else []
    return {home.name: examine(home) for home in homes}
