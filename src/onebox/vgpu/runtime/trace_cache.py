"""Encoding of recorded calls for the wire, and the cache of repeated traces.

Pure: numbers in, numbers out. A record is ``(kernel, inputs, first, keeps, floats)``: the kernel's number, the buffers
that it reads, the first of its outputs' consecutive numbers and their count, and its floating-point numbers; or
``(FREE, number, 0, 0, ())``. A call is one record, so that Ctrl-C cannot leave half of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from onebox.wire import FREE, BlockSpec
from onebox.wire.protocol.eager import Operate, Replay
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define, Instruction

Record = tuple[int, Any, int, int, Sequence[float]]

_floats = itemgetter(4)

SHORTEST = 4
"""Minimum number of calls for which a sequence becomes a block."""

BLOCKS = 4096
"""The most cached sequences; the least recently used one is evicted first."""


class EncodedTrace(NamedTuple):
    """A sequence of calls, independent of its buffers' numbers.

    Args:
        code: The calls: inputs of the sequence as ``-1 - i``, outputs of its calls as ``0, 1 ...``, in order.
        inputs: The buffers that exist before it.
        outputs: For each output that outlives it, its position among all, and its number.
        strays: Buffers that are freed in the sequence without being used in it.
    """

    code: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    strays: tuple[int, ...]


def encode_trace(records: Sequence[Record]) -> EncodedTrace:
    """Encode a sequence of calls."""
    slots: dict[int, int] = {}  # of the buffers that are alive
    code: list[int] = []
    inputs: list[int] = []
    strays: list[int] = []
    made = 0
    append = code.append
    for kernel, reads, first, count, _ in records:
        append(kernel)
        if kernel == FREE:
            if reads in slots:
                append(slots.pop(reads))
            else:
                code.pop()
                strays.append(reads)
            continue
        for number in reads:
            if number not in slots:
                inputs.append(number)
                slots[number] = -len(inputs)
            append(slots[number])
        if count == 1:
            slots[first] = made
            append(made)
            made += 1
        else:
            for number in range(first, first + count):
                slots[number] = made
                append(made)
                made += 1
    outputs = [(slot, number) for number, slot in slots.items() if slot >= 0]
    return EncodedTrace(tuple(code), tuple(inputs), tuple(outputs), tuple(strays))


def block_of(coding: EncodedTrace, keeps: dict[int, int], reads: dict[int, int], floats: int) -> BlockSpec:
    """Return a sequence of calls as a block.

    Args:
        coding: The sequence.
        keeps: Number of outputs of each kernel.
        reads: Number of inputs of each kernel.
        floats: Number of floating-point arguments of all calls.
    """
    count = len(coding.inputs)
    calls: list[int] = []
    position = 0
    while position < len(coding.code):
        kernel = coding.code[position]
        width = 1 if kernel == FREE else keeps[kernel] + reads[kernel]
        slots = coding.code[position + 1 : position + 1 + width]
        calls.append(kernel)
        calls += [-1 - slot if slot < 0 else count + slot for slot in slots]
        position += 1 + width
    return BlockSpec(tuple(calls), count, tuple(count + slot for slot, _ in coding.outputs), floats)


def plain(records: Sequence[Record]) -> tuple[int, ...]:
    """Encode calls with the numbers of their buffers, for ``Operate``."""
    code: list[int] = []
    for kernel, reads, first, count, _ in records:
        code.append(kernel)
        if kernel == FREE:
            code.append(reads)
        else:
            code += reads
            code += range(first, first + count)
    return tuple(code)


class TraceCache:
    """The cache of traces: sequences that have occurred, and the numbers of those that are blocks.

    Args:
        size: The most sequences.
    """

    def __init__(self, size: int = BLOCKS) -> None:
        self._size = size
        self._entries: OrderedDict[tuple[Any, ...], int] = OrderedDict()

    def look(self, key: tuple[Any, ...]) -> int | None:
        """Record a sequence; return its block's number, 0 where it has occurred before without becoming one."""
        found = self._entries.get(key)
        if found is None:
            self._entries[key] = 0
        else:
            self._entries.move_to_end(key)
        return found

    def define(self, key: tuple[Any, ...], number: int) -> None:
        """Record that a sequence is now a block."""
        self._entries[key] = number

    def shed(self) -> list[int]:
        """Evict sequences beyond the limit, and return the blocks among them."""
        gone = []
        while len(self._entries) > self._size:
            _, number = self._entries.popitem(last=False)
            if number:
                gone.append(number)
        return gone


class Batcher:
    """Turns recorded calls into instructions: single calls, or a block where the sequence has occurred before.

    Args:
        new_number: Returns an unused number for a definition.
    """

    def __init__(self, new_number: Callable[[], int]) -> None:
        self.cache = TraceCache()
        self._new_number = new_number
        self._reads_of: dict[int, int] = {}
        self._keeps_of: dict[int, int] = {}

    def define(self, number: int, reads: int, keeps: int) -> None:
        """Record the number of a kernel's inputs, and of the outputs that a call keeps."""
        self._reads_of[number], self._keeps_of[number] = reads, keeps

    def instructions(self, calls: Sequence[Record]) -> list[Instruction]:
        """Return the instructions for calls."""
        floats = tuple(chain.from_iterable(map(_floats, calls)))
        if len(calls) < SHORTEST:
            return [Operate(plain(calls), floats)]
        coding = encode_trace(calls)
        key = (coding.code, tuple([slot for slot, _ in coding.outputs]))
        block = self.cache.look(key)
        if block is None:
            gone = self.cache.shed()
            return [Operate(plain(calls), floats), *([Free((), tuple(gone))] if gone else [])]
        made: list[Instruction] = [Free(coding.strays)] if coding.strays else []
        if not block:
            block = self._new_number()
            self.cache.define(key, block)
            made.append(Define(block, block_of(coding, self._keeps_of, self._reads_of, len(floats))))
        made.append(Replay(block, coding.inputs, tuple([number for _, number in coding.outputs]), floats))
        return made
