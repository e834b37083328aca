"""Packs as data: which model can be served, what it must weigh, and what it must answer.

One entry is one pack; nothing else has to be edited. A pack of your own looks like this:

    Pack(
        name="mine",
        repo_id="me/my-pack",           # on the hub; add gated=True if it asks for accepted terms
        served_name="Mine",             # what clients put in `model`
        bytes=12_345_678_901,           # all files; checked against the disk before the download
        shards=6,
        max_context=32_768,
        smoke=(Smoke("The capital of France is", "Paris"),),
        verified="Not run.",
    )

Add `exl3=Exl3(...)` for a pack in that format, `vision=True` if it reads images, and
`tool_parser`/`reasoning_parser` if the engine has parsers for the model's way of talking: `verify`
then holds it to that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Exl3:
    """What an EXL3 pack is known to be; the shard headers are checked against it.

    `layer_bits` holds the layers that differ from `bits`.
    """

    bits: int
    codebook: str
    layer_bits: Mapping[int, int] = field(default_factory=dict)
    draft_layers: int = 0
    """Layers of the draft model inside the pack; 0 without one."""


@dataclass(frozen=True)
class Smoke:
    """A prompt, and what the answer must contain in whatever case."""

    prompt: str
    expect: str
    max_tokens: int = 16
    chat: bool = False


@dataclass(frozen=True)
class Pack:
    """One model on a hub."""

    name: str
    repo_id: str
    served_name: str
    shards: int
    max_context: int
    smoke: tuple[Smoke, ...]
    verified: str
    bytes: int | None = None
    """Size of all files; None when only the hub knows."""
    gated: bool = False
    revision: str | None = None
    """A commit to insist on; without one, the first revision seen is pinned for each host."""
    exl3: Exl3 | None = None
    draft_method: str | None = None
    components: Mapping[str, int] = field(default_factory=dict)
    """Bytes that parts of the model are known to have on disk (`dsv4 census` names the parts)."""
    kv_cache_dtype: str = "auto"
    vision: bool = False
    """Whether it reads images, on a route that can."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def expected(self) -> dict[str, Any]:
        """Return what the fetcher checks shard headers against, before it brings the rest."""
        exl3 = self.exl3 and {
            "bits": self.exl3.bits,
            "draft_layers": self.exl3.draft_layers,
            "layer_bits": {str(layer): bits for layer, bits in self.exl3.layer_bits.items()},
        }
        return {"shards": self.shards, "exl3": exl3, "components": dict(self.components)}

    @property
    def gib(self) -> float | None:
        """Size of all files in GiB, None when only the hub knows."""
        return None if self.bytes is None else self.bytes / 2**30

    @property
    def draft_layers(self) -> int:
        """How many layers the draft inside the pack has."""
        return self.exl3.draft_layers if self.exl3 else 0


ALL: Final = (
    Pack(
        name="mixedk",
        repo_id="vcruz305/DSV4-Flash-Vision-ablit-EXL3-MixedK",
        served_name="DSV4-Flash",
        bytes=101_440_000_000,
        shards=48,
        max_context=1_048_576,
        smoke=(Smoke("The capital of France is", "Paris", max_tokens=32),),
        verified="Not run by this project; the recipe's author serves it on a GB10"
        " (September 2026).",
        gated=True,
        exl3=Exl3(
            bits=2,
            codebook="mcg",
            layer_bits=dict.fromkeys((3, 13, 21, 22, 28, 41), 3),
            draft_layers=3,
        ),
        # From the shapes: 33,024 expert matrices at 2 or 3 bits with scales, 2,304 in 4-bit floats
        components={"routed experts": 74_494_116_864, "draft experts": 10_267_656_192},
        draft_method="dspark",
        kv_cache_dtype="fp8",
        vision=True,
        tool_parser="deepseek_v4",
        reasoning_parser="deepseek_v4",
    ),
    Pack(
        name="lab-tiny",
        repo_id="lab/tiny",
        served_name="lab-tiny",
        shards=4,
        max_context=32_768,
        smoke=(Smoke("The capital of France is", "Paris"),),
        verified="Served by tests/lab.sh; made by tests/lab/tiny_pack.py and published on a"
        " loopback hub.",
    ),
)

PACKS: Final[Mapping[str, Pack]] = {pack.name: pack for pack in ALL}
