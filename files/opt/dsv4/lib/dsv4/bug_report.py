"""One file for a bug report: what doctor said, the live picture, settings, receipts, logs, masked.

Masked is what could let somebody in or tell who somebody is: keys and tokens (by their look, by
what stands before them, and this machine's own by value), addresses, names of hosts and users,
mail addresses, and what people asked the model. The same name is masked alike all through, so that
a reader can still tell two machines apart. Better one word too many than one too few.
"""

import ipaddress
import json
import platform
import pwd
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from dsv4 import layout, machine, receipt, store
from dsv4.findings import Finding
from dsv4.journal import Line

LINES: Final = 4000
"""What is kept of the logs: the newest."""

GONE: Final = "<masked>"

SECRETS: Final = (
    # Keys and tokens by their look
    r"\bhf_[A-Za-z0-9]{6,}",
    r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{12,}",
    r"\b(?:ghp|gho|ghs|ghr|github_pat)_[A-Za-z0-9_]{12,}",
    r"\bAKIA[0-9A-Z]{12,}",
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+){1,2}",
    r"\bGPU-[0-9a-fA-F-]{16,}",
    r"\b(?:ssh-(?:rsa|ed25519)|ecdsa-sha2-\S+) AAAA\S+",
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
)
PEM: Final = re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL)
BEFORE: Final = re.compile(
    # A name that says what comes after it; JSON, YAML, environment, headers, options
    r"(?P<name>(?i:\b[\w-]*(?:api[_-]?key|token|passw(?:or)?d|passphrase|secret|credential"
    r"|authorization|cookie|signature)[\w-]*)[\"']?(?:\s*[:=]\s*|\s+(?=[\"']?[A-Za-z0-9+/_-]{16,})))"
    r"(?P<value>(?i:(?:bearer|basic|token)\s+)?(?:\"[^\"]*\"|'[^']*'|[^\s,;&)}\]]+))"
)
NUMBERS: Final = re.compile(r"[\"']?-?[\d.]+[\"']?|[\"']?(?i:true|false|none|null)[\"']?")
"""What a counted token is: `max_tokens: 32768` is no secret."""

BEARER: Final = re.compile(r"(?i:\b(bearer|basic))\s+[A-Za-z0-9._~+/=-]{4,}")
CREDENTIALS: Final = re.compile(r"(?<=://)[^/\s@\"']+@")
QUERY: Final = re.compile(r"(?P<address>https?://[^\s?\"']+)\?[^\s\"']+")
ASKED: Final = re.compile(
    r"(?P<name>[\"']?\b(?:prompt|prompts|messages|content|input|text|answer|reasoning"
    r"|prompt_token_ids)\b[\"']?\s*[:=]\s*)(?P<value>[\"'\[{].*)"
)
SAYS: Final = re.compile(r"(?P<name>\b(?:says|answer to) )(?P<value>[\"'].*)")
MAC: Final = re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b")
ADDRESS: Final = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F:]*:[0-9a-fA-F:.]+)(?![\w.]*\w)"
)
HOME: Final = re.compile(r"(?P<root>/(?:home|Users)/)(?P<name>[^/\s:\"']+)")
PUBLIC: Final = frozenset({"localhost", "root", "dsv4", "dsv4-fetch", "nobody"})
SHORTEST: Final = 3
"""Names shorter than this would take parts of other words along."""


class Mask:
    """Masks text; one and the same thing gets one and the same mask."""

    def __init__(
        self, values: Iterable[str] = (), hosts: Iterable[str] = (), users: Iterable[str] = ()
    ) -> None:
        """Know these secrets by value, and these names."""
        self.values = sorted({v for v in values if len(v) >= SHORTEST}, key=len, reverse=True)
        self.names = {
            **{name: "host" for name in hosts if self.is_telling(name)},
            **{name: "user" for name in users if self.is_telling(name)},
        }
        self.known: dict[tuple[str, str], str] = {}

    @staticmethod
    def is_telling(name: str) -> bool:
        """Say whether a name is somebody's own."""
        return len(name) >= SHORTEST and name not in PUBLIC

    def named(self, kind: str, value: str) -> str:
        """Return the mask of a thing of this kind."""
        if (kind, value) not in self.known:
            number = sum(1 for known, _ in self.known if known == kind) + 1
            self.known[kind, value] = f"<{kind}-{number}>"
        return self.known[kind, value]

    def __call__(self, text: str) -> str:
        """Return the text masked."""
        for value in self.values:
            text = text.replace(value, GONE)
        text = PEM.sub(GONE, text)
        return "\n".join(self.line(line) for line in text.split("\n"))

    def line(self, text: str) -> str:
        """Return one line masked."""
        text = QUERY.sub(rf"\g<address>?{GONE}", text)
        text = CREDENTIALS.sub(f"{GONE}@", text)
        text = BEARER.sub(rf"\1 {GONE}", text)
        for look in SECRETS:
            text = re.sub(look, GONE, text)
        text = BEFORE.sub(self.valued, text)
        for pattern in (ASKED, SAYS):
            text = pattern.sub(rf"\g<name>{GONE}", text)
        text = MAC.sub(lambda found: self.named("mac", found[0].lower()), text)
        text = ADDRESS.sub(self.address, text)
        text = HOME.sub(self.home, text)
        for name, kind in self.names.items():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self.named(kind, name), text)
        return text

    def valued(self, found: re.Match[str]) -> str:
        """Return a name with its value masked, unless that is a number or a switch."""
        if NUMBERS.fullmatch(found["value"]):
            return found[0]
        return f"{found['name']}{GONE}"

    def address(self, found: re.Match[str]) -> str:
        """Return an address masked; loopback and wildcard tell nobody anything."""
        try:
            address = ipaddress.ip_address(found[0])
        except ValueError:
            return found[0]
        if address.is_loopback or address.is_unspecified:
            return found[0]
        return self.named("ip", str(address))

    def home(self, found: re.Match[str]) -> str:
        """Return the path of somebody's home without the name."""
        return f"{found['root']}{self.named('user', found['name'])}"


def own_mask() -> Mask:
    """Return a mask that knows this machine's secrets and names."""
    values = [(machine.read(path) or "").strip() for path in layout.CREDENTIALS.glob("*")]
    name = platform.node()
    users = [it.pw_name for it in pwd.getpwall() if 1000 <= it.pw_uid < 60000]
    hosts = [name, name.split(".")[0]]
    return Mask(values, hosts, users)


def sections(
    words: Sequence[str], live: Iterable[Finding], lines: Sequence[Line]
) -> list[tuple[str, str]]:
    """Return titles and texts of what goes into the file, unmasked."""
    found = [
        ("what doctor says", "\n".join(words)),
        ("the live picture", "\n".join(str(finding) for finding in live)),
    ]
    records = sorted(layout.WATCHDOG_RECORDS.glob("*.json"))[-3:]
    settings = (layout.SERVE_YAML, layout.GUARD_JSON, layout.ENVIRONMENT, layout.BUILD_JSON)
    found += [(str(path), machine.read(path) or "not readable") for path in (*settings, *records)]
    for kind in receipt.KINDS:
        newest, value = receipt.newest(kind)
        if newest is not None:
            found.append((newest.name, json.dumps(value, indent=1, ensure_ascii=False)))
    log = "\n".join(
        f"{line.boot} {line.at:.3f} {line.unit}: {line.text}" for line in lines[-LINES:]
    )
    return [*found, ("logs: boot, time, unit", log)]


def write(
    path: Path,
    words: Sequence[str],
    live: Iterable[Finding],
    lines: Sequence[Line],
    mask: Mask | None = None,
) -> None:
    """Write the file, readable by its owner only; raise OSError where that cannot be."""
    hide = mask or own_mask()
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    out = [f"dsv4 bug report, {when}, tools {Path(__file__).resolve().parent.name}"]
    for title, text in sections(words, live, lines):
        out += ["", f"== {title}", hide(text)]
    store.write_bytes(path, "\n".join(out).encode() + b"\n", 0o600)
