"""Whether a pack is the one expected, told from its shards' headers, before their bulk is fetched.

A hundred gigabytes of the wrong pack cost an hour, and the headers, a thousandth of it, tell: the
format, which tensor lies where, at how many bits. They begin the files they belong to, so reading
them first fetches no byte twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dsv4 import exl3, pack_config, pack_verify
from dsv4.pack_verify import INDEX, SUFFIX, BadShard

Tensors: TypeAlias = Mapping[str, Any]

LEAST_START, MOST_START = 64, 512 << 10


@dataclass(frozen=True)
class Expected:
    """What the deploy knows of the pack it wants; nothing where it knows nothing."""

    shards: int | None = None
    layer_bits: Mapping[int, int] = field(default_factory=dict)
    """Bits of the layers that differ from `bits`."""
    bits: int | None = None
    """Of an EXL3 pack's other layers; None for a pack in another format."""
    drafts: int | None = None
    """Layers of the draft inside the pack."""


def is_shard(name: str) -> bool:
    """Return whether the engine would load a file as weights: it looks into no subdirectory."""
    return name.endswith(SUFFIX) and "/" not in name


def start(size: int) -> int:
    """Return how many first bytes of a shard to ask for: of a large one, most likely its header.

    The least tells how long the header is, or what the file is instead.
    """
    return min(size, max(LEAST_START, min(MOST_START, size // 256)))


def length(begin: bytes, size: int) -> int:
    """Return how many bytes of a shard its header takes, from its first; raises `BadShard`."""
    count = int.from_bytes(begin[:8], "little")
    if size < 8 or count < 2 or count > min(pack_verify.HEADER_LIMIT, size - 8):
        pack_verify.parse_header(begin, size)
        raise BadShard(pack_verify.looks_like(begin))
    return 8 + count


def tensors(head: bytes, size: int) -> Tensors:
    """Return what a shard of `size` bytes holds, from its header; raises `BadShard`."""
    found = pack_verify.parse_header(head, size)
    fault = pack_verify.check_layout(found, size - length(head, size))
    if fault:
        raise BadShard(fault)
    return found


def faults(
    shards: Mapping[str, Tensors], small: Mapping[str, bytes], expected: Expected
) -> Iterator[str]:
    """Yield what is wrong with the pack as a whole; its shards are right, each by itself.

    `small` holds the pack's JSON files.
    """
    if expected.shards is not None and len(shards) != expected.shards:
        yield f"{len(shards)} shards where {expected.shards} are expected"
    yield from index_faults(shards, small.get(INDEX))
    if expected.bits is not None:
        yield from exl3_faults(shards, small, expected)


def index_faults(shards: Mapping[str, Tensors], index: bytes | None) -> Iterator[str]:
    """Yield where the index and the shards contradict each other."""
    if index is None:
        if len(shards) > 1:
            yield f"{INDEX} is missing, and {len(shards)} shards need one"
        return
    try:
        placed = pack_verify.parse_index(index.decode())
    except (pack_verify.BadIndex, UnicodeDecodeError) as error:
        yield f"{INDEX} {error}"
        return
    if absent := set(placed) - set(shards):
        yield f"{INDEX} names {pack_verify.names(absent)}, which the hub has not"
    if extra := set(shards) - set(placed):
        yield f"{pack_verify.names(extra)} is in no index"
        return
    held = {shard: shards[shard].keys() for shard in shards}
    yield from map(str, pack_verify.compare_index(placed, held))


def exl3_faults(
    shards: Mapping[str, Tensors], small: Mapping[str, bytes], expected: Expected
) -> Iterator[str]:
    """Yield where an EXL3 pack is not of the bits it is known for, or cannot be served."""
    seen = exl3.Experts()
    try:
        for shard in shards.values():
            seen.add(shard.items())
        found = seen.bits
        own = pack_config.parse_config(small.get(pack_config.CONFIG, b""))
        elsewhere = small.get(pack_config.ELSEWHERE, b"{}")
        # The policy has no say in what is refused
        pack_config.exl3_config(own, pack_config.parse_config(elsewhere), found, "bf16_as_stored")
    except (pack_config.Refused, exl3.Mixed) as error:
        yield str(error)
        return
    wrong = [
        f"layer {layer} has {bits} bits, not {expected.layer_bits.get(layer, expected.bits)}"
        for layer, bits in sorted(found.items())
        if bits != expected.layer_bits.get(layer, expected.bits)
    ]
    if wrong:
        yield pack_verify.names(wrong)
    if expected.drafts is not None and len(seen.drafts) != expected.drafts:
        yield f"the draft has {len(seen.drafts)} layers, not {expected.drafts}"
