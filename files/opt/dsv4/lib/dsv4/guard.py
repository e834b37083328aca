"""/etc/dsv4/guard.json: what the hooks, the watchdog and the probes go by.

Read tolerantly: unknown keys are ignored and missing ones have the defaults below. A value of the
wrong kind is a finding that names the key; the caller decides whether to stop or to go on with the
defaults (the watchdog does: a broken file must not leave the machine unguarded).

Imports little on purpose: the watchdog locks every page it has into memory.
"""

import json
import math
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from dsv4 import layout


class BrokenGuard(ValueError):
    """guard.json is missing, is no JSON object, or holds a value of the wrong kind."""


@dataclass(frozen=True)
class Memory:
    """Thresholds: GiB, seconds, milliseconds. `device` is `cuda` or `cpu`."""

    device: str = "cuda"
    utilisation: float = 0.88
    gate_margin_gib: float = 1.5
    gate_wait_s: float = 120.0
    headroom_gib: float = 0.0
    """What must be left available once the engine has its share; 0 asks for nothing."""
    hard_floor_gib: float = 3.5
    soft_floor_gib: float = 5.0
    soft_samples: int = 5
    sample_ms: float = 100.0
    reaction_ms: float = 50.0
    lock_gib: float = 1.0
    spare_gib: float = 0.4
    term_grace_s: float = 5.0
    cache_drop: str = "auto"


@dataclass(frozen=True)
class Ready:
    """The one request that decides whether the engine serves."""

    timeout_s: float = 1800.0
    prompt: str = "The capital of France is"
    max_tokens: int = 8
    request_timeout_s: float = 120.0


@dataclass(frozen=True)
class Restarts:
    """How many automatic restarts may follow each other within a window."""

    limit: int = 3
    window_s: float = 7200.0


@dataclass(frozen=True)
class Readahead:
    """Whether and how far the weights are read ahead of a load."""

    enabled: bool = False
    window_gib: float = 8.0


@dataclass(frozen=True)
class Stop:
    """How a deliberate stop goes."""

    drain_s: float = 20.0


@dataclass(frozen=True)
class Liveness:
    """When a serving engine counts as hung."""

    enabled: bool = False
    interval_s: float = 60.0
    stall_s: float = 600.0


@dataclass(frozen=True)
class Question:
    """A prompt and what its answer must contain (any case)."""

    prompt: str = "The capital of France is"
    expect: tuple[str, ...] = ()
    max_tokens: int = 16
    chat: bool = False


@dataclass(frozen=True)
class Offers:
    """What the served model is meant to do, for `dsv4 verify`: images, tools, reasoning apart.

    `needle_tokens` is how long a prompt something is hidden in; 0 leaves that out.
    """

    vision: bool = False
    tool_parser: str = ""
    reasoning_parser: str = ""
    needle_tokens: int = 0


@dataclass(frozen=True)
class Guard:
    """The whole file."""

    unit: str = layout.UNIT
    user: str = layout.USER
    url: str = "http://127.0.0.1:8899"
    host: str = "127.0.0.1"
    port: int = 8899
    served_name: str = ""
    view: str = str(layout.VIEW_CURRENT)
    pack_root: str = str(layout.PACKS)
    allowed_networks: tuple[str, ...] = ()
    memory: Memory = field(default_factory=Memory)
    ready: Ready = field(default_factory=Ready)
    restarts: Restarts = field(default_factory=Restarts)
    readahead: Readahead = field(default_factory=Readahead)
    stop: Stop = field(default_factory=Stop)
    liveness: Liveness = field(default_factory=Liveness)
    questions: tuple[Question, ...] = ()
    offers: Offers = field(default_factory=Offers)

    @property
    def watchdog_unit(self) -> str:
        """Return the name of the unit that guards this one."""
        return f"{self.unit.removesuffix('.service')}-watchdog.service"

    @property
    def unguarded_unit(self) -> str:
        """Return the name of the unit that stops this one when it cannot be guarded."""
        return f"{self.unit.removesuffix('.service')}-unguarded.service"

    @property
    def readahead_unit(self) -> str:
        """Return the name of the unit that reads ahead of this one's load."""
        return f"{self.unit.removesuffix('.service')}-readahead.service"


Section = TypeVar(
    "Section", Memory, Ready, Restarts, Readahead, Stop, Liveness, Question, Offers, Guard
)


def typed(name: str, value: Any, default: Any) -> Any:
    """Return `value` as the default's kind; raise `BrokenGuard` with the key's name otherwise."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # JSON as Python reads it has NaN and Infinity, below which nothing ever falls
    if number and not 0 <= value < math.inf:
        raise BrokenGuard(f"{name}: must be a number from 0 on (got {value!r})")
    if isinstance(default, bool) and isinstance(value, bool):
        return value
    if isinstance(default, float) and number:
        return float(value)
    if isinstance(default, int) and not isinstance(default, bool) and number and value % 1 == 0:
        return int(value)
    if isinstance(default, str) and isinstance(value, str):
        return value
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(str(item) for item in value)
    raise BrokenGuard(f"{name}: must be {type(default).__name__} (got {value!r})")


def section(kind: type[Section], value: Any, name: str) -> Section:
    """Return one section, made of what the file holds and of the defaults."""
    if not isinstance(value, dict):
        raise BrokenGuard(f"{name}: must be an object (got {value!r})")
    known: dict[str, Any] = {}
    for entry in fields(kind):
        if entry.default is not MISSING and value.get(entry.name) is not None:
            known[entry.name] = typed(
                f"{name}.{entry.name}".lstrip("."), value[entry.name], entry.default
            )
    return kind(**known)


def parse(value: dict[str, Any]) -> Guard:
    """Return the guard's data; raise `BrokenGuard` for a value of the wrong kind."""
    asked = value.get("probe", {})
    questions = asked.get("questions", []) if isinstance(asked, dict) else None
    if not isinstance(questions, list):
        raise BrokenGuard(f"probe: must be an object with a list of questions (got {asked!r})")
    whole = section(Guard, {k: v for k, v in value.items() if k != "questions"}, "")
    known = {entry.name: getattr(whole, entry.name) for entry in fields(Guard)}
    known["memory"] = section(Memory, value.get("memory", {}), "memory")
    known["ready"] = section(Ready, value.get("ready", {}), "ready")
    known["restarts"] = section(Restarts, value.get("restarts", {}), "restarts")
    known["offers"] = section(Offers, value.get("offers", {}), "offers")
    known["readahead"] = section(Readahead, value.get("readahead", {}), "readahead")
    known["stop"] = section(Stop, value.get("stop", {}), "stop")
    known["liveness"] = section(Liveness, value.get("liveness", {}), "liveness")
    known["questions"] = tuple(
        section(Question, item, f"probe.questions[{index}]") for index, item in enumerate(questions)
    )
    return Guard(**known)


def read(path: Path = layout.GUARD_JSON) -> Guard:
    """Return the guard's data from a file; raise `BrokenGuard` when there is none to be had."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BrokenGuard(f"{path}: cannot be read ({error}); deploy again to write it") from error
    if not isinstance(value, dict):
        raise BrokenGuard(f"{path}: holds no object; deploy again to write it")
    try:
        return parse(value)
    except BrokenGuard as error:
        raise BrokenGuard(f"{path}: {error}; deploy again to write it") from error
