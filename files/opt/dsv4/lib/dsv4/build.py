"""Build the runtime that /etc/dsv4/build.json describes, beside the one in service.

Runs as the unit dsv4-build, so that neither a dropped connection nor a killed deploy stops it, and
starting it again is always right: a runtime is complete when its manifest is there, anything else
is swept away and built anew. Files are copied, not linked: uv's hard links share their bytes with
its cache, so that an edit in one runtime would reach every later one.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from dsv4 import layout, runtime, store

GIB: Final = 1 << 30
UV: Final = (str(layout.TOOLS / "bin/uv"), "--cache-dir", str(layout.UV_CACHE))


class BuildError(Exception):
    """The build cannot go on; the text says what is wrong and what to do."""


def step(progress: Path, name: str, identity: str) -> None:
    """Say where the build is, in the journal and for the deploy that follows it."""
    print(f"dsv4 build: {name}", flush=True)
    store.write_json(
        progress, {"state": "running", "step": name, "id": identity, "at": int(time.time())}
    )


def check_space(path: Path, needed: int) -> None:
    """Refuse before the first byte when the runtime will not fit."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise BuildError(
            f"{path}: the runtime needs {needed / 1e9:.1f} GB ({needed / GIB:.1f} GiB) free, has"
            f" {free / 1e9:.1f} GB ({free / GIB:.1f} GiB); make room and run the deploy again"
        )


def has_torch(mirror: str | None, lock: str) -> bool:
    """Say whether the wheel directory holds the very torch the lock asks for."""
    pinned = [line.split()[0] for line in lock.splitlines() if line.startswith("torch==")]
    if mirror is None or not pinned:
        return False
    version = pinned[0].removeprefix("torch==")
    return any(Path(mirror).glob(f"torch-{version}-*.whl"))


def install_command(spec: dict[str, Any], home: Path, lock: str) -> list[str]:
    """Return the uv call that fills an environment with exactly what the lock says."""
    command = [*UV, "pip", "sync", "--require-hashes"]
    command += ["--link-mode", "copy", "--no-progress"]
    command += [] if spec.get("compile_only") else ["--compile-bytecode"]
    command += ["--python", str(home / "bin/python")]
    mirror = spec.get("wheel_mirror")
    if mirror:
        command += ["--find-links", mirror]
    if spec.get("torch_backend") and not has_torch(mirror, lock):
        command += ["--torch-backend", spec["torch_backend"]]
    return [*command, spec["lock"]]


def call(command: list[str], what: str) -> None:
    """Run one command with its output in the journal; its failure is ours."""
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise BuildError(
            f"{what} failed with status {done.returncode}; the first error is above"
            f" (journalctl -u {layout.UNIT_BUILD})"
        )


def precompile(python: str, package: Path) -> None:
    """Compile a package's Python; a file that will not compile costs nobody who does not use it."""
    command = [python, "-I", "-m", "compileall", "-qq", str(package)]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL)


def add_alias(site: Path, name: str, source: str, local: str) -> None:
    """Make distribution `source` answer to `name` as well, with a local version of its own.

    The engine asks for the version of the distribution `vllm`, which its CPU build calls by
    another name; the alias carries the version and nothing else.
    """
    base = runtime.versions(site).get(source.replace("-", "_"))
    if base is None:
        raise BuildError(f"the lock installs no {source}, which should answer to {name}")
    found = f"{base}+{local}"
    info = site / f"{name}-{found}.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {found}\n"
    store.write_bytes(info / "METADATA", metadata.encode())
    store.write_bytes(info / "INSTALLER", b"dsv4\n")
    store.write_bytes(info / "RECORD", f"{info.name}/METADATA,,\n".encode())


def build(spec: dict[str, Any], progress: Path) -> None:
    """Build one runtime from its description; the manifest is the last thing written."""
    identity = str(spec["id"])
    home = layout.RUNTIMES / identity
    if runtime.examine(home)["complete"]:
        return
    lock_file = Path(spec["lock"])
    found = store.sha256_file(lock_file)
    if found != spec["lock_sha256"]:
        raise BuildError(f"{lock_file}: expected sha256 {spec['lock_sha256']}, got {found}")
    lock = lock_file.read_text()
    step(progress, "clear what an earlier try left", identity)
    aside = home.with_name(f".{identity}.changed")
    if (home / runtime.MANIFEST).exists():
        # It was complete once and may be in service: kept until its successor is complete
        shutil.rmtree(aside, ignore_errors=True)
        home.rename(aside)
    shutil.rmtree(home, ignore_errors=True)
    try:
        fill(spec, home, lock, progress)
    except BaseException:
        if aside.exists():
            shutil.rmtree(home, ignore_errors=True)
            aside.rename(home)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def fill(spec: dict[str, Any], home: Path, lock: str, progress: Path) -> None:
    """Make a complete runtime at a place where there is none; the manifest is written last."""
    identity = str(spec["id"])
    check_space(layout.RUNTIMES, int(spec.get("need_bytes", 0)))
    step(progress, "create the environment", identity)
    call(
        [
            *UV,
            *("venv", "--quiet", "--no-python-downloads", "--python", spec["python"], str(home)),
        ],
        f"creating a Python {spec['python']} environment",
    )
    step(progress, "install the locked packages", identity)
    call(install_command(spec, home, lock), "installing the locked packages")
    site = runtime.site_packages(home)
    if site is None:
        raise BuildError(f"{home}: has no site-packages after the install")
    # The manifest must not outlive, in a power cut, what it stands for; a disk takes its time for
    # gigabytes, so it begins while the files are still in memory to be checked
    pool = ThreadPoolExecutor((os.cpu_count() or 1) + 1)
    on_disk = pool.submit(os.sync)
    step(progress, "check every file against its RECORD", identity)
    faults = runtime.damaged(site, set(), os.cpu_count() or 1)
    if faults:
        raise BuildError(f"{len(faults)} files are damaged after the install, first: {faults[0]}")
    for name, (source, local) in sorted(spec.get("aliases", {}).items()):
        add_alias(site, name, source, local)
    step(progress, "import it", identity)
    python = str(home / "bin/python")
    checks = [
        pool.submit(call, [python, "-I", "-c", statement], f"`{statement}`")
        for statement in spec.get("checks", [])
    ]
    compiled = [
        pool.submit(precompile, python, site / package) for package in spec.get("compile_only", [])
    ]
    for done in (*checks, *compiled, on_disk):
        done.result()
    pool.shutdown()
    store.write_json(
        home / runtime.MANIFEST,
        {
            "id": identity,
            "route": spec.get("route"),
            "inputs": spec.get("inputs", {}),
            "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": runtime.versions(site),
            "metadata_hash": runtime.metadata_hash(site),
            "patched": {},
        },
    )


def main(argv: list[str]) -> int:
    """Build what the description asks for; 1 with one line when it cannot be done."""
    parser = argparse.ArgumentParser(prog="dsv4 build", description=__doc__)
    parser.add_argument("--spec", type=Path, default=layout.BUILD_JSON)
    options = parser.parse_args(argv)
    progress = layout.BUILD_PROGRESS
    progress.parent.mkdir(parents=True, exist_ok=True)
    layout.RUNTIMES.mkdir(parents=True, exist_ok=True)
    identity, text = "", ""
    try:
        spec = store.read_json(options.spec)
        if spec is None:
            raise BuildError(f"{options.spec}: is missing; run the deploy, which writes it")
        identity = str(spec["id"])
        with (layout.RUNTIMES / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            build(spec, progress)
    except (BuildError, store.BrokenState, OSError) as error:
        text = str(error)
    except (LookupError, ValueError, TypeError) as error:
        text = f"{error!r}: {options.spec} is not for this version; run the deploy, which writes it"
    if text:
        store.write_json(progress, {"state": "failed", "error": text, "id": identity})
        sys.stderr.write(f"dsv4 build: {text}\n")
        return 1
    store.write_json(progress, {"state": "done", "id": identity})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
