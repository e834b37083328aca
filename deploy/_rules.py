"""Rules across settings: each names what is wrong, with the arithmetic, and what to do.

A rule returns the end of a sentence that starts with the setting's name, or None. It is skipped
when a setting it `needs` is wrong by itself, so that one mistake gives one line.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from deploy import flags, presets, routes
from dsv4 import memory

if TYPE_CHECKING:
    from deploy.settings import Settings

Check = Callable[["Settings"], str | None]

LONG_CONTEXT: Final = 200_000
"""Past about this, the recipe needs expandable segments."""
LONGEST_CONTEXT: Final = 256_000
MOST_STREAMS: Final = 256
NEEDLE_SPARE: Final = 4096
"""Tokens for question and answer, and for an estimate of a prompt's length that was too short."""
BATCHED_AT_LONGEST: Final = 2048
"""At 256k context 4096 and 8192 left too little key-value cache to start; 2048 started."""


@dataclass(frozen=True)
class Rule:
    """One named rule."""

    key: str
    needs: frozenset[str]
    check: Check


RULES: Final[list[Rule]] = []

ENGINE: Final = ("route", "preset", "pack")
LIMITS: Final = (
    "memory_lock_gib",
    "memory_fall_gib_s",
    "memory_sample_ms",
    "memory_reaction_ms",
    "memory_spare_gib",
    "memory_soft_above_gib",
    "memory_host_use_gib",
    "memory_headroom_margin_gib",
    "memory_total_gib",
)


def rule(key: str, *needs: str) -> Callable[[Check], Check]:
    """Register a rule that speaks about `key` and reads `needs` as well."""

    def register(check: Check) -> Check:
        RULES.append(Rule(key, frozenset({key, *needs}), check))
        return check

    return register


@rule("preset", "route")
def preset_fits_route(chosen: "Settings") -> str | None:
    """A preset is made for a GPU or for a processor."""
    route, preset = chosen.route_data, chosen.preset_data
    if preset.accelerator == route.accelerator:
        return None
    fitting = [name for name, it in presets.PRESETS.items() if it.accelerator == route.accelerator]
    return (
        f"{preset.name} is made for {preset.accelerator}, route {route.name} runs on"
        f" {route.accelerator}; choose one of {', '.join(fitting)}, or another route"
    )


@rule("pack", "route")
def pack_fits_route(chosen: "Settings") -> str | None:
    """An EXL3 pack needs the EXL3 kernels."""
    if chosen.pack_data.exl3 is None or chosen.route_data.exllamav3 is not None:
        return None
    able = [route.name for route in routes.ALL if route.exllamav3 is not None]
    return (
        f"{chosen.pack} is in EXL3 format, which route {chosen.route} cannot read; choose one of"
        f" the routes {', '.join(able)}, or another pack"
    )


@rule("route", "preset", "pack")
def engine_takes_the_flags(chosen: "Settings") -> str | None:
    """Flags come and go between releases, and an engine refuses the ones it does not know."""
    engine = chosen.route_data.engine
    unknown = flags.unknown(engine.version, chosen.serve_yaml())
    if not unknown:
        return None
    return (
        f"{chosen.route} has vLLM {engine.version}, which does not know"
        f" {', '.join(f'--{flag}' for flag in unknown)}; leave out the setting it comes from, or"
        " choose another route"
    )


@rule("engine_wheel", "route")
def engine_is_the_routes(chosen: "Settings") -> str | None:
    """Only the archived fork is served from a wheel that its owner keeps."""
    if chosen.engine_wheel is None or "engine_wheel" in chosen.route_data.from_owner:
        return None
    return f"is for route fork, route {chosen.route} brings its own engine; leave it out"


@rule("route", "engine_wheel", "plugin_wheel")
def wheels_are_supplied(chosen: "Settings") -> str | None:
    """What nobody publishes any more has to come from whoever has it."""
    lacking = [key for key in chosen.route_data.from_owner if getattr(chosen, key) is None]
    if not lacking:
        return None
    return (
        f"{chosen.route} is made of archived wheels that nobody publishes; name yours with"
        f" {' and '.join(lacking)} (an address or a path on the machine, then #sha256= and its"
        " hash), or choose another route"
    )


def _part_is_used(part: str) -> Check:
    """Return the check that a supplied wheel is for something the route has."""

    def check(chosen: "Settings") -> str | None:
        if getattr(chosen, f"{part}_wheel") is None or getattr(routes.ROUTES[chosen.route], part):
            return None
        return f"route {chosen.route} has no {part}; leave it out"

    return check


for _part in ("exllamav3", "plugin"):
    rule(f"{_part}_wheel", "route")(_part_is_used(_part))

DISTRIBUTIONS: Final = {
    "engine_wheel": ("vllm",),
    "exllamav3_wheel": ("dsv4-exllamav3-ext", "exllamav3"),
    "plugin_wheel": ("vllm-exl3",),
}
"""What a wheel holds, by the name in its file's name; ours of exllamav3 holds the extension."""


def _wheel_is_the_parts(key: str) -> Check:
    """Return the check that a wheel is of the part it is named for, and for the route's machine.

    A wheel of another name is no replacement: the lock's engine would stay and serve in its place.
    """

    def check(chosen: "Settings") -> str | None:
        place = str(getattr(chosen, key) or "").partition("#")[0]
        part = key.removesuffix("_wheel")
        if not place or getattr(routes.ROUTES[chosen.route], part) is None:
            return None
        file = unquote(place.rpartition("/")[2])
        parts = file.removesuffix(".whl").split("-")
        if len(parts) not in {5, 6}:
            return (
                f"{file} is no wheel's name (name, version and three tags with - between them);"
                " give it back the name it was built with"
            )
        wanted = DISTRIBUTIONS[key]
        if re.sub(r"[-_.]+", "-", parts[0]).lower() not in wanted:
            return f"wanted a wheel of {' or '.join(wanted)}, got {file}; name the right one"
        machines = chosen.route_data.machine.architectures
        if not parts[-1].endswith(("any", *machines)):
            return (
                f"{file} is for {parts[-1]}, route {chosen.route} runs on {' or '.join(machines)};"
                " name a wheel for that"
            )
        return None

    return check


for _key in DISTRIBUTIONS:
    rule(_key, "route")(_wheel_is_the_parts(_key))

HIDDEN_FROM_BUILDS: Final = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108
"""What the build's sandbox does not show: it unpacks and runs what comes from the network."""


def _is_seen_by_builds(key: str) -> Check:
    """Return the check that the build can read the path in a setting."""

    def check(chosen: "Settings") -> str | None:
        place = f"{getattr(chosen, key) or ''}/"
        hidden = next((it for it in HIDDEN_FROM_BUILDS if place.startswith(it)), None)
        if hidden is None:
            return None
        return f"is under {hidden}, which the build cannot see; put it under /srv"

    return check


NOBODYS: Final = ("/tmp", "/var/tmp")  # noqa: S108
"""Each unit has its own, and a machine empties them."""


@rule("pack_dir")
def pack_is_where_units_see_it(chosen: "Settings") -> str | None:
    """What is under these the engine cannot see; preflight follows the links on the machine."""
    place = f"{chosen.pack_dir or ''}/"
    hidden = next((it for it in NOBODYS if place.startswith(f"{it}/")), None)
    if hidden is None:
        return None
    return f"is under {hidden}, of which each unit has its own; put it under /srv"


for _key in ("wheel_mirror", "exllamav3_wheel", "plugin_wheel", "engine_wheel"):
    rule(_key)(_is_seen_by_builds(_key))


def headroom(chosen: "Settings", total_gib: float) -> str | None:
    """Return why the engine's share of `total_gib` leaves too little, None when it does not."""
    serving, limits = chosen.serving, chosen.limits
    used, context = serving.gpu_memory_utilization, serving.max_model_len
    left = memory.steady_headroom(total_gib, used, limits)
    needed = memory.needed_headroom(context, limits)
    if left >= needed:
        return None
    best = memory.highest_utilisation(total_gib, context, limits)
    remedy = (
        f"the highest that passes is {best:.2f}"
        if best >= max(0.05, memory.lowest_utilisation(total_gib, chosen.pack_data.gib or 0.0))
        else f"no utilisation passes{_beside_weights(chosen)}, lower "
        + ("serve_max_model_len" if memory.prefill_gib(context) >= 0.1 else "the memory_ settings")
    )
    return (
        f"{used:g} leaves {total_gib:.1f} GiB * (1 - {used:g}) - {limits.host_use_gib:g} for the"
        f" host = {left:.1f} GiB, and {needed:.1f} are needed (soft floor"
        f" {chosen.floors.soft:.1f} + margin {limits.headroom_margin_gib:g} + prompts up to"
        f" {context} tokens {memory.prefill_gib(context):.1f}); {remedy}"
    )


def _beside_weights(chosen: "Settings") -> str:
    """Return what the engine's share must hold at least, in words."""
    weights = chosen.pack_data.gib
    return "" if weights is None else f" and holds the pack's {weights:.1f} GiB of weights"


@rule("serve_gpu_memory_utilization", "serve_max_model_len", *ENGINE, *LIMITS)
def leaves_headroom(chosen: "Settings") -> str | None:
    """Host and GPU share their memory: what the engine takes, nobody else has."""
    total = chosen.total_gib
    return None if total is None else headroom(chosen, total)


@rule("serve_gpu_memory_utilization", "memory_total_gib", *ENGINE)
def share_holds_the_weights(chosen: "Settings") -> str | None:
    """A share smaller than the pack can only fail, after minutes of loading."""
    total, weights = chosen.total_gib, chosen.pack_data.gib
    used = chosen.serving.gpu_memory_utilization
    if total is None or weights is None or total * used >= weights or headroom(chosen, total):
        return None
    best = memory.lowest_utilisation(total, weights)
    remedy = f"the lowest that could hold them is {best:.2f}" if best < 1 else "no share is enough"
    return (
        f"{used:g} gives the engine {total:.1f} GiB * {used:g} = {total * used:.1f} GiB, and the"
        f" weights of pack {chosen.pack} alone have {weights:.1f}; {remedy}"
    )


@rule("memory_gate_margin_gib", "serve_gpu_memory_utilization", *ENGINE, *LIMITS)
def gate_can_pass(chosen: "Settings") -> str | None:
    """A start that waits for more than the machine ever has free waits in vain."""
    total, used = chosen.total_gib, chosen.serving.gpu_memory_utilization
    if total is None or headroom(chosen, total):  # that has a line of its own
        return None
    left = memory.steady_headroom(total, used, chosen.limits)
    if left >= chosen.memory_gate_margin_gib:
        return None
    return (
        f"{chosen.memory_gate_margin_gib:g} is more than ever is free beside the engine's share:"
        f" {total:.1f} GiB * (1 - {used:g}) - {chosen.memory_host_use_gib:g} for the host ="
        f" {left:.1f} GiB; set it to at most {int(left * 10) / 10:g}"
    )


LOADERS: Final[Mapping[str, str]] = {
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "runai_streamer": "runai-model-streamer",
}
"""The package behind each way of reading weights, as vLLM names the ways."""


@rule("serve_load_format", *ENGINE)
def loader_is_installed(chosen: "Settings") -> str | None:
    """A way of reading weights that is not in the runtime fails after minutes of starting."""
    if chosen.serve_load_format == "auto":
        return None
    locked = re.findall(r"^([a-z0-9-]+)==", chosen.route_data.lock.read_text(), re.MULTILINE)
    if LOADERS[chosen.serve_load_format] in locked:
        return None
    there = [name for name, package in LOADERS.items() if package in locked]
    return (
        f"{chosen.serve_load_format} needs {LOADERS[chosen.serve_load_format]}, which the lock of"
        f" route {chosen.route} does not have; use {' or '.join(['auto', *there])}"
    )


@rule("service_readahead", "serve_load_format")
def readahead_has_something_to_do(chosen: "Settings") -> str | None:
    """Only a load through mmap faults page by page; the others read by themselves."""
    if not chosen.service_readahead or chosen.serve_load_format == "auto":
        return None
    return (
        f"is of no use with serve_load_format {chosen.serve_load_format}, which reads by itself;"
        " leave one of them out"
    )


@rule("serve_speculative_tokens", *ENGINE)
def draft_can_do_it(chosen: "Settings") -> str | None:
    """The draft has a number of layers; beyond it, only its multiples work."""
    tokens, layers = chosen.serving.speculative_tokens, chosen.pack_data.draft_layers
    if tokens == 0:
        return None
    if layers == 0:
        return f"must be 0 (got {tokens}): pack {chosen.pack} has no draft; set it to 0"
    if tokens <= layers or tokens % layers == 0:
        return None
    return (
        f"must be 0 to {layers} or a multiple of {layers}, the layers of the draft in pack"
        f" {chosen.pack} (got {tokens}); {layers} was fastest"
    )


@rule("serve_max_model_len", *ENGINE)
def pack_knows_the_context(chosen: "Settings") -> str | None:
    """A model has a longest context."""
    most = chosen.pack_data.max_context
    if chosen.serving.max_model_len <= most:
        return None
    return (
        f"{chosen.serving.max_model_len} is more than pack {chosen.pack} can do; set it to at most"
        f" {most}"
    )


@rule("verify_needle_tokens", "serve_max_model_len", *ENGINE)
def needle_fits_the_context(chosen: "Settings") -> str | None:
    """The prompt, the question and the answer share the context."""
    most = chosen.serving.max_model_len - NEEDLE_SPARE
    if chosen.verify_needle_tokens <= max(0, most):
        return None
    return (
        f"{chosen.verify_needle_tokens} leaves no room for the answer in a context of"
        f" {chosen.serving.max_model_len} tokens; set it to at most {max(0, most)}"
    )


@rule("bench_output_tokens", "bench_prompt_tokens", "serve_max_model_len", *ENGINE)
def bench_fits_the_context(chosen: "Settings") -> str | None:
    """Prompt and answer share the context."""
    need, most = (
        chosen.bench_prompt_tokens + chosen.bench_output_tokens,
        chosen.serving.max_model_len,
    )
    if need <= most:
        return None
    return (
        f"{chosen.bench_output_tokens} and bench_prompt_tokens {chosen.bench_prompt_tokens} are"
        f" more than the context of {most}; lower either"
    )


@rule("bench_streams")
def bench_has_streams(chosen: "Settings") -> str | None:
    """An empty sweep measures nothing, a huge one never ends."""
    if chosen.bench_streams and max(chosen.bench_streams) <= MOST_STREAMS:
        return None
    return f"must be one number or more, up to {MOST_STREAMS}; 1,2,4,8,16 is usual"


@rule("serve_max_num_batched_tokens", "serve_max_model_len", *ENGINE)
def batch_fits_long_context(chosen: "Settings") -> str | None:
    """A larger batch takes the memory that a long context needs."""
    batched, context = chosen.serving.max_num_batched_tokens, chosen.serving.max_model_len
    if context < LONGEST_CONTEXT or batched <= BATCHED_AT_LONGEST or not _on_cuda(chosen):
        return None
    return (
        f"{batched} with {context} tokens of context leaves too little key-value cache to start"
        f" (reported for 4096 and 8192); set it to {BATCHED_AT_LONGEST} or less, or"
        f" serve_max_model_len below {LONGEST_CONTEXT}"
    )


@rule("serve_max_num_batched_tokens", "serve_max_num_seqs", *ENGINE)
def batch_holds_every_stream(chosen: "Settings") -> str | None:
    """The engine refuses a batch with less than one token a stream."""
    batched, streams = chosen.serving.max_num_batched_tokens, chosen.serving.max_num_seqs
    if batched >= streams:
        return None
    return (
        f"must be at least serve_max_num_seqs, one token a stream (got {batched} for {streams});"
        " raise it or lower serve_max_num_seqs"
    )


@rule("serve_expandable_segments", "serve_max_model_len", *ENGINE)
def long_context_needs_segments(chosen: "Settings") -> str | None:
    """A long prompt fragments the allocator's memory until a fixed segment does not fit."""
    if not _on_cuda(chosen):
        if chosen.serving.expandable_segments:
            return f"route {chosen.route} has no CUDA allocator to set; leave it out"
        return None
    context = chosen.serving.max_model_len
    if context <= LONG_CONTEXT or chosen.serving.expandable_segments:
        return None
    return (
        f"must be true for {context} tokens of context (required past {LONG_CONTEXT}); set it, or"
        f" serve_max_model_len to at most {LONG_CONTEXT}"
    )


@rule("serve_capture_sizes", "serve_enforce_eager", *ENGINE)
def sizes_need_graphs(chosen: "Settings") -> str | None:
    """Sizes without graphs would be accepted and do nothing."""
    if chosen.serve_capture_sizes and chosen.serving.enforce_eager:
        return "has no effect in eager mode; leave it out or set serve_enforce_eager to false"
    return None


@rule("serve_host")
def host_can_listen(chosen: "Settings") -> str | None:
    """A group's address is nobody's to listen on."""
    if not ip_address(chosen.serve_host).is_multicast:
        return None
    return f"{chosen.serve_host} is a multicast address; use one of the machine's own"


@rule("serve_host", "serve_api_key")
def remote_bind_needs_key(chosen: "Settings") -> str | None:
    """Whoever reaches the port can use the model, and more."""
    if chosen.loopback or chosen.serve_api_key:
        return None
    return (
        f"{chosen.serve_host} can be reached from other machines, which needs a key; set"
        " serve_api_key to true, or serve_host to 127.0.0.1"
    )


@rule("serve_host", "serve_tls_cert", "serve_tls_key", "serve_plain_http")
def remote_bind_needs_tls(chosen: "Settings") -> str | None:
    """A key in clear text is anybody's on the way."""
    if chosen.loopback or chosen.serve_tls_cert or chosen.serve_plain_http:
        return None
    return (
        f"{chosen.serve_host} would take the key in clear text; set serve_tls_cert and"
        " serve_tls_key, or accept that with serve_plain_http: true"
    )


@rule("serve_host", "serve_allowed_subnets")
def remote_bind_needs_subnet(chosen: "Settings") -> str | None:
    """A port open to all networks is open to the next guest as well."""
    if chosen.loopback or chosen.serve_allowed_subnets:
        return None
    return (
        f"{chosen.serve_host} can be reached from every network; name those that may in"
        " serve_allowed_subnets"
    )


def _needs_remote_bind(key: str) -> Check:
    """Return the check that a setting for servers others can reach is not set for one they cannot.

    It would look like access that was given, or like a limit that holds.
    """

    def check(chosen: "Settings") -> str | None:
        if not chosen.loopback or not getattr(chosen, key):
            return None
        return (
            f"has no effect while only the machine itself can reach {chosen.serve_host}; set"
            " serve_host as well, or leave it out"
        )

    return check


for _key in ("serve_plain_http", "serve_allowed_subnets"):
    rule(_key, "serve_host")(_needs_remote_bind(_key))


@rule("serve_allowed_subnets", "serve_host")
def subnets_limit_something(chosen: "Settings") -> str | None:
    """Everybody is no subnet, and an address is reached by its own kind only."""
    nets = [ip_network(net) for net in chosen.serve_allowed_subnets]
    if everybody := [str(net) for net in nets if net.prefixlen == 0]:
        return f"{everybody[0]} is everybody; name the networks that may reach the server"
    version = ip_address(chosen.serve_host).version
    if nets and version == 4 and all(net.version != version for net in nets):
        return (
            f"has no IPv4 network, and {chosen.serve_host} is reached by nothing else; add one, or"
            " set serve_host to an IPv6 address"
        )
    return None


@rule("serve_plain_http", "serve_tls_cert")
def tls_or_not(chosen: "Settings") -> str | None:
    """Who reads that plain HTTP is accepted must not wonder whether the key goes in clear text."""
    if chosen.serve_plain_http and chosen.serve_tls_cert:
        return "has no effect with serve_tls_cert; leave out one of them"
    return None


@rule("serve_tls_key", "serve_tls_cert")
def tls_takes_two_files(chosen: "Settings") -> str | None:
    """One file for both would be readable as a certificate is, with the key in it."""
    if chosen.serve_tls_key is None or chosen.serve_tls_key != chosen.serve_tls_cert:
        return None
    return f"{chosen.serve_tls_key} is the certificate too; keep the key in a file of its own"


@rule("serve_tls_key", "serve_tls_cert")
def tls_takes_both(chosen: "Settings") -> str | None:
    """A certificate is useless without its key."""
    if (chosen.serve_tls_cert is None) == (chosen.serve_tls_key is None):
        return None
    lacking = "serve_tls_key" if chosen.serve_tls_key is None else "serve_tls_cert"
    return f"certificate and key go together; set {lacking} as well"


@rule("serve_port", "hub_endpoint")
def port_is_not_the_hubs(chosen: "Settings") -> str | None:
    """A hub on the same machine has its port already."""
    if chosen.hub_endpoint is None:
        return None
    parts = urlsplit(chosen.hub_endpoint)
    if parts.port != chosen.serve_port or not is_loopback(parts.hostname or ""):
        return None
    return f"{chosen.serve_port} is the port of hub_endpoint on the same machine; choose another"


def port_is_not_ssh(chosen: "Settings", data: Mapping[str, object]) -> str | None:
    """The engine must not be given the port we came in by."""
    if ssh_port(data) != chosen.serve_port:
        return None
    return f"{chosen.serve_port} is the machine's SSH port (ssh_port); choose another"


def ssh_port(data: Mapping[str, object]) -> int:
    """Return the port pyinfra connects to; what it cannot read is its own to refuse."""
    value = data.get("ssh_port")
    if isinstance(value, str) and re.fullmatch("[0-9]{1,5}", value):
        return int(value)
    return value if isinstance(value, int) and value else 22


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from the machine itself."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _on_cuda(chosen: "Settings") -> bool:
    return chosen.route_data.needs_cuda


@dataclass(frozen=True)
class Place:
    """Where a host's ports are, as far as the inventory tells."""

    address: str
    ssh_port: int
    serve_port: int


def port_clashes(places: Mapping[str, Place]) -> dict[str, str]:
    """Return, by host, why its ports collide with those of another host at the same address."""
    found = {}
    for name, mine in places.items():
        for other, theirs in places.items():
            if other == name or mine.address != theirs.address:
                continue
            if mine.serve_port in {theirs.serve_port, theirs.ssh_port}:
                whose = "serve_port" if mine.serve_port == theirs.serve_port else "SSH port"
                found[name] = (
                    f"serve_port: {mine.serve_port} is the {whose} of {other} at the same address"
                    f" ({mine.address}) as well; give each its own"
                )
    return found
