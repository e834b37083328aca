"""Every way a hub fails becomes one sentence, and whether asking again helps."""

from dataclasses import dataclass, field

import pytest

from dsv4 import hub
from dsv4.hub import Refused, Unreachable


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
    ],
)
def test_what_a_person_must_change_is_refused(error: Exception, words: str) -> None:
    assert isinstance(error, Refused)
    assert words in str(error)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    assert isinstance(explain(status), Unreachable)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "999999"}, hub.LONGEST_WAIT_S),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({}, None),
    ],
)
def test_the_wait_a_hub_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert hub.retry_after(headers) == seconds


def test_the_innermost_cause_is_the_one_told() -> None:
    inner = ConnectionRefusedError(111, "Connection refused")
    outer = RuntimeError("all attempts failed")
    outer.__cause__ = inner
    assert hub.innermost(outer) == "[Errno 111] Connection refused"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "a/./b", "a/.."])
def test_a_name_that_leaves_the_pack_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="nothing was fetched"):
        hub.check_names("o/n", ["config.json", name])


def test_only_network_settings_are_passed_on() -> None:
    assert hub.network_settings({"HTTPS_PROXY": "http://p:1"}) == {"HTTPS_PROXY": "http://p:1"}
    with pytest.raises(Refused, match="LD_PRELOAD"):
        hub.network_settings({"LD_PRELOAD": "x.so"})
