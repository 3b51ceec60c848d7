"""Where rank 0 serves the key-value stores of a job: on one address, not on every network of its machine.

torch's store listens on all addresses when it is left to choose, and asks nobody for a password. Whoever reaches it can
change plans, and where ranks look for one another. So it gets a socket that is bound already: to the loopback device
where all ranks are on one machine, else to the address by which the others know rank 0.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096


def master_host(environ: Mapping[str, str]) -> str:
    """Where rank 0 is, as the others reach it.

    Args:
        environ: Of a rank.
    """
    is_one_machine = environ.get("LOCAL_WORLD_SIZE", "") == environ.get("WORLD_SIZE")
    return LOOPBACK if is_one_machine else environ["MASTER_ADDR"]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at the address by which other machines know this one.

    Where the name leads to the loopback device although ranks are elsewhere, or to no address of this machine (address
    translation, virtual addresses), no one address is right, and it listens on all of them, as torch would.

    Raises:
        OSError: the port is taken.
    """
    for family, address in _addresses(host):
        with contextlib.suppress(OSError):
            if host != LOOPBACK and address.startswith(("127.", "::1")):
                continue
            return _bound(family, address, port)
    return _bound(socket.AF_INET6, "::", port) if socket.has_dualstack_ipv6() else _bound(socket.AF_INET, "", port)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address == "::":
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((address, port))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made
