"""Shared-memory sender: the messages that a rank writes; for their layout see :mod:`onebox.worker.comm.shm.layout`."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec
from onebox.worker.comm.api import RankLost, RowRange
from onebox.worker.comm.shm.arena import ALIGN, Arena, MemoryBlock
from onebox.worker.comm.shm.layout import (
    CELL_BYTES,
    CHUNK_CELLS,
    CLOSED,
    FIRST_CELLS,
    HEADERS,
    LEFT,
    NEXT_RETURNED,
    NUMBER,
    RETURNED,
    SENT,
    TYPE_CODES,
    lane_start,
)
from onebox.worker.comm.shm.segment import SharedMemory
from onebox.worker.memory.buffers import QuotaExceeded
from onebox.worker.memory.shared import SharedMemoryQuota


class BlockRegion(NamedTuple):
    """Location of a tensor, or of a part of one, in the reader's block.

    Args:
        whole: Spec of the reader's tensor.
        start: Offset of its first byte in the block.
        end: Offset after its last byte.
        block: The block, if it exists already.
    """

    whole: TensorSpec
    start: int
    end: int
    block: MemoryBlock | None = None

    @property
    def last(self) -> bool:
        """True if it completes the whole."""
        return self.end == self.whole.size_bytes


def region_of(spec: TensorSpec, within: RowRange | None, before: BlockRegion | None) -> BlockRegion:
    """Return the location of a tensor.

    Args:
        spec: Its spec.
        within: The whole that it is a part of, if any.
        before: The previous part of an incomplete whole.

    Raises:
        WireError: It is not the next part.
    """
    if within is None and before is None:
        return BlockRegion(spec, 0, spec.size_bytes)
    whole, first = within or RowRange(spec, 0)
    due = before or BlockRegion(whole, 0, 0)
    rows = spec.shape[0] if spec.shape else 0
    fits = rows > 0 and spec == TensorSpec(whole.dtype, (rows, *whole.shape[1:])) and rows + first <= whole.shape[0]
    if not fits or due.whole != whole or due.end != first * (spec.size_bytes // max(1, rows)):
        raise WireError(f"{spec} is sent as the part of {whole} from row {first} on, where byte {due.end} is due")
    return BlockRegion(whole, due.end, due.end + spec.size_bytes, due.block)


class _Lane:
    """The writer's state of its lane to a rank."""

    __slots__ = ("broken", "cell", "held", "returned", "sent", "tail", "word")

    def __init__(self, peer: int) -> None:
        start = lane_start(peer)
        self.word = start // 8
        self.sent = 0
        self.returned = 0
        self.cell = start + FIRST_CELLS  # of the next message
        self.tail = self.cell + CELL_BYTES  # last returned
        self.held: dict[int, MemoryBlock | None] = {}
        self.broken = False  # its reader has returned what it was not sent


class ShmSender:
    """The messages that a rank has written; thread-safe.

    Args:
        memory: Its memory.
        size: Number of ranks.
        paged: Whether blocks begin at page boundaries, and keep their pages until the rank leaves.
        quota: Counts its memory, and limits it.
        wait: Called when there is no room, with the time at which the wait for it began; waits a moment, and returns
            whether to go on waiting.
        ended: Returns whether the process of a rank has ended.
    """

    def __init__(
        self,
        memory: SharedMemory,
        size: int,
        *,
        paged: bool = False,
        quota: SharedMemoryQuota | None = None,
        wait: Callable[[float], bool] = lambda begin_s: False,
        ended: Callable[[int], bool] = lambda peer: False,
    ) -> None:
        self.memory = memory
        self._quota = quota or SharedMemoryQuota()
        self._wait = wait
        self._ended = ended
        self._lanes = [_Lane(peer) for peer in range(size)]
        align = mmap.PAGESIZE if paged else ALIGN
        self._arena = Arena(
            lane_start(size), len(memory.map), memory.discard, align=align, keep=paged, quota=self._quota
        )
        self._cells: list[int] = []
        self._lock = threading.RLock()
        self._quota.enter(self)

    @property
    def unread_bytes(self) -> int:
        """Bytes of blocks still in use by readers."""
        with self._lock:
            self._collect()
            return self._arena.used_bytes

    def take(self, size_bytes: int) -> MemoryBlock:
        """Return a block to fill and post; it is held until its readers have returned it.

        Raises:
            QuotaExceeded: There is no room, and readers have not made any in time.
        """
        begin_s = time.monotonic()
        while True:
            with self._lock:
                self._collect()
                try:
                    return self._arena.take(size_bytes)
                except QuotaExceeded as error:
                    if error.asked_bytes > error.allowed_bytes:
                        raise
                    full = error
            if not self._wait(begin_s):
                raise full

    def write(self, tensors: Sequence[Tensor], size_bytes: int) -> MemoryBlock:
        """Copy tensors of one type into a block, concatenated; it is held until each reader has returned it."""
        block = self.take(size_bytes)
        offset = block.offset
        for tensor in tensors:
            self._copy(tensor, offset)
            offset += tensor.nbytes
        return block

    def write_part(self, tensor: Tensor, place: BlockRegion) -> BlockRegion:
        """Copy a tensor to its location; return the location with its block, a new one for the first of several parts.

        The block is held until its reader has returned it.
        """
        block = place.block or self.take(place.whole.size_bytes)
        self._copy(tensor, block.offset + place.start)
        return place._replace(block=block)

    def _copy(self, tensor: Tensor, offset: int) -> None:
        memory = self.memory
        if tensor.is_contiguous():
            ctypes.memmove(memory.address + offset, tensor.data_ptr(), tensor.nbytes)
        else:
            target = memory.bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)

    def post(
        self, peer: int, channel: int, block: MemoryBlock | None, spec: TensorSpec, *, code: int = 0, at_ns: int = 0
    ) -> int:
        """Send a block to a reader; return the time at which it is available.

        Args:
            peer: The reader.
            channel: Messages of one channel are read in order.
            block: The elements; ``None`` for a message without.
            spec: Spec of the tensor; see :func:`check_dimensions`.
            code: Purpose code for the reader.
            at_ns: That time; now by default.

        Raises:
            RankLost: The reader breaks the rules of this memory.
        """
        memory, lane, shape = self.memory, self._lanes[peer], spec.shape
        with self._lock:
            if lane.broken:
                raise RankLost(f"rank {peer} has returned messages that it was not sent")
            cell, lane.cell = lane.cell, self._cell()
            if block is not None:
                block.readers += 1
            lane.held[cell] = block
            offset = -1 if block is None else block.offset
            dtype = TYPE_CODES[spec.dtype]
            sent_ns = at_ns or time.monotonic_ns()
            HEADERS[len(shape)].pack_into(
                memory.map, cell, lane.cell, 0, channel, code, offset, sent_ns, dtype, len(shape), 0, 0, *shape
            )
            lane.sent += 1
            memory.publish(lane.word + SENT, lane.sent)
        return sent_ns

    def drop(self, block: MemoryBlock) -> None:
        """Record that a reader is done with a block."""
        with self._lock:
            block.readers -= 1
            if not block.readers:
                self._arena.give(block)

    def leave(self) -> None:
        """Notify all readers that nothing more will be sent; memory that they have not read, or still use, stays."""
        self.memory.publish(LEFT, 1)
        for lane in self._lanes:
            self.memory.wake(lane.word + SENT)
        with self._lock:
            self._collect()
            self._arena.empty()
        self._quota.leave(self)

    def reclaim(self) -> None:
        """Free the memory that no reader uses; see :class:`~onebox.worker.memory.shared.SharedBlocks`."""
        if self._lock.acquire(blocking=False):  # another thread of this process may have it, and wait for the quota
            try:
                self._collect()
                if not self._arena.keep:
                    self._arena.empty()
            finally:
                self._lock.release()

    def settle(self) -> bool:
        """Free what readers have returned since the group was left; return whether none of them can use the rest."""
        with self._lock:
            self._collect()
            self._arena.empty()
            words = self.memory.words
            for peer, lane in enumerate(self._lanes):
                if any(lane.held.values()) and not words[lane.word + CLOSED] and not self._ended(peer):
                    return False
            self._arena.forget()
            return True

    def _cell(self) -> int:
        if not self._cells:
            start = self._arena.take(CELL_BYTES * CHUNK_CELLS, forced=True).offset
            self._cells = [start + number * CELL_BYTES for number in range(CHUNK_CELLS)]
        return self._cells.pop()

    def _collect(self) -> None:
        """Reclaim cells and blocks that readers have returned."""
        memory = self.memory
        for lane in self._lanes:
            returned = memory.words[lane.word + RETURNED]
            while lane.returned < returned and not lane.broken:
                (cell,) = NUMBER.unpack_from(memory.map, lane.tail + NEXT_RETURNED)
                if cell not in lane.held:
                    lane.broken = True
                    break
                lane.returned += 1
                self._cells.append(lane.tail)
                lane.tail = cell
                block = lane.held.pop(cell)
                if block is not None:
                    self.drop(block)
