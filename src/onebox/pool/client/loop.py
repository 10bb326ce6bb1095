"""The client loop: the one thread of a client that owns the sockets to its workers.

Other threads post messages and get futures. The thread delivers replies and group messages, and monitors the workers'
liveness.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import psutil
import zmq

from onebox.errors import OneboxError, PoolError, UsageError, WireError, WorkerDied, WorkerHung
from onebox.pool.backends.base import HostedWorker, LocalWorker, WorkerHandle
from onebox.pool.client.connection import WorkerConnection, WorkerReply
from onebox.pool.client.group_services import GroupNotice, GroupServices
from onebox.pool.client.pending import PendingReplies
from onebox.pool.client.relay import Relay, RelayEnd
from onebox.pool.client.socket_poller import SocketPoller, Source
from onebox.pool.client.work_times import WorkTimes
from onebox.pool.discovery import LOCAL_HOST
from onebox.pool.errors import AFTERWARDS, WorkerLocation, fail
from onebox.pool.liveness import Liveness
from onebox.portable import Wakeup
from onebox.wire import KeyPair, Restarted, check_frames, decode_worker_message, encode
from onebox.wire.protocol.requests import Envelope, Instruction
from onebox.wire.protocol.responses import (
    ClockReading,
    Contribution,
    Heartbeat,
    Hello,
    Left,
    Lookup,
    RelayRequest,
    Reply,
    WorkerMemory,
    WorkerMessage,
)
from onebox.worker import Ports

_T = TypeVar("_T")

_TICK_MS = 250
"""Longest pause of the loop: what a worker sends without completing a message is looked at as often."""

_JOIN_S = 10.0

TURN_S = 0.02
"""Longest time that the messages of all workers take in one turn, unless one of them takes longer: each worker gets its
part, so that one that floods the client delays no other for long."""

LEAST_TURN_S = 0.001

MESSAGE_SHARE = 2
LEAST_MESSAGE_BYTES = 1 << 30
"""Limit of incomplete messages of all workers: this inverse fraction of the host's memory, or so much if that is more.
"""

_CIPHER_THREADS = 4
"""Limit of ZeroMQ's I/O threads, one of which encrypts about 1 GB/s: enough for a network of 25 Gbit/s."""


FOREIGN_LINE_S = 10.0
"""Least time between two lines of the log about workers that say to leave groups of others."""

_LOG = logging.getLogger("onebox")


class ClientLoop:
    """Sockets, futures and the thread that serves them.

    Args:
        keys: The client's keys.
        workers: Expected number of workers: tensors to and from several are encrypted by several threads.
        patience_s: See :class:`Liveness`.
    """

    def __init__(
        self,
        keys: KeyPair,
        workers: int = 1,
        patience_s: Mapping[int, float] | None = None,
    ) -> None:
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=max(1, min(workers, _CIPHER_THREADS)))
        self._connections: dict[int, WorkerConnection] = {}
        self._message_bytes = max(LEAST_MESSAGE_BYTES, psutil.virtual_memory().total // MESSAGE_SHARE)
        self._outbox: deque[tuple[int, list[Any]]] = deque()  # filled by any thread, emptied by the loop's
        self._wakeup = Wakeup()
        self._woken = False
        self._resending: list[WorkerConnection] = []
        """The connections over which messages may be lost and are sent again."""
        self._hosted: dict[int, HostedWorker] = {}
        self._pending = PendingReplies()
        self._lock = threading.Lock()
        self._numbers = 0
        self.sent_bytes: dict[int, int] = {}
        """Bytes of tensors posted to each worker so far."""
        self.received_bytes: dict[int, int] = {}
        """Bytes of tensors in the replies of each worker so far."""
        self.work = WorkTimes()
        self.executed: dict[int, int] = {}
        """Progress counter of each worker, from its last heartbeat; grows as long as the worker makes progress."""
        self.memory: dict[int, WorkerMemory] = {}
        """Memory of buffers of each worker, from its last heartbeat."""
        self._stopping = False
        self._serving = False
        """True once the thread runs; whoever starts it may be interrupted before knowing that."""
        self._closed = False
        self._liveness = Liveness(patience_s or {})
        self._next_check_s = -math.inf
        self._groups = GroupServices()
        self._relay = Relay()
        self._foreign, self._next_foreign_s = 0, -math.inf
        self._loop_calls = LoopCalls()
        self._gone: dict[int, OneboxError] = {}
        self._thread = threading.Thread(target=self._run, name="onebox-client-loop", daemon=True)

    # ---- called by other threads

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def connect(self, handle: WorkerHandle, server_key: str) -> Future[Hello]:
        """Connect to a worker, or to the replacement of a dropped one; the future holds its hello message, once all its
        sockets work.

        Raises:
            OneboxError: The worker could not be started, or the pool is closed.
        """
        ports = handle.ports()
        self._gone.pop(handle.place.worker, None)
        return self._call_in_loop(lambda poller: self._connect(handle, ports, server_key, poller))

    def post(
        self,
        worker: int,
        instructions: Sequence[Instruction],
        frames: Sequence[Any] = (),
        *,
        answer: bool = False,
    ) -> Future[WorkerReply]:
        """Send instructions to a worker.

        Args:
            worker: Its number.
            instructions: The instructions, in order.
            frames: Raw elements of their tensors; must not be modified until the worker has replied.
            answer: Whether the worker is to reply; otherwise the future is done at once.

        Raises:
            OneboxError: The pool is broken or closed, there is no such worker, or the message exceeds the channel's
                limits.
        """
        size_bytes = check_frames(frames)
        if worker in self._gone:
            raise PoolError(f"worker {worker} has gone and could not be replaced: {self._gone[worker]}")
        if worker not in self._connections:
            raise UsageError(f"there is no worker {worker}; this pool has 0 to {len(self._connections) - 1}")
        with self._lock:
            self._numbers += 1
            header = encode(Envelope(self._numbers, answer, tuple(instructions)))
            future = self._pending.promise(worker, self._numbers, answer=answer)
            self.sent_bytes[worker] = self.sent_bytes.get(worker, 0) + size_bytes
            self._outbox.append((worker, [header, *frames]))
            self._wake()
        return future

    def form(self, group: int, members: Sequence[int]) -> None:
        """Start to serve a group's rendezvous and sums, until one of its members leaves."""
        self._groups.form(group, members)

    def serves(self, group: int) -> bool:
        """Return whether a group is served: it has been formed, and none of its members has left."""
        return self._groups.serves(group)

    def has_failed(self, group: int) -> bool:
        """Return whether the first member that has left a group could not do its part."""
        return self._groups.has_failed(group)

    @property
    def lost(self) -> dict[int, OneboxError]:
        """Errors of the workers that are lost and have not been dropped."""
        return self._pending.lost

    @property
    def broken(self) -> OneboxError | None:
        """The error for which nothing can be posted, to all workers or to those of a fault domain, until it is
        mended."""
        return self._pending.broken

    @property
    def domains(self) -> Mapping[int, int]:
        """Fault domain of each worker that is not in the common one; see :meth:`Pool.isolate`."""
        return self._pending.domains

    @domains.setter
    def domains(self, domains: Mapping[int, int]) -> None:
        self._pending.domains = domains

    def affected(self, worker: int, lost: Collection[int]) -> bool:
        """Return whether a worker is in the fault domain of a lost one; any is, if none was lost."""
        domain = self._pending.domain
        return not lost or domain(worker) in {domain(each) for each in lost}

    def silence_s(self, worker: int) -> float:
        """Return the seconds since a worker's last heartbeat."""
        return self._liveness.silence_s(worker, time.monotonic())

    # ---- called during recovery

    @property
    def client_key(self) -> str:
        """The public key of this client, which its workers accept."""
        return self._keys.public

    def drop(self, worker: int) -> dict[int, tuple[int, ...]]:
        """Drop a lost worker: close its sockets, and notify all workers that wait in its groups, or in those between
        its fault domain and others.

        Returns:
            These groups, with their members.

        Raises:
            PoolError: The pool is closed.
        """
        return self._call_in_loop(lambda poller: self._drop(worker, poller))

    def give_up(self, worker: int, error: OneboxError) -> None:
        """Mark a worker as lost."""
        self._call_in_loop(lambda _: self._lost(self._connections[worker], error))

    def interrupt(self, worker: int, groups: Sequence[int]) -> None:
        """Interrupt a worker's waits in groups that have lost a member, or are given up."""

        def interrupt_waits(_: SocketPoller) -> None:
            if worker in self._connections:
                self._connections[worker].interrupt(groups)

        self._call_in_loop(interrupt_waits)

    def groups_of(self, worker: int) -> dict[int, tuple[int, ...]]:
        """Return the groups that a worker is in, with their members."""
        return self._call_in_loop(lambda _: self._groups_of(worker))

    def dissolve(self, groups: Collection[int]) -> None:
        """Dissolve groups, and notify those that wait in them for the client."""
        self._call_in_loop(lambda _: self._dissolve(groups))

    def miss(self, worker: int, error: OneboxError) -> None:
        """Note that a dropped worker is not replaced, until :meth:`connect` is called for it."""
        self._gone[worker] = error

    @property
    def missing(self) -> Mapping[int, OneboxError]:
        """The dropped workers that were not replaced, each with the error that it was lost by."""
        return self._gone

    def mend(self) -> bool:
        """Accept posts again if every lost worker has been dropped; return whether that is so.

        Raises:
            OneboxError: The pool is closed, or has another error than lost workers.
        """
        with self._lock:
            if self._stopping:
                raise self._closing_error()
            return self._pending.mend()

    def _wake(self) -> None:
        """Wake the thread, unless it is about to wake; with the lock, as the descriptor is closed in the end."""
        if not self._woken:
            self._wakeup.set()  # first: Ctrl-C may come between the two
            self._woken = True

    def _call_in_loop(self, action: Callable[[SocketPoller], _T]) -> _T:
        """Run a function in the thread, and wait for it."""
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise self._closing_error()
            done = self._loop_calls.add(action)
            self._wake()
        return call_result(done, _JOIN_S)

    def stop(self, *last: Instruction) -> None:
        """End the thread, close the sockets, fail what is still pending. Idempotent.

        Args:
            last: Final instructions for every worker, unless the pool is broken.
        """
        with self._lock:
            if self._stopping:
                return
            self._stopping = True  # from here on the end of a worker is not an error
            if last and self.broken is None:
                header = encode(Envelope(0, False, last))
                for worker in self._connections:
                    self._outbox.append((worker, [header]))
            self._pending.close(self._closing_error())
            self._wake()
        if self._serving:
            self._thread.join(timeout=_JOIN_S)
        if not self._serving or not self._thread.is_alive():  # a hung thread closes them at its end
            self._close()
        self._pending.give_up(self._closing_error())

    def _closing_error(self) -> OneboxError:
        """Return the error of a closed pool: the earlier one, if there was any."""
        error = self.broken or PoolError("the pool is closed; open another with onebox.open()")
        return error.with_traceback(None)

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wakeup.close()
        self._relay.close()
        for connection in self._connections.values():
            connection.close_watches()
            connection.commands.close(200)  # milliseconds for the last messages to be sent
            connection.heartbeat_socket.close(0)
        self._context.destroy(linger=0)  # including sockets of a worker that could not be connected

    # ---- the thread

    def _run(self) -> None:
        with self._lock:
            if self._stopping:  # it was stopped before this thread began
                return
            self._serving = True
        try:
            self._serve()
        finally:
            if self._stopping:
                self._close()

    def _serve(self) -> None:
        poller = SocketPoller()
        try:
            poller.register(self._wakeup.descriptor, None)
            while not self._stopping:
                ready = poller.poll(self._patience_ms())
                if None in ready:
                    with self._lock:
                        self._wakeup.clear()
                        self._woken = False
                self._loop_calls.run(poller)
                self._send_posted()
                turn_s = max(LEAST_TURN_S, TURN_S / max(1, len(self._connections)))
                heard = [owner for owner in ready if isinstance(owner, WorkerConnection) and self._has(owner)]
                for connection in heard:
                    self._process_ready(connection, ready[connection], turn_s)
                for connection in heard:  # an end fails the replies of others, which may have come before it
                    self._process_end(connection, ready[connection], poller)
                now_s = time.monotonic()
                for connection in self._resending:
                    connection.link.flush(now_s)
                self._check_liveness(now_s)
            self._send_posted()
        except BaseException as error:
            self._pending.give_up(PoolError(f"the client's own thread failed: {type(error).__name__}: {error}"))
            raise
        finally:
            poller.close()

    def _check_liveness(self, now_s: float) -> None:
        """Check the workers' liveness, not more often than it can have changed."""
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _TICK_MS / 2000
        silences_s = [self._liveness.silence_s(worker, now_s) for worker in self._connections]
        self._pending.release(now_s, max(silences_s, default=0.0))
        for worker, hosted in self._hosted.items():
            self._liveness.overhear(worker, hosted.heard_s)
        for worker in self._liveness.silent(now_s):
            handle = self._connections[worker].handle
            if isinstance(handle, LocalWorker):
                reads, waits = handle.disk_reads()
                self._liveness.look(worker, now_s, disk_reads=reads, waits=waits)
        for worker, why in self._liveness.hung(now_s).items():
            self._lost(self._connections[worker], self._hung(worker, why))
        self._check_overruns(now_s)
        self._relay.look(now_s)

    def _check_overruns(self, now_s: float) -> None:
        """Give up the workers that have sent too much without completing a message."""
        connections = list(self._connections.values())
        cut = [(connection, connection.overruns(now_s)) for connection in self._resending]
        if sum(connection.watch.pending_bytes for connection in connections) > self._message_bytes:
            worst = max(connections, key=lambda connection: connection.watch.pending_bytes)
            cut.append((worst, worst.watch.cut_largest()))
        for connection, overruns in cut:
            for overrun in overruns:
                place = connection.place
                why = f"sent {overrun.size_bytes} bytes without completing a message; it is given up"
                self._lost(connection, WorkerDied(f"{place} {why}\n  {AFTERWARDS}", **vars(place)))

    def _drop(self, worker: int, poller: SocketPoller) -> dict[int, tuple[int, ...]]:
        connection = self._connections.pop(worker)
        self._resending = [each for each in self._resending if each is not connection]
        self._hosted.pop(worker, None)
        connection.close(poller)
        self._liveness.forget(worker)
        own, domain = self._groups.of(worker), self._pending.domain
        for mate in [each for each in self._connections if domain(each) == domain(worker)]:
            beyond = (
                group
                for group in self._groups.of(mate)
                if any(domain(each) != domain(worker) for each in self._groups.members(group))
            )
            own += [group for group in beyond if group not in own]
        members = {group: self._groups.members(group) for group in own}
        self._dissolve(own)
        self.lost.pop(worker, None)
        return members

    def _groups_of(self, worker: int) -> dict[int, tuple[int, ...]]:
        return {group: self._groups.members(group) for group in self._groups.of(worker)}

    def _dissolve(self, groups: Collection[int]) -> None:
        for group in groups:
            self._notify(self._groups.dissolve(group))
            self._relay.end(group)

    def _has(self, connection: WorkerConnection) -> bool:
        """Return whether a connection has not been dropped."""
        return self._connections.get(connection.place.worker) is connection

    def _connect(self, handle: WorkerHandle, ports: Ports, server_key: str, poller: SocketPoller) -> Future[Hello]:
        """Make the sockets to a worker, here rather than in a thread that Ctrl-C may interrupt: the end of a context
        would wait for a socket that it made and nobody has."""
        connection = WorkerConnection(self._context, handle, ports, self._keys, server_key, self._message_bytes)
        worker = connection.place.worker
        self._connections[worker] = connection
        if connection.link.keeps:
            self._resending.append(connection)
        if isinstance(handle, HostedWorker):
            self._hosted[worker] = handle
        connection.register(poller)
        return connection.hello

    def _patience_ms(self) -> int:
        """Return the poll timeout: until the next message is to be sent again, at most a tick."""
        due_s = min((connection.link.due_s for connection in self._resending), default=math.inf)
        if due_s == math.inf:
            return _TICK_MS
        wait_s = max(0.0, due_s - time.monotonic())
        return math.ceil(1000 * min(wait_s, _TICK_MS / 1000))

    def _send_posted(self) -> None:
        for _ in range(len(self._outbox)):  # others may go on to post
            worker, parts = self._outbox.popleft()
            if worker in self._connections:  # messages for a dropped worker are void
                self._connections[worker].link.send(parts)

    def _process_ready(self, connection: WorkerConnection, ready: Collection[Source], turn_s: float) -> None:
        """Process what has come from one worker, for a while."""
        try:
            if connection.reconnected(ready):
                self._liveness.beat(connection.place.worker, time.monotonic())
            for parts in connection.heartbeats(ready):
                self._process(connection, parts)
            for parts in connection.messages(ready, turn_s):
                self._process(connection, parts)
        except Restarted as error:
            self._lost(connection, WorkerDied(f"{connection.place}: {error}\n  {AFTERWARDS}", **vars(connection.place)))
        except WireError as error:
            self._pending.give_up(error)

    def _process_end(self, connection: WorkerConnection, ready: Collection[Source], poller: SocketPoller) -> None:
        """Process the end of a worker's process."""
        if connection.handle.descriptor in ready:
            poller.unregister(connection.handle.descriptor)
            if not self._stopping:
                self._lost(connection, connection.handle.death())

    def _process(self, connection: WorkerConnection, parts: Sequence[Any]) -> None:
        message: WorkerMessage
        message, frames = decode_worker_message(parts)
        worker = connection.place.worker
        match message:
            case Reply():
                size_bytes = sum([len(frame) for frame in frames])
                self.received_bytes[worker] = self.received_bytes.get(worker, 0) + size_bytes
                self.work.add(worker, message.messages)
                traffic = self._groups.traffic(worker, message.traffic) if message.traffic else ()
                clock_ns = connection.clock.offset_ns
                self._pending.reply(connection.place, message, frames, time.monotonic(), traffic, clock_ns)
            case Heartbeat():
                connection.heartbeat_seen = True
                connection.complete_hello()
                if connection.hello.done():
                    self._liveness.beat(worker, time.monotonic(), message.stalled_s, message.doing)
                    self.executed[worker] = message.executed
                    self.memory[worker] = WorkerMemory(message.used_bytes, message.peak_bytes, 0)
                if connection.place.host != LOCAL_HOST and connection.clock.beat():  # others have this machine's clock
                    connection.ask_clock()
            case ClockReading():
                now_ns = time.monotonic_ns()
                connection.clock.answer(asked_ns=message.asked_ns, read_ns=message.read_ns, now_ns=now_ns)
            case Left():
                if self._groups.may_leave(worker, message.group):
                    self._relay.end(message.group)
                elif self._groups.serves(message.group):
                    self._note_foreign(connection.place, message.group, time.monotonic())
                self._notify(self._groups.take(connection.place, message, frames))
            case Lookup() | Contribution():
                self._notify(self._groups.take(connection.place, message, frames))
            case RelayRequest():
                ends = [
                    RelayEnd(self._connections[end].place, rank, self._connections[end].handle.address, listener)
                    for end, rank, listener in self._groups.relayed(connection.place, message)
                    if end in self._connections
                ]
                if len(ends) == 2:
                    self._relay.open(message.group, *ends)
            case Hello():
                self._liveness.beat(worker, time.monotonic())
                connection.hello_message = message
                connection.complete_hello()

    def _note_foreign(self, place: WorkerLocation, group: int, now_s: float) -> None:
        """Log that a worker says to leave a group of others, which stays; once in a while."""
        self._foreign += 1
        if now_s >= self._next_foreign_s:
            _LOG.warning(
                "%s says that it leaves group %d, of which it is no member; ignored (such messages since the last "
                "line: %d); that worker is faulty, or somebody has taken it over",
                *(place, group, self._foreign),
            )
            self._foreign, self._next_foreign_s = 0, now_s + FOREIGN_LINE_S

    def _notify(self, notices: Sequence[GroupNotice]) -> None:
        messages = [
            (notice.worker, [encode(Envelope(0, False, (notice.instruction,))), *notice.frames]) for notice in notices
        ]
        for worker, parts in messages:
            connection = self._connections.get(worker)
            if connection is not None and not connection.answer(parts):
                place = connection.place
                why = f"asks for more than it takes: {self._message_bytes} bytes of answers wait; it is given up"
                self._lost(connection, WorkerDied(f"{place} {why}\n  {AFTERWARDS}", **vars(place)))

    # ---- when things go wrong

    def _hung(self, worker: int, why: str) -> WorkerHung:
        place = self._connections[worker].place
        return WorkerHung(
            f"{place} {why}; it is taken for hung\n  {AFTERWARDS}",
            worker=place.worker,
            host=place.host,
            device=place.device,
        )

    def _lost(self, connection: WorkerConnection, error: OneboxError) -> None:
        self._liveness.forget(connection.place.worker)
        fail(connection.hello, error)
        self._pending.lose(connection.place.worker, error)


class LoopCalls:
    """A queue of calls that other threads run in the loop's thread, because it alone may touch the sockets."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[SocketPoller], Any], Future[Any]]] = deque()

    def add(self, action: Callable[[SocketPoller], _T]) -> Future[_T]:
        """Add a call; the future holds its result or error."""
        done: Future[_T] = Future()
        self._waiting.append((action, done))
        return done

    def run(self, poller: SocketPoller) -> None:
        """Run all queued calls; called by the thread that owns the queue."""
        while self._waiting:
            action, done = self._waiting.popleft()
            try:
                done.set_result(action(poller))
            except Exception as error:
                done.set_exception(error)


def call_result(done: Future[_T], timeout_s: float) -> _T:
    """Wait for a call and return its result.

    Raises:
        PoolError: The call did not finish in time.
    """
    try:
        return done.result(timeout_s)
    except FutureTimeout:
        raise PoolError(f"the client's own thread did not answer within {timeout_s:.0f} s") from None


__all__ = ["ClientLoop", "WorkerReply"]
