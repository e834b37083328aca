"""A control group of its own for each machine, where the host has no systemd to ask for one.

`--keep-unit` makes nspawn boot in the group it was started in. Two machines started in one group
would share one tree, and each machine's systemd would end the other's processes.
"""

import contextlib
import re
from pathlib import Path


def own_groups(mountinfo: str, own: str) -> list[Path]:
    """Return this process's groups in the trees that systemd manages: v2, and v1's name=systemd."""
    paths = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = path.lstrip("/")
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mounted = Path(re.sub(r"\\040", " ", before.split()[4]))
        if kind == "cgroup2" and "" in paths:
            found.append(mounted / paths[""])
        elif kind == "cgroup" and "name=systemd" in options.split(","):
            found.append(mounted / paths.get("name=systemd", ""))
    return list(dict.fromkeys(found))


def make(name: str) -> list[Path]:
    """Create the empty groups of machine `name` below our own, and return them."""
    mountinfo = Path("/proc/self/mountinfo").read_text()
    groups = []
    for parent in own_groups(mountinfo, Path("/proc/self/cgroup").read_text()):
        group = (parent if parent.is_dir() else parent.parent) / f"dsv4-lab-{name}"
        remove(group)
        group.mkdir(exist_ok=True)
        groups.append(group)
    return groups


def remove(group: Path) -> None:
    """Delete a group and those below it, as far as nothing runs in them."""
    if group.is_dir():
        for path in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()
