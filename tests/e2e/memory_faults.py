"""Faults of memory and of what is read about it, on the real unit with the stand-in engine.

The same form as `service_faults`: each function's docstring is its rule, each leaves the service
stopped. Memory is played through a file that is mounted over /proc/meminfo, so that hooks and
watchdog are the deployed ones, or really taken, by a worker that its control group bounds.
"""

import contextlib
import json
import time
from collections.abc import Iterator

from tests.e2e.service_faults import SPARK_FLOORS, Fault
from tests.e2e.service_rig import MEMINFO, UNIT, WATCHDOG, Rig, meminfo

READAHEAD = "dsv4-readahead.service"
NEXT_METRICS = "/var/lib/dsv4/metrics/.dsv4.prom.new"
HOG_MIB = 2500


@contextlib.contextmanager
def memory_is(rig: Rig, text: str) -> Iterator[None]:
    """Have the machine's /proc/meminfo say this, or whatever is written over it later."""
    rig.root(f"systemctl stop {UNIT} {WATCHDOG}", check=False)
    rig.write(MEMINFO, text)
    rig.root(f"mount --bind {MEMINFO} /proc/meminfo")
    try:
        yield
    finally:
        rig.end()
        rig.root(f"systemctl stop {WATCHDOG}; umount /proc/meminfo", check=False)


def memory_is_eaten(rig: Rig) -> None:
    """A worker that really takes memory is killed at the floor, and the memory is back."""
    rig.fault(LOAD_S=0.2, HOG_MIB=HOG_MIB, HOG_AFTER_S=6)
    rig.root(f"mkdir -p /run/systemd/system/{UNIT}.d")
    bound = f"/run/systemd/system/{UNIT}.d/bound.conf"
    rig.write(bound, f"[Service]\nMemoryMax={HOG_MIB + 1000}M\n")
    rig.root("systemctl daemon-reload")
    have = int(rig.root("awk '/^MemAvailable/ {print $2}' /proc/meminfo")) / (1 << 20)
    hard = have - HOG_MIB / 2 / 1024
    # Only the level decides here: the lab has no level at which it would lock up
    rig.guard(
        memory={
            "hard_floor_gib": hard,
            "soft_floor_gib": hard,
            "lock_gib": 0.1,
            "spare_gib": 0.1,
            "utilisation": 0.02,
        }
    )
    try:
        before = len(rig.trips())
        assert rig.start()[0], rig.log(30)
        rig.until("a kill", lambda: len(rig.trips()) > before, 20)
        rig.stop()
        trip = rig.trips()[-1]
        assert trip["action"] == "kill"
        assert trip["reason"].endswith(f"the hard floor is {hard:.2f}")
        assert trip["latency_ms"] < 250
        assert trip["signalled"] >= 2
        levels = [sample[1] for sample in trip["trajectory"]]
        assert levels[-1] <= hard < levels[0]
        rig.until(
            "memory",
            lambda: (
                int(rig.root("awk '/^MemAvailable/ {print $2}' /proc/meminfo")) / (1 << 20) > hard
            ),
        )
    finally:
        rig.end()
        rig.root(f"rm {bound}; systemctl daemon-reload")


def readings_make_no_sense(rig: Rig) -> None:
    """Whatever stands in /proc/meminfo: nonsense kills nothing, a collapse after it does."""
    rig.fault(LOAD_S=0.2, IGNORE_TERM=1)
    rig.guard(memory={**SPARK_FLOORS, "utilisation": 0.1})
    good = meminfo(30)
    nonsense = (
        "",
        "no memory here\n",
        good[: good.index("MemAvailable") + len("MemAvailable: 31")],
        meminfo(0),
        meminfo(0, 20),
        meminfo(500),
        good.replace("MemAvailable", "MemAvail"),
        good.replace("MemFree: ", "MemFree: -"),
        good.replace("MemFree: ", f"MemFree: {'9' * 400}"),
        good.replace("MemTotal: ", "MemTotal: x"),
    )
    with memory_is(rig, good):
        assert rig.start()[0], rig.log(30)
        engine, guard, before = rig.pid(), rig.pid(WATCHDOG), len(rig.trips())
        for text in nonsense:
            rig.overwrite(MEMINFO, text)
            time.sleep(0.3)
        rig.overwrite(MEMINFO, good)
        time.sleep(0.3)
        assert (rig.pid(), rig.pid(WATCHDOG)) == (engine, guard), rig.log(20)
        assert len(rig.trips()) == before
        rig.overwrite(MEMINFO, meminfo(2))
        rig.until("a kill", lambda: len(rig.trips()) > before, 10)
        assert rig.trips()[-1]["bad_samples"] >= 2 * len(nonsense)
        assert rig.trips()[-1]["latency_ms"] < 250


def disk_stalls(rig: Rig) -> None:
    """The writing thread hangs in the disk: the kill comes all the same, the record when it can."""
    rig.fault(LOAD_S=0.2, IGNORE_TERM=1)
    rig.guard(memory={**SPARK_FLOORS, "utilisation": 0.1})
    with memory_is(rig, meminfo(30)):
        rig.root(f"rm -f {NEXT_METRICS}; mkfifo {NEXT_METRICS}")  # its opening waits for a reader
        try:
            assert rig.start()[0], rig.log(30)
            first, before = rig.pid(), len(rig.trips())
            rig.overwrite(MEMINFO, meminfo(2))
            rig.until("a kill", lambda: rig.pid() != first, 5)
            rig.overwrite(MEMINFO, meminfo(30))
            assert len(rig.trips()) == before
            rig.root(f"timeout 5 cat {NEXT_METRICS} > /dev/null")
            rig.until("a record", lambda: len(rig.trips()) == before + 1)
            assert rig.trips()[-1]["latency_ms"] < 250
        finally:
            rig.root(f"rm -f {NEXT_METRICS}")


def memory_comes_back(rig: Rig) -> None:
    """A start waits for memory that an earlier engine has not given back yet, and goes on then."""
    rig.fault(LOAD_S=0.2)
    rig.guard(memory={"device": "cuda", "utilisation": 0.5, "gate_wait_s": 60})
    with memory_is(rig, meminfo(40)):
        rig.root(f"systemctl reset-failed {UNIT} 2>/dev/null; systemctl start --no-block {UNIT}")
        rig.until("a wait", lambda: "waiting for memory: 40.0 of" in rig.log(10), 15)
        time.sleep(1)
        rig.overwrite(MEMINFO, meminfo(100))
        rig.until_state("active", 15)
        assert rig.show("NRestarts") == "0"


def memory_stays_away(rig: Rig) -> None:
    """Memory that is nobody's and does not come back: said, and not tried again and again."""
    rig.fault(LOAD_S=0.2)
    limits = {"utilisation": 0.5, "gate_margin_gib": 1.5, "headroom_gib": 5.0}
    rig.guard(memory={"device": "cuda", "gate_wait_s": 2, **limits})
    with memory_is(rig, meminfo(40)):
        assert not rig.start()[0]
        rig.until_state("failed")
        time.sleep(3)
        assert rig.show("ActiveState") == "failed"
        assert rig.show("NRestarts") == "0"
        reason = rig.reason()
        for words in (
            "wanted 62.3 GiB free",
            "MemFree 40.0, MemAvailable 40.0, page cache 1.0 GiB",
            "pinned by the driver, reboot needed",
            "the highest utilisation that passes now is 0.28",
        ):
            assert words in reason, reason
        # After the reboot it starts by hand like any other
        rig.overwrite(MEMINFO, meminfo(100))
        assert rig.start()[0], rig.log(30)


def watchdog_is_blind(rig: Rig) -> None:
    """A machine whose memory cannot be told is not guarded: no engine starts there."""
    rig.fault(LOAD_S=0.2)
    with memory_is(rig, "no memory here\n"):
        assert not rig.start()[0]
        assert WATCHDOG in rig.reason(), rig.reason()
        assert "says nothing that makes sense" in rig.log(30)
        assert rig.pid() == 0
        rig.overwrite(MEMINFO, meminfo(100))
        assert rig.start()[0], rig.log(30)


LOOKS = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, "/opt/dsv4/lib")
from dsv4 import processes, residency, weights
files = weights.weight_files(Path("/var/lib/dsv4/views/current"))
names, rows, end = list(files), [], time.monotonic() + 30
while time.monotonic() < end and not (rows and rows[-1][0] == len(names) - 1):
    found = processes.mapping(set(names))
    mapped = [n for n, name in enumerate(names) if name in found]
    if mapped:
        rows.append([mapped[-1], [residency.resident(Path(name)) for name in names]])
    time.sleep(0.05)
print(json.dumps([list(files.values()), rows]))
"""


def weights_are_read_ahead(rig: Rig) -> None:
    """Each start brings the helper along; it reads ahead and drops behind, and is gone by the time
    the model is asked.
    """
    rig.fault(LOAD_S=6)
    rig.write("/run/dsv4-test-looks.py", LOOKS)
    rig.guard(readahead={"enabled": True, "window_gib": 0.1})
    rig.root(f"systemctl enable {READAHEAD}; /opt/dsv4/bin/dsv4 cache_drop --mode always || true")
    try:
        rig.root(f"systemctl reset-failed {UNIT}; systemctl start --no-block {UNIT}", check=False)
        sizes, rows = json.loads(rig.root("python3 /run/dsv4-test-looks.py"))
        # Whole while the engine has not come to it, and gone when it has gone on
        assert [row for n, row in rows if n == 1 and row[2] == sizes[2]], rows
        assert [row for n, row in rows if n == 2 and row[1] == 0], rows
        rig.until_state("active")
        rig.until_state("inactive", 2, unit=READAHEAD)
        said = rig.log(30)
        assert 0 < said.find("readahead: ended, ") < said.rfind("ready after"), said
        assert rig.show("Result", READAHEAD) == "success"
        first = rig.pid()
        rig.root(f"kill -9 {first}")
        rig.until_state("active", 15, unit=READAHEAD)
        rig.until("another engine", lambda: rig.pid() not in {0, first})
        rig.stop()
        assert rig.show("ActiveState", READAHEAD) == "inactive"
    finally:
        rig.end()
        rig.root(f"systemctl disable {READAHEAD}; rm /run/dsv4-test-looks.py", check=False)


FAULTS: tuple[Fault, ...] = (
    watchdog_is_blind,
    weights_are_read_ahead,
    memory_is_eaten,
    readings_make_no_sense,
    disk_stalls,
    memory_comes_back,
    memory_stays_away,
)
