"""By which of this host's network interfaces a worker is reached: NCCL is told names, not addresses."""

from __future__ import annotations

import os
from ipaddress import ip_address

import psutil

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


def bind_nccl(address: str) -> None:
    """Let NCCL use the interface of an address alone, unless this machine's owner has named others.

    It looks once, when it is first used.

    Args:
        address: The one that peers reach this worker by.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault(_VARIABLE, f"={name}")  # "=": this name, not all that begin so


__all__ = ["bind_nccl", "interface_of"]
