"""Build a wheel from an archive of sources, with the packages of the runtime it is for.

The plugin compiles against the very torch and exllamav3 it will be loaded beside, so there is no
build environment of its own: its build backend runs in the runtime, and nothing is downloaded.
"""

import gzip
import hashlib
import json
import shutil
import subprocess
import tarfile
import tomllib
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from dsv4 import artefact, install, store

BUILD: Final = (
    "import importlib, sys; backend = importlib.import_module(sys.argv[1]);"
    " backend.build_wheel(sys.argv[2])"
)
DEFAULT_BACKEND: Final = "setuptools.build_meta"


class PluginError(Exception):
    """The sources are not what they should be; the text says what to do."""


def key(sources_sha256: str, ingredients: Mapping[str, str]) -> str:
    """Return the name of what comes out: it follows from the sources and the ingredients."""
    text = json.dumps([sources_sha256, dict(ingredients)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unpack(archive: Path, into: Path) -> Path:
    """Unpack an archive of plain files and directories; return its one top directory."""
    into.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                name = PurePosixPath(member.name)
                plain = member.isfile() or member.isdir()
                if name.is_absolute() or ".." in name.parts or not plain:
                    raise PluginError(
                        f"{archive.name}: holds {member.name}, which is no plain file"
                    )
            tar.extractall(into)  # noqa: S202 - every member was looked at
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        why = str(error).partition(":")[0]  # tarfile goes on with a line for each format
        raise PluginError(
            f"{archive.name}: is no whole archive ({why}); take its hash out of"
            " inventories/pins/HOST.json and run the deploy again"
        ) from error
    tops = [path for path in into.iterdir() if path.is_dir()]
    if len(tops) != 1:
        raise PluginError(f"{archive.name}: wanted one top directory, got {len(tops)}")
    return tops[0]


def backend_of(sources: Path) -> str:
    """Return the build backend a source tree names."""
    try:
        project = tomllib.loads((sources / "pyproject.toml").read_text())
    except FileNotFoundError:
        return DEFAULT_BACKEND
    except (OSError, ValueError) as error:
        raise PluginError(f"{sources.name}/pyproject.toml: cannot be read ({error})") from error
    return str(project.get("build-system", {}).get("build-backend") or DEFAULT_BACKEND)


def build(
    archive: Path,
    commit: str | None,
    python: Path,
    wheels: Path,
    environment: Mapping[str, str],
    ingredients: Mapping[str, str],
    say: Callable[[str], None],
) -> Path:
    """Return the wheel made of an archive, from `wheels` when it was made before.

    `ingredients` are the versions it is compiled against. Raises `PluginError` or `InstallError`.
    """
    digest = store.sha256_file(archive) or ""
    found = artefact.commit_of(archive)
    if commit and found and found != commit:
        raise PluginError(f"{archive.name}: expected commit {commit}, got {found}")
    name = key(digest, ingredients)
    home = wheels / name
    kept = store.read_json_or(home / "made.json", {})
    wheel = home / str(kept.get("wheel"))
    if kept.get("sha256") and store.sha256_file(wheel) == kept["sha256"]:
        say(f"take {wheel.name}, built before from the same sources")
        return wheel
    work = wheels / f".{name}.build"
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)
    try:
        sources = unpack(archive, work / "sources")
        out = work / "out"
        out.mkdir()
        backend = backend_of(sources)
        say(f"compile {archive.name}")
        command = [str(python), "-I", "-c", BUILD, backend, str(out)]
        install.call(command, f"building {archive.name}", environment, sources)
        made = sorted(out.glob("*.whl"))
        if len(made) != 1:
            raise PluginError(f"{archive.name}: wanted one wheel of it, got {len(made)}")
        store.write_json(
            out / "made.json",
            {
                "wheel": made[0].name,
                "sha256": store.sha256_file(made[0]),
                "sources": {"archive": archive.name, "sha256": digest, "commit": commit},
                "ingredients": dict(ingredients),
            },
        )
        subprocess.run(["sync", "-f", str(out)], check=False)
        out.rename(home)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return home / made[0].name
