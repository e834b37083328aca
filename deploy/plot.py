"""A bench beside the reference figures, as one picture.

The picture is described as data (Vega-Lite) and drawn by one package without dependencies, which
takes 3 s to install; matplotlib and what it needs took 36 s on the same machine.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dsv4 import reference

OURS: Final = "this machine"
THEIRS: Final = "recipe (reported)"
COMPARABLE: Final = "comparable ratio"
NOT_COMPARABLE: Final = "not comparable"
COLOUR: Final = {
    "field": "who",
    "title": None,
    "scale": {
        "domain": [OURS, THEIRS, COMPARABLE, NOT_COMPARABLE],
        "range": ["#1f77b4", "#ff7f0e", "#2ca02c", "#b0b0b0"],
    },
}
SCALE: Final = 2.0
SIZE: Final = 300

PANELS: Final = (
    # figure, title of the axis, place among reference.CONCURRENCY's columns
    ("tokens_per_s", "tokens/s, all streams", 1),
    ("stream_tokens_per_s", "tokens/s, each stream", 2),
    ("ttft_ms", "time to first token, ms", 3),
    ("acceptance", "draft tokens accepted", 4),
    ("kv_use", "key-value cache in use", 5),
)


def points(results: Mapping[str, Any], name: str, column: int) -> Iterator[dict[str, Any]]:
    """Yield a panel's points: ours, then the reference's."""
    reported = {row[0]: row[column] for row in reference.CONCURRENCY}
    for cell in results.get("cells") or []:
        if (value := cell.get(name)) is not None:
            state = "measured" if cell.get("valid") else "not valid"
            theirs = reported.get(cell["streams"])
            ratio = f"x {value / theirs:.2f}" if theirs else ""
            where = {"streams": cell["streams"], "value": value}
            yield {**where, "who": OURS, "state": state, "ratio": ratio}
    for row in reference.CONCURRENCY:
        value = row[column]
        yield {"streams": row[0], "value": value, "who": THEIRS, "state": "reported", "ratio": ""}


def panel(results: Mapping[str, Any], name: str, title: str, column: int) -> dict[str, Any]:
    """Return one panel: a figure over the number of streams."""
    return {
        "width": SIZE,
        "height": SIZE * 2 // 3,
        "data": {"values": list(points(results, name, column))},
        "layer": [
            {"mark": "line", "encoding": {"order": {"field": "streams"}}},
            {
                "mark": {"type": "point", "filled": True, "size": 70},
                "encoding": {
                    "shape": {
                        "field": "state",
                        "scale": {
                            "domain": ["measured", "not valid", "reported"],
                            "range": ["circle", "cross", "square"],
                        },
                        "title": None,
                    }
                },
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 6, "dy": -6},
                "encoding": {"text": {"field": "ratio"}},
            },
        ],
        "encoding": {
            "x": {
                "field": "streams",
                "type": "quantitative",
                "scale": {"type": "log", "base": 2},
                "axis": {"values": [row[0] for row in reference.CONCURRENCY], "format": "d"},
            },
            "y": {"field": "value", "type": "quantitative", "title": title},
            "color": COLOUR,
        },
    }


def bars(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the panel of ratios: everything measured, over what is reported."""
    values = []
    for row in reference.rows(results):
        if row.ratio is not None and " stream" not in row.what:
            who = COMPARABLE if row.comparable else NOT_COMPARABLE
            values.append({"what": f"{row.what} [{row.source}]", "ratio": row.ratio, "who": who})
    return {
        "width": SIZE,
        "height": SIZE * 2 // 3,
        "data": {"values": values},
        "layer": [
            {
                "mark": "bar",
                "encoding": {
                    "y": {
                        "field": "what",
                        "type": "nominal",
                        "title": None,
                        "sort": None,
                        "axis": {"labelLimit": SIZE},
                    },
                    "x": {"field": "ratio", "type": "quantitative", "title": "ours / reported"},
                    "color": COLOUR,
                },
            },
            {"mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {"x": {"datum": 1}}},
        ],
    }


def subtitle(results: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know before looking."""
    settings, work = results.get("settings") or {}, results.get("workload") or {}
    differs = reference.differences(settings, max_num_seqs=16)
    lines = [
        f"vLLM {settings.get('vllm')}, {settings.get('gpu')}; {work.get('prompt_tokens')} tokens of"
        f" prompt, {work.get('output_tokens')} of answer",
        f"reference: {reference.SOURCES[reference.RECIPE]}",
    ]
    if differs:
        lines += ["not comparable with the reference:", *wrapped(differs)]
    return lines


def wrapped(words: tuple[str, ...], width: int = 130) -> Iterator[str]:
    """Yield the words in lines of no more than this width, as far as each word allows."""
    line = ""
    for word in words:
        if line and len(line) + len(word) > width:
            yield line
            line = ""
        line += f"{word}; "
    yield line.removesuffix("; ")


def description(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole picture as data."""
    panels = [panel(results, *what) for what in PANELS]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {
            "text": f"{results.get('model')} beside reference figures",
            "subtitle": subtitle(results),
            "anchor": "start",
        },
        "background": "white",
        "columns": 3,
        "concat": [*panels, bars(results)],
        "resolve": {"scale": {"color": "shared", "shape": "shared"}},
    }


def write(results: Mapping[str, Any], path: Path) -> Path:
    """Draw the results as a PNG; raise ImportError, OSError or ValueError when that fails."""
    import vl_convert

    path.write_bytes(vl_convert.vegalite_to_png(description(results), scale=SCALE))
    return path
