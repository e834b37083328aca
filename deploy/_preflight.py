"""Whether a machine can do the job: one table of checks, each with its remedy.

Every check compares what `dsv4 machine` found with what the route expects (`routes.Machine`) and
gives a finding. What cannot be told is no failure: a dry run on a bare host must come through, and
the step that needs the thing says so itself.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deploy import layout
from deploy._rules import NOBODYS
from deploy._state import State
from deploy.routes import Route

GIB: Final = 1 << 30
KIB: Final = 1 << 10
MARGIN_BYTES: Final = 2_000_000_000
"""What must stay free beside what we put on a mount: logs, journals, package upgrades."""
STALE_CACHE_KIB: Final = 10 * KIB**2
"""From here on page cache is the likeliest reason for a start that CUDA refuses."""
CLOCK_TOLERANCE_S: Final = 300
"""A clock further off than this makes apt and TLS refuse what is fine."""


@dataclass(frozen=True)
class Finding:
    """One line of the table; `ok` is None when it cannot be told yet."""

    what: str
    ok: bool | None
    found: str
    wanted: str = ""
    remedy: str = ""
    advice: str = ""
    """What to know although nothing is wrong."""

    def line(self) -> str:
        """Return the line a person reads."""
        if self.ok:
            return f"{self.what}: {self.found}" + (f"; {self.advice}" if self.advice else "")
        if self.ok is None:
            return f"{self.what}: cannot be determined yet ({self.found})"
        return f"{self.what}: wanted {self.wanted}, found {self.found}; {self.remedy}"


@dataclass(frozen=True)
class Job:
    """What the checks need to know of the settings, in plain values."""

    route: Route
    port: int
    cuda_home: str
    need_bytes: Mapping[str, int]
    """Bytes still to be written, by the path they go to."""
    now: float
    """The controller's clock, Unix seconds."""
    token: str
    """This run's name, by which its own deploy lock is known."""
    headroom_fault: Callable[[float], str | None] = lambda _total_gib: None
    """Why the settings leave too little of a machine of this size."""
    pack_dir: str | None = None
    """A pack that somebody has already."""


Check = Callable[[Job, State], Iterable[Finding]]


def unknown(what: str, why: str = "no answer") -> Finding:
    """Return a finding that is none yet."""
    return Finding(what, None, why)


def architecture(job: Job, state: State) -> Iterable[Finding]:
    """A runtime for one processor does not run on another."""
    found = state.machine.get("arch")
    wanted = job.route.machine.architectures
    if not found:
        yield unknown("architecture")
        return
    yield Finding(
        "architecture",
        found in wanted,
        str(found),
        " or ".join(wanted),
        f"route {job.route.name} is not for this machine; choose another in `route`",
    )


def system(job: Job, state: State) -> Iterable[Finding]:
    """Packages, Python and systemd are those of the systems named in the route."""
    found = state.machine.get("os") or {}
    if not found.get("id"):
        yield unknown("system")
        return
    wanted = job.route.machine.systems
    yield Finding(
        "system",
        found.get("version") in wanted.get(found["id"], ()),
        state.machine.get("os_name") or f"{found['id']} {found.get('version')}",
        ", ".join(f"{name} {'/'.join(versions)}" for name, versions in wanted.items()),
        "install DGX OS on it, or choose a route for this system",
    )


def systemd(_: Job, state: State) -> Iterable[Finding]:
    """Download, build and service are units."""
    found = state.machine.get("systemd")
    if found is None:
        yield unknown("systemd")
        return
    yield Finding(
        "systemd",
        bool(found),
        "running" if found else "not running",
        "running",
        "boot the machine with systemd as its first process",
    )


def kernel(job: Job, state: State) -> Iterable[Finding]:
    """Some kernels take gigabytes away from the GPU; a pending one hides behind the running one."""
    found, newest = state.machine.get("kernel"), state.machine.get("kernel_newest")
    if not found:
        yield unknown("kernel")
        return
    cured = "kho=off" in (state.machine.get("cmdline") or ())
    bad = () if cured else job.route.machine.bad_kernels
    yield Finding(
        "kernel",
        found not in bad,
        str(found),
        f"not {', '.join(bad)}",
        "it reserves about 9.3 GiB for kexec handover; boot with kho=off or another kernel",
        f"the next boot takes {newest}, which reserves about 9.3 GiB; add kho=off before that"
        if newest in bad
        else "",
    )


def reserved(_: Job, state: State) -> Iterable[Finding]:
    """CmaFree above CmaTotal is the tell-tale of memory reserved for kexec handover."""
    memory = state.machine.get("memory_kib") or {}
    total, free = memory.get("CmaTotal"), memory.get("CmaFree")
    if total is None or free is None:
        return
    yield Finding(
        "reserved memory",
        free <= total,
        f"CmaFree {free / KIB**2:.1f} GiB, CmaTotal {total / KIB**2:.1f} GiB",
        "CmaFree at most CmaTotal",
        "the kernel keeps memory for kexec handover; add kho=off to its command line and reboot",
    )


def memory(job: Job, state: State) -> Iterable[Finding]:
    """The presets' arithmetic is for the memory a GB10 shows."""
    wanted = job.route.machine.memory_gib
    total = (state.machine.get("memory_kib") or {}).get("MemTotal")
    if total is None:
        yield unknown("memory")
        return
    found = total / KIB**2
    yield Finding(
        "memory",
        wanted is None or wanted[0] <= found <= wanted[1],
        f"{found:.2f} GiB",
        f"{wanted[0]} to {wanted[1]} GiB" if wanted else "",
        "less than that means that firmware, kernel or a carve-out holds some: check dmesg",
    )


def headroom(job: Job, state: State) -> Iterable[Finding]:
    """The share the engine takes must leave the rest above the watchdog's floors."""
    total = (state.machine.get("memory_kib") or {}).get("MemTotal")
    if total is None:
        return
    fault = job.headroom_fault(total / KIB**2)
    if fault:
        yield Finding("headroom", False, "too little", "enough for the floors", fault)


def page_cache(job: Job, state: State) -> Iterable[Finding]:
    """The kernel counts page cache as free and CUDA counts it as used, so both are shown."""
    memory = state.machine.get("memory_kib") or {}
    names = ("MemAvailable", "MemFree", "Cached")
    if not job.route.needs_cuda or any(memory.get(name) is None for name in names):
        return
    cached = memory["Cached"]
    serving = state.unit(layout.UNIT).get("active") == "active"
    stale = not serving and cached >= STALE_CACHE_KIB and memory["MemFree"] < cached
    yield Finding(
        "free memory",
        True,
        ", ".join(f"{name} {memory[name] / KIB**2:.1f} GiB" for name in names),
        advice="CUDA sees only MemFree; the start needs a cache drop and does it" if stale else "",
    )


def disk(job: Job, state: State) -> Iterable[Finding]:
    """Every mount that gets bytes must hold all of them, with a margin."""
    mounts = {mount["path"]: mount for mount in state.machine.get("mounts") or []}
    by_device: dict[Any, tuple[list[str], int, int]] = {}
    for path, needed in job.need_bytes.items():
        mount = mounts.get(path)
        if mount is None:
            yield unknown(f"disk for {path}")
            continue
        paths, total, free = by_device.get(mount["device"], ([], 0, mount["free"]))
        by_device[mount["device"]] = ([*paths, path], total + needed, free)
    for paths, needed, free in by_device.values():
        if needed == 0:
            continue
        yield Finding(
            f"disk for {', '.join(paths)}",
            free >= needed + MARGIN_BYTES,
            f"{both(free)} free",
            f"{both(needed + MARGIN_BYTES)} free",
            "make room there, or point pack_dir at a pack you have elsewhere",
        )


def own_pack(job: Job, state: State) -> Iterable[Finding]:
    """A pack that is adopted is there, with all of it where the engine's sandbox shows it."""
    if job.pack_dir is None:
        return
    found = state.machine.get("pack_dir") or {}
    if found.get("path") != job.pack_dir or found.get("directory") is None:
        yield unknown("pack_dir")
        return
    if not found["directory"]:
        yield Finding(
            "pack_dir",
            False,
            f"nothing at {job.pack_dir}",
            "a directory with a pack",
            "correct pack_dir, or leave it out and have the pack fetched",
        )
        return
    apart = found.get("apart") or {}
    hidden = next((apart[place] for place in NOBODYS if place in apart), None)
    yield Finding(
        "pack_dir",
        hidden is None,
        job.pack_dir if hidden is None else f"{job.pack_dir} that leads to {hidden}",
        f"a pack outside {' and '.join(NOBODYS)}, of which each unit has its own",
        "move what is there, under /srv for instance",
    )


def both(count: float) -> str:
    """Return bytes in GB and GiB: disks are sold in one and shown in the other."""
    return f"{count / 1e9:.1f} GB ({count / GIB:.1f} GiB)"


def driver(job: Job, state: State) -> Iterable[Finding]:
    """The library and the kernel module must be of one version, and answer."""
    if not job.route.needs_cuda:
        return
    gpu = state.machine.get("gpu")
    if gpu is None:
        yield unknown("driver")
        return
    text = str(gpu.get("smi_text") or "")
    if gpu.get("smi_status") == 0:
        module = gpu.get("module")
        same = module is None or gpu.get("driver") in {None, module}
        yield Finding(
            "driver",
            same,
            f"{gpu.get('driver')}, kernel module {module or 'unknown'}",
            "library and kernel module of one version",
            "reboot the machine",
        )
    else:
        mismatch = "mismatch" in text.lower()
        remedy = (
            "reboot: the driver was upgraded underneath the running one"
            if mismatch
            else ("install the driver with DGX OS; nvidia-smi must answer")
        )
        yield Finding(
            "driver",
            False,
            text.splitlines()[0] if text else "no nvidia-smi",
            "nvidia-smi that answers",
            remedy,
        )
        return
    cap = gpu.get("compute_cap")
    wanted = job.route.machine.compute_cap
    if wanted is not None and cap is not None:
        yield Finding(
            "GPU",
            cap == wanted,
            f"{gpu.get('name')} ({cap})",
            f"compute capability {wanted}",
            f"route {job.route.name} is built for another GPU",
        )


def tenants(job: Job, state: State) -> Iterable[Finding]:
    """Whoever else holds the GPU holds memory that the settings count as ours."""
    if not job.route.needs_cuda:
        return
    found = [
        f"{process.get('name')} (pid {process.get('pid')}"
        + (f", {process['mib']} MiB" if process.get("mib") else "")
        + ")"
        for process in (state.machine.get("gpu") or {}).get("processes", [])
        if process.get("unit") != layout.UNIT
    ]
    yield Finding(
        "GPU tenants",
        not found,
        ", ".join(found) or "none",
        "none but our service",
        "stop them first",
    )


def toolkit(job: Job, state: State) -> Iterable[Finding]:
    """One toolkit: the link, its own version and its compiler must agree."""
    wanted = job.route.machine.toolkit
    if wanted is None:
        return
    found = state.machine.get("toolkit")
    if found is None:
        yield unknown("CUDA toolkit")
        return
    remedy = f"point {job.cuda_home} at a CUDA {wanted[0]} toolkit, or set cuda_home to one"
    if found.get("dangling"):
        yield Finding(
            "CUDA toolkit", False, f"{job.cuda_home} points at nothing", wanted[0], remedy
        )
        return
    version, nvcc = found.get("version"), found.get("nvcc")
    if nvcc is None:
        yield Finding(
            "CUDA toolkit",
            False,
            f"no working nvcc in {job.cuda_home}",
            f"CUDA {wanted[0]} to below {wanted[1]}",
            remedy,
        )
        return
    low, high = (numbers(text) for text in wanted)
    yield Finding(
        "CUDA toolkit",
        low <= numbers(nvcc) < high,
        f"nvcc {nvcc} in {found.get('resolved')}",
        f"CUDA {wanted[0]} to below {wanted[1]}",
        remedy,
    )
    if version is not None:
        yield Finding(
            "CUDA toolkit parts",
            numbers(version)[:2] == numbers(nvcc)[:2],
            f"headers {version}, nvcc {nvcc}",
            "headers and nvcc of one version",
            "two toolkits are mixed there; " + remedy,
        )
    yield Finding(
        "ptxas",
        bool(found.get("ptxas")),
        "there" if found.get("ptxas") else "missing",
        "the toolkit's own ptxas",
        remedy,
    )


def numbers(version: str) -> list[int]:
    """Return a dotted version as numbers."""
    return [int(part) for part in version.split(".") if part.isdigit()]


def port(job: Job, state: State) -> Iterable[Finding]:
    """The port must be free, or ours."""
    if "listener" not in state.machine:
        yield unknown("port")
        return
    found = state.machine["listener"]
    ours = found is None or found.get("unit") == layout.UNIT
    holder = "free" if found is None else f"{found.get('command')} (pid {found.get('pid')})"
    yield Finding(
        f"port {job.port}",
        ours,
        "our service" if found and ours else holder,
        "free",
        "stop that process or set serve_port",
    )


def clock(job: Job, state: State) -> Iterable[Finding]:
    """Package sources and TLS refuse a machine whose clock is far off."""
    found = state.machine.get("time")
    if found is None:
        yield unknown("clock")
        return
    off = found - job.now
    yield Finding(
        "clock",
        abs(off) <= CLOCK_TOLERANCE_S,
        f"{off:+.0f} s from this controller's",
        f"within {CLOCK_TOLERANCE_S} s",
        "turn on time synchronisation (timedatectl)",
    )


def reboot(_: Job, state: State) -> Iterable[Finding]:
    """A half-done upgrade shows as faults elsewhere; finish it first."""
    if "reboot_required" not in state.machine:
        yield unknown("reboot")
        return
    pending = bool(state.machine["reboot_required"])
    yield Finding(
        "reboot",
        not pending,
        "required" if pending else "none pending",
        "none pending",
        "reboot the machine, then deploy",
    )


def one_deploy(job: Job, state: State) -> Iterable[Finding]:
    """One deploy at a time."""
    holder = state.lock
    if holder is None or holder.get("token") == job.token:
        return
    yield Finding(
        "deploy lock",
        False,
        f"{holder.get('owner')} on {holder.get('host')} since {holder.get('since')}",
        "no other deploy at work",
        "wait for it or stop it, then run again",
    )


CHECKS: Final[tuple[Check, ...]] = (
    one_deploy,
    architecture,
    system,
    systemd,
    kernel,
    reserved,
    memory,
    headroom,
    page_cache,
    disk,
    own_pack,
    driver,
    tenants,
    toolkit,
    port,
    clock,
    reboot,
)


def examine(job: Job, state: State) -> list[Finding]:
    """Return the whole table."""
    return [finding for check in CHECKS for finding in check(job, state)]
