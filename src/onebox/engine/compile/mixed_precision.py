"""Parameters in bfloat16 for stages of that precision: rounded once per step, and freed before the optimizer's step.
Pure.

Where steps overlap, the rest of a step in the next window reads them, too, under other buffer numbers: so they are
rounded once, from the version that the step uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder
from onebox.engine.partition.phase_programs import PhaseProgram
from onebox.graph import Port, round_all
from onebox.plan import Action
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Free

EARLIER_STEP = -1
"""Stands for the previous step in place of a micro-batch."""


class ParameterCasts:
    """Rounded parameters of a worker.

    Args:
        builder: The worker's routine.
        parts: The worker's parts.
        source: Maps a parameter's name to the buffer to round.
        number: Maps the port of a parameter in bfloat16 to its buffer.
    """

    def __init__(
        self,
        builder: RoutineBuilder,
        parts: Iterable[PhaseProgram],
        source: Callable[[str], int],
        number: Callable[[Port], int],
    ) -> None:
        self._builder = builder
        self._buffers = {port: number(port) for port in _rounded(parts)}
        if self._buffers:
            builder.call(
                round_all([TensorSpec("float32", spec.shape) for spec in _rounded(parts).values()]),
                [source(str(port.name)) for port in self._buffers],
                list(self._buffers.values()),
                InstructionLabel("round parameters"),
            )

    def finish(self, kept: Collection[int] = ()) -> None:
        """Free the rounded parameters.

        Args:
            kept: Buffers that stay.
        """
        if ended := tuple(number for number in self._buffers.values() if number not in kept):
            self._builder.add(Free(ended), InstructionLabel("free"))


class EarlierStepCasts:
    """Rounded parameters of the previous step in a window, freed after the last action of that step.

    Args:
        builder: The worker's routine.
        actions: The worker's row in the window.
        late: The parts of the previous step that run in the window.
        number: Maps the port of a parameter in bfloat16, and 0 or :data:`EARLIER_STEP`, to its buffer.
    """

    def __init__(
        self,
        builder: RoutineBuilder,
        actions: Iterable[Action],
        late: Iterable[PhaseProgram],
        number: Callable[[Port, int], int],
    ) -> None:
        self._builder = builder
        self._left = sum(action.micro_batch < 0 for action in actions)
        ports = _rounded(late)
        self._buffers = tuple(number(port, EARLIER_STEP) for port in ports)
        self.handed_on: Mapping[int, int] = {number(port, 0): number(port, EARLIER_STEP) for port in ports}
        """Number in the next window of each buffer of the step itself."""

    def before(self, action: Action) -> None:
        """Add the instructions before an action."""

    def after(self, action: Action) -> None:
        """Free the rounded parameters after the last action of the previous step."""
        self._left -= action.micro_batch < 0
        if action.micro_batch < 0 and not self._left and self._buffers:
            self._builder.add(Free(self._buffers), InstructionLabel("free"))


def _rounded(parts: Iterable[PhaseProgram]) -> dict[Port, TensorSpec]:
    """Return the parameters that parts read in bfloat16."""
    return {
        port: spec
        for part in parts
        for port, spec in zip(part.inputs, part.given, strict=True)
        if port.kind == "rounded"
    }
