"""Shared-memory receiver: the messages that a rank reads; for their layout see :mod:`onebox.worker.comm.shm.layout`."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.collectives import MessageInfo
from onebox.worker.comm.shm.layout import (
    CELL_BYTES,
    CLOSED,
    DIMENSIONS,
    FIRST_CELLS,
    HEADER,
    LEFT,
    NEXT_RETURNED,
    NUMBER,
    RETURNED,
    SENT,
    TYPE_NAMES,
    ShmMessage,
    lane_start,
)
from onebox.worker.comm.shm.segment import SLICE_S, SharedMemory
from onebox.worker.memory.shared import LENT_STORAGES

_LENT_FROM_BYTES = 64 << 10
"""Size from which received tensors stay in the writer's memory: copying smaller ones costs less than tracking them."""

_SPIN_S = 100e-6
"""Longest busy wait for a message: to fall asleep and to be woken takes 30 µs on a virtual machine."""

_SPUN_S = 200e-6
"""A wait that took less is expected to be as short the next time, and begins with a busy wait."""

_MOST_UNREAD = 1 << 18
"""Most messages of a rank that the reader keeps: more than fit into what a rank may share."""

_MOST_ELEMENTS = 1 << 58
"""Most elements of a tensor, whose bytes can then be numbered."""

_MOST_AHEAD_NS = 86_400 * 10**9
"""Longest time from now until a message may be available; an emulated device is ahead of the clock."""

_LENT_SHARE = 4
"""Inverse of the largest fraction of the writer's span that is lent at a time; further tensors are copied."""


class _Channel:
    """Received messages of one channel, by order."""

    __slots__ = ("asked", "came", "forgotten", "messages")

    def __init__(self) -> None:
        self.asked = 0
        self.came = 0
        self.messages: dict[int, ShmMessage] = {}
        self.forgotten: set[int] = set()


Watch = Callable[[int, float], None]
"""Called with an awaited rank and the seconds since the beginning of the wait; raises :class:`RankLost` if it cannot
send."""


class ShmReceiver:
    """Receiver of the messages from one rank to another. Thread-safe.

    The writer, and every other rank of the group, can write its memory at any time. So a number is read there once, and
    checked before use; and only tensors of floating-point elements are used in place, by operators that none of them
    leads to an address (see :mod:`onebox.worker.sandbox.argument_checks`).

    Args:
        memory: The writer's memory.
        writer: Its rank.
        reader: The reader's rank.
        watch: Called regularly during a wait.
    """

    def __init__(self, memory: SharedMemory, writer: int, reader: int, watch: Watch) -> None:
        self.memory: SharedMemory | None = memory
        self.writer = writer
        self._watch = watch
        start = lane_start(reader)
        self._word = start // 8
        self._seen = 0
        self._returned = 0
        self._cell = start + FIRST_CELLS
        self._tail = self._cell + CELL_BYTES
        self._lent_bytes = 0
        self._over: deque[ShmMessage] = deque()  # lent messages that are released; filled from any thread
        self._dropped: deque[tuple[int, int]] = deque()  # requests that nobody waits for; filled from any thread
        self._spins = False
        self._lock = threading.Lock()  # not taken by finalizers, which may run in the thread that has it
        self._channels: dict[int, _Channel] = defaultdict(_Channel)

    def expect(self, channel: int) -> PendingReceive:
        """Return the wait for the next message of a channel that has not been requested yet."""
        with self._lock:
            self._settle()
            found = self._channels[channel]
            found.asked += 1
            return PendingReceive(self, channel, found.asked)

    def find(self, channel: int, order: int) -> ShmMessage | None:
        """Return a message if it has arrived."""
        with self._lock:
            messages = self._channels[channel].messages
            if order not in messages:
                self._settle()
                self._look()
            return messages.get(order)

    def wait(self, channel: int, order: int) -> ShmMessage:
        """Wait for a message.

        Raises:
            RankLost: It will not arrive.
        """
        memory = self._open()
        begin_s = time.monotonic()
        next_s = begin_s + SLICE_S
        if self._spins:
            self._spin(memory, begin_s + _SPIN_S)
        seen = self._seen  # as another thread may look, too, before this one is asleep
        while (message := self.find(channel, order)) is None:
            left = memory.words[LEFT]
            more = memory.words[self._word + SENT] > seen
            if left and not more:
                raise RankLost(f"rank {self.writer} has left the group")
            if (not more and memory.sleep(self._word + SENT, seen)) or time.monotonic() > next_s:
                next_s = time.monotonic() + SLICE_S  # also while messages of other channels arrive
                try:
                    self._watch(self.writer, begin_s)
                except RankLost:
                    if self.find(channel, order) is None:  # messages sent before the writer ended are valid
                        raise
            seen = self._seen
        self._spins = time.monotonic() < begin_s + _SPUN_S
        return message

    def _spin(self, memory: SharedMemory, end_s: float) -> None:
        """Wait until something has come, at most until a time, in a busy wait that lets other processes run."""
        words, word = memory.words, self._word + SENT
        while words[word] == self._seen and time.monotonic() < end_s:
            os.sched_yield()

    def part(self, message: ShmMessage) -> Tensor:
        """Return the elements of a message, flat, in the writer's memory; valid until it is returned."""
        if message.offset < 0:
            raise WireError(f"rank {self.writer} does not compute: its {message.spec} has no elements")
        return self._open().elements(message.spec, message.offset)

    def copy(self, message: ShmMessage) -> Tensor:
        """Return a tensor with the elements of a message."""
        spec = message.spec
        made = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        if message.offset < 0:
            raise WireError(f"rank {self.writer} does not compute: its {spec} has no elements")
        ctypes.memmove(made.data_ptr(), self._open().address + message.offset, made.nbytes)
        return made

    def lend(self, channel: int, order: int, message: ShmMessage) -> Tensor | None:
        """Return the elements of a message in place, for the reader alone, returned when the tensor is freed.

        No honest process reads or writes them until then, and they outlive the writer.

        Returns:
            The tensor; ``None`` if a copy is cheaper, or too much is lent.
        """
        memory, size_bytes, dtype = self._open(), message.spec.size_bytes, DTYPES[message.spec.dtype]
        room_bytes = len(memory.map) // _LENT_SHARE - self._lent_bytes
        numbers = dtype.is_floating_point or dtype.is_complex  # others may be indices
        if message.offset < 0 or not numbers or not _LENT_FROM_BYTES <= size_bytes <= room_bytes:
            return None
        view = (ctypes.c_char * size_bytes).from_buffer(memory.map, message.offset)
        weakref.finalize(view, _end, memory, self._over, message).atexit = False
        with self._lock:
            self._lent_bytes += size_bytes
            self._forget(channel, order)
        lent = torch.frombuffer(view, dtype=dtype).view(message.spec.shape)
        storage = lent.untyped_storage()._cdata
        LENT_STORAGES.add(storage)
        weakref.finalize(view, LENT_STORAGES.discard, storage).atexit = False
        return lent

    def give_back(self, channel: int, order: int) -> None:
        """Return the memory of a message to the writer; a message that has not arrived yet is returned on arrival."""
        with self._lock:
            self._give_back(channel, order)

    def drop(self, channel: int, order: int) -> None:
        """Do the same for a finalizer, which runs in any thread and in the middle of any method: now, or when the
        next message is requested."""
        self._dropped.append((channel, order))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Return lent memory that has been released, and messages of dropped requests."""
        while self._over:
            message = self._over.popleft()
            self._lent_bytes -= message.spec.size_bytes
            if self.memory is not None:
                self._return(self.memory, message.cell)
        while self._dropped:
            self._give_back(*self._dropped.popleft())

    def _give_back(self, channel: int, order: int) -> None:
        message = self._forget(channel, order)
        if message is None:
            self._channels[channel].forgotten.add(order)
        elif self.memory is not None:
            self._return(self.memory, message.cell)

    def _forget(self, channel: int, order: int) -> ShmMessage | None:
        """Remove a message from its channel."""
        found = self._channels[channel]
        message = found.messages.pop(order, None)
        if message is not None and found.asked == found.came and not found.messages and not found.forgotten:
            del self._channels[channel]  # numbering may restart
        return message

    def close(self) -> None:
        """Unmap the writer's memory, except for what is lent; no message is read or returned any more."""
        if self.memory is not None:
            self.memory.words[self._word + CLOSED] = 1
        self.memory = None
        self._channels.clear()

    def _open(self) -> SharedMemory:
        if self.memory is None:
            raise RankLost("the group has been left")
        return self.memory

    def _look(self) -> None:
        """Read the messages that have arrived.

        Raises:
            RankLost: The writer's memory holds none.
        """
        memory = self._open()
        sent = memory.words[self._word + SENT]
        if sent - self._returned > _MOST_UNREAD:
            raise RankLost(f"rank {self.writer} has written {sent} messages, of which {self._returned} are read")
        while self._seen < sent:
            cell = self._cell
            next_cell, _, channel, code, offset, at_ns, dtype, dimensions, _, _, *shape = HEADER.unpack_from(
                memory.map, cell
            )
            spec = self._spec(len(memory.map), next_cell, offset, dtype, dimensions, shape)
            ahead_ns = at_ns - time.monotonic_ns()
            if at_ns < 0 or ahead_ns > _MOST_AHEAD_NS:
                raise RankLost(f"a message that arrives in {ahead_ns / 1e9:g} s; allowed: a day")
            self._seen += 1
            self._cell = next_cell
            found = self._channels[channel]
            found.came += 1
            if found.came in found.forgotten:
                found.forgotten.discard(found.came)
                self._return(memory, cell)
                if found.asked == found.came and not found.messages and not found.forgotten:
                    del self._channels[channel]
            else:
                found.messages[found.came] = ShmMessage(cell, code, offset, at_ns, spec)

    def _spec(
        self, size_bytes: int, next_cell: int, offset: int, dtype: int, dimensions: int, shape: Sequence[int]
    ) -> TensorSpec:
        """Return the spec of a message by its header, of which nothing leads out of the memory.

        Raises:
            RankLost: It would.
        """
        if 0 <= dtype < len(TYPE_NAMES) and 0 <= dimensions <= DIMENSIONS:
            spec = TensorSpec(TYPE_NAMES[dtype], tuple(shape[:dimensions]))
            inside = offset == -1 or 0 <= offset <= size_bytes - spec.size_bytes
            has_cell = 0 < next_cell <= size_bytes - CELL_BYTES and next_cell % 8 == 0
            counted = prod(max(size, 1) for size in spec.shape) <= _MOST_ELEMENTS  # also where one of them is 0
            if has_cell and inside and counted and min(spec.shape, default=0) >= 0:
                return spec
        raise RankLost(f"rank {self.writer} has written the header of a message that it cannot have sent")

    def _return(self, memory: SharedMemory, cell: int) -> None:
        NUMBER.pack_into(memory.map, self._tail + NEXT_RETURNED, cell)
        self._tail = cell
        self._returned += 1
        memory.words[self._word + RETURNED] = self._returned


class PendingReceive:
    """A requested message; it is returned when this object is dropped."""

    __slots__ = ("_channel", "_done", "_inbox", "_message", "_order")

    lasting = False

    def __init__(self, inbox: ShmReceiver, channel: int, order: int) -> None:
        self._inbox = inbox
        self._channel = channel
        self._order = order
        self._message: ShmMessage | None = None
        self._done = False

    def find(self) -> ShmMessage | None:
        """Return the message if it has arrived."""
        if self._message is None:
            self._message = self._inbox.find(self._channel, self._order)
        return self._message

    def wait(self, *, aside: bool = False) -> MessageInfo:
        """Wait for the message, in any thread.

        Raises:
            RankLost: It will not arrive.
        """
        message = self.find()
        if message is None:
            message = self._message = self._inbox.wait(self._channel, self._order)
        return MessageInfo(message.code, message.spec, message.at_ns)

    def place(self) -> tuple[SharedMemory, int, TensorSpec]:
        """Return the writer's memory, and where the elements of the message that has come are in it, and what they are;
        -1 where there are none."""
        assert self._message is not None and self._inbox.memory is not None
        return self._inbox.memory, self._message.offset, self._message.spec

    def part(self) -> Tensor:
        """Return the elements of the message that has come, flat, in the writer's memory; valid until it is
        returned."""
        assert self._message is not None
        return self._inbox.part(self._message)

    def take(self) -> Tensor:
        """Return a tensor with its elements, owned by the reader."""
        assert self._message is not None
        lent = self._inbox.lend(self._channel, self._order, self._message)
        if lent is None:
            copied = self._inbox.copy(self._message)
            self.give_back()
            return copied
        self._done = True
        return lent

    def give_back(self) -> None:
        """Return its memory to the writer. Idempotent."""
        if not self._done:
            self._done = True
            self._inbox.give_back(self._channel, self._order)

    def __del__(self) -> None:
        if not self._done:
            self._inbox.drop(self._channel, self._order)


def _end(memory: SharedMemory, over: deque[ShmMessage], message: ShmMessage) -> None:
    """Record, from any thread, that a lent message is released; unmap it if its writer has left."""
    if memory.words[LEFT]:
        memory.discard(message.offset, message.spec.size_bytes)
    else:
        over.append(message)
