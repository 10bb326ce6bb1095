"""The agent: lets in the clients that were paired with it, leases them this host's devices, and starts their workers.

One thread does everything, and waits for nobody: workers start and end while it goes on. A client is known by the key
that its connection was opened with. What tells several connections of one client apart is the routing id of its socket:
one that sets its own (16 random bytes) keeps its leases when its connection is cut and comes back.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from onebox.agent.demand import Limits, Offered, what_is_wrong
from onebox.agent.door import Door, Tell
from onebox.agent.host import Load
from onebox.agent.leases import Client, Decision, Drop, End, Grant, Leases, Refuse, Wait
from onebox.agent.listening import check_address, listen_at
from onebox.agent.sessions import Session, Sessions, newest
from onebox.agent.workers import Died, Gone, News, NotStarted, Ready, Workers
from onebox.errors import WireError
from onebox.pool.versions import mismatch, own_versions
from onebox.wire import KeyPair
from onebox.wire.agents import (
    AgentSaying,
    Done,
    Inspect,
    Introduce,
    Introduced,
    Lease,
    Leased,
    LeaseEnded,
    LogLines,
    Queued,
    ReadLog,
    Refused,
    Release,
    Renew,
    Renewed,
    Request,
    Stock,
    WorkerEnded,
    decode_request,
    encode_agent,
)

RELEASE_S = 1.0
"""How long workers of a released lease may take to their own end, which their client asks them for."""

LOG_LINES = 1000
"""The most lines of its log that a client gets."""

_DROPPED = "it was silent for longer than its grace while it waited, and has lost its place in the queue; ask again"

_TICK_MS = 200
_HELD_UP_S = 1.0
_BATCH = 256


class Agent:
    """The agent of a host. It binds when it is made, and serves in :meth:`run`.

    Args:
        keys: Its own.
        name_of: From a public key to the name of its client; None for a stranger, who is not let in.
        bind: The IP address to listen at, for the agent and for its workers.
        port: The agent's port; 0 for any that is free.
        advertise: The address of this host that clients, and workers of other hosts, connect to.
        offers: What is offered.
        limits: Of each client.
        tell: Told of everything that happens: an event, and what is to be known of it.
        has_clients: Whether there is anybody whom ``name_of`` knows.
        read_log: Returns the last lines of the log, as many as asked for at most.

    Raises:
        UsageError: It cannot listen there, or must not.

    Example:
        >>> from onebox.wire import new_keys
        >>> offers = [Offered(device="cpu", name="a CPU", memory_bytes=1 << 30, threads=2)]
        >>> agent = Agent(
        ...     keys=new_keys(), name_of=lambda key: None, bind="127.0.0.1", port=0, advertise="127.0.0.1",
        ...     offers=offers, limits=Limits(), tell=lambda event, **fields: None,
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
        limits: Limits,
        tell: Tell,
        has_clients: bool = False,
        read_log: Callable[[int], Sequence[str]] = lambda lines: (),
    ) -> None:
        check_address(bind, port, advertise, has_clients)
        self._name_of = name_of
        self._tell = tell
        self._read_log = read_log
        self._advertise = advertise
        self._host = platform.node() or "this host"
        self._began_s = time.monotonic()
        self._leases = Leases(offers, limits)
        self._sessions = Sessions()
        self._workers = Workers(host=self._host, bind=bind, advertise=advertise)
        self._load = Load()
        self._asked: dict[tuple[Client, int], Lease] = {}
        self._granted: dict[int, Grant] = {}
        self._ready: dict[int, Leased] = {}
        self._releasing: dict[int, list[tuple[Client, int]]] = {}
        self._lock = threading.RLock()  # a handler of signals may come while it is held
        self._stopping = False
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._door = Door(self._context, name_of, tell)
            self._socket = self._context.socket(zmq.ROUTER)
            self.endpoint = listen_at(self._socket, keys, bind, port)
        except BaseException:
            os.close(self._bell)
            self._context.destroy(linger=0)
            raise

    # ---- for its owner

    def run(self) -> None:
        """Serve until :meth:`stop`; then end all leases and workers, and close."""
        try:
            self._tell("started", endpoint=self.endpoint, process=os.getpid())
            self._serve()
        finally:
            self.close()

    def stop(self) -> None:
        """Let :meth:`run` return; callable from a handler of signals, and from any thread."""
        self._stopping = True
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """End all workers and close all sockets; not while :meth:`run` runs elsewhere. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._bell)
            for lease, grant in self._granted.items():
                self._say(grant.client, LeaseEnded(lease, "the agent has ended"))
            self._workers.close()
        self._socket.close(200)  # milliseconds for the last words to go
        self._door.close()
        self._context.term()
        self._tell("stopped", process=os.getpid())

    def stock(self) -> Stock:
        """Return what is offered, who has it and who waits; callable from any thread."""
        with self._lock:
            return self._stock(0)

    # ---- the loop

    def _serve(self) -> None:
        expected_s = time.monotonic() + 2 * _TICK_MS / 1000
        while not self._stopping:
            poller = zmq.Poller()
            for source in (self._socket, self._door.socket, self._bell, *self._workers.descriptors()):
                poller.register(source, zmq.POLLIN)
            ready = dict(poller.poll(_TICK_MS))
            now_s = time.monotonic()
            with self._lock:
                if now_s > expected_s + _HELD_UP_S:  # stopped, or starved: what clients said meanwhile may be lost
                    self._leases.forgive(now_s - expected_s)
                    self._tell("held-up", seconds=round(now_s - expected_s, 3))
                self._door.attend(now_s)
                for news in self._workers.attend({each for each in ready if isinstance(each, int)}, now_s):
                    self._learn(news, now_s)
                self._listen(now_s)
                self._apply(self._leases.tick(now_s), now_s)
                self._sessions.forget(now_s, self._leases.busy)
            expected_s = time.monotonic() + 2 * _TICK_MS / 1000

    def _listen(self, now_s: float) -> None:
        """Take what clients have said, up to some; the rest next time."""
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            key = str(frames[-1].get("User-Id"))
            name = self._name_of(key)
            if name is None or len(frames) != 2:  # no longer let in; or no message of ours, which is one frame
                continue
            client = Client(key, frames[0].bytes, name)
            session = self._sessions.find(client, now_s, self._leases.busy)
            if session is not None and session.rate.allows(now_s):
                self._take(session, frames[1].bytes, now_s)

    def _take(self, session: Session, frame: bytes, now_s: float) -> None:
        """Take one message of a client."""
        client = session.client
        try:
            request = decode_request(frame)
        except WireError as error:
            self._tell("refused", client=client.name, reason=str(error))
            self._say(client, Refused(0, "usage", str(error)))
            return
        self._leases.heard(client, now_s)
        for saying in session.heard(now_s):
            self._send(client, saying)
        if not session.introduced and not isinstance(request, Introduce | Renew):
            self._say(client, Refused(request.number, "versions", "introduce yourself first: say your versions"))
            return
        self._answer(session, request, now_s)

    def _answer(self, session: Session, request: Request, now_s: float) -> None:
        client, number = session.client, request.number
        match request:
            case Introduce():
                self._introduce(session, request)
            case Renew():
                self._say(client, Renewed(number, self._leases.of(client)))
            case Inspect():
                self._say(client, self._stock(number))
            case Lease():
                self._lease(client, request, now_s)
            case Release():
                self._release(client, request, now_s)
            case ReadLog():
                lines = self._read_log(max(0, min(request.lines, LOG_LINES)))
                self._say(client, LogLines(number, newest(lines)))

    # ---- what clients ask for

    def _introduce(self, session: Session, request: Introduce) -> None:
        client, mine = session.client, own_versions()
        wrong = mismatch(request.versions, mine, self._host)
        if wrong is not None:
            self._tell("refused", client=client.name, reason=wrong)
            self._say(client, Refused(request.number, "versions", wrong))
            return
        if not session.introduced:
            self._tell("connected", client=client.name, version=request.versions.onebox, torch=request.versions.torch)
        session.introduced = True
        self._say(client, Introduced(request.number, mine, self._host, self._advertise))

    def _lease(self, client: Client, request: Lease, now_s: float) -> None:
        wrong = what_is_wrong(request)
        if wrong is not None:
            self._apply([Refuse(client, request.number, "usage", wrong)], now_s)
            return
        for lease, grant in self._granted.items():  # asked again: the answer was lost, or is not there yet
            if (grant.client, grant.number) == (client, request.number):
                if lease in self._ready:
                    self._say(client, self._ready[lease])
                return
        self._asked[client, request.number] = request
        decisions = self._leases.ask(
            client, request.number, request.wants, grace_s=request.grace_s, wait=request.wait, now_s=now_s
        )
        self._apply(decisions, now_s)

    def _release(self, client: Client, request: Release, now_s: float) -> None:
        lease = request.lease
        if not lease:
            left = self._leases.leave(client, request.request, now_s)
            if left is not None:
                self._asked.pop((client, request.request), None)
                self._tell("left", client=client.name)
                self._say(client, Done(request.number))
                self._apply(left, now_s)
                return
            of_request = (key for key, g in self._granted.items() if (g.client, g.number) == (client, request.request))
            lease = next(of_request, 0)  # it was granted a moment ago
        grant = self._granted.get(lease)
        if grant is None or grant.client.key != client.key:
            why = f"you have no lease {lease}" if request.lease else f"no request {request.request} waits"
            self._say(client, Refused(request.number, "ended", f"{why}, or no longer"))
            return
        self._releasing.setdefault(lease, []).append((client, request.number))
        self._apply(self._leases.release(client, lease), now_s)

    def _stock(self, number: int) -> Stock:
        now_s = time.monotonic()
        offers, queue = self._leases.stock(now_s, lambda device: self._load.of(device, now_s))
        return Stock(number, offers, queue, self._load.average(), now_s - self._began_s)

    # ---- what is decided

    def _apply(self, decisions: Sequence[Decision], now_s: float) -> None:
        for decision in decisions:
            client = decision.client
            match decision:
                case Grant():
                    self._start(decision, now_s)
                case Wait():
                    self._tell("queued", client=client.name, place=decision.place, behind=decision.behind)
                    self._say(client, Queued(decision.number, decision.place, decision.behind))
                case Refuse():
                    self._asked.pop((client, decision.number), None)
                    self._tell("lease-refused", client=client.name, kind=decision.kind, reason=decision.reason)
                    self._say(client, Refused(decision.number, decision.kind, decision.reason))
                case End():
                    self._end(decision, now_s)
                case Drop():
                    self._asked.pop((client, decision.number), None)
                    self._tell("dropped", client=client.name, reason=_DROPPED)
                    self._say(client, Refused(decision.number, "ended", _DROPPED))

    def _start(self, grant: Grant, now_s: float) -> None:
        """Start the workers of a lease."""
        asked = self._asked.pop((grant.client, grant.number))
        self._granted[grant.lease] = grant
        devices = ", ".join(share.device for share in grant.shares)
        self._tell("leased", client=grant.client.name, lease=grant.lease, devices=devices)
        why = self._workers.start(grant.lease, grant.shares, asked.key, asked.speed, now_s)
        if why is not None:
            self._learn(NotStarted(grant.lease, why), now_s)

    def _end(self, end: End, now_s: float) -> None:
        """End the workers of a lease, and tell its client where it does not know."""
        grant = self._granted[end.lease]
        event = {"released": "released", "silent": "expired", "time": "timed-out", "failed": "start-failed"}[end.cause]
        self._tell(event, client=end.client.name, lease=end.lease, reason=end.why)
        if end.cause == "failed":
            self._say(end.client, Refused(grant.number, "failed", end.why))
        elif end.cause != "released":
            self._say(end.client, LeaseEnded(end.lease, end.why))
        self._ready.pop(end.lease, None)
        self._workers.end(end.lease, RELEASE_S if end.cause == "released" else 0.0, now_s)

    # ---- what befalls workers

    def _learn(self, news: News, now_s: float) -> None:
        grant = self._granted[news.lease]
        client = grant.client
        match news:
            case Ready():
                for started in news.workers:
                    self._tell(
                        "worker-started",
                        client=client.name,
                        lease=news.lease,
                        device=started.device,
                        process=started.process,
                    )
                self._ready[news.lease] = Leased(grant.number, news.lease, news.workers)
                self._say(client, self._ready[news.lease])
            case NotStarted():
                self._apply(self._leases.failed(news.lease, news.why), now_s)
            case Died():
                self._tell(
                    "worker-left" if news.exit_status == 0 else "worker-ended",  # left: its client told it to
                    client=client.name,
                    lease=news.lease,
                    device=grant.shares[news.worker].device,
                    exit_status=news.exit_status,
                )
                self._say(client, WorkerEnded(news.lease, news.worker, news.exit_status, news.last_words))
                self._apply(self._leases.worker_ended(news.lease, news.worker, now_s), now_s)
            case Gone():
                del self._granted[news.lease]
                self._tell("freed", client=client.name, lease=news.lease)
                for releaser, number in self._releasing.pop(news.lease, ()):
                    self._say(releaser, Done(number))
                self._apply(self._leases.freed(news.lease, now_s), now_s)

    def _say(self, client: Client, saying: AgentSaying) -> None:
        """Say something to a client."""
        session = self._sessions.get(client)
        if session is not None:
            session.said(saying, time.monotonic())
        self._send(client, saying)

    def _send(self, client: Client, saying: AgentSaying) -> None:
        """Send something to a client; one that does not listen, or has gone, misses it."""
        try:
            self._socket.send_multipart([client.session, encode_agent(saying)], zmq.NOBLOCK)
        except (zmq.ZMQError, WireError) as error:
            self._tell("unsaid", client=client.name, what=type(saying).__name__, reason=str(error))
