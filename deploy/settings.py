"""Settings: the one boundary between what an owner writes and everything else.

Keys are flat and carry their concern in front (`serve_port`), as they stand in
`inventories/group_data/` or after `--data`. This is the only reader of `host.data`. The whole
inventory is checked before the first operation: all faults of all hosts in one answer, each with
the setting's name, what it must be, what it was and what to do.

`load` is pure. What needs pyinfra imports it where it is used, because importing pyinfra patches
the standard library's sockets and threads.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol
from weakref import WeakKeyDictionary

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deploy import _rules, layout, packs, presets, routes
from deploy import _values as v
from dsv4 import memory
from dsv4 import routes as server_routes

WHERE: Final = "set it in inventories/group_data/"
WHERE_TYPED: Final = "it came from --data, give it anew there"

PYINFRA_KEYS: Final = frozenset(
    """
    ssh_hostname ssh_port ssh_user ssh_password ssh_key ssh_key_password ssh_allow_agent
    ssh_look_for_keys ssh_forward_agent ssh_config_file ssh_known_hosts_file
    ssh_strict_host_key_checking ssh_paramiko_connect_kwargs ssh_connect_retries
    ssh_connect_retry_min_delay ssh_connect_retry_max_delay ssh_file_transfer_protocol
    fake_responses fake_delay fake_delay_jitter
    docker_identifier docker_platform docker_architecture
    """.split()  # noqa: SIM905 - one name a line would be a page
)
"""What pyinfra's own connectors read. By name and not by prefix: a misspelt one must not vanish."""

RouteName = Annotated[
    v.Text,
    AfterValidator(v.one_of(routes.ROUTES)),
    v.Must(f"one of {', '.join(routes.ROUTES)}"),
]
PresetName = Annotated[
    v.Text,
    AfterValidator(v.one_of(presets.PRESETS)),
    v.Must(f"one of {', '.join(presets.PRESETS)}"),
]
PackName = Annotated[
    v.Text,
    AfterValidator(v.one_of(packs.PACKS)),
    v.Must(f"one of {', '.join(packs.PACKS)}"),
]


ServedRoutes = Annotated[
    tuple[Annotated[v.Text, AfterValidator(v.one_of(server_routes.EXTRA))], ...],
    BeforeValidator(v.as_tuple),
    v.Must(f"a list of {', '.join(server_routes.EXTRA)}"),
]


class Concern(BaseModel):
    """Settings of one concern."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


class Choice(Concern):
    """What is deployed."""

    route: RouteName = Field(routes.DEFAULT, description="Which engine is built.")
    preset: PresetName = Field("", description="Which tested set of serving values is used.")
    pack: PackName = Field("", description="Which model is served.")


class Cuda(Concern):
    """The CUDA toolkit."""

    cuda_home: v.AbsolutePath = Field(
        Path("/usr/local/cuda-13.0"),
        description="The CUDA toolkit that the engine compiles with, by its versioned directory.",
    )


class PackSettings(Concern):
    """The pack on the machine."""

    pack_dir: v.AbsolutePath | None = Field(
        None, description="A download you have already; it is read and never written."
    )
    pack_revision: v.Commit | None = Field(
        None, description="A commit of the pack; without it the first one seen is pinned."
    )
    pack_code: v.Files = Field(
        (),
        description="Program files that the pack may have, though nothing runs them; a pack with"
        " any other is refused.",
    )
    pack_gc: v.Switch = Field(
        False,
        description="Remove downloaded packs and views that nothing serves, once all else is done;"
        " for one run.",
    )
    pins_dir: v.AbsolutePath | None = Field(
        None, description="Where this controller keeps, for each host, what was pinned."
    )


class Hub(Concern):
    """Where packs come from."""

    hub_endpoint: v.Url | None = Field(
        None, description="Another hub than the public one, as HF_ENDPOINT on the controller does."
    )
    hub_proxy: v.Url | None = Field(
        None, description="A proxy between the machine and the hub; it must ask for no password."
    )
    hub_ca_file: v.AbsolutePath | None = Field(
        None,
        description="A file on the machine, outside home directories, with the certificates to"
        " trust in place of the system's, for a hub or a proxy with its own.",
    )
    hub_token_file: v.AbsolutePath | None = Field(
        None,
        description="A file on the controller with the Hub token, read when HF_TOKEN is not set.",
    )


class Fetch(Concern):
    """The download."""

    fetch_workers: v.Whole = Field(4, ge=1, le=16, description="Files downloaded at a time.")
    fetch_transport: Literal["http", "xet"] = Field(
        "http",
        description="Plain HTTP, which resumes inside a file, or xet, which begins a file anew; a"
        " xet transfer that stalls is gone on with over HTTP.",
    )


class Runtime(Concern):
    """The engine's runtime."""

    wheel_mirror: v.Place | None = Field(
        None,
        description="Wheels of your own, a directory on the machine or an address, tried first.",
    )
    runtime_keep: v.Whole = Field(
        2, ge=2, le=10, description="Runtimes kept on disk, the one in service included."
    )
    exllamav3_wheel: v.Wheel | None = Field(
        None, description="exllamav3's extension built elsewhere, instead of compiling it here."
    )
    plugin_wheel: v.Wheel | None = Field(
        None, description="The EXL3 plugin as a wheel, instead of building its pinned commit."
    )
    engine_wheel: v.Wheel | None = Field(
        None, description="The archived vLLM wheel that route fork serves with."
    )
    build_stops_service: v.Switch = Field(
        False, description="Stop a served model while compiling, when memory is short for both."
    )


class Serve(Concern):
    """Serving. Unset values are the preset's."""

    serve_host: v.Address = Field("127.0.0.1", description="The address the server listens on.")
    serve_port: v.Whole = Field(
        8899, ge=1024, le=65535, description="The port the server listens on."
    )
    serve_name: v.Name | None = Field(None, description="The model's name in requests.")
    serve_routes: ServedRoutes = Field(
        (), description="Routes that are served beside those of the model's interfaces."
    )
    serve_api_key: v.Switch = Field(
        False, description="Whether requests need the key in /etc/dsv4/credentials/api_key."
    )
    serve_tls_cert: v.AbsolutePath | None = Field(
        None, description="The server's certificate, a file on the machine."
    )
    serve_tls_key: v.AbsolutePath | None = Field(
        None, description="The key of that certificate, a file on the machine."
    )
    serve_plain_http: v.Switch = Field(
        False, description="Accept that other machines reach the server without TLS."
    )
    serve_allowed_subnets: v.Networks = Field(
        (), description="Networks that may reach a server which listens beyond the machine."
    )
    serve_media_domains: v.Domains = Field(
        (), description="Hosts that images may be fetched from; without any, none are fetched."
    )
    serve_max_output_tokens: v.Whole = Field(
        32768, ge=1, le=1048576, description="The most tokens one answer can have."
    )
    serve_max_model_len: v.Whole | None = Field(
        None, ge=256, le=1048576, description="Tokens of context, prompt and answer together."
    )
    serve_max_num_seqs: v.Whole | None = Field(
        None, ge=1, le=256, description="Requests worked on at a time."
    )
    serve_max_num_batched_tokens: v.Whole | None = Field(
        None, ge=64, le=65536, description="Tokens worked on in one step."
    )
    serve_gpu_memory_utilization: v.Fraction | None = Field(
        None, ge=0.05, le=0.95, description="The engine's share of the machine's memory."
    )
    serve_enforce_eager: v.Switch | None = Field(
        None, description="Run without CUDA graphs: slower, and less that can go wrong."
    )
    serve_speculative_tokens: v.Whole | None = Field(
        None, ge=0, le=30, description="Tokens the draft proposes at a time; 0 turns it off."
    )
    serve_capture_sizes: v.Sizes | None = Field(
        None, description="Batch sizes that get a CUDA graph of their own."
    )
    serve_expandable_segments: v.Switch | None = Field(
        None, description="Let the CUDA allocator grow its segments; long contexts need it."
    )
    serve_dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = Field(
        None, description="Number format of what the pack does not fix."
    )
    serve_kv_cache_dtype: Literal["auto", "fp8"] | None = Field(
        None, description="Number format of the key-value cache; unset, the pack's."
    )
    serve_load_format: Literal["auto", "fastsafetensors", "instanttensor", "runai_streamer"] = (
        Field(
            "auto",
            description="How the engine reads the weights; all but auto need their package in the"
            " route's lock and are not verified on a Spark.",
        )
    )
    serve_prefix_caching: v.Switch | None = Field(
        None, description="Keep the key-value cache of prompts for those that start alike."
    )
    serve_long_prefill_tokens: v.Whole | None = Field(
        None, ge=0, le=1048576, description="Prompts from this length on wait behind short ones."
    )


class Memory(Concern):
    """The memory equation and its guards. Defaults are field reports from GB10 machines."""

    memory_total_gib: v.Number | None = Field(
        None, ge=1, le=4096, description="Memory to check settings against; unset, the route's."
    )
    memory_host_use_gib: v.Number = Field(
        5.9, ge=0, le=512, description="What the host uses beside the engine, GiB."
    )
    memory_headroom_margin_gib: v.Number = Field(
        1.0, ge=0, le=64, description="What must stay free above the soft floor, GiB."
    )
    memory_lock_gib: v.Number = Field(
        1.0, ge=0.05, le=64, description="Available memory at which the machine locks up, GiB."
    )
    memory_fall_gib_s: v.Number = Field(
        14.0, ge=0.1, le=500, description="The fastest fall of available memory, GiB/s."
    )
    memory_sample_ms: v.Whole = Field(
        100, ge=20, le=1000, description="Time between two samples of the watchdog, ms."
    )
    memory_reaction_ms: v.Whole = Field(
        50, ge=1, le=1000, description="Time from a sample to a delivered kill, ms."
    )
    memory_spare_gib: v.Number = Field(
        0.4, ge=0, le=64, description="A margin on the hard floor, GiB."
    )
    memory_soft_above_gib: v.Number = Field(
        1.5, ge=0.1, le=64, description="How far the soft floor lies above the hard one, GiB."
    )
    memory_soft_samples: v.Whole = Field(
        5,
        ge=1,
        le=100,
        description="Samples in a row below the soft floor before the engine is asked to end.",
    )
    memory_term_grace_s: v.Number = Field(
        5.0, ge=0, le=60, description="Time from asking the engine to end to killing it, s."
    )
    memory_gate_margin_gib: v.Number = Field(
        1.5, ge=0, le=64, description="What must be free beyond the engine's share at start, GiB."
    )
    memory_gate_wait_s: v.Whole = Field(
        120,
        ge=0,
        le=3600,
        description="How long a start waits for memory to come back, before it loads, s.",
    )
    memory_cache_drop: Literal["auto", "always", "never"] = Field(
        "auto", description="When the pack's cached pages are dropped before a start."
    )


class Service(Concern):
    """The service."""

    service_state: Literal["running", "stopped", "keep"] = Field(
        "keep", description="What the deploy leaves behind; keep respects a deliberate stop."
    )
    service_start_timeout_s: v.Whole = Field(
        1800,
        ge=60,
        le=14400,
        description="How long a load may take, up to the first token, s; the wait for memory"
        " (`memory_gate_wait_s`) comes before it and does not count.",
    )
    service_request_timeout_s: v.Whole = Field(
        120, ge=5, le=1800, description="How long the question that proves a start may take, s."
    )
    service_readahead: v.Switch = Field(
        False,
        description="Read the weights ahead of a load that asks the disk for a page at a time; not"
        " verified on a Spark.",
    )
    service_readahead_gib: v.Number = Field(
        8.0,
        ge=0.5,
        le=64,
        description="The most page cache that reading ahead takes, the file being loaded included,"
        " GiB.",
    )
    service_drain_s: v.Whole = Field(
        20, ge=0, le=600, description="How long a stop waits for requests that run, s."
    )
    service_liveness: v.Switch = Field(
        False, description="Ask for a token now and then, and restart an engine that gives none."
    )
    service_liveness_interval_s: v.Whole = Field(
        60, ge=5, le=3600, description="Time between two looks at a serving engine, s."
    )
    service_liveness_stall_s: v.Whole = Field(
        600, ge=30, le=14400, description="Time without a token after which it is restarted, s."
    )


class Verify(Concern):
    """What `verify` asks beyond the pack's own questions."""

    verify_needle_tokens: v.Whole = Field(
        0,
        ge=0,
        le=1048576,
        description="Length of a prompt that verify hides something in; 0 leaves it out.",
    )


class Bench(Concern):
    """What `bench` measures."""

    bench_streams: v.Counts = Field(
        (1, 2, 4, 8, 16), description="Numbers of streams that bench measures with."
    )
    bench_prompt_tokens: v.Whole = Field(
        128, ge=1, le=1048576, description="Length of the prompts in bench's sweep."
    )
    bench_output_tokens: v.Whole = Field(
        256, ge=2, le=1048576, description="Length of the answers in bench's sweep."
    )
    bench_requests_per_stream: v.Whole = Field(
        2, ge=1, le=1000, description="Requests for each stream in bench's sweep."
    )
    bench_answer_tokens: v.Whole = Field(
        512, ge=16, le=1048576, description="Longest answer of the single streams in bench."
    )
    bench_prefill_tokens: v.Counts = Field(
        (893, 14227),
        description="Lengths of prompts whose time to the first token bench measures.",
    )


class Commands(Concern):
    """Settings that are commands: for one run, with `--data`."""

    rotate_key: v.Switch = Field(False, description="Replace the API key by a new one.")
    rollback_to: v.RuntimeId | None = Field(
        None, description="For deploy/rollback.py: the runtime to go back to."
    )
    remove_packs: v.Switch = Field(
        False, description="For deploy/remove.py: take the downloaded packs along."
    )


CONCERNS: Final = (
    Choice,
    Serve,
    Cuda,
    PackSettings,
    Hub,
    Fetch,
    Runtime,
    Service,
    Memory,
    Verify,
    Bench,
    Commands,
)

UNSET: Final[Mapping[str, str]] = {
    "preset": "the route's",
    "pack": "the route's",
    "pins_dir": "`inventories/pins`",
    "serve_name": "the pack's",
    "serve_kv_cache_dtype": "the pack's",
    "memory_total_gib": "the route's",
    "rollback_to": "the one before",
    **{
        key: "the preset's"
        for key in Serve.model_fields
        if key.removeprefix("serve_") in presets.OVERRIDABLE
    },
}
"""Where a value comes from that nobody set."""


class Settings(
    Choice,
    Serve,
    Cuda,
    PackSettings,
    Hub,
    Fetch,
    Runtime,
    Service,
    Memory,
    Verify,
    Bench,
    Commands,
):
    """Every setting of one host, valid by itself and together.

    The fields are what was set or its default; the properties are what follows from them. A
    `serve_` field that is None means the preset's value: read `serving` for the one in force.
    """

    OVERRIDES: ClassVar[tuple[str, ...]] = tuple(
        key.removeprefix("serve_") for key, origin in UNSET.items() if origin == "the preset's"
    )

    # What was chosen

    @cached_property
    def route_data(self) -> routes.Route:
        """The chosen route, with the wheels that the owner supplies."""
        route = routes.ROUTES[self.route]
        return replace(
            route,
            engine=routes.supplied(route.engine, self.engine_wheel) or route.engine,
            exllamav3=routes.supplied(route.exllamav3, self.exllamav3_wheel),
            plugin=routes.supplied(route.plugin, self.plugin_wheel),
        )

    @property
    def preset_data(self) -> presets.Preset:
        """The chosen preset, as it stands."""
        return presets.PRESETS[self.preset]

    @property
    def pack_data(self) -> packs.Pack:
        """The chosen pack."""
        return packs.PACKS[self.pack]

    @cached_property
    def serving(self) -> presets.Preset:
        """The preset with what was overridden: the values in force."""
        own = {name: getattr(self, f"serve_{name}") for name in self.OVERRIDES}
        return replace(self.preset_data, **{k: val for k, val in own.items() if val is not None})

    @property
    def pins(self) -> Path:
        """Where this host's pins are."""
        return self.pins_dir or layout.PINS

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.serve_name or self.pack_data.served_name

    @property
    def pack_root(self) -> Path:
        """The directory that every file of the pack is named in, by whatever links."""
        return self.pack_dir or layout.PACKS

    @property
    def kv_cache_dtype(self) -> str:
        """Number format of the key-value cache."""
        return self.serve_kv_cache_dtype or self.pack_data.kv_cache_dtype

    @cached_property
    def runtime_id(self) -> str:
        """The runtime these settings ask for."""
        return routes.runtime_id(self.route_data, self.route_data.lock.read_bytes())

    # Memory

    @property
    def limits(self) -> memory.Limits:
        """The constants of the memory equation."""
        return memory.Limits(
            lock_gib=self.memory_lock_gib,
            fall_gib_s=self.memory_fall_gib_s,
            sample_ms=self.memory_sample_ms,
            reaction_ms=self.memory_reaction_ms,
            spare_gib=self.memory_spare_gib,
            soft_above_gib=self.memory_soft_above_gib,
            host_use_gib=self.memory_host_use_gib,
            headroom_margin_gib=self.memory_headroom_margin_gib,
        )

    @property
    def floors(self) -> memory.Floors:
        """Where the watchdog acts."""
        return memory.floors(self.limits)

    @property
    def total_gib(self) -> float | None:
        """The memory the settings were checked against; None until the machine was seen."""
        return self.memory_total_gib or self.route_data.nominal_gib

    def headroom_fault(self, total_gib: float) -> str | None:
        """Return why these settings leave a machine of this size too little, None when they fit.

        Preflight asks with what the machine really has.
        """
        fault = _rules.headroom(self, total_gib)
        return None if fault is None else f"serve_gpu_memory_utilization: {fault}"

    @property
    def compile_jobs(self) -> int:
        """Compilers that may run beside the served model."""
        total, cores = self.total_gib, self.route_data.cores
        if total is None or cores is None:
            return 1
        left = memory.steady_headroom(total, self.serving.gpu_memory_utilization, self.limits)
        return memory.compile_jobs(left, cores)

    # Access

    @property
    def loopback(self) -> bool:
        """Whether only the machine itself can reach the server."""
        return _rules.is_loopback(self.serve_host)

    @property
    def listens_everywhere(self) -> bool:
        """Whether the server listens on every address of the machine."""
        return ip_address(self.serve_host).is_unspecified

    @property
    def packages(self) -> tuple[str, ...]:
        """Debian packages: the route's, and nftables where others may reach the server."""
        return (*self.route_data.packages, *(() if self.loopback else ("nftables",)))

    @property
    def url(self) -> str:
        """Where the machine itself reaches the server."""
        address = ip_address(self.serve_host)
        if address.is_unspecified:
            address = ip_address("127.0.0.1" if address.version == 4 else "::1")
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"{'https' if self.serve_tls_cert else 'http'}://{host}:{self.serve_port}"

    # What lands on the machine

    def serve_yaml(self) -> dict[str, Any]:
        """Return vLLM's flags by their long names; what is itself JSON is text."""
        serving, pack = self.serving, self.pack_data
        flags: dict[str, Any] = {
            "model": str(layout.VIEW_CURRENT),
            "served-model-name": self.served_name,
            "host": self.serve_host,
            "port": self.serve_port,
            "max-model-len": serving.max_model_len,
            "max-num-seqs": serving.max_num_seqs,
            "max-num-batched-tokens": serving.max_num_batched_tokens,
            "gpu-memory-utilization": serving.gpu_memory_utilization,
            "enable-prefix-caching": serving.prefix_caching,
            # One runaway answer of 714k tokens held a machine for hours
            "override-generation-config": as_json({"max_new_tokens": self.serve_max_output_tokens}),
            # An empty list would allow all; the reserved name below cannot exist
            "allowed-media-domains": list(self.serve_media_domains) or ["none.invalid"],
            # What is served, to whom, and what no browser and no log may see: see dsv4.routes
            "middleware": server_routes.MIDDLEWARE,
            "allowed-origins": as_json([]),
            "disable-fastapi-docs": True,
            "disable-uvicorn-access-log": True,
            "enable-log-requests": False,
            "log-error-stack": False,  # pydantic's words for a bad request repeat what is in it
            "trust-remote-code": False,
        }
        if serving.dtype != "auto":
            flags["dtype"] = serving.dtype
        if self.kv_cache_dtype != "auto":
            flags["kv-cache-dtype"] = self.kv_cache_dtype
        if pack.exl3 is not None:
            flags["quantization"] = "exl3"
        if self.serve_load_format != "auto":
            flags["load-format"] = self.serve_load_format
        if self.route_data.needs_cuda:
            flags["tensor-parallel-size"] = 1
        if serving.long_prefill_tokens:
            flags["long-prefill-token-threshold"] = serving.long_prefill_tokens
        if serving.enforce_eager:
            flags["enforce-eager"] = True
        elif self.route_data.needs_cuda:
            graphs: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            if serving.capture_sizes:
                graphs["cudagraph_capture_sizes"] = list(serving.capture_sizes)
            flags["compilation-config"] = as_json(graphs)
        if serving.speculative_tokens:
            draft = {
                "method": pack.draft_method,
                "num_speculative_tokens": serving.speculative_tokens,
            }
            flags["speculative-config"] = as_json(draft)
        if pack.tool_parser:
            flags |= {"enable-auto-tool-choice": True, "tool-call-parser": pack.tool_parser}
        if pack.reasoning_parser:
            flags["reasoning-parser"] = pack.reasoning_parser
        if self.serve_tls_cert and self.serve_tls_key:
            flags |= {
                "ssl-certfile": str(layout.TLS_CERT),
                "ssl-keyfile": str(layout.TLS_KEY),
            }
        return flags

    def serve_yaml_text(self) -> str:
        """Return serve.yaml: a key a line, each value as JSON, which YAML reads as it is."""
        lines = [f"{key}: {as_json(value)}" for key, value in sorted(self.serve_yaml().items())]
        head = f"# vLLM's flags: route {self.route}, preset {self.preset}, pack {self.pack}."
        return "\n".join([head, "# Written by the deploy, which puts edits back.", *lines, ""])

    def guard(self) -> dict[str, Any]:
        """Return guard.json: what hooks, watchdog and probes go by."""
        floors, pack = self.floors, self.pack_data
        return {
            "schema": layout.SCHEMA,
            "unit": layout.UNIT,
            "user": layout.USER,
            "url": self.url,
            "host": self.serve_host,
            "port": self.serve_port,
            "served_name": self.served_name,
            "view": str(layout.VIEW_CURRENT),
            "pack_root": str(self.pack_root),
            "allowed_networks": list(self.serve_allowed_subnets),
            "memory": {
                "device": self.route_data.accelerator,
                "utilisation": self.serving.gpu_memory_utilization,
                "gate_margin_gib": self.memory_gate_margin_gib,
                "gate_wait_s": self.memory_gate_wait_s,
                "headroom_gib": round(
                    memory.serving_headroom(self.serving.max_model_len, self.limits), 3
                ),
                "hard_floor_gib": round(floors.hard, 3),
                "soft_floor_gib": round(floors.soft, 3),
                "soft_samples": self.memory_soft_samples,
                "sample_ms": self.memory_sample_ms,
                "reaction_ms": self.memory_reaction_ms,
                "lock_gib": self.memory_lock_gib,
                "spare_gib": self.memory_spare_gib,
                "term_grace_s": self.memory_term_grace_s,
                "cache_drop": self.memory_cache_drop,
            },
            "ready": {
                "timeout_s": self.service_start_timeout_s,
                "prompt": pack.smoke[0].prompt,
                "max_tokens": 8,
                "request_timeout_s": self.service_request_timeout_s,
            },
            "readahead": {
                "enabled": self.service_readahead,
                "window_gib": self.service_readahead_gib,
            },
            "stop": {"drain_s": self.service_drain_s},
            "liveness": {
                "enabled": self.service_liveness,
                "interval_s": self.service_liveness_interval_s,
                "stall_s": self.service_liveness_stall_s,
            },
            "probe": {
                "questions": [
                    {
                        "prompt": smoke.prompt,
                        "expect": [smoke.expect],
                        "max_tokens": smoke.max_tokens,
                        "chat": smoke.chat,
                    }
                    for smoke in pack.smoke
                ]
            },
            "offers": {
                "vision": pack.vision and self.route_data.vision,
                "tool_parser": pack.tool_parser or "",
                "reasoning_parser": pack.reasoning_parser or "",
                "needle_tokens": self.verify_needle_tokens,
            },
        }

    def environment(self, toolkit: str | None = None, runtime: str | None = None) -> dict[str, str]:
        """Return the engine's environment: plain words only, no JSON and no secret.

        Compiled kernels are kept across restarts, apart for each runtime and toolkit: one made by
        another toolkit fails at its first use. `toolkit` is its version, where it is known;
        `runtime` the one in service, which after a rollback is not the one these settings ask for.
        """
        found = dict(self.route_data.service_env)
        key = runtime or self.runtime_id
        if self.route_data.needs_cuda:
            key = f"{key}-{f'cuda-{toolkit}' if toolkit else self.cuda_home.name}"
        cache = layout.CACHE / key
        found |= {
            "HF_HOME": str(cache / "hub"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
            "XDG_CACHE_HOME": str(cache / "xdg"),
            # vLLM's own limit, 600 s, is shorter than a cold load
            "VLLM_ENGINE_READY_TIMEOUT_S": str(self.service_start_timeout_s),
            # Its limit of 300 s a step is too short for a kernel compiled in mid-serve
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",
            # A redirect would lead past the list of allowed domains
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
            # Its processes talk to each other over TCP without a key: on this machine only
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if self.serve_routes:
            found[server_routes.VARIABLE] = ",".join(self.serve_routes)
        if not self.route_data.needs_cuda:
            return found
        ptxas = str(self.cuda_home / "bin/ptxas")
        found |= {
            "CUDA_CACHE_PATH": str(cache / "cuda"),
            "CUDA_HOME": str(self.cuda_home),
            "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
            "TILELANG_CACHE_DIR": str(cache / "tilelang"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            # The one inside Triton is older than this GPU; newer Tritons read the second name
            "TRITON_PTXAS_PATH": ptxas,
            "TRITON_PTXAS_BLACKWELL_PATH": ptxas,
            # A kernel's compiler takes 3 to 8 GiB, beside a model that has the rest
            "MAX_JOBS": str(self.compile_jobs),
            "NVCC_THREADS": "1",
            "FLASHINFER_NVCC_THREADS": "1",
        }
        if self.serving.expandable_segments:
            found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        return found

    def environment_text(self, toolkit: str | None = None, runtime: str | None = None) -> str:
        """Return the file that systemd reads the environment from."""
        values = self.environment(toolkit, runtime)
        lines = [f"{key}={value}" for key, value in sorted(values.items())]
        return "\n".join(["# Written by the deploy, which puts edits back.", *lines, ""])

    def fetch_spec(self, revision: str) -> dict[str, Any]:
        """Return fetch.json: what dsv4-fetch downloads."""
        return {
            "schema": layout.SCHEMA,
            "repo_id": self.pack_data.repo_id,
            "name": self.pack,
            "revision": revision,
            "endpoint": self.hub_endpoint,
            "environment": self.fetch_environment,
            "transport": self.fetch_transport,
            "workers": self.fetch_workers,
            "expected": self.pack_data.expected(),
            "code": list(self.pack_code),
        }

    @property
    def fetch_environment(self) -> dict[str, str]:
        """Return how the fetcher reaches the network."""
        found: dict[str, str] = {}
        if self.hub_proxy is not None:
            found |= dict.fromkeys(("http_proxy", "https_proxy"), self.hub_proxy)
            found["no_proxy"] = "localhost,127.0.0.1,::1"
        if self.hub_ca_file is not None:
            found["SSL_CERT_FILE"] = str(self.hub_ca_file)
        return found

    def plain(self) -> dict[str, Any]:
        """Return everything that was set, and the serving values in force, as plain data."""
        own = self.model_dump(mode="json", exclude_none=True)
        return {**own, "serving": json.loads(json.dumps(asdict(self.serving)))}


def as_json(value: object) -> str:
    """Return JSON in one line, the same for the same value."""
    return json.dumps(value, sort_keys=True)


# --- reading --------------------------------------------------------------------------------------


class SettingsError(ValueError):
    """Settings are wrong; `faults` has one line for each."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


@dataclass(frozen=True)
class Reading:
    """What data says: settings made of everything that is right, and what is wrong with the rest.

    With faults the settings are no more than something to look for further faults in.
    """

    chosen: Settings
    faults: tuple[str, ...]
    wrong: frozenset[str]


def load(data: Mapping[str, object]) -> Settings:
    """Return the settings in `data`, or raise `SettingsError` with every fault there is."""
    reading = read(data)
    if reading.faults:
        raise SettingsError(reading.faults)
    return reading.chosen


def read(data: Mapping[str, object], typed: Container[str] = ()) -> Reading:
    """Return what `data` says; never raises.

    + typed: the keys that the command line gave, where a correction belongs as well
    """
    own, faults = declared(data)
    hints: dict[str, str] = {}
    try:
        Settings.model_validate(with_defaults(own))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            hints.setdefault(str(detail["loc"][0]), hint_of(detail))
    wrong = frozenset(hints)
    faults += [
        fault_line(key, own[key], hints[key], WHERE_TYPED if key in typed else WHERE)
        for key in own
        if key in wrong
    ]
    # What is right is looked at together, even when something else is wrong
    right = {key: value for key, value in own.items() if key not in wrong}
    chosen = Settings.model_validate(with_defaults(right))
    for rule in _rules.RULES:
        text = None if rule.needs & wrong else rule.check(chosen)
        if text:
            faults.append(f"{rule.key}: {text}")
    ssh = None if "serve_port" in wrong else _rules.port_is_not_ssh(chosen, data)
    if ssh:
        faults.append(f"serve_port: {ssh}")
    return Reading(chosen, tuple(faults), wrong)


def declared(data: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Split data into the settings in it and the faults of keys that are none; None is unset."""
    own: dict[str, object] = {}
    faults = []
    for key, value in data.items():
        if isinstance(key, str) and (key.startswith("_") or key in PYINFRA_KEYS):
            continue
        if isinstance(key, str) and key in Settings.model_fields:
            if value is not None:
                own[key] = value
            continue
        hint = v.near(key, [*Settings.model_fields, *PYINFRA_KEYS]) if isinstance(key, str) else ""
        meant = f" ({hint})" if hint else ""
        faults.append(
            f"{v.shown(key)}: is no setting{meant}; take it out of inventories/ or --data"
        )
    return own, faults


def with_defaults(own: Mapping[str, object]) -> dict[str, object]:
    """Add the preset and the pack that a route stands for when none is named."""
    name = own.get("route", routes.DEFAULT)
    known = isinstance(name, str) and name in routes.ROUTES
    route = routes.ROUTES[str(name) if known else routes.DEFAULT]
    return {"preset": route.preset, "pack": route.pack, **own}


def hint_of(detail: Any) -> str:
    """Return what a validator had to say beyond "wrong", if anything."""
    error = detail.get("ctx", {}).get("error")
    return str(error) if isinstance(error, v.Hint) else ""


def fault_line(key: str, value: object, hint: str, where: str = WHERE) -> str:
    """Return the line for one wrong value."""
    got = v.shown(value) + (f": {hint}" if hint else "")
    return f"{key}: must be {v.wanted(Settings.model_fields[key])} (got {got}); {where}"


# --- pyinfra --------------------------------------------------------------------------------------


class Host(Protocol):
    """What is read of a pyinfra host."""

    name: str
    groups: list[str]


class Inventory(Protocol):
    """What is read of a pyinfra inventory."""

    def __iter__(self) -> Iterator[Host]: ...

    def get_data(self) -> dict[str, Any]:
        """Return the data of all hosts."""

    def get_groups_data(self, groups: list[str]) -> dict[str, Any]:
        """Return the data of groups, the last one counting most."""

    def get_host_data(self, hostname: str) -> dict[str, Any]:
        """Return a host's own data."""

    def get_override_data(self) -> dict[str, Any]:
        """Return what the command line says."""


@dataclass(frozen=True)
class HostFault:
    """One line about one host."""

    host: str
    text: str


class InventoryError(SettingsError):
    """Settings of hosts are wrong; `faults` has one line for each fault, hosts in front."""

    def __init__(self, faults: Sequence[HostFault]) -> None:
        hosts: dict[str, list[str]] = defaultdict(list)
        for fault in faults:
            hosts[fault.text].append(fault.host)
        super().__init__([f"{', '.join(names)}: {text}" for text, names in hosts.items()])


def data_of(inventory: Inventory, host: Host, *, targeted: bool) -> dict[str, Any]:
    """Return a host's data in pyinfra's order; `--data` counts for the hosts of this run only.

    Before all of it comes the hub that the Hub's own tools are told to use on this controller.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "").strip()
    return {
        **({"hub_endpoint": endpoint} if endpoint else {}),
        **inventory.get_data(),
        **inventory.get_groups_data(host.groups),
        **inventory.get_host_data(host.name),
        **(inventory.get_override_data() if targeted else {}),
    }


def place_of(name: str, data: Mapping[str, object], chosen: Settings) -> _rules.Place:
    """Return where a host's ports are."""
    address = data.get("ssh_hostname")
    address = address if isinstance(address, str) and address else name
    return _rules.Place(
        address="127.0.0.1" if address == "localhost" else address,
        ssh_port=_rules.ssh_port(data),
        serve_port=chosen.serve_port,
    )


def check_inventory(
    inventory: Inventory, limit: Sequence[Host] | None = None
) -> dict[str, Settings]:
    """Return the settings of every host, or raise `InventoryError` with all faults of all hosts.

    Hosts outside `limit` are checked too, without what `--data` says, which is not for them. That
    this version can deploy their route is asked of the hosts of this run alone.
    """
    found: dict[str, Settings] = {}
    places: dict[str, _rules.Place] = {}
    faults: list[HostFault] = []
    for host in inventory:
        targeted = limit is None or host in limit
        data = data_of(inventory, host, targeted=targeted)
        reading = read(data, inventory.get_override_data() if targeted else ())
        found[host.name] = reading.chosen
        faults += [HostFault(host.name, text) for text in reading.faults]
        if "serve_port" not in reading.wrong:
            places[host.name] = place_of(host.name, data, reading.chosen)
        if targeted and "route" not in reading.wrong:
            faults += [HostFault(host.name, it) for it in route_faults(reading.chosen.route_data)]
    faults += [HostFault(name, text) for name, text in _rules.port_clashes(places).items()]
    if faults:
        raise InventoryError(faults)
    return found


def route_faults(route: routes.Route) -> list[str]:
    """Return what keeps this version from deploying a route, with the routes that it can."""
    usable = ", ".join(routes.usable()) or "none"
    return [f"{text}; this version can deploy: {usable}" for text in routes.missing(route)]


_checked: WeakKeyDictionary[object, dict[str, Settings]] = WeakKeyDictionary()


def _all() -> dict[str, Settings]:
    """Check the inventory of this run once, and turn faults into pyinfra's own kind of error."""
    from pyinfra.context import host

    inventory = host.inventory
    if inventory not in _checked:
        try:
            _checked[inventory] = check_inventory(inventory, host.state.limit_hosts)
        except InventoryError as error:
            from deploy._refusal import Refusal

            raise Refusal("the settings are wrong, nothing was changed", error.faults) from None
    return _checked[inventory]


def check() -> None:
    """Stop the run before its first operation when a setting of any host is wrong."""
    _all()


def current() -> Settings:
    """Return the settings of the host that is being worked on."""
    from pyinfra.context import host

    return _all()[host.name]


# --- the README's table ---------------------------------------------------------------------------


def default_of(key: str) -> str:
    """Return a setting's default as the table shows it."""
    default = Settings.model_fields[key].default
    if key in UNSET:
        return UNSET[key]
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return f"`{','.join(map(str, default))}`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def table() -> str:
    """Return the README's table of settings."""
    rows = ["| setting | default | must be | what it is |", "| --- | --- | --- | --- |"]
    for concern in CONCERNS:
        for key, field in concern.model_fields.items():
            rows.append(
                f"| `{key}` | {default_of(key)} | {v.wanted(field)} | {field.description} |"
            )
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str]) -> int:
    """Print the table for the README."""
    if list(argv) != ["--table"]:
        sys.stderr.write("usage: python -m deploy.settings --table\n")
        return 2
    sys.stdout.write(table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
