"""What is true of a runtime on disk: complete, changed since, in service.

A runtime is complete when its manifest is there, and unchanged while its packages' RECORD files and
the files we patched still have the hashes in the manifest. That costs a few milliseconds, so every
deploy checks it. Reading all of a runtime's bytes is for the build and for `dsv4 runtime`, which
notes what it finds damaged, so that the next deploy builds the runtime anew.
"""

import argparse
import base64
import csv
import hashlib
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsv4 import layout, store

MANIFEST: Final = "manifest.json"
DAMAGED: Final = "damaged.json"
"""What a check of every byte found wrong; the runtime counts as changed from then on."""


def site_packages(home: Path) -> Path | None:
    """Return the runtime's library directory, None when there is none."""
    return next(iter(sorted(home.glob("lib/python3*/site-packages"))), None)


def records(site: Path) -> dict[str, str]:
    """Return the hash of the RECORD of every installed distribution, by its directory's name."""
    return {
        info.name: store.sha256_file(info / "RECORD") or "none"
        for info in sorted(site.glob("*.dist-info"))
    }


def distribution(info: str) -> str:
    """Return the name of a distribution from that of its directory, as an index writes it."""
    return re.sub(r"[-_.]+", "-", info.removesuffix(".dist-info").rpartition("-")[0]).lower()


def torch_cuda(site: Path) -> str | None:
    """Return the CUDA release of the installed torch, None for a build without; never imports it.

    An install that puts another torch in place of the one we want does not fail, so this is asked
    after every step. Raises LookupError when there is no torch.
    """
    try:
        text = (site / "torch/version.py").read_text()
    except OSError as error:
        raise LookupError("no torch is installed") from error
    found = re.search(r"^cuda\b[^=\n]*=\s*(?:'([^'\n]*)'|\"([^\"\n]*)\")", text, re.MULTILINE)
    return (found[1] or found[2]) if found else None


def wheel_tags(site: Path) -> dict[str, list[str]]:
    """Return the tags of the wheels that are not for every machine, by distribution."""
    found = {}
    for wheel in sorted(site.glob("*.dist-info/WHEEL")):
        tags = re.findall(r"^Tag: (\S+)$", wheel.read_text(), re.MULTILINE)
        if not all(tag.endswith("-none-any") for tag in tags):
            found[distribution(wheel.parent.name)] = tags
    return found


def owners(site: Path, paths: set[str]) -> set[str]:
    """Return the distributions whose RECORDs list any of these files (relative to the site)."""
    found = set()
    for record in site.glob("*.dist-info/RECORD"):
        with record.open(newline="") as handle:
            if any(row and row[0] in paths for row in csv.reader(handle)):
                found.add(distribution(record.parent.name))
    return found


def changed_packages(home: Path, manifest: dict[str, Any]) -> set[str]:
    """Return the distributions that are not what was built: by RECORD, patch or damage."""
    site = site_packages(home)
    if site is None:
        return set()
    built, now = manifest.get("records", {}), records(site)
    changed = {
        distribution(name) for name in built.keys() | now.keys() if built.get(name) != now.get(name)
    }
    prefix = f"{site.relative_to(home).as_posix()}/"
    wrong = {
        name.removeprefix(prefix)
        for name, digest in manifest.get("patched", {}).items()
        if store.sha256_file(home / name) != digest
    }
    wrong |= set(store.read_json_or(home / DAMAGED, {}).get("files", []))
    return changed | (owners(site, wrong) if wrong else set())


def versions(site: Path) -> dict[str, str]:
    """Return distribution names and versions as their metadata directories say."""
    pairs = (info.name.removesuffix(".dist-info") for info in site.glob("*.dist-info"))
    return {name: version for name, _, version in (pair.rpartition("-") for pair in pairs)}


def recorded(site: Path) -> dict[Path, set[str]]:
    """Return every file a RECORD vouches for, with its SHA-256 (urlsafe base64, no padding).

    Two distributions can bring a file of the same name, and the one installed last has it: then
    either is right (`build_backend.py` of flashinfer-python and torch-c-dlpack-ext). Compiled
    bytecode is left out: some wheels carry theirs, and the install compiled it anew.
    """
    found: dict[Path, set[str]] = {}
    for record in sorted(site.glob("*.dist-info/RECORD")):
        with record.open(newline="") as handle:
            for row in csv.reader(handle):
                if len(row) < 2 or row[0].endswith(".pyc"):
                    continue
                if row[1].startswith("sha256="):
                    found.setdefault(site / row[0], set()).add(row[1].removeprefix("sha256="))
    return found


@dataclass(frozen=True)
class Fault:
    """One file that is not what its RECORD says."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def damaged(site: Path, patched: set[Path], workers: int) -> list[Fault]:
    """Return the files that are not what their RECORD says; patched ones are known to differ."""

    def check(pair: tuple[Path, set[str]]) -> Fault | None:
        path, expected = pair
        if path in patched:
            return None
        try:
            with path.open("rb") as handle:
                digest = hashlib.file_digest(handle, "sha256").digest()
        except OSError:
            return Fault(path, "is missing")
        found = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        return None if found in expected else Fault(path, "differs from its RECORD")

    with ThreadPoolExecutor(workers) as pool:
        return [fault for fault in pool.map(check, recorded(site).items()) if fault]


def drift(home: Path, manifest: dict[str, Any]) -> list[str]:
    """Return how a runtime differs from what was built, by what every deploy can afford to ask."""
    site = site_packages(home)
    found = []
    if site is None or records(site) != manifest.get("records"):
        found.append("packages were added, removed or replaced after it was built")
    found += [
        f"{name} was changed after it was patched"
        for name, digest in manifest.get("patched", {}).items()
        if store.sha256_file(home / name) != digest
    ]
    wrong = store.read_json_or(home / DAMAGED, {}).get("files", [])
    if wrong:
        found.append(f"{len(wrong)} files are damaged, first: {wrong[0]}")
    return found


def examine(home: Path) -> dict[str, Any]:
    """Return what the deploy needs to know of one runtime directory."""
    try:
        manifest = store.read_json(home / MANIFEST)
    except store.BrokenState as error:
        return {"complete": False, "drift": [str(error)]}
    if manifest is None:
        return {"complete": False, "drift": []}
    found = drift(home, manifest)
    return {"complete": not found, "drift": found, "route": manifest.get("route")}


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


def aside_of(home: Path) -> Path:
    """Return where a changed runtime is kept until its successor is complete."""
    return home.with_name(f".{home.name}.changed")


def give_back(root: Path | None = None) -> None:
    """Undo what killed rebuilds left: the changed runtime returns, or goes when it was replaced.

    For whoever holds the lock of the builds. The rebuild may be of a runtime that nobody asks for
    any more and that still serves.
    """
    for aside in sorted((layout.RUNTIMES if root is None else root).glob(".*.changed")):
        home = aside.with_name(aside.name.removeprefix(".").removesuffix(".changed"))
        if (home / MANIFEST).exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            shutil.rmtree(home, ignore_errors=True)
            aside.rename(home)


def inspect(home: Path) -> dict[str, Any]:
    """Check every byte of a runtime and note damage in it, for the next deploy to heal."""
    manifest = store.read_json(home / MANIFEST)
    site = site_packages(home)
    if manifest is None or site is None:
        return {"ok": False, "id": home.name, "faults": ["it is not complete; run the deploy"]}
    patched = {home / name for name in manifest.get("patched", {})}
    faults = damaged(site, patched, len(os.sched_getaffinity(0)))
    if faults:
        names = [os.path.relpath(fault.path, site) for fault in faults]
        store.write_json(home / DAMAGED, {"files": names})
    else:
        (home / DAMAGED).unlink(missing_ok=True)
    words = [str(fault) for fault in faults] + drift(home, manifest)
    return {"ok": not words, "id": home.name, "faults": words}


def main(argv: list[str]) -> int:
    """Check every byte of a runtime, the one in service when none is named."""
    parser = argparse.ArgumentParser(prog="dsv4 runtime", description=__doc__)
    parser.add_argument("id", nargs="?", default=link_target(layout.CURRENT))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.id is None or "/" in options.id:
        sys.stderr.write(f"dsv4 runtime: {options.id or 'none is in service'}: no such runtime\n")
        return 3
    try:
        found = inspect(layout.RUNTIMES / options.id)
    except (store.BrokenState, OSError) as error:
        sys.stderr.write(f"dsv4 runtime: {error}\n")
        return 3
    if options.json:
        json.dump(found, sys.stdout)
        print()
    else:
        for fault in found["faults"] or ["every file is as it was built"]:
            print(f"dsv4 runtime: {options.id}: {fault}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
