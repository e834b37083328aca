"""Ask the served model questions with known answers: `dsv4 probe [--json]`.

The questions are those of guard.json (`probe.questions`), or one of the reader's own. An answer may
come as text or only as reasoning; a budget that ran out while the model was still reasoning is its
own verdict, because the remedy is another budget and not another model.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dsv4 import engine_api, guard, layout

RIGHT: Final = "right"
WRONG: Final = "wrong"
EMPTY: Final = "empty"
BUDGET: Final = "budget"
ERROR: Final = "error"


@dataclass(frozen=True)
class Verdict:
    """What came of one question."""

    verdict: str
    prompt: str
    expect: tuple[str, ...]
    text: str
    reasoning: str
    finish: str
    seconds: float
    detail: str


def missing(expect: tuple[str, ...], said: str) -> list[str]:
    """Return the expected words that are not there, whatever their case."""
    lowered = said.casefold()
    return [word for word in expect if word.casefold() not in lowered]


def judge(question: guard.Question, answer: engine_api.Answer) -> tuple[str, str]:
    """Return the verdict on an answer and one sentence about it."""
    if not answer.produced:
        return EMPTY, "the engine answered without a single token"
    lost = missing(question.expect, answer.text)
    if answer.text and not lost:
        return RIGHT, "as expected"
    if not answer.text and not missing(question.expect, answer.reasoning):
        return RIGHT, "as expected, in its reasoning; it gave no text beside it"
    if not answer.text and answer.finish == "length":
        return BUDGET, f"all {question.max_tokens} tokens went into reasoning; raise max_tokens"
    said = (answer.text or answer.reasoning).strip()[:80]
    return WRONG, f"{', '.join(map(repr, lost))} is not in {said!r}"


def put(client: engine_api.Client, model: str, question: guard.Question) -> Verdict:
    """Ask one question."""
    started = time.monotonic()
    answer = engine_api.Answer("", "", "")
    try:
        answer = client.complete(model, question.prompt, question.max_tokens, question.chat)
        verdict, detail = judge(question, answer)
    except engine_api.ApiError as error:
        verdict, detail = ERROR, f"{error.kind}: {error}"
    seconds = round(time.monotonic() - started, 3)
    said = (answer.text, answer.reasoning, answer.finish)
    return Verdict(verdict, question.prompt, question.expect, *said, seconds, detail)


def questions_of(config: guard.Guard) -> tuple[guard.Question, ...]:
    """Return what to ask; without own questions the one that decides about readiness."""
    return config.questions or (guard.Question(config.ready.prompt, (), config.ready.max_tokens),)


def main(argv: list[str]) -> int:
    """Ask: 0 when all answers are right, 1 when one is not, 3 when nobody answers."""
    parser = argparse.ArgumentParser(prog="dsv4 probe", description=__doc__)
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    parser.add_argument("--prompt", help="ask this instead")
    parser.add_argument("--expect", action="append", default=[], help="text its answer must have")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="ask --prompt as a chat message")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        config = guard.read(options.guard)
    except guard.BrokenGuard as error:
        sys.stderr.write(f"dsv4 probe: {error}\n")
        return 3
    asked = questions_of(config)
    if options.prompt:
        wanted = tuple(options.expect)
        asked = (guard.Question(options.prompt, wanted, options.max_tokens, options.chat),)
    limit = config.ready.request_timeout_s
    client = engine_api.Client(config.url, engine_api.find_key(), limit)
    result: dict[str, Any] = {"ok": False, "url": config.url, "model": config.served_name}
    try:
        names = client.models()
    except engine_api.ApiError as error:
        result["error"] = {"kind": error.kind, "text": str(error)}
        sys.stderr.write(f"dsv4 probe: {error}; see `systemctl status {config.unit}`\n")
        if options.json:
            print(json.dumps(result))
        return 1 if error.kind == engine_api.AUTH else 3
    model = config.served_name or (names[0] if names else "")
    verdicts = [put(client, model, question) for question in asked]
    result["served"] = names
    result["answers"] = [asdict(verdict) for verdict in verdicts]
    result["ok"] = model in names and all(v.verdict == RIGHT for v in verdicts)
    if model not in names:
        sys.stderr.write(f"dsv4 probe: {model} is not served here, only {', '.join(names)}\n")
    for verdict in verdicts:
        said = (verdict.text or verdict.reasoning).strip()
        sys.stderr.write(f"dsv4 probe: {verdict.verdict}: {verdict.detail} ({verdict.seconds} s)\n")
        if not options.json:
            print(f"{verdict.prompt} -> {said}")
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
