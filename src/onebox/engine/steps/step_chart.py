"""The chart of a measured step, for figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from onebox.drawing import Bar, StepChart
from onebox.engine.steps.results import TraceEvent
from onebox.errors import UsageError


def measured_chart(events: Iterable[TraceEvent], step: int) -> StepChart:
    """Return the chart of a measured step, which begins with its first computation.

    Transfers are shown at their sender, since a receive begins with its request.

    Args:
        events: The workers' events.
        step: The step.

    Raises:
        UsageError: The events contain no computation of the step.
    """
    own = [event for event in events if event.step == step]
    computed = [event for event in own if event.track == "compute"]
    if not computed:
        raise UsageError(f"there are no events of step {step}; a trainer with trace=True has those of the last steps")
    begin = min(event.start_ns for event in computed)
    bars = []
    for event in own:
        if event.track == "transfer" and event.name.startswith("receive"):
            continue
        times = (max(0, event.start_ns - begin) * 1e-9, (event.end_ns - begin) * 1e-9)
        if times[1] <= 0:
            continue
        if event.action is not None:
            bars.append(Bar(event.worker, event.action.kind, *times, event.action.stage, event.action.micro_batch))
        else:
            bars.append(Bar(event.worker, _kind(event), *times))
    step_ns = max(event.end_ns for event in computed) - begin
    return StepChart(title=f"measured, step {step + 1}", bars=tuple(bars), step_s=step_ns * 1e-9)


def _kind(event: TraceEvent) -> str:
    if event.track == "transfer":
        return "sum" if event.name.startswith("reduce") else "transfer"
    return "optimizer" if event.track == "compute" else "other"
