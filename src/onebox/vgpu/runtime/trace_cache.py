"""Encoding of recorded calls as tapes, and the cache of those that the worker has.

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

from onebox.wire import FREE, TapeSpec
from onebox.wire.protocol.eager import Replay
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define, Instruction

Record = tuple[int, Any, int, int, Sequence[float]]

_floats = itemgetter(4)

TAPES = 1024
"""The most tapes on a worker, those that occur only once among them: about 30 MB."""


class EncodedTrace(NamedTuple):
    """A sequence of calls, independent of its buffers' numbers.

    Args:
        code: The calls, as in :class:`~onebox.wire.protocol.eager.TapeSpec`.
        inputs: The buffers that exist before it.
        outputs: The buffers that it makes and that outlive it.
        strays: Buffers that are freed in the sequence without being used in it.
    """

    code: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
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
        if kernel == FREE:
            if reads in slots:
                append(FREE)
                append(slots.pop(reads))
            else:
                strays.append(reads)
            continue
        append(kernel)
        for number in reads:
            if number not in slots:
                inputs.append(number)
                slots[number] = -len(inputs)
            append(slots[number])
        if count == 1:
            slots[first] = made
            made += 1
        else:
            for number in range(first, first + count):
                slots[number] = made
                made += 1
    outputs = [number for number, slot in slots.items() if slot >= 0]
    return EncodedTrace(tuple(code), tuple(inputs), tuple(outputs), tuple(strays))


class Batcher:
    """Turns recorded calls into instructions: a tape that is defined at its first occurrence, and its replay.

    The least recently used tapes beyond a limit are freed.

    Args:
        new_number: Returns an unused number for a definition.
        size: The most tapes on the worker.
    """

    def __init__(self, new_number: Callable[[], int], size: int = TAPES) -> None:
        self._new_number = new_number
        self._size = size
        self._tapes: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def instructions(self, calls: Sequence[Record]) -> list[Instruction]:
        """Return the instructions for calls."""
        trace = encode_trace(calls)
        return self.replayed(
            trace.code, trace.inputs, trace.outputs, trace.strays, tuple(chain.from_iterable(map(_floats, calls)))
        )

    def replayed(
        self,
        code: tuple[int, ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        strays: tuple[int, ...],
        floats: tuple[float, ...],
    ) -> list[Instruction]:
        """Return the instructions for an encoded trace."""
        if not code:
            return [Free(strays)]
        made: list[Instruction] = []
        number = self._tapes.get(code)
        if number is None:
            if len(self._tapes) >= self._size:
                made.append(Free((), (self._tapes.popitem(last=False)[1],)))
            number = self._tapes[code] = self._new_number()
            made.append(Define(number, TapeSpec(code, len(inputs), len(floats))))
        else:
            self._tapes.move_to_end(code)
        made.append(Replay(number, inputs, outputs, floats, strays))
        return made
