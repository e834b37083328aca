"""The service's unit files, rendered and read by systemd itself."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import layout
from deploy._render import template
from deploy.units import EngineUnit, start_timeout
from dsv4 import watchdog

LAB = EngineUnit(dsv4="/usr/bin/true")
SPARK = EngineUnit(
    dsv4="/usr/bin/true",
    groups=("video", "render"),
    credentials=(
        ("api_key", str(layout.API_KEY)),
        ("tls_cert", "/etc/tls/c.pem"),
        ("tls_key", "/etc/tls/k.pem"),
    ),
    liveness=True,
    own_address=("192.168.1.20",),
    modules=("nvidia_uvm",),
    device_allow=("char-nvidia rw", "char-nvidia-uvm rw", "char-nvidia-caps r"),
    ip_allow=(),
    protect_home="read-only",
    mounts=(*LAB.mounts, "/home/owner/pack"),
)
NAMES = layout.UNITS
EXPOSED = {
    layout.UNIT: 4.0,
    layout.UNIT_WATCHDOG: 4.0,
    layout.UNIT_READAHEAD: 4.0,
    layout.UNIT_LIVENESS: 4.0,
    layout.UNIT_FETCH: 4.0,
    layout.UNIT_UNGUARDED: 4.0,
    layout.UNIT_BUILD: 4.0,
}
"""What `systemd-analyze security` may say at most, of 10."""


@pytest.fixture(params=["lab", "spark"])
def units(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """All unit files of one kind of machine."""
    unit = {"lab": LAB, "spark": SPARK}[request.param]
    for name in NAMES:
        text = template(layout.SYSTEMD / name, unit=unit, layout=layout)
        (tmp_path / name).write_bytes(text.replace(str(layout.DSV4).encode(), b"/usr/bin/true"))
    return tmp_path


def analyze(units: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["systemd-analyze", *argv],
        env={"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{units}:"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_systemd_understands_them(units: Path) -> None:
    """`verify` succeeds even for units it cannot use, so its words count and not its status."""
    found = analyze(units, "verify", "--man=no", *(str(units / name) for name in NAMES))
    ours = [line for line in found.stderr.splitlines() if "dsv4" in line]
    assert ours == []


@pytest.mark.parametrize("name", EXPOSED)
def test_exposure(units: Path, name: str) -> None:
    """Below 4, with what CUDA needs left open."""
    found = analyze(units, "security", "--offline=true", "--no-pager", str(units / name))
    match = re.search(r"exposure level for \S+: ([\d.]+)", found.stdout)
    assert match, found.stderr
    assert float(match.group(1)) < EXPOSED[name], found.stdout


def directives(unit: EngineUnit, name: str = layout.UNIT) -> list[str]:
    text = template(layout.SYSTEMD / name, unit=unit, layout=layout).decode()
    return [line for line in text.splitlines() if line and not line.startswith(("#", "["))]


def test_no_secret_and_no_json() -> None:
    """The key is named by its path; flags are in serve.yaml."""
    for unit in (LAB, SPARK):
        lines = directives(unit)
        assert not [line for line in lines if "{" in line or "$" in line]
        assert not [line for line in lines if "VLLM_API_KEY" in line]
    assert "LoadCredential=api_key:/etc/dsv4/credentials/api_key" in directives(SPARK)
    assert not [line for line in directives(LAB) if "Credential" in line]
    assert not [line for line in directives(SPARK) if "ssl" in line]


def test_liveness_is_asked_for() -> None:
    """Off, nothing starts it."""
    assert "Upholds=dsv4-liveness.service" in directives(SPARK)
    assert not [line for line in directives(LAB) if "liveness" in line]
    lines = directives(SPARK, layout.UNIT_LIVENESS)
    assert "IPAddressAllow=localhost 192.168.1.20" in lines
    assert not [line for line in lines if line == "[Install]"]


def test_the_engine_may_lock_memory_and_open_files_and_a_traceback_is_kept_whole() -> None:
    """limits.conf does not count for a unit, and the journal drops what comes too fast."""
    wanted = {"LimitMEMLOCK=infinity", "LogRateLimitIntervalSec=0", "LimitCORE=0"}
    assert wanted <= set(directives(SPARK))


def test_hooks_are_in_order() -> None:
    """What is released must be measured after, and what is recorded must be last."""
    hooks = [line.rpartition(" ")[2] for line in directives(LAB) if "ExecStartPre=" in line]
    assert hooks == ["check", "cache_drop", "memory_gate", "record"]


def test_devices() -> None:
    """A GPU's own and no others; none at all without one."""
    spark, lab = directives(SPARK), directives(LAB)
    assert [line for line in spark if line.startswith("DeviceAllow=")] == [
        f"DeviceAllow={device}" for device in SPARK.device_allow
    ]
    assert "DevicePolicy=closed" in spark
    assert "PrivateDevices=yes" not in spark
    assert "PrivateDevices=yes" in lab


def test_modules_come_before() -> None:
    """CUDA's own way of loading them needs rights that the unit gives up."""
    assert {"Wants=modprobe@nvidia_uvm.service", "After=modprobe@nvidia_uvm.service"} <= set(
        directives(SPARK)
    )
    assert not [line for line in directives(LAB) if "modprobe" in line]


def test_the_guard_survives_what_it_guards_against() -> None:
    """The kernel takes the engine first and the watchdog last."""
    score = {line for line in directives(LAB) if line.startswith("OOMScoreAdjust=")}
    watchdog = set(directives(LAB, layout.UNIT_WATCHDOG))
    assert score == {"OOMScoreAdjust=500"}
    assert "OOMScoreAdjust=-500" in directives(LAB, layout.UNIT_LIVENESS)
    assert {"OOMScoreAdjust=-1000", "LimitMEMLOCK=infinity", "RestartSec=100ms"} <= watchdog
    assert {"WatchdogSec=10", "WatchdogSignal=SIGKILL", "LimitCORE=0"} <= watchdog


def test_the_helper_may_call_what_it_needs(units: Path) -> None:
    """What is in memory is asked by a call that none of systemd's groups has: denied, every file
    was one that cannot be read.
    """
    lines = directives(LAB, layout.UNIT_READAHEAD)
    (words,) = [line.partition("=")[2].split() for line in lines if "SystemCallFilter=" in line]
    groups = [word for word in words if word.startswith("@")]
    listed = analyze(units, "syscall-filter", "--no-pager", *groups).stdout.split()
    seen, todo = set(words), {word for word in listed if word.startswith("@")}
    allowed = {*words, *listed}
    while todo:  # groups name further groups
        seen |= todo
        listed = analyze(units, "syscall-filter", "--no-pager", *sorted(todo)).stdout.split()
        allowed |= set(listed)
        todo = {word for word in listed if word.startswith("@")} - seen
    assert {"mincore", "mmap", "munmap", "preadv", "fadvise64", "fstatfs", "openat"} <= allowed


def test_a_watchdog_that_sees_nothing_is_given_up() -> None:
    """Its failed starts, one after the other, reach the limit that stops the engine."""
    values = dict(line.split("=", 1) for line in directives(LAB, layout.UNIT_WATCHDOG))
    one = watchdog.FIRST_SIGHT_S + 0.1 + 1.0  # and a second for the interpreter, on a busy machine
    burst, within = int(values["StartLimitBurst"]), float(values["StartLimitIntervalSec"])
    assert burst * one < within
    assert float(values["TimeoutStartSec"]) > watchdog.FIRST_SIGHT_S


def test_the_engine_is_not_restarted_with_its_watchdog() -> None:
    """Requires= and BindsTo= would take it along when the watchdog comes back."""
    lines = directives(LAB)
    assert "Upholds=dsv4-watchdog.service" in lines
    assert not [line for line in lines if line.startswith(("Requires=", "BindsTo="))]


def test_names_follow() -> None:
    """A second service beside the first has units of its own."""
    other = replace(LAB, name="dsv4-b")
    assert "Upholds=dsv4-b-watchdog.service" in directives(other)
    assert "OnFailure=dsv4-b-unguarded.service" in directives(other, layout.UNIT_WATCHDOG)
    (stop,) = [
        line for line in directives(other, layout.UNIT_UNGUARDED) if line.startswith("ExecStart=")
    ]
    assert "is-active --quiet dsv4-b-watchdog.service || exec systemctl stop dsv4-b" in stop


def test_the_start_limit_is_above_ours() -> None:
    """systemd's limit must not fire before the message that explains."""
    assert start_timeout(120, 1800) > 120 + 1800


def test_needrestart_leaves_us_alone() -> None:
    """Its drop-in is Perl, and matches our units and nobody else's."""
    path = layout.FILES / "etc/needrestart/conf.d/dsv4.conf"
    program = (
        "our %nrconf = (override_rc => {}); do $ARGV[0] or die; shift;"
        "for my $u (@ARGV) { print grep({ $u =~ /$_/ } keys %{$nrconf{override_rc}}) ? 1 : 0 }"
    )
    names = ("dsv4.service", "dsv4-watchdog.service", "dsv4@x.service", "ssh.service")
    checked = subprocess.run(["perl", "-c", str(path)], capture_output=True, check=False)
    assert checked.returncode == 0
    done = subprocess.run(
        ["perl", "-e", program, str(path), *names], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1110"


def test_the_download_has_its_credentials_wherever_it_needs_them() -> None:
    """systemd 252 closes their directory to ExecStartPost=, where the download would fail for ever
    with the pack complete and the token left on the machine.
    """
    lines = directives(LAB, layout.UNIT_FETCH)
    assert lines.count(f"ExecStart={layout.DSV4} fetch") == 2
    (after,) = [line for line in lines if line.startswith("ExecStartPost=")]
    assert after == f"ExecStartPost=+/bin/rm -f {layout.HUB_TOKEN} {layout.FETCH_WANTED}"


def test_run_directory_is_roots() -> None:
    """Whoever owns it decides what the engine is said to have started from."""
    (line,) = [
        line
        for line in (layout.FILES / "etc/tmpfiles.d/dsv4.conf").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert line.split() == ["d", str(layout.RUN), "0755", "root", "root", "-"]
