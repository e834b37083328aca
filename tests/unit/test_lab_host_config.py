"""What a lab machine takes over from its host."""

import pytest

from tests.lab import host_config
from tests.lab.host_config import Archive, Source

DEB822 = """\
Types: deb deb-src
# a comment between fields
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://off.test/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://sources.test/debian
Suites: bookworm
Components: main
"""

ONE_LINE = """\
# deb http://comment.test/debian bookworm main
deb-src http://sources.test/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/vendor.gpg] https://vendor.test/apt bookworm main
deb http://mirror.test/debian bookworm main non-free-firmware # by the installer
deb http://mirror.test/debian/ bookworm-updates main
deb http://security.test/debian-security bookworm-security main
"""


def test_deb822_gives_one_source_for_each_suite() -> None:
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert host_config.parse_deb822(DEB822) == [
        Source("http://mirror.test/debian", "bookworm", ("main", "contrib"), keyring),
        Source("http://mirror.test/debian", "bookworm-updates", ("main", "contrib"), keyring),
        Source("http://mirror.test/debian-security", "bookworm-security", ("main",), keyring),
    ]


def test_one_line_sources_keep_their_key_and_drop_what_is_no_package_source() -> None:
    found = host_config.parse_one_line(ONE_LINE)
    assert [source.uri for source in found] == [
        "https://vendor.test/apt",
        "http://mirror.test/debian",
        "http://mirror.test/debian/",
        "http://security.test/debian-security",
    ]
    assert found[0].signed_by == "/usr/share/keyrings/vendor.gpg"
    assert found[1].components == ("main", "non-free-firmware")


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (
            host_config.parse_deb822(DEB822),
            Archive("http://mirror.test/debian", "http://mirror.test/debian-security"),
        ),
        (
            host_config.parse_one_line(ONE_LINE),
            Archive("http://mirror.test/debian", "http://security.test/debian-security"),
        ),
        ([Source("https://vendor.test/apt", "bookworm", ("main",))], None),
        ([Source("https://docker.test/linux/debian", "bookworm", ("stable",))], None),
        ([Source("cdrom:[Debian]/debian", "bookworm", ("main",))], None),
        (
            [Source("http://ours.test/debian/", "trixie", ("main",))],
            Archive("http://ours.test/debian"),
        ),
        ([], None),
    ],
)
def test_the_debian_archive_is_told_from_other_vendors(
    sources: list[Source], expected: Archive | None
) -> None:
    assert host_config.debian_archive(sources) == expected


def test_sources_list_has_security_only_where_it_is_known() -> None:
    assert Archive("http://a.test/debian").sources_list("bookworm") == (
        "deb http://a.test/debian bookworm main\ndeb http://a.test/debian bookworm-updates main\n"
    )
    assert "http://s.test bookworm-security main" in Archive(
        "http://a.test/debian", "http://s.test"
    ).sources_list("bookworm")


def test_apt_settings_keep_proxies_and_checks_and_nothing_that_runs_a_program() -> None:
    dump = """\
Acquire::http::Proxy "http://proxy.test:3128";
Acquire::https::Proxy::direct.test "DIRECT";
Acquire::http::direct.test::Proxy "DIRECT";
Acquire::http::Proxy-Auto-Detect "/usr/bin/find-proxy";
Acquire::https::CaInfo "/opt/company/ca.pem";
Acquire::Check-Valid-Until "false";
DPkg::Post-Invoke:: "/bin/something";
Acquire::GzipIndexes "true";
"""
    assert host_config.apt_settings(dump) == (
        'Acquire::http::Proxy "http://proxy.test:3128";\n'
        'Acquire::http::direct.test::Proxy "DIRECT";\n'
        f'Acquire::https::CaInfo "{host_config.CA_BUNDLE}";\n'
        'Acquire::Check-Valid-Until "false";\n'
    )


def pem(body: str) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"


def test_only_certificates_that_the_machine_lacks_are_added_once() -> None:
    host = f"# a title\n{pem('AAAA')}{pem('BB' * 60)}{pem('BB' * 60)}"
    extra = host_config.extra_certificates(host, pem("AA\nAA"))
    assert extra == [pem("B" * 64 + "\n" + "B" * 56)]


def test_no_extra_certificates_where_the_host_trusts_what_debian_does() -> None:
    assert host_config.extra_certificates(pem("AAAA"), pem("AAAA") + pem("CCCC")) == []


def test_a_proxy_is_taken_over_and_never_asked_for_the_loopback_hub() -> None:
    env = host_config.environment(
        {"HTTPS_PROXY": "http://proxy.test:1", "no_proxy": "intern.test,localhost"}, own_cas=False
    )
    assert env == {
        "https_proxy": "http://proxy.test:1",
        "HTTPS_PROXY": "http://proxy.test:1",
        "no_proxy": "intern.test,localhost,127.0.0.1",
        "NO_PROXY": "intern.test,localhost,127.0.0.1",
    }


def test_a_plain_host_hands_nothing_on() -> None:
    assert host_config.environment({"PATH": "/bin", "HOME": "/root"}, own_cas=False) == {}


def test_own_cas_point_programs_with_lists_of_their_own_at_the_bundle() -> None:
    assert set(host_config.environment({}, own_cas=True)) == {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"}


def test_pip_options_follow_pips_precedence() -> None:
    text = (
        ":env:.find-links='/env/wheels'\n"
        "global.find-links='/global/wheels'\n"
        "global.index-url='https://index.test/simple'\n"
        "install.index-url='https://install.test/simple'\n"
        "global.extra-index-url='\\nhttps://a.test\\nfile:///b/simple'\n"
        "freeze.timeout='3'\n"
        "global.broken=no literal\n"
    )
    assert host_config.pip_options(text) == {
        "find-links": "/env/wheels",
        "index-url": "https://install.test/simple",
        "extra-index-url": "\nhttps://a.test\nfile:///b/simple",
    }


def test_local_directories_are_bound_and_what_is_not_there_is_left_out() -> None:
    options = {
        "find-links": "/srv/wheels https://links.test/w /srv/gone wheels",
        "extra-index-url": "file:///opt/mirror/simple file:///opt/gone/simple https://x.test/simple",
    }
    there = {"/srv/wheels", "/opt/mirror/simple"}
    found = host_config.packages(options, own_cas=False, is_dir=there.__contains__)
    assert found.binds == ("/opt/mirror", "/srv/wheels")
    assert found.wheel_mirror == "/srv/wheels"
    assert found.pip_conf == (
        "[global]\n"
        "extra-index-url = file:///opt/mirror/simple https://x.test/simple\n"
        "find-links = /srv/wheels https://links.test/w\n"
    )
    assert found.uv_toml == (
        'extra-index-url = ["file:///opt/mirror/simple", "https://x.test/simple"]\n'
        'index-strategy = "unsafe-best-match"\n'
        'find-links = ["/srv/wheels", "https://links.test/w"]\n'
    )


def test_a_host_without_pip_settings_changes_nothing_in_the_machine() -> None:
    found = host_config.packages({}, own_cas=False, is_dir=lambda _path: True)
    assert found == host_config.Packages("", "", (), None)


def test_index_timeout_trust_and_cas_reach_both_tools() -> None:
    found = host_config.packages(
        {
            "index-url": "https://index.test/simple",
            "trusted-host": "index.test",
            "default-timeout": "180",
            "no-index": "true",
        },
        own_cas=True,
        is_dir=lambda _path: False,
    )
    assert found.pip_conf.splitlines() == [
        "[global]",
        "index-url = https://index.test/simple",
        "trusted-host = index.test",
        "no-index = true",
        "timeout = 180",
        f"cert = {host_config.CA_BUNDLE}",
    ]
    assert found.uv_toml.splitlines() == [
        'index-url = "https://index.test/simple"',
        'allow-insecure-host = ["index.test"]',
        "no-index = true",
        "system-certs = true",
    ]
