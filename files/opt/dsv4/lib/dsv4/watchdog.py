"""Stop the engine before the machine freezes.

A GB10 shares its memory between host and GPU and locks up near 1 GiB available, with no OOM kill
and nothing in the journal. This process samples MemAvailable ten times a second, asks the engine to
stop at the soft floor (SIGTERM, then SIGKILL) and kills its whole control group at the hard one.

    usage: dsv4 watchdog [--guard PATH] [--meminfo PATH]

The decision is `decide`, a pure function. Around it: the loop never allocates much, never waits on
a disk and asks no other process; a second thread writes the records, the metrics and the status,
and re-reads guard.json, so that new thresholds need no restart. All pages are locked, which is why
few modules are imported here.
"""

import ctypes
import gc
import json
import os
import pwd
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from dsv4 import cgroup, guard, layout, memory, processes
from dsv4.notify import notify

VERSION: Final = Path(__file__).resolve().parent.name
"""The directory it runs from, told in its status for the deploy to compare."""

MCL_CURRENT: Final = 1
MCL_FUTURE: Final = 2
THREAD_STACK: Final = 256 * 1024
"""A locked thread's whole stack is resident; the default would be 8 MiB of it."""

KEPT_S: Final = 60.0
MEMINFO_BYTES: Final = 8192
WATCHED: Final = memory.NEEDED | {"Cached"}
ALIVE_EVERY_S: Final = 1.0
LATE_FACTOR: Final = 3.0
RECOVERED_GIB: Final = 0.1
ABSURD_GIB: Final = 4.0
"""MemAvailable is MemFree, less the kernel's reserves, plus what it can reclaim. So far below
MemFree it can only be a bad reading."""

FASTEST_GIB_S: Final = 100.0
"""No program takes memory faster: a page is cleared before it is handed out, at 273 GB/s at most,
and the fastest fall on record is 14 GiB/s. What falls faster is looked at once more."""
DOUBT_S: Final = 0.02

BLIND_S: Final = 60.0
"""After so long without a reading that makes sense it guards nothing, and its history is void. It
ends: systemd starts it again, which opens the file anew, and when that does not help stops the
engine, as for every watchdog that cannot be kept running."""
FIRST_SIGHT_S: Final = 1.0
"""How long the first one may take: ten such starts are within the unit's start limit."""

REPORT_EVERY_S: Final = 15.0
REPORT_LOW_EVERY_S: Final = 2.0
LOW: Final = 2.0
"""Below this many soft floors, who uses memory is looked at more often: it may be needed soon."""
RECORDS_KEPT: Final = 100
TOP: Final = 8

NONE: Final = "none"
TERM: Final = "term"
KILL: Final = "kill"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at memory: seconds on the monotonic clock, GiB, and PSI `some avg10` in percent."""

    t: float
    available: float
    free: float
    pressure: float = 0.0


@dataclass(frozen=True, slots=True)
class Config:
    """What is decided by; GiB and seconds."""

    hard: float = 3.5
    soft: float = 5.0
    soft_samples: int = 5
    sample_s: float = 0.1
    reaction_s: float = 0.05
    last_gib: float = 1.4
    """The level the kill must have arrived above: where the machine locks up, and a spare."""
    term_grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do now, and why; how long it would take to fall to the hard floor, if it falls."""

    action: str
    reason: str = ""
    to_floor_s: float | None = None


def config_of(limits: guard.Memory) -> Config:
    """Return the decision's constants from guard.json's."""
    return Config(
        hard=limits.hard_floor_gib,
        soft=max(limits.soft_floor_gib, limits.hard_floor_gib),
        soft_samples=max(1, limits.soft_samples),
        sample_s=max(0.01, limits.sample_ms / 1000),
        reaction_s=limits.reaction_ms / 1000,
        last_gib=limits.lock_gib + limits.spare_gib,
        term_grace_s=limits.term_grace_s,
    )


def sane(info: memory.MemInfo) -> bool:
    """Say whether a reading can be true."""
    return info.available >= info.free - ABSURD_GIB


def doubtful(before: Sample | None, sample: Sample) -> bool:
    """Say whether memory can have fallen like this since the sample before.

    A reading that cannot be true by itself is told apart by `sane`; this is one that makes sense
    alone and not beside the other.
    """
    if before is None:
        return False
    return before.available - sample.available > FASTEST_GIB_S * max(sample.t - before.t, 1e-3)


def fall_rate(history: Sequence[Sample], sample: Sample) -> float:
    """Return how fast memory falls, GiB/s, 0 when it does not.

    The slower of the last two intervals: one large allocation is a step and not a slope.
    """
    last = [*history[-2:], sample]
    if len(last) < 3:
        return 0.0
    rates = [(a.available - b.available) / max(b.t - a.t, 1e-3) for a, b in pairwise(last)]
    return max(0.0, min(rates))


def decide(
    history: Sequence[Sample], sample: Sample, config: Config, asked_at: float | None = None
) -> Verdict:
    """Return what to do about a sample, given the sane ones before it.

    + history: oldest first; the last two and the last `soft_samples` are looked at
    + asked_at: when the engine was asked to stop, None when it was not
    """
    rate = fall_rate(history, sample)
    to_floor = max(0.0, sample.available - config.hard) / rate if rate > 0 else None
    if sample.available <= config.hard:
        why = f"{sample.available:.2f} GiB available, the hard floor is {config.hard:.2f}"
        return Verdict(KILL, why, to_floor)
    gap = max(config.sample_s, sample.t - history[-1].t) if history else config.sample_s
    ahead = sample.available - rate * (gap + config.reaction_s)
    if rate > 0 and ahead <= config.last_gib:
        why = (
            f"{sample.available:.2f} GiB available and falling {rate:.1f} GiB/s: a kill after the"
            f" next look would come at {ahead:.2f}"
        )
        return Verdict(KILL, why, to_floor)
    if asked_at is not None:
        if sample.t - asked_at >= config.term_grace_s:
            why = f"asked to stop {sample.t - asked_at:.1f} s ago and still there"
            return Verdict(KILL, why, to_floor)
        return Verdict(NONE, "", to_floor)
    recent = [*history[len(history) - config.soft_samples + 1 :], sample]
    below = len(recent) >= config.soft_samples and all(s.available <= config.soft for s in recent)
    # On its way up from the lowest of them it is a dip that passes
    if below and sample.available <= min(s.available for s in recent) + RECOVERED_GIB:
        why = (
            f"{sample.available:.2f} GiB available, at or below the soft floor of"
            f" {config.soft:.2f} for {len(recent)} samples"
        )
        return Verdict(TERM, why, to_floor)
    return Verdict(NONE, "", to_floor)


@dataclass
class Trip:
    """One intervention, as it is recorded."""

    name: str
    action: str
    reason: str
    sample: Sample
    to_floor_s: float | None
    latency_ms: float
    signalled: int
    trajectory: list[Sample]
    gone_ms: float | None = None
    told: bool = False


@dataclass
class Shared:
    """What the two threads have in common; each field is replaced whole and never changed."""

    guard: guard.Guard
    config: Config
    total: float = 0.0
    last: Sample | None = None
    lowest: float = float("inf")
    cached: float = 0.0
    bad: int = 0
    late: int = 0
    latency_s: float | None = None
    trips: deque[Trip] = field(default_factory=deque)
    wake: threading.Event = field(default_factory=threading.Event)


class Guardian:
    """The loop's state: samples, and what has been done to the engine."""

    def __init__(
        self, shared: Shared, uid: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shared = shared
        self.uid = uid
        self.clock = clock
        self.history: deque[Sample] = deque()
        self.asked_at: float | None = None
        self.trip: Trip | None = None

    def engine(self) -> tuple[list[str], set[int]]:
        """Return the unit's groups and the engine processes in them.

        Hooks and probes of the unit are root's. They wait for memory to come back, and killing
        them would free nothing, so without an engine process there is nothing to do.
        """
        groups = cgroup.directories(self.shared.guard.unit)
        own = {pid for pid in cgroup.pids(groups) if cgroup.owner(pid) == self.uid}
        return groups, own

    def look(self, sample: Sample) -> None:
        """Decide about a sample, and act."""
        recent = list(self.history)[-max(self.shared.config.soft_samples, 2) :]
        verdict = decide(recent, sample, self.shared.config, self.asked_at)
        self.history.append(sample)
        while self.history[0].t < sample.t - KEPT_S:
            self.history.popleft()
        if verdict.action != NONE or self.asked_at is not None or self.trip is not None:
            self.act(verdict, sample)

    def act(self, verdict: Verdict, sample: Sample) -> None:
        """Carry out a verdict, and notice when an engine that was struck is gone."""
        groups, engine = self.engine()
        if not engine:
            if self.trip is not None:
                self.trip.gone_ms = (self.clock() - self.trip.sample.t) * 1000
                self.hand_over(self.trip)
            self.asked_at, self.trip = None, None
            return
        if verdict.action == KILL:
            struck = cgroup.kill(groups)
        elif verdict.action == TERM:
            struck = cgroup.send(engine, signal.SIGTERM)
            self.asked_at = sample.t
        else:
            return
        if self.trip is None or self.trip.action != verdict.action:
            now = self.clock()
            self.trip = Trip(
                name=self.trip.name if self.trip else stamp(),
                action=verdict.action,
                reason=verdict.reason,
                sample=sample,
                to_floor_s=verdict.to_floor_s,
                latency_ms=(now - sample.t) * 1000,
                signalled=struck,
                trajectory=list(self.history),
            )
            self.hand_over(self.trip)

    def hand_over(self, trip: Trip) -> None:
        """Give a trip to the thread that writes."""
        self.shared.trips.append(trip)
        self.shared.wake.set()


def stamp() -> str:
    """Return the time as a file name that sorts."""
    now = time.time()
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


def read_pressure(descriptor: int | None) -> float:
    """Return PSI memory `some avg10`, 0 where the kernel has none."""
    if descriptor is None:
        return 0.0
    try:
        found = float(os.pread(descriptor, 256, 0).split(b"avg10=", 1)[1].split(None, 1)[0])
    except (OSError, IndexError, ValueError):
        return 0.0
    return found if 0 <= found <= 100 else 0.0


def open_or_none(path: str) -> int | None:
    """Return a descriptor, None when the file cannot be opened."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


Source = Callable[[], tuple[str, float]]


def files(meminfo: int, pressure: int | None) -> Source:
    """Return what gives the text of /proc/meminfo and the pressure, from files that are open."""
    return lambda: (os.pread(meminfo, MEMINFO_BYTES, 0).decode(), read_pressure(pressure))


def take(shared: Shared, source: Source, now: float) -> Sample | None:
    """Return a sample; a reading that makes no sense is counted and gives none."""
    try:
        text, pressure = source()
        info = memory.parse_meminfo(text, WATCHED)
    except (OSError, ValueError):
        info = None
    if info is None or not sane(info):
        shared.bad += 1
        return None
    shared.total, shared.cached = info.total, info.cached
    return Sample(now, info.available, info.free, pressure)


def sees(shared: Shared, source: Source, bound: float = FIRST_SIGHT_S) -> bool:
    """Say whether there is a reading to be had, within a bound."""
    end = time.monotonic() + bound
    while take(shared, source, time.monotonic()) is None:
        if time.monotonic() >= end:
            return False
        time.sleep(shared.config.sample_s)
    return True


def watch(
    guardian: Guardian,
    source: Source,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Sample for as long as there is anything to see.

    One reading that is doubtful beside the last is no reading: it is counted, and the next one,
    taken at once, counts instead.
    """
    shared = guardian.shared
    due = seen = clock()
    alive = due - ALIVE_EVERY_S
    while clock() - seen < BLIND_S:
        sample = take(shared, source, clock())
        if sample is not None and doubtful(shared.last, sample):
            shared.bad += 1
            sleep(DOUBT_S)
            sample = take(shared, source, clock())
        if sample is not None:
            seen = clock()
            shared.last = sample
            shared.lowest = min(shared.lowest, sample.available)
            guardian.look(sample)
        now = clock()
        if now - alive >= ALIVE_EVERY_S:
            alive = now
            notify("WATCHDOG=1")
        period = shared.config.sample_s
        due += period
        left = due - now
        if left < -period * LATE_FACTOR:
            shared.late += 1
            due = now
        sleep(max(0.001, left))


# The second thread: records, metrics, status. It may wait on a disk; the loop never waits for it.


def replace(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace a small file whole (`store` does the same with modules that are not wanted here)."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fchmod(handle.fileno(), 0o644)
        if sync:
            os.fsync(handle.fileno())
    temporary.replace(path)


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty when there is none to read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def record_of(trip: Trip, shared: Shared, top: list[str], top_age: float) -> dict[str, Any]:
    """Return a trip as it is written; times in the trajectory are seconds before it."""
    end = trip.sample.t
    config = shared.config
    return {
        "schema": layout.SCHEMA,
        "time": trip.name,
        "unit": shared.guard.unit,
        "invocation": read_object(layout.STARTED_JSON).get("invocation"),
        "phase": read_object(layout.PHASE_JSON).get("phase"),
        "action": trip.action,
        "reason": trip.reason,
        "available_gib": round(trip.sample.available, 3),
        "free_gib": round(trip.sample.free, 3),
        "pressure": trip.sample.pressure,
        "to_floor_s": trip.to_floor_s,
        "floors_gib": {"hard": config.hard, "soft": config.soft},
        "latency_ms": round(trip.latency_ms, 2),
        "gone_ms": None if trip.gone_ms is None else round(trip.gone_ms, 1),
        "signalled": trip.signalled,
        "bad_samples": shared.bad,
        "late_samples": shared.late,
        "processes": top,
        "processes_age_s": round(top_age, 1),
        "trajectory": [
            [round(s.t - end, 3), round(s.available, 3), round(s.free, 3), s.pressure]
            for s in trip.trajectory
        ],
    }


METRICS: Final = {
    "memory_total_bytes": ("gauge", "MemTotal of the last sane sample."),
    "memory_available_bytes": ("gauge", "MemAvailable of the last sane sample."),
    "memory_free_bytes": ("gauge", "MemFree of the last sane sample; what CUDA sees follows it."),
    "memory_cached_bytes": ("gauge", "Page cache of the last sane sample."),
    "memory_pressure_some_avg10": ("gauge", "PSI memory: percent of 10 s that a task waited."),
    "memory_available_lowest_bytes": ("gauge", "Lowest MemAvailable since the watchdog started."),
    "watchdog_floor_bytes": ("gauge", "MemAvailable at which the watchdog asks (soft) or kills."),
    "watchdog_trips_total": ("counter", "Interventions that are on record, by what was done."),
    "watchdog_kill_latency_seconds": ("gauge", "From sample to signal at the last intervention."),
    "watchdog_bad_samples_total": ("counter", "Readings that made no sense and were skipped."),
    "watchdog_late_samples_total": ("counter", "Samples that came three periods late or more."),
    "watchdog_report_time_seconds": ("gauge", "When this file was written, seconds since 1970."),
    "engine_phase": ("gauge", "1 for the phase of the engine's start, 0 for the others."),
}
"""Kind and help of each metric; `dsv4_` goes before the name."""


def metrics(shared: Shared, trips: dict[str, int], phase: str, now: float) -> str:
    """Return the text for node_exporter's text file collector."""
    last, config, gib = shared.last, shared.config, memory.GIB
    values: dict[str, dict[str, float]] = {
        "watchdog_floor_bytes": {
            'floor="hard"': config.hard * gib,
            'floor="soft"': config.soft * gib,
        },
        "watchdog_trips_total": {f'action="{name}"': count for name, count in trips.items()},
        "watchdog_bad_samples_total": {"": shared.bad},
        "watchdog_late_samples_total": {"": shared.late},
        "watchdog_report_time_seconds": {"": now},
        "engine_phase": {f'phase="{name}"': float(name == phase) for name in layout.PHASES},
    }
    if last is not None:
        values |= {
            "memory_total_bytes": {"": shared.total * gib},
            "memory_available_bytes": {"": last.available * gib},
            "memory_free_bytes": {"": last.free * gib},
            "memory_cached_bytes": {"": shared.cached * gib},
            "memory_pressure_some_avg10": {"": last.pressure},
            "memory_available_lowest_bytes": {"": shared.lowest * gib},
        }
    if shared.latency_s is not None:
        values["watchdog_kill_latency_seconds"] = {"": shared.latency_s}
    lines: list[str] = []
    for name, (kind, help_text) in METRICS.items():
        if rows := values.get(name):
            lines += [f"# HELP dsv4_{name} {help_text}", f"# TYPE dsv4_{name} {kind}"]
            lines += [
                f"dsv4_{name}{f'{{{labels}}}' if labels else ''} {value:.12g}"
                for labels, value in rows.items()
            ]
    return "\n".join(lines) + "\n"


class Reporter(threading.Thread):
    """Writes what happened, and looks now and then who uses memory and what guard.json says."""

    def __init__(self, shared: Shared, guard_path: Path) -> None:
        super().__init__(daemon=True, name="reporter")
        self.shared = shared
        self.guard_path = guard_path
        self.known = b""
        self.top: list[str] = []
        self.top_at = time.monotonic()
        self.trips = {TERM: 0, KILL: 0}
        self.written: set[str] = set()
        for path in layout.WATCHDOG_RECORDS.glob("*.json"):
            action = read_object(path).get("action")
            if action in self.trips:
                self.trips[action] += 1

    def run(self) -> None:
        """Wait for a trip or for the next round; nothing that fails here ends the thread."""
        while True:
            self.shared.wake.wait(self.period())
            self.shared.wake.clear()
            for work in (self.write_trips, self.reread, self.look_around, self.write_metrics):
                try:
                    work()
                except Exception as error:
                    sys.stderr.write(f"dsv4 watchdog: {work.__name__}: {error!r}\n")

    def period(self) -> float:
        """Return how long to wait for the next round."""
        last = self.shared.last
        low = last is not None and last.available < LOW * self.shared.config.soft
        return REPORT_LOW_EVERY_S if low else REPORT_EVERY_S

    def write_trips(self) -> None:
        """Write the records that wait, and say so."""
        while self.shared.trips:
            trip = self.shared.trips[0]
            if not trip.told:
                trip.told = True
                self.shared.latency_s = trip.latency_ms / 1000
                self.trips[trip.action] += 1
                word = "killed" if trip.action == KILL else "asked to stop"
                sys.stderr.write(
                    f"dsv4 watchdog: {self.shared.guard.unit} {word}: {trip.reason}"
                    f" ({trip.signalled} processes, {trip.latency_ms:.1f} ms)\n"
                )
            age = time.monotonic() - self.top_at
            text = json.dumps(record_of(trip, self.shared, self.top, age))
            name = f"{trip.name}.json"
            # One that cannot be written waits for the next round: a full disk has room again
            replace(layout.WATCHDOG_RECORDS / name, text, sync=True)
            self.written.add(name)
            self.shared.trips.popleft()
        # Those of today stay: after a step of the clock they may sort before all others
        for path in sorted(layout.WATCHDOG_RECORDS.glob("*.json"))[:-RECORDS_KEPT]:
            if path.name not in self.written:
                path.unlink(missing_ok=True)

    def reread(self) -> None:
        """Take new thresholds; keep the old ones when the file makes no sense."""
        data = self.guard_path.read_bytes()
        if data == self.known:
            return
        first, self.known = not self.known, data
        new = guard.read(self.guard_path)
        self.shared.guard, self.shared.config = new, config_of(new.memory)
        if not first:
            sys.stderr.write(f"dsv4 watchdog: {describe(self.shared.config)}\n")

    def look_around(self) -> None:
        """Remember who uses memory: at a kill there is no time to ask."""
        self.top = [str(process) for process in processes.top(TOP)]
        self.top_at = time.monotonic()

    def write_metrics(self) -> None:
        """Write the metrics and tell systemd's status line."""
        last = self.shared.last
        if last is not None:
            said = f"{last.available:.1f} GiB available; {describe(self.shared.config)}"
            notify(f"STATUS={said}; tools {VERSION}")
        phase = str(read_object(layout.PHASE_JSON).get("phase", "unknown"))
        replace(layout.METRICS_FILE, metrics(self.shared, self.trips, phase, time.time()))


def describe(config: Config) -> str:
    """Return the floors in words."""
    return (
        f"asks to stop at {config.soft:.2f} GiB, kills at {config.hard:.2f},"
        f" looks every {config.sample_s * 1000:.0f} ms"
    )


def lock_memory() -> None:
    """Keep every page in memory, now and later, so that acting never waits for a disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(MCL_CURRENT | MCL_FUTURE):
        why = os.strerror(ctypes.get_errno())
        sys.stderr.write(f"dsv4 watchdog: memory is not locked ({why}); going on without\n")


def parse_arguments(argv: list[str]) -> dict[str, Path] | None:
    """Return the options, None for a wrong call (argparse would cost 2 MiB of locked memory)."""
    options = {"--guard": layout.GUARD_JSON, "--meminfo": Path("/proc/meminfo")}
    rest = list(argv)
    while rest:
        name = rest.pop(0)
        if name not in options or not rest:
            return None
        options[name] = Path(rest.pop(0))
    return options


def main(argv: list[str]) -> int:
    """Guard until told to stop, or until there is nothing to be seen any more, which is 3.

    A broken guard.json means the defaults, not no guard.
    """
    options = parse_arguments(argv)
    if options is None:
        sys.stderr.write("usage: dsv4 watchdog [--guard PATH] [--meminfo PATH]\n")
        return 2
    try:
        config = guard.read(options["--guard"])
    except guard.BrokenGuard as error:
        sys.stderr.write(f"dsv4 watchdog: {error}; guarding with the defaults\n")
        config = guard.Guard()
    meminfo = open_or_none(str(options["--meminfo"]))
    if meminfo is None:
        sys.stderr.write(f"dsv4 watchdog: {options['--meminfo']}: cannot be opened\n")
        return 3
    try:
        uid = pwd.getpwnam(config.user).pw_uid
    except KeyError:
        sys.stderr.write(f"dsv4 watchdog: there is no user {config.user}\n")
        return 3
    shared = Shared(config, config_of(config.memory))
    source = files(meminfo, open_or_none("/proc/pressure/memory"))
    if not sees(shared, source):
        sys.stderr.write(f"dsv4 watchdog: {options['--meminfo']}: says nothing that makes sense\n")
        return 3
    threading.stack_size(THREAD_STACK)
    sys.setswitchinterval(0.001)
    reporter = Reporter(shared, options["--guard"])
    shared.wake.set()
    gc.collect()
    gc.freeze()
    lock_memory()
    reporter.start()
    sys.stderr.write(f"dsv4 watchdog: {config.unit}: {describe(shared.config)}\n")
    notify(f"READY=1\nSTATUS={describe(shared.config)}; tools {VERSION}")
    watch(Guardian(shared, uid), source)
    name = options["--meminfo"]
    sys.stderr.write(f"dsv4 watchdog: {name}: no reading made sense for {BLIND_S:.0f} s\n")
    return 3


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
