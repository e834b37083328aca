"""The tiny pack, and the loopback hub that the machines download it from."""

import hashlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from deploy import packs
from dsv4 import store
from tests.lab import places, state
from tests.lab.steps import LabError, is_alive, locked, remove_tree, run, started_at, step

PACK = packs.PACKS["lab-tiny"]
TINY_PACK = places.REPO / "tests/lab/tiny_pack.py"
HUB_SCRIPT = places.REPO / "tests/lab/hub.py"
RECORD = places.HUB / "hub.json"
LOG = places.HUB / "hub.log"


def _key(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def ensure_pack() -> Path:
    """Return a hub's root that holds the tiny pack, made anew when its tool has changed."""
    target = places.PACKS / _key(TINY_PACK)
    with locked(places.CACHE / "pack.lock", "the tiny pack"), step("tiny pack"):
        if not target.is_dir():
            growing = target.with_name(f"{target.name}.part")
            remove_tree(growing)
            run(
                [places.VENV_PYTHON, TINY_PACK, "--out", growing / PACK.repo_id / "files"],
                log=places.CACHE / "pack.log",
                env=_python_path(),
            )
            growing.rename(target)
    return target


def ensure_hub(root: Path) -> str:
    """Return the address of a hub that serves `root`, started when there is none."""
    with locked(places.HOME / "hub.lock", "the hub"), step("hub"):
        kept = store.read_json_or(RECORD, {})
        wanted = {"root": str(root), "code": _key(HUB_SCRIPT)}
        port = state.read().hub_port
        if (
            port
            and is_alive(kept.get("pid"), kept.get("start"))
            and {key: kept.get(key) for key in wanted} == wanted
            and _listens(port)
        ):
            return _url(port)
        _stop()
        port = _promised_port()
        places.HUB.mkdir(parents=True, exist_ok=True)
        with LOG.open("wb") as log:
            hub = subprocess.Popen(
                [
                    *(places.VENV_PYTHON, HUB_SCRIPT, "--root", root),
                    *("--port", str(port), "--pidfile", places.HUB / "pid"),
                ],
                cwd=places.REPO,
                env=_python_path(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        store.write_json(RECORD, {"pid": hub.pid, "start": started_at(hub.pid), **wanted})
        deadline = time.monotonic() + 20
        while not _listens(port):
            if hub.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"the hub did not start on 127.0.0.1:{port}; see {LOG}")
            time.sleep(0.05)
        return _url(port)


def stop_hub() -> None:
    """Stop the hub, if it is ours and runs."""
    with locked(places.HOME / "hub.lock", "the hub"):
        _stop()


def _stop() -> None:
    kept = store.read_json_or(RECORD, {})
    pid, start = kept.get("pid"), kept.get("start")
    for number in (signal.SIGTERM, signal.SIGKILL):
        if is_alive(pid, start):
            os.kill(int(str(pid)), number)
            deadline = time.monotonic() + 5
            while is_alive(pid, start) and time.monotonic() < deadline:
                time.sleep(0.05)
    RECORD.unlink(missing_ok=True)


def _promised_port() -> int:
    with locked(places.LOCK, "the lab's state"):
        lab = state.read()
        if lab.hub_port is None or not state.is_free(lab.hub_port):
            lab.hub_port = state.free_port(places.HUB_PORT, lab.ports())
            store.write_json(places.STATE, lab.as_json())
        return lab.hub_port


def _listens(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{_url(port)}/", timeout=3):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _python_path() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{places.REPO}:{places.REPO}/files/opt/dsv4/lib"}
