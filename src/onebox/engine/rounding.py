"""Parameters in bfloat16, for stages of that precision: made once a step, and gone before the optimizer's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from onebox.engine.parts import Part
from onebox.engine.routine import Label, RoutineBuilder
from onebox.graph import Port, round_all
from onebox.wire import TensorSpec
from onebox.wire.messages import Free


class Rounding:
    """The parameters that a worker rounds.

    Args:
        builder: The worker's routine.
        parts: What the worker runs.
        state: Buffers of parameters, by name.
        number: From the port of a parameter in bfloat16 to its buffer.
    """

    def __init__(
        self,
        builder: RoutineBuilder,
        parts: Iterable[Part],
        state: Mapping[str, int],
        number: Callable[[Port], int],
    ) -> None:
        self._builder = builder
        specs: dict[Port, TensorSpec] = {}
        for part in parts:
            specs |= {p: spec for p, spec in zip(part.inputs, part.given, strict=True) if p.kind == "rounded"}
        self._buffers = tuple(map(number, specs))
        if specs:
            builder.call(
                round_all([TensorSpec("float32", spec.shape) for spec in specs.values()]),
                [state[str(port.name)] for port in specs],
                self._buffers,
                Label("round parameters"),
            )

    def finish(self) -> None:
        """Add the end of what was rounded."""
        if self._buffers:
            self._builder.add(Free(self._buffers), Label("free"))
