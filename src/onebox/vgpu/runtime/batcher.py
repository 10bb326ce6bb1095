"""The tapes of a device: recorded batches that its worker has, and runs by number. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from onebox.wire import TapeSpec
from onebox.wire.protocol.eager import Replay
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define, Instruction

TAPES = 1024
"""The most tapes on a worker, those that occur only once among them: about 30 MB."""


class Batcher:
    """Turns batches of calls into instructions: a tape that is defined at its first occurrence, and its replay.

    The least recently used tapes beyond a limit are freed.

    Args:
        new_number: Returns an unused number for a definition.
        size: The most tapes on the worker.
    """

    def __init__(self, new_number: Callable[[], int], size: int = TAPES) -> None:
        self._new_number = new_number
        self._size = size
        self._tapes: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def instructions(
        self,
        code: tuple[int, ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        strays: tuple[int, ...],
        floats: tuple[float, ...],
    ) -> list[Instruction]:
        """Return the instructions for a batch, whose calls do not depend on the numbers of its buffers.

        Args:
            code: The calls, as in :class:`~onebox.wire.protocol.eager.TapeSpec`.
            inputs: The buffers that exist before it.
            outputs: The buffers that it makes and that outlive it.
            strays: Buffers that are freed in it without being used in it.
            floats: The floating-point numbers of its calls.
        """
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
