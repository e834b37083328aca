"""Who gets through the firewall, tried between two network namespaces: run on a lab machine.

    unshare --map-root-user --net env PYTHONPATH=/opt/dsv4/lib python3 network.py NFT

The namespaces are the script's own, so nothing outside of them is touched. One is the server; the
other is a computer with an address in the allowed networks and one outside. Prints, for no rules,
with networks, and with none again, which connections came about.
"""

import contextlib
import json
import socket
import subprocess
import sys

from dsv4 import firewall

PORT, OTHER, FAMILY = 8899, 8900, socket.AF_INET6
NETWORKS = ["10.77.0.0/24", "fd77::/64"]
CLIENT = (
    "import socket,sys;socket.create_connection((sys.argv[1],int(sys.argv[2])),1,(sys.argv[3],0))"
)
OWNERS = "add table inet owner\n"


def run(command: str, text: str = "") -> str:
    return subprocess.run(
        command, shell=True, check=True, input=text, capture_output=True, text=True
    ).stdout


def connects(inside: str, server: str, port: int, client: str) -> bool:
    argv = [*inside.split(), sys.executable, "-c", CLIENT, server, str(port), client]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def tried(inside: str) -> dict[str, bool]:
    return {
        "loopback": connects("env", "127.0.0.1", PORT, "127.0.0.1"),
        "inside": connects(inside, "10.77.0.1", PORT, "10.77.0.2"),
        "outside": connects(inside, "10.88.0.1", PORT, "10.88.0.2"),
        "inside, IPv6": connects(inside, "fd77::1", PORT, "fd77::2"),
        "outside, IPv6": connects(inside, "fd88::1", PORT, "fd88::2"),
        "outside, another port": connects(inside, "10.88.0.1", OTHER, "10.88.0.2"),
    }


def join(computer: int, inside: str) -> None:
    run(f"ip link set lo up; ip link add here type veth peer name there netns {computer}")
    for number, (prefix, end) in enumerate((("", "here"), (inside, "there")), 1):
        for net in ("10.77.0.{}/24", "10.88.0.{}/24", "fd77::{}/64", "fd88::{}/64"):
            # Without the search for duplicates an address of IPv6 counts at once
            last = "nodad" if ":" in net else ""
            run(f"{prefix} ip address add {net.format(number)} dev {end} {last}")
        run(f"{prefix} ip link set {end} up")


def main() -> None:
    firewall.NFT = sys.argv[1]  # type: ignore[misc]
    computer = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 60"], stdout=-1)
    try:
        assert computer.stdout
        computer.stdout.readline()
        inside = f"nsenter --net --target {computer.pid}"
        join(computer.pid, inside)
        with contextlib.ExitStack() as stack:
            for port in (PORT, OTHER):
                both = socket.create_server(("::", port), family=FAMILY, dualstack_ipv6=True)
                stack.enter_context(both)
            run(f"{firewall.NFT} -f -", OWNERS)
            found = {"before": tried(inside)}
            for _ in range(2):  # as at a second start
                assert firewall.fault(PORT, NETWORKS) is None
            found["limited"] = tried(inside)
            assert firewall.fault(PORT, []) is None
            found["after"] = tried(inside)
        assert "table inet owner" in run(f"{firewall.NFT} list ruleset")
        print(json.dumps(found))
    finally:
        computer.kill()


main()
