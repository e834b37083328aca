"""Findings: what was looked at, what came of it, what to do; and the exit status they add up to."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

State = Literal["ok", "fault", "unknown", "skipped"]

WORDS: Final = {"ok": "ok", "fault": "FAULT", "unknown": "not known", "skipped": "skipped"}


@dataclass(frozen=True)
class Finding:
    """One line of a report: `verdict` is the outcome for machines, `text` is for people."""

    check: str
    state: State
    verdict: str
    text: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        tail = f"; {self.remedy}" if self.remedy and self.state in {"fault", "unknown"} else ""
        return f"{WORDS[self.state]}: {self.check}: {self.text}{tail}"

    def plain(self) -> dict[str, Any]:
        """Return it as a receipt has it."""
        return asdict(self)

    def shown(self) -> dict[str, Any]:
        """Return it for a program that shows it to people."""
        return {**self.plain(), "line": str(self)}


def status(found: Iterable[Finding]) -> int:
    """Return 0 when all is fine, 1 with a fault, 3 when something could not be told."""
    states = {finding.state for finding in found}
    if "fault" in states:
        return 1
    return 3 if "unknown" in states else 0
