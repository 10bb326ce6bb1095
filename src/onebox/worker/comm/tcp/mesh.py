"""Connections between the workers of a group.

With TLS 1.3 both ends show a certificate that the client's rendezvous has handed to the other; each worker makes a key
of its own for the group, which never leaves it. Without, both prove that they know what the rendezvous has told them.

A pair of workers has a connection for each direction, so that no two threads use one: OpenSSL's do not allow it. Over a
long way it has several for each, as the kernel's window of one may fill a part of it only; until that shows, the first
alone is used. A worker connects to another one when it first has something for it, and listens as long as a peer may
come.

Where a rank cannot connect to another one, the client connects to the listeners of both and relays: the same TLS goes
through it, from end to end.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onebox.errors import WireError
from onebox.wire.group_listener import (
    FIRST_BYTE,
    GREETING_BYTES,
    PROOF_BYTES,
    SECRET_BYTES,
    GroupListener,
    decode_greeting,
    decode_listener,
    greeting_reply,
    listener_key,
    proof,
)
from onebox.worker.comm.api import MembershipStore, RankLost
from onebox.worker.comm.certificate import Certificate, new_certificate
from onebox.worker.comm.tcp.connection import TcpConnection
from onebox.worker.comm.tcp.meter import LinkMeters, round_trip_s
from onebox.worker.system.cpu_affinity import use_all_cores

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
_MEMBERS_S = 0.5
"""Interval at which the client is asked whether the group is still served, while a rank is missing."""

_TICK_MS = 100
_CALL = struct.Struct("<4sIBB")
"""Of whoever connects: a mark, its rank, which connection it is, and of how many."""

_MARK = b"call"
_CALL_BYTES = _CALL.size + PROOF_BYTES
_GO = b"\x01"
"""Of whoever connects, when it has been accepted: until then it may try again."""


RelayTo = Callable[[int], object]
"""Asks the client to relay what this worker sends to a rank that it cannot connect to."""


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


Came = Callable[[int, tuple[TcpConnection, ...]], None]
"""Called with a rank and its connections to this one, in a thread of the mesh."""


class Mesh:
    """The connections of one worker in one group; all ranks make it.

    Args:
        rank: This worker's rank.
        size: Number of ranks.
        address: This host's IP address to listen at.
        store: The group's key-value store, whose contents are authentic.
        encrypted: Whether TLS is used.
        came: Takes the connections that others make.
        advertised: The IP address that leads the others there; ``address`` by default.
        network: The ports to listen at, and the hosts that could not be connected to before.
        relay: Asks the client to relay to peers that cannot be connected to; ``None`` to do without.

    Raises:
        RankLost: The group is dissolved.
        WireError: What a rank says of itself is not understood.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        store: MembershipStore,
        *,
        encrypted: bool,
        came: Came,
        advertised: str = "",
        network: GroupNetwork | None = None,
        relay: RelayTo | None = None,
    ) -> None:
        own = new_certificate() if encrypted else None
        secret = secrets.token_bytes(SECRET_BYTES)
        self.address = advertised or address
        self._rank = rank
        self._store = store
        self._relay = relay
        self._network = network or GroupNetwork()
        self._requests: deque[int] = deque()  # ranks to ask the client for; filled from any thread
        self._asked_s = time.monotonic()
        self._ended = ""
        listener = _listener(address, self._network.ports, _PENDING + size)
        try:
            port, certificate = listener.getsockname()[1], b"" if own is None else own.der
            store.set(listener_key(rank), GroupListener(self.address, port, secret, certificate).encode())
            others = [other for other in range(size) if other != rank]
            told = zip(others, store.multi_get([listener_key(other) for other in others]), strict=True)
            peers = {other: decode_listener(other, text, encrypted=encrypted) for other, text in told}
            if own is not None and len({peer.certificate for peer in peers.values()} | {own.der}) != size:
                raise WireError("two workers of a group show the same certificate")
            if advertised not in ("", address):  # a router's, whose way back to a host behind it few routers know
                for other, peer in peers.items():
                    if peer.host == advertised:
                        peers[other] = peer._replace(host=address)
            serving: ssl.SSLContext | None = None
            self._connecting: ssl.SSLContext | None = None
            if own is not None:
                serving, self._connecting = _contexts(own, [peer.certificate for peer in peers.values()])
            listener.listen(_PENDING + size)  # not before, as nobody could be let in; peers try again
        except BaseException:
            listener.close()
            raise
        self._peers = peers
        self._acceptor = _Acceptor(rank, listener, serving, peers, secret, came, relay is not None)

    def connect(self, rank: int, within_s: float = CONNECT_S) -> tuple[TcpConnection, ...]:
        """Connect to a rank, in any thread; meanwhile another one attends.

        Raises:
            RankLost: It cannot be reached in time, or another one is there; or the group has ended.
        """
        peer, relayed, begin_s, why, relay_why = self._peers[rank], False, time.monotonic(), "", ""
        most = min(MOST_CONNECTIONS, max(1, _MOST_OUTGOING // len(self._peers)))
        unreachable, relays = self._network.unreachable, self._relay is not None
        known = relays and peer.host in unreachable
        while True:
            found, reached, why, most = self._attempt(rank, KNOWN_S if known or relayed else HANDSHAKE_S, most, why)
            if found:
                unreachable.discard(peer.host)
            elif relayed and (raw := self._acceptor.relayed(rank)) is not None:
                raw.settimeout(HANDSHAKE_S)
                try:
                    found = (self._begin(raw, rank, "the end that the client connects to"),)
                except (OSError, RankLost) as error:  # whoever is on the way may have come in the client's place, too
                    relay_why = str(error)
                    time.sleep(_AGAIN_S)
                    self._request(rank)
            if found:
                self._acceptor.connected(rank)
                return found
            waited_s = time.monotonic() - begin_s
            if waited_s > within_s:
                also = f", nor by way of the client: {relay_why or 'it does not connect them'}" if relayed else ""
                raise RankLost(self._failure(rank, why + also))
            patience_s = REFUSING_S if reached else KNOWN_S if known else DIRECT_S
            if relays and not relayed and waited_s > patience_s:
                relayed = True
                unreachable.add(peer.host)
                self._request(rank)
            time.sleep(_RETRY_S)
            if self._ended:
                raise RankLost(self._ended)

    def attend(self, *, missing: bool = False) -> None:
        """Ask the client what other threads want of it; called by the thread that owns the channel.

        Args:
            missing: Whether a rank is waited for that has not connected, so that its end shows nowhere else than at the
                client, which is asked for it now and then.

        Raises:
            RankLost: The group is dissolved.
        """
        while self._requests and self._relay is not None:
            self._relay(self._requests.popleft())
        if missing and time.monotonic() > self._asked_s + _MEMBERS_S:
            self._asked_s = time.monotonic()
            try:
                self._store.check([listener_key(self._rank)])
            except RankLost as error:
                self._ended = str(error)
                raise

    @property
    def ended(self) -> bool:
        """True once no more connections are made."""
        return bool(self._ended)

    def end(self, why: str) -> None:
        """End attempts to connect; callable from any thread."""
        self._ended = self._ended or why

    def stop_listening(self) -> None:
        """Listen no longer: all have come. Idempotent."""
        self._acceptor.close()

    def close(self) -> None:
        """Listen no longer, and end attempts to connect. Idempotent."""
        self.end("the group has been left")
        self._acceptor.close()

    def _request(self, rank: int) -> None:
        self._acceptor.expect(rank)
        self._requests.append(rank)

    def _attempt(
        self, rank: int, within_s: float, most: int, why: str
    ) -> tuple[tuple[TcpConnection, ...], bool, str, int]:
        """Connect directly, once; return the connections, whether the host was reached, the last obstacle, and the most
        connections that the peer's host seems to take."""
        peer, reached, count = self._peers[rank], False, 1
        where = f"{peer.host}, port {peer.port},"
        made: list[TcpConnection] = []
        try:
            while len(made) < count:
                raw = socket.create_connection((peer.host, peer.port), within_s)
                raw.settimeout(HANDSHAKE_S)
                if not made:
                    reached, count = True, _connections_over(round_trip_s(raw), most)
                made.append(self._begin(raw, rank, where, len(made), count))
        except BaseException as error:
            _close(made)
            if not isinstance(error, OSError):
                raise
            return (), reached, error.strerror or str(error), 1 if made else most  # some hosts limit those of one other
        return tuple(made), reached, why, most

    def _begin(self, raw: socket.socket, rank: int, where: str, place: int = 0, count: int = 1) -> TcpConnection:
        """Begin with a peer, and wait until it has accepted.

        Raises:
            OSError: It does not accept.
            RankLost: Another than the peer is there.
        """
        peer = self._peers[rank]
        try:
            connection = TcpConnection(raw, self._connecting, serving=False)
            try:
                connection.shake_hands()
            except ssl.SSLCertVerificationError as error:
                raise RankLost(f"{where} does not have the key of rank {rank}: {error.verify_message}") from error
            if connection.certificate != peer.certificate:
                raise RankLost(f"{where} has the key of another rank than {rank}")
            call = _CALL.pack(_MARK, self._rank, place, count)
            connection.send(call + proof(peer.secret, b"calls", call))
            if not hmac.compare_digest(_read(connection, PROOF_BYTES), proof(peer.secret, b"accepts", call)):
                raise ConnectionError("it closes the connection")
            connection.send(_GO)
            connection.settle()
        except BaseException:
            raw.close()
            raise
        return connection

    def _failure(self, rank: int, why: str) -> str:
        peer = self._peers[rank]
        if self._connecting is None:
            return (
                f"rank {self._rank} of the group, at {self.address}, cannot connect to rank {rank}, at "
                f"{peer.host}, within {CONNECT_S:.0f} s: {why}. {PLAIN_REMEDY}"
            )
        return (
            f"rank {rank} of the group cannot be reached at {peer.host}, port {peer.port}: {why}; let workers of "
            "the pool's hosts, or the client, connect to each of them (firewall), or advertise another address (onebox "
            "serve --advertise)"
        )


PLAIN_REMEDY = (
    "Without encryption (plain_links, --plain-links) workers of different hosts connect to each other directly, both "
    "ways, at ports that the system chooses: let the firewalls between them pass these, or start the agents with an "
    "address that the others reach (onebox serve --advertise). Encrypted connections, the default, go by way of the "
    "client where hosts do not reach each other."
)
"""What helps where hosts do not reach each other without encryption."""


def _read(connection: TcpConnection, count: int) -> bytes:
    """Return so many bytes, or fewer at the end."""
    data = memoryview(bytearray(count))
    done = 0
    while done < count and (received := connection.receive(data[done:])):
        done += received
    return bytes(data[:done])


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


def _contexts(own: Certificate, certificates: Iterable[bytes]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the settings of both ends: none but the peers' certificates are trusted."""
    found = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # certificates are compared whole
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=b"".join(certificates))
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


def _connections_over(trip_s: float, most: int) -> int:
    """Return how many connections fill a link with a round trip of so many seconds.

    Example:
        >>> [_connections_over(trip_s, 4) for trip_s in (0.0, 0.001, 0.01, 0.02, 0.04, 0.3)]
        [1, 1, 1, 2, 4, 4]
    """
    return min(most, max(1, math.ceil(trip_s * _FULL_BPS / WINDOW_BYTES)))


def _close(connections: Iterable[TcpConnection]) -> None:
    for each in connections:
        each.close()


class _Pending:
    """A connection whose beginning is not complete.

    Args:
        raw: The connection.
        end_s: Time at which it is closed.
    """

    def __init__(self, raw: socket.socket, end_s: float) -> None:
        self.raw = raw
        self.end_s = end_s
        self.received = b""
        """The part of a client's greeting, or of a peer's call, that has come."""
        self.connection: TcpConnection | None = None
        """The same connection, once a peer has begun."""
        self.met = False
        """Set once TLS is complete."""
        self.answered = False
        """Set once its call was accepted."""


class _Acceptor:
    """Accepts the connections of each peer, and what the client relays, in a thread, until all peers have come; those
    of strangers are closed.

    Several go on beside each other, each bounded by :data:`HANDSHAKE_S` and all by :data:`_PENDING`.
    """

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        peers: Mapping[int, GroupListener],
        secret: bytes,
        came: Came,
        relayed: bool,
    ) -> None:
        self._listener = listener
        self._context = context
        self._secret = secret
        self._came = came
        self._certificates = {each: peer.certificate for each, peer in peers.items()}
        self._found: dict[int, list[TcpConnection]] = {rank: [] for rank in peers}
        self._unconnected = set(self._found) if relayed else set()
        """Ranks to which the client may have to connect this worker."""
        self._counts = dict.fromkeys(self._found, 1)  # of the connections that each peer makes
        self._relayed: dict[int, socket.socket | None] = {}  # by rank, of those that were asked for
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._poll = select.poll()
        self._wake = os.eventfd(0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"onebox-accept-{rank}", daemon=True)
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

    def connected(self, rank: int) -> None:
        """Note that this worker is connected to a rank, so that the client need not do that."""
        self._unconnected.discard(rank)
        self._ring()

    def close(self) -> None:
        """Stop, and close what has not been handed over. Idempotent."""
        self._closed = True
        self._ring()
        self._thread.join()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _ring(self) -> None:
        with self._lock:
            if self._wake >= 0:  # else it has been closed meanwhile
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        use_all_cores()
        listener = self._listener
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        try:
            while not self._closed and (self._found or self._unconnected):
                self._end_late()
                for descriptor, _ in self._poll.poll(_TICK_MS if self._pending else None):
                    if descriptor == listener.fileno():
                        self._accept()
                    elif descriptor in self._pending:
                        self._go_on(descriptor)
                    elif descriptor == self._wake:
                        os.eventfd_read(self._wake)
        finally:
            listener.close()
            for descriptor in list(self._pending):
                self._drop(descriptor)
            for found in self._found.values():
                _close(found)
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
        """Go on with a connection."""
        pending = self._pending[descriptor]
        try:
            if pending.connection is None:
                self._greet(pending)
            while pending.connection is not None and descriptor in self._pending:
                self._meet(pending, pending.connection)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._drop(descriptor)

    def _greet(self, pending: _Pending) -> None:
        """Read who begins: a peer, or the client with a greeting.

        Raises:
            OSError: Neither does, or the connection has ended.
        """
        raw = pending.raw
        if pending.received[:1] == FIRST_BYTE or raw.recv(1, socket.MSG_PEEK) == FIRST_BYTE:
            pending.received += raw.recv(GREETING_BYTES - len(pending.received))
            if len(pending.received) < GREETING_BYTES:
                raise BlockingIOError
            greeting = decode_greeting(self._secret, pending.received)
            if greeting is None:
                raise ConnectionError("a stranger's greeting")
            raw.send(greeting_reply(self._secret, pending.received))
            if greeting.outgoing:
                self._hand_over(pending, greeting.peer)
                return
            pending.received = b""
        pending.connection = TcpConnection(raw, self._context, serving=True)

    def _hand_over(self, pending: _Pending, rank: int) -> None:
        """Give a connection to the thread that has asked for it.

        Raises:
            ConnectionError: It has not.
        """
        with self._lock:
            if rank not in self._relayed:
                raise ConnectionError("a relayed connection that nobody has asked for")
            self._release(pending)
            earlier, self._relayed[rank] = self._relayed[rank], pending.raw
        if earlier is not None:
            earlier.close()

    def _meet(self, pending: _Pending, connection: TcpConnection) -> None:
        """Go on with a peer: its TLS, its call, and its word that it has heard the answer.

        Raises:
            BlockingIOError: It has not said enough yet.
            OSError: It ends, or is a stranger.
        """
        if not pending.met:
            connection.shake_hands()
            pending.met = True
        size = _CALL_BYTES + (len(_GO) if pending.answered else 0)
        target = memoryview(bytearray(size - len(pending.received)))
        count = connection.receive(target)
        if not count:
            raise ConnectionError("it closes the connection")
        pending.received += target[:count]
        if len(pending.received) < size:
            raise BlockingIOError
        call, code = pending.received[: _CALL.size], pending.received[_CALL.size : _CALL_BYTES]
        mark, rank, place, count = _CALL.unpack(call)
        if mark != _MARK or not hmac.compare_digest(code, proof(self._secret, b"calls", call)):
            raise ConnectionError("a stranger's call")
        if rank not in self._found or connection.certificate != self._certificates[rank]:
            raise ConnectionError("a call of nobody who is missing")
        if not pending.answered:
            pending.answered = True
            connection.send(proof(self._secret, b"accepts", call))
            return
        found = self._found[rank]
        if not place < count <= MOST_CONNECTIONS or (place and (place, count) != (len(found), self._counts[rank])):
            raise ConnectionError("a connection out of its turn")
        self._release(pending)
        connection.settle()
        _close(found[place:])  # a first one gives up those made before
        found[place:], self._counts[rank] = [connection], count
        if len(found) == count:
            del self._found[rank]
            self._came(rank, tuple(found))

    def _end_late(self) -> None:
        now_s = time.monotonic()
        for descriptor in [each for each, pending in self._pending.items() if pending.end_s < now_s]:
            self._drop(descriptor)

    def _release(self, pending: _Pending) -> None:
        self._poll.unregister(pending.raw)
        del self._pending[pending.raw.fileno()]

    def _drop(self, descriptor: int) -> None:
        pending = self._pending[descriptor]
        self._release(pending)
        pending.raw.close()
