"""The Hub as the fetcher sees it: which commit, which files, with which hashes, and may we.

huggingface_hub does the talking (API, credentials, proxies, certificates); here its many ways to
fail become one sentence for a person, and one bit: does trying again help?
"""

import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import httpx2
    import huggingface_hub

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
TEMPORARY: Final = frozenset({408, 425, 429})
"""Besides these, whatever a server says is its own fault (500 and above)."""
TOO_MANY, PROXY_LOGIN, SIGN_IN = 429, 407, 511
LONGEST_WAIT_S: Final = 3600.0
LIBRARY: Final = "dsv4"
QUOTES: Final = frozenset("'\"`\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb")

PASSED_ON: Final = frozenset(
    ["http_proxy", "https_proxy", "no_proxy", "all_proxy", "ssl_cert_file", "ssl_cert_dir"]
)
"""What a download's description may set for the transfer: how to reach the network."""


class Refused(Exception):
    """The hub's answer will not change by asking again; a person has to do something."""


class Unreachable(Exception):
    """Nothing usable came back this time; trying again later may help."""

    def __init__(self, message: str, wait_s: float | None = None, *, crowded: bool = False) -> None:
        """`wait_s` is how long the hub asked us to wait, `crowded` that we ask too much of it."""
        super().__init__(message)
        self.wait_s, self.crowded = wait_s, crowded


@dataclass(frozen=True)
class Remote:
    """One file of a commit: large ones are known by SHA-256, small ones by their git blob."""

    name: str
    size: int
    sha256: str | None
    blob_sha1: str | None

    @property
    def identity(self) -> str:
        """The hash the file is known by."""
        return self.sha256 or self.blob_sha1 or "unknown"


class Answer(Protocol):
    """The part of a response that decides what went wrong."""

    @property
    def status_code(self) -> int: ...  # noqa: D102
    @property
    def headers(self) -> Mapping[str, str]: ...  # noqa: D102


def root_cause(error: BaseException) -> BaseException:
    """Return the error at the bottom of a chain, which is the one that tells."""
    seen = {id(error)}
    while (below := error.__cause__ or error.__context__) and id(below) not in seen:
        seen.add(id(below))
        error = below
    return error


def innermost(error: BaseException) -> str:
    """Return why the network failed, in words that say where to look."""
    cause = root_cause(error)
    text = str(cause) or type(cause).__name__
    if isinstance(cause, socket.gaierror):
        return f"its name has no address here ({text}); check DNS, or the spelling"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: {cause.verify_message}; {certificate_advice(cause.verify_code)}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {text}; a plain http:// server or a proxy answers there"
    if isinstance(cause, TimeoutError):
        return f"no answer in time ({text})"
    if "407" in text:
        return f"the proxy wants a user and a password ({text})"
    return text


NOT_YET_VALID, EXPIRED, OTHER_NAME = 9, 10, 62
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, _CERT_HAS_EXPIRED and _HOSTNAME_MISMATCH."""


def certificate_advice(code: int) -> str:
    """Return what to look at when a certificate is refused."""
    if code in {NOT_YET_VALID, EXPIRED}:
        clock = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        return f"this machine's clock says {clock} UTC: set it right (timedatectl)"
    if code == OTHER_NAME:
        return "another server answers under this name: a proxy, or a wrong address"
    return "whoever signed it is unknown here: name its file in hub_ca_file if that is your proxy"


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Return the seconds a hub asks to wait, by Retry-After or its own rate-limit header."""
    value = headers.get("Retry-After", "").strip()
    if not value:
        match = re.search(r"\bt\s*=\s*(\d+)", headers.get("RateLimit", ""))
        value = match[1] if match else ""
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return min(float(value), LONGEST_WAIT_S)
    try:
        until = parsedate_to_datetime(value)
    except ValueError:
        return None
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    passed = (until - (now or datetime.now(UTC))).total_seconds()
    return min(max(passed, 0.0), LONGEST_WAIT_S)


def clean_token(text: str, source: str) -> str | None:
    """Return a token without the blanks and line ends that a copy brings along; None for none.

    Raises `Refused`, without showing it, when what is left cannot be one: the hub's own answer to
    such a token names everything but the reason.
    """
    token = text.strip("\ufeff \t\r\n\0")
    if not token:
        return None
    if token[0] in QUOTES or token[-1] in QUOTES:
        fault = "has quotes around it"
    elif "=" in token or token.lower().startswith("bearer"):
        fault = "has more than the token in it (a name, or Bearer)"
    elif len(token.split()) > 1:
        fault = "has a blank or a line end inside"
    elif not token.isascii() or not token.isprintable():
        fault = "has letters no token has"
    else:
        return token
    raise Refused(f"{source}: {fault}; give the token alone, as the hub shows it (hf_...)")


def explain(answer: Answer, repo_id: str, revision: str, endpoint: str, token: bool) -> Exception:
    """Return what an error status means, and whether asking again helps."""
    status, code = answer.status_code, answer.headers.get("X-Error-Code")
    page = f"{endpoint}/{repo_id}"
    if status == SIGN_IN:
        return Unreachable(f"{endpoint}: this network wants you to sign in first (status {status})")
    if status in TEMPORARY or status >= 500:
        words = "too many requests" if status == TOO_MANY else f"status {status}"
        wait = retry_after(answer.headers)
        told = f"; it asks to wait {wait:.0f} s" if wait is not None else ""
        return Unreachable(f"{endpoint}: {words}{told}", wait, crowded=status == TOO_MANY)
    if status == PROXY_LOGIN:
        return Refused(f"{endpoint}: the proxy on the way wants a user and a password")
    if code == "GatedRepo" and status == 403:
        return Refused(
            f"{repo_id}: the token is good, but its account has not accepted the terms of this"
            f" repository; open {page}, accept them, and run again"
        )
    if code == "GatedRepo":
        return Refused(
            f"{repo_id}: this repository is gated and no token was given; accept its terms at"
            f" {page} and give a token that may read it (HF_TOKEN)"
        )
    if code == "RevisionNotFound":
        return Refused(f"{repo_id}: has no revision {revision}; correct it, or remove its pin")
    if code == "EntryNotFound":
        return Refused(f"{repo_id}: revision {revision} has no such file")
    if status == 401 and token and code != "RepoNotFound":
        return Refused(
            f"{endpoint}: does not accept the token (mistyped, expired or revoked); make a new one"
            " that may read this repository, and give it as HF_TOKEN"
        )
    if status == 403:
        words = answer.headers.get("X-Error-Message", "forbidden")
        return Refused(f"{repo_id}: the token may not read it ({words}); give one that may")
    if status == 404 and not code and "html" in answer.headers.get("Content-Type", ""):
        return Refused(f"{endpoint}: answers with a web page, not as a hub; correct the address")
    if code == "RepoNotFound" or status in {401, 404}:
        who = "or the token's account may not see it" if token else "or it is private: give a token"
        return Refused(f"{repo_id}: no such repository at {endpoint}, {who}")
    return Refused(f"{endpoint}: answered with status {status} for {repo_id}")


@dataclass(frozen=True)
class Hub:
    """One endpoint, as one account or none."""

    endpoint: str
    token: str | None
    timeout_s: float

    @cached_property
    def api(self) -> "huggingface_hub.HfApi":
        """The library, made ready: a default timeout, and nothing of the serving environment."""
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"):
            os.environ.pop(name, None)
        os.environ["HF_HUB_DISABLE_XET"] = "1"
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        import httpx2
        import huggingface_hub

        huggingface_hub.set_client_factory(
            lambda: httpx2.Client(follow_redirects=True, timeout=self.timeout_s)
        )
        return huggingface_hub.HfApi(
            endpoint=self.endpoint, token=self.token or False, library_name=LIBRARY
        )

    @property
    def session(self) -> "httpx2.Client":
        """The library's HTTP client, so that its proxies and certificates are ours."""
        import huggingface_hub

        assert self.api
        return huggingface_hub.get_session()

    def headers(self) -> dict[str, str]:
        """Return what identifies us on a request of our own."""
        # Documented there, but not marked as exported
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        known = build_hf_headers(token=self.token or False, library_name=LIBRARY)
        return {**known, "Accept-Encoding": "identity"}

    def url(self, repo_id: str, revision: str, name: str) -> str:
        """Return where a file is."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(repo_id, name, revision=revision, endpoint=self.endpoint)

    def ask(self, repo_id: str, revision: str, question: Any) -> Any:
        """Return the answer to one question, or raise what its failure means."""
        import httpx2
        from huggingface_hub import errors

        try:
            return question()
        except errors.HFValidationError as error:
            raise Refused(f"{repo_id}: is no repository name ({error})") from error
        except errors.HfHubHTTPError as error:
            raise self.explain(error.response, repo_id, revision) from error
        except (httpx2.HTTPError, OSError) as error:
            raise Unreachable(f"{self.endpoint}: cannot be reached: {innermost(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable(
                f"{self.endpoint}: answers, but not as a hub does (a proxy or a sign-in page?):"
                f" {innermost(error)}"
            ) from error

    def explain(self, answer: Answer, repo_id: str, revision: str) -> Exception:
        """Return what an error status of this hub means."""
        return explain(answer, repo_id, revision, self.endpoint, bool(self.token))

    def resolve(self, repo_id: str, revision: str) -> str:
        """Return the commit that a branch, a tag or a commit stands for."""
        info = self.ask(
            repo_id,
            revision,
            lambda: self.api.model_info(repo_id, revision=revision, timeout=self.timeout_s),
        )
        if not COMMIT.fullmatch(info.sha or ""):
            raise Unreachable(f"{self.endpoint}: gave no commit for {repo_id} ({info.sha})")
        return str(info.sha)

    def files(self, repo_id: str, commit: str) -> list[Remote]:
        """Return every file of a commit; a name that would leave the directory is refused.

        One request without the library's own retries: how long to be patient is ours to say.
        """
        info = self.ask(
            repo_id,
            commit,
            lambda: self.api.model_info(
                repo_id, revision=commit, files_metadata=True, timeout=self.timeout_s
            ),
        )
        found = [
            Remote(
                row.rfilename,
                row.lfs.size if row.lfs else row.size,
                row.lfs.sha256 if row.lfs else None,
                None if row.lfs else row.blob_id,
            )
            for row in info.siblings or []
        ]
        check_names(repo_id, [remote.name for remote in found])
        for remote in found:
            if not isinstance(remote.size, int) or not (remote.sha256 or remote.blob_sha1):
                raise Refused(
                    f"{self.endpoint}: gives no size or hash of {remote.name}; without them"
                    " nothing can be verified, use a hub that does"
                )
        return sorted(found, key=lambda remote: remote.name)

    def check_access(self, repo_id: str, commit: str, remote: Remote) -> None:
        """Raise unless this account may read files; a listing is public even of a gated one."""
        from huggingface_hub import get_hf_file_metadata

        url = self.url(repo_id, commit, remote.name)
        self.ask(
            repo_id,
            commit,
            lambda: get_hf_file_metadata(
                url, token=self.token or False, timeout=self.timeout_s, endpoint=self.endpoint
            ),
        )


def check_names(repo_id: str, names: Sequence[str]) -> None:
    """Refuse a listing that is empty, or that would write anywhere but below the pack."""
    if not names:
        raise Refused(f"{repo_id}: holds no files at this revision")
    for name in names:
        if any(part in {"", ".", ".."} for part in name.split("/")):
            raise Refused(f"{repo_id}: names a file {name!r}; nothing was fetched")


def network_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of a description's environment that concern the network, checked."""
    unknown = sorted(name for name in values if name.lower() not in PASSED_ON)
    if unknown:
        raise Refused(
            f"environment: {', '.join(unknown)} is not for the download to set;"
            f" it takes {', '.join(sorted(PASSED_ON))}"
        )
    return {name: str(value) for name, value in values.items()}
