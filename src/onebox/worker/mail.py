"""Letters between the ranks of a group on one host: tensors in memory that the writer owns and the readers map.

The memory of a rank holds a page of control words, a lane to each rank, and an arena with everything else. A letter is
a block with its elements, and for each reader a cell that says what it is. The cells of a lane are a linked list: each
names the cell that the next letter will have, so that a reader finds its way while cells are used again in any order. A
reader who is done with a letter appends its cell to the lane's list of returned cells in the same way; the writer walks
that list to get cells and blocks back. The last returned cell stays with the list until there is another one behind it.

One word counts the letters of a lane, another the returned ones; each is written by one side only, after what it
speaks of. So nobody ever waits to send, however many letters are unread, and there are no locks.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec
from onebox.worker.arena import Arena, Block
from onebox.worker.memory import SLICE_S, Memory, PeerLost

LEFT, READY, FREE = 0, 8, 16
"""Words of the control page, each in a cache line of its own: the rank has left; it has mapped everybody's memory; from
here on they are free for the user."""

_DTYPES = list(DTYPES)
_CODES = {name: code for code, name in enumerate(_DTYPES)}

_LANE_BYTES = 1024
_SENT, _RETURNED = 0, 8  # words of a lane
_FIRST_CELLS = 128  # byte in a lane: its first two cells
_CELL_BYTES = 256
_CHUNK_CELLS = 64
_NEXT_RETURNED = 8  # byte in a cell
_FIELDS = 10
DIMENSIONS = _CELL_BYTES // 8 - _FIELDS
"""The most dimensions of a tensor that travels."""

_HEADERS = [Struct(f"={_FIELDS + dimensions}q") for dimensions in range(DIMENSIONS + 1)]
_HEADER = _HEADERS[DIMENSIONS]
_NUMBER = Struct("=q")


class Letter(NamedTuple):
    """What has come for a reader.

    Args:
        cell: Where its header is in the writer's memory.
        code: What it belongs to; free for the user.
        offset: Where its elements are; -1 where there are none because it comes from a device that does not compute.
        at_ns: When it is there, on the monotonic clock.
        spec: What it is.
    """

    cell: int
    code: int
    offset: int
    at_ns: int
    spec: TensorSpec


class _Lane:
    """The way from one rank to another, at its writer."""

    __slots__ = ("cell", "held", "returned", "sent", "tail", "word")

    def __init__(self, peer: int) -> None:
        start = _lane(peer)
        self.word = start // 8
        self.sent = 0
        self.returned = 0
        self.cell = start + _FIRST_CELLS  # of the next letter
        self.tail = self.cell + _CELL_BYTES  # last returned
        self.held: dict[int, Block | None] = {}


def check_dimensions(spec: TensorSpec) -> None:
    """Require that a tensor can travel.

    Raises:
        WireError: It has too many dimensions.
    """
    if len(spec.shape) > DIMENSIONS:
        raise WireError(f"a tensor of {len(spec.shape)} dimensions cannot travel; at most {DIMENSIONS} are allowed")


def _lane(peer: int) -> int:
    return mmap.PAGESIZE + peer * _LANE_BYTES


class Outbox:
    """The letters that a rank has written.

    Args:
        memory: Its own.
        size: How many ranks there are.
    """

    def __init__(self, memory: Memory, size: int) -> None:
        self._memory = memory
        self._lanes = [_Lane(peer) for peer in range(size)]
        self._arena = Arena(_lane(size), len(memory.map), memory.discard)
        self._cells: list[int] = []

    @property
    def unread_bytes(self) -> int:
        """Bytes of blocks that some reader is not done with."""
        self._collect()
        return self._arena.used_bytes

    def write(self, tensors: Sequence[Tensor], size_bytes: int) -> Block:
        """Copy tensors of one type into a block, one behind the other; it is held until each reader has returned it."""
        self._collect()
        memory = self._memory
        block = self._arena.take(size_bytes)
        offset = block.offset
        for tensor in tensors:
            count = tensor.nbytes
            if tensor.is_contiguous():
                ctypes.memmove(memory.address + offset, tensor.data_ptr(), count)
            else:
                target = memory.bytes[offset : offset + count].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor)
            offset += count
        return block

    def post(
        self, peer: int, channel: int, block: Block | None, spec: TensorSpec, *, code: int = 0, at_ns: int = 0
    ) -> int:
        """Let a reader have a block; return when it is there.

        Args:
            peer: The reader.
            channel: Letters of one channel are read in order.
            block: Elements; ``None`` for a letter without.
            spec: What it is; see :func:`check_dimensions`.
            code: For the reader.
            at_ns: When it is there, if later than now.
        """
        memory, lane, shape = self._memory, self._lanes[peer], spec.shape
        cell, lane.cell = lane.cell, self._cell()
        if block is not None:
            block.readers += 1
        lane.held[cell] = block
        at_ns = max(at_ns, time.monotonic_ns())
        offset = -1 if block is None else block.offset
        dtype = _CODES[spec.dtype]
        _HEADERS[len(shape)].pack_into(
            memory.map, cell, lane.cell, 0, channel, code, offset, at_ns, dtype, len(shape), 0, 0, *shape
        )
        lane.sent += 1
        memory.publish(lane.word + _SENT, lane.sent)
        return at_ns

    def drop(self, block: Block) -> None:
        """Note that one of its readers is done with a block."""
        block.readers -= 1
        if not block.readers:
            self._arena.give(block)

    def leave(self) -> None:
        """Tell all readers that nothing more will come."""
        self._memory.publish(LEFT, 1)
        self._memory.wake(READY)
        for lane in self._lanes:
            self._memory.wake(lane.word + _SENT)

    def _cell(self) -> int:
        if not self._cells:
            start = self._arena.take(_CELL_BYTES * _CHUNK_CELLS).offset
            self._cells = [start + number * _CELL_BYTES for number in range(_CHUNK_CELLS)]
        return self._cells.pop()

    def _collect(self) -> None:
        """Take back what readers have returned."""
        memory = self._memory
        for lane in self._lanes:
            returned = memory.words[lane.word + _RETURNED]
            while lane.returned < returned:
                lane.returned += 1
                self._cells.append(lane.tail)
                (lane.tail,) = _NUMBER.unpack_from(memory.map, lane.tail + _NEXT_RETURNED)
                block = lane.held.pop(lane.tail)
                if block is not None:
                    self.drop(block)


class _Channel:
    """The letters of one channel that have come, by their order."""

    __slots__ = ("asked", "came", "forgotten", "letters")

    def __init__(self) -> None:
        self.asked = 0
        self.came = 0
        self.letters: dict[int, Letter] = {}
        self.forgotten: set[int] = set()


Watch = Callable[[int, float], None]
"""Called with a rank that is waited for, and since when in seconds; raises :class:`PeerLost` if it cannot come."""


class Inbox:
    """The letters from one rank to another, at their reader.

    Args:
        memory: The writer's.
        writer: Its rank.
        reader: The reader's rank.
        watch: Called now and then during a wait.
    """

    def __init__(self, memory: Memory, writer: int, reader: int, watch: Watch) -> None:
        self.memory: Memory | None = memory
        self.writer = writer
        self._watch = watch
        start = _lane(reader)
        self._word = start // 8
        self._seen = 0
        self._returned = 0
        self._cell = start + _FIRST_CELLS
        self._tail = self._cell + _CELL_BYTES
        self._channels: dict[int, _Channel] = defaultdict(_Channel)

    def expect(self, channel: int) -> Expected:
        """Return the wait for the next letter of a channel that nobody has asked for."""
        found = self._channels[channel]
        found.asked += 1
        return Expected(self, channel, found.asked)

    def find(self, channel: int, order: int) -> Letter | None:
        """Return a letter if it has come."""
        letters = self._channels[channel].letters
        if order not in letters:
            self._look()
        return letters.get(order)

    def wait(self, channel: int, order: int) -> Letter:
        """Wait for a letter.

        Raises:
            PeerLost: It will not come.
        """
        memory = self._open()
        begin_s = time.monotonic()
        next_s = begin_s + SLICE_S
        while (letter := self.find(channel, order)) is None:
            left = memory.words[LEFT]
            if memory.words[self._word + _SENT] != self._seen:
                continue
            if left:
                raise PeerLost(f"rank {self.writer} has left the group")
            if memory.sleep(self._word + _SENT, self._seen) or time.monotonic() > next_s:
                next_s = time.monotonic() + SLICE_S  # also while letters of other channels come
                try:
                    self._watch(self.writer, begin_s)
                except PeerLost:
                    if self.find(channel, order) is None:  # what it sent before it ended still counts
                        raise
        return letter

    def part(self, letter: Letter) -> Tensor:
        """Return the elements of a letter, flat, in the writer's memory; valid until it is returned."""
        spec, dtype = letter.spec, DTYPES[letter.spec.dtype]
        if letter.offset < 0:
            raise WireError(f"rank {self.writer} does not compute: its {spec} has no elements")
        count = prod(spec.shape)
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._open().map, dtype=dtype, count=count, offset=letter.offset)

    def copy(self, letter: Letter) -> Tensor:
        """Return a tensor with the elements of a letter."""
        spec = letter.spec
        made = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        if letter.offset < 0:
            raise WireError(f"rank {self.writer} does not compute: its {spec} has no elements")
        ctypes.memmove(made.data_ptr(), self._open().address + letter.offset, made.nbytes)
        return made

    def give_back(self, channel: int, order: int) -> None:
        """Let the writer use the memory of a letter again; one that has not come yet is given back when it does."""
        found = self._channels[channel]
        letter = found.letters.pop(order, None)
        if letter is None:
            found.forgotten.add(order)
        elif self.memory is not None:
            self._return(self.memory, letter.cell)
        if found.asked == found.came and not found.letters and not found.forgotten:
            del self._channels[channel]  # counting may begin again

    def close(self) -> None:
        """Let go of the writer's memory."""
        self.memory = None
        self._channels.clear()

    def _open(self) -> Memory:
        if self.memory is None:
            raise PeerLost("the group has been left")
        return self.memory

    def _look(self) -> None:
        """Take note of the letters that have come."""
        memory = self._open()
        sent = memory.words[self._word + _SENT]
        while self._seen < sent:
            self._seen += 1
            cell = self._cell
            self._cell, _, channel, code, offset, at_ns, dtype, dimensions, _, _, *shape = _HEADER.unpack_from(
                memory.map, cell
            )
            found = self._channels[channel]
            found.came += 1
            if found.came in found.forgotten:
                found.forgotten.discard(found.came)
                self._return(memory, cell)
                if found.asked == found.came and not found.letters and not found.forgotten:
                    del self._channels[channel]
            else:
                spec = TensorSpec(_DTYPES[dtype], tuple(shape[:dimensions]))
                found.letters[found.came] = Letter(cell, code, offset, at_ns, spec)

    def _return(self, memory: Memory, cell: int) -> None:
        _NUMBER.pack_into(memory.map, self._tail + _NEXT_RETURNED, cell)
        self._tail = cell
        self._returned += 1
        memory.words[self._word + _RETURNED] = self._returned


class Expected:
    """A letter that somebody has asked for; whoever forgets it gives it back."""

    __slots__ = ("_channel", "_done", "_inbox", "_order")

    def __init__(self, inbox: Inbox, channel: int, order: int) -> None:
        self._inbox = inbox
        self._channel = channel
        self._order = order
        self._done = False

    def find(self) -> Letter | None:
        """Return the letter if it has come."""
        return self._inbox.find(self._channel, self._order)

    def wait(self) -> Letter:
        """Wait for the letter.

        Raises:
            PeerLost: It will not come.
        """
        return self._inbox.wait(self._channel, self._order)

    def part(self, letter: Letter) -> Tensor:
        """Return its elements, flat, in the writer's memory; valid until it is given back."""
        return self._inbox.part(letter)

    def copy(self, letter: Letter) -> Tensor:
        """Return a tensor with its elements."""
        return self._inbox.copy(letter)

    def give_back(self) -> None:
        """Let the writer use its memory again. Idempotent."""
        if not self._done:
            self._done = True
            self._inbox.give_back(self._channel, self._order)

    def __del__(self) -> None:
        self.give_back()
