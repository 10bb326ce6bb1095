"""The connection to an agent: requests and renews leases, and passes events of their workers to the pool."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq

from onebox.errors import OneboxError, PoolError, UsageError, WireError
from onebox.pool.backends.agents.agent_socket import AgentSocket, reach
from onebox.pool.backends.agents.held_leases import HeldLeases
from onebox.pool.backends.agents.keep_alive import CUT_S, KeepAlive
from onebox.pool.backends.agents.remote_worker import RemoteWorker
from onebox.pool.backends.compatibility import mismatch, own_versions
from onebox.pool.errors import SLICE_S
from onebox.portable import Wakeup
from onebox.wire import KeyPair
from onebox.wire.protocol.agents import (
    GRACE_S,
    AgentResponse,
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
    Want,
    WorkerEnded,
    decode_agent_response,
    encode_agent,
    response_number,
)

__all__ = ["AgentConnection", "Busy", "RemoteWorker"]

CONNECT_S = 5.0
"""How long an agent may take to answer the handshake."""

ANSWER_S = 10.0
"""How long an agent may take to answer a request."""

START_S = 120.0
"""How long an agent may take to start workers: longer than it waits for them itself."""

_BATCH = 64
"""Most messages that are processed between two looks at everything else."""

_RELEASE_S = 5.0
_JOIN_S = 5.0

T = TypeVar("T")
AgentMessages = queue.SimpleQueue[AgentResponse | OneboxError]


class Busy(PoolError):
    """The requested devices are leased to others, and the request was not to wait."""


@dataclass
class _Asked:
    """A request that has not been answered completely.

    Args:
        request: The request.
        cut_s: For a lease, how long the network to its workers may be interrupted.
    """

    request: Request
    cut_s: float = CUT_S
    answers: AgentMessages = field(default_factory=queue.SimpleQueue)
    handles: list[RemoteWorker] = field(default_factory=list)


class AgentConnection:
    """A connection to an agent, with a thread that owns the socket and sends heartbeats.

    Args:
        address: The agent's address: ``HOST`` or ``HOST:PORT``.
        key: Its public key.
        mine: The key pair that this client was paired with.
        client: Name that other clients see: ``user@host``.
        host: Name of its host in the pool; the address where it is empty.

    Raises:
        PoolError: There is no agent, it refuses this client, or it is of another version.
        UsageError: The host has no address.
    """

    def __init__(self, address: str, key: str, mine: KeyPair, client: str, host: str = "") -> None:
        self.address = address
        self._host = host or address
        self.key = key
        self._client = client
        self._socket = AgentSocket(address, key, mine)
        self._wakeup = Wakeup()
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._asked: dict[int, _Asked] = {}
        self._contact = KeepAlive(time.monotonic())
        self._held = HeldLeases(self._contact)
        self._numbers = 0
        self._greeting = 0  # number of the latest introduction after a reconnection
        self._open, self._stopping, self._other_version = False, False, False
        self._thread = threading.Thread(target=self._run, name=f"onebox-agent-{address}", daemon=True)
        asked = self._ask(self._introduction)  # before a refusal can come, which goes to pending requests
        self._thread.start()
        try:
            self.introduced: Introduced = self._answer(asked, Introduced, CONNECT_S)
            wrong = mismatch(own_versions(), self.introduced.versions, address)
            if wrong is not None:
                raise PoolError(wrong)
            self._open = True
        except BaseException:
            self.close()
            raise

    # ---- called by other threads

    def lease(
        self,
        wants: Sequence[Want],
        client_key: str,
        *,
        grace_s: float = GRACE_S,
        cut_s: float = CUT_S,
        wait: bool = True,
        on_queued: Callable[[Queued], None] | None = None,
        speed: float = 1.0,
    ) -> list[RemoteWorker]:
        """Lease devices, all or none, with a worker started on each.

        Args:
            wants: The devices.
            client_key: The public CURVE key that the workers accept.
            grace_s: How long this process may be silent before the lease ends.
            cut_s: How long the network to the agent may be interrupted before the workers are given up.
            wait: Whether to queue for devices that others hold, rather than fail.
            on_queued: Called when the request's position in the queue is set or changes.
            speed: For tests: fraction of their full speed that CPU workers work at.

        Raises:
            UsageError: No such devices are offered, or the request exceeds this client's limits.
            PoolError: Others hold the devices and ``wait`` is false; a worker did not start, or the agent is gone.
        """
        asked = self._ask(lambda number: Lease(number, tuple(wants), client_key, grace_s, wait, speed), cut_s)
        try:
            while isinstance(found := self._next(asked, None if wait else START_S), Queued):
                if on_queued is not None:
                    on_queued(found)
            self._expect(found, Leased)
            if len(asked.handles) != len(wants):
                raise PoolError(f"the agent at {self.address} leased {len(asked.handles)} workers, not {len(wants)}")
        except BaseException:
            self._give_up(asked)
            raise
        return asked.handles

    def release(self, lease: int) -> None:
        """Give a lease back; its workers end, if they have not. No error where the agent is gone: it is given back when
        the agent returns."""
        with self._lock:
            self._held.release(lease)
        with contextlib.suppress(PoolError):
            self._answer(self._ask(lambda number: Release(number, lease)), Done, _RELEASE_S)

    def end(self, handle: RemoteWorker) -> bool:
        """End one worker, unless it has ended, and return whether its lease goes on. No error where the agent is
        gone."""
        with self._lock:
            worker = self._held.position(handle)
        if worker is None:
            return False
        with contextlib.suppress(PoolError):
            self._answer(self._ask(lambda number: Release(number, handle.lease, worker=worker)), Done, _RELEASE_S)
        return True

    def inspect(self) -> Stock:
        """Return the agent's offers, leases and queue.

        Raises:
            PoolError: The agent is gone.
        """
        return self._answer(self._ask(Inspect), Stock, ANSWER_S)

    def read_log(self, lines: int) -> list[str]:
        """Return the last lines of the agent's log: JSON objects.

        Raises:
            PoolError: The agent is gone.
        """
        return list(self._answer(self._ask(lambda number: ReadLog(number, lines)), LogLines, ANSWER_S).lines)

    def close(self) -> None:
        """Give all leases back and close the connection. Idempotent."""
        for lease in self._contact.leases if not self._stopping else ():
            self.release(lease)
        with self._lock:
            if self._stopping:
                return
            for number in [number for number, asked in self._asked.items() if isinstance(asked.request, Lease)]:
                self._leave(number)
            self._stopping = True
            self._wakeup.set()
        self._thread.join(_JOIN_S)

    @property
    def gone(self) -> bool:
        """True while the agent counts as lost."""
        return self._contact.gone or self._stopping

    # ---- requests

    def _introduction(self, number: int) -> Introduce:
        return Introduce(number, own_versions(), self._client)

    def _ask(self, make: Callable[[int], Request], cut_s: float = CUT_S) -> _Asked:
        with self._lock:
            if self._stopping:
                raise PoolError(f"the connection to the agent at {self.address} is closed")
            if self._contact.error is not None:  # nobody would answer, nor fail this request later
                raise self._contact.error.with_traceback(None)
            self._numbers += 1
            asked = _Asked(make(self._numbers), cut_s)
            self._asked[self._numbers] = asked
            self._post(asked.request)
        return asked

    def _post(self, request: Request) -> None:
        self._outbox.append(encode_agent(request))
        self._wakeup.set()

    def _answer(self, asked: _Asked, kind: type[T], timeout_s: float) -> T:
        try:
            return self._expect(self._next(asked, timeout_s), kind)
        finally:
            with self._lock:
                self._asked.pop(asked.request.number, None)

    def _next(self, asked: _Asked, timeout_s: float | None) -> AgentResponse:
        """Wait for the next message about a request; without a bound only as long as the agent answers heartbeats.

        Raises:
            OneboxError: The request was refused, or can no longer be answered.
        """
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        found: AgentResponse | OneboxError | None = None
        while found is None:  # in slices, so that Ctrl-C always ends the wait
            if (left_s := end_s - time.monotonic()) <= 0:
                raise self._socket.absent(timeout_s or 0.0)
            if self._socket.unreached and not self._open:
                reach(self.address)
            with contextlib.suppress(queue.Empty):
                found = asked.answers.get(timeout=min(SLICE_S, left_s))
        if isinstance(found, OneboxError):
            raise found
        if isinstance(found, Refused):
            kind = {"usage": UsageError, "busy": Busy}.get(found.kind, PoolError)
            raise kind(f"the agent at {self.address} refuses: {found.reason}")
        return found

    def _expect(self, found: AgentResponse, kind: type[T]) -> T:
        if not isinstance(found, kind):
            raise PoolError(f"the agent at {self.address} said {type(found).__name__}, not {kind.__name__}")
        return found

    def _give_up(self, asked: _Asked) -> None:
        """Leave the queue, or give back a lease that was granted meanwhile."""
        with self._lock:
            number = asked.request.number
            waiting = self._asked.pop(number, None) is not None
            if waiting and not self._stopping:
                self._leave(number)
        for handle in asked.handles:
            handle.close(grace_s=0.0)
        for lease in {handle.lease for handle in asked.handles}:
            self.release(lease)

    def _leave(self, number: int) -> None:
        """Withdraw a request from the queue; called with the lock held."""
        self._numbers += 1
        self._post(Release(self._numbers, request=number))

    # ---- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._lose(
                PoolError(f"the connection to the agent at {self.address} failed: {type(error).__name__}: {error}")
            )
            raise
        finally:
            with self._lock:
                self._stopping = True
                self._wakeup.close()
            self._socket.close()
            self._lose(PoolError(f"the connection to the agent at {self.address} is closed"))

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._wakeup.descriptor, self._socket.socket, self._socket.monitor):
            poller.register(source, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(int(1000 * self._contact.patience_s(time.monotonic())) + 1))
            self._contact.wake(time.monotonic())
            if self._wakeup.descriptor in ready:
                self._wakeup.clear()
            self._watch()
            for _ in range(_BATCH):
                if (frame := self._socket.receive()) is None:
                    break
                self._take(frame)
            self._speak()
            with self._lock:
                silent_s = self._contact.lost(time.monotonic())
            if silent_s is not None and self._open:
                self._lose(PoolError(f"the agent at {self.address} has been silent for {silent_s:.1f} s"))
        self._flush()

    def _watch(self) -> None:
        """Handle the events of the connection; after a reconnection, send again the unanswered requests."""
        cuts = self._socket.cuts
        refusal = self._socket.watch()
        if refusal is not None:
            self._lose(refusal)
        elif self._socket.cuts > cuts and self._open:
            with self._lock:
                self._numbers += 2
                self._greeting = self._numbers - 1
                self._outbox.append(encode_agent(self._introduction(self._greeting)))
                # before requests: an agent that was started anew gives out the numbers of its leases again
                self._outbox.append(encode_agent(Renew(self._numbers)))
                self._outbox.extend(encode_agent(asked.request) for asked in self._asked.values())

    def _speak(self) -> None:
        if self._open and self._contact.renew(time.monotonic()):
            with self._lock:
                self._numbers += 1
                self._outbox.append(encode_agent(Renew(self._numbers)))
                self._held.release_forsaken(time.monotonic())
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            self._socket.send(self._outbox.popleft())

    def _take(self, frame: Any) -> None:
        try:
            message = decode_agent_response(frame)
        except WireError as error:
            self._refuse(response_number(frame), f"the agent at {self.address} sent {error}")
            return
        if self._is_shut_out(message):
            return
        with self._lock:
            self._held.heard(time.monotonic())
            match message:
                case Renewed():
                    for lease in self._held.renewed(message.leases):
                        self._numbers += 1
                        self._post(Release(self._numbers, lease))
                case WorkerEnded():
                    self._held.worker_ended(message.lease, message.worker, message.exit_status, message.last_words)
                case LeaseEnded():
                    self._held.end(message.lease, message.why)
                case Refused(number=0):  # of a message without a readable number: any of those without a reply
                    for each in self._asked.values():
                        each.answers.put(message)
                    self._asked.clear()
                case _ if (asked := self._asked.get(message.number)) is not None:
                    if isinstance(message, Leased) and isinstance(asked.request, Lease):
                        self._lease(asked, asked.request, message)
                    if not isinstance(message, Queued):
                        del self._asked[message.number]
                    elif asked.answers.qsize() >= _BATCH:  # nobody looks at them now: the place in the queue is old
                        return
                    asked.answers.put(message)

    def _is_shut_out(self, message: AgentResponse) -> bool:
        """Return whether the agent refuses this client altogether: it was removed, or the agent was started anew in
        another version. Until that lets it in, nothing else that it says is a sign of life."""
        if isinstance(message, Introduced):
            self._other_version = False
        elif isinstance(message, Refused) and message.kind in ("removed", "versions"):
            self._other_version |= message.kind == "versions" and message.number == self._greeting
            if self._other_version or message.kind == "removed":
                self._lose(PoolError(f"the agent at {self.address} says: {message.reason}"))
                return True
        return self._other_version

    def _refuse(self, number: int, fault: str) -> None:
        """Fail the request that an unreadable message answers or, if that cannot be told, all: any may wait for ever.

        Args:
            number: Number of the request; 0 if it cannot be told.
            fault: The agent and the fault of its message.
        """
        if not number:
            self._lose(PoolError(f"{fault}; it cannot be told what that was about, so the agent is given up as lost"))
            return
        with self._lock:
            self._held.heard(time.monotonic())
            if (asked := self._asked.get(number)) is not None:  # which stays, so that a granted lease is given back
                asked.answers.put(PoolError(f"{fault}; only the request that it answers has failed"))

    def _lease(self, asked: _Asked, request: Lease, leased: Leased) -> None:
        """Register a lease at once: the agent's next message may be about it."""
        asked.handles += [
            RemoteWorker(self._host, self.introduced.address, leased.lease, started) for started in leased.workers
        ]
        self._held.hold(leased.lease, asked.handles, asked.cut_s)

    def _lose(self, error: PoolError) -> None:
        """Fail all requests and workers: the agent is gone."""
        with self._lock:
            self._held.lose(error)
            asked, self._asked = list(self._asked.values()), {}
        for each in asked:
            each.answers.put(error)
