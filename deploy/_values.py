"""The kinds of values a setting can have: read leniently, checked strictly, described in words.

A value comes from a Python file (typed) or from `--data` on the command line, where pyinfra turns
what looks like JSON into a value and leaves the rest as text. So text that spells a value is taken
for it, and nothing else is: no rounding, no booleans for numbers, no digits outside ASCII.
"""

import difflib
import ipaddress
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from annotated_types import Ge, Le
from pydantic import AfterValidator, BeforeValidator
from pydantic.fields import FieldInfo

LONGEST: Final = 60
"""What is shown of a value in an error: enough to find it, and one line."""

INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")
DECIMAL: Final = re.compile(
    r"[+-]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][+-]?[0-9]{1,3})?"
)
COMMA: Final = re.compile(r"([+-]?[0-9]{0,18}),([0-9]{1,18})")
WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Must:
    """How an error finishes the words "must be", where type and range do not say it."""

    text: str


class Hint(ValueError):
    """A value is wrong; the text, if any, says how it was probably meant."""


def shown(value: object) -> str:
    """Return a value as an error shows it: in one short printable line, whatever it is."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # an object's own repr may do anything
        return f"a {type(value).__name__}"
    if not text.isprintable() or text != text.strip() or not text:
        text = repr(text[: LONGEST * 2])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def near(word: str, known: Iterable[str]) -> str:
    """Return a question for the likeliest meaning of a misspelt word, or nothing."""
    close = difflib.get_close_matches(word[:LONGEST].lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def as_int(value: object) -> int:
    """Read a whole number."""
    if isinstance(value, str) and INTEGER.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Hint(comma(value))


def as_float(value: object) -> float:
    """Read a finite number."""
    if isinstance(value, str) and DECIMAL.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            raise Hint("") from None
        if math.isfinite(number):
            return number
    raise Hint(comma(value))


def comma(value: object) -> str:
    """Return the hint for a number written with a decimal comma."""
    match = COMMA.fullmatch(value.strip()) if isinstance(value, str) else None
    return f"write {match[1] or '0'}.{match[2]} with a point" if match else ""


def as_fraction(value: object) -> float:
    """Read a share of one; a percentage is refused, with what it would be."""
    number = as_float(value)
    if 1 < number <= 100:
        raise Hint(f"write {number / 100:g} for {number:g} %")
    return number


def as_bool(value: object) -> bool:
    """Read a switch."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in WORDS:
        return WORDS[value.strip().lower()]
    raise Hint("")


def as_text(value: object) -> str:
    """Read text; a number on the command line was text too."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**45:
        return str(value)
    if isinstance(value, str):
        return value
    raise Hint("")


def as_tuple(value: object) -> tuple[object, ...]:
    """Read a list, or the words of a comma separated text."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    raise Hint("")


def as_path(value: object) -> Path:
    """Read an absolute path that needs no quoting, in a unit file as little as in a shell."""
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        raise Hint("")
    if value.startswith("~"):
        raise Hint("write the home directory out")
    if not value.startswith("/"):
        raise Hint("it starts with /")
    if len(value) > 1024 or not re.fullmatch(r"[A-Za-z0-9._+@/-]+", value):
        raise Hint("")
    if ".." in PurePosixPath(value).parts:
        raise Hint("without ..")
    return Path(value)


def matching(pattern: str) -> Callable[[str], str]:
    """Return a check of text against a pattern."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise Hint("")
        return value

    return check


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return a check that text is a known name."""
    names = list(known)

    def check(value: str) -> str:
        if value not in names:
            raise Hint(near(value, names))
        return value

    return check


def address(value: str) -> str:
    """Check an address to listen on; a name could mean another address tomorrow."""
    try:
        found = ipaddress.ip_address("127.0.0.1" if value == "localhost" else value)
    except ValueError:
        raise Hint("") from None
    if "%" in value:
        raise Hint("without a zone")
    return str(found)


def networks(value: tuple[str, ...]) -> tuple[str, ...]:
    """Check networks in CIDR form."""
    found = []
    for item in value:
        try:
            found.append(str(ipaddress.ip_network(item)))
        except ValueError as error:
            raise Hint(str(error) if "host bits" in str(error) else "") from None
    return tuple(found)


def url(value: str) -> str:
    """Check the address of a hub: scheme, host, port, nothing that hides a credential."""
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        raise Hint("") from None
    plain = re.fullmatch(r"[A-Za-z0-9.:/\[\]_-]{1,300}", value)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not plain:
        raise Hint("")
    return value.rstrip("/")


def place(value: str) -> str:
    """Check that a place is an address or an absolute path."""
    return url(value) if value.startswith(("http://", "https://")) else str(as_path(value))


Whole = Annotated[int, BeforeValidator(as_int)]
Number = Annotated[float, BeforeValidator(as_float)]
Fraction = Annotated[float, BeforeValidator(as_fraction)]
Switch = Annotated[bool, BeforeValidator(as_bool)]
Text = Annotated[str, BeforeValidator(as_text)]
AbsolutePath = Annotated[Path, BeforeValidator(as_path), Must("an absolute path without spaces")]
Address = Annotated[Text, AfterValidator(address), Must("an IP address")]
Url = Annotated[
    Text,
    AfterValidator(url),
    Must("an address that starts with http:// or https://, without a user, a query or a fragment"),
]
Networks = Annotated[
    tuple[Text, ...],
    BeforeValidator(as_tuple),
    AfterValidator(networks),
    Must("a list of networks such as 192.168.1.0/24"),
]
Place = Annotated[
    Text,
    AfterValidator(place),
    Must("an absolute path without spaces, or an address that starts with http:// or https://"),
]
Domains = Annotated[
    tuple[
        Annotated[
            Text,
            AfterValidator(
                matching(r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.(?!$)|$))+")
            ),
        ],
        ...,
    ],
    BeforeValidator(as_tuple),
    Must("a list of domain names"),
]
Files = Annotated[
    tuple[Annotated[Text, AfterValidator(matching(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}"))], ...],
    BeforeValidator(as_tuple),
    Must("a list of files inside the pack, such as tool.py"),
]
Sizes = Annotated[
    tuple[Annotated[Whole, Ge(1), Le(1024)], ...],
    BeforeValidator(as_tuple),
    Must("a list of whole numbers from 1 to 1024"),
]
Counts = Annotated[
    tuple[Annotated[Whole, Ge(1), Le(1048576)], ...],
    BeforeValidator(as_tuple),
    Must("a list of whole numbers from 1 to 1048576"),
]
Wheel = Annotated[
    Text,
    AfterValidator(
        matching(
            r"(https?://[A-Za-z0-9.:\[\]-]+)?/[A-Za-z0-9._/%+~-]{1,400}\.whl#sha256=[0-9a-f]{64}"
        )
    ),
    Must(
        "an address or an absolute path of a .whl, followed by #sha256= and its hash in lower case"
    ),
]
RuntimeId = Annotated[
    Text,
    AfterValidator(matching(r"[a-z]+-[0-9a-f]{12}")),
    Must("the ID of a runtime, a route's name and 12 hexadecimal digits"),
]
Commit = Annotated[
    Text, AfterValidator(matching(r"[0-9a-f]{40}")), Must("a commit of 40 hexadecimal digits")
]
Name = Annotated[
    Text,
    AfterValidator(matching(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")),
    Must("a name of letters, digits and . _ : -"),
]


def flat(annotation: Any, metadata: Iterable[Any] = ()) -> tuple[Any, list[Any]]:
    """Return the type inside an optional or annotated one, and everything said about it."""
    said = list(metadata)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return flat(inner, [*more, *said])
    if origin in {Union, UnionType}:
        inner = next(arg for arg in get_args(annotation) if arg is not type(None))
        return flat(inner, said)
    return annotation, said


def wanted(field: FieldInfo) -> str:
    """Return what a setting must be, in words that follow "must be"."""
    kind, said = flat(field.annotation, field.metadata)
    for item in reversed(said):
        if isinstance(item, Must):
            return item.text
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    low = next((item.ge for item in said if isinstance(item, Ge)), None)
    high = next((item.le for item in said if isinstance(item, Le)), None)
    if kind is int:
        return f"a whole number from {low} to {high}"
    if kind is float:
        return f"between {low:g} and {high:g}"
    return "true or false" if kind is bool else "text"
