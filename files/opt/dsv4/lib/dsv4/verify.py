"""Prove that what is served works: `dsv4 verify [--json]`.

The runtime by its bytes and by what the engine finds in it; the pack's own questions, asked at once
and as a stream; and what the pack and the route are meant to do: images, tools, reasoning kept
apart, a long prompt. One line a finding, with what to do about it. Asked at the end of a deploy,
the runtime's part is done once a boot for each runtime, the rest once a start.
"""

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    capabilities,
    engine_api,
    findings,
    guard,
    image_probe,
    layout,
    probe,
    receipt,
    runtime,
    runtime_proof,
    store,
    stream,
)
from dsv4.findings import Finding

CHECKS: Final = ("runtime", "text", "stream", "image", "tools", "reasoning", "needle")

LOST: Final = frozenset({probe.ERROR, image_probe.ERROR, capabilities.ERROR, engine_api.DOWN})
TRIP_WAIT_S: Final = 2.0

TEXT_REMEDY: Final = {
    probe.WRONG: "the weights or the runtime are not what they should be: `dsv4 runtime`, and the"
    " deploy again, which checks the pack's every byte",
    probe.EMPTY: "look for the first error with `journalctl -u dsv4`",
    probe.BUDGET: "raise max_tokens of the pack's smoke prompt",
    probe.ERROR: "look for the first error with `journalctl -u dsv4`",
}


def text(
    client: engine_api.Client, model: str, questions: tuple[guard.Question, ...]
) -> Iterator[Finding]:
    """Ask the pack's own questions."""
    for question in questions:
        came = probe.put(client, model, question)
        said = (came.text or came.reasoning).strip()[:60]
        right = came.verdict == probe.RIGHT
        words = f"{question.prompt!r} -> {said!r}, {came.detail}" if right else came.detail
        yield Finding(
            "text",
            "ok" if right else "fault",
            came.verdict,
            f"{words} ({came.seconds:.2f} s)",
            TEXT_REMEDY.get(came.verdict, ""),
            {"seconds": came.seconds},
        )


def streamed(client: engine_api.Client, model: str, question: guard.Question) -> Finding:
    """Ask one of them again as a stream, which is how people and agents ask."""
    body: dict[str, Any] = {"model": model, "max_tokens": question.max_tokens, "temperature": 0}
    if question.chat:
        path = engine_api.CHAT
        body["messages"] = [{"role": "user", "content": question.prompt}]
    else:
        path = engine_api.COMPLETIONS
        body["prompt"] = question.prompt
    try:
        came = stream.ask(client, path, body)
    except engine_api.ApiError as error:
        remedy = TEXT_REMEDY[probe.ERROR]
        return Finding("stream", "fault", probe.ERROR, f"{error.kind}: {error}", remedy)
    verdict, detail = probe.judge(question, came.answer())
    figures = {
        "ttft_s": came.ttft_s,
        "answer_s": came.answer_s,
        "tokens_per_s": came.tokens_per_s,
        "tokens": came.usage.completion,
        "chunks": came.chunks,
    }
    if verdict != probe.RIGHT:
        return Finding("stream", "fault", verdict, detail, TEXT_REMEDY.get(verdict, ""), figures)
    first = "at once" if came.ttft_s is None else f"first token after {came.ttft_s:.2f} s"
    if came.usage.completion is None:
        detail += "; the engine counts no tokens, so rates cannot be measured"
    return Finding("stream", "ok", verdict, f"{first}, {detail}", figures=figures)


def image(client: engine_api.Client, model: str, offers: guard.Offers, budget: int) -> Finding:
    """Show images; a text model has to say that it takes none."""
    came = image_probe.probe(client, model, random.SystemRandom(), budget)
    figures = {"tokens_without": came.tokens_without, "tokens_with": came.tokens_with}
    if offers.vision:
        state: findings.State = "ok" if came.good else "fault"
        remedy = image_probe.REMEDY.get(came.verdict, "")
        return Finding(
            "image", state, came.verdict, f"{came.verdict}: {came.detail}", remedy, figures
        )
    if came.verdict == image_probe.UNSUPPORTED:
        words = "refused, as it should be: this pack or route is text only"
        return Finding("image", "ok", came.verdict, words, figures=figures)
    if came.good:
        words = f"{came.detail}, though pack and route are known as text only"
        return Finding("image", "ok", came.verdict, words, figures=figures)
    if came.verdict in {image_probe.IGNORED, image_probe.WRONG}:
        words = f"{came.detail}; a text model should refuse images"
        remedy = "send it none: what it says of them is made up"
        return Finding("image", "fault", came.verdict, words, remedy, figures)
    remedy = image_probe.REMEDY.get(came.verdict, "")
    return Finding(
        "image", "fault", came.verdict, f"{came.verdict}: {came.detail}", remedy, figures
    )


def capability(name: str, came: capabilities.Outcome) -> Finding:
    """Return the finding about one capability."""
    state: findings.State = "ok" if came.good else "fault"
    words = came.detail if came.good else f"{came.verdict}: {came.detail}"
    return Finding(name, state, came.verdict, words, came.remedy, came.figures)


def not_offered(name: str, why: str) -> Finding:
    """Return the finding about something nobody asked for."""
    return Finding(name, "skipped", "not offered", why)


def of_engine(
    config: guard.Guard, client: engine_api.Client, wanted: set[str], needle_tokens: int
) -> Iterator[Finding]:
    """Yield what asking the engine shows."""
    try:
        served = client.served()
    except engine_api.ApiError as error:
        state: findings.State = "fault" if error.kind == engine_api.AUTH else "unknown"
        remedy = (
            "run it as root, or give the key in VLLM_API_KEY"
            if error.kind == engine_api.AUTH
            else f"is it running? `systemctl status {config.unit}`"
        )
        yield Finding("engine", state, error.kind, str(error), remedy)
        return
    model = config.served_name or next(iter(served), "")
    if model not in served:
        names = ", ".join(served) or "nothing"
        yield Finding(
            "engine",
            "fault",
            "wrong model",
            f"{names} is served at {config.url}, not {model}",
            "another service has the port; `ss -ltnp` names it",
        )
        return
    yield Finding("engine", "ok", "serves", f"serves {model} at {config.url}")
    offers, chance = config.offers, random.SystemRandom()
    budget = min(capabilities.MAX_TOKENS, max(16, (served[model] or 1 << 20) // 2))
    questions = probe.questions_of(config)
    if "text" in wanted:
        yield from text(client, model, questions)
    if "stream" in wanted:
        yield streamed(client, model, questions[0])
    if "image" in wanted:
        yield image(client, model, offers, budget)
    if "tools" in wanted:
        yield (
            capability("tools", capabilities.tools(client, model, chance, budget))
            if offers.tool_parser
            else not_offered("tools", "the pack has no tool parser")
        )
    if "reasoning" in wanted:
        yield (
            capability("reasoning", capabilities.reasoning(client, model, chance, budget))
            if offers.reasoning_parser
            else not_offered("reasoning", "the pack has no reasoning parser")
        )
    if "needle" in wanted and needle_tokens:
        found = capabilities.needle(client, model, needle_tokens, chance, time.monotonic)
        yield capability("needle", found)


def explained(found: Iterator[Finding], records: Path) -> Iterator[Finding]:
    """Yield findings; a fault at which the watchdog stopped the engine is one of memory.

    The watchdog writes its record after the kill, so a fault is followed by a moment's patience.
    """
    before = set(records.glob("*.json"))
    for finding in found:
        end = time.monotonic() + TRIP_WAIT_S
        new = finding.state == "fault" and set(records.glob("*.json")) - before
        while finding.verdict in LOST and not new and time.monotonic() < end:
            time.sleep(0.1)
            new = set(records.glob("*.json")) - before
        if not new:
            yield finding
            continue
        reason = store.read_json_or(max(new), {}).get("reason", "no reason recorded")
        yield replace(
            finding,
            verdict=image_probe.MEMORY,
            text=f"{image_probe.MEMORY}: the watchdog stopped the engine meanwhile: {reason}",
            remedy=image_probe.REMEDY[image_probe.MEMORY],
        )
        before |= new


def of_runtime(config: guard.Guard, *, again: bool) -> list[Finding]:
    """Return what the runtime shows; unless `again`, what this boot has shown of it already."""
    name = runtime.link_target(layout.CURRENT)
    known = store.read_json_or(layout.RUNTIME_VERIFIED_JSON, {})
    asked = [name, config.offers.tool_parser, config.offers.reasoning_parser]
    if not again and known.get("of") == asked and not drifted(name):
        words = f"{name}: verified at {known.get('when')}, unchanged by its RECORDs since"
        return [Finding("runtime", "ok", "verified before", words)]
    found = runtime_proof.prove(config, again=again)
    if findings.status(found) == 0:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):  # nothing but time depends on it
            store.write_json(layout.RUNTIME_VERIFIED_JSON, {"of": asked, "when": when})
    return found


def drifted(name: str | None) -> bool:
    """Say whether a runtime shows a change by what is quick to ask."""
    if name is None:
        return True
    return not runtime.examine(layout.RUNTIMES / name)["complete"]


def words_of(
    say: Callable[[str], object], found: Iterator[Finding] | list[Finding]
) -> list[Finding]:
    """Say each finding as it comes, and return them all."""
    kept = []
    for finding in found:
        say(f"dsv4 verify: {finding}\n")
        kept.append(finding)
    return kept


def main(argv: list[str]) -> int:
    """Verify: 0 when all is right, 1 with a fault, 3 when something could not be told."""
    parser = argparse.ArgumentParser(prog="dsv4 verify", description=__doc__)
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    parser.add_argument("--only", action="append", choices=CHECKS, help="leave out the others")
    parser.add_argument(
        "--needle", type=int, metavar="TOKENS", help="hide something in a long prompt"
    )
    parser.add_argument("--timeout", type=float, help="limit for one answer, s")
    parser.add_argument("--record", metavar="INVOCATION", help="note that this start was proven")
    parser.add_argument("--no-receipt", action="store_true", help="leave none")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        config = guard.read(options.guard)
    except guard.BrokenGuard as error:
        sys.stderr.write(f"dsv4 verify: {error}; as another user than root, use sudo\n")
        return 3
    wanted = set(options.only or CHECKS)
    length = config.offers.needle_tokens if options.needle is None else options.needle
    limit = options.timeout or config.ready.request_timeout_s
    client = engine_api.Client(config.url, engine_api.find_key(), limit)
    found: list[Finding] = []
    if "runtime" in wanted:
        found += words_of(sys.stderr.write, of_runtime(config, again=not options.record))
    if wanted - {"runtime"}:
        asking = of_engine(config, client, wanted, length)
        found += words_of(sys.stderr.write, explained(asking, layout.WATCHDOG_RECORDS))
    status = findings.status(found)
    about = {"ok": status == 0, "url": config.url, "model": config.served_name}
    kept = {**about, "findings": [finding.plain() for finding in found]}
    result: dict[str, Any] = {**about, "findings": [finding.shown() for finding in found]}
    if options.record and status == 0:
        store.write_json(layout.VERIFIED_JSON, {"invocation": options.record, **kept})
    if not options.no_receipt:
        result["receipt"] = receipt.leave_or_say("verify", {"results": kept})
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
