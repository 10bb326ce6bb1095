"""The server that shares a pool with child processes, such as the ranks of ``torchrun``."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec

from onebox.errors import OneboxError, PoolError, UsageError, WireError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.launch.socket_folder import SocketFolder
from onebox.pool.pool import Pool
from onebox.pool.sharing.message_stream import MessageStream, close_in_forks
from onebox.pool.sharing.messages import (
    SPAN,
    Attached,
    Claim,
    Detach,
    Form,
    Leave,
    Memory,
    Post,
    Replied,
    Request,
    Response,
    decode_request,
    encode_message,
    failed,
)
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.requests import FreeRange

_CHILDREN = 256
"""Most children at a time."""

_JOIN_S = 5.0

_OTHERS_S = 10.0
"""Most seconds for which the groups of a process that has ended are kept, while others of them go on: they may read
late what it sent. One that waits for something else from it is interrupted then."""

_LOOK_S = 0.05
"""Interval of looking whether others go on."""

_SLICE_S = 0.2
"""Ctrl-C ends a wait for children within this time."""

_LOG = logging.getLogger("onebox")

_Outgoing = tuple[Response, Sequence[Any]]


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
        self._folder = SocketFolder()
        self.address = os.path.join(self._folder.path, "pool")
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._children: dict[int, _Child] = {}
        self._claims: dict[int, int] = {}  # from device to child
        self._closed = False
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

    def wait(self) -> None:
        """Wait for the end of all children."""
        while True:
            with self._lock:
                children = list(self._children.values())
            if not children:
                return
            children[0].join(_SLICE_S)

    def close(self) -> None:
        """End the connections to all children, and remove the socket. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            children = list(self._children.values())
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait for further ones
        for child in children:
            child.end()
        self._thread.join(_JOIN_S)
        for child in children:
            child.join(_JOIN_S)
        self._socket.close()
        self._folder.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                _LOG.warning("a child process cannot be let in: %s", error)  # no file descriptor is left
                time.sleep(_SLICE_S)
                continue
            stream = MessageStream(connection)
            with self._lock:
                full = len(self._children) >= _CHILDREN
                if not full and not self._closed:
                    number = next(self._numbers)
                    self._children[number] = child = _Child(self, number, stream)
                    child.start()
                    continue
            if full:
                _refuse(stream)
            stream.close()

    # ---- called by children's threads

    def claim(self, child: int, worker: int) -> None:
        """Reserve a device for a child.

        Raises:
            UsageError: It is another one's, or is not there.
        """
        with self._lock:
            self._require(child, worker)
            self._claims[worker] = child

    def release(self, child: int, worker: int) -> None:
        """End a child's claim of a device."""
        with self._lock:
            if self._claims.get(worker) == child:
                del self._claims[worker]

    def require(self, child: int, worker: int) -> None:
        """Require that a child may use a device.

        Raises:
            UsageError: It is another one's, or is not there.
        """
        with self._lock:
            self._require(child, worker)

    def is_others(self, child: int, worker: int) -> bool:
        """Return whether a device has been claimed by another child.

        Raises:
            UsageError: It is not there.
        """
        self.require_devices([worker])
        with self._lock:
            return self._claims.get(worker, child) != child

    def require_devices(self, workers: Sequence[int]) -> None:
        """Require that devices are there.

        Raises:
            UsageError: One is not.
        """
        for worker in workers:
            if not 0 <= worker < len(self.pool):
                raise UsageError(f"there is no device {worker}; the pool has 0 to {len(self.pool) - 1}")

    def _require(self, child: int, worker: int) -> None:
        self.require_devices([worker])
        if self._claims.get(worker, child) != child:
            raise UsageError(
                f"device {worker} is used by the collectives of another process: let each rank have a device of its "
                "own, as by torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"
            )

    def release_all(self, child: int) -> list[int]:
        """End all claims of a child; return the devices."""
        with self._lock:
            found = [worker for worker, owner in self._claims.items() if owner == child]
            for worker in found:
                del self._claims[worker]
            return found

    def is_claimed(self, workers: Collection[int]) -> bool:
        """Return whether a child has claimed one of some devices, while this server is open."""
        with self._lock:
            return not self._closed and not self._claims.keys().isdisjoint(workers)

    def forget(self, child: int) -> None:
        """Remove a child of which nothing is left."""
        with self._lock:
            self._children.pop(child, None)


def _refuse(stream: MessageStream) -> None:
    error = PoolError(f"{_CHILDREN} processes share the devices; let some of them end, and start this one again")
    with contextlib.suppress(OSError):  # it has ended
        stream.send(encode_message(failed(0, error)))


class _Child:
    """The connection to one child process, with a thread for each direction.

    Args:
        server: The server.
        number: Number of the child, from 1.
        stream: The connection.
    """

    def __init__(self, server: PoolServer, number: int, stream: MessageStream) -> None:
        self._server = server
        self._pool = server.pool
        self._number = number
        self._stream = stream
        self._outgoing: SimpleQueue[_Outgoing | None] = SimpleQueue()
        self._used: set[int] = set()
        name = f"onebox-child-{number}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}-replies", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        pool = self._pool
        first = self._number * SPAN
        self._outgoing.put(
            (Attached(pool.devices, first, pool.round_trip_s, pool.plain_links, self._server.synchronous), ())
        )
        self._writer.start()
        self._reader.start()

    def end(self) -> None:
        """End the connection."""
        self._stream.end()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the threads."""
        self._reader.join(timeout_s)
        self._writer.join(timeout_s)

    # ---- the reader

    def _read(self) -> None:
        orderly = False
        try:
            while not orderly and (found := self._stream.receive()) is not None:
                header, frames = found
                request = decode_request(header)
                orderly = isinstance(request, Detach)
                self._serve(request, frames)
        except (msgspec.DecodeError, WireError) as error:
            _LOG.warning("a child process sent what is no request, and is given up: %s", error)
        finally:
            self._clean_up(orderly)
            self._outgoing.put(None)

    def _serve(self, request: Request, frames: Sequence[Any]) -> None:
        if isinstance(request, Detach):
            return
        try:
            match request:
                case Post():
                    if not request.frees:  # those wait for nothing
                        self._server.require(self._number, request.worker)
                    self._used.add(request.worker)
                    self._server.used.add(request.worker)
                    future = self._pool.post(request.worker, request.instructions, frames, answer=request.answer)
                    if request.answer:
                        future.add_done_callback(partial(self._replied, request.number))
                case Form():
                    self._form(request)
                case Leave():
                    self._server.require_devices(request.workers)
                    self._pool.leave_group(request.group, request.workers)
                    self._outgoing.put((Replied(request.number), ()))
                case Claim():
                    act = self._server.claim if request.held else self._server.release
                    act(self._number, request.worker)
                    self._outgoing.put((Replied(request.number), ()))
                case Memory():
                    if self._server.is_others(self._number, request.worker):
                        heard = self._pool.memory(request.worker)
                        self._outgoing.put((Replied(request.number, (heard,)), ()))
                    else:
                        future = self._pool.post(request.worker, [Ask("memory")], answer=True)
                        future.add_done_callback(partial(self._replied, request.number))
        except OneboxError as error:
            self._outgoing.put((failed(request.number, error), ()))

    def _replied(self, number: int, future: Future[WorkerReply]) -> None:
        error = future.exception()
        if error is not None:
            self._outgoing.put((failed(number, error), ()))
            return
        reply = future.result()
        done = Replied(number, reply.results, reply.times_ns, reply.used_bytes, reply.traffic, reply.clock_ns)
        self._outgoing.put((done, reply.frames))

    def _form(self, request: Form) -> None:
        """Form a group, and reply when all members have."""
        self._server.require_devices(request.workers)
        group = self._pool.new_number()
        try:
            futures = self._pool.begin_group(request.workers, "workers", number=group)
        except OneboxError:
            with contextlib.suppress(OneboxError):
                self._pool.leave_group(group, request.workers)
            raise
        left = itertools.count(1)

        def joined(_: Future[WorkerReply]) -> None:
            if next(left) < len(futures):
                return
            error = next((error for future in futures if (error := future.exception()) is not None), None)
            if error is None:
                self._outgoing.put((Replied(request.number, group=group), ()))
                return
            with contextlib.suppress(OneboxError):
                self._pool.leave_group(group, request.workers)
            self._outgoing.put((failed(request.number, error), ()))

        for future in futures:
            future.add_done_callback(joined)

    def _clean_up(self, orderly: bool) -> None:
        """Free what the child has on workers, and end the groups that it was in.

        Args:
            orderly: Whether it has ended by itself; then what it has sent is executed before, and the others of its
                groups have a moment to read what it sent to them.
        """
        groups: dict[int, dict[int, tuple[int, ...]]] = {}
        for worker in self._server.release_all(self._number):
            with contextlib.suppress(OneboxError):
                groups[worker] = self._pool.groups_of(worker)  # those of a process that takes its place are others
                if orderly:
                    wait([self._pool.post(worker, [], answer=True)])
        others = {member for own in groups.values() for members in own.values() for member in members} - groups.keys()
        if orderly and others:
            self._outgoing.put(None)  # the child may end: it has nothing to wait for
            self._wait_for(others)
        for own in groups.values():
            with contextlib.suppress(OneboxError):
                self._pool.end_groups(own)
        first = self._number * SPAN
        for worker in self._used:
            with contextlib.suppress(OneboxError):
                self._pool.post(worker, [FreeRange(first, first + SPAN)])
        self._server.forget(self._number)

    def _wait_for(self, workers: Collection[int]) -> None:
        """Wait a while until the other members of groups have ended, too, and all that they have sent is executed."""
        end_s = time.monotonic() + _OTHERS_S
        while self._server.is_claimed(workers) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        with contextlib.suppress(OneboxError):
            wait([self._pool.post(each, [], answer=True) for each in workers], max(0.0, end_s - time.monotonic()))

    # ---- the writer

    def _write(self) -> None:
        while (outgoing := self._outgoing.get()) is not None:
            response, frames = outgoing
            try:
                self._stream.send(encode_message(response), frames)
            except OSError:  # the child has ended, which the reader finds, too
                break
            except WireError as error:
                _LOG.warning("a reply for a child process cannot be sent: %s", error)
                break
        self._stream.end()
        self._reader.join()
        self._stream.close()
