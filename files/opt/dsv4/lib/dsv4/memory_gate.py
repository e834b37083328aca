"""Wait until there is room for the engine, within a bound; say who is in the way.

Unified memory comes back seconds to minutes after its holder has died, so a start right after a
stop waits here instead of failing and looping. What must be free is utilisation x total + margin;
what is free is MemFree on a GPU route and MemAvailable on a CPU one (`memory.free_for_engine` says
why). Page cache of the pack was dropped before this by `cache_drop`; that of other files counts as
used, as it does for CUDA, and is named.

Memory that neither comes back nor belongs to anybody is the driver's until a reboot: then the
start is given up for good, because the next one would end the same.
"""

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dsv4 import guard, launch, layout, machine, memory, notify, phase, processes, store, systemd

POLL_S: Final = 0.5
SAID_EVERY_S: Final = 10.0
HOLDER_GIB: Final = 1.0
NAMED: Final = 3
UNACCOUNTED_GIB: Final = 4.0
"""What no process, cache or kernel table accounts for; a machine at rest has less than this."""
RISE_S: Final = 10.0
RISE_GIB: Final = 0.5
"""Memory that rose this much in the last while before the bound is on its way back."""

HOLDS_NOTHING: Final = "nvidia-persiste"
"""NVIDIA's own daemon (as the kernel cuts its name) has the GPU open at all times."""

KERNEL_USES: Final = (
    *("AnonPages", "Cached", "SwapCached", "Buffers", "Slab", "PageTables", "KernelStack"),
    *("Percpu", "VmallocUsed", "Hugetlb"),
)


@dataclass(frozen=True)
class Need:
    """What the start needs, GiB.

    + margin: what must be free beyond the share while the engine takes it
    + headroom: what must be left available when it has it, or the watchdog would end it
    """

    total: float
    utilisation: float
    margin: float
    device: str
    headroom: float = 0.0

    @property
    def wanted(self) -> float:
        """Return what must be free."""
        return memory.start_needs(self.total, self.utilisation, self.margin)

    def left(self, available: float) -> float:
        """Return what would be left available when the engine has its share."""
        return available - self.total * self.utilisation

    def met(self, info: memory.MemInfo) -> bool:
        """Say whether there is room to start, and to serve after it."""
        enough = memory.free_for_engine(info, self.device) >= self.wanted
        return enough and self.left(info.available) >= self.headroom

    def highest(self, have: float, available: float) -> float:
        """Return the highest utilisation that passes with this."""
        return min(
            memory.startable_utilisation(self.total, have, self.margin),
            memory.startable_utilisation(self.total, available, self.headroom),
        )


@dataclass(frozen=True)
class Blame:
    """What holds the memory that is missing, GiB.

    + holders: in words, most memory first
    + unaccounted: used, and by no process, cache or kernel table
    + known_on_gpu: how much of that nvidia-smi gives to processes; None when it cannot say so of
      all that have the GPU open
    """

    holders: tuple[str, ...]
    info: memory.MemInfo
    unaccounted: float
    known_on_gpu: float | None

    @property
    def handover(self) -> float:
        """What a kernel with the handover fault keeps; 0 on others."""
        return max(0.0, self.info.cma_free - self.info.cma_total)

    @property
    def pinned(self) -> float:
        """What is left when everybody's share is taken off: the driver's, until a reboot."""
        if self.known_on_gpu is None:
            return 0.0
        return max(0.0, self.unaccounted - self.known_on_gpu - self.handover)


@dataclass(frozen=True)
class Waited:
    """How a wait ended: GiB free, seconds, and how much came back in the last seconds of it."""

    passed: bool
    have: float
    seconds: float
    rise: float = 0.0


def unaccounted(text: str) -> float:
    """Return the memory that /proc/meminfo shows as used without saying by what, GiB."""
    values = memory.sizes(text)
    used = values.get("MemTotal", 0.0) - values.get("MemFree", 0.0)
    return max(0.0, used - sum(values.get(name, 0.0) for name in KERNEL_USES))


def blame(
    text: str,
    found: list[processes.Process],
    devices: set[int],
    on_gpu: Mapping[int, float | None],
) -> Blame:
    """Return who and what holds memory.

    + devices: who has the GPU's device files open or mapped
    + on_gpu: GiB on the GPU by process, as nvidia-smi says; None where it does not
    """
    engines = {p.pid for p in found if p.comm.startswith(processes.ENGINE_PREFIX)}
    users = (devices | engines | set(on_gpu)) - {p.pid for p in found if p.comm == HOLDS_NOTHING}
    gib = {p.pid: on_gpu.get(p.pid) for p in found if p.pid in users}
    named = [p for p in found if p.rss >= HOLDER_GIB or p.pid in gib]
    named.sort(key=lambda p: -(p.rss + (gib.get(p.pid) or 0.0)))
    told = [held for held in gib.values() if held is not None]
    return Blame(
        holders=tuple(describe(process, gib) for process in named[:NAMED]),
        info=memory.parse_meminfo(text),
        unaccounted=unaccounted(text),
        known_on_gpu=sum(told) if len(told) == len(gib) else None,
    )


def describe(process: processes.Process, on_gpu: Mapping[int, float | None]) -> str:
    """Return a holder in words."""
    if process.pid not in on_gpu:
        return str(process)
    held = on_gpu[process.pid]
    return f"{process}, {'has the GPU open' if held is None else f'{held:.1f} GiB on the GPU'}"


def figures_of(info: memory.MemInfo) -> str:
    """Return the figures that are easily taken for each other."""
    text = (
        f"MemFree {info.free:.1f}, MemAvailable {info.available:.1f}, page cache {info.cached:.1f}"
    )
    if info.cma_total or info.cma_free:
        text += f", CMA {info.cma_total:.1f} ({info.cma_free:.1f} free)"
    return f"{text} GiB"


def explain(need: Need, waited: Waited, why: Blame) -> str:
    """Return the refusal: wanted, have, holder, and the highest utilisation that would pass."""
    highest = need.highest(waited.have, why.info.available)
    left = need.left(why.info.available)
    cuda = need.device != "cpu"
    text = (
        f"wanted {need.wanted:.1f} GiB free ({need.utilisation:.2f} x {need.total:.1f} +"
        f" {need.margin:.1f}), have {waited.have:.1f} GiB ({memory.free_kind(need.device)}) after"
        f" {waited.seconds:.0f} s; {figures_of(why.info)}"
    )
    if left < need.headroom:
        text += (
            f"; with the engine's share taken {max(0.0, left):.1f} GiB would be left, and"
            f" {need.headroom:.1f} are needed to serve without the watchdog's ending it"
        )
    if why.holders:
        text += f"; holders: {'; '.join(why.holders)}"
    if cuda and why.info.cached >= HOLDER_GIB:
        text += f"; {why.info.cached:.1f} GiB are page cache of other files"
    if why.handover:
        text += (
            "; CmaFree is above CmaTotal, the mark of a kernel that keeps memory for handover;"
            " `kho=off` on its command line is the reported way out"
        )
    if waited.rise >= RISE_GIB:
        text += (
            f"; it is coming back ({waited.rise:.1f} GiB in the last {RISE_S:.0f} s):"
            " memory_gate_wait_s is how long a start waits for that"
        )
    elif why.pinned >= UNACCOUNTED_GIB:
        text += (
            f"; {why.pinned:.1f} GiB are held by no process and no cache: pinned by the"
            " driver, reboot needed"
        )
    return f"{text}; the highest utilisation that passes now is {highest:.2f}"


def lost(need: Need, waited: Waited, why: Blame) -> bool:
    """Say whether only a reboot brings back what is missing, so that no further start can help."""
    enough = waited.have + why.pinned >= need.wanted
    return enough and waited.rise < RISE_GIB and why.pinned >= UNACCOUNTED_GIB


def wait(
    need: Need,
    bound: float,
    sample: Callable[[], memory.MemInfo | None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    tell: Callable[[float, float], None] = lambda have, waited: None,
) -> Waited:
    """Wait until enough is free.

    A sample that makes no sense is no answer; the next one is waited for within the same bound.
    """
    started = clock()
    have = 0.0
    recent: deque[tuple[float, float]] = deque()
    while True:
        info = sample()
        waited = clock() - started
        if info is not None:
            have = memory.free_for_engine(info, need.device)
            recent.append((waited, have))
            while recent[0][0] < waited - RISE_S:
                recent.popleft()
            if need.met(info):
                return Waited(True, have, waited)
        if waited >= bound:
            return Waited(False, have, waited, have - recent[0][1] if recent else 0.0)
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


def on_gpu() -> dict[int, float | None]:
    """Return GiB on the GPU by process; on a GB10 nvidia-smi knows that, if it knows anything."""
    mib = {row["pid"]: row["mib"] for row in machine.holders()}
    return {pid: None if found is None else found / 1024 for pid, found in mib.items()}


def sane_text(path: Path, bound: float) -> str:
    """Return a reading that makes sense, waited for within a bound; else raise what is wrong."""
    end = time.monotonic() + bound
    while True:
        try:
            text = path.read_text()
            memory.parse_meminfo(text)
        except (OSError, ValueError):
            if time.monotonic() >= end:
                raise
            time.sleep(min(POLL_S, max(0.01, end - time.monotonic())))
        else:
            return text


def need_of(limits: guard.Memory, total: float) -> Need:
    """Return what guard.json holds a start to on a machine of this size."""
    return Need(
        total, limits.utilisation, limits.gate_margin_gib, limits.device, limits.headroom_gib
    )


def gate(config: guard.Guard, meminfo: Path, bound: float) -> tuple[bool, str, dict[str, Any]]:
    """Run the gate: whether the engine may start, one line, and the figures."""
    limits = config.memory
    begun = time.monotonic()
    total = memory.parse_meminfo(sane_text(meminfo, bound)).total
    left = max(0.0, bound - (time.monotonic() - begun))
    need = need_of(limits, total)
    waited = wait(need, left, lambda: read_sane(meminfo), tell=Teller(need))
    figures: dict[str, Any] = {
        "wanted_gib": need.wanted,
        "have_gib": waited.have,
        "waited_s": waited.seconds,
    }
    if waited.passed:
        text = f"{waited.have:.1f} GiB free, {need.wanted:.1f} needed, {waited.seconds:.1f} s"
        return True, text, figures
    text = sane_text(meminfo, POLL_S)
    why = blame(text, list(processes.read_all()), processes.using(processes.GPU), on_gpu())
    figures |= {
        "holders": list(why.holders),
        "meminfo_gib": asdict(why.info),
        "unaccounted_gib": why.unaccounted,
        "pinned": lost(need, waited, why),
        "rise_gib": waited.rise,
        "highest_utilisation": need.highest(waited.have, why.info.available),
    }
    return False, explain(need, waited, why), figures


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
        reason = f"memory: {text}"
        phase.write("failed", {"reason": reason})
        if figures.get("pinned") and "INVOCATION_ID" in os.environ:
            # Another automatic start would find the same; `launch` ends this one for good
            store.write_json(layout.REFUSED_JSON, {"reason": reason})
            status = 0
    if options.json:
        print(json.dumps({"ok": passed, "text": text, **figures}))
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
