"""Flags by release: every preset's are known to every route, and one that is not is refused."""

import pytest

from deploy import flags, presets, routes, settings

REMOTE = {
    "serve_host": "0.0.0.0",
    "serve_api_key": True,
    "serve_tls_cert": "/etc/ssl/a.crt",
    "serve_tls_key": "/etc/ssl/a.key",
    "serve_allowed_subnets": "10.0.0.0/8",
    "serve_media_domains": "example.org",
}
ROUTES = [route for route in routes.ALL if not route.from_owner]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_knows_the_flags_of_every_preset(route: routes.Route) -> None:
    """With everything on that adds one."""
    assert flags.known(route.engine.version) is not None
    for preset in presets.ALL:
        if preset.accelerator == route.accelerator:
            data = {"route": route.name, "preset": preset.name, **REMOTE}
            given = settings.load(data).serve_yaml()
            assert flags.unknown(route.engine.version, given) == []


def test_a_flag_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any machine is touched, with the release and the flag."""
    own = settings.Settings.serve_yaml
    monkeypatch.setattr(
        settings.Settings, "serve_yaml", lambda it: {**own(it), "watchdog-config": "{}"}
    )
    with pytest.raises(settings.SettingsError) as caught:
        settings.load({"route": "stable"})
    assert caught.value.faults == (
        "route: stable has vLLM 0.30.0, which does not know --watchdog-config; leave out the"
        " setting it comes from, or choose another route",
    )
    settings.load({"route": "latest"})


def test_what_is_known_of_a_version() -> None:
    """A release knows its own; a build between two what both have; of others nobody can say."""
    assert "max-num-queued-reqs" in (flags.known("0.29.0") or ())
    assert "max-num-queued-reqs" not in (flags.known("0.28.0") or ())
    between = flags.known("0.28.1rc1.dev324+ga56654d6d")
    assert between is not None
    assert "max-num-queued-reqs" not in between
    assert "enable-bf16x3-router-gemm" in between
    assert "max-model-len" in between
    for version in ("0.27.9", "0.34.0", "archived", ""):
        assert flags.known(version) is None
        assert flags.unknown(version, ["anything"]) == []
