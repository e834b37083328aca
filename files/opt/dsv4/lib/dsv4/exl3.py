"""What shard headers tell of an EXL3 pack: how many bits each layer's routed experts have."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

EXPERT: Final = re.compile(r"layers\.(\d+)\.ffn\.experts\.\d+\.w[123]\.trellis")
TRELLIS: Final = ".trellis"
BITS_OF_TRELLIS: Final = {32: 2, 48: 3, 64: 4, 80: 5, 96: 6}
"""Last dimension of a trellis tensor and the bits it stands for; the plugin takes 2 to 6."""


class Mixed(ValueError):
    """The experts' bits make no sense; the text says where."""


def layer_bits(
    tensors: Iterable[tuple[str, Mapping[str, Any]]], found: dict[int, int] | None = None
) -> dict[int, int]:
    """Return bits by layer from shapes in headers, added to `found`; a layer's experts must agree.

    Raises `Mixed`.
    """
    bits_of: dict[int, int] = {} if found is None else found
    for name, entry in tensors:
        if not name.endswith(TRELLIS) or not (match := EXPERT.fullmatch(name)):
            continue
        width = entry["shape"][-1] if entry.get("shape") else None
        bits = BITS_OF_TRELLIS.get(width) if isinstance(width, int) else None
        if bits is None:
            raise Mixed(f"{name}: a trellis {width} wide is none the plugin reads (2 to 6 bits)")
        layer = int(match[1])
        if bits_of.setdefault(layer, bits) != bits:
            raise Mixed(
                f"layer {layer}: has experts of {bits_of[layer]} and of {bits} bits; the pack is"
                " damaged or mixed from two"
            )
    return bits_of
