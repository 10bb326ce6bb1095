"""Parameters in bfloat16, for stages of that precision: made once a step, and gone before the optimizer's. Pure.

Where steps overlap, those of a step are read by what is left of it in the next window, too, and are known by other
numbers there: so they are made once, of the version that the step is computed with.
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
"""Stands in the place of a micro-batch for the step before."""


class ParameterCasts:
    """The parameters that a worker rounds.

    Args:
        builder: The worker's routine.
        parts: What the worker runs.
        source: From the name of a parameter to the buffer that is rounded.
        number: From the port of a parameter in bfloat16 to its buffer.
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
        """Add the end of what was rounded.

        Args:
            kept: Buffers that do not end.
        """
        if ended := tuple(number for number in self._buffers.values() if number not in kept):
            self._builder.add(Free(ended), InstructionLabel("free"))


class EarlierStepCasts:
    """What was rounded for the step before, in a window: it ends with the last action of that.

    Args:
        builder: The worker's routine.
        actions: The worker's row in the window.
        late: What it runs there of the step before.
        number: From the port of a parameter in bfloat16, and 0 or :data:`EARLIER_STEP`, to its buffer.
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
        """The number that each of the step's own has in the next window."""

    def before(self, action: Action) -> None:
        """Add what comes before an action."""

    def after(self, action: Action) -> None:
        """Add the end of it behind the last action of the step before."""
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
