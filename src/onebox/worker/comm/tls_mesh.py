"""Encrypted connections between the workers of a group: TLS 1.3, in which both ends show a certificate that the
client's rendezvous has handed to the other.

Each worker makes a key of its own for the group, which never leaves it. A pair of workers has a connection for each
direction, so that no two threads use one: OpenSSL's do not allow it. Over a long way it has several for each, as the
kernel's window of one may fill a part of it only; until that shows, the first alone is used. Each rank
connects to all others, and listens for them at one port, which it closes when all have come.

Where a rank cannot connect to another one, the client connects to the listeners of both and relays: the same TLS goes
through it, from end to end.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import NamedTuple, Protocol

from onebox.errors import WireError
from onebox.wire.relay_greeting import FIRST_BYTE, GREETING_BYTES, TOKEN_BYTES, decode_greeting, greeting_reply
from onebox.worker.comm.api import KeyValueStore, RankLost
from onebox.worker.comm.certificate import Certificate, new_certificate
from onebox.worker.comm.link_meter import LinkMeters, round_trip_s

HANDSHAKE_S = 3.0
"""Time limit of a handshake, and of one attempt to connect."""

DIRECT_S = 3.0
"""Time after which a peer whose host cannot be connected to is asked for by way of the client."""

REFUSING_S = 10.0
"""The same for a peer whose host takes connections, but does not complete them: it may be busy."""

KNOWN_S = 0.3
"""The same for a host that could not be connected to before; and time limit of one attempt meanwhile."""

CONNECT_S = 20.0
"""Time after which a peer that cannot be connected to is given up: longer than an interruption that a run survives."""

ACCEPT_S = 60.0
"""Time after which peers that have not connected are given up."""

MOST_CONNECTIONS = 4
"""Most connections from one worker to another one."""

_MOST_OUTGOING = 64
"""Most connections from one worker to all others of a group, if some have several."""

WINDOW_BYTES = 5 << 19
"""Bytes that one connection has on the way at most: those of tensors in Linux's usual ``tcp_wmem`` of 4 MiB, of which
the kernel takes its own part (0.5 Gbit/s with 40 ms there and back: docs/how-to/slow-networks.md)."""

_FULL_BPS = 2.5e8
"""Bytes per second for which there are connections: 2 Gbit/s, which is about what one thread encrypts."""

_PENDING = 64
"""Most handshakes of one worker at a time: another connection ends the oldest."""

_RETRY_S = 0.02
_AGAIN_S = 0.2
_ACCEPTED = b"\x01"
_RECORD_OF_HANDSHAKE = b"\x16"  # of TLS (RFC 8446, 5.1)


class MembershipStore(KeyValueStore, Protocol):
    """A group's key-value store that fails once the group is dissolved."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set.

        Raises:
            RankLost: The group is dissolved.
        """


class RelayClient(Protocol):
    """The client, as one that connects workers which cannot reach each other."""

    def listening(self, port: int, token: bytes) -> None:
        """Tell it of this worker's listener."""

    def request(self, peer: int) -> None:
        """Ask it to relay what this worker sends to a rank."""


@dataclass(frozen=True, kw_only=True)
class GroupNetwork:
    """This worker's place in the network, for all its groups.

    Args:
        bound: The address of this host at which it listens where others reach it under an address that is not its own,
            as behind a NAT; empty if there is none.
        ports: Ports to listen at, of which the first free one is used; if there is none, any.
        unreachable: Hosts that could not be connected to.
        meters: The meters of its connections.
    """

    bound: str = ""
    ports: Sequence[int] = ()
    unreachable: set[str] = field(default_factory=set)
    meters: LinkMeters = field(default_factory=LinkMeters)


class DuplexLink(NamedTuple):
    """Connections with one peer, at least one for each direction, in the order in which the one that writes made them.

    Args:
        outgoing: To write to it.
        incoming: To read from it.
    """

    outgoing: tuple[ssl.SSLSocket, ...]
    incoming: tuple[ssl.SSLSocket, ...]

    def close(self) -> None:
        """Close all."""
        _close(self.outgoing + self.incoming)


class _Peer(NamedTuple):
    rank: int
    host: str
    port: int
    certificate: bytes


def connect_mesh(
    rank: int,
    size: int,
    address: str,
    store: MembershipStore,
    *,
    advertised: str = "",
    network: GroupNetwork | None = None,
    relay: RelayClient | None = None,
    connect_s: float = CONNECT_S,
) -> dict[int, DuplexLink]:
    """Connect to all other ranks of a group; all of them call it.

    Args:
        rank: This worker's rank.
        size: Number of ranks.
        address: This host's IP address to listen at.
        store: The group's key-value store, whose contents are authentic.
        advertised: The IP address that leads the others there; ``address`` by default.
        network: The ports to listen at, and the hosts that could not be connected to before.
        relay: The client, for peers that cannot be connected to; ``None`` to do without.
        connect_s: Time limit for a connection to one of them.

    Returns:
        The connections with each other rank. Nothing listens any more.

    Raises:
        RankLost: A rank did not come, cannot be reached, or does not have its key.
        WireError: What a rank says of itself is not understood.
    """
    own, token = new_certificate(), secrets.token_bytes(TOKEN_BYTES)
    network = network or GroupNetwork()
    with _listener(address, network.ports, _PENDING + size) as listener:
        port = listener.getsockname()[1]
        store.set(f"tls/{rank}", f"{advertised or address} {port} {own.der.hex()}")
        others = [other for other in range(size) if other != rank]
        told = store.multi_get([f"tls/{other}" for other in others])
        peers = [_parse(other, text) for other, text in zip(others, told, strict=True)]
        if len({peer.certificate for peer in peers} | {own.der}) != size:
            raise WireError("two workers of a group show the same certificate")
        if advertised != address:  # a router's, whose way back to a host behind it few routers know
            peers = [peer._replace(host=address) if peer.host == advertised else peer for peer in peers]
        serving, connecting = _contexts(own, peers)
        listener.listen(_PENDING + size)  # not before, as nobody could be let in; peers try again
        if relay is not None:
            relay.listening(port, token)
        acceptor = _Acceptor(listener, serving, peers, token)
        outgoing: dict[int, tuple[ssl.SSLSocket, ...]] = {}
        try:
            for peer in peers:
                most = min(MOST_CONNECTIONS, max(1, _MOST_OUTGOING // len(peers)))
                connector = _Connector(peer, connecting, network.unreachable, relay, acceptor, most)
                outgoing[peer.rank] = connector.connect(store, connect_s)
            incoming = acceptor.result(store)
        except BaseException:
            acceptor.close()
            for each in outgoing.values():
                _close(each)
            raise
    return {peer.rank: DuplexLink(outgoing[peer.rank], incoming[peer.rank]) for peer in peers}


def _listener(address: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """Return a socket that is bound to the first free one of some ports, or to any if there is none."""
    family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    for port in (*ports, 0):
        listener = socket.socket(family)
        try:
            if port:  # connections of earlier groups do not occupy it; a socket that listens does
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((where[0], port, *where[2:]))
            if port:
                listener.listen(backlog)
            return listener
        except BaseException as error:
            listener.close()
            if not (isinstance(error, OSError) and error.errno == errno.EADDRINUSE and port):
                raise
    raise AssertionError("the last port is any")


def _parse(rank: int, value: bytes) -> _Peer:
    try:
        host, port, certificate = value.decode().split(" ")
        number = int(port)
        if ip_address(host.partition("%")[0]).is_unspecified or not 0 < number < 1 << 16:
            raise ValueError
        return _Peer(rank, host, number, bytes.fromhex(certificate))
    except ValueError:
        raise WireError(f"rank {rank} of a group does not say where it listens: {value[:80]!r}") from None


def _contexts(own: Certificate, peers: list[_Peer]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the settings of both ends: none but the peers' certificates are trusted."""
    found = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # certificates are compared whole
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=b"".join(peer.certificate for peer in peers))
        file = os.memfd_create("onebox-key")  # OpenSSL takes a file; a worker cannot write one
        try:
            os.write(file, own.secret_pem)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        found.append(context)
    serving, connecting = found
    serving.num_tickets = 0  # no session is resumed, and nothing comes on a connection to write to
    return serving, connecting


class _Connector:
    """Makes the connections to one peer: directly, or else one by way of the client.

    Args:
        peer: The peer.
        context: Settings of TLS.
        unreachable: Hosts that could not be connected to; changed.
        relay: The client, if it relays.
        acceptor: Takes what the client relays.
        most: Most connections.
    """

    def __init__(
        self,
        peer: _Peer,
        context: ssl.SSLContext,
        unreachable: set[str],
        relay: RelayClient | None,
        acceptor: _Acceptor,
        most: int,
    ) -> None:
        self._peer = peer
        self._context = context
        self._unreachable = unreachable
        self._relay = relay
        self._acceptor = acceptor
        self._most = most
        self._why = ""
        self._relay_why = ""

    def connect(self, store: MembershipStore, connect_s: float) -> tuple[ssl.SSLSocket, ...]:
        """Return connections that the peer has accepted.

        Raises:
            RankLost: It cannot be reached in time, or another one is there.
        """
        peer, relayed, begin_s = self._peer, False, time.monotonic()
        known = self._relay is not None and peer.host in self._unreachable
        while True:
            found, reached = self._attempt(KNOWN_S if known or relayed else HANDSHAKE_S)
            if found is not None:
                self._unreachable.discard(peer.host)
                return found
            if relayed and (relayed_one := self._relayed()) is not None:
                return (relayed_one,)
            waited_s = time.monotonic() - begin_s
            if waited_s > connect_s:
                raise RankLost(self._failure(relayed))
            patience_s = REFUSING_S if reached else KNOWN_S if known else DIRECT_S
            if self._relay is not None and not relayed and waited_s > patience_s:
                relayed = True
                self._unreachable.add(peer.host)
                self._request()
            time.sleep(_RETRY_S)
            store.check([f"tls/{peer.rank}"])

    def _attempt(self, within_s: float) -> tuple[tuple[ssl.SSLSocket, ...] | None, bool]:
        """Connect directly, once; return the connections, and whether the host was reached."""
        where, reached, count = f"{self._peer.host}, port {self._peer.port},", False, 1
        made: list[ssl.SSLSocket] = []
        try:
            while len(made) < count:
                raw = socket.create_connection((self._peer.host, self._peer.port), within_s)
                raw.settimeout(HANDSHAKE_S)
                if not made:
                    reached, count = True, _connections_over(round_trip_s(raw), self._most)
                made.append(_begin(raw, self._peer, self._context, where, len(made), count))
        except BaseException as error:
            _close(made)
            if not isinstance(error, OSError):
                raise
            if made:  # some hosts limit the connections of one other
                self._most = 1
            self._why = error.strerror or str(error)
            return None, reached
        return tuple(made), True

    def _relayed(self) -> ssl.SSLSocket | None:
        """Return a connection that the client relays, if there is one by now."""
        raw = self._acceptor.relayed(self._peer.rank)
        if raw is None:
            return None
        raw.settimeout(2 * HANDSHAKE_S)  # the client connects to the peer meanwhile
        try:
            return _begin(raw, self._peer, self._context, "the end that the client connects to")
        except (OSError, RankLost) as error:  # whoever is on the way may have come in the client's place, too
            self._relay_why = str(error)
            time.sleep(_AGAIN_S)
            self._request()
            return None

    def _request(self) -> None:
        assert self._relay is not None
        self._acceptor.expect(self._peer.rank)
        self._relay.request(self._peer.rank)

    def _failure(self, relayed: bool) -> str:
        peer = self._peer
        also = f", nor by way of the client: {self._relay_why or 'it does not connect them'}" if relayed else ""
        return (
            f"rank {peer.rank} of the group cannot be reached at {peer.host}, port {peer.port}: {self._why}{also}; let "
            "workers of the pool's hosts, or the client, connect to each of them (firewall), or advertise another "
            "address (onebox serve --advertise)"
        )


def _connections_over(trip_s: float, most: int) -> int:
    """Return how many connections fill a link with a round trip of so many seconds.

    Example:
        >>> [_connections_over(trip_s, 4) for trip_s in (0.0, 0.001, 0.01, 0.02, 0.04, 0.3)]
        [1, 1, 1, 2, 4, 4]
    """
    return min(most, max(1, math.ceil(trip_s * _FULL_BPS / WINDOW_BYTES)))


def _close(connections: Iterable[ssl.SSLSocket]) -> None:
    for each in connections:
        each.close()


def _begin(
    raw: socket.socket, peer: _Peer, context: ssl.SSLContext, where: str, place: int = 0, count: int = 1
) -> ssl.SSLSocket:
    """Begin TLS with a peer, and wait until it has accepted.

    Args:
        raw: The connection.
        peer: The peer.
        context: Settings of TLS.
        where: The other end, for messages.
        place: Connections to the peer before it.
        count: Connections to the peer in the end.

    Raises:
        OSError: It does not accept.
        RankLost: Another than the peer is there.
    """
    try:
        raw.getpeername()  # see _Acceptor._greet
        connection = context.wrap_socket(raw)
    except ssl.SSLCertVerificationError as error:
        raw.close()
        raise RankLost(f"{where} does not have the key of rank {peer.rank}: {error.verify_message}") from error
    except BaseException:
        raw.close()
        raise
    try:
        if connection.getpeercert(binary_form=True) != peer.certificate:
            raise RankLost(f"{where} has the key of another rank than {peer.rank}")
        connection.sendall(bytes((place, count)))
        if connection.recv(len(_ACCEPTED)) != _ACCEPTED:
            raise ConnectionError("it closes the connection")
        _settle(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _settle(connection: ssl.SSLSocket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # routers forget connections that carry nothing
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.settimeout(None)


_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""Seconds until the first probe of an idle connection, and between two, and the number of probes without answer."""


class _Pending:
    """A connection whose handshake is not complete.

    Args:
        raw: The connection.
        end_s: Time at which it is closed.
    """

    def __init__(self, raw: socket.socket, end_s: float) -> None:
        self.raw = raw
        self.end_s = end_s
        self.received = b""
        """The part of a client's greeting that has come."""
        self.connection: ssl.SSLSocket | None = None
        """The same connection, once TLS has begun."""

    def close(self) -> None:
        """Close it."""
        (self.connection or self.raw).close()


class _Acceptor:
    """Accepts the connections of each peer, and what the client relays, in a thread; those of strangers are closed.

    Handshakes go on beside each other, each bounded by :data:`HANDSHAKE_S` and all by :data:`_PENDING`.
    """

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, peers: list[_Peer], token: bytes) -> None:
        self._listener = listener
        self._context = context
        self._token = token
        self._ranks = {peer.certificate: peer.rank for peer in peers}
        self._found: dict[int, list[ssl.SSLSocket]] = {rank: [] for rank in self._ranks.values()}
        self._counts = dict.fromkeys(self._found, 1)  # of the connections that each peer makes
        self._relayed: dict[int, socket.socket | None] = {}  # by rank, of those that were asked for
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._poll = select.poll()
        self._wake = os.eventfd(0)
        self._connected = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="onebox-accept", daemon=True)
        self._thread.start()

    def expect(self, rank: int) -> None:
        """Let the client connect this worker to a rank."""
        with self._lock:
            self._relayed[rank] = None

    def relayed(self, rank: int) -> socket.socket | None:
        """Return a connection by which the client relays to a rank, if there is a new one."""
        with self._lock:
            found = self._relayed[rank]
            self._relayed[rank] = None
        return found

    def result(self, store: MembershipStore) -> dict[int, tuple[ssl.SSLSocket, ...]]:
        """Wait for all peers and return the connections; this worker has connected to all of them.

        Raises:
            RankLost: One did not come, or the group is dissolved.
        """
        self._connected = True
        os.eventfd_write(self._wake, 1)
        end_s = time.monotonic() + ACCEPT_S
        while self._thread.is_alive():
            self._thread.join(_RETRY_S)
            if self._thread.is_alive() and time.monotonic() > end_s:
                raise RankLost(f"ranks {sorted(self._missing())} of the group did not connect within {ACCEPT_S:.0f} s")
            store.check(["tls/0"])
        os.close(self._wake)
        self._wake = -1
        if self._missing():
            raise RankLost("the listener of the group has failed")
        return {rank: tuple(found) for rank, found in self._found.items()}

    def close(self) -> None:
        """Stop, and close what has been accepted."""
        self._closed = True
        self._thread.join()
        if self._wake >= 0:
            os.close(self._wake)
        for found in self._found.values():
            _close(found)

    def _missing(self) -> list[int]:
        """Return the ranks of which connections are missing."""
        return [rank for rank, found in self._found.items() if len(found) < self._counts[rank]]

    def _run(self) -> None:
        listener = self._listener
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        try:
            while not self._closed and (self._missing() or not self._connected):
                self._end_late()
                for descriptor, _ in self._poll.poll(1000 * _RETRY_S):
                    if descriptor == listener.fileno():
                        self._accept()
                    elif descriptor in self._pending:
                        self._go_on(descriptor)
        finally:
            for descriptor in list(self._pending):
                self._drop(descriptor)
            with self._lock:
                for each in self._relayed.values():
                    if each is not None:
                        each.close()

    def _accept(self) -> None:
        try:
            raw, _ = self._listener.accept()
        except OSError:  # it has gone already, or there is no descriptor left
            time.sleep(0.001)
            return
        if len(self._pending) >= _PENDING:
            self._drop(next(iter(self._pending)))
        raw.setblocking(False)
        self._pending[raw.fileno()] = _Pending(raw, time.monotonic() + HANDSHAKE_S)
        self._poll.register(raw, select.POLLIN)

    def _go_on(self, descriptor: int) -> None:
        """Go on with a handshake."""
        pending = self._pending[descriptor]
        try:
            if pending.connection is None:
                self._greet(pending)
            if pending.connection is not None:
                self._shake_hands(pending.connection)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._poll.modify(descriptor, select.POLLIN)
        except ssl.SSLWantWriteError:
            self._poll.modify(descriptor, select.POLLOUT)
        except (OSError, ValueError):
            self._drop(descriptor)

    def _greet(self, pending: _Pending) -> None:
        """Read who begins: a peer with its TLS, or the client with a greeting.

        Raises:
            OSError: Neither does, or the connection has ended.
        """
        raw = pending.raw
        first = pending.received[:1] or raw.recv(1, socket.MSG_PEEK)
        if first == FIRST_BYTE:
            pending.received += raw.recv(GREETING_BYTES - len(pending.received))
            if len(pending.received) < GREETING_BYTES:
                raise BlockingIOError
            greeting = decode_greeting(self._token, pending.received)
            if greeting is None:
                raise ConnectionError("a stranger's greeting")
            raw.send(greeting_reply(self._token, pending.received))
            if greeting.outgoing:
                self._hand_over(pending, greeting.peer)
                return
        elif first != _RECORD_OF_HANDSHAKE:
            raise ConnectionError("neither a peer nor the client")
        raw.getpeername()  # of a connection that has ended, ssl would leave the socket unclosed
        pending.connection = self._context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)

    def _hand_over(self, pending: _Pending, rank: int) -> None:
        """Give a connection to the thread that has asked for it.

        Raises:
            ConnectionError: It has not.
        """
        with self._lock:
            if rank not in self._relayed:
                raise ConnectionError("a relayed connection that nobody has asked for")
            earlier, self._relayed[rank] = self._relayed[rank], pending.raw
            self._poll.unregister(pending.raw)
            del self._pending[pending.raw.fileno()]
        if earlier is not None:
            earlier.close()

    def _shake_hands(self, connection: ssl.SSLSocket) -> None:
        """Go on with a handshake of TLS.

        Raises:
            OSError: It has failed, or a stranger has come.
        """
        connection.do_handshake()
        rank = self._ranks.get(connection.getpeercert(binary_form=True) or b"")
        if rank is None:
            raise ConnectionError("a certificate of nobody in this group")
        place, count = self._place(connection, rank)
        _settle(connection)
        self._poll.unregister(connection)
        del self._pending[connection.fileno()]
        with suppress(OSError):
            connection.sendall(_ACCEPTED)
        earlier, self._counts[rank] = self._found[rank][place:], count
        self._found[rank][place:] = [connection]
        _close(earlier)

    def _place(self, connection: ssl.SSLSocket, rank: int) -> tuple[int, int]:
        """Return which of how many connections of a rank one is; a first one gives up those made before.

        Raises:
            OSError: It has not said so yet, or it is not its turn.
        """
        said = connection.recv(2)
        if len(said) == 2:
            place, count = said
            expected = (len(self._found[rank]), self._counts[rank])
            if place < count <= MOST_CONNECTIONS and (not place or (place, count) == expected):
                return place, count
        raise ConnectionError("a connection out of its turn")

    def _end_late(self) -> None:
        now_s = time.monotonic()
        for descriptor in [each for each, pending in self._pending.items() if pending.end_s < now_s]:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        pending = self._pending.pop(descriptor)
        self._poll.unregister(descriptor)
        pending.close()
