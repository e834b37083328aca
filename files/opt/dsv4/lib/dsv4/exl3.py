"""What shard headers tell of an EXL3 pack: how many bits each layer's routed experts have."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

EXPERT: Final = re.compile(r"layers\.(\d+)\.ffn\.experts\.\d+\.w[123]\.trellis")
TRELLIS: Final = "trellis"
DRAFT: Final = "mtp."
CODEBOOKS: Final = ("mcg", "mul1")
BITS_OF_TRELLIS: Final = {32: 2, 48: 3, 64: 4, 80: 5, 96: 6}
"""Last dimension of a trellis tensor and the bits it stands for; the plugin takes 2 to 6."""


class Mixed(ValueError):
    """The experts' bits make no sense; the text says where."""


@dataclass
class Experts:
    """What was seen of an EXL3 pack's routed experts, shard by shard."""

    bits: dict[int, int] = field(default_factory=dict)
    """By layer."""
    number: Counter[int] = field(default_factory=Counter)
    """Of matrices, by layer; three make an expert."""
    codebooks: set[str] = field(default_factory=set)
    drafted: bool = False
    """Whether the draft's experts are EXL3 too."""
    drafts: set[str] = field(default_factory=set)
    """Layers of the draft, by what stands for the number in their tensors' names."""

    def add(self, tensors: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Look at a shard's header; a layer's experts must agree. Raises `Mixed`."""
        for name, entry in tensors:
            _, _, kind = name.rpartition(".")
            if kind in CODEBOOKS:
                self.codebooks.add(kind)
            if name.startswith(DRAFT):
                self.drafts.add(name[len(DRAFT) :].partition(".")[0])
            if kind != TRELLIS:
                continue
            if not (match := EXPERT.fullmatch(name)):
                self.drafted = self.drafted or name.startswith(DRAFT)
                continue
            width = entry["shape"][-1] if entry.get("shape") else None
            bits = BITS_OF_TRELLIS.get(width) if isinstance(width, int) else None
            if bits is None:
                raise Mixed(
                    f"{name}: a trellis {width} wide is none the plugin reads (2 to 6 bits)"
                )
            layer = int(match[1])
            self.number[layer] += 1
            if self.bits.setdefault(layer, bits) != bits:
                raise Mixed(
                    f"layer {layer}: has experts of {self.bits[layer]} and of {bits} bits; the"
                    " pack is damaged or mixed from two"
                )

    def contradictions(self, config: Mapping[str, Any], codebook: str) -> Iterator[str]:
        """Yield what the configuration says and the shards do not."""
        experts = config.get("n_routed_experts")
        if isinstance(experts, int):
            for layer, number in sorted(self.number.items()):
                if number != 3 * experts:
                    yield (
                        f"layer {layer} has {number} expert matrices where n_routed_experts"
                        f" ({experts}) makes {3 * experts}"
                    )
        here = len(self.drafts)
        if self.drafts != {str(number) for number in range(here)}:
            yield f"the draft has layers {', '.join(sorted(self.drafts))} here, not 0 to {here - 1}"
        # None at all is a pack without its draft, which many are. A draft of several stages may be
        # stated as one
        stated = config.get("num_nextn_predict_layers")
        if isinstance(stated, int) and 0 < here < stated:
            yield f"num_nextn_predict_layers is {stated}, and the shards hold {here} draft layers"
        if self.codebooks and self.codebooks != {codebook}:
            yield f"the codebook is {codebook} there and {', '.join(sorted(self.codebooks))} here"
        if self.drafted:
            yield "the draft's experts are EXL3 here, which nothing serves yet"


def layer_bits(tensors: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[int, int]:
    """Return bits by layer from shapes in headers; raises `Mixed`."""
    found = Experts()
    found.add(tensors)
    return found.bits
