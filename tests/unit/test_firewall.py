"""Who may reach the port: the rules that nft is given."""

import pytest

from dsv4 import firewall


def test_networks_get_in_and_nobody_else() -> None:
    """Both kinds of address, this machine always; one transaction that begins from nothing."""
    text = firewall.ruleset(8899, ["192.168.1.0/24", "10.0.0.0/8", "fd00::/8"])
    lines = text.splitlines()
    assert lines[:2] == ["table inet dsv4", "delete table inet dsv4"]
    rules = [line for line in lines if "dport" in line]
    assert rules == [
        'iif "lo" tcp dport 8899 accept',
        "tcp dport 8899 ip saddr { 192.168.1.0/24, 10.0.0.0/8 } accept",
        "tcp dport 8899 ip6 saddr { fd00::/8 } accept",
        "tcp dport 8899 drop",
    ]


def test_without_networks_nothing_is_left() -> None:
    """A server that only the machine reaches needs no rules, and keeps none of an earlier one."""
    assert firewall.ruleset(8899, []) == "table inet dsv4\ndelete table inet dsv4\n"


@pytest.mark.parametrize("network", ["everywhere", "10.0.0.1/8", "10.0.0.0/8; flush ruleset"])
def test_only_networks_get_into_the_rules(network: str) -> None:
    with pytest.raises(ValueError, match=r"does not appear|host bits"):
        firewall.ruleset(8899, [network])


def test_a_firewall_that_cannot_be_set_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is asked for, the start must not go on without; where none is, nothing is wrong."""
    monkeypatch.setattr(firewall, "NFT", "/nowhere/nft")
    assert "is not there" in str(firewall.fault(8899, ["10.0.0.0/8"]))
    assert firewall.fault(8899, []) is None
    monkeypatch.setattr(firewall, "NFT", "/bin/false")
    assert "could not be set" in str(firewall.fault(8899, ["10.0.0.0/8"]))
    assert firewall.fault(8899, []) is None
