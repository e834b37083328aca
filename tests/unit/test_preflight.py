"""Preflight: machines as fixtures, and what the table says of each."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import _preflight, preflight
from deploy._preflight import Finding, Job
from deploy._state import State
from deploy.routes import ROUTES

GIB = 1 << 30
KIB_PER_GIB = 1 << 20
NOW = 1_800_000_000

OPT, CACHE, VAR = "/opt/dsv4", "/var/cache/dsv4/uv", "/var/lib/dsv4"


def spark(**changes: Any) -> dict[str, Any]:
    """Return a healthy DGX Spark as `dsv4 machine` describes it; a dotted key changes a part."""
    machine: dict[str, Any] = {
        "arch": "aarch64",
        "os": {"id": "ubuntu", "version": "24.04"},
        "os_name": "Ubuntu 24.04.3 LTS",
        "dgx": "DGX_NAME=DGX Spark",
        "kernel": "6.14.0-1015-nvidia",
        "kernel_newest": "6.14.0-1015-nvidia",
        "cmdline": ["quiet", "splash"],
        "python": "3.12.3",
        "systemd": True,
        "hostname": "spark",
        "cores": 20,
        "memory_kib": {
            "MemTotal": 127600748,
            "MemFree": 110 * KIB_PER_GIB,
            "MemAvailable": 114 * KIB_PER_GIB,
            "Cached": 4 * KIB_PER_GIB,
            "CmaTotal": 131072,
            "CmaFree": 120000,
        },
        "mounts": [
            {"path": path, "device": 2049, "free": 3000 * 10**9, "total": 4000 * 10**9}
            for path in (OPT, CACHE, VAR)
        ],
        "gpu": {
            "smi_status": 0,
            "smi_text": None,
            "name": "NVIDIA GB10",
            "driver": "580.95.05",
            "module": "580.95.05",
            "compute_cap": "12.1",
            "processes": [],
        },
        "toolkit": {
            "home": "/usr/local/cuda-13.0",
            "resolved": "/usr/local/cuda-13.0",
            "version": "13.0.2",
            "nvcc": "13.0",
            "ptxas": True,
            "dangling": False,
        },
        "listener": None,
        "reboot_required": False,
        "time": NOW,
        "apt": True,
    }
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            machine[part] = {**machine[part], name: value}
        else:
            machine[part] = value
    return machine


def job(route: str = "nightly", **changes: Any) -> Job:
    """Return the job of a default deploy."""
    values: dict[str, Any] = {
        "route": ROUTES[route],
        "port": 8899,
        "cuda_home": "/usr/local/cuda-13.0",
        "need_bytes": {OPT: 16 * 10**9, CACHE: 16 * 10**9, VAR: 101_440_000_000},
        "now": float(NOW),
        "token": "this-run",
        **changes,
    }
    return Job(**values)


def examine(machine: dict[str, Any], the_job: Job | None = None, **raw: Any) -> list[Finding]:
    """Return the table for a machine."""
    return _preflight.examine(the_job or job(), State({"machine": machine, **raw}))


def failures(findings: list[Finding]) -> list[str]:
    """Return the lines that stop a deploy."""
    return [finding.line() for finding in findings if finding.ok is False]


def advice(findings: list[Finding]) -> list[str]:
    """Return the lines that stop nothing and are worth saying."""
    return [finding.line() for finding in findings if finding.ok and finding.advice]


def test_a_healthy_spark_passes() -> None:
    """Every check can be told, none fails, nothing is advised."""
    table = examine(spark())
    assert failures(table) == []
    assert advice(table) == []
    assert all(finding.ok for finding in table)
    lines = [finding.line() for finding in table]
    assert "memory: 121.69 GiB" in lines
    assert "CUDA toolkit: nvcc 13.0 in /usr/local/cuda-13.0" in lines


FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "x86": ({"arch": "x86_64"}, ["architecture: wanted aarch64, found x86_64"]),
    "older ubuntu": (
        {"os": {"id": "ubuntu", "version": "22.04"}, "os_name": "Ubuntu 22.04.5 LTS"},
        ["system: wanted ubuntu 24.04, found Ubuntu 22.04.5 LTS"],
    ),
    "another system": (
        {"os": {"id": "fedora", "version": "42"}, "os_name": None},
        ["system: wanted ubuntu 24.04, found fedora 42"],
    ),
    "no systemd": ({"systemd": False}, ["systemd: wanted running, found not running"]),
    "kernel that reserves memory": (
        {"kernel": "7.0.0-1019-nvidia", "kernel_newest": "7.0.0-1019-nvidia"},
        ["kernel: wanted not 7.0.0-1019-nvidia, found 7.0.0-1019-nvidia; it reserves about 9.3"],
    ),
    "kexec handover tell-tale": (
        {"memory_kib__CmaFree": 9 * KIB_PER_GIB},
        ["reserved memory: wanted CmaFree at most CmaTotal, found CmaFree 9.0 GiB, CmaTotal 0.1"],
    ),
    "memory held by firmware": (
        {"memory_kib__MemTotal": 112 * KIB_PER_GIB},
        ["memory: wanted 121.0 to 122.5 GiB, found 112.00 GiB"],
    ),
    "case 50, driver upgraded underneath": (
        {
            "gpu__smi_status": 18,
            "gpu__smi_text": "Failed to initialize NVML: Driver/library version mismatch\nNVML",
        },
        ["driver: wanted nvidia-smi that answers, found Failed to initialize NVML: Driver/library"],
    ),
    "case 50, module of another version": (
        {"gpu__module": "580.82.09"},
        ["driver: wanted library and kernel module of one version, found 580.95.05, kernel module"],
    ),
    "case 5, no nvidia-smi": (
        {"gpu__smi_status": 127, "gpu__smi_text": ""},
        ["driver: wanted nvidia-smi that answers, found no nvidia-smi; install the driver"],
    ),
    "another GPU": (
        {"gpu__name": "NVIDIA GH200", "gpu__compute_cap": "9.0"},
        ["GPU: wanted compute capability 12.1, found NVIDIA GH200 (9.0)"],
    ),
    "somebody else on the GPU": (
        {
            "gpu__processes": [
                {"pid": 4242, "name": "python", "mib": 19135, "unit": None},
                {"pid": 4243, "name": "ollama", "mib": None, "unit": "ollama.service"},
                {"pid": 4244, "name": "VLLM::EngineCore", "mib": 9, "unit": "dsv4.service"},
            ]
        },
        ["GPU tenants: wanted none but our service, found python (pid 4242, 19135 MiB), ollama"],
    ),
    "case 16, link to 12.8": (
        {
            "toolkit__resolved": "/usr/local/cuda-12.8",
            "toolkit__nvcc": "12.8",
            "toolkit__version": "12.8.1",
        },
        ["CUDA toolkit: wanted CUDA 13.0 to below 14.0, found nvcc 12.8 in /usr/local/cuda-12.8"],
    ),
    "case 16, nvcc 13.3 with 13.0 headers": (
        {"toolkit__nvcc": "13.3"},
        ["CUDA toolkit parts: wanted headers and nvcc of one version, found headers 13.0.2, nvcc"],
    ),
    "case 16, dangling link": (
        {"toolkit__dangling": True, "toolkit__nvcc": None, "toolkit__resolved": None},
        ["CUDA toolkit: wanted 13.0, found /usr/local/cuda-13.0 points at nothing"],
    ),
    "no toolkit": (
        {"toolkit__nvcc": None, "toolkit__version": None, "toolkit__resolved": None},
        ["CUDA toolkit: wanted CUDA 13.0 to below 14.0, found no working nvcc"],
    ),
    "no ptxas": ({"toolkit__ptxas": False}, ["ptxas: wanted the toolkit's own ptxas, found"]),
    "port held": (
        {"listener": {"pid": 77, "command": "python3", "unit": "other.service"}},
        ["port 8899: wanted free, found python3 (pid 77); stop that process or set serve_port"],
    ),
    "clock behind": ({"time": NOW - 7200}, ["clock: wanted within 300 s, found -7200 s from"]),
    "clock ahead": ({"time": NOW + 301}, ["clock: wanted within 300 s, found +301 s from"]),
    "reboot pending": ({"reboot_required": True}, ["reboot: wanted none pending, found required"]),
}


@pytest.mark.parametrize(("changes", "says"), FAULTS.values(), ids=FAULTS)
def test_one_fault_gives_one_line(changes: dict[str, Any], says: list[str]) -> None:
    """The line says what was wanted, what was found and what to do; nothing else fails with it."""
    found = failures(examine(spark(**changes)))
    assert [line[: len(start)] for line, start in zip(found, says, strict=True)] == says
    assert all("; " in line and not line.endswith("; ") for line in found)


def test_case_50_asks_for_a_reboot_and_not_for_a_driver() -> None:
    """Reinstalling does not mend what only a reboot ends."""
    changes, _ = FAULTS["case 50, driver upgraded underneath"]
    (line,) = failures(examine(spark(**changes)))
    assert "reboot" in line
    assert "install" not in line


def test_several_faults_are_told_at_once() -> None:
    """An owner fixes a machine in one go."""
    machine = spark(reboot_required=True, time=0, systemd=False, toolkit__ptxas=False)
    assert len(failures(examine(machine))) == 4


def test_case_5_a_gb10_without_memory_figures_is_healthy() -> None:
    """Fields that read [N/A] are None, and fail nothing."""
    machine = spark(gpu__compute_cap=None, gpu__driver=None, gpu__module=None)
    assert failures(examine(machine)) == []


def test_case_2_stale_cache_is_told_though_memavailable_is_healthy() -> None:
    """78 GiB available, 1.2 GiB free, 80 GiB of cache: all three shown, and a drop is due."""
    memory = {
        "MemTotal": 127600748,
        "MemFree": 1_258_291,
        "MemAvailable": 78 * KIB_PER_GIB,
        "Cached": 80 * KIB_PER_GIB,
    }
    table = examine(spark(memory_kib=memory))
    assert failures(table) == []
    assert advice(table) == [
        "free memory: MemAvailable 78.0 GiB, MemFree 1.2 GiB, Cached 80.0 GiB; CUDA sees only"
        " MemFree; the start needs a cache drop and does it"
    ]


def test_the_cache_of_a_serving_model_is_no_advice() -> None:
    """While the model is served, its own pages are what fills the cache."""
    memory = {"MemTotal": 127600748, "MemFree": 10**6, "MemAvailable": 10**7, "Cached": 8 * 10**7}
    units = {"dsv4.service": {"active": "active"}}
    assert advice(examine(spark(memory_kib=memory), units=units)) == []


def test_a_bad_kernel_that_waits_for_the_next_boot_is_told() -> None:
    """It is installed and does not run yet: nothing fails today."""
    table = examine(spark(kernel_newest="7.0.0-1019-nvidia"))
    assert failures(table) == []
    assert len(advice(table)) == 1
    assert "the next boot takes 7.0.0-1019-nvidia" in advice(table)[0]


def test_a_bad_kernel_with_the_remedy_applied_passes() -> None:
    """`kho=off` gives the memory back, and the tell-tale still watches."""
    changes = {"kernel": "7.0.0-1019-nvidia", "kernel_newest": "7.0.0-1019-nvidia"}
    cured = spark(**changes, cmdline=["quiet", "kho=off"])
    assert failures(examine(cured)) == []
    cured["memory_kib"]["CmaFree"] = 9 * KIB_PER_GIB
    assert len(failures(examine(cured))) == 1


def test_our_own_service_may_hold_port_and_gpu() -> None:
    """A second deploy finds the first one's service at work."""
    ours = {"pid": 5, "command": "vllm", "unit": "dsv4.service"}
    process = {"pid": 5, "name": "VLLM::EngineCore", "mib": 99000, "unit": "dsv4.service"}
    table = examine(spark(listener=ours, gpu__processes=[process]))
    assert failures(table) == []
    assert "port 8899: our service" in [finding.line() for finding in table]


def mounts(**free_gb: tuple[int, float]) -> list[dict[str, Any]]:
    """Return mounts from device numbers and free gigabytes."""
    paths = {"opt": OPT, "cache": CACHE, "var": VAR}
    return [
        {"path": paths[name], "device": device, "free": int(free * 1e9), "total": 10**13}
        for name, (device, free) in free_gb.items()
    ]


def test_what_shares_a_disk_must_fit_on_it_together() -> None:
    """Runtime, its cache and the pack on one device: 133.44 GB and a margin, once."""
    need = 16 + 16 + 101.44 + 2
    enough = mounts(opt=(1, need + 0.1), cache=(1, need + 0.1), var=(1, need + 0.1))
    assert failures(examine(spark(mounts=enough))) == []
    short = mounts(opt=(1, need - 0.1), cache=(1, need - 0.1), var=(1, need - 0.1))
    (line,) = failures(examine(spark(mounts=short)))
    assert line.startswith(f"disk for {OPT}, {CACHE}, {VAR}: wanted 135.4 GB (126.1 GiB) free")
    assert "pack_dir" in line


def test_disks_of_their_own_count_by_themselves() -> None:
    """A small root is no fault when the pack has its own disk."""
    apart = mounts(opt=(1, 35), cache=(1, 35), var=(2, 104))
    assert failures(examine(spark(mounts=apart))) == []
    full = mounts(opt=(1, 35), cache=(1, 35), var=(2, 103))
    (line,) = failures(examine(spark(mounts=full)))
    assert line.startswith(f"disk for {VAR}: ")


def adopted(**changes: Any) -> list[str]:
    """Return what stops a deploy of a pack of one's own."""
    found = {"path": "/srv/p", "directory": True, "apart": {}, **changes}
    return failures(examine(spark(pack_dir=found), job(pack_dir="/srv/p")))


def test_a_pack_of_ones_own_is_where_the_engine_sees_it() -> None:
    """In a home it is served; in a directory of which each unit has its own it cannot be."""
    assert adopted() == []
    assert adopted(apart={"/home": "/home/me/p"}) == []
    (line,) = adopted(apart={"/home": "/home/me/p", "/tmp": "/tmp/x/b"})
    assert "found /srv/p that leads to /tmp/x/b; move what is there" in line
    (line,) = adopted(apart={"/var/tmp": "/var/tmp/p"})
    assert "/var/tmp/p" in line
    (line,) = adopted(directory=False)
    assert line.startswith("pack_dir: wanted a directory with a pack, found nothing at /srv/p")


def test_a_pack_nobody_looked_at_is_unknown() -> None:
    """As in a dry run on a bare host, or where the answer is about another directory."""
    for found in (None, {"path": "/other", "directory": True}, {"path": "/srv/p"}):
        table = examine(spark(pack_dir=found), job(pack_dir="/srv/p"))
        assert [finding.ok for finding in table if finding.what == "pack_dir"] == [None]


def test_nothing_to_write_needs_no_space() -> None:
    """A machine that has it all may be full."""
    full = mounts(opt=(1, 0), cache=(1, 0), var=(1, 0))
    settled = job(need_bytes={OPT: 0, CACHE: 0, VAR: 0})
    assert failures(examine(spark(mounts=full), settled)) == []


def test_another_deploy_at_work_is_named_first() -> None:
    """Owner, host and time; one's own lock is no hindrance."""
    holder = {"owner": "ada", "host": "laptop", "since": "noon", "token": "her-run"}
    table = examine(spark(), lock=holder)
    assert table[0].ok is False
    assert "ada on laptop since noon" in table[0].line()
    assert failures(examine(spark(), lock={**holder, "token": "this-run"})) == []


LAB = {
    "arch": "x86_64",
    "os": {"id": "debian", "version": "12"},
    "os_name": "Debian GNU/Linux 12 (bookworm)",
    "kernel": "7.0.0-1019-nvidia",
    "kernel_newest": None,
    "memory_kib": {"MemTotal": 8 * KIB_PER_GIB},
    "gpu": {"smi_status": 127, "smi_text": "", "processes": [{"pid": 1, "name": "x"}]},
    "toolkit": {"dangling": False, "nvcc": None},
}


def test_the_lab_route_asks_less_by_data() -> None:
    """No GPU, no toolkit, any memory and kernel: the same checks, another route."""
    assert failures(examine(spark(**LAB), job("lab"))) == []


def test_each_route_refuses_the_others_machine() -> None:
    """What is relaxed for one is not relaxed for another."""
    assert len(failures(examine(spark(**LAB), job()))) >= 4
    assert len(failures(examine(spark(), job("lab")))) == 2


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("raw", [{}, {"machine": {}}, {"machine": {"arch": None}}])
def test_an_unknown_machine_fails_nothing(route: str, raw: dict[str, Any]) -> None:
    """A dry run on a bare host goes through; what cannot be told says so."""
    table = _preflight.examine(job(route), State(raw))
    assert failures(table) == []
    lines = [finding.line() for finding in table if finding.ok is None]
    assert "architecture: cannot be determined yet (no answer)" in lines
    assert any(line.startswith("disk for /opt/dsv4: cannot be determined") for line in lines)


def test_a_bare_host_that_tells_its_processor_only() -> None:
    """Without Python there, the processor is all that is known, and it counts."""
    assert failures(_preflight.examine(job(), State({"machine": {"arch": "aarch64"}}))) == []
    assert len(failures(_preflight.examine(job(), State({"machine": {"arch": "x86_64"}})))) == 1


@given(
    gone=st.sets(st.sampled_from(sorted(spark()))), none=st.sets(st.sampled_from(sorted(spark())))
)
def test_whatever_is_missing_fails_nothing(gone: set[str], none: set[str]) -> None:
    """Any part can be missing or unknown: no crash, and no failure made of not knowing."""
    machine = spark()
    for key in none - {"listener", "reboot_required"}:
        machine[key] = None
    for key in gone:
        machine.pop(key, None)
    assert failures(examine(machine)) == []


def test_a_new_revision_of_a_pack_that_is_there_needs_no_room_for_all_of_it() -> None:
    state = State({"packs": {"mixedk": {"a": {"bytes": 90}, "b": {"bytes": 20}}, "x": {"c": {}}}})
    assert preflight.bytes_to_come(100, state.revisions("mixedk")) == 10
    assert preflight.bytes_to_come(100, state.revisions("x")) == 100
    assert preflight.bytes_to_come(100, state.revisions("none")) == 100
    assert preflight.bytes_to_come(80, state.revisions("mixedk")) == 0
