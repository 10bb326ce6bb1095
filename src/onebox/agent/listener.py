"""The agent's listening socket: permitted addresses, limits and options."""

from __future__ import annotations

from ipaddress import ip_address

import zmq

from onebox.errors import UsageError
from onebox.wire import KeyPair, configure

REQUEST_BYTES = 64 << 10
"""Limit of a client's message: a request for 256 devices takes a tenth of it."""

QUEUE = 256
"""Limit of queued messages on one connection, each way."""

_SILENT_MS = 10_000


def check_address(bind: str, port: int, advertise: str, has_clients: bool) -> None:
    """Require that an agent may listen on an address, and that the advertised one is valid.

    Raises:
        UsageError: It may not, or the advertised address is invalid.
    """
    try:
        address = ip_address(bind)
    except ValueError:
        raise UsageError(f"{bind!r} is no IP address to listen at; name one of this host, or 0.0.0.0 for all") from None
    if not 0 <= port < 1 << 16:
        raise UsageError(f"port {port}; allowed are 1 to 65535, and 0 for any that is free")
    if not address.is_loopback and not has_clients:
        raise UsageError(
            f"nobody is paired with this agent, so it does not listen at {bind}, where others could reach it: pair a "
            "client first (onebox pair accept), or listen at 127.0.0.1"
        )
    if advertise in ("", "0.0.0.0", "::") or not advertise.isprintable() or set(advertise) & set(" /[]@"):
        raise UsageError(f"{advertise!r} is no address that clients could connect to; advertise one of this host")


def listen_at(socket: zmq.Socket[bytes], keys: KeyPair, bind: str, port: int) -> str:
    """Bind the agent's socket and return its endpoint.

    Raises:
        UsageError: The port is taken, or the address does not belong to this host.
    """
    configure(socket, keys, server_key=None, queue=QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
    # no ZeroMQ heartbeats: libzmq 4.3.5 aborts where a connection whose input is stopped is reset
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.setsockopt(zmq.TCP_MAXRT, _SILENT_MS)
    socket.ipv6 = ":" in bind
    try:
        socket.bind(f"tcp://{f'[{bind}]' if ':' in bind else bind}:{port or '*'}")
    except zmq.ZMQError as error:
        raise UsageError(f"cannot listen at {bind}, port {port}: {error.strerror}; name another with --port") from None
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")
