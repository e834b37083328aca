"""Wait until there is room for the engine, within a bound; say who is in the way.

Unified memory comes back seconds to minutes after its holder has died, so a start right after a
stop waits here instead of failing and looping. What must be free is utilisation x total + margin;
what is free is MemFree on a GPU route and MemAvailable on a CPU one (`memory.free_for_engine` says
why). Page cache of the pack was dropped before this by `cache_drop`; that of other files counts as
used, as it does for CUDA, and is named.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsv4 import guard, launch, layout, memory, notify, phase, processes, systemd

POLL_S: Final = 0.5
SAID_EVERY_S: Final = 10.0
HOLDER_GIB: Final = 1.0
NAMED: Final = 3
UNACCOUNTED_GIB: Final = 4.0
"""What no process, cache or kernel table accounts for; a machine at rest has less than this."""

DEVICE: Final = "/dev/nvidia"
HOLDS_NOTHING: Final = "nvidia-persiste"
"""NVIDIA's own daemon (as the kernel cuts its name) has the GPU open at all times."""

KERNEL_USES: Final = (
    *("AnonPages", "Cached", "SwapCached", "Buffers", "Slab", "PageTables", "KernelStack"),
    *("Percpu", "VmallocUsed", "Hugetlb"),
)


@dataclass(frozen=True)
class Need:
    """What the start needs, GiB."""

    total: float
    utilisation: float
    margin: float
    device: str

    @property
    def wanted(self) -> float:
        """Return what must be free."""
        return memory.start_needs(self.total, self.utilisation, self.margin)


@dataclass(frozen=True)
class Blame:
    """What holds the memory that is missing, GiB."""

    holders: tuple[str, ...]
    cached: float
    unaccounted: float
    gpu_open: bool
    handover_bug: bool


def unaccounted(text: str) -> float:
    """Return the memory that /proc/meminfo shows as used without saying by what, GiB."""
    values: dict[str, int] = {}
    for entry in text.splitlines():
        name, _, rest = entry.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            values[name] = int(number[0])
    used = values.get("MemTotal", 0) - values.get("MemFree", 0)
    known = sum(values.get(name, 0) for name in KERNEL_USES)
    return max(0, used - known) / memory.KIB_PER_GIB


def blame(text: str, found: list[processes.Process], devices: dict[int, list[str]]) -> Blame:
    """Return who and what holds memory: large processes, and whoever has the GPU open."""
    on_gpu = {p.pid for p in found if p.pid in devices and p.comm != HOLDS_NOTHING}
    engines = {p.pid for p in found if p.comm.startswith(processes.ENGINE_PREFIX)}
    named = [p for p in found if p.rss >= HOLDER_GIB or p.pid in on_gpu | engines]
    info = memory.parse_meminfo(text)
    return Blame(
        holders=tuple(
            f"{process}{', has the GPU open' if process.pid in on_gpu else ''}"
            for process in processes.largest(named, NAMED)
        ),
        cached=info.cached,
        unaccounted=unaccounted(text),
        gpu_open=bool(on_gpu | engines),
        handover_bug=info.cma_free > info.cma_total,
    )


def explain(need: Need, have: float, waited: float, why: Blame) -> str:
    """Return the refusal: wanted, have, holder, and the highest utilisation that would pass."""
    highest = memory.startable_utilisation(need.total, have, need.margin)
    kind = memory.free_kind(need.device)
    text = (
        f"wanted {need.wanted:.1f} GiB free ({need.utilisation:.2f} x {need.total:.1f} +"
        f" {need.margin:.1f}), have {have:.1f} GiB ({kind}) after {waited:.0f} s"
    )
    if why.holders:
        text += f"; holders: {'; '.join(why.holders)}"
    if need.device != "cpu" and why.cached >= HOLDER_GIB:
        text += f"; {why.cached:.1f} GiB are page cache of other files"
    if why.handover_bug:
        text += (
            "; CmaFree is above CmaTotal, the mark of a kernel that keeps memory for handover;"
            " `kho=off` on its command line is the reported way out"
        )
    if not why.gpu_open and why.unaccounted >= UNACCOUNTED_GIB:
        text += (
            f"; {why.unaccounted:.1f} GiB are held by no process and no cache: pinned by the"
            " driver, reboot needed"
        )
    return f"{text}; the highest utilisation that passes now is {highest:.2f}"


def wait(
    need: Need,
    bound: float,
    sample: Callable[[], memory.MemInfo | None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    tell: Callable[[float, float], None] = lambda have, waited: None,
) -> tuple[bool, float, float]:
    """Wait until enough is free: whether it is, what is free, how long it took.

    A sample that makes no sense is no answer; the next one is waited for within the same bound.
    """
    started = clock()
    have = 0.0
    while True:
        info = sample()
        waited = clock() - started
        if info is not None:
            have = memory.free_for_engine(info, need.device)
            if have >= need.wanted:
                return True, have, waited
        if waited >= bound:
            return False, have, waited
        tell(have, waited)
        sleep(min(POLL_S, max(0.01, bound - waited)))


def read_sane(path: Path) -> memory.MemInfo | None:
    """Return one sample, None when the file holds no sense."""
    try:
        return memory.read_meminfo(path)
    except (OSError, ValueError):
        return None


class Teller:
    """Says now and then what is waited for, so that a start that takes long explains itself."""

    def __init__(self, need: Need) -> None:
        self.need = need
        self.next = 0.0

    def __call__(self, have: float, waited: float) -> None:
        """Say it if it is time."""
        if waited >= self.next:
            self.next = waited + SAID_EVERY_S
            text = f"waiting for memory: {have:.1f} of {self.need.wanted:.1f} GiB free"
            sys.stderr.write(f"dsv4 memory_gate: {text}\n")
            notify.notify(f"STATUS={text}")


def gate(config: guard.Guard, meminfo: Path, bound: float) -> tuple[bool, str, dict[str, Any]]:
    """Run the gate: whether the engine may start, one line, and the figures."""
    limits = config.memory
    total = memory.read_meminfo(meminfo).total
    need = Need(total, limits.utilisation, limits.gate_margin_gib, limits.device)
    passed, have, waited = wait(need, bound, lambda: read_sane(meminfo), tell=Teller(need))
    figures: dict[str, Any] = {"wanted_gib": need.wanted, "have_gib": have, "waited_s": waited}
    if passed:
        return True, f"{have:.1f} GiB free, {need.wanted:.1f} needed, {waited:.1f} s", figures
    why = blame(meminfo.read_text(), list(processes.read_all()), processes.holding(DEVICE))
    figures["holders"] = list(why.holders)
    figures["unaccounted_gib"] = why.unaccounted
    figures["highest_utilisation"] = memory.startable_utilisation(total, have, need.margin)
    return False, explain(need, have, waited, why), figures


def main(argv: list[str]) -> int:
    """Run the hook: 0 when there is room, 1 when there is not, 3 when that cannot be told."""
    parser = argparse.ArgumentParser(prog="dsv4 memory_gate", description=__doc__)
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    parser.add_argument("--meminfo", type=Path, default=Path("/proc/meminfo"))
    parser.add_argument("--wait", type=float, help="seconds, instead of what guard.json says")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if launch.refused():
        return 0
    try:
        config = guard.read(options.guard)
        if not systemd.as_hook(config.unit):
            return 0
        bound = config.memory.gate_wait_s if options.wait is None else options.wait
        passed, text, figures = gate(config, options.meminfo, bound)
        status = 0 if passed else 1
    except (OSError, ValueError) as error:
        passed, text, figures, status = False, f"cannot tell: {error}", {}, 3
    sys.stderr.write(f"dsv4 memory_gate: {text}\n")
    if not passed:
        phase.write("failed", {"reason": f"memory: {text}"})
    if options.json:
        print(json.dumps({"ok": passed, "text": text, **figures}))
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
