"""When a measurement is not what it seems: chunks for tokens, a warm cache, a cold kernel.

Each rule looks at one cell (or at the first cell and its repeat) and says in a sentence what is
wrong. A rule that makes the figures worthless says so with `fatal`; the others are for the reader.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

COUNT_OFF: Final = 0.02
"""Share by which the client's count of tokens may differ from the engine's own."""
CACHED: Final = 0.01
"""Share of prompt tokens from the prefix cache above which a first token measures the cache."""
COLD: Final = 1.3
"""How many times as long the first cell may take as its repeat."""
SHORT_S: Final = 3.0
"""A peak is counted in buckets of a second, so shorter runs have none to compare."""


@dataclass(frozen=True)
class Flag:
    """What a rule found."""

    rule: str
    text: str
    fatal: bool

    def plain(self) -> dict[str, Any]:
        """Return it as a receipt has it."""
        return asdict(self)


def number(cell: Mapping[str, Any], name: str) -> float | None:
    """Return a figure; None for one that was not measured, which nought is not."""
    value = cell.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def of_cell(cell: Mapping[str, Any]) -> Iterator[Flag]:
    """Yield what is wrong with one cell."""
    failed, requests = number(cell, "failed") or 0, number(cell, "requests") or 0
    completed = number(cell, "completed") or 0
    if failed or completed < requests:
        text = f"{requests - completed:.0f} of {requests:.0f} requests failed"
        yield Flag("failed", text, fatal=True)
    if not completed:
        return
    for name in ("ttft_ms", "tokens_per_s"):
        value = number(cell, name)
        if value is None or value <= 0:
            yield Flag("not measured", f"{name} is {value}, which is no measurement", fatal=True)
    counted, served = number(cell, "output_tokens"), number(cell, "engine_output_tokens")
    if counted is not None and served is not None and max(counted, served) > 0:
        off = (counted - served) / max(counted, served)
        if off > COUNT_OFF:
            text = f"the client counts {counted:.0f} tokens, the engine made {served:.0f}"
            yield Flag("count", text, fatal=True)
        elif off < -COUNT_OFF:
            text = (
                f"the engine made {served:.0f} tokens, the client saw {counted:.0f}: chunks were"
                " counted for tokens, or somebody else was asking too"
            )
            yield Flag("count", text, fatal=True)
    asked = number(cell, "asked_tokens")
    if asked and counted is not None and counted < asked * (1 - COUNT_OFF):
        text = f"answers ended early: {counted:.0f} tokens of {asked:.0f} asked for"
        yield Flag("early end", text, fatal=False)
    share = number(cell, "cached_share")
    if share is not None and share > CACHED:
        text = f"{share:.0%} of the prompts came from the prefix cache, so TTFT measures that"
        yield Flag("prefix cache", text, fatal=True)
    peak, average = number(cell, "peak_tokens_per_s"), number(cell, "tokens_per_s")
    long = (number(cell, "seconds") or 0) >= SHORT_S
    if long and peak is not None and average is not None and peak < average:
        text = f"its peak of {peak:.1f} is below the average of {average:.1f}: it counts chunks"
        yield Flag("peak", text, fatal=False)
    streams, running = number(cell, "streams") or 1, number(cell, "running_peak")
    limit = number(cell, "max_num_seqs")
    if limit is not None and limit < streams:
        text = f"the engine takes {limit:.0f} streams at a time (max_num_seqs), the rest queued"
        yield Flag("queued", text, fatal=False)
    elif running is not None and running > streams:
        text = f"{running:.0f} requests ran where {streams:.0f} were sent: somebody else was asking"
        yield Flag("shared", text, fatal=True)
    each = number(cell, "stream_tokens_per_s")
    if streams > 1 and each is not None and average and each > average:
        text = f"each of {streams:.0f} streams is faster than all of them: answers came in bursts"
        yield Flag("bursts", f"{text}, held up in the client or in a proxy", fatal=False)
    if preempted := number(cell, "preempted"):
        yield Flag(
            "preempted", f"{preempted:.0f} requests were put back: KV cache full", fatal=False
        )


def of_repeat(first: Mapping[str, Any], repeat: Mapping[str, Any]) -> Iterator[Flag]:
    """Yield what the same cell, measured again at the end, says about the first time."""
    for name, slower in (("ttft_ms", 1), ("tokens_per_s", -1)):
        before, after = number(first, name), number(repeat, name)
        if not before or not after:
            continue
        times = (before / after) ** slower
        if times > COLD:
            text = f"{name} was {before:.1f} the first time and {after:.1f} when repeated"
            yield Flag("cold", f"{text}: kernels were compiled, caches filled", fatal=True)
        elif times < 1 / COLD:
            text = f"{name} was {before:.1f} the first time and {after:.1f} when repeated"
            yield Flag("drift", f"{text}: heat, a lowered clock or another load", fatal=False)


def of_answer(answer: Mapping[str, Any]) -> Iterator[Flag]:
    """Yield what is wrong with one streamed answer."""
    tokens, chunks = number(answer, "tokens"), number(answer, "chunks") or 0
    if tokens is None:
        yield Flag("usage", "the engine does not count its tokens, so there is no rate", fatal=True)
    elif chunks > 1 and tokens < chunks:
        text = f"{chunks:.0f} pieces of text for {tokens:.0f} tokens: the count is wrong"
        yield Flag("count", text, fatal=True)
    if answer.get("ttft_s") is not None and answer.get("answer_s") is None:
        text = "the budget ran out in the reasoning, so there is no time to the answer"
        yield Flag("budget", text, fatal=False)
    share = number(answer, "cached_share")
    if share is not None and share > CACHED:
        yield Flag("prefix cache", f"{share:.0%} of the prompt came from the cache", fatal=True)


def judged(cell: dict[str, Any], more: Iterator[Flag] | tuple[Flag, ...] = ()) -> dict[str, Any]:
    """Return a cell with its flags, and without a peak that cannot be one."""
    flags = [*of_cell(cell), *more]
    worse = {flag.rule for flag in flags}
    short = (number(cell, "seconds") or 0) < SHORT_S
    peak = None if short or "peak" in worse else cell.get("peak_tokens_per_s")
    return {
        **cell,
        "peak_tokens_per_s": peak,
        "valid": not any(flag.fatal for flag in flags),
        "flags": [flag.plain() for flag in flags],
    }
