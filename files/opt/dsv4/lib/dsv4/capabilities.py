"""What an agent relies on: tool calls there and back, reasoning kept apart, a long prompt read.

Each check has its verdict and each verdict its remedy. What a tool returns and what is hidden in a
long text is made up anew each time, so that nothing can be right by accident.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from dsv4 import engine_api
from dsv4.image_probe import NO_MEMORY

OK: Final = "ok"
NONE: Final = "none"
AS_TEXT: Final = "as text"
BAD_CALL: Final = "bad call"
WRONG: Final = "wrong"
UNSUPPORTED: Final = "unsupported"
LEAKED: Final = "leaked"
SWALLOWED: Final = "swallowed"
BUDGET: Final = "budget"
EMPTY: Final = "empty"
MEMORY: Final = "out of memory"
ERROR: Final = "error"

JOURNAL: Final = "look for the first error with `journalctl -u dsv4`"
BUDGET_REMEDY: Final = "ask with a larger token budget; agents need 8,192 tokens and more"

MAX_TOKENS: Final = 2048
TAGS: Final = re.compile(r"</?(?:think|thinking|thought)>|<\|?\uff5c?/?think", re.IGNORECASE)
CALL_MARKS: Final = re.compile(
    "<\uff5c[^>]{0,20}tool|\uff5cDSML\uff5c|<tool_call|<function=|tool\u2581call|\\[TOOL_CALLS\\]",
    re.IGNORECASE,
)
"""How models write a call that no parser took out of the text."""

PARSER: Final = "is tool-call-parser in serve.yaml the model's? Deploy again, restart, verify"

TOOL_REMEDY: Final = {
    NONE: "the model answered without the tool: ask again; if it stays, " + PARSER,
    AS_TEXT: "the parser does not take calls out of the text: " + PARSER,
    BAD_CALL: PARSER,
    WRONG: "the tool's result did not reach the model: is its chat template the pack's?",
    UNSUPPORTED: "deploy with a pack that has a tool parser (enable-auto-tool-choice)",
    BUDGET: BUDGET_REMEDY,
}

REASONING_REMEDY: Final = {
    NONE: "no reasoning came apart from the answer: is reasoning-parser in serve.yaml the model's?",
    LEAKED: "reasoning stands in the answer: is reasoning-parser in serve.yaml the model's?",
    SWALLOWED: "the parser took the whole answer for reasoning: ask with"
    ' chat_template_kwargs {"thinking": true}, or see whether the parser is the model\'s',
    WRONG: "the answer is wrong: check the runtime's patches with `dsv4 verify`",
    BUDGET: BUDGET_REMEDY,
}

NEEDLE_REMEDY: Final = {
    WRONG: "long prompts are read wrong: check the runtime's patches with `dsv4 verify`",
    MEMORY: "set serve_expandable_segments, lower serve_gpu_memory_utilization, deploy again",
    BUDGET: BUDGET_REMEDY,
}


@dataclass(frozen=True)
class Outcome:
    """A verdict, a sentence about it, what to do, and figures."""

    verdict: str
    detail: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Say whether it works."""
        return self.verdict == OK


def failed(error: engine_api.ApiError, remedies: dict[str, str]) -> Outcome:
    """Return the outcome of a request that was not answered."""
    text = str(error)
    verdict = ERROR
    if NO_MEMORY.search(text):
        verdict = MEMORY
    elif error.status in {400, 422, 501} and re.search(r"tool|function", text, re.IGNORECASE):
        verdict = UNSUPPORTED
    return Outcome(verdict, text, remedies.get(verdict, JOURNAL))


def spent(answer: engine_api.Answer) -> Outcome | None:
    """Return the outcome of an answer that has no text to judge."""
    if not answer.produced and not answer.calls:
        return Outcome(EMPTY, "not a single token came back", JOURNAL)
    if not answer.text and not answer.calls and answer.finish == "length":
        return Outcome(BUDGET, "the token budget ran out in the reasoning", BUDGET_REMEDY)
    return None


# Tools

TOOL: Final = "read_gauge"
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Read the gauge with this name and return the number it shows.",
            "parameters": {
                "type": "object",
                "properties": {"gauge": {"type": "string", "description": "name of the gauge"}},
                "required": ["gauge"],
            },
        },
    }
]
GAUGES: Final = ("amber", "birch", "cedar", "delta", "ember", "fjord")


def judge_call(answer: engine_api.Answer, gauge: str) -> Outcome | None:
    """Return what is wrong with the model's call, None when nothing is."""
    if not answer.calls:
        if CALL_MARKS.search(answer.text):
            said = answer.text.strip()[:60]
            return Outcome(AS_TEXT, f"the call came as text: {said!r}", TOOL_REMEDY[AS_TEXT])
        return spent(answer) or Outcome(
            NONE, f"no call came, only {answer.text.strip()[:60]!r}", TOOL_REMEDY[NONE]
        )
    call = answer.calls[0]
    try:
        given = json.loads(call.arguments)
    except (TypeError, ValueError):
        given = None
    fault = ""
    if call.name != TOOL:
        fault = f"it calls {call.name!r}, which was not offered"
    elif not isinstance(given, dict):
        fault = f"its arguments are no JSON object in text: {str(call.arguments)[:60]!r}"
    elif str(given.get("gauge", "")).strip().casefold() != gauge:
        fault = f"its arguments are {given}, not the gauge {gauge}"
    elif not call.id:
        fault = "the call has no id, so its result cannot be told which call it is of"
    return Outcome(BAD_CALL, fault, TOOL_REMEDY[BAD_CALL]) if fault else None


def tools(
    client: engine_api.Client, model: str, chance: random.Random, budget: int = MAX_TOKENS
) -> Outcome:
    """Have the model call a tool, give it a result nobody could know, and ask what it was."""
    gauge, reading = chance.choice(GAUGES), str(chance.randint(100_000, 999_999))
    question = f"What does the gauge {gauge} show? Use the tool, then answer with the number."
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    try:
        first = client.chat(model, messages, budget, tools=TOOLS, tool_choice="auto")
        if fault := judge_call(first, gauge):
            return fault
        call = first.calls[0]
        function = {"name": call.name, "arguments": call.arguments}
        asked = [{"id": call.id, "type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": first.text or None, "tool_calls": asked},
            {"role": "tool", "tool_call_id": call.id, "content": reading},
        ]
        last = client.chat(model, messages, budget, tools=TOOLS, tool_choice="auto")
    except engine_api.ApiError as error:
        return failed(error, TOOL_REMEDY)
    if reading in re.sub(r"[\s,]", "", last.text):
        return Outcome(OK, f"called {TOOL}, was given {reading}, answered with it")
    if fault := spent(last):
        return fault
    said = (last.text or last.reasoning).strip()[:60]
    return Outcome(WRONG, f"was given {reading} and answered {said!r}", TOOL_REMEDY[WRONG])


# Reasoning


def judge_reasoning(answer: engine_api.Answer, expect: str) -> Outcome:
    """Return whether reasoning and answer came apart."""
    if fault := spent(answer):
        return fault
    if not answer.text:
        return Outcome(
            SWALLOWED,
            f"the text is empty, the reasoning ends with {answer.reasoning.strip()[-60:]!r}",
            REASONING_REMEDY[SWALLOWED],
        )
    if TAGS.search(answer.text):
        said = answer.text.strip()[:60]
        return Outcome(LEAKED, f"the answer holds {said!r}", REASONING_REMEDY[LEAKED])
    if expect not in re.sub(r"[\s,]", "", answer.text):
        said = answer.text.strip()[:60]
        return Outcome(WRONG, f"expected {expect}, got {said!r}", REASONING_REMEDY[WRONG])
    if not answer.reasoning:
        return Outcome(NONE, "it answered without a word of reasoning", REASONING_REMEDY[NONE])
    return Outcome(OK, f"{len(answer.reasoning)} characters of reasoning, then the answer")


def reasoning(
    client: engine_api.Client, model: str, chance: random.Random, budget: int = MAX_TOKENS
) -> Outcome:
    """Ask for a sum, with thinking switched on by either name that chat templates have for it."""
    left, right = chance.randint(101, 899), chance.randint(101, 899)
    question = f"What is {left} plus {right}? Think first, then answer with the number alone."
    thinking = {"thinking": True, "enable_thinking": True}
    try:
        answer = client.chat(
            model,
            [{"role": "user", "content": question}],
            budget,
            chat_template_kwargs=thinking,
        )
    except engine_api.ApiError as error:
        return failed(error, REASONING_REMEDY)
    return judge_reasoning(answer, str(left + right))


# A needle in a long prompt

DEPTHS: Final = (0.1, 0.5, 0.9)
SAMPLE: Final = 100
"""Sentences whose tokens are counted before the long prompt is made."""
PLACES: Final = ("harbour", "orchard", "station", "library", "market", "bridge", "tower", "mill")
THINGS: Final = ("crates", "lamps", "barrels", "ladders", "maps", "ropes", "bells", "clocks")


def hay(chance: random.Random, sentences: int) -> list[str]:
    """Return sentences that differ, so that no cache and no pattern shortens them."""
    return [
        f"On day {number} the {chance.choice(PLACES)} had {chance.randint(2, 99)}"
        f" {chance.choice(THINGS)}."
        for number in range(1, sentences + 1)
    ]


def buried(lines: list[str], secret: str, depth: float) -> str:
    """Return the text with the needle in it, and the question after it."""
    at = int(len(lines) * depth)
    needle = f"The pass number of the old lighthouse is {secret}."
    text = " ".join([*lines[:at], needle, *lines[at:]])
    return f"{text}\n\nWhat is the pass number of the old lighthouse? Answer with the number."


def needle(
    client: engine_api.Client,
    model: str,
    tokens: int,
    chance: random.Random,
    clock: Callable[[], float],
) -> Outcome:
    """Hide a number at three depths of a prompt of about `tokens` tokens, and ask for it."""
    rows: list[dict[str, Any]] = []
    try:
        sample = client.chat(
            model, [{"role": "user", "content": " ".join(hay(chance, SAMPLE))}], 1
        ).usage.prompt
        if not sample:
            return Outcome(ERROR, "the engine does not say how many tokens a prompt has", JOURNAL)
        lines = hay(chance, max(SAMPLE, int(tokens * SAMPLE / sample)))
        for depth in DEPTHS:
            secret = str(chance.randint(100_000, 999_999))
            prompt = buried(lines, secret, depth)
            began = clock()
            answer = client.chat(model, [{"role": "user", "content": prompt}], MAX_TOKENS)
            found = secret in re.sub(r"[\s,]", "", answer.text or answer.reasoning)
            rows.append(
                {
                    "depth": depth,
                    "found": found,
                    "prompt_tokens": answer.usage.prompt,
                    "seconds": round(clock() - began, 3),
                }
            )
            if not found:
                at = f"at {depth:.0%} of {answer.usage.prompt or tokens} tokens"
                if fault := spent(answer):
                    return Outcome(
                        fault.verdict, f"{fault.detail}, {at}", fault.remedy, {"rows": rows}
                    )
                said = (answer.text or answer.reasoning).strip()[:60]
                return Outcome(
                    WRONG,
                    f"not found {at}: hid {secret}, got {said!r}",
                    NEEDLE_REMEDY[WRONG],
                    {"rows": rows},
                )
    except engine_api.ApiError as error:
        bad = failed(error, NEEDLE_REMEDY)
        return Outcome(bad.verdict, bad.detail, bad.remedy, {"rows": rows})
    count = rows[-1]["prompt_tokens"] or tokens
    depths = ", ".join(f"{row['depth']:.0%}" for row in rows)
    return Outcome(OK, f"found at {depths} of {count} tokens", "", {"rows": rows})
