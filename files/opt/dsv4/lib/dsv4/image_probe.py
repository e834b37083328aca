"""Whether the served model sees an image: two cards that cannot be guessed, and a look at the bill.

Both must be read right, which makes the answers differ; and a prompt with an image must cost more
tokens than the same without, because servers exist that drop images and let the model make up what
was on them. Each way to fail is a verdict of its own, because each has its own remedy.
"""

import base64
import random
import re
from dataclasses import dataclass
from typing import Any, Final

from dsv4 import engine_api, picture

OK: Final = "ok"
REASONED: Final = "answered from reasoning"
UNSUPPORTED: Final = "unsupported"
IGNORED: Final = "ignored"
WRONG: Final = "wrong"
MEMORY: Final = "out of memory"
EMPTY: Final = "empty"
BUDGET: Final = "budget"
ERROR: Final = "error"

GOOD: Final = frozenset({OK, REASONED})

REMEDY: Final = {
    UNSUPPORTED: "serve a pack and a route with vision, and mind that no proxy is in between",
    IGNORED: "the image never reached the model: ask the server itself and not a proxy, and see"
    " whether the served view has the pack's vision configuration (`dsv4 verify` after a deploy)",
    WRONG: "the model saw something and read it wrong: run the deploy again so that the patches"
    " are checked (wide_swa is for prompts with images), then ask again",
    MEMORY: "lower serve_gpu_memory_utilization or serve_max_model_len and deploy again",
    EMPTY: "look for the first error with `journalctl -u dsv4`",
    BUDGET: "ask with a larger token budget",
    ERROR: "look for the first error with `journalctl -u dsv4`",
}

QUESTION: Final = (
    "Which number and which colour of square does the picture show?"
    " Answer with the number and the colour and nothing else."
)
MAX_TOKENS: Final = 1024
FEWEST: Final = 16
"""Tokens an image costs at the very least; the recipe's author reports 230 to 244 for a card."""

NO_MEMORY: Final = re.compile(
    r"out of memory|OutOfMemory|cudaErrorMemoryAllocation|NV_ERR_NO_MEMORY|CUBLAS_STATUS_ALLOC",
    re.IGNORECASE,
)
NO_IMAGES: Final = re.compile(
    r"multi-?modal|image|vision|content.{0,20}(type|string)|unsupported.{0,20}part", re.IGNORECASE
)
TOO_LONG: Final = re.compile(r"context length|too long|max_tokens|maximum.{0,20}tokens", re.I)
REFUSALS: Final = frozenset({400, 404, 405, 415, 422, 501})


@dataclass(frozen=True)
class Seen:
    """What came of one card."""

    card: picture.Card
    verdict: str
    detail: str
    said: str = ""
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The probe's verdict, why, and what it rests on."""

    verdict: str
    detail: str
    cards: tuple[Seen, ...] = ()
    tokens_without: int | None = None
    tokens_with: int | None = None

    @property
    def good(self) -> bool:
        """Say whether the model sees images."""
        return self.verdict in GOOD


def message(card: picture.Card | None) -> list[dict[str, Any]]:
    """Return the question, with a card or without."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTION}]
    if card is not None:
        data = base64.b64encode(picture.png(card)).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return [{"role": "user", "content": parts}]


def numbers(said: str) -> set[str]:
    """Return the numbers in a text; digits that stand apart (`4 7 3`) count as one as well."""
    together = re.sub(r"(?<=\d)[\s,.\-]+(?=\d)", "", said)
    return set(re.findall(r"\d+", said)) | set(re.findall(r"\d+", together))


def colours(said: str) -> set[str]:
    """Return the colours a text names."""
    return {name for name in picture.COLOURS if re.search(rf"\b{name}\b", said, re.IGNORECASE)}


def judge(card: picture.Card, answer: engine_api.Answer) -> tuple[str, str]:
    """Return the verdict on one card and a sentence about it."""
    if not answer.produced:
        return EMPTY, "not a single token came back"
    shown = f"{card.number} {card.colour}"
    if answer.text:
        if card.number in numbers(answer.text) and colours(answer.text) == {card.colour}:
            return OK, f"read {shown}"
        return WRONG, f"it shows {shown} and was read as {answer.text.strip()[:60]!r}"
    # A train of thought weighs more than one colour
    if card.number in numbers(answer.reasoning) and card.colour in colours(answer.reasoning):
        return REASONED, f"read {shown}, but the answer is in the reasoning and its text is empty"
    if answer.finish == "length":
        return BUDGET, "the token budget ran out in the reasoning"
    return WRONG, f"it shows {shown}, reasoned about as {answer.reasoning.strip()[-60:]!r}"


def refusal(error: engine_api.ApiError) -> str:
    """Return the verdict on an error in place of an answer."""
    text = str(error)
    if NO_MEMORY.search(text):
        return MEMORY
    refused = error.status in REFUSALS and not TOO_LONG.search(text)
    return UNSUPPORTED if refused and NO_IMAGES.search(text) else ERROR


def conclude(seen: tuple[Seen, ...], without: int | None) -> Outcome:
    """Return the verdict on both cards together."""
    known = [one.prompt_tokens for one in seen if one.prompt_tokens is not None]
    least = min(known) if len(known) == len(seen) else None
    billed = None if least is None or without is None else least - without

    def outcome(verdict: str, detail: str) -> Outcome:
        return Outcome(verdict, detail, seen, without, least)

    for verdict in (MEMORY, UNSUPPORTED, ERROR):
        for one in seen:
            if one.verdict == verdict:
                return outcome(verdict, one.detail)
    if all(one.verdict in GOOD for one in seen):
        worse = REASONED if any(one.verdict == REASONED for one in seen) else OK
        detail = "; ".join(one.detail for one in seen)
        if billed is not None and billed < FEWEST:
            detail += f"; the engine counts {billed} tokens for an image, which cannot be"
        return outcome(worse, detail if billed is None else f"{detail} ({billed} tokens an image)")
    if billed is not None and billed < FEWEST:
        text = f"a prompt with an image has {least} tokens, without {without}"
        return outcome(IGNORED, f"{text}; said {seen[0].said[:60]!r}")
    answers = {one.said.strip().casefold() for one in seen}
    if billed is None and len(answers) == 1 and answers != {""}:
        return outcome(IGNORED, f"the same answer to two different images: {seen[0].said[:60]!r}")
    bad = next(one for one in seen if one.verdict not in GOOD)
    same = " (the same answer to both)" if len(answers) == 1 else ""
    return outcome(bad.verdict, f"{bad.detail}{same}")


def look(client: engine_api.Client, model: str, card: picture.Card, budget: int) -> Seen:
    """Show one card."""
    try:
        answer = client.chat(model, message(card), budget)
    except engine_api.ApiError as error:
        return Seen(card, refusal(error), str(error))
    verdict, detail = judge(card, answer)
    return Seen(card, verdict, detail, answer.text or answer.reasoning, answer.usage.prompt)


def tokens_without(client: engine_api.Client, model: str) -> int | None:
    """Return what the question costs by itself; None when the engine does not say."""
    try:
        return client.chat(model, message(None), 1).usage.prompt
    except engine_api.ApiError:
        return None


def probe(
    client: engine_api.Client, model: str, chance: random.Random, budget: int = MAX_TOKENS
) -> Outcome:
    """Show both cards; what fails on the first for good is not asked again."""
    first, second = picture.cards(chance)
    seen = [look(client, model, first, budget)]
    if seen[0].verdict not in {MEMORY, UNSUPPORTED, ERROR}:
        seen.append(look(client, model, second, budget))
        return conclude(tuple(seen), tokens_without(client, model))
    return conclude(tuple(seen), None)
