"""Every way a hub fails becomes one sentence, and whether asking again helps."""

import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import huggingface_hub
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dsv4 import hub
from dsv4.hub import Hub, Refused, Unreachable


@dataclass(frozen=True)
class Reply:
    status_code: int
    headers: dict[str, str] = field(default_factory=dict)


def explain(status: int, token: bool = False, **headers: str) -> Exception:
    reply = Reply(status, {key.replace("_", "-"): value for key, value in headers.items()})
    return hub.explain(reply, "o/n", "r1", "https://hub.test", token)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (explain(401, X_Error_Code="GatedRepo"), "gated and no token was given"),
        (explain(403, token=True, X_Error_Code="GatedRepo"), "not accepted the terms"),
        (explain(401, token=True), "does not accept the token"),
        (explain(403, token=True, X_Error_Message="read scope"), "may not read it (read scope)"),
        (explain(401, X_Error_Code="RepoNotFound"), "or it is private: give a token"),
        (explain(401), "or it is private: give a token"),
        (explain(404, token=True, X_Error_Code="RepoNotFound"), "account may not see it"),
        (explain(404, X_Error_Code="RevisionNotFound"), "has no revision r1"),
        (explain(404, X_Error_Code="EntryNotFound"), "has no such file"),
        (explain(418), "status 418"),
        (explain(407), "the proxy on the way wants a user"),
        (explain(404, Content_Type="text/html"), "answers with a web page, not as a hub"),
    ],
)
def test_what_a_person_must_change_is_refused(error: Exception, words: str) -> None:
    assert isinstance(error, Refused)
    assert words in str(error)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 511, 520, 529])
def test_what_may_pass_is_tried_again(status: int) -> None:
    assert isinstance(explain(status), Unreachable)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "999999"}, hub.LONGEST_WAIT_S),
        ({"Retry-After": "2.5"}, 2.5),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT"}, 30.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:00:00 GMT"}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({}, None),
    ],
)
def test_the_wait_a_hub_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert hub.retry_after(headers, datetime(2026, 10, 21, 7, 28, tzinfo=UTC)) == seconds


def test_the_innermost_cause_is_the_one_told() -> None:
    inner = ConnectionRefusedError(111, "Connection refused")
    outer = RuntimeError("all attempts failed")
    outer.__cause__ = inner
    assert hub.innermost(outer) == "[Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("hf_abc", "hf_abc"),
        ("hf_abc\r\n", "hf_abc"),
        ("\ufeff  hf_abc\t\n", "hf_abc"),
        ("", None),
        (" \r\n", None),
    ],
)
def test_a_token_loses_what_a_copy_brings_along(text: str, token: str | None) -> None:
    assert hub.clean_token(text, "HF_TOKEN") == token


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"hf_abc"', "has quotes around it"),
        ("'hf_abc'", "has quotes around it"),
        ("\u201chf_abc\u201d", "has quotes around it"),
        ("HF_TOKEN=hf_abc", "more than the token"),
        ("Bearer hf_abc", "more than the token"),
        ("hf_abc\nhf_def", "a blank or a line end inside"),
        ("hf_\u0430bc", "letters no token has"),
        ("hf_a\x07c", "letters no token has"),
    ],
)
def test_what_cannot_be_a_token_is_refused_without_being_shown(text: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        hub.clean_token(text, "HF_TOKEN")
    assert "abc" not in str(caught.value)


# What the network does


def self_signed(directory: Path, begin: timedelta, end: timedelta) -> Path:
    """Write a key and a certificate for 127.0.0.1, valid between these times from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lab")])
    moment = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(moment + begin)
        .not_valid_after(moment + end)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = directory / "server.pem"
    path.write_bytes(key.private_bytes(pem, form, plain) + certificate.public_bytes(pem))
    return path


@contextlib.contextmanager
def tls_server(certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = listener.accept()
                    with contextlib.suppress(OSError), line:
                        context.wrap_socket(line, server_side=True).close()

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("begin", "end", "trusted", "words"),
    [
        (-DAY, DAY, False, "whoever signed it is unknown here"),
        (DAY, 2 * DAY, True, "UTC: set it right"),
        (-2 * DAY, -DAY, True, "UTC: set it right"),
    ],
)
def test_a_certificate_that_is_refused_says_where_to_look(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begin: timedelta,
    end: timedelta,
    trusted: bool,
    words: str,
) -> None:
    certificate = self_signed(tmp_path, begin, end)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with (
        tls_server(certificate) as endpoint,
        pytest.raises(Unreachable, match=words),
        fresh_library(),
    ):
        Hub(endpoint, None, 5).resolve("o/n", "main")


@contextlib.contextmanager
def fresh_library() -> Iterator[None]:
    """Have the library make its client anew: it reads certificates once."""
    huggingface_hub.close_session()
    try:
        yield
    finally:
        huggingface_hub.close_session()


def test_a_plain_server_behind_https_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        contextlib.ExitStack() as after,
    ):

        def answer() -> None:
            line, _ = listener.accept()
            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            line.close()

        thread = threading.Thread(target=answer)
        thread.start()
        after.callback(thread.join)
        with pytest.raises(Unreachable, match="a plain http:// server or a proxy answers"):
            Hub(f"https://127.0.0.1:{listener.getsockname()[1]}", None, 5).resolve("o/n", "main")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "check DNS, or the spelling"),
        (TimeoutError("timed out"), "no answer in time"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (OSError(113, "No route to host"), "No route to host"),
        (OSError("407 Proxy Authentication Required"), "the proxy wants a user"),
    ],
)
def test_the_innermost_cause_says_where_to_look(error: Exception, words: str) -> None:
    outer = RuntimeError("all attempts failed")
    outer.__cause__ = error
    assert words in hub.innermost(outer)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "a/./b", "a/.."])
def test_a_name_that_leaves_the_pack_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="nothing was fetched"):
        hub.check_names("o/n", ["config.json", name])


def test_only_network_settings_are_passed_on() -> None:
    assert hub.network_settings({"HTTPS_PROXY": "http://p:1"}) == {"HTTPS_PROXY": "http://p:1"}
    with pytest.raises(Refused, match="LD_PRELOAD"):
        hub.network_settings({"LD_PRELOAD": "x.so"})
