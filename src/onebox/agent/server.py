"""The agent: accepts paired clients, leases them this host's devices, and starts their workers.

One thread does everything without blocking: workers start and end in the background. A failure in one part of its work
ends the session whose message or lease caused it, and the agent goes on.
"""

from __future__ import annotations

import errno
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence, Set
from functools import partial
from ipaddress import ip_address

import zmq

from onebox.agent.admission import ClientLimits, Offered
from onebox.agent.host_devices import DeviceLoad
from onebox.agent.lease_processes import LeaseIsolation
from onebox.agent.lease_service import LeaseService
from onebox.agent.leases import Leases
from onebox.agent.reporter import EventSink, Reporter
from onebox.agent.session_channel import SessionChannel
from onebox.agent.sessions import Session, newest
from onebox.agent.workers import Workers
from onebox.agent.zap_auth import HANDSHAKE_EVENTS, HandshakeMonitor, ZapAuthenticator
from onebox.errors import UsageError, WireError
from onebox.pool.backends.compatibility import mismatch, own_versions
from onebox.wire import SMALL_BYTES, KeyPair, ReceiveWatch, configure
from onebox.wire.protocol.agents import (
    Inspect,
    Introduce,
    Introduced,
    Lease,
    LogLines,
    ReadLog,
    Refused,
    Release,
    Renew,
    Renewed,
    Request,
    Stock,
    decode_request,
    request_number,
)

REQUEST_BYTES = 64 << 10
"""Limit of a client's message: a request for 256 devices takes a tenth of it."""

UNREAD_BYTES = 32 << 20
"""Limit of what all connections have brought without completing a message."""

QUEUE = 256
"""Limit of queued messages on one connection, each way."""

_SILENT_MS = 10_000


def check_address(bind: str, port: int, advertise: str, has_clients: bool) -> None:
    """Require that an agent may listen on an address, and that the advertised one is valid.

    Raises:
        UsageError: It may not, or the advertised address is invalid.
    """
    try:
        ip_address(bind)
    except ValueError:
        raise UsageError(f"{bind!r} is no IP address to listen at; name one of this host, or 0.0.0.0 for all") from None
    if not 0 <= port < 1 << 16:
        raise UsageError(f"port {port}; allowed are 1 to 65535, and 0 for any that is free")
    check_clients(bind, has_clients=has_clients)
    if advertise in ("", "0.0.0.0", "::") or not advertise.isprintable() or set(advertise) & set(" /[]@"):
        raise UsageError(f"{advertise!r} is no address that clients could connect to; advertise one of this host")


def check_clients(bind: str, *, has_clients: bool) -> None:
    """Require that an agent that others could reach is paired with a client.

    Raises:
        UsageError: It is not.
    """
    if not ip_address(bind).is_loopback and not has_clients:
        raise UsageError(
            f"nobody is paired with this agent, so it does not listen at {bind}, where others could reach it: pair a "
            "client first (onebox pair accept), or listen at 127.0.0.1"
        )


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
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise UsageError(
                f"{bind} is no address of this machine, so nothing can listen there: name one of its own with --bind, "
                "or 0.0.0.0 for all; an address that others know it by, as behind a router, goes with --advertise"
            ) from None
        raise UsageError(f"cannot listen at {bind}, port {port}: {error.strerror}; name another with --port") from None
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


LOG_LINES = 1000
"""Limit of log lines sent to a client."""

_FAILED = "the agent failed at a message of this session and has ended it; its journal says where"

_TICK_MS = 200
"""Between two looks at leases that start or end."""

_IDLE_TICK_MS = 1000
"""The same where none does."""

_PAUSE_S = 0.05
_HELD_UP_S = 1.0


class Agent:
    """The agent of a host. The constructor binds its socket; :meth:`run` serves.

    Args:
        keys: Its own key pair.
        name_of: Maps a public key to the name of its client; None for an unknown key, which is rejected.
        bind: The IP address to listen on, for the agent and for its workers.
        port: The agent's port; 0 for any free one.
        advertise: The address of this host that clients, and workers of other hosts, connect to.
        offers: The offered devices.
        limits: Limits of each client.
        tell: Sink of events with their details.
        has_clients: Whether ``name_of`` knows any key.
        read_log: Returns the last lines of the log, at most the given number.
        isolation: Users and cgroups of leases, closed with the agent; none of their own where ``None``.
        worker_ports: The TCP ports that workers bind, two or three each; empty for any free ones.
        sharing_key: A secret that agents of one host have in common whose workers share memory; its own where ``None``.

    Raises:
        UsageError: It cannot, or must not, listen there.

    Example:
        >>> from onebox.wire import new_keys
        >>> offers = [Offered(device="cpu", name="a CPU", memory_bytes=1 << 30, threads=2)]
        >>> agent = Agent(
        ...     keys=new_keys(), name_of=lambda key: None, bind="127.0.0.1", port=0, advertise="127.0.0.1",
        ...     offers=offers, limits=ClientLimits(), tell=lambda event, **fields: None,
        ... )
        >>> agent.endpoint.startswith("tcp://127.0.0.1:")
        True
        >>> agent.close()
    """

    def __init__(
        self,
        *,
        keys: KeyPair,
        name_of: Callable[[str], str | None],
        bind: str,
        port: int,
        advertise: str,
        offers: Sequence[Offered],
        limits: ClientLimits,
        tell: EventSink,
        has_clients: bool = False,
        read_log: Callable[[int], Sequence[str]] = lambda lines: (),
        isolation: LeaseIsolation | None = None,
        worker_ports: range = range(0),
        sharing_key: bytes | None = None,
    ) -> None:
        check_address(bind, port, advertise, has_clients)
        self._report = Reporter(tell)
        self._read_log = read_log
        self._advertise = advertise
        self._host = platform.node() or "this host"
        self._began_s = time.monotonic()
        self._leases = Leases(offers, limits)
        self._load = DeviceLoad()
        self._lock = threading.RLock()  # a signal handler may run while it is held
        self._stopping = False
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._isolation = isolation or LeaseIsolation()
        self._workers = Workers(
            host=self._host,
            bind=bind,
            advertise=advertise,
            isolation=self._isolation,
            ports=worker_ports,
            sharing_key=sharing_key,
        )
        try:
            self._door = ZapAuthenticator(self._context, name_of, self._report)
            self._socket = self._context.socket(zmq.ROUTER)
            self._watch = ReceiveWatch(self._socket, SMALL_BYTES, total_bytes=UNREAD_BYTES, events=HANDSHAKE_EVENTS)
            self.endpoint = listen_at(self._socket, keys, bind, port)
            self._handshakes = HandshakeMonitor(self._report)
            self._mail = SessionChannel(self._socket, name_of, self._leases.busy, self._report, self._watch)
            self._lease_service = LeaseService(self._leases, self._workers, self._mail.send, self._report)
        except Exception:  # not Ctrl-C, which may leave a socket that nobody has and its context's end would wait for
            os.close(self._bell)
            self._context.destroy(linger=0)
            raise

    # ---- called by its owner

    def run(self) -> None:
        """Serve until :meth:`stop`; then end all leases and workers, and close."""
        try:
            self._report("started", endpoint=self.endpoint, process=os.getpid(), **self._isolation.state)
            self._serve()
        finally:
            self.close()

    def stop(self) -> None:
        """Make :meth:`run` return; callable from a signal handler, and from any thread."""
        self._stopping = True
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """End all workers and close all sockets; not while :meth:`run` is active in another thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._bell)
            self._watch.close()  # first: libzmq waits for a monitor whose events nobody reads
            self._lease_service.close("the agent has ended", time.monotonic())
            self._isolation.close()
        self._socket.close(200)  # milliseconds for the last messages to be sent
        self._door.close()
        self._context.term()
        self._report.tick(time.monotonic(), last=True)
        self._report("stopped", process=os.getpid())

    def stock(self) -> Stock:
        """Return the offers, their holders and the queue; callable from any thread."""
        with self._lock:
            return self._stock(0)

    # ---- the loop

    def _serve(self) -> None:
        while not self._stopping:
            patience_ms = 0 if self._workers.pressed else _TICK_MS if self._workers.changing else _IDLE_TICK_MS
            due_s = time.monotonic() + (patience_ms + _TICK_MS) / 1000
            poller = zmq.Poller()
            watched = self._watch.monitor, self._watch.descriptor
            for source in (self._socket, self._door.socket, self._bell, *watched, *self._workers.descriptors()):
                poller.register(source, zmq.POLLIN)
            ready = dict(poller.poll(patience_ms))
            now_s = time.monotonic()
            with self._lock:
                if now_s > due_s + _HELD_UP_S:  # stopped, or starved: messages of clients may be lost
                    self._leases.forgive(now_s - due_s)
                    self._report("held-up", seconds=round(now_s - due_s, 3))
                fine = self._turn({each for each in ready if isinstance(each, int)}, now_s)
            if not fine:
                time.sleep(_PAUSE_S)  # a failure may repeat at once

    def _turn(self, ready: Set[int], now_s: float) -> bool:
        """Handle all pending work once; return whether nothing failed."""
        parts: dict[str, Callable[[float], None]] = {
            "door": self._door.attend,
            "connections": lambda now_s: self._handshakes.attend(self._watch.attend(), now_s),
            "workers": partial(self._lease_service.attend, ready),
            "clients": self._listen,
            "time": self._tick,
        }
        done = [self._lease_service.guard(name, None, partial(do, now_s), now_s) for name, do in parts.items()]
        return all(done)

    def _listen(self, now_s: float) -> None:
        """Handle received messages; a failure ends the session that sent the message."""
        for session, route, frame in self._mail.take(now_s):
            take = partial(self._take, session, route, frame, now_s)
            if not self._lease_service.guard("message", session.client, take, now_s):
                self._mail.send(session.client, Refused(0, "failed", _FAILED), now_s)
                self._mail.end(session.client)

    def _tick(self, now_s: float) -> None:
        self._lease_service.tick(now_s)
        self._mail.tick(now_s)
        self._report.tick(now_s)

    def _take(self, session: Session, route: bytes, frame: bytes, now_s: float) -> None:
        """Handle one message of a client."""
        client = session.client
        self._mail.hear(session, route, now_s)
        try:
            request = decode_request(frame)
        except WireError as error:
            self._report.refusal("refused", client.name, now_s, client=client.name, reason=str(error))
            self._mail.send(client, Refused(request_number(frame), "usage", str(error)), now_s)
            return
        self._leases.heard(client, now_s)
        if not session.introduced and not isinstance(request, Introduce | Renew):
            refused = Refused(request.number, "versions", "introduce yourself first: say your versions")
            self._mail.send(client, refused, now_s)
            return
        self._answer(session, request, now_s)

    def _answer(self, session: Session, request: Request, now_s: float) -> None:
        client, number = session.client, request.number
        match request:
            case Introduce():
                self._introduce(session, request, now_s)
            case Renew():
                self._mail.send(client, Renewed(number, self._leases.of(client)), now_s)
            case Inspect():
                self._mail.send(client, self._stock(number), now_s)
            case Lease():
                self._lease_service.lease(client, request, now_s)
            case Release():
                self._lease_service.release(client, request, now_s)
            case ReadLog():
                lines = self._read_log(max(0, min(request.lines, LOG_LINES)))
                self._mail.send(client, LogLines(number, newest(lines)), now_s)

    def _introduce(self, session: Session, request: Introduce, now_s: float) -> None:
        client, mine = session.client, own_versions()
        wrong = mismatch(request.versions, mine, self._host)
        if wrong is not None:
            self._report.refusal("refused", client.name, now_s, client=client.name, reason=wrong)
            self._mail.send(client, Refused(request.number, "versions", wrong), now_s)
            return
        if not session.introduced:
            theirs = request.versions
            self._report.dealing(
                "connected", client.name, now_s, client=client.name, version=theirs.onebox, torch=theirs.torch
            )
        session.introduced = True
        self._mail.send(client, Introduced(request.number, mine, self._host, self._advertise), now_s)

    def _stock(self, number: int) -> Stock:
        now_s = time.monotonic()
        offers, queue = self._leases.stock(now_s, lambda device: self._load.of(device, now_s))
        return Stock(number, offers, queue, self._load.average(), now_s - self._began_s)
