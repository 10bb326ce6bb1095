"""Storage of the times and memory in workers' replies to steps, and the location of failures in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from onebox.engine.compile.compiler import CompiledStep, Compiler
from onebox.engine.compile.routine import StepRoutine
from onebox.engine.compile.update.async_window import Window
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.steps.launch import LaunchedStep
from onebox.engine.steps.link_use import add_traffic
from onebox.engine.steps.observer import EndedStep, StepObserver
from onebox.engine.steps.overlap_scheduler import Traced
from onebox.engine.steps.results import StepTrace, TraceEvent, locate
from onebox.errors import OperatorError
from onebox.pool import WorkerReply
from onebox.wire.protocol.responses import LinkTraffic

_STEPS = 200


def step_trace(
    number: int, compiled: CompiledStep, window: Window, answers: Sequence[WorkerReply], beside: Mapping[int, int]
) -> StepTrace:
    """Return the trace of a step.

    Args:
        number: Its number; for a drain, that of the step after the one that is drained.
        compiled: Its routines.
        window: The kind of window.
        answers: Replies of the workers, in order.
        beside: Bytes of each worker that belonged to no step then.
    """
    traced = {}
    for (worker, routine), answer in zip(compiled.of(window).items(), answers, strict=True):
        own_bytes, used_bytes = beside[worker], answer.used_bytes
        if own_bytes:
            used_bytes = tuple([used - own_bytes for used in used_bytes])
        traced[worker] = routine.labels, answer.own_times_ns, used_bytes
    traffic = {
        (worker, carried.worker): carried
        for worker, answer in zip(traced, answers, strict=True)
        for carried in answer.traffic
    }
    return StepTrace(step=number, workers=traced, micro_batches=len(compiled.micro_batches), traffic=traffic)


class StepTraces(StepObserver):
    """Times of the workers' instructions in the last steps, and the labels of the instructions of recent plans.

    Args:
        wanted: Whether workers report times.
        beside: Returns the bytes of a worker that belong to no step.
        tell: Called with the trace of each step.
    """

    def __init__(
        self, wanted: bool, beside: Callable[[int], int], tell: Callable[[StepTrace], object] = lambda trace: None
    ) -> None:
        self._wanted = wanted
        self._beside = beside
        self._tell = tell
        self._steps: deque[StepTrace] = deque(maxlen=_STEPS)
        self.traffic: dict[tuple[int, int], LinkTraffic] = {}
        """What connections between hosts have carried so far, by source and target."""
        self._compilers: list[Compiler] = []
        """Those of the plan in use, which is the last, and of earlier plans with steps in flight."""

    def __iter__(self) -> Iterator[StepTrace]:
        return iter(tuple(self._steps))  # others may look while steps end

    def events(self) -> list[TraceEvent]:
        """Return what the workers did in the last steps, for a timeline; callable from any thread."""
        return [event for trace in self for event in trace.events()]

    def newest_events(self) -> list[TraceEvent]:
        """Return what the workers did in the newest step in which they computed; callable from any thread."""
        traces = tuple(self)
        for newest in reversed(traces):
            if any(label.track == "compute" for labels, _, _ in newest.workers.values() for label in labels):
                return [event for trace in traces if trace.step == newest.step for event in trace.events()]
        return []

    def draining(self, open_: LaunchedStep) -> Traced:
        """Return the receiver of the replies to a drain that is about to be requested."""
        step, compiled = open_.work.number, open_.prepared.compiled
        beside = {worker: self._beside(worker) for worker in compiled.routines}

        def take(answers: Sequence[WorkerReply]) -> None:
            if self._wanted:
                self._keep(step_trace(step + 1, compiled, "drain", answers, beside))

        return take

    def locate(self, error: Exception) -> None:
        """Add the location in the step to an operator's error, also if it was requested before the plan changed."""
        if isinstance(error, OperatorError):
            locate(error, self._routine)

    def _keep(self, trace: StepTrace) -> None:
        self._steps.append(trace)
        add_traffic(self.traffic, trace.traffic)
        self._tell(trace)

    def _routine(self, worker: int, number: int) -> tuple[CompiledStep, StepRoutine] | None:
        found = (compiler.routine(worker, number) for compiler in reversed(self._compilers))
        return next((each for each in found if each is not None), None)

    # ---- events

    def installed(self, plan: InstalledPlan) -> None:
        """Store the labels of a plan."""
        self._compilers.append(plan.compiler)

    def replaced(self, before: InstalledPlan, after: InstalledPlan) -> None:
        """Store the labels of a plan that has taken over while steps of the other are in flight."""
        self._compilers.append(after.compiler)

    def ended(self, step: EndedStep) -> None:
        """Store the trace of a step; after one under the plan in use, no step of an earlier plan is in flight."""
        if step.current:
            del self._compilers[:-1]
        if step.trace is not None:
            self._keep(step.trace)

    def reset(self) -> None:
        """Discard the labels: no step is in flight."""
        self._compilers.clear()
