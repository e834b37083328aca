"""What the engine's unit files are rendered from: plain data, worked out before it gets here."""

from dataclasses import dataclass
from typing import Final

from deploy import layout

CUDA_DEVICES: Final = ("char-nvidia* rw", "char-drm rw")
"""Device classes CUDA opens, by the kernel's names for them. Not verified on a GB10: a class that
is missing there shows as a start without a GPU, and belongs here."""

CUDA_MODULES: Final = ("nvidia_uvm",)
"""Modules CUDA asks for. It loads them itself through a set-user-ID program, which this unit's
`NoNewPrivileges=` forbids."""

START_SPARE_S: Final = 120
"""For the hooks' own work, on top of the two waits that have limits of their own."""


STOP_SPARE_S: Final = 40
"""For the engine's own end, after the time its requests are given."""


def start_timeout(gate_wait_s: float, ready_timeout_s: float) -> int:
    """Return systemd's limit for a start: above our own two, so that theirs is the message."""
    return int(gate_wait_s + ready_timeout_s + START_SPARE_S)


@dataclass(frozen=True)
class EngineUnit:
    """Everything the templates `dsv4*.service.j2` use, as `unit`.

    + name: of the unit; the others are NAME-watchdog, NAME-unguarded and NAME-liveness
    + groups: supplementary groups, only those that exist (a missing one fails the start)
    + credentials: what systemd hands the engine, as name and path
    + liveness: whether a serving engine is asked for a token now and then
    + modules: kernel modules loaded before
    + device_allow: `DeviceAllow=` values of the accelerator; empty: no devices at all
    + ip_allow: who may be talked to (`IPAddressAllow=`); empty: anybody
    + own_address: where the machine itself reaches the engine, beside localhost
    + protect_home: `yes`, or `read-only` when the pack lies in somebody's home
    + writable: the directories the engine may write to
    + mounts: paths whose mounts must be there first
    + oom_score_adjust: positive, so that the kernel takes the engine before the rest
    """

    name: str = layout.UNIT.removesuffix(".service")
    model: str = "the model"
    user: str = layout.USER
    groups: tuple[str, ...] = ()
    dsv4: str = str(layout.DSV4)
    environment: str = str(layout.ENVIRONMENT)
    credentials: tuple[tuple[str, str], ...] = ()
    liveness: bool = False
    start_timeout_s: int = start_timeout(120, 1800)
    stop_timeout_s: int = 60
    restart_delay_s: float = 10.0
    modules: tuple[str, ...] = ()
    device_allow: tuple[str, ...] = ()
    ip_allow: tuple[str, ...] = ("localhost",)
    own_address: tuple[str, ...] = ()
    protect_home: str = "yes"
    writable: tuple[str, ...] = (str(layout.CACHE),)
    mounts: tuple[str, ...] = (str(layout.ROOT), str(layout.VAR))
    after: tuple[str, ...] = ("network.target", "systemd-modules-load.service")
    oom_score_adjust: int = 500
    files: int = 1_048_576
