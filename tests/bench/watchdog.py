"""How fast the watchdog kills, and what it costs, beside earlyoom on the same trace, as JSON.

    sudo .venv/bin/python -m tests.bench.watchdog        (root, Linux; about six minutes)

A victim of another user's stands in a real control group; a third process plays a trace of
/proc/meminfo into a file; this one, the victim's parent, notes when the kernel says that the victim
is dead. So neither the watchdog's clock nor its records are believed. All of it runs in mount and
process namespaces of its own: earlyoom chooses what it kills, and must see nothing else.

The latency is from the moment the trace crosses the hard floor to the victim's death; below zero,
the death came before. A `collapse` falls 20 GiB/s from 30 GiB at a random moment, a `step` is there
from one moment to the next. `stalled` is a collapse while the thread that writes hangs in a file
that cannot be opened. Asserts nothing.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4 import guard, layout, memory
from tests.bench import report

REPO = Path(__file__).resolve().parents[2]
LIBRARY = REPO / "files/opt/dsv4/lib"
UNIT = "dsv4-bench.service"
MEMINFO = Path("/run/meminfo")
GUARD = Path("/run/guard.json")
TOTAL_GIB = 121.6
START_GIB = 30.0
FALL_GIB_S = 20.0
FLOORS = memory.floors(memory.Limits())
GROUPS = {"v2": "/sys/fs/cgroup/unified", "v1": "/sys/fs/cgroup/systemd"}
IGNORES_TERM = 'trap "" TERM; echo; read forever'


# The trace


def level(trace: str, seconds: float) -> float:
    """Return GiB available so long after the fall has begun."""
    if seconds < 0:
        return START_GIB
    return max(0.05, START_GIB - FALL_GIB_S * seconds) if trace == "collapse" else 2.0


def crossing(trace: str) -> float:
    """Return when the hard floor is crossed, seconds after the fall has begun."""
    return (START_GIB - FLOORS.hard) / FALL_GIB_S if trace == "collapse" else 0.0


def text(available: float) -> bytes:
    """Return a meminfo of the same length for every level, so that one write replaces another."""
    rows = {"MemTotal": TOTAL_GIB, "MemFree": available, "MemAvailable": available}
    rows |= {"Buffers": 0.1, "Cached": 1.0, "SwapCached": 0, "AnonPages": 50}
    rows |= {"SwapTotal": 0, "SwapFree": 0}
    lines = [
        f"{name + ':':<16}{int(gib * memory.KIB_PER_GIB):>10} kB" for name, gib in rows.items()
    ]
    return "\n".join([*lines, ""]).encode()


def play(trace: str, begin: float) -> None:
    """Write the trace, a thousand times a second, until it is over."""
    descriptor = os.open(MEMINFO, os.O_WRONLY)
    while (now := time.monotonic()) < begin + 8:
        os.pwrite(descriptor, text(level(trace, now - begin)), 0)
        time.sleep(0.001)


# The contenders


def watchdog_argv() -> list[str]:
    """Return the watchdog as bin/dsv4 starts it."""
    python = sys.executable
    return [python, "-P", "-S", "-m", "dsv4", "watchdog", "--guard", str(GUARD)]


def environment() -> dict[str, str]:
    """Return the environment that the unit gives it."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(LIBRARY), "MALLOC_ARENA_MAX": "1"}


@contextmanager
def running(argv: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Have a contender at work, past its start."""
    with subprocess.Popen(argv, env=environment(), stderr=subprocess.DEVNULL, stdout=-3) as process:
        try:
            time.sleep(1.5)
            yield process
        finally:
            process.kill()


@contextmanager
def group_of(hierarchy: str, pid: int) -> Iterator[None]:
    """Have the victim in the unit's control group."""
    path = Path(hierarchy) / "system.slice" / UNIT
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for _ in range(100):  # a group goes when its last process has been waited for
            try:
                path.rmdir()
                path.parent.rmdir()
                break
            except OSError:
                time.sleep(0.02)


def shot(argv: list[str], trace: str, hierarchy: str) -> float | None:
    """Return the latency of one kill in ms; None when the victim outlived the trace."""
    MEMINFO.write_bytes(text(START_GIB))
    victim = subprocess.Popen(
        ["/bin/sh", "-c", IGNORES_TERM],
        user="nobody",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert victim.stdout is not None
    victim.stdout.readline()
    Path(f"/proc/{victim.pid}/oom_score_adj").write_text("500")  # the engine's: first to be chosen
    with group_of(hierarchy, victim.pid), running(argv):
        begin = time.monotonic() + 1 + random.random()  # any moment between two looks
        player = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.watchdog", "--play", trace, str(begin)], cwd=REPO
        )
        try:
            victim.wait(10)
            died = time.monotonic()
        except subprocess.TimeoutExpired:
            victim.kill()
            victim.wait()
            died = None
        player.kill()
        player.wait()
    victim.communicate()
    return None if died is None else (died - begin - crossing(trace)) * 1000


def series(argv: list[str], trace: str, hierarchy: str, shots: int) -> dict[str, Any]:
    """Return the latencies of several kills."""
    found = [shot(argv, trace, hierarchy) for _ in range(shots)]
    hits = [ms for ms in found if ms is not None]
    result: dict[str, Any] = {"shots": shots, "missed": shots - len(hits)}
    if hits:
        result["latency_ms"] = {
            "min": round(min(hits), 1),
            "median": round(statistics.median(hits), 1),
            "max": round(max(hits), 1),
        }
        lowest = max(0.0, max(hits)) / 1000 * FALL_GIB_S
        if trace == "collapse":
            result["lowest_available_gib"] = round(FLOORS.hard - lowest, 2)
    return result


@contextmanager
def stalled() -> Iterator[None]:
    """Have the thread that writes hang: its next file is a pipe that nobody reads."""
    pipe = layout.METRICS_FILE.with_name(f".{layout.METRICS_FILE.name}.new")
    os.mkfifo(pipe)
    try:
        yield
    finally:
        pipe.unlink()


def inside(shots: int, earlyoom: str | None) -> dict[str, Any]:
    """Measure, in namespaces of our own."""
    for place in ("/run", "/var/lib"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    for folder in (layout.WATCHDOG_RECORDS, layout.METRICS, layout.RUN):
        folder.mkdir(parents=True)
    MEMINFO.write_bytes(text(START_GIB))
    subprocess.run(["mount", "--bind", str(MEMINFO), "/proc/meminfo"], check=True)
    GUARD.write_text(json.dumps({"unit": UNIT, "user": "nobody"}))
    ours = watchdog_argv()
    found: dict[str, Any] = {}
    for version, hierarchy in GROUPS.items():
        for trace in ("collapse", "step"):
            found[f"{trace}, cgroup {version}"] = series(ours, trace, hierarchy, shots)
    with stalled():
        before = len(list(layout.WATCHDOG_RECORDS.iterdir()))
        found["stalled, cgroup v2"] = series(ours, "collapse", GROUPS["v2"], shots)
        found["stalled, cgroup v2"]["records"] = (
            len(list(layout.WATCHDOG_RECORDS.iterdir())) - before
        )
    if earlyoom:
        soft, hard = (int(gib * memory.KIB_PER_GIB) for gib in (FLOORS.soft, FLOORS.hard))
        theirs = [earlyoom, "-p", "-r", "0", "-M", f"{soft},{hard}"]
        for trace in ("collapse", "step"):
            found[f"{trace}, earlyoom"] = series(theirs, trace, GROUPS["v2"], shots)
    return found


# What it costs


def ticks(pid: int) -> float:
    """Return a process's processor time, s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(argv: list[str], seconds: float) -> dict[str, Any]:
    """Return share of a core and resident memory over a while, on this machine's own memory."""
    with running(argv) as process:
        begun, before = time.monotonic(), ticks(process.pid)
        time.sleep(seconds)
        used = (ticks(process.pid) - before) / (time.monotonic() - begun)
        status = Path(f"/proc/{process.pid}/status").read_text()
        rows = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "core_percent": round(used * 100, 2),
            "resident_mib": round(int(rows["VmRSS"].split()[0]) / 1024, 1),
            "locked_mib": round(int(rows["VmLck"].split()[0]) / 1024, 1),
        }


def costs(seconds: float, earlyoom: str | None) -> dict[str, Any]:
    """Measure what each costs while nothing happens, beside this machine's own processes."""
    for folder in (layout.WATCHDOG_RECORDS, layout.METRICS, layout.RUN):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder.parents[1])], check=True)
        folder.mkdir(parents=True, exist_ok=True)
    GUARD.write_text(json.dumps({"unit": UNIT, "user": "nobody"}))
    found = {"ours": cost(watchdog_argv(), seconds)}
    if earlyoom:
        # It would choose among this machine's processes: floors that are never reached
        found["earlyoom"] = cost([earlyoom, "-p", "-r", "0", "-M", "2,1"], seconds)
    return found


def fetch_earlyoom(folder: str) -> str | None:
    """Return the machine's earlyoom, or its distribution's, unpacked and not installed."""
    if found := shutil.which("earlyoom"):
        return found
    done = subprocess.run(["apt-get", "download", "earlyoom"], cwd=folder, capture_output=True)
    package = next(Path(folder).glob("earlyoom_*.deb"), None)
    if done.returncode or package is None:
        sys.stderr.write("bench: no earlyoom here, and none to be had: ours alone\n")
        return None
    subprocess.run(["dpkg", "-x", str(package), folder], check=True)
    return f"{folder}/usr/bin/earlyoom"


def apart(*words: str, pids: bool) -> Any:
    """Run this module again in namespaces of its own, and return what it printed."""
    flags = ["--mount", *(["--pid", "--fork", "--mount-proc", "--kill-child"] if pids else [])]
    command = [sys.executable, "-m", "tests.bench.watchdog", *words]
    done = subprocess.run(["unshare", *flags, *command], cwd=REPO, stdout=-1, check=True)
    return json.loads(done.stdout)


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shots", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--earlyoom", help="its path; else the one found or downloaded")
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--inside", choices=["kills", "costs"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.play:
        play(options.play[0], float(options.play[1]))
        return 0
    if options.inside:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kills = options.inside == "kills"
        found = (
            inside(options.shots, options.earlyoom)
            if kills
            else costs(options.seconds, options.earlyoom)
        )
        print(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        earlyoom = options.earlyoom or fetch_earlyoom(folder)
        theirs = ["--earlyoom", earlyoom] if earlyoom else []
        defaults = guard.Memory()
        result = {
            "floors_gib": {"hard": FLOORS.hard, "soft": FLOORS.soft},
            "sample_ms": defaults.sample_ms,
            "cost": apart(
                "--inside", "costs", "--seconds", str(options.seconds), *theirs, pids=False
            ),
            "kills": apart("--inside", "kills", "--shots", str(options.shots), *theirs, pids=True),
            "processes": len(list(Path("/proc").glob("[0-9]*"))),
        }
    return report.show(result)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
