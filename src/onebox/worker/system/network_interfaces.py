"""The network interface under which a worker is reachable: NCCL takes names, not addresses."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_address

import psutil


class NoAddress(Exception):
    """This host is reached under an address of another host, as behind a NAT."""


_VARIABLE = "NCCL_SOCKET_IFNAME"


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an address; ``None`` if there is none, as behind a NAT.

    Args:
        address: An IP address.
    """
    try:
        wanted = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            try:
                if ip_address(each.address.partition("%")[0]) == wanted:
                    return name
            except ValueError:  # of another address family
                continue
    return None


def is_foreign(address: str) -> bool:
    """Return whether an IP address does not belong to this host; false for names.

    Example:
        >>> is_foreign("127.0.0.1"), is_foreign("192.0.2.1"), is_foreign("lab1")
        (False, True, False)
    """
    try:
        version = ip_address(address.partition("%")[0]).version
    except ValueError:
        return False
    with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL
    return False


def bind_nccl(address: str) -> None:
    """Restrict NCCL to the interface of an address, unless the machine's owner has configured others.

    NCCL reads this once, at first use.

    Args:
        address: The address under which peers reach this worker.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault(_VARIABLE, f"={name}")  # "=": exactly this name, not a prefix


__all__ = ["NoAddress", "bind_nccl", "interface_of", "is_foreign"]
