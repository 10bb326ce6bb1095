"""By which of this host's network interfaces a worker is reached: NCCL is told names, not addresses."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_address

import psutil


class NoAddress(Exception):
    """This host is reached by an address that is not its own, as behind a NAT."""


_VARIABLE = "NCCL_SOCKET_IFNAME"


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address; ``None`` where none has it, as behind a NAT.

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
            except ValueError:  # that of another layer
                continue
    return None


def is_foreign(address: str) -> bool:
    """Tell whether an IP address is none of this host's; of a name that is not told.

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
    """Let NCCL use the interface of an address alone, unless this machine's owner has named others.

    It looks once, when it is first used.

    Args:
        address: The one that peers reach this worker by.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault(_VARIABLE, f"={name}")  # "=": this name, not all that begin so


__all__ = ["NoAddress", "bind_nccl", "interface_of", "is_foreign"]
