"""Tell systemd how a unit is doing (the sd_notify protocol), and never wait for it."""

import os
import socket


def notify(text: str) -> bool:
    """Send one message; False where nobody listens or the socket is full."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            channel.sendto(text.encode(), address)
    except OSError:
        return False
    return True
