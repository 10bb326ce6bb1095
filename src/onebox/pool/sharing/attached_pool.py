"""The pool of the parent process, in a child: the parent forwards messages to the workers."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.util import Finalize
from typing import Any

from onebox.errors import OneboxError, PoolError, WireError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.client.pending import PendingReplies
from onebox.pool.client.work_times import WorkTimes
from onebox.pool.devices import DeviceInfo, require_devices
from onebox.pool.errors import fail
from onebox.pool.pool import Pool
from onebox.pool.sharing.message_stream import MessageStream
from onebox.pool.sharing.messages import REPLIES, WELCOMES, Claim, Failed, Moved, Welcome, to_error
from onebox.portable import SYSTEM
from onebox.wire import check_frames, encode
from onebox.wire.protocol.codec import decode
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.requests import Envelope
from onebox.wire.protocol.responses import Reply, WorkerMemory

ADDRESS = "ONEBOX_PARENT"
"""Environment variable with the address of the parent's server."""

UNSHARED = "unshared"
"""Its value where the parent has devices, and this system no sockets to share them by."""

_WELCOME_S = 60.0
_REPLY_S = 60.0
"""How long the parent may take to answer a claim, or a question about memory."""

_JOIN_S = 10.0


def parent_address() -> str:
    """Return the address of the server of a parent process that shares its pool; empty where there is none."""
    return os.environ.get(ADDRESS, "")


class ParentConnection(MessageStream):
    """The connection to the parent, in place of a :class:`~onebox.pool.client.loop.ClientLoop`."""

    def __init__(self, address: str) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        super().__init__(connection, "onebox-parent")
        try:
            connection.connect(address)
            connection.settimeout(_WELCOME_S)
            welcome: Welcome | Failed = decode(WELCOMES, [self.receive()[1]], "a welcome")
            if isinstance(welcome, Failed):
                raise to_error(welcome)
            connection.settimeout(None)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            raise PoolError(
                f"the process that shares its devices with this one cannot be reached ({error} at {address}); if it "
                "has ended, start the script anew by onebox run"
            ) from None
        self.welcome = welcome
        self.moved: Callable[[tuple[DeviceInfo, ...]], object] | None = None
        """Called with the devices after a recovery."""
        self.work = WorkTimes()
        self._pending = PendingReplies()
        self._numbers = itertools.count(1)
        self.start()

    @property
    def broken(self) -> OneboxError | None:
        """The error for which nothing can be posted any more."""
        return self._pending.broken

    def form(self, group: int, workers: Sequence[int]) -> None:
        """Leave a group to the parent, which serves it."""

    def post(
        self, worker: int, instructions: Sequence[Any], frames: Sequence[Any] = (), *, answer: bool = False
    ) -> Future[WorkerReply]:
        """Send instructions to a worker; see :meth:`~onebox.pool.client.loop.ClientLoop.post`."""
        require_devices([worker], len(self.welcome.devices))
        check_frames(frames)
        number = next(self._numbers)
        header = encode(Envelope(number, answer, tuple(instructions)))
        future = self._pending.promise(worker, number, answer=answer)
        self.send(worker, header, frames)
        return future

    def stop(self, *last: Any) -> None:
        """Send what is posted and the end, wait a while until the parent has freed what this process has on workers,
        and end the connection. Idempotent."""
        self._pending.close(self.broken or PoolError("the pool is closed; open another with onebox.open()"))
        self.send(0, encode(Envelope(0, False, last)))
        self._reader.join(_JOIN_S)  # the parent ends the connection
        self.end()
        self.join(_JOIN_S)

    def received(self, worker: int, header: bytearray, frames: Sequence[Any]) -> bool:
        """Process a worker's reply, or an error in its place."""
        message: Reply | Failed | Moved = decode(REPLIES, [header, *frames], "a reply")
        if isinstance(message, Moved):
            if self.moved is not None:
                self.moved(message.devices)
            return True
        future = self._pending.take(worker, message.number)
        if isinstance(message, Failed):
            error = to_error(message)
            if future is None:  # of a message without a reply
                self._pending.give_up(error)
            else:
                fail(future, error)
        elif future is not None:
            self.work.add(worker, message.messages)
            times_ns, used_bytes = message.times_ns, message.used_bytes
            future.set_result(WorkerReply(message.results, frames, times_ns, used_bytes, messages=message.messages))
        return True

    def ended(self, error: WireError | None) -> None:
        """Fail what is still waited for."""
        ended = PoolError("the process that shares its devices with this one has ended")
        self._pending.give_up(error or ended)


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
        if address == UNSHARED:
            raise PoolError(
                f"the process that started this one has the devices, and cannot share them on {SYSTEM}: let the script "
                "use them in one process; with torchrun and the like, start onebox run on a machine with Linux"
            )
        parent: Any = ParentConnection(address)
        about: Welcome = parent.welcome
        super().__init__((), (), parent, about.devices, plain_links=about.plain_links, first_number=about.first)
        parent.moved = self._move
        self.round_trip_s = about.round_trip_s
        self.synchronous = about.synchronous
        """True if every operator is waited for."""
        Finalize(None, self.close, exitpriority=0)  # of a process of multiprocessing, which has no atexit

    def _move(self, devices: tuple[DeviceInfo, ...]) -> None:
        self.devices = devices

    def claim(self, worker: int) -> None:
        """Reserve a device for the collectives of this process; see :meth:`Pool.claim`."""
        self._answer(self._claim(worker, held=True))

    def release(self, worker: int) -> None:
        """End a claim of a device."""
        self._claim(worker, held=False)

    def _claim(self, worker: int, *, held: bool) -> Future[WorkerReply]:
        instructions: Any = [Claim(held)]
        return self.post(worker, instructions, answer=True)

    def memory(self, worker: int) -> WorkerMemory:
        """Return the memory of a device; where it is used by collectives of another process, as of half a second
        ago."""
        (memory,) = self._answer(self.post(worker, [Ask("memory")], answer=True)).results
        assert isinstance(memory, WorkerMemory)
        return memory

    @staticmethod
    def _answer(future: Future[WorkerReply]) -> WorkerReply:
        try:
            return future.result(_REPLY_S)
        except TimeoutError:
            raise PoolError(
                f"the process that shares its devices with this one has not answered for {_REPLY_S:.0f} s"
            ) from None
