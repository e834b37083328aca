"""A bench's results as a table, on the machine and on the controller alike."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dsv4 import reference

COLUMNS: Final = (
    # key, title, format
    ("streams", "streams", "{:.0f}"),
    ("tokens_per_s", "tok/s", "{:.2f}"),
    ("stream_tokens_per_s", "tok/s each", "{:.2f}"),
    ("ttft_ms", "TTFT ms", "{:.0f}"),
    ("ttft_p95_ms", "p95", "{:.0f}"),
    ("acceptance", "accepted", "{:.3f}"),
    ("kv_use", "KV use", "{:.3f}"),
    ("available_gib_low", "GiB low", "{:.1f}"),
)


def shown(value: Any, form: str) -> str:
    """Return a figure, or a dash for one that was not measured."""
    return form.format(value) if isinstance(value, int | float) else "-"


def aligned(rows: list[list[str]]) -> Iterator[str]:
    """Yield rows with their columns to the right, the first to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""
    cells = results.get("cells") or []
    work = results.get("workload") or {}
    yield (
        f"{results.get('model')}: {work.get('prompt_tokens')} tokens of prompt,"
        f" {work.get('output_tokens')} of answer, random and unique; vllm bench serve"
    )
    if cells:
        heads = [title for _, title, _ in COLUMNS]
        yield from aligned(
            [heads, *([shown(cell.get(key), form) for key, _, form in COLUMNS] for cell in cells)]
        )
    for cell in cells:
        for flag in cell.get("flags") or []:
            word = "NOT VALID" if flag["fatal"] else "note"
            yield f"{word}: {streams(cell)}: {flag['rule']}: {flag['text']}"
    for answer in results.get("answers") or []:
        yield answer_line(answer)
    for row in results.get("prefill") or []:
        ttft = shown(row.get("ttft_s"), "{:.2f} s")
        yield f"prompt of {row.get('prompt_tokens')} tokens: first token after {ttft}"
    yield from load_lines(results.get("loads") or {})
    if tokens := results.get("kv_cache_tokens"):
        yield f"key-value cache: {tokens:,} tokens"
    yield from beside(results)


def streams(cell: Mapping[str, Any]) -> str:
    """Return a number of streams in words."""
    return "1 stream" if cell["streams"] == 1 else f"{cell['streams']} streams"


def answer_line(answer: Mapping[str, Any]) -> str:
    """Return what one streamed answer showed."""
    parts = [
        f"first token after {shown(answer.get('ttft_s'), '{:.3f} s')}",
        f"first of the answer {shown(answer.get('answer_s'), '{:.3f} s')}",
        f"{shown(answer.get('tokens_per_s'), '{:.2f}')} tok/s",
        f"{shown(answer.get('tokens'), '{:.0f}')} tokens in {answer.get('chunks')} pieces",
    ]
    if answer.get("acceptance") is not None:
        parts.append(f"{answer['acceptance']:.3f} accepted")
    if answer.get("error"):
        parts = [str(answer["error"])]
    flags = "".join(
        f"; {'NOT VALID' if flag['fatal'] else 'note'}: {flag['text']}"
        for flag in answer.get("flags") or []
    )
    return f"one stream, {answer.get('kind')}: {', '.join(parts)}{flags}"


def load_lines(loads: Mapping[str, Any]) -> Iterator[str]:
    """Yield how long starts took."""
    for kind in ("cold", "warm"):
        load = loads.get(kind)
        if not load:
            yield f"{kind} load: not measured: no {kind} start of what is served is on record"
            continue
        yield (
            f"{kind} load: ready after {load['ready_s']} s, weights"
            f" {shown(load.get('weights_s'), '{:.1f} s')}, {load['read_gib']} of"
            f" {load['pack_gib']} GiB read from disk ({load['when']})"
        )


def beside(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures beside the reference's; what differs for all of a source is said once."""
    rows = [row for row in reference.rows(results) if row.ours is not None]
    for source in dict.fromkeys(row.source for row in rows):
        of_source = [row for row in rows if row.source == source]
        common = set.intersection(*(set(row.differs) for row in of_source))
        yield f"beside {source}: ours / theirs = ratio [{reference.SOURCES[source]}]"
        if common:
            shared = [words for words in of_source[0].differs if words in common]
            yield f"  not comparable, all of it: {'; '.join(shared)}"
        for row in of_source:
            own = [words for words in row.differs if words not in common]
            tail = "" if row.comparable else " (not comparable)"
            tail = f" (not comparable: {'; '.join(own)})" if own else tail
            unit = f" {row.unit}" if row.unit else ""
            figures = f"{row.ours:.4g} / {row.reference:.4g}{unit} = {row.ratio:.2f}"
            yield f"  {row.what}: {figures}{tail}"
    if rows:
        yield "the prompts and answers behind the reference figures are not published"
