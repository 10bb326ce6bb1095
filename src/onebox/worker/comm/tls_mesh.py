"""Encrypted connections between the workers of a group: TLS 1.3, in which both ends show a certificate that the
client's rendezvous has handed to the other.

Each worker makes a key of its own for the group, which never leaves it. A pair of workers has a connection for each
direction, so that no two threads use one: OpenSSL's do not allow it. Each rank connects to all others, and listens for
them at one port, which it closes when all have come.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple, Protocol

from onebox.errors import WireError
from onebox.worker.comm.api import KeyValueStore, RankLost
from onebox.worker.comm.certificate import Certificate, new_certificate

HANDSHAKE_S = 3.0
"""Time limit of a handshake, and of one attempt to connect."""

CONNECT_S = 20.0
"""Time after which a peer that cannot be connected to is given up: longer than an interruption that a run survives."""

ACCEPT_S = 60.0
"""Time after which peers that have not connected are given up."""

_PENDING = 64
"""Most handshakes of one worker at a time: another connection ends the oldest."""

_RETRY_S = 0.02
_ACCEPTED = b"\x01"


class MembershipStore(KeyValueStore, Protocol):
    """A group's key-value store that fails once the group is dissolved."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set.

        Raises:
            RankLost: The group is dissolved.
        """


class DuplexLink(NamedTuple):
    """Connections with one peer.

    Args:
        outgoing: To write to it.
        incoming: To read from it.
    """

    outgoing: ssl.SSLSocket
    incoming: ssl.SSLSocket

    def close(self) -> None:
        """Close both."""
        self.outgoing.close()
        self.incoming.close()


class _Peer(NamedTuple):
    rank: int
    host: str
    port: int
    certificate: bytes


def connect_mesh(
    rank: int, size: int, address: str, store: MembershipStore, *, connect_s: float = CONNECT_S
) -> dict[int, DuplexLink]:
    """Connect to all other ranks of a group; all of them call it.

    Args:
        rank: This worker's rank.
        size: Number of ranks.
        address: This host's IP address to listen at.
        store: The group's key-value store, whose contents are authentic.
        connect_s: Time limit for a connection to one of them.

    Returns:
        The connections with each other rank. Nothing listens any more.

    Raises:
        RankLost: A rank did not come, cannot be reached, or does not have its key.
        WireError: What a rank says of itself is not understood.
    """
    own = new_certificate()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4])
        store.set(f"tls/{rank}", f"{address} {listener.getsockname()[1]} {own.der.hex()}")
        peers = [_parse(other, store.get(f"tls/{other}")) for other in range(size) if other != rank]
        if len({peer.certificate for peer in peers} | {own.der}) != size:
            raise WireError("two workers of a group show the same certificate")
        serving, connecting = _contexts(own, peers)
        listener.listen(_PENDING + size)  # not before, as nobody could be let in; peers try again
        acceptor = _Acceptor(listener, serving, peers)
        outgoing: dict[int, ssl.SSLSocket] = {}
        try:
            for peer in peers:
                outgoing[peer.rank] = _connect(peer, connecting, store, connect_s)
            incoming = acceptor.result(store)
        except BaseException:
            acceptor.close()
            for each in outgoing.values():
                each.close()
            raise
    return {peer.rank: DuplexLink(outgoing[peer.rank], incoming[peer.rank]) for peer in peers}


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


def _connect(peer: _Peer, context: ssl.SSLContext, store: MembershipStore, connect_s: float) -> ssl.SSLSocket:
    """Return a connection that a peer has accepted."""
    end_s = time.monotonic() + connect_s
    while True:
        try:
            return _attempt(peer, context)
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > end_s:
            raise RankLost(
                f"rank {peer.rank} of the group cannot be reached at {peer.host}, port {peer.port}: {why}; let workers "
                "of the pool's hosts connect to each other (firewall), or advertise another address (onebox serve "
                "--advertise)"
            )
        time.sleep(_RETRY_S)
        store.check([f"tls/{peer.rank}"])


def _attempt(peer: _Peer, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Connect to a peer once.

    Raises:
        OSError: It cannot be reached, or does not accept.
        RankLost: Another than the peer is there.
    """
    where = f"{peer.host}, port {peer.port},"
    raw = socket.create_connection((peer.host, peer.port), HANDSHAKE_S)
    try:
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
        if connection.recv(len(_ACCEPTED)) != _ACCEPTED:
            raise ConnectionError("it closes the connection")
        _settle(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _settle(connection: ssl.SSLSocket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)


class _Acceptor:
    """Accepts a connection of each peer, in a thread; those of strangers are closed.

    Handshakes go on beside each other, each bounded by :data:`HANDSHAKE_S` and all by :data:`_PENDING`.
    """

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, peers: list[_Peer]) -> None:
        self._listener = listener
        self._context = context
        self._ranks = {peer.certificate: peer.rank for peer in peers}
        self._found: dict[int, ssl.SSLSocket] = {}
        self._pending: dict[int, tuple[ssl.SSLSocket, float]] = {}
        self._poll = select.poll()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="onebox-accept", daemon=True)
        self._thread.start()

    def result(self, store: MembershipStore) -> dict[int, ssl.SSLSocket]:
        """Wait for all peers and return the connections.

        Raises:
            RankLost: One did not come, or the group is dissolved.
        """
        end_s = time.monotonic() + ACCEPT_S
        while self._thread.is_alive():
            self._thread.join(_RETRY_S)
            if self._thread.is_alive() and time.monotonic() > end_s:
                missing = sorted(set(self._ranks.values()) - set(self._found))
                raise RankLost(f"ranks {missing} of the group did not connect within {ACCEPT_S:.0f} s")
            store.check(["tls/0"])
        if len(self._found) < len(self._ranks):
            raise RankLost("the listener of the group has failed")
        return self._found

    def close(self) -> None:
        """Stop, and close what has been accepted."""
        self._closed = True
        self._thread.join()
        for each in self._found.values():
            each.close()

    def _run(self) -> None:
        listener = self._listener
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        try:
            while len(self._found) < len(self._ranks) and not self._closed:
                self._end_late()
                for descriptor, _ in self._poll.poll(1000 * _RETRY_S):
                    if descriptor == listener.fileno():
                        self._accept()
                    elif descriptor in self._pending:
                        self._go_on(descriptor)
        finally:
            for descriptor in list(self._pending):
                self._drop(descriptor)

    def _accept(self) -> None:
        try:
            raw, _ = self._listener.accept()
        except OSError:  # it has gone already, or there is no descriptor left
            time.sleep(0.001)
            return
        if len(self._pending) >= _PENDING:
            self._drop(next(iter(self._pending)))
        raw.setblocking(False)
        try:
            connection = self._context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):  # it was reset in between
            raw.close()
            return
        self._pending[connection.fileno()] = (connection, time.monotonic() + HANDSHAKE_S)
        self._poll.register(connection, select.POLLIN)

    def _go_on(self, descriptor: int) -> None:
        """Go on with a handshake."""
        connection, _ = self._pending[descriptor]
        try:
            connection.do_handshake()
            rank = self._ranks.get(connection.getpeercert(binary_form=True) or b"")
            _settle(connection)
        except ssl.SSLWantReadError:
            self._poll.modify(descriptor, select.POLLIN)
            return
        except ssl.SSLWantWriteError:
            self._poll.modify(descriptor, select.POLLOUT)
            return
        except (OSError, ValueError):
            self._drop(descriptor)
            return
        if rank is None:
            self._drop(descriptor)
            return
        self._poll.unregister(descriptor)
        del self._pending[descriptor]
        with suppress(OSError):
            connection.sendall(_ACCEPTED)
        earlier = self._found.get(rank)
        self._found[rank] = connection  # a peer that comes again has given up its earlier connection
        if earlier is not None:
            earlier.close()

    def _end_late(self) -> None:
        now_s = time.monotonic()
        for descriptor in [each for each, (_, end_s) in self._pending.items() if end_s < now_s]:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        connection, _ = self._pending.pop(descriptor)
        self._poll.unregister(descriptor)
        connection.close()
