"""Faults of the engine and of its guards, each on the real unit with the stand-in engine.

Each function takes a `Rig` and asserts by what systemd and the journal say; each leaves the service
stopped. `FAULTS` is all of them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from tests.e2e.service_rig import MEMINFO, UNIT, WATCHDOG, Rig, meminfo

LIVENESS = "dsv4-liveness.service"
SPARK_FLOORS = {"hard_floor_gib": 3.5, "soft_floor_gib": 5.0}
"""Those of a Spark, which the memory played here is of; the lab's own are a small computer's."""


def serves_and_stops(rig: Rig) -> None:
    """A start returns when a token has come; a deliberate stop stays stopped, watchdog included."""
    rig.fault(LOAD_S=3)
    up, seconds = rig.start()
    assert up, rig.log()
    assert seconds >= 3
    assert rig.phase()["phase"] == "ready"
    assert "ready after" in rig.show("StatusText")
    assert rig.show("ActiveState", WATCHDOG) == "active"
    owners = rig.root(f"ps -o user= -p {rig.pid()}")
    assert owners.strip() == "dsv4"
    protected(rig)
    rig.stop()
    time.sleep(2)
    assert rig.show("ActiveState") == "inactive"
    assert rig.show("Result") == "success"
    assert rig.phase()["phase"] == "stopped"
    rig.until_state("inactive", unit=WATCHDOG)


def protected(rig: Rig) -> None:
    """The kernel takes the engine first, the watchdog and the way in last; no limit is in the way.

    As the kernel has it for the processes, and not as the units say.
    """
    engine, guard = rig.pid(), rig.pid(WATCHDOG)
    worker = rig.root("pgrep VLLM::").strip()
    pids = f"{engine} {worker} {guard} $(pgrep -o sshd)"
    scores = rig.root(f"for pid in {pids}; do cat /proc/$pid/oom_score_adj; done").split()
    # A lab machine may lower nobody's score: there, those of a real one are 0 instead of -1000
    assert scores[:2] == ["500", "500"]
    assert scores[2:] in (["-1000", "-1000"], ["0", "0"]), scores
    assert rig.root(f"awk '/^VmLck/ {{print $2}}' /proc/{guard}/status").strip() != "0"
    most, has = limits(rig, "1"), limits(rig, worker)
    for name, wanted in (("Max locked memory", "unlimited"), ("Max open files", "1048576")):
        # Nor may it raise a limit above its own
        assert has[name][0] in {wanted, most[name][1]}, has[name]
    assert has["Max core file size"] == ["0", "0"]


def limits(rig: Rig, pid: str) -> dict[str, list[str]]:
    """Return a process's limits by name, soft and hard."""
    rows = rig.root(f"cat /proc/{pid}/limits").splitlines()[1:]
    return {row[:25].strip(): row[25:].split()[:2] for row in rows}


def engine_killed(rig: Rig) -> None:
    """A killed server comes back by itself, without its old worker."""
    rig.fault(LOAD_S=0.2)
    assert rig.start()[0], rig.log(30)
    first = rig.pid()
    rig.root(f"kill -9 {first}")
    rig.until("another server", lambda: rig.pid() not in {0, first})
    rig.until_state("active")
    assert rig.show("NRestarts") == "1"
    assert rig.root("pgrep -c VLLM::").strip() == "1"
    rig.stop()


def stopped_while_starting(rig: Rig) -> None:
    """A stop in the middle of a start is a stop, in the hooks and in the load."""
    rig.guard(memory={"utilisation": 3.0, "gate_wait_s": 60})
    rig.fault(LOAD_S=60)
    for words in ("waiting for memory", "weight files"):
        since = rig.root("date +%s.%N").strip()
        said = f"journalctl -o cat --since @{since} -u {UNIT}"
        rig.root(f"systemctl start --no-block {UNIT}")
        rig.until(words, lambda said=said, words=words: words in rig.root(said), 15)
        if words == "weight files":
            assert "GiB" in rig.show("StatusText")  # what `systemctl status` shows of a load
        started = time.monotonic()
        rig.stop()
        assert time.monotonic() - started < 10
        assert rig.show("ActiveState") == "inactive", rig.show("Result")
        assert rig.show("NRestarts") == "0"
        rig.guard(memory={"utilisation": 0.1})


def engine_ends_with_0(rig: Rig) -> None:
    """A worker is killed, the server ends with status 0: a failure, and the service comes back."""
    rig.fault(LOAD_S=0.2)
    assert rig.start()[0], rig.log(30)
    rig.root("pkill -9 VLLM::")
    rig.until("a restart", lambda: rig.show("NRestarts") == "1")
    assert "ended by itself with status 0" in rig.log()
    rig.stop()
    assert rig.show("ActiveState") == "inactive"


def restarts_end(rig: Rig) -> None:
    """After three automatic restarts the unit stays failed and says why; a hand can start it."""
    rig.fault(LOAD_S=0.2, FAULT="crash")
    assert not rig.start()[0]
    rig.until("the end", lambda: "automatic restarts" in rig.reason(), 90)
    rig.until_state("failed")
    time.sleep(3)
    assert rig.show("ActiveState") == "failed"
    assert rig.show("NRestarts") == "4"
    assert "a made-up crash" in rig.reason(), rig.reason()
    rig.fault(LOAD_S=0.2)
    assert rig.root(f"systemctl start {UNIT} && echo yes").strip().endswith("yes"), rig.log()
    rig.stop()


def failed_starts(rig: Rig) -> None:
    """Each way of not getting ready has its own words."""
    rig.guard(ready={"timeout_s": 12, "request_timeout_s": 2})
    expected = {
        "hang": "no answer from /v1/completions",
        "empty": "empty answer",
        "error": "EngineCore encountered an issue",
        "wrong_model": "wrong model: it serves another",
        "crash": "RuntimeError: a made-up crash",
        "refused": "refused memory",
        "exit0": "crash: the engine ended",
        "core_dies": "worker ended",
        "never": "timeout: no token after 12 s",
    }
    for fault, words in expected.items():
        rig.fault(LOAD_S=1, FAULT=fault)
        up, seconds = rig.start()
        reason = rig.reason()
        rig.stop()
        assert not up, fault
        assert words in reason, f"{fault}: {reason}\n{rig.log(30)}"
        assert seconds < 25, fault
    rig.fault(LOAD_S=0.2, FAULT="reasoning")
    assert rig.start()[0], rig.log(30)
    rig.stop()


def not_tried_again(rig: Rig) -> None:
    """What a setting is the cause of is not tried again, what may pass is tried once more."""
    ends = (("no_room", 0, "no room for the KV cache"), ("refused", 1, "refused memory"))
    for fault, retries, words in ends:
        rig.fault(LOAD_S=0.2, FAULT=fault)
        assert not rig.start()[0]
        rig.until("the end", lambda: "an automatic restart does not help" in rig.reason())
        rig.until_state("failed")
        # systemd counts the start that ends before the engine as well
        assert rig.show("NRestarts") == str(retries + 1), rig.log(30)
        assert words in rig.reason(), rig.reason()
        rig.stop()


def long_traceback(rig: Rig) -> None:
    """The journal keeps all of a burst that is longer than its own limit, and so the cause."""
    rig.fault(LOAD_S=0.2, FAULT="crash", LINES=12_000, restart_s=60)
    before = rig.root("date +%s.%N").strip()
    assert not rig.start()[0]
    said = f"journalctl -o cat -u {UNIT} --since @{before}"
    rig.until("all", lambda: rig.root(f"{said} | grep -c ^frame || true").strip() == "12000", 15)
    assert "Suppressed" not in rig.root(f"journalctl -o cat --since @{before} | tail -n 300")
    assert "a made-up crash" in rig.reason()
    rig.stop()


def watchdog_killed(rig: Rig) -> None:
    """A watchdog that was killed or stopped is back within a second; the engine is not touched."""
    rig.fault(LOAD_S=0.2)
    assert rig.start()[0], rig.log(30)
    engine, guard = rig.pid(), rig.pid(WATCHDOG)
    rig.root(f"kill -9 {guard}")
    took = rig.until("a watchdog", lambda: rig.pid(WATCHDOG) not in {0, guard})
    assert took < 1.5, took
    rig.root(f"systemctl stop {WATCHDOG}")
    rig.until_state("active", unit=WATCHDOG)
    assert rig.pid() == engine
    rig.stop()


def watchdog_hangs(rig: Rig) -> None:
    """One that is there and does nothing is replaced like one that died."""
    drop_in = f"/etc/systemd/system/{WATCHDOG}.d/hangs.conf"
    rig.write(drop_in, "[Service]\nWatchdogSec=3\n")  # the rule, and not its ten seconds
    rig.root("systemctl daemon-reload")
    rig.fault(LOAD_S=0.2)
    try:
        assert rig.start()[0], rig.log(30)
        engine, guard = rig.pid(), rig.pid(WATCHDOG)
        rig.root(f"kill -STOP {guard}")
        took = rig.until("another watchdog", lambda: rig.pid(WATCHDOG) not in {0, guard}, 15)
        assert took < 5, took
        assert rig.pid() == engine
    finally:
        rig.root(f"rm {drop_in}; systemctl daemon-reload")
        rig.stop()


def watchdog_lost(rig: Rig) -> None:
    """A watchdog that cannot be kept running takes the engine down, and the unit says so."""
    rig.fault(LOAD_S=0.2)
    assert rig.start()[0], rig.log(30)
    drop_in = f"/etc/systemd/system/{WATCHDOG}.d/broken.conf"
    rig.write(drop_in, "[Service]\nExecStart=\nExecStart=/bin/false\n")
    try:
        rig.root(f"systemctl daemon-reload; kill -9 {rig.pid(WATCHDOG)}")
        rig.until("no engine", lambda: rig.pid() == 0, 40)
        rig.until_state("failed")
        assert "could not be kept running" in rig.reason()
        assert not rig.start()[0], "it must not run unguarded"
        rig.until_state("failed")
        assert WATCHDOG in rig.reason(), rig.reason()
        rig.stop()
    finally:
        rig.root(f"rm {drop_in}; systemctl daemon-reload; systemctl reset-failed {WATCHDOG}")


def memory_collapses(rig: Rig) -> None:
    """At the hard floor everything dies at once, is recorded, and is started again."""
    rig.fault(LOAD_S=0.2, IGNORE_TERM=1)
    rig.guard(memory=SPARK_FLOORS)
    rig.watchdog_reads(meminfo(30))
    try:
        assert rig.start()[0], rig.log(30)
        before, first = len(rig.trips()), rig.pid()
        rig.overwrite(MEMINFO, meminfo(2))
        rig.until("a kill", lambda: rig.pid() != first)
        rig.overwrite(MEMINFO, meminfo(30))
        rig.until("a record", lambda: len(rig.trips()) == before + 1)
        rig.until("a restart", lambda: rig.show("NRestarts") == "1")
        rig.until_state("active")
        trip = rig.trips()[-1]
        assert trip["action"] == "kill"
        assert trip["latency_ms"] < 250, trip["latency_ms"]
        assert len(trip["trajectory"]) > 5
        assert trip["processes"]
        assert "stopped by the watchdog" in rig.log(), "the log"
        assert 'trips_total{action="kill"}' in rig.root("cat /var/lib/dsv4/metrics/dsv4.prom")
    finally:
        rig.watchdog_reads(None)
        rig.end()


def memory_sinks(rig: Rig) -> None:
    """At the soft floor the engine is asked first, and killed when it does not listen."""
    rig.fault(LOAD_S=0.2, IGNORE_TERM=1)
    rig.guard(memory={**SPARK_FLOORS, "term_grace_s": 2})
    rig.watchdog_reads(meminfo(30))
    try:
        assert rig.start()[0], rig.log(30)
        first = rig.pid()
        rig.overwrite(MEMINFO, meminfo(8))
        time.sleep(1)
        assert rig.pid() == first
        rig.overwrite(MEMINFO, meminfo(4.5))
        rig.until("TERM", lambda: "asked to stop" in rig.log(10), 5)
        assert rig.pid() == first
        rig.until("KILL", lambda: rig.pid() != first, 5)
        rig.overwrite(MEMINFO, meminfo(30))
        rig.until("a record", lambda: "ago and still there" in rig.trips()[-1]["reason"])
        rig.until_state("active")
    finally:
        rig.watchdog_reads(None)
        rig.end()


def no_room(rig: Rig) -> None:
    """The gate refuses with the arithmetic, and waits no longer than its bound."""
    rig.fault(LOAD_S=0.2)
    rig.guard(memory={"utilisation": 3.0, "gate_wait_s": 2})
    up, seconds = rig.start()
    reason = rig.reason()
    rig.stop()
    rig.guard(memory={"utilisation": 0.1})
    assert not up
    assert seconds < 15
    assert reason.startswith("memory: wanted "), reason
    assert "highest utilisation" in reason


def port_taken(rig: Rig) -> None:
    """A foreign process on our port is named and left alone."""
    rig.fault(LOAD_S=0.2)
    port = rig.root("grep -m1 -o 'port: *[0-9]*' /etc/dsv4/serve.yaml").split(":")[1].strip()
    rig.root(
        "systemd-run --unit=dsv4-test-squatter --collect"
        f" python3 -m http.server --bind 127.0.0.1 {port}"
    )
    try:
        squatter = rig.pid("dsv4-test-squatter.service")
        rig.until("a squatter", lambda: rig.root(f"ss -Hltn sport = :{port}").strip())
        assert not rig.start()[0]
        assert f"pid {squatter}" in rig.reason(), rig.reason()
        assert rig.pid("dsv4-test-squatter.service") == squatter
    finally:
        rig.root("systemctl stop dsv4-test-squatter", check=False)
        rig.stop()


def leftover_engine(rig: Rig) -> None:
    """A worker of ours that outlived its unit is killed before the next start; others are not."""
    rig.fault(LOAD_S=0.2)
    script = (
        "import ctypes,time;ctypes.CDLL(None).prctl(15,b'VLLM::EngineCore',0,0,0);time.sleep(600)"
    )
    for name, user in (("ours", "dsv4"), ("foreign", "nobody")):
        rig.root(
            f'systemd-run --unit=dsv4-test-{name} --collect --uid={user} python3 -c "{script}"'
        )
    rig.until("two workers", lambda: rig.root("pgrep -c VLLM::").strip() == "2")
    try:
        assert rig.start()[0], rig.log(30)
        assert rig.pid("dsv4-test-ours.service") == 0
        assert rig.pid("dsv4-test-foreign.service") != 0
        assert "killing a leftover" in rig.log()
    finally:
        rig.root("systemctl stop dsv4-test-ours dsv4-test-foreign", check=False)
        rig.stop()


def shard_missing(rig: Rig) -> None:
    """A weight file that is not there stops the start and is named."""
    rig.fault(LOAD_S=0.2)
    view = "/var/lib/dsv4/views/current"
    name = rig.root(f"ls {view} | grep safetensors$ | tail -1").strip()
    real = rig.root(f"readlink -f {view}/{name}").strip()
    rig.root(f"mv {real} {real}.away")
    try:
        assert not rig.start()[0]
        assert f"{name} is a link that leads nowhere" in rig.reason(), rig.reason()
    finally:
        rig.root(f"mv {real}.away {real}")
        rig.stop()


def many_starts_by_hand(rig: Rig) -> None:
    """However often an owner restarts it, neither limit is for that."""
    rig.fault(LOAD_S=0)
    assert rig.start()[0], rig.log(30)
    for _ in range(12):
        rig.root(f"systemctl restart --no-block {UNIT}; sleep 0.2")
    assert rig.root(f"systemctl restart {UNIT} && echo yes").strip() == "yes", rig.log(30)
    assert rig.show("NRestarts") == "0"
    rig.stop()


def hung_engine(rig: Rig) -> None:
    """An engine that stops producing tokens is restarted, but so often only; a busy one never."""
    drop_in = f"/etc/systemd/system/{UNIT}.d/liveness.conf"
    rig.write(drop_in, f"[Unit]\nUpholds={LIVENESS}\n")
    try:
        rig.guard(liveness={"enabled": True, "interval_s": 0.5, "stall_s": 2})
        rig.fault(LOAD_S=0.2, HANG_AFTER_S=2, BUSY=1)
        assert rig.start()[0], rig.log(30)
        rig.until_state("active", unit=LIVENESS)
        time.sleep(6)
        assert rig.show("NRestarts") == "0", rig.log(30)
        rig.guard(restarts={"limit": 1}, stop={"drain_s": 1})
        rig.stop()
        rig.until_state("inactive", unit=LIVENESS)
        assert "requests still run after" in rig.log(10)
        rig.fault(LOAD_S=0.2, HANG_AFTER_S=2)
        assert rig.start()[0], rig.log(30)
        rig.until("a restart", lambda: rig.show("NRestarts") == "1")
        assert "hung: no token for" in rig.log(20)
        rig.until_state("active")
        rig.until_state("failed", 40)
        assert "1 automatic restarts in 120 minutes" in rig.reason(), rig.reason()
        assert "hung: no token for" in rig.reason()
    finally:
        rig.root(f"rm -f {drop_in}; systemctl daemon-reload")
        rig.stop()


def stop_drains(rig: Rig) -> None:
    """A request that runs is answered before a stop ends the engine; the wait is bounded."""
    rig.fault(LOAD_S=0.2, REQUEST_S=3)
    rig.guard(stop={"drain_s": 20})
    assert rig.start()[0], rig.log(30)
    port = rig.root("grep -m1 -o 'port: *[0-9]*' /etc/dsv4/serve.yaml").split(":")[1].strip()
    ask = (
        "import urllib.request as u;"
        f"print(u.urlopen(u.Request('http://127.0.0.1:{port}/v1/completions', b'{{}}')).read())"
    )
    rig.root(f'systemd-run --unit=dsv4-test-client python3 -c "{ask}"')
    client = "dsv4-test-client.service"
    try:
        counter = "python3 -c \"import urllib.request as u;print(u.urlopen('http://127.0.0.1:"
        counter += f"{port}/metrics').read().decode())\""
        rig.until("a request", lambda: 'running{engine="0"} 1' in rig.root(counter))
        started = time.monotonic()
        rig.stop()
        assert 1 < time.monotonic() - started < 15
        assert "Paris" in rig.root(f"journalctl -o cat -u {client} --since -60s")
        assert rig.show("Result") == "success"
    finally:
        rig.root(f"systemctl stop {client}; systemctl reset-failed {client}", check=False)


def shared_memory_left(rig: Rig) -> None:
    """What a dead engine left in /dev/shm goes at the next start; what is in use stays."""
    rig.fault(LOAD_S=0.2)
    rig.root(
        "for name in dead held; do echo x > /dev/shm/psm_$name; done; chown dsv4 /dev/shm/psm_*"
    )
    rig.root("echo x > /dev/shm/psm_foreign")
    rig.root(
        "systemd-run --unit=dsv4-test-holder --collect"
        " python3 -c \"import time;f=open('/dev/shm/psm_held');time.sleep(600)\""
    )
    try:
        rig.until(
            "a holder",
            lambda: rig.root(
                "fuser /dev/shm/psm_held 2>/dev/null || ls -l"
                " /proc/[0-9]*/fd 2>/dev/null | grep -o psm_held | head -1"
            ),
        )
        assert rig.start()[0], rig.log(30)
        assert rig.root("cd /dev/shm; ls psm_*").split() == ["psm_foreign", "psm_held"]
        assert "removed 1 leftovers" in rig.log(20)
    finally:
        rig.root("systemctl stop dsv4-test-holder; rm -f /dev/shm/psm_*", check=False)
        rig.stop()


def run_is_full(rig: Rig) -> None:
    """A start that cannot write down what it starts from ends, says why, and heals."""
    rig.fault(LOAD_S=0.2)
    rig.root("mount -t tmpfs -o size=16k,mode=755 none /run/dsv4")
    try:
        rig.root("dd if=/dev/zero of=/run/dsv4/filler bs=1k count=64 2>/dev/null || true")
        assert not rig.start()[0]
        assert "No space left on device" in rig.log(20)
    finally:
        rig.stop()
        rig.root("umount /run/dsv4")
    assert rig.start()[0], rig.log(30)
    rig.stop()


Fault = Callable[[Rig], None]
FAULTS: tuple[Fault, ...] = (
    serves_and_stops,
    engine_killed,
    stopped_while_starting,
    engine_ends_with_0,
    restarts_end,
    failed_starts,
    not_tried_again,
    long_traceback,
    watchdog_killed,
    watchdog_hangs,
    watchdog_lost,
    memory_collapses,
    memory_sinks,
    no_room,
    port_taken,
    leftover_engine,
    shard_missing,
    many_starts_by_hand,
    hung_engine,
    stop_drains,
    shared_memory_left,
    run_is_full,
)


@contextlib.contextmanager
def same_guard(rig: Rig) -> Iterator[None]:
    """Put guard.json back after one fault."""
    text = rig.root("cat /etc/dsv4/guard.json")
    try:
        yield
    finally:
        rig.write("/etc/dsv4/guard.json", text)
