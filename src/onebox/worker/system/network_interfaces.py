"""The network interface under which a worker is reachable, and what NCCL is configured to use: it takes names, not
addresses."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil


class NoAddress(Exception):
    """This host has no address at which workers may listen for each other."""


class ForeignAddress(NoAddress):
    """This host is reached under an address of another host, as behind a NAT."""


_NET = Path("/sys/class/net")
_FAMILIES = {4: "AF_INET", 6: "AF_INET6"}

_bound: dict[str, str] = {}
"""Environment variables that :func:`bind_nccl` has set; others are those of the machine's owner."""


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


def listening_address(address: str) -> str:
    """Return an address of this host as a number, to listen at.

    Args:
        address: An IP address, or a name that stands for some.

    Raises:
        ForeignAddress: It is not this host's.
        NoAddress: It is not known here; or it stands for all addresses, where everybody could connect.

    Example:
        >>> listening_address("127.0.0.1")
        '127.0.0.1'
    """
    try:
        found = socket.getaddrinfo(address or "0.0.0.0", 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoAddress(f"this host does not know {address!r}, where other workers would connect to: {error}") from None
    for family, _, _, _, endpoint in found:
        number = ip_address(str(endpoint[0]).partition("%")[0])
        if number.is_unspecified or getattr(number, "ipv4_mapped", None) == ip_address("0.0.0.0"):
            raise NoAddress(
                f"{address} stands for all addresses of a host: workers listen for each other at one; name one with "
                "onebox serve --advertise"
            )
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind(endpoint)
            return str(endpoint[0])
    raise ForeignAddress(f"this host has no address {address} of its own, where other workers would connect to")


def forwarded_address(address: str, bound: str) -> tuple[str, str]:
    """Return an address of this host to listen at, and the one by which others get there; both as numbers.

    Args:
        address: The IP address, or name, by which others reach this host.
        bound: This host's own address to which that one is forwarded if it is another host's, such as a router's;
            empty if that is not known.

    Raises:
        NoAddress: As :func:`listening_address`, of the one or the other.

    Example:
        >>> forwarded_address("127.0.0.1", "")
        ('127.0.0.1', '127.0.0.1')
        >>> forwarded_address("192.0.2.1", "127.0.0.1")
        ('127.0.0.1', '192.0.2.1')
    """
    try:
        found = listening_address(address)
    except ForeignAddress:
        if not bound:
            raise
        others = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        return listening_address(bound), str(others[0][4][0])
    return found, found


def bind_nccl(address: str) -> None:
    """Restrict NCCL to the interface of an address, and to its RDMA device if it has one; variables that the machine's
    owner has set stay as they are.

    Without it NCCL takes the first interface and all InfiniBand devices, which may belong to other networks than that
    of the pool. NCCL reads this once, at first use.

    Args:
        address: The address under which peers reach this worker.
    """
    name = interface_of(address)
    version = 0 if name is None else ip_address(address.partition("%")[0]).version
    rdma = [] if name is None else _rdma(name)
    _set("NCCL_SOCKET_IFNAME", "" if name is None else f"={name}")  # "=": exactly this name, not a prefix
    _set("NCCL_SOCKET_FAMILY", _FAMILIES.get(version, ""))
    _set("NCCL_IB_DISABLE", "" if rdma else "1")
    _set("NCCL_IB_HCA", "=" + ",".join(rdma) if rdma else "")


def _rdma(interface: str) -> list[str]:
    """Return the names of the RDMA devices of an interface, such as ``mlx5_0``."""
    with suppress(OSError):
        return sorted(os.listdir(_NET / interface / "device" / "infiniband"))
    return []


def _set(variable: str, value: str) -> None:
    """Set an environment variable, or remove it if the value is empty, unless it is the owner's."""
    if os.environ.get(variable) != _bound.get(variable):
        return
    if value:
        os.environ[variable] = _bound[variable] = value
    elif _bound.pop(variable, None) is not None:
        del os.environ[variable]


__all__ = ["ForeignAddress", "NoAddress", "bind_nccl", "forwarded_address", "interface_of", "listening_address"]
