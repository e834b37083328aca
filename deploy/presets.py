"""Presets as data: sets of serving values that somebody ran, and who.

The reports are the recipe author's, on a GB10 with route `nightly` unless a preset says otherwise;
this project has run `lab` only. Each value can be overridden by the setting of the same name with
`serve_` in front. Where a reported value fails our own memory equation it is lowered here, and the
comment says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Preset:
    """Values for one engine start."""

    name: str
    summary: str
    source: str
    max_model_len: int
    gpu_memory_utilization: float
    max_num_seqs: int = 1
    max_num_batched_tokens: int = 2048
    enforce_eager: bool = False
    speculative_tokens: int = 0
    capture_sizes: tuple[int, ...] = ()
    """Batch sizes with a CUDA graph of their own; empty: the engine's choice."""
    expandable_segments: bool = False
    dtype: str = "auto"
    prefix_caching: bool = True
    long_prefill_tokens: int = 1024
    """A prompt's part from this length on does not hold up the others; 0 leaves it out."""
    accelerator: Literal["cuda", "cpu"] = "cuda"


ALL: Final = (
    Preset(
        name="first-boot",
        summary="16k context, eager: the fewest things that can go wrong",
        source="Reported: KV cache of 84,554 tokens.",
        max_model_len=16_384,
        gpu_memory_utilization=0.88,
        enforce_eager=True,
    ),
    Preset(
        name="64k",
        summary="64k context, one stream, CUDA graphs, draft of 3 tokens",
        source="Reported: KV cache of 309,494 tokens, 28.9 to 30.9 tokens/s, 97.25 GiB used.",
        max_model_len=65_536,
        gpu_memory_utilization=0.88,
        speculative_tokens=3,
    ),
    Preset(
        name="64k-16-streams",
        summary="64k context, up to 16 streams",
        source="Reported: 27.85 / 42.66 / 42.77 / 59.05 / 85.04 tokens/s in all at"
        " 1 / 2 / 4 / 8 / 16 streams.",
        max_model_len=65_536,
        gpu_memory_utilization=0.88,
        max_num_seqs=16,
        speculative_tokens=3,
        capture_sizes=(1, 2, 4, 8, 16),
    ),
    Preset(
        name="256k",
        summary="256k context, one stream",
        source="Reported: a needle found at 10, 50 and 90 % of 254,291 tokens.",
        max_model_len=262_144,
        gpu_memory_utilization=0.80,
        speculative_tokens=3,
        expandable_segments=True,
    ),
    Preset(
        name="text-stock",
        summary="64k context, text only, eager, no draft",
        source="Reported at utilisation 0.92 with route stock: 11.5 tokens/s.",
        max_model_len=65_536,
        # Reported at 0.92, which leaves 3.8 GiB of 121.63, less than the watchdog's soft floor of
        # 5.0; 0.90 is the highest that passes
        gpu_memory_utilization=0.90,
        enforce_eager=True,
    ),
    Preset(
        name="lab",
        summary="2k context on the processor, for a tiny pack",
        source="Run by tests/lab.sh.",
        max_model_len=2048,
        # The engine gets its key-value cache as a fixed size (route lab); this is what the memory
        # gate waits for, and what the engine wants to find free of the host's memory
        gpu_memory_utilization=0.1,
        max_num_seqs=4,
        enforce_eager=True,
        # bfloat16 kills the worker on a processor with AMX (SIGILL at a prompt of two tokens)
        dtype="float32",
        long_prefill_tokens=0,
        accelerator="cpu",
    ),
)

OVERRIDABLE: Final = frozenset(Preset.__dataclass_fields__) - {
    "name",
    "summary",
    "source",
    "accelerator",
}
"""The values that a `serve_` setting can take the place of."""

PRESETS: Final[Mapping[str, Preset]] = {preset.name: preset for preset in ALL}
