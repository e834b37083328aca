"""One virtual Spark: made from the image, configured after the host, booted, stopped, deleted."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dsv4 import layout, store
from tests.lab import host_config, image, places, state
from tests.lab.steps import LabError, is_alive, locked, marked, remove_tree, run, say, step

BOOT_LIMIT_S = 120
STOP_LIMIT_S = 60


# --- the lab's data -------------------------------------------------------------------------------


def register(name: str) -> state.Machine:
    """Return a machine's ports, promised to it for good the first time."""
    with locked(places.LOCK, "the lab's state"):
        lab = state.read()
        if name not in lab.machines:
            taken = lab.ports()
            ssh_port = state.free_port(places.SSH_PORT, taken)
            serve_port = state.free_port(places.SERVE_PORT, taken | {ssh_port})
            lab.machines[name] = state.Machine(ssh_port, serve_port)
            # From the first machine on: a host without one would be sent to the public hub
            lab.hub_port = lab.hub_port or state.free_port(places.HUB_PORT, lab.ports())
            store.write_json(places.STATE, lab.as_json())
        return lab.machines[name]


def update(name: str, wheel_mirror: str | None) -> None:
    """Record where the machine finds the host's wheels."""
    with locked(places.LOCK, "the lab's state"):
        lab = state.read()
        lab.machines[name].wheel_mirror = wheel_mirror
        store.write_json(places.STATE, lab.as_json())


def forget(name: str) -> None:
    """Give a machine's ports back."""
    with locked(places.LOCK, "the lab's state"):
        lab = state.read()
        if lab.machines.pop(name, None):
            store.write_json(places.STATE, lab.as_json())


def known_names() -> list[str]:
    """Return the machines of the lab."""
    return sorted(state.read().machines)


def ensure_key() -> str:
    """Return the lab's public key, made once."""
    public = places.SSH_KEY.with_suffix(".pub")
    with locked(places.LOCK, "the lab's key"):
        if not (places.SSH_KEY.is_file() and public.is_file()):
            remove_tree(places.SSH_KEY.parent)
            growing = places.SSH_KEY.parent.with_name("ssh.part")
            remove_tree(growing)
            growing.mkdir(mode=0o700, parents=True)
            key = growing / places.SSH_KEY.name
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "dsv4-lab", "-f", key])
            growing.rename(places.SSH_KEY.parent)
    return public.read_text().strip()


# --- the disk -------------------------------------------------------------------------------------


def create(name: str) -> Path:
    """Return the machine's root, copied from the image when it has none."""
    root = places.MACHINES / name / "rootfs"
    if root.is_dir():
        return root
    base = image.ensure()
    growing = root.with_name("rootfs.part")
    remove_tree(growing)
    growing.parent.mkdir(parents=True, exist_ok=True)
    run(["cp", "--archive", "--reflink=auto", base, growing])
    key = growing / "etc/ssh/ssh_host_ed25519_key"
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{name}", "-f", key])
    growing.rename(root)
    return root


def pip_config() -> dict[str, str]:
    """Return what the host's pip is configured with."""
    for python in (places.VENV_PYTHON, Path(sys.executable)):
        with contextlib.suppress(LabError, OSError):
            return host_config.pip_options(run([python, "-m", "pip", "config", "list"]))
    return {}


def configure(name: str, root: Path, ports: state.Machine) -> list[str]:
    """Write what makes this root this machine on this host; return nspawn's bind options."""
    _put(root / "etc/hostname", f"{name}\n")
    _put(root / "etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost\n")
    _put(
        root / "etc/ssh/sshd_config.d/lab.conf",
        f"Port {ports.ssh_port}\nListenAddress 127.0.0.1\n"
        "HostKey /etc/ssh/ssh_host_ed25519_key\n"
        "PasswordAuthentication no\nUseDNS no\nMaxStartups 100\n",
    )
    _authorise(root, ensure_key())
    host_key = (root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
    _put(
        root.parent / "known_hosts",
        f"[127.0.0.1]:{ports.ssh_port} {host_key[0]} {host_key[1]}\n",
    )
    _overlay(places.OVERLAY, root)

    source = image.archive()
    if source:
        _put(root / "etc/apt/sources.list", source.sources_list(image.SUITE))
    settings = host_config.apt_settings(run(["apt-config", "dump"]))
    _put(root / "etc/apt/apt.conf.d/90lab", settings)
    _stock_archives(root)

    own_cas = _trust(root)
    variables = host_config.environment(os.environ, own_cas)
    quoted = {key: f'"{value}"' for key, value in variables.items()}
    _put(root / "etc/environment", "".join(f"{k}={v}\n" for k, v in quoted.items()))
    # /etc/environment is for logins; services have it from here
    defaults = " ".join(f'"{key}={value}"' for key, value in variables.items())
    _put(
        root / "etc/systemd/system.conf.d/lab.conf",
        f"[Manager]\nDefaultEnvironment={defaults}\n" if variables else "",
    )

    found = host_config.packages(pip_config(), own_cas, lambda path: Path(path).is_dir())
    _put(root / "etc/pip.conf", found.pip_conf)
    _put(root / "etc/uv/uv.toml", found.uv_toml)
    update(name, found.wheel_mirror)
    places.UV_CACHE.mkdir(parents=True, exist_ok=True)
    return [
        f"--bind={places.UV_CACHE}:{layout.UV_CACHE}",
        *(f"--bind-ro={path}" for path in found.binds),
    ]


def _put(path: Path, text: str) -> None:
    """Write a file of the machine, or remove it when there is nothing to say."""
    if text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    else:
        path.unlink(missing_ok=True)


def _overlay(tree: Path, root: Path) -> None:
    """Copy the lab's own files in, whatever modes this checkout's umask gave them."""
    for source in sorted(tree.rglob("*")):
        target = root / source.relative_to(tree)
        if source.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)


def _authorise(root: Path, public: str) -> None:
    home = root / "home" / places.USER
    owner = home.stat()
    folder = home / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "authorized_keys").write_text(f"{public}\n")
    for path in (folder, folder / "authorized_keys"):
        os.chown(path, owner.st_uid, owner.st_gid)


def _trust(root: Path) -> bool:
    """Make the machine trust what the host trusts; tell whether that was more than Debian's list.

    Through the directory that `update-ca-certificates` reads, so that it outlives the next one.
    """
    folder = root / "usr/local/share/ca-certificates/host"
    bundle = Path(os.environ.get("SSL_CERT_FILE") or host_config.CA_BUNDLE)
    host = bundle.read_text(errors="replace") if bundle.is_file() else ""
    ours = {
        f"{number:03}.crt": text
        for number, text in enumerate(
            host_config.extra_certificates(host, _debian_certificates(root))
        )
    }
    there = {path.name: path.read_text() for path in folder.glob("*.crt")}
    if there != ours:
        remove_tree(folder)
        for file, text in ours.items():
            _put(folder / file, text)
        run(["chroot", root, "update-ca-certificates", "--fresh"])
    return bool(ours)


def _debian_certificates(root: Path) -> str:
    folder = root / "usr/share/ca-certificates/mozilla"
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.crt")))


def _stock_archives(root: Path) -> None:
    """Give the machine's apt the packages that were downloaded before."""
    _link_new(places.ARCHIVES, root / "var/cache/apt/archives")


def harvest_archives(name: str) -> None:
    """Keep the packages that the machine's apt downloaded, for the next machine."""
    _link_new(places.MACHINES / name / "rootfs/var/cache/apt/archives", places.ARCHIVES)


def _link_new(source: Path, target: Path) -> None:
    """Link each package of `source` that `target` lacks: no copy, and no lock to share."""
    target.mkdir(parents=True, exist_ok=True)
    for package in source.glob("*.deb"):
        there = target / package.name
        if not there.exists():
            try:
                there.hardlink_to(package)
            except OSError:
                shutil.copy2(package, there)


# --- the process ----------------------------------------------------------------------------------


def _record(name: str) -> dict[str, Any]:
    return store.read_json_or(places.MACHINES / name / "keeper.json", {})


def is_kept(name: str) -> bool:
    """Tell whether the machine runs and its keeper looks after it."""
    kept = _record(name)
    return is_alive(kept.get("pid"), kept.get("start"))


def is_running(name: str) -> bool:
    """Tell whether anything of the machine lives: keeper, nspawn or the machine itself."""
    kept = _record(name)
    return (
        is_kept(name)
        or is_alive(kept.get("nspawn_pid"), kept.get("nspawn_start"))
        or bool(marked(places.MACHINES / name))
    )


def ssh_argv(name: str) -> list[str]:
    """Return the ssh command line that reaches the machine, without a command to run."""
    data = state.host_data(state.read(), name)
    return [
        *("ssh", "-F", "none", "-p", str(data["ssh_port"]), "-i", data["ssh_key"]),
        *("-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes", "-o", "LogLevel=ERROR"),
        *("-o", f"UserKnownHostsFile={data['ssh_known_hosts_file']}"),
        f"{data['ssh_user']}@{data['ssh_hostname']}",
    ]


def answers(name: str) -> bool:
    """Tell whether the machine lets its user in, which it does from the end of its boot."""
    argv = ssh_argv(name)
    argv[1:1] = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=3"]
    try:
        done = subprocess.run(
            [*argv, "true"], check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=10
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def up(name: str) -> None:
    """Bring the machine to where ssh answers, whatever state it was left in."""
    with locked(places.HOME / f"{name}.lock", f"machine {name}"):
        if is_kept(name) and _comes_up(name):
            say(f"lab: {name} runs")
            return
        _end(name)
        with step(f"machine {name}"):
            ports = register(name)
            root = create(name)
            binds = configure(name, root, ports)
        with step(f"{name} boots"):
            _start(name, binds)
            if not _comes_up(name):
                log = places.MACHINES / name / "console.log"
                state_now = "does not answer on ssh" if is_running(name) else "went down"
                raise LabError(f"{name} {state_now} ({_last_line(log)}); see {log}")


def _start(name: str, binds: list[str]) -> None:
    log = places.MACHINES / name / "console.log"
    with log.open("wb") as console:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.keeper", name, *binds],
            cwd=places.REPO,
            env=os.environ | {"PYTHONPATH": f"{places.REPO}:{places.REPO}/files/opt/dsv4/lib"},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )
    # It writes its record itself once the machine's own process is there
    deadline = time.monotonic() + 20
    while _record(name).get("pid") != keeper.pid:
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise LabError(f"{name} did not start ({_last_line(log)}); see {log}")
        time.sleep(0.05)


def _comes_up(name: str) -> bool:
    """Wait for the machine to answer; False when it went down instead, or never does."""
    deadline = time.monotonic() + BOOT_LIMIT_S
    while is_kept(name) and time.monotonic() < deadline:
        if answers(name):
            return True
        time.sleep(0.2)
    return False


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def down(name: str) -> None:
    """Shut the machine down in order, and by force only what outlives that."""
    with locked(places.HOME / f"{name}.lock", f"machine {name}"):
        _end(name)


def _end(name: str) -> None:
    kept = _record(name)

    def is_gone(limit: float) -> bool:
        deadline = time.monotonic() + limit
        while is_running(name):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    if is_kept(name):
        _tell(kept["pid"], signal.SIGTERM)
    else:
        # The kernel told nspawn when its keeper died, and a second time would make it hurry; an
        # orphan nobody told
        for pid in marked(places.MACHINES / name):
            if not is_alive(kept.get("nspawn_pid"), kept.get("nspawn_start")):
                _tell(pid, signal.SIGRTMIN + 4)
    if not is_gone(STOP_LIMIT_S):
        say(f"lab: {name} still runs after {STOP_LIMIT_S} s; killing it")
        for pid in marked(places.MACHINES / name):
            _tell(pid, signal.SIGKILL)
        for who in ("nspawn_", ""):
            if is_alive(kept.get(f"{who}pid"), kept.get(f"{who}start")):
                _tell(kept[f"{who}pid"], signal.SIGKILL)
        if not is_gone(10):
            raise LabError(f"{name} cannot be stopped; see {places.MACHINES / name}/keeper.json")
    if (places.MACHINES / name / "rootfs").is_dir():
        harvest_archives(name)
    (places.MACHINES / name / "keeper.json").unlink(missing_ok=True)


def _tell(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def destroy(name: str) -> None:
    """Delete the machine and give its ports back; caches stay."""
    down(name)
    with locked(places.HOME / f"{name}.lock", f"machine {name}"):
        remove_tree(places.MACHINES / name)
        (places.PINS / f"{name}.json").unlink(missing_ok=True)
    forget(name)
