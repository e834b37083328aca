"""Settings: what is accepted, how what is not is said, and what follows from them."""

import json
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from pyinfra.api.connectors import get_all_connectors

from deploy import _rules, layout, packs, presets, readme, routes, service
from deploy import settings as s
from deploy._state import State
from dsv4 import fetch, memory
from dsv4 import guard as target_guard


def faults(**data: object) -> list[str]:
    with pytest.raises(s.SettingsError) as caught:
        s.load(data)
    return list(caught.value.faults)


def only_fault(**data: object) -> str:
    (fault,) = faults(**data)
    return fault


# --- one value ------------------------------------------------------------------------------------

WHERE = "; set it in inventories/group_data/"


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ("0,85", "0,85: write 0.85 with a point"),
        (",85", ",85: write 0.85 with a point"),
        (85, "85: write 0.85 for 85 %"),
        ("85", "85: write 0.85 for 85 %"),
        (-1, "-1"),
        ("-1", "-1"),
        (0.97, "0.97"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (True, "True"),
        ("\u0660.\u0668\u0665", "\u0660.\u0668\u0665"),
        ("", "''"),
        ("0.85 GiB", "0.85 GiB"),
        ([0.85], "[0.85]"),
        (10**400, "1" + "0" * 59 + "..."),
    ],
)
def test_a_wrong_utilisation_is_said_with_range_value_and_place(value: object, got: str) -> None:
    """Name, what it must be, what it was and how it was meant, where to change it."""
    expected = f"serve_gpu_memory_utilization: must be between 0.05 and 0.95 (got {got}){WHERE}"
    assert only_fault(serve_gpu_memory_utilization=value) == expected


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        ("serve_port", 80, "a whole number from 1024 to 65535"),
        ("serve_port", "8899.5", "a whole number from 1024 to 65535"),
        ("serve_port", 65536, "a whole number from 1024 to 65535"),
        ("serve_enforce_eager", 1, "true or false"),
        ("serve_enforce_eager", "maybe", "true or false"),
        ("service_state", "paused", "one of running, stopped, keep"),
        ("service_state", ["running"], "one of running, stopped, keep"),
        ("serve_host", "spark.local", "an IP address"),
        ("serve_host", "fe80::1%eth0", "an IP address"),
        ("pack_revision", "main", "a commit of 40 hexadecimal digits"),
        ("serve_capture_sizes", "1,0", "a list of whole numbers from 1 to 1024"),
        ("serve_capture_sizes", {"a": 1}, "a list of whole numbers from 1 to 1024"),
        (
            "serve_routes",
            ["/pause"],
            "a list of /detokenize, /load, /tokenize, /tokenizer_info, /version",
        ),
        (
            "serve_routes",
            "GET /version",
            "a list of /detokenize, /load, /tokenize, /tokenizer_info, /version",
        ),
        ("serve_allowed_subnets", ["everywhere"], "a list of networks such as 192.168.1.0/24"),
        ("serve_media_domains", ["a b"], "a list of domain names"),
        ("serve_name", "two words", "a name of letters, digits and . _ : -"),
        ("serve_name", "--help", "a name of letters, digits and . _ : -"),
    ],
)
def test_a_wrong_value_is_said_in_the_words_of_its_kind(key: str, value: object, must: str) -> None:
    assert only_fault(**{key: value}).startswith(f"{key}: must be {must} (got ")


@pytest.mark.parametrize("key", ["pack_dir", "cuda_home", "wheel_mirror", "hub_token_file"])
@pytest.mark.parametrize(
    "path", ["models/pack", "~/pack", "./x", "/a/../b", "/a b", "/a\nb", "/%h"]
)
def test_paths_are_absolute_and_need_no_quoting(key: str, path: str) -> None:
    assert only_fault(**{key: path}).startswith(f"{key}: must be an absolute path without spaces")


@pytest.mark.parametrize(
    "endpoint",
    [
        "ftp://hub",
        "hub:80",
        "http://",
        "http://user:word@hub",
        "http://hub:99999",
        "http://hub?a=b",
    ],
)
def test_a_hub_is_an_address_without_credentials(endpoint: str) -> None:
    assert only_fault(hub_endpoint=endpoint).startswith("hub_endpoint: must be an address")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("serve_port", "9000", 9000),
        ("serve_port", 9000.0, 9000),
        ("serve_gpu_memory_utilization", "0.8", 0.8),
        ("serve_gpu_memory_utilization", ".8", 0.8),
        ("serve_enforce_eager", "True", True),
        ("serve_prefix_caching", "no", False),
        ("serve_capture_sizes", "1,2, 4", (1, 2, 4)),
        ("serve_capture_sizes", [1, 2], (1, 2)),
        ("serve_capture_sizes", 4, (4,)),
        ("serve_routes", "/tokenize, /version", ("/tokenize", "/version")),
        ("serve_name", 123, "123"),
        ("serve_host", "localhost", "127.0.0.1"),
        ("pack_dir", "/data/packs/mine", Path("/data/packs/mine")),
        ("hub_endpoint", "http://127.0.0.1:8790/", "http://127.0.0.1:8790"),
        ("pack_dir", None, None),
        ("serve_port", None, 8899),
    ],
)
def test_text_that_spells_a_value_is_that_value(key: str, text: object, value: object) -> None:
    """`--data` hands over text where pyinfra sees no JSON; None is as good as left out."""
    assert getattr(s.load({key: text}), key) == value


def test_all_faults_come_at_once() -> None:
    found = faults(
        serve_port="eighty", serve_prot=1, pack_dir="x", serve_speculative_tokens=4, preset="128k"
    )
    assert [fault.partition(":")[0] for fault in found] == [
        "serve_prot",
        "serve_port",
        "pack_dir",
        "preset",
    ]
    # The draft belongs to a preset that is not known: one mistake, one line
    found = faults(serve_port="eighty", serve_speculative_tokens=4)
    assert [fault.partition(":")[0] for fault in found] == [
        "serve_port",
        "serve_speculative_tokens",
    ]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("serve_prot", " (did you mean serve_port?)"),
        ("Serve_Port", " (did you mean serve_port?)"),
        ("ssh_prot", " (did you mean ssh_port?)"),
        ("colour", ""),
    ],
)
def test_an_unknown_key_is_refused_with_what_may_be_meant(key: str, hint: str) -> None:
    expected = f"{key}: is no setting{hint}; take it out of inventories/ or --data"
    assert only_fault(**{key: 1}) == expected


def test_keys_of_pyinfra_are_not_ours_to_judge() -> None:
    connectors = get_all_connectors().values()
    assert {key for it in connectors for key in it.data_meta} == set(s.PYINFRA_KEYS)
    assert s.load({"_sudo": True, **dict.fromkeys(s.PYINFRA_KEYS, "anything")}) == s.load({})


@pytest.mark.parametrize(
    ("key", "known"),
    [("route", routes.ROUTES), ("preset", presets.PRESETS), ("pack", packs.PACKS)],
)
def test_an_unknown_name_lists_those_there_are(key: str, known: dict[str, object]) -> None:
    first = next(iter(known))
    assert only_fault(**{key: f"{first}x"}) == (
        f"{key}: must be one of {', '.join(known)} (got {first}x: did you mean {first}?){WHERE}"
    )


def test_a_route_brings_its_preset_and_its_pack() -> None:
    lab = s.load({"route": "lab"})
    assert (lab.preset, lab.pack) == ("lab", "lab-tiny")
    assert s.load({}).route == "nightly"
    assert s.load({}).preset == "64k"


# --- rules ----------------------------------------------------------------------------------------


def test_the_memory_equation_is_shown_with_what_would_pass() -> None:
    assert only_fault(serve_gpu_memory_utilization=0.93) == (
        "serve_gpu_memory_utilization: 0.93 leaves 121.6 GiB * (1 - 0.93) - 5.9 for the host ="
        " 2.6 GiB, and 6.0 are needed (soft floor 5.0 + margin 1 + prompts up to 65536 tokens 0.0);"
        " the highest that passes is 0.90"
    )
    assert s.load({"serve_gpu_memory_utilization": 0.90}).serving.gpu_memory_utilization == 0.90


def test_a_longer_context_needs_more_headroom() -> None:
    assert "the highest that passes is 0.86" in only_fault(serve_max_model_len=131072)
    s.load({"serve_max_model_len": 131072, "serve_gpu_memory_utilization": 0.86})


def test_a_machine_too_small_for_anything_is_told_so() -> None:
    assert "no utilisation passes" in only_fault(memory_total_gib=12)
    # 0.83 would leave enough headroom, and less than the pack needs
    assert "no utilisation passes and holds the pack's 94.5 GiB of weights" in only_fault(
        memory_total_gib=64.5
    )


def test_a_share_smaller_than_the_weights_is_refused() -> None:
    assert only_fault(serve_gpu_memory_utilization=0.5) == (
        "serve_gpu_memory_utilization: 0.5 gives the engine 121.6 GiB * 0.5 = 60.8 GiB, and the"
        " weights of pack mixedk alone have 94.5; the lowest that could hold them is 0.78"
    )
    s.load({"serve_gpu_memory_utilization": 0.78})
    s.load({"route": "lab", "memory_total_gib": 24, "serve_gpu_memory_utilization": 0.05})


def test_a_gate_that_nothing_passes_is_refused() -> None:
    assert only_fault(memory_gate_margin_gib=20) == (
        "memory_gate_margin_gib: 20 is more than ever is free beside the engine's share: 121.6 GiB"
        " * (1 - 0.88) - 5.9 for the host = 8.7 GiB; set it to at most 8.6"
    )
    s.load({"memory_gate_margin_gib": 8.6})


def test_a_fault_says_where_the_value_came_from() -> None:
    data = {"serve_port": "x", "fetch_workers": 0}
    first, second = s.read(data, typed={"fetch_workers"}).faults
    assert first.endswith("; set it in inventories/group_data/")
    assert second.endswith("; it came from --data, give it anew there")


def test_what_the_equation_names_as_highest_passes() -> None:
    for total in (119.9, 121.63, 200, 500):
        for context in (4096, 65536, 131072, 200000):
            data = {"memory_total_gib": total, "serve_max_model_len": context}
            best = memory.highest_utilisation(total, context, memory.Limits())
            if 0.05 <= best <= 0.95:
                s.load({**data, "serve_gpu_memory_utilization": best})
            above = round(best + 0.01, 2)
            if 0.05 <= above <= 0.95:
                assert faults(**data, serve_gpu_memory_utilization=above)


def test_the_lab_is_only_checked_against_the_machine_itself() -> None:
    """No size is known before; preflight asks with the real one."""
    lab = s.load({"route": "lab", "serve_gpu_memory_utilization": 0.95})
    assert lab.headroom_fault(8.0) is not None
    assert s.load({}).headroom_fault(121.63) is None
    assert "0.88 leaves 95.0 GiB" in str(s.load({}).headroom_fault(95))


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 6, 9])
def test_tokens_the_draft_can_do(tokens: int) -> None:
    assert s.load({"serve_speculative_tokens": tokens}).serving.speculative_tokens == tokens


@pytest.mark.parametrize("tokens", [4, 5, 7, 10])
def test_tokens_the_draft_cannot_do(tokens: int) -> None:
    assert only_fault(serve_speculative_tokens=tokens) == (
        "serve_speculative_tokens: must be 0 to 3 or a multiple of 3, the layers of the draft in"
        f" pack mixedk (got {tokens}); 3 was fastest"
    )


def test_a_pack_without_a_draft_takes_none() -> None:
    assert "has no draft; set it to 0" in only_fault(route="lab", serve_speculative_tokens=3)


@pytest.mark.parametrize("context", [256_000, 262_144, 1_000_000])
def test_a_large_batch_at_256k_is_refused(context: int) -> None:
    found = faults(preset="256k", serve_max_model_len=context, serve_max_num_batched_tokens=4096)
    assert any(
        fault.startswith("serve_max_num_batched_tokens: 4096 with") and "2048 or less" in fault
        for fault in found
    )


def test_a_large_batch_below_256k_is_not() -> None:
    s.load({"serve_max_num_batched_tokens": 8192})


def test_a_batch_has_a_token_for_every_stream() -> None:
    fault = only_fault(serve_max_num_batched_tokens=64, serve_max_num_seqs=65)
    assert fault.startswith("serve_max_num_batched_tokens: must be at least serve_max_num_seqs")


def test_context_past_200k_needs_expandable_segments() -> None:
    fault = only_fault(preset="256k", serve_expandable_segments="false")
    assert fault.startswith("serve_expandable_segments: must be true for 262144 tokens")
    s.load({"preset": "256k"})


def test_a_processor_has_no_cuda_allocator() -> None:
    assert "has no CUDA allocator" in only_fault(route="lab", serve_expandable_segments=True)


def test_a_context_the_pack_does_not_know_is_refused() -> None:
    assert only_fault(route="lab", serve_max_model_len=65536) == (
        "serve_max_model_len: 65536 is more than pack lab-tiny can do; set it to at most 32768"
    )


def test_sizes_for_graphs_that_are_off_are_refused() -> None:
    assert "no effect in eager mode" in only_fault(preset="first-boot", serve_capture_sizes=[1])


def test_a_preset_for_another_processor_is_refused() -> None:
    (first, *_) = faults(preset="lab")
    assert first.startswith("preset: lab is made for cpu, route nightly runs on cuda; choose one")


def test_a_route_without_exl3_refuses_an_exl3_pack() -> None:
    (first, *_) = faults(route="lab", pack="mixedk")
    assert first.startswith("pack: mixedk is in EXL3 format, which route lab cannot read")


REMOTE = {
    "serve_host": "0.0.0.0",
    "serve_api_key": True,
    "serve_plain_http": True,
    "serve_allowed_subnets": ["192.168.1.0/24"],
}


@pytest.mark.parametrize(
    ("lacking", "word"),
    [
        ("serve_api_key", "serve_api_key to true"),
        ("serve_plain_http", "serve_plain_http: true"),
        ("serve_allowed_subnets", "serve_allowed_subnets"),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "fd00::1"])
def test_a_bind_beyond_the_machine_needs_key_tls_and_networks(
    lacking: str, word: str, host: str
) -> None:
    data = {**REMOTE, "serve_host": host}
    s.load(data)
    fault = only_fault(**{key: value for key, value in data.items() if key != lacking})
    assert fault.startswith(f"serve_host: {host} ")
    assert word in fault


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert s.load({"serve_host": host}).loopback


def test_tls_takes_the_place_of_the_acceptance_and_comes_in_pairs() -> None:
    data = {key: value for key, value in REMOTE.items() if key != "serve_plain_http"}
    both = {**data, "serve_tls_cert": "/etc/tls/c.pem", "serve_tls_key": "/etc/tls/k.pem"}
    chosen = s.load(both)
    assert chosen.url == "https://127.0.0.1:8899"
    # As systemd hands them over: the engine's user cannot read the key itself
    given = "/run/credentials/dsv4.service"
    assert chosen.serve_yaml()["ssl-keyfile"] == f"{given}/tls_key"
    assert chosen.serve_yaml()["ssl-certfile"] == f"{given}/tls_cert"
    assert service.credentials(chosen) == (
        ("api_key", "/etc/dsv4/credentials/api_key"),
        ("tls_cert", "/etc/tls/c.pem"),
        ("tls_key", "/etc/tls/k.pem"),
    )
    assert only_fault(**both, serve_plain_http=True) == (
        "serve_plain_http: has no effect with serve_tls_cert; leave out one of them"
    )
    both.pop("serve_tls_key")
    assert "set serve_tls_key as well" in only_fault(**both)


@pytest.mark.parametrize(
    ("key", "value"),
    [("serve_plain_http", True), ("serve_allowed_subnets", ["192.168.1.0/24"])],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_access_that_nobody_gets_is_not_given(key: str, value: object, host: str) -> None:
    """It would look like access, or like a limit."""
    fault = only_fault(serve_host=host, **{key: value})
    assert fault.startswith(f"{key}: has no effect while only the machine itself can reach {host}")


@pytest.mark.parametrize(
    ("host", "subnets", "words"),
    [
        ("0.0.0.0", "0.0.0.0/0", "0.0.0.0/0 is everybody"),
        ("::", "10.0.0.0/8,::/0", "::/0 is everybody"),
        ("192.168.1.20", "fd00::/8", "has no IPv4 network"),
    ],
)
def test_subnets_limit_something(host: str, subnets: str, words: str) -> None:
    fault = only_fault(**{**REMOTE, "serve_host": host, "serve_allowed_subnets": subnets})
    assert fault.startswith(f"serve_allowed_subnets: {words}")


def test_the_firewall_comes_with_the_access() -> None:
    """Who may reach the port is the kernel's to decide, so its tool must be there."""
    chosen = s.load(REMOTE)
    assert "nftables" in chosen.packages
    assert chosen.guard()["allowed_networks"] == ["192.168.1.0/24"]
    assert "nftables" not in s.load({}).packages
    assert s.load({}).guard()["allowed_networks"] == []


@pytest.mark.parametrize("port", [8022, "8022"])
def test_the_ssh_port_is_taken(port: object) -> None:
    fault = only_fault(serve_port=8022, ssh_port=port)
    assert fault == "serve_port: 8022 is the machine's SSH port (ssh_port); choose another"


def test_the_port_of_a_hub_on_the_machine_is_taken() -> None:
    assert "hub_endpoint on the same machine" in only_fault(hub_endpoint="http://127.0.0.1:8899")
    s.load({"hub_endpoint": "http://192.168.1.9:8899"})


def test_every_rule_reads_settings_that_exist() -> None:
    known = set(s.Settings.model_fields)
    assert not {key for rule in _rules.RULES for key in rule.needs} - known


# --- an inventory ---------------------------------------------------------------------------------


class Host:
    """A host of an inventory, as far as settings look at it."""

    def __init__(self, name: str, data: dict[str, Any]) -> None:
        self.name, self.data, self.groups = name, data, ["lab"]


class Inventory:
    """An inventory with the levels of data that pyinfra has."""

    def __init__(
        self,
        hosts: dict[str, dict[str, Any]],
        group: dict[str, Any] | None = None,
        everywhere: dict[str, Any] | None = None,
        override: dict[str, Any] | None = None,
    ) -> None:
        self.hosts = [Host(name, data) for name, data in hosts.items()]
        self.group, self.everywhere, self.override = group, everywhere, override

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def get_data(self) -> dict[str, Any]:
        return self.everywhere or {}

    def get_groups_data(self, groups: list[str]) -> dict[str, Any]:
        return (self.group or {}) if "lab" in groups else {}

    def get_host_data(self, hostname: str) -> dict[str, Any]:
        return next(host.data for host in self.hosts if host.name == hostname)

    def get_override_data(self) -> dict[str, Any]:
        return self.override or {}


def inventory_faults(inventory: Inventory, limit: list[Host] | None = None) -> list[str]:
    with pytest.raises(s.InventoryError) as caught:
        s.check_inventory(inventory, limit)
    return list(caught.value.faults)


LAB = {"route": "lab"}


def test_levels_of_data_go_before_each_other_as_in_pyinfra() -> None:
    inventory = Inventory(
        {"a": {"fetch_workers": 3}, "b": {}},
        group={**LAB, "fetch_workers": 2, "runtime_keep": 5},
        everywhere={"route": "nightly", "fetch_workers": 1, "memory_gate_wait_s": 7},
        override={"runtime_keep": "6"},
    )
    found = s.check_inventory(inventory)
    assert {name: it.fetch_workers for name, it in found.items()} == {"a": 3, "b": 2}
    assert {it.runtime_keep for it in found.values()} == {6}
    assert {it.memory_gate_wait_s for it in found.values()} == {7}


def test_faults_of_all_hosts_come_together_and_equal_ones_once() -> None:
    inventory = Inventory(
        {"a": {"serve_prot": 1}, "b": {"serve_port": "x"}, "c": {}},
        everywhere={**LAB, "fetch_workers": 0},
    )
    assert [fault.partition(";")[0] for fault in inventory_faults(inventory)] == [
        "a: serve_prot: is no setting (did you mean serve_port?)",
        "a, b, c: fetch_workers: must be a whole number from 1 to 16 (got 0)",
        "b: serve_port: must be a whole number from 1024 to 65535 (got x)",
    ]


def test_a_route_this_version_cannot_deploy_is_refused_beside_other_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = replace(routes.ROUTES["nightly"], lock_of="none", patches=("other",))
    monkeypatch.setattr(routes, "ALL", (lacking, routes.ROUTES["lab"]))
    monkeypatch.setattr(routes, "ROUTES", {route.name: route for route in routes.ALL})
    found = inventory_faults(Inventory({"a": {"fetch_workers": 0}, "b": LAB}))
    assert [fault.partition(" needs ")[0] for fault in found] == [
        "a: fetch_workers: must be a whole number from 1 to 16 (got 0);"
        " set it in inventories/group_data/",
        *["a: route nightly"] * 2,
    ]
    assert all(fault.endswith("this version can deploy: lab") for fault in found[1:])


PLUGIN = f"/srv/wheels/vllm_exl3-0.3.0-py3-none-any.whl#sha256={'ab' * 32}"
EXTENSION = f"/srv/dsv4_exllamav3_ext-1.4.5+k0-cp312-cp312-linux_aarch64.whl#sha256={'ab' * 32}"
WHEEL = f"/srv/wheels/vllm-0.28.0-cp38-abi3-linux_aarch64.whl#sha256={'ab' * 32}"


def test_the_fork_asks_for_the_wheels_that_nobody_publishes() -> None:
    assert only_fault(route="fork") == (
        "route: fork is made of archived wheels that nobody publishes; name yours with"
        " engine_wheel and plugin_wheel (an address or a path on the machine, then #sha256= and"
        " its hash), or choose another route"
    )
    assert "name yours with plugin_wheel " in only_fault(route="fork", engine_wheel=WHEEL)
    chosen = s.load({"route": "fork", "engine_wheel": WHEEL, "plugin_wheel": PLUGIN})
    assert chosen.route_data.engine.sha256 == "ab" * 32
    assert chosen.route_data.engine.location == WHEEL.partition("#")[0]


def test_a_wheel_for_what_a_route_has_not_is_refused() -> None:
    assert "is for route fork, route stable" in only_fault(route="stable", engine_wheel=WHEEL)
    assert "route lab has no exllamav3" in only_fault(route="lab", exllamav3_wheel=EXTENSION)
    chosen = s.load({"route": "stable", "exllamav3_wheel": EXTENSION})
    assert chosen.runtime_id != s.load({"route": "stable"}).runtime_id


@pytest.mark.parametrize(
    ("key", "file", "says"),
    [
        ("plugin_wheel", "vllm-0.28.0-cp38-abi3-linux_aarch64.whl", "wanted a wheel of vllm-exl3"),
        ("plugin_wheel", "vllm_exl3-0.3.0-cp312-cp312-win_amd64.whl", "is for win_amd64, route"),
        ("exllamav3_wheel", "exllamav3-1.5-cp312-cp312-linux_x86_64.whl", "is for linux_x86_64"),
        (
            "exllamav3_wheel",
            "vllm_exl3-0.3.0-py3-none-any.whl",
            "wanted a wheel of dsv4-exllamav3-",
        ),
        ("exllamav3_wheel", "download.whl", "download.whl is no wheel's name"),
    ],
)
def test_a_wheel_of_something_else_is_refused_before_gigabytes_are_fetched(
    key: str, file: str, says: str
) -> None:
    text = only_fault(**{"route": "stable", key: f"https://h/{file}#sha256={'ab' * 32}"})
    assert text.startswith(f"{key}: ")
    assert says in text


def test_the_engine_of_the_fork_is_an_engine() -> None:
    """One of another name would be put beside the lock's, which then serves unnoticed."""
    text = only_fault(route="fork", engine_wheel=PLUGIN, plugin_wheel=PLUGIN)
    assert "engine_wheel: wanted a wheel of vllm, got vllm_exl3-0.3.0-py3-none-any.whl" in text
    fine = WHEEL.replace("0.28.0-", "0.28.0%2Bcu130-1-").replace("/srv", "https://h")
    s.load({"route": "fork", "engine_wheel": fine, "plugin_wheel": PLUGIN})


@pytest.mark.parametrize(
    "value",
    [
        "/srv/x.whl",
        f"x.whl#sha256={'ab' * 32}",
        f"/srv/x.tar.gz#sha256={'ab' * 32}",
        "/srv/x.whl#sha256=ab",
        f"ftp://h/x.whl#sha256={'ab' * 32}",
        f"/srv/a b.whl#sha256={'ab' * 32}",
        f"/srv/x.whl#sha256={'AB' * 32}",
        f"https://h/x.whl?raw=1#sha256={'ab' * 32}",
    ],
)
def test_a_wheel_comes_with_its_hash(value: str) -> None:
    """Nothing is installed that is not known by hash."""
    text = only_fault(route="stable", plugin_wheel=value)
    assert text.startswith("plugin_wheel: must be an address or an absolute path of a .whl")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("wheel_mirror", "/home/me/wheels"),
        ("wheel_mirror", "/tmp"),
        ("plugin_wheel", f"/root/vllm_exl3-0.3.0-py3-none-any.whl#sha256={'ab' * 32}"),
    ],
)
def test_what_the_build_cannot_see_is_refused_before_it_looks(key: str, value: str) -> None:
    """Its sandbox hides homes: it runs code that came from the network."""
    assert "which the build cannot see" in only_fault(route="stable", **{key: value})


@pytest.mark.parametrize("value", ["/tmp", "/tmp/p", "/var/tmp", "/var/tmp/a/b"])
def test_a_pack_in_a_directory_of_which_each_unit_has_its_own(value: str) -> None:
    """The engine would find nothing there; a longer name is another directory."""
    assert "of which each unit has its own" in only_fault(pack_dir=value)
    assert s.load({"pack_dir": "/tmpfs/p"}).pack_dir == Path("/tmpfs/p")
    assert s.load({"pack_dir": "/srv/tmp/p"}).pack_dir == Path("/srv/tmp/p")


@pytest.mark.parametrize(
    ("pack_dir", "apart", "wanted"),
    [
        (None, None, "yes"),
        ("/srv/p", None, "yes"),
        ("/srv/p", {}, "yes"),
        ("/home/me/p", None, "read-only"),
        ("/root/p", None, "read-only"),
        ("/data/p", {"/home": "/home/me/p"}, "read-only"),
        ("/data/p", {"/root": "/root/p"}, "read-only"),
        ("/data/p", {"/run/user": "/run/user/1/p"}, "read-only"),
        ("/data/p", {"/tmp": "/tmp/p"}, "yes"),
    ],
)
def test_homes_are_shown_to_an_engine_whose_pack_leads_there(
    pack_dir: str | None, apart: dict[str, str] | None, wanted: str
) -> None:
    """By where its links lead on the machine, and by its name where nobody has looked yet."""
    found = {} if apart is None else {"pack_dir": {"path": pack_dir, "apart": apart}}
    chosen = s.load({"pack_dir": pack_dir} if pack_dir else {})
    assert service.engine_unit(chosen, State({"machine": found})).protect_home == wanted


@pytest.mark.parametrize("value", ["...", "-", "a..b", "-a.b", "a-.b", "a b", "http://a"])
def test_a_domain_is_one(value: str) -> None:
    """What can never match would only look like a limit."""
    assert "a list of domain names" in only_fault(serve_media_domains=[value])
    assert s.load({"serve_media_domains": ["img.example.org", "localhost", "10.0.0.1"]})


def test_what_cannot_be_listened_on_or_kept_apart_is_refused() -> None:
    """A group's address; a key in the file that is handed to everybody."""
    remote = {
        "serve_api_key": True,
        "serve_allowed_subnets": ["192.168.1.0/24"],
        "serve_plain_http": True,
    }
    assert "is a multicast address" in only_fault(serve_host="224.0.0.1", **remote)
    both = {"serve_tls_cert": "/etc/x.pem", "serve_tls_key": "/etc/x.pem"}
    assert "keep the key in a file of its own" in only_fault(**both)


@pytest.mark.parametrize("value", ["previous", "lab-xyz", "../lab-0123456789ab", "lab-0123"])
def test_a_runtime_to_go_back_to_is_named_by_its_id(value: str) -> None:
    assert only_fault(rollback_to=value).startswith("rollback_to: must be the ID of a runtime")
    assert s.load({"rollback_to": "lab-0123456789ab"}).rollback_to == "lab-0123456789ab"


def test_compiled_kernels_are_kept_by_the_runtime_in_service() -> None:
    """After a rollback that is not the one the settings ask for."""
    chosen = s.load({"route": "stable"})
    assert f"/{chosen.runtime_id}-" in chosen.environment()["VLLM_CACHE_ROOT"]
    assert (
        "/stable-aaaaaaaaaaaa-"
        in chosen.environment(None, "stable-aaaaaaaaaaaa")["VLLM_CACHE_ROOT"]
    )


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_two_hosts_at_one_address_do_not_share_a_port(name: str) -> None:
    hosts: dict[str, dict[str, Any]] = {
        "a": {"ssh_hostname": "127.0.0.1", "ssh_port": 2222, "serve_port": 8899},
        "b": {"ssh_hostname": name, "ssh_port": 2223, "serve_port": "8899"},
        "c": {"ssh_hostname": name, "ssh_port": 2224, "serve_port": 2223},
        "d": {"serve_port": 8899},
    }
    found = inventory_faults(Inventory(hosts, everywhere=LAB))
    assert found == [
        "a: serve_port: 8899 is the serve_port of b at the same address (127.0.0.1) as well; give"
        " each its own",
        "b: serve_port: 8899 is the serve_port of a at the same address (127.0.0.1) as well; give"
        " each its own",
        "c: serve_port: 2223 is the SSH port of b at the same address (127.0.0.1) as well; give"
        " each its own",
    ]


def test_hosts_outside_this_run_are_checked_without_the_command_line() -> None:
    hosts: dict[str, dict[str, Any]] = {
        name: {"ssh_hostname": "127.0.0.1", "ssh_port": port, "serve_port": port + 1000}
        for name, port in {"a": 2222, "b": 2223}.items()
    }
    inventory = Inventory(hosts, everywhere=LAB, override={"serve_port": "9000"})
    assert len(inventory_faults(inventory)) == 2
    found = s.check_inventory(inventory, [inventory.hosts[0]])
    assert {name: it.serve_port for name, it in found.items()} == {"a": 9000, "b": 3223}


# --- what follows ---------------------------------------------------------------------------------

SAMPLES: list[dict[str, object]] = [
    {"route": "lab"},
    {"preset": "64k-16-streams"},
    {"preset": "256k"},
    {**REMOTE, "route": "stable"},
    {"route": "stock", "serve_name": "Mine:1", "serve_media_domains": "a.example,b.example"},
]


def test_overrides_go_before_the_preset_and_leave_the_rest_of_it() -> None:
    chosen = s.load({"preset": "64k-16-streams", "serve_max_num_seqs": "8"})
    assert chosen.serving.max_num_seqs == 8
    assert chosen.serving.capture_sizes == (1, 2, 4, 8, 16)
    assert chosen.preset_data.max_num_seqs == 16


def test_every_value_of_a_preset_can_be_overridden() -> None:
    assert {f"serve_{name}" for name in presets.OVERRIDABLE} <= set(s.Settings.model_fields)
    assert set(s.Settings.OVERRIDES) == presets.OVERRIDABLE


@pytest.mark.parametrize("data", SAMPLES)
def test_serve_yaml_reads_back_as_what_was_meant(data: dict[str, object]) -> None:
    """Through a real YAML parser: the same keys and values, whatever they contain."""
    chosen = s.load(data)
    found = yaml.safe_load(chosen.serve_yaml_text())
    assert found == chosen.serve_yaml()
    assert found["model"] == str(layout.VIEW_CURRENT)
    assert found["trust-remote-code"] is False
    assert found["enable-log-requests"] is False
    assert found["disable-uvicorn-access-log"] is True, "a query is part of a line in it"
    assert found["disable-fastapi-docs"] is True
    assert found["middleware"] == "dsv4.routes.Allowlist"
    assert found["allowed-origins"] == "[]"
    assert found["allowed-media-domains"]
    for key in ("speculative-config", "compilation-config", "override-generation-config"):
        if key in found:
            assert isinstance(json.loads(found[key]), dict)


def test_serve_yaml_of_a_spark_has_the_flags_of_the_field() -> None:
    found = s.load({"preset": "64k-16-streams"}).serve_yaml()
    assert found["quantization"] == "exl3"
    assert found["kv-cache-dtype"] == "fp8"
    assert found["long-prefill-token-threshold"] == 1024
    assert (found["tool-call-parser"], found["reasoning-parser"]) == ("deepseek_v4",) * 2
    assert json.loads(found["speculative-config"]) == {
        "method": "dspark",
        "num_speculative_tokens": 3,
    }
    assert json.loads(found["compilation-config"]) == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    }


def test_serve_yaml_of_the_lab_asks_for_nothing_a_processor_lacks() -> None:
    found = s.load(LAB).serve_yaml()
    assert found["dtype"] == "float32"
    assert found["enforce-eager"] is True
    absent = {"quantization", "kv-cache-dtype", "compilation-config", "tensor-parallel-size"}
    assert not absent & set(found)


@pytest.mark.parametrize("data", SAMPLES)
def test_the_guard_reads_what_the_deploy_writes(data: dict[str, object]) -> None:
    chosen = s.load(data)
    found = target_guard.parse(json.loads(json.dumps(chosen.guard())))
    assert found.served_name == chosen.served_name
    assert found.port == chosen.serve_port
    assert found.memory.utilisation == chosen.serving.gpu_memory_utilization
    assert found.memory.hard_floor_gib == pytest.approx(chosen.floors.hard, abs=0.001)
    assert found.memory.soft_floor_gib == pytest.approx(chosen.floors.soft, abs=0.001)
    assert found.memory.device == chosen.route_data.accelerator
    assert found.questions[0].expect == ("Paris",)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8899"),
        ("0.0.0.0", "http://127.0.0.1:8899"),
        ("::", "http://[::1]:8899"),
        ("::1", "http://[::1]:8899"),
        ("192.168.1.20", "http://192.168.1.20:8899"),
    ],
)
def test_the_machine_reaches_its_own_server(host: str, url: str) -> None:
    beyond = {} if host in {"127.0.0.1", "::1"} else REMOTE
    assert s.load({**beyond, "serve_host": host}).url == url


PLAIN = set(string.ascii_letters + string.digits + "/._:-")


def test_the_environment_is_plain_words() -> None:
    """systemd's file is no shell: nothing in it may need a quote."""
    chosen = s.load(LAB)
    found = chosen.environment()
    assert all(set(value) <= PLAIN and value for value in found.values())
    lines = chosen.environment_text().splitlines()
    assert dict(line.split("=", 1) for line in lines if not line.startswith("#")) == found
    assert found["TORCHDYNAMO_DISABLE"] == "1"
    assert found["HF_HUB_OFFLINE"] == "1"
    assert found["VLLM_CACHE_ROOT"].startswith(f"{layout.CACHE}/{chosen.runtime_id}/")
    assert "CUDA_HOME" not in found


def spark_environment(monkeypatch: pytest.MonkeyPatch, **data: object) -> dict[str, str]:
    """Return the environment of a route whose lock is not there yet."""
    monkeypatch.setattr(routes.Route, "lock", property(lambda _: layout.LOCAL_LOCKS / "lab.lock"))
    return s.load(data).environment(toolkit="13.0")


def test_the_environment_of_a_spark_bounds_compilers_and_keeps_kernels_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = spark_environment(monkeypatch)
    assert all(set(value) <= PLAIN and value for value in found.values())
    assert found["MAX_JOBS"] == "1"
    assert found["TORCH_CUDA_ARCH_LIST"] == found["FLASHINFER_CUDA_ARCH_LIST"] == "12.1a"
    assert found["TRITON_PTXAS_PATH"] == "/usr/local/cuda-13.0/bin/ptxas"
    assert "-cuda-13.0/" in found["TRITON_CACHE_DIR"]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found
    long = spark_environment(monkeypatch, preset="256k")
    assert long["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    # 121.63 * (1 - 0.78) - 5.9 = 20.9 GiB beside the engine: (20.9 - 8) / 2
    assert spark_environment(monkeypatch, serve_gpu_memory_utilization=0.78)["MAX_JOBS"] == "6"


def test_fetch_spec_is_what_the_fetcher_reads() -> None:
    chosen = s.load({**LAB, "hub_endpoint": "http://127.0.0.1:8790"})
    assert chosen.fetch_spec("a" * 40) == {
        "schema": 1,
        "repo_id": "lab/tiny",
        "name": "lab-tiny",
        "revision": "a" * 40,
        "endpoint": "http://127.0.0.1:8790",
        "environment": {},
        "transport": "http",
        "workers": 4,
        "expected": {"shards": 4, "exl3": None, "components": {}},
        "code": [],
    }
    asked = chosen.model_copy(update={"pack": "mixedk", "fetch_transport": "xet"})
    expected = asked.fetch_spec("a" * 40)["expected"]
    assert expected["shards"] == 48
    assert expected["exl3"]["bits"] == 2
    assert expected["exl3"]["layer_bits"]["13"] == 3
    assert fetch.parse_spec(asked.fetch_spec("a" * 40)).expected.layer_bits[13] == 3


def test_the_fetcher_is_told_how_to_reach_the_network() -> None:
    chosen = s.load({**LAB, "hub_proxy": "http://10.0.0.1:3128", "hub_ca_file": "/etc/ssl/own.pem"})
    assert chosen.fetch_environment == {
        "http_proxy": "http://10.0.0.1:3128",
        "https_proxy": "http://10.0.0.1:3128",
        "no_proxy": "localhost,127.0.0.1,::1",
        "SSL_CERT_FILE": "/etc/ssl/own.pem",
    }
    assert fetch.parse_spec(chosen.fetch_spec("a" * 40)).environment == chosen.fetch_environment
    assert "hub_proxy: must be an address" in only_fault(hub_proxy="http://me:secret@10.0.0.1:1")


@pytest.mark.parametrize("data", SAMPLES)
def test_settings_are_plain_data_for_a_receipt(data: dict[str, object]) -> None:
    chosen = s.load(data)
    assert json.loads(json.dumps(chosen.plain())) == chosen.plain()
    own = {key: value for key, value in chosen.plain().items() if key != "serving"}
    assert s.load(own) == chosen


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        s.load({}).serve_port = 1


# --- junk -----------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(
        [10**400, "9" * 5000, "\ud800", "\uff11", "-0", "1e999", "nan", "[1", "::1%1"]
    ),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=6,
)
KEYS = st.sampled_from(sorted(s.Settings.model_fields)) | st.text() | st.integers() | st.none()


@given(st.dictionaries(KEYS, JUNK, max_size=8))
@effort(max_examples=120, deadline=None)
def test_junk_is_refused_in_words_and_never_crashes(data: dict[Any, Any]) -> None:
    """Whatever stands there, the answer is settings or lines a person can read."""
    found: tuple[str, ...] = ()
    try:
        s.load(data)
    except s.SettingsError as error:
        found = error.faults or ("",)
    for fault in found:
        assert fault.isprintable()
        assert 0 < len(fault) < 600


def test_a_value_that_cannot_even_be_shown_is_still_refused() -> None:
    class Evil:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "(got a Evil)" in only_fault(serve_port=Evil())
    assert "(got a int)" in only_fault(serve_port=10**5000)
    assert "(got a int)" in only_fault(serve_name=10**5000)


# --- documentation --------------------------------------------------------------------------------


def test_every_setting_says_what_it_is_in_one_sentence() -> None:
    for key, field in s.Settings.model_fields.items():
        text = field.description or ""
        assert text.endswith("."), key
        assert ". " not in text, key
        assert "|" not in text, key


def test_the_readme_says_what_the_code_says() -> None:
    """Out of date? python -m deploy.readme."""
    text = layout.README.read_text()
    assert readme.render(text) == text


def test_a_setting_belongs_to_one_concern() -> None:
    keys = [key for concern in s.CONCERNS for key in concern.model_fields]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(s.Settings.model_fields)


def test_the_tables_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert s.main(["--table"]) == 0
    assert routes.main(["--table"]) == 0
    assert capsys.readouterr().out == s.table() + routes.table()
    assert s.main([]) == 2
    assert routes.main(["--tabel"]) == 2


@pytest.mark.parametrize(
    ("route", "load_format", "words"),
    [
        ("stable", "instanttensor", None),
        ("latest", "fastsafetensors", None),
        ("nightly", "fastsafetensors", None),
        ("nightly", "instanttensor", "the lock of route nightly does not have; use auto or fast"),
        ("stable", "runai_streamer", "needs runai-model-streamer"),
        ("lab", "fastsafetensors", "does not have; use auto"),
    ],
)
def test_a_loader_must_be_in_the_lock(route: str, load_format: str, words: str | None) -> None:
    """An engine without it would fail after minutes of starting."""
    data = {"route": route, "serve_load_format": load_format}
    if words is None:
        assert s.load(data).serve_yaml()["load-format"] == load_format
        return
    with pytest.raises(s.SettingsError, match=f"^serve_load_format: .*{words}"):
        s.load(data)


def test_reading_ahead() -> None:
    """Off unless asked for, and not beside a loader that reads by itself."""
    assert "load-format" not in s.load({}).serve_yaml()
    assert s.load({}).guard()["readahead"] == {"enabled": False, "window_gib": 8.0}
    chosen = s.load({"service_readahead": True, "service_readahead_gib": 4})
    assert chosen.guard()["readahead"] == {"enabled": True, "window_gib": 4.0}
    data = {"route": "stable", "service_readahead": True, "serve_load_format": "instanttensor"}
    with pytest.raises(s.SettingsError, match="service_readahead: is of no use with"):
        s.load(data)


@pytest.mark.parametrize(
    ("pack_dir", "root"),
    [
        (None, "/var/lib/dsv4/packs"),
        ("/srv/pack", "/srv/pack"),
        ("/srv/hub/models--a--b/snapshots/0123", "/srv/hub/models--a--b/snapshots/0123"),
    ],
)
def test_what_counts_as_the_pack(pack_dir: str | None, root: str) -> None:
    """What these names reach is found out on the machine, where the links are."""
    data = {} if pack_dir is None else {"pack_dir": pack_dir}
    assert s.load(data).guard()["pack_root"] == root
