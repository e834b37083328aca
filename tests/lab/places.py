"""Where the lab keeps things, and how its machines are called.

Two roots, because they live differently: caches survive `destroy`, machines do not. Both can be
moved by the environment (`DSV4_LAB_CACHE`, `DSV4_LAB_DIR`).
"""

import os
import re
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parents[2]
OVERLAY: Final = REPO / "tests/lab/machine"
VENV_PYTHON: Final = REPO / ".venv/bin/python"

CACHE: Final = Path(os.environ.get("DSV4_LAB_CACHE") or "/var/cache/dsv4-lab").absolute()
IMAGES: Final = CACHE / "images"
ARCHIVES: Final = CACHE / "archives"
UV_CACHE: Final = CACHE / "uv"
PACKS: Final = CACHE / "packs"

HOME: Final = Path(os.environ.get("DSV4_LAB_DIR") or "/var/lib/dsv4-lab").absolute()
STATE: Final = HOME / "state.json"
LOCK: Final = HOME / "lock"
SSH_KEY: Final = HOME / "ssh/id_ed25519"
MACHINES: Final = HOME / "machines"
HUB: Final = HOME / "hub"
LOGS: Final = HOME / "logs"
PINS: Final = HOME / "pins"

DEFAULT_NAME: Final = "dsv4-lab"
USER: Final = "spark"
# Lowest ports tried; each machine keeps the ones it got
SSH_PORT: Final = 2222
SERVE_PORT: Final = 8899
HUB_PORT: Final = 8790

# A host name, a directory name and a word of a command line, all at once
NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,30}[a-z0-9]")
