"""Who may reach the server's port, in the kernel: a table of our own in nftables.

systemd's `IPAddressAllow=` stands in front of the whole engine, but it needs control groups of
version 2, and cannot be had where the engine fetches images from named hosts. This is about one
port and needs neither. The table is ours alone, so nothing an owner or another program has set up
is touched: what it drops is dropped, what it lets through goes on to the other rules (ufw, Docker).

Applied by the first hook of each start, before the engine listens, and in one transaction.
"""

import subprocess
from collections.abc import Sequence
from ipaddress import ip_network
from typing import Final

TABLE: Final = "dsv4"
NFT: Final = "/usr/sbin/nft"
TIMEOUT_S: Final = 20


def ruleset(port: int, networks: Sequence[str], table: str = TABLE) -> str:
    """Return what nft is to carry out; without networks no table of ours is left."""
    # Named before it is deleted, because deleting what is not there fails
    lines = [f"table inet {table}", f"delete table inet {table}"]
    if networks:
        parsed = [ip_network(network) for network in networks]
        accepts = [
            f"tcp dport {port} {family} saddr {{ {', '.join(nets)} }} accept"
            for family, version in (("ip", 4), ("ip6", 6))
            if (nets := [str(net) for net in parsed if net.version == version])
        ]
        rules = [f'iif "lo" tcp dport {port} accept', *accepts, f"tcp dport {port} drop"]
        # Before the priority at which other programs accept or translate
        chain = ["type filter hook input priority -10; policy accept;", *rules]
        lines += [f"table inet {table} {{", "chain input {", *chain, "}", "}"]
    return "\n".join([*lines, ""])


def is_loaded(table: str = TABLE) -> bool:
    """Say whether the kernel has a table of ours; only root is told."""
    try:
        done = subprocess.run(
            [NFT, "list", "tables"],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return f"table inet {table}" in done.stdout.splitlines()


def fault(port: int, networks: Sequence[str]) -> str | None:
    """Apply the rules; return why they do not hold, None when they do."""
    try:
        done = subprocess.run(
            [NFT, "-f", "-"],
            input=ruleset(port, networks),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError:
        # Nothing to take away either: no nft, no table of ours
        return f"{NFT} is not there; deploy again to install it" if networks else None
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the firewall could not be set ({error})" if networks else None
    if done.returncode == 0 or not networks:
        return None
    said = (done.stderr.strip().splitlines() or ["no reason given"])[0]
    return f"the firewall could not be set: {said}; without it nobody is kept from port {port}"
