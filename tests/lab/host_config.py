"""What a lab machine takes over from the machine it runs on: mirrors, proxies, CAs, pip's settings.

Pure text in, text out. No mirror or index is named in this repository, so these are the only
source of one.
"""

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


# --- apt ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One archive of apt, as a one-line entry or a deb822 stanza names it."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str = ""


def parse_one_line(text: str) -> list[Source]:
    """Read a `sources.list`; source packages, comments and broken lines are left out."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)(?:\s+([^#]*))?", line)
        if match:
            options, uri, suite, components = match.groups()
            signed_by = re.search(r"signed-by=(\S+)", options or "", re.IGNORECASE)
            found.append(
                Source(
                    uri, suite, tuple((components or "").split()), signed_by[1] if signed_by else ""
                )
            )
    return found


def parse_deb822(text: str) -> list[Source]:
    """Read a `*.sources` file: one `Source` for each pair of URI and suite."""
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[key] = f"{fields.get(key, '')} {line.strip()}"
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split():
            continue
        if fields.get("enabled", "yes").lower() in {"no", "false", "0"}:
            continue
        found += [
            Source(
                uri,
                suite,
                tuple(fields.get("components", "").split()),
                fields.get("signed-by", ""),
            )
            for uri in fields.get("uris", "").split()
            for suite in fields.get("suites", "").split()
        ]
    return found


@dataclass(frozen=True)
class Archive:
    """A Debian mirror, and the security archive that goes with it where one is known."""

    mirror: str
    security: str | None = None

    def sources_list(self, suite: str) -> str:
        """Return the `sources.list` of a machine that runs `suite`."""
        lines = [
            f"deb {self.mirror} {suite} main",
            f"deb {self.mirror} {suite}-updates main",
        ]
        if self.security:
            lines.append(f"deb {self.security} {suite}-security main")
        return "\n".join(lines) + "\n"


_RELEASES = ("bullseye", "bookworm", "trixie", "forky", "duke", "sid")
_ALIASES = ("oldoldstable", "oldstable", "stable", "testing", "unstable")
_SUITES = frozenset(_RELEASES + _ALIASES)


def debian_archive(sources: Iterable[Source]) -> Archive | None:
    """Pick Debian's own archive out of a Debian host's sources.

    Other vendors publish suites called after Debian's releases too, so the likeliest entry wins:
    one that also has `-updates`, is signed by Debian's keyring, or lies at `/debian`.
    """
    everything = [s for s in sources if "main" in s.components and _fetchable(s.uri)]
    updated = {s.uri for s in everything if s.suite.endswith("-updates")}

    def likeliness(source: Source) -> int:
        path = urlsplit(source.uri).path.rstrip("/")
        return (
            4 * (source.uri in updated)
            + 2 * ("debian-archive-keyring" in source.signed_by)
            + path.endswith("/debian")
        )

    mirrors = [s for s in everything if s.suite in _SUITES and likeliness(s)]
    if not mirrors:
        return None
    security = next((s.uri for s in everything if re.search(r"[a-z]-security$", s.suite)), None)
    return Archive(max(mirrors, key=likeliness).uri.rstrip("/"), security and security.rstrip("/"))


def _fetchable(uri: str) -> bool:
    return urlsplit(uri).scheme in {"http", "https", "file"}


_APT_KEPT = re.compile(
    r"Acquire::(?:(?:http|https|ftp)::(?:[^:\s]+::)?(?:Proxy|CaInfo|Verify-Peer|Verify-Host)"
    r"|Check-Valid-Until|Check-Date|Retries|ForceIPv[46])\s+\"[^\"]*\";",
    re.IGNORECASE,
)


def apt_settings(dump: str) -> str:
    """Keep what reaching the mirror needs from `apt-config dump`: proxies, CAs, date checks."""
    lines = [line.strip() for line in dump.splitlines() if _APT_KEPT.fullmatch(line.strip())]
    lines = [re.sub(r'(?i)(::CaInfo\s+)"[^"]*"', rf'\1"{CA_BUNDLE}"', line) for line in lines]
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


# --- certificates ---------------------------------------------------------------------------------

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)


def certificates(bundle: str) -> list[str]:
    """Return the base64 bodies of a PEM bundle, without white space, in order."""
    return ["".join(match[1].split()) for match in _PEM.finditer(bundle)]


def extra_certificates(host_bundle: str, machine_bundle: str) -> list[str]:
    """Return, as PEM, what the host trusts and a fresh machine does not."""
    known = set(certificates(machine_bundle))
    extra = [body for body in dict.fromkeys(certificates(host_bundle)) if body not in known]
    return [
        "-----BEGIN CERTIFICATE-----\n"
        + "".join(f"{body[at : at + 64]}\n" for at in range(0, len(body), 64))
        + "-----END CERTIFICATE-----\n"
        for body in extra
    ]


# --- environment ----------------------------------------------------------------------------------


def environment(env: Mapping[str, str], own_cas: bool) -> dict[str, str]:
    """Return the variables that every process of the machine gets.

    Proxies are taken over; the loopback hub must never go through one. With CAs of the host's own,
    programs that bring their CA list along are pointed at the system's bundle.
    """
    found: dict[str, str] = {}
    for name in PROXY_NAMES:
        value = env.get(name) or env.get(name.upper())
        if value:
            found[name] = found[name.upper()] = value
    if found:
        bypass = [part for part in found.get("no_proxy", "").split(",") if part]
        bypass += [part for part in ("localhost", "127.0.0.1") if part not in bypass]
        found["no_proxy"] = found["NO_PROXY"] = ",".join(bypass)
    if own_cas:
        found |= {"SSL_CERT_FILE": CA_BUNDLE, "REQUESTS_CA_BUNDLE": CA_BUNDLE}
    return found


# --- pip ------------------------------------------------------------------------------------------


def pip_options(config_list: str) -> dict[str, str]:
    """Read `pip config list`: each option once, in pip's own order of precedence."""
    ranked: dict[str, tuple[int, str]] = {}
    ranks = {":env:": 2, "install": 1, "global": 0}
    for line in config_list.splitlines():
        match = re.fullmatch(r"(:env:|install|global)\.([a-z-]+)=(.*)", line.strip())
        if not match:
            continue
        section, option, text = match.groups()
        try:
            value = str(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            continue
        if ranks[section] >= ranked.get(option, (-1, ""))[0]:
            ranked[option] = (ranks[section], value)
    return {option: value for option, (_, value) in ranked.items()}


@dataclass(frozen=True)
class Packages:
    """Where a machine's pip and uv look for packages, and what of the host they must see for it."""

    pip_conf: str
    uv_toml: str
    binds: tuple[str, ...]
    wheel_mirror: str | None


def _local(location: str) -> str | None:
    """Return the path that a `file:` URL or a plain path names, or None for anything remote."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return unquote(parts.path)
    return location if "://" not in location else None


def packages(options: Mapping[str, str], own_cas: bool, is_dir: Callable[[str], bool]) -> Packages:
    """Translate the host's pip settings for the machine.

    Directories of the host appear in the machine under the same path, read-only; what is not there
    is left out, like a path of somebody else's. Constraints stay behind: the lock decides versions.
    """
    binds: list[str] = []

    def index(location: str) -> str | None:
        path = _local(location)
        if path is None:
            return location
        folder = path.rstrip("/")
        # A relative path meant the directory of whoever called pip
        if not folder.startswith("/") or not is_dir(folder):
            return None
        # An index links to files that lie beside it
        binds.append(folder.removesuffix("/simple") or folder)
        return location

    def each(option: str) -> list[str]:
        return [kept for word in options.get(option, "").split() if (kept := index(word))]

    primary = index(options["index-url"]) if options.get("index-url") else None
    extra = each("extra-index-url")
    links = each("find-links")
    trusted = options.get("trusted-host", "").split()
    no_index = options.get("no-index", "").lower() in {"1", "true", "yes", "on"}

    pip: list[tuple[str, str]] = []
    uv: list[str] = []
    if primary:
        pip.append(("index-url", primary))
        uv.append(f"index-url = {_toml(primary)}")
    if extra:
        pip.append(("extra-index-url", " ".join(extra)))
        uv.append(f"extra-index-url = {_toml_list(extra)}")
        # pip looks at all indexes at once; uv would stop at the first that knows the name
        uv.append('index-strategy = "unsafe-best-match"')
    if links:
        pip.append(("find-links", " ".join(links)))
        uv.append(f"find-links = {_toml_list(links)}")
    if trusted:
        pip.append(("trusted-host", " ".join(trusted)))
        uv.append(f"allow-insecure-host = {_toml_list(trusted)}")
    if no_index:
        pip.append(("no-index", "true"))
        uv.append("no-index = true")
    if "default-timeout" in options or "timeout" in options:
        pip.append(("timeout", options.get("timeout") or options["default-timeout"]))
    if own_cas:
        pip.append(("cert", CA_BUNDLE))
        uv.append("system-certs = true")

    mirrors = [path for word in links if (path := _local(word))]
    return Packages(
        pip_conf="[global]\n" + "".join(f"{key} = {value}\n" for key, value in pip) if pip else "",
        uv_toml="".join(f"{line}\n" for line in uv),
        binds=tuple(dict.fromkeys(binds)),
        wheel_mirror=mirrors[0] if mirrors else None,
    )


def _toml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _toml_list(words: Iterable[str]) -> str:
    return "[" + ", ".join(_toml(word) for word in words) + "]"
