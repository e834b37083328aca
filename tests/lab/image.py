"""The base image: a blank Debian 12 that boots, kept in the cache and copied for each machine."""

import hashlib
import inspect
import os
import shutil
from pathlib import Path

from tests.lab import host_config, places
from tests.lab.steps import LabError, locked, remove_tree, run, say

SUITE = "bookworm"
# A machine that can be reached and become root, and no more: the deploy installs what it needs
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "libpam-systemd",
    "dbus",
    "openssh-server",
    "sudo",
    "python3",
    "ca-certificates",
    "iproute2",
    "procps",
)


def os_id(text: str) -> str:
    """Return `ID` from an os-release file."""
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "ID":
            return value.strip("\"'")
    return ""


def host_sources() -> list[host_config.Source]:
    """Return all of the host's apt sources, with mirror lists replaced by their first mirror."""
    found: list[host_config.Source] = []
    etc = Path("/etc/apt")
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".sources":
            found += host_config.parse_deb822(text)
        elif path.suffix == ".list":
            found += host_config.parse_one_line(text)
    return [
        host_config.Source(_first_mirror(s.uri), s.suite, s.components, s.signed_by) for s in found
    ]


def _first_mirror(uri: str) -> str:
    if not uri.startswith("mirror+file:"):
        return uri
    try:
        words = Path(uri.removeprefix("mirror+file:")).read_text().split()
    except OSError:
        return uri
    return next((word for word in words if "://" in word), uri)


def archive() -> host_config.Archive | None:
    """Return the mirror to use: the owner's choice, the host's own, or None for the default."""
    if chosen := os.environ.get("DSV4_LAB_MIRROR"):
        return host_config.Archive(chosen.rstrip("/"))
    if os_id(Path("/etc/os-release").read_text()) != "debian":
        return None
    return host_config.debian_archive(host_sources())


def recipe() -> str:
    """Return what the image is made of, as a short hash: another recipe is another image."""
    text = "\n".join([SUITE, *PACKAGES, inspect.getsource(_build), inspect.getsource(_finish)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def ensure() -> Path:
    """Return the base image, built first when the cache has none of this recipe."""
    finished = places.IMAGES / f"{SUITE}-{recipe()}"
    if finished.is_dir():
        return finished
    places.IMAGES.mkdir(parents=True, exist_ok=True)
    with locked(places.CACHE / "image.lock", "the base image") as descriptor:
        if not finished.is_dir():
            _build(finished, descriptor)
    return finished


def _build(finished: Path, lock: int) -> None:
    # The lock is ours, so what is not finished was left by a run that was cut off. Of earlier
    # recipes the last stays: another checkout may be at it.
    for left in places.IMAGES.glob("*.part"):
        remove_tree(left)
    earlier = sorted(places.IMAGES.iterdir(), key=lambda path: path.stat().st_mtime)
    for left in earlier[:-1]:
        remove_tree(left)
    growing = finished.with_name(f"{finished.name}.part")
    places.ARCHIVES.mkdir(parents=True, exist_ok=True)
    source = archive()
    say(f"lab: mirror {source.mirror if source else '(the default of debootstrap)'}")
    env = dict(os.environ)
    for scheme in ("http", "https"):
        proxy = run(["apt-config", "shell", "P", f"Acquire::{scheme}::Proxy"]).strip()
        address = proxy.partition("=")[2].strip("'")
        if address not in {"", "DIRECT"}:
            env.setdefault(f"{scheme}_proxy", address)
    # Its own mount namespace: what debootstrap mounts in there vanishes with it, however it ends.
    # It inherits the lock, so that an orphan of a killed run is waited for.
    run(
        [
            *("unshare", "--mount", "--propagation", "private"),
            *("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"),
            f"--cache-dir={places.ARCHIVES}",
            *(SUITE, growing),
            *([source.mirror] if source else []),
        ],
        log=places.CACHE / "image.log",
        env=env | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        pass_fds=[lock],
        what="debootstrap",
    )
    _finish(growing)
    growing.rename(finished)


def _finish(root: Path) -> None:
    """Take out what must not be the same on two machines, and what only fills the disk."""
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/machine-id").write_text("")
    (root / "var/lib/dbus/machine-id").unlink(missing_ok=True)
    shutil.rmtree(root / "var/cache/apt/archives")
    (root / "var/cache/apt/archives/partial").mkdir(parents=True)
    run(
        [
            "chroot",
            root,
            "useradd",
            "--create-home",
            "--shell",
            "/bin/bash",
            *("--groups", "adm"),
            places.USER,
        ]
    )
    sudoers = root / "etc/sudoers.d/lab"
    sudoers.write_text(
        f"{places.USER} ALL=(ALL) NOPASSWD: ALL\n"
        'Defaults env_keep += "http_proxy https_proxy all_proxy no_proxy '
        'HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY SSL_CERT_FILE REQUESTS_CA_BUNDLE"\n'
    )
    sudoers.chmod(0o440)
    # Kept across boots, as on a real machine; journald decides by this directory
    (root / "var/log/journal").mkdir(exist_ok=True)
    if not (root / "usr/sbin/sshd").exists():
        raise LabError(f"the base image has no sshd; see {places.CACHE / 'image.log'}")
