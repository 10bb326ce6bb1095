"""The pool of the parent process, in a child: the parent forwards messages to the workers."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, Literal

import msgspec

from onebox.cost import PoolProfile
from onebox.errors import OneboxError, PoolError, UsageError, WireError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.errors import fail, raise_first
from onebox.pool.pool import Pool
from onebox.pool.sharing.message_stream import MessageStream
from onebox.pool.sharing.messages import (
    Attached,
    Claim,
    Detach,
    Failed,
    Form,
    Leave,
    Memory,
    Post,
    Request,
    decode_response,
    encode_message,
    to_error,
)
from onebox.portable import SYSTEM
from onebox.wire import check_frames
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Instruction
from onebox.wire.protocol.responses import WorkerMemory

ADDRESS = "ONEBOX_PARENT"
"""Environment variable with the address of the parent's server."""

UNSHARED = "unshared"
"""Its value where the parent has devices, and this system no sockets to share them by."""

_REPLY_S = 60.0
"""Bound of a wait for the parent itself."""

_JOIN_S = 10.0

_PARENT_ENDED = "the process that shares its devices with this one has ended"

_encoder = msgspec.msgpack.Encoder()


def parent_address() -> str:
    """Return the address of the server of a parent process that shares its pool; empty where there is none."""
    return os.environ.get(ADDRESS, "")


class _ParentConnection:
    """The connection to the parent: futures of requests, and a thread for each direction.

    It has the part of the interface of :class:`~onebox.pool.client.loop.ClientLoop` that a child's pool uses.

    Args:
        address: Address of the parent's server.

    Raises:
        PoolError: There is no such server.
    """

    def __init__(self, address: str) -> None:
        if address == UNSHARED:
            raise PoolError(
                f"the process that started this one has the devices, and cannot share them on {SYSTEM}: let the script "
                "use them in one process; with torchrun and the like, start onebox run on a machine with Linux"
            )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            raise PoolError(
                f"the process that shares its devices with this one cannot be reached ({error.strerror} at {address}); "
                f"if it has ended, start the script anew by onebox run"
            ) from None
        self._stream = MessageStream(connection)
        self._requests: SimpleQueue[tuple[Request, Sequence[Any]] | None] = SimpleQueue()
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._stopping = False
        self.broken: OneboxError | None = None
        """The error for which nothing can be posted any more."""
        self.attached: Future[Attached] = Future()
        self.sent_bytes: dict[int, int] = {}
        self.received_bytes: dict[int, int] = {}
        self.lost: dict[int, OneboxError] = {}
        self.missing: dict[int, OneboxError] = {}
        self._reader = threading.Thread(target=self._read, name="onebox-parent-replies", daemon=True)
        self._writer = threading.Thread(target=self._write, name="onebox-parent", daemon=True)
        self._reader.start()
        self._writer.start()

    def post(
        self,
        worker: int,
        instructions: Sequence[Instruction],
        frames: Sequence[Any] = (),
        *,
        answer: bool = False,
    ) -> Future[WorkerReply]:
        """Send instructions to a worker; see :meth:`~onebox.pool.client.loop.ClientLoop.post`."""
        check_frames(frames)
        listed = tuple(instructions)
        frees = bool(listed) and all(isinstance(each, Free) for each in listed)
        try:
            encoded = msgspec.Raw(_encoder.encode(listed))
        except (OverflowError, UnicodeEncodeError) as error:
            raise WireError(f"a message that cannot be encoded: {error}") from None
        self.sent_bytes[worker] = self.sent_bytes.get(worker, 0) + sum(len(frame) for frame in frames)
        future: Future[WorkerReply] = self.ask(
            lambda number: Post(number, worker, answer, frees, encoded), frames, answer=answer
        )
        future.add_done_callback(functools.partial(self._count, worker))
        if not answer:
            future.set_result(WorkerReply((), (), ()))
        return future

    def ask(self, request: Any, frames: Sequence[Any] = (), *, answer: bool = True) -> Future[Any]:
        """Send a request, made for its number; return the future of its result."""
        future: Future[Any] = Future()
        with self._lock:
            if self.broken is not None:
                raise self.broken.with_traceback(None)
            number = next(self._numbers)
            if answer:
                self._futures[number] = future
            self._requests.put((request(number), frames))
        return future

    def stop(self, *last: Instruction) -> None:
        """Send what is posted, wait a while until the parent has freed what this process has on workers, and end the
        connection. Idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self.broken = self.broken or PoolError("the pool is closed; open another with onebox.open()")
            self._requests.put((Detach(), ()))
            self._requests.put(None)
        self._writer.join(_JOIN_S)
        self._reader.join(_JOIN_S)  # the parent ends the connection
        self._stream.end()
        self._reader.join(_JOIN_S)
        self._give_up(self.broken)
        if not (self._reader.is_alive() or self._writer.is_alive()):
            self._stream.close()

    # ---- the threads

    def _write(self) -> None:
        while (outgoing := self._requests.get()) is not None:
            request, frames = outgoing
            try:
                self._stream.send(encode_message(request), frames)
            except OSError as error:  # this thread or the reader sees first that the parent's end is closed
                ended = PoolError(_PARENT_ENDED)
                ended.__cause__ = error
                self._give_up(ended)
                return
            except WireError as error:
                self._give_up(error)
                return

    def _read(self) -> None:
        try:
            while (found := self._stream.receive()) is not None:
                self._take(*found)
            self._give_up(PoolError(_PARENT_ENDED))
        except (msgspec.DecodeError, WireError) as error:
            self._give_up(WireError(f"the process that shares its devices sent what is no response: {error}"))

    def _count(self, worker: int, future: Future[WorkerReply]) -> None:
        """Count the bytes of tensors in a reply."""
        if not future.cancelled() and future.exception() is None:
            size_bytes = sum(len(frame) for frame in future.result().frames)
            self.received_bytes[worker] = self.received_bytes.get(worker, 0) + size_bytes

    def _take(self, header: bytearray, frames: Sequence[Any]) -> None:
        response = decode_response(header)
        if isinstance(response, Attached):
            self.attached.set_result(response)
            return
        with self._lock:
            future = self._futures.pop(response.number, None)
        if future is None:
            if isinstance(response, Failed):  # of a request without a reply
                self._give_up(to_error(response))
        elif isinstance(response, Failed):
            fail(future, to_error(response))
        elif response.group:
            future.set_result(response.group)
        else:
            about = response.times_ns, response.used_bytes, response.traffic, response.clock_ns
            future.set_result(WorkerReply(response.results, frames, *about))

    def _give_up(self, error: OneboxError) -> None:
        with self._lock:
            self.broken = self.broken or error
            futures, self._futures = list(self._futures.values()), {}
        fail(self.attached, error)
        for future in futures:
            fail(future, error)


class AttachedPool(Pool):
    """The pool of the parent process, which forwards what this one sends to workers.

    Its devices are measured, recovered and given back by the parent. Closing it frees what this process has on them.

    Args:
        address: Address of the parent's server.

    Raises:
        PoolError: The parent cannot be reached.
    """

    attached = True

    def __init__(self, address: str) -> None:
        self._parent = _ParentConnection(address)
        try:
            attached: Attached = self._wait(self._parent.attached)
        except BaseException:
            self._parent.stop()
            raise
        connection: Any = self._parent
        super().__init__(
            (), (), connection, attached.devices, plain_links=attached.plain_links, first_number=attached.first
        )
        self.round_trip_s = attached.round_trip_s
        self.synchronous = attached.synchronous
        """True if every operator is waited for."""
        Finalize(None, self.close, exitpriority=0)  # of a process of multiprocessing, which has no atexit

    def form_group(
        self, workers: Sequence[int], via: Literal["workers", "client"], *, aside: bool = False, number: int = 0
    ) -> int:
        """Form a group of workers; see :meth:`Pool.form_group`.

        Raises:
            UsageError: It is not for transfers between workers; or see there.
            OneboxError: The group could not be formed.
        """
        if via != "workers" or aside:
            raise UsageError("a child process forms groups for transfers between workers only")
        future = self._ask(lambda number: Form(number, tuple(workers)))
        (group,) = raise_first([future])
        return int(group)

    def leave_group(self, group: int, workers: Sequence[int]) -> None:
        """Dissolve a group."""
        self._ask(lambda number: Leave(number, group, tuple(workers)))

    def claim(self, worker: int) -> None:
        """Reserve a device for the collectives of this process; see :meth:`Pool.claim`."""
        self._wait(self._ask(lambda number: Claim(number, worker, True)))

    def release(self, worker: int) -> None:
        """End a claim of a device."""
        self._ask(lambda number: Claim(number, worker, False))

    def memory(self, worker: int) -> WorkerMemory:
        """Return the memory of a device; where it is used by collectives of another process, as of half a second
        ago."""
        answer: WorkerReply = self._wait(self._ask(lambda number: Memory(number, worker)))
        (memory,) = (result for result in answer.results if isinstance(result, WorkerMemory))
        return memory

    def profile(self, *, fresh: bool = False, cache: bool = True, probe: Collection[int] = ()) -> PoolProfile:
        """Raise an error: the devices are the parent's.

        Raises:
            UsageError: Always.
        """
        raise UsageError("the devices of a parent process cannot be measured here; open a pool with onebox.open()")

    def recover_workers(self, *, seen: int | None = None, patience_s: float = 0.0) -> Any:
        """Raise an error: the devices are the parent's.

        Raises:
            UsageError: Always.
        """
        raise UsageError("the parent process alone recovers its devices")

    def _ask(self, request: Any) -> Future[Any]:
        self.require_owner()
        return self._parent.ask(request)

    def _wait(self, future: Future[Any]) -> Any:
        try:
            return future.result(_REPLY_S)
        except FutureTimeout:
            raise PoolError(f"the process that shares its devices did not answer in {_REPLY_S:.0f} s") from None
