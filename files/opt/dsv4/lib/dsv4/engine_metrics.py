"""The engine's counters, from the text of /metrics: what a benchmark's client cannot know.

Absent is None: an engine without a draft has no counters for one, and that is no acceptance of 0.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

SAMPLE: Final = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? +(\S+)(?: +\d+)?$")

GENERATED: Final = "vllm:generation_tokens_total"
PROMPT: Final = "vllm:prompt_tokens_total"
QUERIES: Final = "vllm:prefix_cache_queries_total"
HITS: Final = "vllm:prefix_cache_hits_total"
DRAFTS: Final = "vllm:spec_decode_num_drafts_total"
DRAFTED: Final = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_total"
PREEMPTED: Final = "vllm:num_preemptions_total"
KV_USE: Final = "vllm:kv_cache_usage_perc"
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"


def samples(text: str) -> Iterator[tuple[str, float]]:
    """Yield every sample's name and value; what is no sample is passed over."""
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            try:
                yield found[1], float(found[3])
            except ValueError:
                continue


def totals(text: str) -> dict[str, float]:
    """Return each name's value, summed over engines and labels."""
    found: dict[str, float] = {}
    for name, value in samples(text):
        found[name] = found.get(name, 0.0) + value
    return found


@dataclass(frozen=True)
class Delta:
    """What the engine did between two looks. None: it does not count that."""

    generated: float | None
    prompt: float | None
    cached_share: float | None
    """Of the prompt tokens looked up, those that the prefix cache had."""
    acceptance: float | None
    """Of the tokens a draft proposed, those that were taken."""
    tokens_per_step: float | None
    preempted: float | None


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> Delta:
    """Return what happened in between; a counter that went back (a restart) tells nothing."""

    def grown(name: str) -> float | None:
        if name not in after:
            return None
        change = after[name] - before.get(name, 0.0)
        return change if change >= 0 else None

    def share(part: str, whole: str) -> float | None:
        some, all_of = grown(part), grown(whole)
        return some / all_of if some is not None and all_of else None

    steps = share(ACCEPTED, DRAFTS)
    return Delta(
        generated=grown(GENERATED),
        prompt=grown(PROMPT),
        cached_share=share(HITS, QUERIES),
        acceptance=share(ACCEPTED, DRAFTED),
        tokens_per_step=None if steps is None else 1 + steps,
        preempted=grown(PREEMPTED),
    )
