"""From live state and logs to causes: `sudo dsv4 doctor [--log FILE] [--bundle FILE] [--json]`.

Reads the live picture, the journal of this boot and the one before, and the kernel's messages, and
judges each line by the table in `faults`. What is said is the causes of the newest start that went
wrong, in the order they came, then what happened earlier and is over. An error that nobody has
described is shown by its first real line: the exception that a traceback began with, a compiler's
first error. 0 when nothing is wrong now, 1 with a cause, 3 when it could not be told.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dsv4 import bug_report, extension, faults, findings, journal, layout, status
from dsv4.faults import Fault
from dsv4.findings import Finding
from dsv4.journal import Line

ENGINE: Final = "engine"
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    ENGINE: (layout.UNIT, layout.UNIT_WATCHDOG, layout.UNIT_UNGUARDED, journal.KERNEL, ""),
    "download": (layout.UNIT_FETCH,),
    "build": (layout.UNIT_BUILD,),
}
"""Units whose faults explain each other; a log from elsewhere counts as the engine's."""

UNITS: Final = (*layout.UNITS, "systemd-oomd.service")

BEGINS: Final = re.compile(r"^Starting dsv4(?:-fetch|-build)?\.service\b")
"""systemd's words at a start: what went wrong before is over when this one goes well."""

WELL: Final = re.compile(
    r"^dsv4 ready: ready after |^Started dsv4\.service\b|^Finished dsv4-(?:fetch|build)\.service\b"
    r"|^Stopped dsv4\.service\b|^dsv4 fetch: .*: complete, "
)
"""After this line a group is well: it serves, has done its work, or was stopped."""

ENDED: Final = re.compile(r"[Mm]ain process exited|Control process exited|Failed with result '")

SHUTDOWN: Final = re.compile(
    r"Reached target .*(?:[Ss]hutdown|[Pp]ower.?[Oo]ff|[Rr]eboot|[Hh]alt|kexec)|[Jj]ournal stopped"
    r"|systemd-shutdown|Shutting down\.|(?:Power|Reboot).* key pressed"
    r"|System is (?:rebooting|powering)"
)

PREFIX: Final = re.compile(
    r"^(?:\w{3} +\d+ [\d:]{8} \S+ \S+?\[\d+\]: )?"  # the journal's own
    r"(?:\(\w[\w ]*pid=\d+\) ?)?"  # a process of vLLM's
    r"(?:(?:ERROR|CRITICAL|WARNING|INFO|DEBUG) \d\d-\d\d [\d:]{8} \[[^\]]*\] ?)?"  # its logger
)
RAISED: Final = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Died|Fault|Failure|Refused)\b"
)
ERROR: Final = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL)\b|^(?:error|fatal)\b|\bFAILED:"
    r"|\b(?:[Ff]atal|[Pp]anic|[Ss]egmentation fault)\b"
)
TRACEBACK: Final = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Diagnosis:
    """One fault as it was met: `line` is the first that shows it, `over` when it is no more."""

    fault: Fault
    line: Line
    count: int = 1
    over: bool = False

    def plain(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "name": self.fault.name,
            "kind": self.fault.kind,
            "part": self.fault.part,
            "cause": self.fault.cause,
            "remedy": self.fault.remedy,
            "source": self.fault.source,
            "line": self.line.text.strip(),
            "unit": self.line.unit,
            "boot": self.line.boot,
            "at": self.line.at,
            "count": self.count,
            "over": self.over,
        }


@dataclass(frozen=True)
class Unknown:
    """An error that the table does not have."""

    line: Line
    unit: str

    def plain(self) -> dict[str, Any]:
        """Return it for programs."""
        return {"line": self.line.text.strip(), "unit": self.unit, "at": self.line.at}


@dataclass(frozen=True)
class Report:
    """What the logs say."""

    diagnoses: tuple[Diagnosis, ...] = ()
    unknown: tuple[Unknown, ...] = ()

    def of(self, kind: faults.Kind, *, over: bool = False) -> list[Diagnosis]:
        """Return the diagnoses of a kind, oldest first."""
        return [it for it in self.diagnoses if it.fault.kind == kind and it.over == over]

    @property
    def causes(self) -> list[Diagnosis]:
        """Return what is wrong now; consequences only where no cause was found for them."""
        found = self.of("cause")
        return found if found or self.unknown else self.of("consequence")


def group_of(unit: str) -> str:
    """Return the group whose faults a unit's lines explain."""
    return next((name for name, units in GROUPS.items() if unit in units), ENGINE)


def starts(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the lines of a group, cut where a start begins."""
    found: list[list[Line]] = [[]]
    for line in lines:
        if BEGINS.search(line.text) or (found[-1] and line.boot != found[-1][-1].boot):
            found.append([])
        found[-1].append(line)
    return [part for part in found if part]


def current(parts: Sequence[Sequence[Line]]) -> tuple[list[Line], list[Line]]:
    """Return what is over, and the lines that may explain what is wrong now.

    What was said before the last good moment is over. Of several starts that went wrong after it,
    the last one with a cause in it counts: one that was given up at once only quotes the others.
    """
    flat = [line for part in parts for line in part]
    well = max((i for i, line in enumerate(flat) if WELL.search(line.text)), default=-1)
    over, rest = flat[: well + 1], flat[well + 1 :]
    later = starts(rest)
    telling = [i for i, part in enumerate(later) if tells(part)]
    first = telling[-1] if telling else 0
    before = [line for part in later[:first] for line in part]
    # What the kernel said holds for every start that did not go well since
    kernel = [line for line in before if line.unit == journal.KERNEL]
    past = [line for line in before if line.unit != journal.KERNEL]
    return over + past, kernel + [line for part in later[first:] for line in part]


def tells(part: Sequence[Line]) -> bool:
    """Say whether a start has something in it that explains how it went."""
    known = (faults.judge(line.text) for line in part)
    return any(it is not None and it.kind == "cause" for it in known) or root_of(part) is not None


def bare(text: str) -> str:
    """Return a line without what loggers put before it."""
    return PREFIX.sub("", text, count=1)


def root_of(lines: Sequence[Line]) -> Line | None:
    """Return the first real error of lines: what a traceback began with, or a compiler's word.

    A chain of exceptions is printed cause first, so the end of the first traceback is the root.
    Processes of one engine log between each other's lines; what belongs together has one prefix.
    """
    for number, line in enumerate(lines):
        if TRACEBACK not in line.text:
            continue
        owner = owner_of(line.text)
        for later in lines[number + 1 :]:
            if owner_of(later.text) != owner or later.unit != line.unit:
                continue
            if RAISED.match(bare(later.text)):
                if faults.judge(later.text) is None or is_cause(later.text):
                    return later
                break
    for line in lines:
        text = bare(line.text)
        if any(pattern.search(text) for pattern in extension.ERRORS) or RAISED.match(text):
            if faults.judge(line.text) is None:
                return line
        elif ERROR.search(line.text) and faults.judge(line.text) is None:
            return line
    return None


def is_cause(text: str) -> bool:
    """Say whether the table takes a line for a cause."""
    fault = faults.judge(text)
    return fault is not None and fault.kind == "cause"


def owner_of(text: str) -> str:
    """Return which process of the engine said a line, empty where it does not say."""
    found = re.match(r"^(?:\w{3} +\d+ [\d:]{8} \S+ \S+?\[\d+\]: )?\((\w[\w ]*pid=\d+)\)", text)
    return found[1] if found else ""


def collect(lines: Iterable[Line], *, over: bool) -> list[Diagnosis]:
    """Return the faults that lines show, each once, in the order of their first line."""
    found: dict[str, Diagnosis] = {}
    for line in lines:
        fault = faults.judge(line.text)
        if fault is None:
            continue
        known = found.get(fault.name)
        found[fault.name] = (
            replace(known, count=known.count + 1) if known else Diagnosis(fault, line, over=over)
        )
    return list(found.values())


def diagnose(lines: Sequence[Line]) -> Report:
    """Return what lines of a journal say, oldest first."""
    diagnoses: list[Diagnosis] = []
    unknown: list[Unknown] = []
    for name in GROUPS:
        own = [line for line in lines if group_of(line.unit) == name]
        past, now = current(starts(own))
        present = collect(now, over=False)
        known = {it.fault.name for it in present}
        diagnoses += present
        diagnoses += [it for it in collect(past, over=True) if it.fault.name not in known]
        has_cause = any(it.fault.kind == "cause" for it in present)
        # A traceback in a service that goes on is one request's; a log from elsewhere has no unit
        ended = any(ENDED.search(line.text) for line in now) or any(not line.unit for line in now)
        if not has_cause and ended and (root := root_of(now)) is not None:
            unknown.append(Unknown(root, root.unit or "the log"))
    diagnoses.sort(key=lambda it: (it.line.boot, it.line.at))
    return Report(tuple(diagnoses), tuple(unknown))


def froze(last_lines: Sequence[str]) -> bool:
    """Say whether a boot ended without a shutdown: its journal just stops."""
    return bool(last_lines) and not any(SHUTDOWN.search(line) for line in last_lines)


FROZEN: Final = Finding(
    "the boot before",
    "ok",
    "no shutdown",
    "its journal stops without a shutdown: a freeze or a power cut",
    "journalctl -b -1 -e; a freeze leaves nothing: look for memory that falls, and lower it",
)


def read_log(path: Path) -> list[Line]:
    """Return the lines of a log from elsewhere."""
    return [
        Line(text, at=float(n))
        for n, text in enumerate(path.read_text(errors="replace").splitlines())
    ]


def advise(report: Report, live: Sequence[Finding]) -> list[str]:
    """Return the report as people read it."""
    out: list[str] = []
    for number, it in enumerate(report.causes, 1):
        out += [f"{number}. {it.fault.name}: {it.fault.cause}", *evidence(it)]
        out += [f"   do: {it.fault.remedy}"] if it.fault.remedy else []
    for error in report.unknown:
        out += [
            f"an error that is not known here, its first line: {error.line.text.strip()[:400]}",
            f"   the log: {where(error.unit)}",
        ]
    for finding in live:
        if finding.state in {"fault", "unknown"}:
            out.append(str(finding))
    if not out:
        out.append("nothing is wrong that this tool knows of")
    earlier = [*report.of("cause", over=True)]
    if earlier:
        out.append("earlier, and over:")
        for it in earlier:
            out += [f"   {when(it.line)} {it.fault.name}: {it.fault.cause}", *evidence(it)]
    requests = [*report.of("request"), *report.of("request", over=True)]
    for it in requests:
        out.append(f"requests: {it.fault.name} ({it.count}x): {it.fault.cause}; {it.fault.remedy}")
    context = [*report.of("context"), *report.of("context", over=True)]
    names = dict.fromkeys(it.fault.name for it in context)
    if names:
        out.append(f"proves nothing, healthy machines log it too: {', '.join(names)}")
    return out


def evidence(it: Diagnosis) -> list[str]:
    """Return the line that shows a fault."""
    times = f" ({it.count} times)" if it.count > 1 else ""
    return [f"   {it.line.unit or 'log'}{times}: {it.line.text.strip()[:300]}"]


def when(line: Line) -> str:
    """Return when a line was logged."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(line.at))


def where(unit: str) -> str:
    """Return where the rest of a log is."""
    if unit == layout.UNIT_BUILD:
        return f"journalctl -u {unit}, and {layout.LOGS}/build-*.log"
    return f"journalctl -u {unit}" if unit.endswith(".service") else unit


def main(argv: list[str]) -> int:
    """Say what is wrong."""
    parser = argparse.ArgumentParser(
        prog="dsv4 doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--log", type=Path, help="read this log instead of the machine's journal")
    parser.add_argument("--bundle", type=Path, help="write a bug report there, secrets masked")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    live: list[Finding] = []
    if options.log is not None:
        try:
            lines = read_log(options.log)
        except OSError as error:
            sys.stderr.write(f"dsv4 doctor: {error}\n")
            return 3
    else:
        live = status.take()
        lines = [*journal.of(UNITS, -1), *journal.of(UNITS, 0)]
        if froze(journal.last_of(-1)):
            live.append(FROZEN)
        if not lines:
            why = (
                "only root reads the whole journal" if os.geteuid() else "the journal holds nothing"
            )
            live.append(Finding("journal", "unknown", "empty", why, "sudo dsv4 doctor"))
    report = diagnose(lines)
    result = 1 if report.causes or report.unknown else findings.status(live)
    words = advise(report, live)
    if options.bundle is not None:
        try:
            bug_report.write(options.bundle, words, live, lines)
        except OSError as error:
            sys.stderr.write(f"dsv4 doctor: no bundle was written: {error}\n")
            return 3
        sys.stderr.write(f"dsv4 doctor: {options.bundle}: read it before you send it\n")
    if options.json:
        told = {
            "ok": result == 0,
            "causes": [it.plain() for it in report.causes],
            "unknown": [it.plain() for it in report.unknown],
            "earlier": [it.plain() for it in report.of("cause", over=True)],
            "requests": [it.plain() for it in report.diagnoses if it.fault.kind == "request"],
            "context": [it.plain() for it in report.diagnoses if it.fault.kind == "context"],
            "live": [finding.shown() for finding in live],
            "lines": words,
        }
        print(json.dumps(told, ensure_ascii=False))
    else:
        print("\n".join(words))
    return result


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
