"""Build the runtime that /etc/dsv4/build.json describes, beside the one in service.

Runs as the unit dsv4-build, so that neither a dropped connection nor a killed deploy stops it, and
starting it again is always right: a runtime is complete when its manifest is there, anything else
is swept away and built anew. What takes long in it is kept by key (wheels, compiled objects).

The steps: fetch what no index has, by hash; install the lock; check every file; compile or put in
the extension and the plugin; patch; import; sync; write the manifest.
"""

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    artefact,
    extension,
    install,
    layout,
    memory,
    plugin,
    runtime,
    store,
    systemd,
    toolkit,
)
from dsv4.patches import PATCHES, engine

GIB: Final = 1 << 30
COMPILE_GIB: Final = 3.5
"""The heaviest compile job of the extension (its bindings), measured without debug information."""


class BuildError(Exception):
    """The build cannot go on; the text says what is wrong and what to do."""


FAILURES: Final = (
    BuildError,
    artefact.ArtefactError,
    extension.ExtensionError,
    install.InstallError,
    engine.PatchError,
    plugin.PluginError,
    store.BrokenState,
    OSError,
)


class Build:
    """One build: its description, where it goes, and where it is."""

    def __init__(self, spec: dict[str, Any], progress: Path) -> None:
        """Take a description as it was read; raises LookupError for one of another version."""
        self.spec, self.progress = spec, progress
        self.identity = str(spec["id"])
        self.home = layout.RUNTIMES / self.identity
        self.python = self.home / "bin/python"
        self.environment = toolkit.environment(spec, self.home, os.environ)
        self.patched: dict[str, str] = {}
        self.parts: dict[str, Any] = {}
        self.from_outside: list[str] = []

    @property
    def site(self) -> Path:
        """The environment's library directory."""
        found = runtime.site_packages(self.home)
        if found is None:
            raise BuildError(f"{self.home}: has no site-packages after the install")
        return found

    def step(self, name: str) -> None:
        """Say where the build is, in the journal and for the deploy that follows it."""
        print(f"dsv4 build: {name}", flush=True)
        store.write_json(
            self.progress,
            {"state": "running", "step": name, "id": self.identity, "at": int(time.time())},
        )

    # Before anything changes

    def lock_text(self) -> str:
        """Return the lock, which must be the one the deploy meant."""
        lock_file = Path(self.spec["lock"])
        found = store.sha256_file(lock_file)
        if found != self.spec["lock_sha256"]:
            raise BuildError(
                f"{lock_file}: expected sha256 {self.spec['lock_sha256']}, got {found}"
            )
        return lock_file.read_text()

    def refuse_early(self) -> None:
        """Refuse before the first byte what would fail after an hour."""
        needed = int(self.spec.get("need_bytes", 0))
        free = shutil.disk_usage(layout.RUNTIMES).free
        if free < needed:
            raise BuildError(
                f"{layout.RUNTIMES}: the runtime needs {needed / 1e9:.1f} GB"
                f" ({needed / GIB:.1f} GiB) free, has {free / 1e9:.1f} GB ({free / GIB:.1f} GiB);"
                " make room and run the deploy again"
            )
        if self.spec.get("extension", {}).get("compile"):
            self.make_room()

    def make_room(self) -> None:
        """Have memory for one compiler after the watchdog's floor, or refuse with the choices."""
        if not at_work(layout.UNIT):
            return
        if self.spec.get("stop_service"):
            self.step("stop the service, as build_stops_service says")
            subprocess.run(["systemctl", "stop", layout.UNIT], check=False)
            # A deploy that shall keep the service as it is must not take this for its owner's stop
            layout.STARTED_JSON.unlink(missing_ok=True)
            return
        available = available_gib()
        floor = float(self.spec.get("soft_floor_gib", 0))
        if available - floor < COMPILE_GIB:
            raise BuildError(
                f"compiling needs {COMPILE_GIB} GiB beside the served model, {available:.1f} GiB"
                f" are available and the watchdog acts at {floor:.1f} GiB; set"
                " build_stops_service=true, or name a wheel built elsewhere with exllamav3_wheel"
            )

    # The steps

    def fetch(self, part: Mapping[str, Any]) -> Path:
        """Return a file that no index has, by hash."""
        wanted = artefact.Wanted.from_json(dict(part))
        self.step(f"fetch {wanted.filename}")
        return artefact.fetch(wanted, self.spec.get("wheel_mirror"))

    def same_torch(self, after: str) -> None:
        """Refuse when a step put another torch in place of the one for this machine."""
        wanted = self.spec.get("torch_cuda")
        try:
            found = runtime.torch_cuda(self.site)
        except LookupError as error:
            raise BuildError(f"{error} after {after}") from error
        if (found is None) != (wanted is None) or not (found or "").startswith(wanted or ""):
            raise BuildError(
                f"after {after} torch is for {kind(found)}, wanted {kind(wanted)}; the lock or a"
                " wheel is for another machine"
            )

    def put_in(self, wheel: Path) -> None:
        """Install one wheel, without what it asks for: the lock has that."""
        self.from_outside.append(wheel.name.partition("-")[0])
        install.call(install.wheel_command(self.home, wheel), f"installing {wheel.name}")
        self.same_torch(f"installing {wheel.name}")

    def packages(self, lock: str) -> None:
        """Install what the lock says, and nothing else."""
        directories = [self.fetch(part).parent for part in self.spec.get("wheels", [])]
        self.step("create the environment")
        install.create(self.home, self.spec["python"])
        self.step("install the locked packages")
        install.call(
            install.locked_command(self.spec, self.home, lock, directories),
            "installing the locked packages",
        )
        for part in self.spec.get("replace", []):
            self.put_in(self.fetch(part))
        self.same_torch("installing the locked packages")

    def check_records(self) -> None:
        """Refuse an environment with a file that is not what its RECORD says."""
        self.step("check every file against its RECORD")
        changed = {self.home / name for name in self.patched}
        faults = runtime.damaged(self.site, changed, toolkit.cores())
        if faults:
            names = runtime.owners(
                self.site, {os.path.relpath(fault.path, self.site) for fault in faults}
            )
            install.purge(names)  # the cache gave wrong bytes: it is not asked for them again
            raise BuildError(
                f"{len(faults)} files are damaged after the install, first: {faults[0]}; what uv"
                f" had cached of {', '.join(sorted(names))} is purged: run the deploy again"
            )

    def note_unmet(self) -> None:
        """Say what wheels from outside the lock ask for in vain.

        Only said: the archived fork's wheel has no lock of its own, and whether it works with
        another's packages shows in the proof that follows.
        """
        if not self.from_outside:
            return
        self.parts["unmet"] = install.unmet(self.home, self.from_outside)
        for line in self.parts["unmet"]:
            print(f"dsv4 build: note: {line}; the lock decides", flush=True)

    def check_toolkit(self) -> None:
        """Refuse a toolkit that would fail later, or make code for another GPU."""
        wanted = self.spec.get("toolkit")
        if not wanted:
            return
        self.step("check the CUDA toolkit")
        faults = toolkit.faults(self.environment, tuple(wanted["release"]), wanted["arch"])
        if faults:
            raise BuildError("; ".join(faults))

    def extension(self) -> None:
        """Have exllamav3's compiled extension: from a wheel, or compiled here."""
        part = self.spec.get("extension")
        if not part:
            return
        if part.get("wheel"):
            wheel = self.fetch(part["wheel"])
        else:
            self.step("compile exllamav3's extension")
            log = layout.LOGS / f"build-{self.identity}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            jobs = memory.compile_jobs(available_gib(), toolkit.cores())
            source = install.download(
                part["name"],
                part["version"],
                part["sha256"],
                self.spec.get("wheel_mirror"),
                layout.WHEELS / "sources",
            )
            wheel = extension.build(
                source,
                part["sha256"],
                self.python,
                layout.WHEELS,
                self.environment,
                jobs,
                log,
                self.step,
            )
        self.put_in(wheel)
        self.parts["exllamav3_ext"] = {"wheel": wheel.name, "sha256": store.sha256_file(wheel)}

    def plugin(self) -> None:
        """Have the EXL3 plugin: from a wheel, or made of the sources of its commit."""
        part = self.spec.get("plugin")
        if not part:
            return
        found = self.fetch(part)
        wheel = found
        if found.suffix != ".whl":
            versions = runtime.versions(self.site)
            ingredients = {
                "torch": versions.get("torch", ""),
                "extension": str(self.parts.get("exllamav3_ext", {}).get("sha256", "")),
                "python": self.spec["python"],
                "machine": platform.machine(),
                "arch": self.environment.get("TORCH_CUDA_ARCH_LIST", ""),
            }
            environment = {
                **self.environment,
                "EXL3_EXT_INCLUDE": str(self.site / "exllamav3/exllamav3_ext"),
                "MAX_JOBS": str(memory.compile_jobs(available_gib(), toolkit.cores())),
            }
            wheel = plugin.build(
                found,
                part.get("commit"),
                self.python,
                layout.WHEELS,
                environment,
                ingredients,
                self.step,
            )
        self.put_in(wheel)
        self.parts["plugin"] = {
            "file": found.name,
            "sha256": store.sha256_file(found),
            "wheel": store.sha256_file(wheel),
        }

    def patch(self) -> None:
        """Apply the route's patches, all or none."""
        names = self.spec.get("patches", [])
        if not names:
            return
        self.step(f"patch {', '.join(names)}")
        report = engine.apply(self.site, [PATCHES[name] for name in names])
        prefix = self.site.relative_to(self.home)
        self.patched = {
            (prefix / name).as_posix(): str(hashes["after"])
            for name, hashes in report.files.items()
        }
        self.parts["patches"] = report.as_json()["patches"]

    def prove(self) -> None:
        """Import it, while what is on its way to the disk gets there."""
        self.step("import it")
        # The manifest must not outlive, in a power cut, what it stands for; a disk takes its time
        # for gigabytes, so that goes on meanwhile
        with ThreadPoolExecutor(toolkit.cores() + 1) as pool:
            work: list[Future[Any]] = [pool.submit(os.sync)]
            work += [
                pool.submit(
                    install.call, [str(self.python), "-I", "-c", statement], f"`{statement}`"
                )
                for statement in self.spec.get("checks", [])
            ]
            work += [
                pool.submit(precompile, self.python, self.site / package)
                for package in self.spec.get("compile_only", [])
            ]
            for done in work:
                done.result()
        os.sync()

    def finish(self) -> None:
        """Write the manifest: from here on the runtime is complete."""
        store.write_json(
            self.home / runtime.MANIFEST,
            {
                "id": self.identity,
                "route": self.spec.get("route"),
                "inputs": self.spec.get("inputs", {}),
                "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "versions": runtime.versions(self.site),
                "wheel_tags": runtime.wheel_tags(self.site),
                "torch_cuda": runtime.torch_cuda(self.site),
                "records": runtime.records(self.site),
                "patched": self.patched,
                "parts": self.parts,
            },
        )

    def fill(self, lock: str) -> None:
        """Make a complete runtime at a place where there is none."""
        self.packages(lock)
        self.check_records()
        for name, (source, local) in sorted(self.spec.get("aliases", {}).items()):
            add_alias(self.site, name, source, local)
        self.check_toolkit()
        self.extension()
        self.plugin()
        self.note_unmet()
        self.patch()
        self.prove()
        self.finish()

    def run(self) -> None:
        """Have the runtime; a complete one is left alone, a changed one stays until replaced."""
        runtime.give_back()  # what serves must be whole before anything can be refused
        if runtime.examine(self.home)["complete"]:
            return
        lock = self.lock_text()
        self.step("clear what an earlier try left")
        aside = runtime.aside_of(self.home)
        manifest = store.read_json_or(self.home / runtime.MANIFEST, {})
        if not manifest:
            shutil.rmtree(self.home, ignore_errors=True)
        self.refuse_early()
        if manifest:
            # It was complete once and may be in service: kept until its successor is complete
            install.purge(runtime.changed_packages(self.home, manifest))
            shutil.rmtree(aside, ignore_errors=True)
            self.home.rename(aside)
        try:
            self.fill(lock)
        except BaseException:
            if aside.exists():
                shutil.rmtree(self.home, ignore_errors=True)
                aside.rename(self.home)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def kind(cuda: str | None) -> str:
    """Return in words what a torch was made for."""
    return "the processor" if cuda is None else f"CUDA {cuda}"


def available_gib() -> float:
    """Return the memory that a compiler may take."""
    return memory.read_meminfo().available


def at_work(unit: str) -> bool:
    """Say whether a unit runs or starts."""
    return systemd.show(unit, "ActiveState").get("ActiveState") in {"active", "activating"}


def precompile(python: Path, package: Path) -> None:
    """Compile a package's Python; a file that will not compile costs nobody who does not use it."""
    command = [str(python), "-I", "-m", "compileall", "-qq", str(package)]
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
            Build(spec, progress).run()
    except FAILURES as error:
        text = str(error)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        text = f"{error!r}: {options.spec} is not for this version; run the deploy, which writes it"
    if text:
        store.write_json(progress, {"state": "failed", "error": text, "id": identity})
        sys.stderr.write(f"dsv4 build: {text}\n")
        return 1
    store.write_json(progress, {"state": "done", "id": identity})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
