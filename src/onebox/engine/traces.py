"""What is kept of the times and the memory that workers answer a step with. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onebox.engine.compiler import Compiled
from onebox.engine.results import StepTrace
from onebox.engine.windows import Window
from onebox.pool import Answer


def trace_of(
    step: int, compiled: Compiled, window: Window, answers: Sequence[Answer], beside: Mapping[int, int]
) -> StepTrace:
    """Return when the workers did what.

    Args:
        step: The step; of a drain the one behind what is drained.
        compiled: Its routines.
        window: Which of these.
        answers: What each worker answered, in their order.
        beside: Bytes of each worker that were no step's meanwhile.
    """
    traced = {
        worker: (routine.labels, answer.times_ns, tuple(used - beside[worker] for used in answer.used_bytes))
        for (worker, routine), answer in zip(compiled.of(window).items(), answers, strict=True)
    }
    return StepTrace(step=step, workers=traced, micro_batches=len(compiled.micro_batches))
