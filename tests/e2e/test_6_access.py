"""Who gets in and what gets out: the real engine, opened to a network and closed again.

A lab machine may not change its host's firewall, so the `nft` it starts with works in a network
namespace of its own; what the rules do there is tried between two namespaces.
"""

import http.client
import json
import secrets
import shlex
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsv4 import routes
from tests.e2e.spark import Spark
from tests.lab import places, state

pytestmark = pytest.mark.e2e

DSV4 = "/opt/dsv4/bin/dsv4"
KEY_FILE = "/etc/dsv4/credentials/api_key"
TLS = "/etc/ssl/private/e2e"
SECRETS = "/run/e2e-secrets"
NFT, REAL_NFT = "/usr/sbin/nft", "/usr/sbin/nft.real"
OPEN = (
    *("--data", "serve_host=0.0.0.0", "--data", "serve_api_key=true"),
    *("--data", f"serve_tls_cert={TLS}.crt", "--data", f"serve_tls_key={TLS}.key"),
    *("--data", "serve_allowed_subnets=10.0.0.0/8"),
)
HERE = Path(__file__).parent


def put(spark: Spark, path: str, text: str, mode: str = "600") -> None:
    """Write a root's file; its content goes into no log of sudo's."""
    spark.ssh(f"umask 077; printf %s {shlex.quote(text)} > ~/put")
    spark.root(
        f"install -m {mode} ~{spark.ssh('id -un')}/put {path}; rm ~{spark.ssh('id -un')}/put"
    )


@dataclass
class Opened:
    """The machine while others may reach it."""

    spark: Spark
    began: str
    certificate: str
    output: str
    first_key: str

    @property
    def key(self) -> str:
        return self.spark.root(f"{DSV4} key")

    def connection(self) -> http.client.HTTPSConnection:
        """Return a connection that takes this server's certificate and no other."""
        trusted = ssl.create_default_context(cadata=self.certificate)
        port = state.read().machines[self.spark.name].serve_port
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trusted)

    def ask(
        self, key: str | None, path: str = "/v1/models", body: dict[str, Any] | None = None
    ) -> int:
        """Return the status of an answer."""
        connection = self.connection()
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status


@pytest.fixture(scope="module")
def opened(spark: Spark) -> Iterator[Opened]:
    """One deploy opens it; one closes it again, to what it was before."""
    before = spark.manifest()
    spark.root(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=e2e"
        f" -addext subjectAltName=IP:127.0.0.1 -keyout {TLS}.key -out {TLS}.crt 2>&1;"
        f" chmod 600 {TLS}.key"
    )
    spark.root(f"dpkg-divert --local --divert {REAL_NFT} --rename --add {NFT}")
    apart = f"unshare --map-root-user --net {REAL_NFT}"
    put(spark, NFT, f'#!/bin/sh\nexec {apart} "$@"\n', "755")
    spark.root("touch /run/e2e-began")
    began = spark.ssh("date +%s.%N")
    try:
        done = spark.deploy("--diff", *OPEN).require()
        certificate, key = (spark.root(f"cat {path}") for path in (f"{TLS}.crt", KEY_FILE))
        yield Opened(spark, began, certificate, done.output, key)
    finally:
        closed = spark.deploy()
        spark.root(f"rm -f {NFT} {TLS}.*; dpkg-divert --rename --remove {NFT}")
        spark.root(f"rm -f {KEY_FILE} {SECRETS}*", check=False)
    closed.require()
    assert "Paris" in spark.ask()
    assert spark.manifest() == before


def test_only_who_has_the_key_gets_in(opened: Opened) -> None:
    """Over TLS with the owner's certificate; without a key only that it lives."""
    port = state.read().machines[opened.spark.name].serve_port
    listening = opened.spark.root(f"ss -Hltn sport = :{port} | awk '{{print $4}}'")
    assert listening.split() == [f"0.0.0.0:{port}"]
    assert opened.ask(None, "/health") == 200
    assert opened.ask(None) == 401
    assert opened.ask("x" * 43) == 401
    assert opened.ask(opened.key) == 200
    assert opened.ask(opened.key, "/version") == 404
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    plain.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()


def test_a_new_key_ends_no_request_and_no_service(opened: Opened) -> None:
    """Rotated while an answer comes: that is finished, the old key is dead, nothing restarts."""
    spark, old = opened.spark, opened.key
    started = spark.show("InvocationID")
    body = {
        "model": "lab-tiny",
        "prompt": "The capital of France is",
        **{"max_tokens": 1500, "ignore_eos": True, "stream": True},
    }
    connection = opened.connection()
    headers = {"Authorization": f"Bearer {old}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    answer.readline()
    spark.root(f"{DSV4} key rotate 2>&1")
    assert (opened.ask(old), opened.ask(opened.key)) == (401, 200)
    assert answer.read().rstrip().endswith(b"data: [DONE]")
    connection.close()
    assert spark.deploy(*OPEN).require().totals["success"] == 0
    by_hand = opened.key
    done = spark.deploy(*OPEN, "--data", "rotate_key=true").require()
    assert "Service | Have an API key" in done.changed
    assert "Service | Run the service" not in done.changed
    assert (opened.ask(by_hand), opened.ask(opened.key)) == (401, 200)
    assert opened.key not in {old, by_hand}
    assert spark.show("InvocationID") == started


def test_key_and_prompts_are_in_no_log_and_no_file(opened: Opened) -> None:
    """Searched for: every file written since, the journal, every command line and environment."""
    spark, mark = opened.spark, f"prompt-{secrets.token_hex(8)}"
    asked = {"model": "lab-tiny", "prompt": mark, "max_tokens": 4}
    said = {"model": "lab-tiny", "messages": [{"role": "user", "content": mark}]}
    bad: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", asked | {"max_tokens": mark}),
        ("/v1/completions", asked | {"prompt": f"{mark} " * 4000}),
        ("/v1/completions", {"prompt": [{"text": mark}]}),
        ("/v1/chat/completions", said | {"temperature": mark}),
        ("/v1/responses", {"model": "lab-tiny", "input": [{"role": mark}]}),
    )
    key = opened.key
    assert opened.ask(key, "/v1/completions", asked) == 200
    statuses = [opened.ask(key, path, body) for path, body in bad]
    assert min(statuses) >= 400, statuses
    put(spark, SECRETS, f"{mark}\n{key}\n{opened.first_key}\n")
    files = spark.root(
        "find / /run /tmp /dev/shm /var -xdev -type f -cnewer /run/e2e-began"
        f" ! -path {SECRETS} -print0 | xargs -0 grep -laFf {SECRETS} | sort -u || true"
    )
    assert files.split() == [KEY_FILE]
    assert spark.root(f"stat -c '%U %a' {KEY_FILE}") == "root 600"
    assert spark.root("find /run/credentials -type f -perm /o+r | grep -c . || true") == "0"
    everything = f"journalctl --no-pager -a -o export --since @{opened.began}"
    assert spark.root(f"{everything} | grep -caFf {SECRETS} || true") == "0"
    assert spark.root(f"cat /proc/[0-9]*/cmdline | grep -caFf {SECRETS} || true") == "0"
    owners = spark.root(
        f"grep -laFf {SECRETS} /proc/[0-9]*/environ 2>/dev/null | xargs stat -c %U | sort -u"
    )
    assert owners.split() == ["dsv4"]
    copies = places.REPO / ".receipts" / spark.name
    assert not [path for path in copies.glob("*.json") if opened.first_key in path.read_text()]
    assert opened.first_key not in opened.output


def test_every_route_of_the_engine_is_closed_but_those_on_the_list(spark: Spark) -> None:
    """Of those the real server registers with everything on; and no image is fetched by URL."""
    put(spark, "/run/e2e-every-route.py", (HERE / "every_route.py").read_text(), "644")
    said = spark.root(
        "env HOME=/tmp $(grep -v '^#' /etc/dsv4/environment) VLLM_LOGGING_LEVEL=CRITICAL"
        " VLLM_SERVER_DEV_MODE=1 PYTHONPATH=/opt/dsv4/lib /opt/dsv4/current/bin/python -B"
        " /run/e2e-every-route.py 2>/dev/null"
    )
    found = json.loads(said.splitlines()[-1])
    assert {"/pause", "/collective_rpc", "/score", "/v1/realtime"} <= set(found["found"])
    assert sorted(found["through"]) == sorted(
        f"{method} {path}" for path, method in routes.ROUTES.items()
    )
    assert found["refused"] == ["http", "file"]
    assert found["fetched"] == ["127.0.0.1/a.png"], "it followed to another host"
    assert found["start_limit_s"] == 300


def test_networks_that_are_not_allowed_do_not_reach_the_port(opened: Opened) -> None:
    """The rules of a start, in the kernel: loopback and the allowed networks, no other port."""
    spark = opened.spark
    put(spark, "/run/e2e-network.py", (HERE / "network.py").read_text(), "644")
    said = spark.root(
        "unshare --map-root-user --net env PYTHONPATH=/opt/dsv4/lib python3 -B"
        f" /run/e2e-network.py {REAL_NFT}"
    )
    found = json.loads(said)
    assert all(found["before"].values()), found
    assert found["after"] == found["before"]
    assert {name for name, through in found["limited"].items() if not through} == {
        "outside",
        "outside, IPv6",
    }
