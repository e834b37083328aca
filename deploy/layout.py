"""Every path, user and unit name, once: the target's from `dsv4.layout`, the repository's here.

Local roots are absolute, because a deploy may be started from any directory.
"""

from pathlib import Path
from typing import Final

# One name for one thing: `layout.SERVE_YAML` is the same object on both sides
from dsv4.layout import *  # noqa: F403

REPO: Final = Path(__file__).resolve().parent.parent
FILES: Final = REPO / "files"
TEMPLATES: Final = REPO / "templates"
LOCAL_LIB: Final = FILES / "opt/dsv4/lib/dsv4"
LOCAL_LOCKS: Final = FILES / "opt/dsv4/locks"
INVENTORIES: Final = REPO / "inventories"
PINS: Final = INVENTORIES / "pins"
LOCAL_RECEIPTS: Final = REPO / ".receipts"
README: Final = REPO / "README.md"
