"""Storage of the times and memory in workers' replies to steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from onebox.engine.compile.compiler import CompiledStep, Compiler
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.compile.update.async_window import Window
from onebox.engine.steps.overlap_scheduler import Traced, UnfinishedStep
from onebox.engine.steps.results import StepTrace, TraceEvent
from onebox.pool import WorkerReply

_STEPS = 200


class StepTraces:
    """Times of the workers' instructions in the last steps, with their labels.

    Args:
        wanted: Whether workers report times.
        beside: Returns the bytes of a worker that belong to no step.
    """

    def __init__(self, wanted: bool, beside: Callable[[int], int]) -> None:
        self._wanted = wanted
        self._beside = beside
        self._steps: deque[StepTrace] = deque(maxlen=_STEPS)
        self._past: list[Compiler] = []

    def __iter__(self) -> Iterator[StepTrace]:
        return iter(self._steps)

    def events(self) -> list[TraceEvent]:
        """Return what the workers did in the last steps, for a timeline."""
        return [event for trace in self._steps for event in trace.events()]

    def add(
        self,
        step: int,
        compiled: CompiledStep,
        window: Window,
        answers: Sequence[WorkerReply],
        beside: Mapping[int, int],
    ) -> StepTrace | None:
        """Store the workers' replies; return their trace, if they report times.

        Args:
            step: The step; for a drain, the step after the one that is drained.
            compiled: Its routines.
            window: The kind of window.
            answers: Replies of the workers, in order.
            beside: Bytes of each worker that belonged to no step then.
        """
        if not self._wanted:
            return None
        traced = {
            worker: (routine.labels, answer.times_ns, tuple(used - beside[worker] for used in answer.used_bytes))
            for (worker, routine), answer in zip(compiled.of(window).items(), answers, strict=True)
        }
        self._steps.append(StepTrace(step=step, workers=traced, micro_batches=len(compiled.micro_batches)))
        return self._steps[-1]

    def draining(self, open_: UnfinishedStep) -> Traced:
        """Return the receiver of the replies to a drain that is about to be requested."""
        step, compiled = open_.work.number, open_.compiled
        beside = {worker: self._beside(worker) for worker in compiled.routines}
        return lambda answers: self.add(step + 1, compiled, "drain", answers, beside)

    def replaced(self, compiler: Compiler) -> None:
        """Record that another plan has taken over while steps of this one are in flight."""
        self._past.append(compiler)

    def forget_replaced(self) -> None:
        """Record that no step of an earlier plan is in flight."""
        self._past.clear()

    def labels(self, compiler: Compiler | None, worker: int, routine: int) -> Sequence[InstructionLabel]:
        """Return the labels of a routine, including one requested before the plan changed."""
        for known in (compiler, *self._past):
            if known is not None and (labels := known.labels(worker, routine)):
                return labels
        return ()
