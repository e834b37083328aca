"""The target's tools as one upload: the bytes under files/opt/dsv4, named by what is in them."""

import base64
import gzip
import io
import shlex
import tarfile
from functools import cache

from deploy import layout
from dsv4.state import library_hash as hash_of


@cache
def library_hash() -> str:
    """Return the hash that names this version of the tools."""
    return hash_of(layout.LOCAL_LIB)


@cache
def archive() -> str:
    """Return the tools as base64 of a tar file whose bytes depend on the sources only."""
    buffer = io.BytesIO()
    name = f"dsv4-{library_hash()}"
    # gzip would write the time of day into its header
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in sorted(layout.LOCAL_LIB.rglob("*.py")):
            _add(tar, f"{name}/{path.relative_to(layout.LOCAL_LIB)}", path.read_bytes(), 0o644)
        _add(tar, "bin/dsv4", (layout.FILES / "opt/dsv4/bin/dsv4").read_bytes(), 0o755)
    return base64.encodebytes(buffer.getvalue()).decode()


def run_command(*words: str) -> str:
    """Return the shell lines that run a tool from the archive on stdin, and leave nothing there.

    For what must work whatever tools the target has, none or damaged ones included.
    """
    return "\n".join(
        [
            "set -eu",
            "umask 077",
            "tools=$(mktemp -d)",
            "trap 'rm -rf \"$tools\"' EXIT",
            'base64 -d | tar -xzf - -C "$tools" --no-same-owner',
            f'mv "$tools/dsv4-{library_hash()}" "$tools/dsv4"',
            f'PYTHONPATH="$tools" PYTHONDONTWRITEBYTECODE=1 python3 -m dsv4 {shlex.join(words)}',
        ]
    )


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = mode
    tar.addfile(member, io.BytesIO(content))


def install_command() -> str:
    """Return the shell lines that put the archive on stdin in place by renames.

    The tools are a versioned directory behind a link, so that a guard starting in this very moment
    sees the old version or the new one. The one before stays: running guards came from it.
    """
    lib, name = layout.LIB, f"dsv4-{library_hash()}"
    return "\n".join(
        [
            "set -eu",
            "umask 022",
            # The same lock as the tools': a killed deploy's command may still be at work here
            f"exec 9>{layout.WORK_LOCK}",
            "flock -w 1800 9",
            "command -v python3 >/dev/null || {"
            " DEBIAN_FRONTEND=noninteractive apt-get update -q >&2;"
            " DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3 >&2; }",
            f"mkdir -p {lib} {layout.BIN}",
            *(
                f"if [ -d {path} ] && [ ! -L {path} ]; then"
                f" echo '{path}: a directory is in the way, move it elsewhere; then run the deploy"
                " again' >&2; exit 1; fi"
                for path in (lib / "dsv4", layout.DSV4)
            ),
            f"rm -rf {lib}/.new {lib}/.old",
            f"mkdir {lib}/.new",
            f"base64 -d | tar -xzf - -C {lib}/.new --no-same-owner",
            f"sync -f {lib}/.new",
            f"[ ! -e {lib}/{name} ] || mv {lib}/{name} {lib}/.old",
            f"mv {lib}/.new/{name} {lib}/{name}",
            f"ln -sfn {name} {lib}/.link",
            f"mv -fT {lib}/.link {lib}/dsv4",
            f"mv -f {lib}/.new/bin/dsv4 {layout.DSV4}",
            f"rm -rf {lib}/.new {lib}/.old",
            f"ls -1dt {lib}/dsv4-* | tail -n +3 | xargs -r rm -rf",
        ]
    )
