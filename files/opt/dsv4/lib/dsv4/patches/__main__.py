"""`python -m dsv4.patches`: look at, apply and take back the patches of a runtime."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dsv4.patches import PATCHES, engine


def main(argv: list[str]) -> int:
    """Run one of status, apply and revert; 1 when a patch does not fit or is not in place."""
    options = _parse(argv)
    if isinstance(options, int):
        return options
    try:
        report = _run(options.command, options.site, options.set, alone=options.alone)
    except engine.PatchError as error:
        words = {"ok": False, "error": str(error)}
        if options.json:
            known = error.report.as_json() if error.report else {}
            sys.stdout.write(json.dumps({**known, **words}, sort_keys=True) + "\n")
        sys.stderr.write(f"dsv4 patches: {error}\n")
        return 1
    if options.json:
        sys.stdout.write(json.dumps(report.as_json(), sort_keys=True) + "\n")
    else:
        sys.stdout.write(_words(report))
    for line in report.trouble:
        sys.stderr.write(f"dsv4 patches: {line}\n")
    return 0 if report.ok else 1


def _run(
    command: str, site: Path, patches: Sequence[engine.Patch], *, alone: bool
) -> engine.Report:
    """Call the engine."""
    match command:
        case "status" if alone:
            return _each(site, patches)
        case "status":
            return engine.status(site, patches)
        case "apply":
            return engine.apply(site, patches)
        case _:
            return engine.revert(site, patches)


def _each(site: Path, patches: Sequence[engine.Patch]) -> engine.Report:
    """Look at each patch by itself: not all of them are meant to be applied together."""
    reports = [engine.status(site, [patch]) for patch in patches]
    return engine.Report(
        root=reports[0].root,
        patches={name: one for report in reports for name, one in report.patches.items()},
        files={},
        trouble=tuple(dict.fromkeys(line for report in reports for line in report.trouble)),
    )


def _words(report: engine.Report) -> str:
    """Return the report for a person."""
    rows = [
        f"{name}: {one.verdict}" + (f" ({one.why})" if one.why else "")
        for name, one in report.patches.items()
    ]
    rows.extend(f"written: {path}" for path in report.written)
    return "".join(f"{row}\n" for row in rows or ["nothing to do"])


def _parse(argv: list[str]) -> argparse.Namespace | int:
    """Return the options, or the exit code of a mistake in them."""
    parser = argparse.ArgumentParser(prog="dsv4 patches", description=__doc__)
    parser.add_argument("command", choices=("status", "apply", "revert"))
    parser.add_argument("--site", type=Path, required=True, help="the runtime's site-packages")
    parser.add_argument("--set", help=f"for status and apply: {', '.join(PATCHES)}; in order")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    options.alone = options.set is None
    if options.command == "revert" and not options.alone:
        sys.stderr.write("dsv4 patches: revert: leave --set out; it takes back all that is there\n")
        return 2
    names = list(PATCHES) if options.alone else [name.strip() for name in options.set.split(",")]
    if options.command == "apply" and options.alone:
        sys.stderr.write("dsv4 patches: apply: name the patches with --set; no file needs all\n")
        return 2
    if unknown := [name for name in names if name not in PATCHES]:
        sys.stderr.write(
            f"dsv4 patches: --set: no patch is called {', '.join(map(repr, unknown))}; there are"
            f" {', '.join(PATCHES)}\n"
        )
        return 2
    options.set = [PATCHES[name] for name in dict.fromkeys(names)]
    return options


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
