"""What others report for this model on a DGX Spark, and how a measurement compares with it.

None of these figures is of this project. A ratio means something only where the settings are the
reference's, so each row names what differs from them; a row that differs is "not comparable".
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

RECIPE: Final = "recipe"
RIVAL: Final = "one_spark_rival"

SOURCES: Final = {
    RECIPE: "vcruz305/DeepSeek-V4-Flash-Vision-EXL3-MixedK-DGX-Spark-recipe, README, 2026-09-02 and"
    " 2026-09-03; no receipt is published for these figures",
    RIVAL: "GaelicThunder/DeepSeek-V4-Flash-Vision-One-DGX-Spark, 2026-09; the same pack in another"
    " runtime (a container)",
}

SETTINGS: Final[Mapping[str, Any]] = {
    "gpu": "NVIDIA GB10",
    "pack": "vcruz305/DSV4-Flash-Vision-ablit-EXL3-MixedK",
    "vllm": "0.28.1rc1.dev324",
    "exllamav3": "1.4.5",
    "flashinfer_python": "0.6.18",
    "torch": "2.13",
    "vllm_exl3": "0.3.1",
    "max_model_len": 65536,
    "gpu_memory_utilization": 0.88,
    "kv_cache_dtype": "fp8",
    "max_num_batched_tokens": 2048,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "num_speculative_tokens": 3,
}
"""The recipe's."""

CONCURRENCY: Final = (
    # streams, tokens/s in all, of one stream, TTFT ms, acceptance, share of the key-value cache
    (1, 27.85, 32.22, 655.0, 0.618, 0.004),
    (2, 42.66, 29.49, 1116.0, 0.648, 0.008),
    (4, 42.77, 12.46, 1665.0, 0.648, 0.012),
    (8, 59.05, 9.41, 3119.0, 0.358, 0.024),
    (16, 85.04, 7.20, 5428.0, 0.358, 0.052),
)
"""With max_num_seqs 16; the length of its prompts and answers is not published."""

LONG: Final = 512
DECODE_LONG: Final = (28.9, 30.9)
"""Tokens/s of a single stream answering with 512 tokens, max_num_seqs 1."""
TTFT_S: Final = ((893, 3.20), (14227, 39.8), (56893, 157.6))
COLD_S: Final = 727.0
COLD_WEIGHTS_S: Final = 660.0
WARM_WEIGHTS_S: Final = 28.2
KV_TOKENS: Final = 309_494

RIVAL_DECODE: Final = {"counting": 36.0, "code": 35.3, "prose": 23.3}
RIVAL_LOAD_S: Final = {"cold": 120.0, "warm": 25.0}

ROUGHLY: Final = 0.25
NEAR: Final = 0.05
"""Prompts whose lengths differ by no more than this are the same length."""


@dataclass(frozen=True)
class Row:
    """One figure beside its reference."""

    what: str
    unit: str
    ours: float | None
    reference: float
    source: str
    differs: tuple[str, ...]

    @property
    def comparable(self) -> bool:
        """Say whether the ratio means something."""
        return self.ours is not None and not self.differs

    @property
    def ratio(self) -> float | None:
        """Return ours over the reference; None without ours."""
        return None if self.ours is None else round(self.ours / self.reference, 3)

    def plain(self) -> dict[str, Any]:
        """Return it as a receipt has it."""
        return {**asdict(self), "ratio": self.ratio, "comparable": self.comparable}


def same(name: str, ours: Any, reference: Any) -> bool:
    """Say whether a setting is the reference's; a version is, when ours only says more of it."""
    if isinstance(reference, str) and isinstance(ours, str):
        if name == "torch":
            return ours.partition("+")[0].startswith(f"{reference}.")
        return ours.partition("+")[0] == reference
    if isinstance(reference, float) and isinstance(ours, int | float):
        return abs(ours - reference) < 1e-6
    return bool(ours == reference)


def differences(ours: Mapping[str, Any], **more: Any) -> tuple[str, ...]:
    """Return what differs from the recipe's settings, in words."""
    found = []
    for name, wanted in {**SETTINGS, **more}.items():
        have = ours.get(name)
        if not same(name, have, wanted):
            found.append(f"{name} {'unknown' if have is None else have}, not {wanted}")
    return tuple(found)


def rows(results: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every reference there is, with our figure where one was measured.

    `results` are a bench's: `settings`, `cells`, `answers`, `prefill`, `loads`, `kv_cache_tokens`.
    """
    settings = results.get("settings") or {}
    usual = differences(settings)
    swept = differences(settings, max_num_seqs=16)
    cells = {cell["streams"]: cell for cell in results.get("cells") or []}
    for streams, total, each, ttft, acceptance, kv_use in CONCURRENCY:
        cell = cells.get(streams, {})
        why = swept if cell.get("valid", True) else (*swept, "the measurement is not valid")
        for name, unit, reference in (
            ("tokens_per_s", "tokens/s", total),
            ("stream_tokens_per_s", "tokens/s", each),
            ("ttft_ms", "ms", ttft),
            ("acceptance", "", acceptance),
            ("kv_use", "", kv_use),
        ):
            title = f"{NAMES[name]}, {streams} stream{'s' if streams > 1 else ''}"
            yield Row(title, unit, cell.get(name), reference, RECIPE, why)
    answers = {answer["kind"]: answer for answer in results.get("answers") or []}
    single = differences(settings, max_num_seqs=1)
    prose = answers.get("prose", {})
    tokens = prose.get("tokens") or 0
    if abs(tokens / LONG - 1) > ROUGHLY:
        single = (*single, f"an answer of {tokens} tokens, not {LONG}")
    rate, middle = prose.get("tokens_per_s"), sum(DECODE_LONG) / 2
    yield Row("decode of a long answer", "tokens/s", rate, middle, RECIPE, single)
    for kind, reference in RIVAL_DECODE.items():
        ours = answers.get(kind, {}).get("tokens_per_s")
        yield Row(f"decode, {kind}", "tokens/s", ours, reference, RIVAL, ("another runtime",))
    prefill = results.get("prefill") or []
    for tokens, reference in TTFT_S:
        ours = next(
            (
                row.get("ttft_s")
                for row in prefill
                if abs((row.get("prompt_tokens") or 0) / tokens - 1) <= NEAR
            ),
            None,
        )
        yield Row(f"TTFT at {tokens} prompt tokens", "s", ours, reference, RECIPE, usual)
    loads = results.get("loads") or {}
    cold, warm = loads.get("cold") or {}, loads.get("warm") or {}
    yield Row("cold start to ready", "s", cold.get("ready_s"), COLD_S, RECIPE, usual)
    yield Row("cold load", "s", cold.get("weights_s"), COLD_WEIGHTS_S, RECIPE, usual)
    yield Row("warm load", "s", warm.get("weights_s"), WARM_WEIGHTS_S, RECIPE, usual)
    for kind, load in (("cold", cold), ("warm", warm)):
        reference = RIVAL_LOAD_S[kind]
        yield Row(
            f"{kind} load", "s", load.get("weights_s"), reference, RIVAL, ("another runtime",)
        )
    ours = results.get("kv_cache_tokens")
    yield Row("key-value cache", "tokens", ours, KV_TOKENS, RECIPE, usual)


NAMES: Final = {
    "tokens_per_s": "throughput",
    "stream_tokens_per_s": "decode of one",
    "ttft_ms": "TTFT",
    "acceptance": "acceptance",
    "kv_use": "key-value cache in use",
}
