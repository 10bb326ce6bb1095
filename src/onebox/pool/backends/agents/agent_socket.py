"""A client's socket to an agent, with errors derived from ZeroMQ's connection events."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket as sockets
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

import zmq

from onebox.errors import PoolError, UsageError
from onebox.pool.keys.keyring import fingerprint, full_address
from onebox.wire import KeyPair, ReceiveWatch, configure, detect_dead_peers
from onebox.wire.protocol.agents import MESSAGE_BYTES, TOKEN_BYTES

UNREAD_BYTES = 16 * MESSAGE_BYTES
"""Limit of what an agent sends without completing a message."""

_HINTS = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "what listens there has not the key that was paired with: pair again",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "what listens there is no agent",
    int(zmq.EVENT_CONNECTED): "something listens there, but does not answer: it may hang, or have another key",
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): (
        "it has let this client in, but does not answer: it may hang, or take no more from this client, which has sent "
        "it too much; its journal has a line over-limit then"
    ),
}
_NOTHING = "the host may be down, or a firewall between"

_SURE = 3
"""Handshakes in a row that end without a word before the first success: fewer may come from an agent that is shutting
down."""

WITHIN_S = 5.0
"""How long a host may take to accept; one that is down, or behind a firewall, never answers."""

_REFUSED_S = 1.0
"""How long a refused connection is tried again: the agent may be starting."""

_PAUSE_S = 0.1


class AgentSocket:
    """A socket that connects to an agent and reconnects by itself; used by one thread.

    Args:
        address: ``HOST`` or ``HOST:PORT``.
        key: The agent's public key.
        mine: The client's key pair.

    Raises:
        UsageError: The host has no address.
    """

    def __init__(self, address: str, key: str, mine: KeyPair) -> None:
        self._address = address
        self._hint = _NOTHING
        self._key = key
        self._let_in, self._mute = 0, 0
        self._reached = False
        self.unreached = False
        """True if the last attempt to connect has failed."""
        where = split(address)
        family = resolve(address)[0]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.DEALER)
        configure(self.socket, mine, server_key=key)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self.socket.setsockopt(zmq.IPV6, family == sockets.AF_INET6)
        detect_dead_peers(self.socket)
        self._watch = ReceiveWatch(self.socket, UNREAD_BYTES, events=zmq.EVENT_ALL)
        self.monitor: Any = self._watch.monitor
        self.socket.connect(f"tcp://{where[0]}:{where[1]}")

    @property
    def cuts(self) -> int:
        """How often the connection was interrupted and came back."""
        return max(0, self._let_in - 1)

    def send(self, frame: bytes) -> None:
        """Send a message; it is dropped where a queue of a thousand messages is full."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([self._token, frame], zmq.NOBLOCK)

    def receive(self) -> bytes | None:
        """Return the next message, ``None`` where there is none; messages of several frames are not an agent's and are
        dropped."""
        try:
            frame = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._watch.delivered()
        while self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv(zmq.NOBLOCK)
            frame = b""
        return frame

    def watch(self) -> PoolError | None:
        """Process ZeroMQ's connection events; return the error where this client is refused."""
        refusal = None
        self._watch.check(time.monotonic())  # an agent that sends what is no message is cut off
        for event, _ in self._watch.attend():
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                refusal = PoolError(
                    f"the agent at {self._address} does not let this client in; pair with it: "
                    f"onebox pair connect {self._address}"
                )
            self._let_in += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._mute += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            if self._mute >= _SURE and not self._let_in:
                refusal = self._another_key()
            if event == zmq.EVENT_CONNECTED:
                self.unreached, self._reached = False, True
            if event == zmq.EVENT_CONNECT_RETRIED:  # also follows an established connection that broke
                self.unreached, self._reached = not self._reached, False
            self._hint = _HINTS.get(event, self._hint)
        return refusal

    def _another_key(self) -> PoolError:
        return PoolError(
            f"WHAT LISTENS AT {self._address} HAS NOT THE KEY THAT THIS CLIENT WAS PAIRED WITH\n"
            f"  paired with:  {fingerprint(self._key)}\n"
            "  Its keys were made anew, or another program listens there; nothing was sent to it. Ask its owner, and "
            "compare: 'onebox pair list' there shows its fingerprint.\n"
            f"  If it has new keys, pair again: 'onebox pair accept' there, 'onebox pair connect {self._address}' here."
        )

    def absent(self, waited_s: float) -> PoolError:
        """Return the error for an agent that has not answered."""
        return PoolError(f"no answer from an agent at {self._address} within {waited_s:.0f} s: {self._hint}")

    def close(self) -> None:
        """Close the socket after the last messages have been sent."""
        self._watch.close()
        self.socket.close(500)
        self._context.term()


def split(address: str) -> tuple[str, int]:
    """Return host and port of an agent's address; the host of IPv6 keeps its brackets.

    Raises:
        UsageError: The address is invalid.
    """
    host, _, port = full_address(address).rpartition(":")
    return host, int(port)


def resolve(address: str) -> tuple[Any, ...]:
    """Return the socket address of an agent, IPv4 where its host has one, because agents listen on one address.

    Raises:
        UsageError: The host has no address.
    """
    host, port = split(address)
    try:
        found = sockets.getaddrinfo(host.strip("[]"), port, type=sockets.SOCK_DGRAM)
    except OSError as error:
        raise UsageError(f"the host of {address} has no address: {error.strerror or error}") from None
    return min(found, key=lambda each: each[0] != sockets.AF_INET)


def own_address(address: str) -> str:
    """Return the address of this host from which it reaches an agent.

    Raises:
        UsageError: The agent's host has no address, or there is no route to it.
    """
    family, kind, protocol, _, where = resolve(address)
    with sockets.socket(family, kind, protocol) as probe:
        try:
            probe.connect(where)  # of a datagram socket: nothing is sent
        except OSError as error:
            raise UsageError(f"there is no way from this host to {address}: {error.strerror or error}") from None
        return str(probe.getsockname()[0])


def address_towards(agents: Sequence[str]) -> str:
    """Return the address at which workers of other hosts reach those of this one: that from which it reaches agents.

    Args:
        agents: The agents' addresses, of which there is one at least.

    Raises:
        UsageError: As :func:`own_address`.
    """
    addresses = [own_address(agent) for agent in agents]
    outside = [address for address in addresses if not ip_address(address.partition("%")[0]).is_loopback]
    return [*outside, *addresses][0]


def reach(address: str) -> None:
    """Check that an agent's address accepts TCP connections, where ZeroMQ would retry in silence.

    An agent reports a connection without a handshake, so this is for addresses at which an attempt has failed.

    Args:
        address: ``HOST`` or ``HOST:PORT``.

    Raises:
        UsageError: Its host has no address.
        PoolError: Nothing listens there, or the host does not answer.
    """
    family, *_, where = resolve(address)
    began_s = time.monotonic()
    while True:
        with sockets.socket(family, sockets.SOCK_STREAM) as probe:
            probe.settimeout(WITHIN_S)
            try:
                probe.connect(where)
            except TimeoutError:
                raise PoolError(
                    f"no answer from {address} within {WITHIN_S:.0f} s: the host may be down, or a firewall between; "
                    "'onebox status' shows the agents that can be reached"
                ) from None
            except OSError as error:
                if error.errno != errno.ECONNREFUSED:
                    raise PoolError(f"{address} cannot be reached: {error.strerror or error}") from None
            else:
                return
        if time.monotonic() - began_s > _REFUSED_S:
            raise PoolError(
                f"nobody listens at {address}: run 'onebox serve' on that host, or mend the address ('onebox pair "
                "list' has those of the agents that you know)"
            )
        time.sleep(_PAUSE_S)
