"""The server that shares a pool with child processes, such as the ranks of ``torchrun``."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from onebox.errors import OneboxError, PoolError, UsageError, WireError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.devices import require_devices
from onebox.pool.launch.socket_folder import SocketFolder
from onebox.pool.pool import Pool
from onebox.pool.sharing.message_stream import MessageStream, close_in_forks
from onebox.pool.sharing.messages import ENVELOPES, ChildEnvelope, Claim, Moved, Welcome, failed
from onebox.pool.streams.message_log import SPAN
from onebox.wire import encode
from onebox.wire.protocol.codec import decode
from onebox.wire.protocol.eager import BoundMemory, CopyBuffers
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.instructions import Ask, Free
from onebox.wire.protocol.requests import FreeRange, ReadClock, Shutdown
from onebox.wire.protocol.responses import Reply

_CHILDREN = 256
"""Most children at a time."""

_JOIN_S = 5.0

_OTHERS_S = 10.0
"""Most seconds for which the groups of a process that has ended are kept, while others of them go on: they may read
late what it sent. One that waits for something else from it is interrupted then."""

_LOOK_S = 0.05
"""Interval of looking whether others go on."""

_AGAIN_S = 0.2
"""Interval of letting in a child when no file descriptor is left."""

_NOT_FORWARDED = {
    Claim,
    CopyBuffers,
    FormGroup,
    Rendezvous,
    Reduced,
    TicketCancelled,
    FreeRange,
    ReadClock,
    Shutdown,
}
"""Instructions that only this process sends to workers, or that are for itself."""

_UNHINDERED = {Free, LeaveGroup}
"""Instructions that wait for nothing, so that they may come to a device that is another child's by now."""

_LOG = logging.getLogger("onebox")


class PoolServer:
    """Shares a pool with the processes that this one starts, by a socket in a folder that only this user can enter.

    Each child uses workers side by side with others; what it has there is freed when it ends, and groups that it was in
    end with it. Collectives make a device one child's alone, as two processes' collectives on it could each wait for
    what is behind the other.

    Args:
        pool: The pool; the caller closes the server before it.
        synchronous: Whether children wait for every operator.
    """

    def __init__(self, pool: Pool, *, synchronous: bool = False) -> None:
        self.pool = pool
        self.synchronous = synchronous
        self.used: set[int] = set()
        """The devices to which children have sent something."""
        self.claims: dict[int, int] = {}
        """The devices that are one child's alone, with its number."""
        self.children: dict[int, _Child] = {}
        self.closed = False
        self._folder = SocketFolder()
        self.address = os.path.join(self._folder.path, "pool")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_forks(self._socket)
        try:
            self._socket.bind(self.address)
            self._socket.listen(_CHILDREN)
        except BaseException:
            self._socket.close()
            self._folder.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="onebox-pool-server", daemon=True)
        self._thread.start()
        pool.moved.append(self._tell_devices)

    def wait(self) -> None:
        """Wait for the end of all children."""
        while self.children:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End the connections to all children, and remove the socket. Idempotent."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait for further ones
        self._thread.join(_JOIN_S)
        children = list(self.children.values())
        for child in children:
            child.end()
        for child in children:
            child.join(_JOIN_S)
        self._socket.close()
        self._folder.close()

    def _tell_devices(self) -> None:
        """Let the children know of devices that are others after a recovery."""
        for child in list(self.children.values()):
            child.send(0, encode(Moved(self.pool.devices)))

    def _accept(self) -> None:
        while not self.closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self.closed:
                    _LOG.warning("a child process cannot be let in: %s", error)
                    time.sleep(_AGAIN_S)
                continue
            child = _Child(self, next(self.pool.child_numbers), connection)
            if len(self.children) < _CHILDREN:
                self.children[child.number] = child
                child.start()
            else:
                child.refuse()


class _Child(MessageStream):
    """The connection to one child process.

    Args:
        server: The server.
        number: Number of the child, from 1.
        connection: The socket.
    """

    def __init__(self, server: PoolServer, number: int, connection: socket.socket) -> None:
        super().__init__(connection, f"onebox-child-{number}")
        self._server = server
        self._pool = pool = server.pool
        self.number = number
        self._first = number * SPAN
        self._group = 0  # which is being formed
        self._forming: list[tuple[int, int]] = []  # worker and number of the message of each of its ranks, so far
        self._orderly = False
        welcome = Welcome(pool.devices, self._first, pool.round_trip_s, pool.plain_links, server.synchronous)
        self.send(0, encode(welcome))

    def refuse(self) -> None:
        """End the connection without having started."""
        error = PoolError(f"{_CHILDREN} processes share the devices; let some of them end, and start this one again")
        with contextlib.suppress(OSError):  # it has ended
            self.transmit(0, encode(failed(0, error)))
        self._connection.close()

    def received(self, worker: int, header: bytearray, frames: Sequence[Any]) -> bool:
        """Pass a message on, or do what it asks of this process; return whether another one may follow."""
        message: ChildEnvelope = decode(ENVELOPES, [header, *frames], "an envelope")
        try:
            require_devices([worker], len(self._pool))
            match message.instructions:
                case (Shutdown(),):
                    self._orderly = True
                case (Claim(held),):
                    self._claim(worker, held=held)
                    self.send(worker, encode(Reply(message.number)))
                case (FormGroup() as form,):
                    self._form(worker, message.number, form)
                case (Ask("memory"),) if not self._may_use(worker):  # other's collectives are not waited for
                    self.send(worker, encode(Reply(message.number, (self._pool.memory(worker),))))
                case _:
                    self._forward(worker, message, frames)
        except OneboxError as error:
            self.send(worker, encode(failed(message.number, error)))
        return not self._orderly

    def _may_use(self, worker: int) -> bool:
        return self._server.claims.get(worker, self.number) == self.number

    def _claim(self, worker: int, *, held: bool) -> None:
        if held and self._server.claims.setdefault(worker, self.number) != self.number:
            raise _of_another(worker)
        if not held and self._may_use(worker):
            self._server.claims.pop(worker, None)  # only this thread ends this child's claims

    def _forward(self, worker: int, message: ChildEnvelope, frames: Sequence[Any]) -> None:
        instructions: Any = message.instructions
        kinds = set(map(type, instructions))
        if kinds & _NOT_FORWARDED:
            raise UsageError("a child process sent to a worker what only the one that shares its devices may send")
        bounds = [each for each in instructions if isinstance(each, BoundMemory)]
        if any(not self._first <= each.first < each.end <= self._first + SPAN for each in bounds):
            raise UsageError("a child process may say something of the memory of its own buffers only")
        if not (self._may_use(worker) or kinds <= _UNHINDERED):
            raise _of_another(worker)
        self._server.used.add(worker)
        future = self._pool.post(worker, instructions, frames, answer=message.answer)
        if message.answer:
            future.add_done_callback(partial(self._replied, worker, message.number))

    def _replied(self, worker: int, number: int, future: Future[WorkerReply]) -> None:
        error = future.exception()
        if error is None:
            reply = future.result()
            try:
                about = Reply(number, reply.results, None, reply.times_ns, reply.used_bytes, (), reply.messages)
                self.send(worker, encode(about), reply.frames)
                return
            except WireError as too_long:
                error = too_long
        self.send(worker, encode(failed(number, error)))

    def _form(self, worker: int, number: int, form: FormGroup) -> None:
        """Form a group, which this process serves, once the messages for all its members have come, in their order."""
        if form.backend == "client" or form.aside:
            raise UsageError("a child process forms groups for transfers between workers only")
        if form.rank == 0 and self._first <= form.group < self._first + SPAN:
            self._forming, self._group = [], form.group
        if form.group != self._group or form.rank != len(self._forming) or form.rank >= len(self._pool):
            raise UsageError(f"rank {form.rank} of group {form.group} is not the next one of a group of this process")
        self._forming.append((worker, number))
        if len(self._forming) == form.size:
            members, self._forming = self._forming, []
            futures = self._pool.begin_group(
                [worker for worker, _ in members], "workers", number=form.group, scripts=True
            )
            for member, future in zip(members, futures, strict=True):
                future.add_done_callback(partial(self._replied, *member))

    def ended(self, error: WireError | None) -> None:
        """Free what the child has on workers, and end the groups that it was in.

        Where it has ended by itself, what it has sent is executed before, and the others of its groups have a moment to
        read what it sent to them.
        """
        if error is not None:
            _LOG.warning("a child process sent what is no request, and is given up: %s", error)
        groups: dict[int, dict[int, tuple[int, ...]]] = {}
        for worker in [worker for worker, owner in list(self._server.claims.items()) if owner == self.number]:
            del self._server.claims[worker]
            with contextlib.suppress(OneboxError):
                groups[worker] = self._pool.groups_of(worker)  # those of a process that takes its place are others
                if self._orderly:
                    wait([self._pool.post(worker, [], answer=True)])
        others = {member for own in groups.values() for members in own.values() for member in members} - groups.keys()
        if self._orderly and others:
            self.finish()  # the child may end: it has nothing to wait for
            self._wait_for(others)
        for own in groups.values():
            with contextlib.suppress(OneboxError):
                self._pool.end_groups(own)
        for worker in self._pool.present:
            with contextlib.suppress(OneboxError):
                self._pool.post(worker, [FreeRange(self._first, self._first + SPAN)])
        self._server.children.pop(self.number, None)

    def _wait_for(self, workers: Collection[int]) -> None:
        """Wait a while until the other members of groups have ended, too, and all that they have sent is executed."""
        end_s = time.monotonic() + _OTHERS_S
        while not self._server.closed and workers & self._server.claims.keys() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        with contextlib.suppress(OneboxError):
            wait([self._pool.post(each, [], answer=True) for each in workers], max(0.0, end_s - time.monotonic()))


def _of_another(worker: int) -> UsageError:
    return UsageError(
        f"device {worker} is used by the collectives of another process: let each rank have a device of its own, as by "
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"
    )
