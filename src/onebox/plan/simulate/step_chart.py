"""The chart of a simulated step, for figures."""

from __future__ import annotations

from onebox.drawing import Bar, StepChart
from onebox.errors import UsageError
from onebox.plan.simulate.step import Simulation


def simulated_chart(simulation: Simulation) -> StepChart:
    """Return the chart of a simulated step.

    Raises:
        UsageError: The simulation was made without details.
    """
    if not simulation.spans:
        raise UsageError("the simulation was made with detail=False; make it with details")
    bars = [
        Bar(span.device, span.action.kind, span.start_s, span.end_s, span.action.stage, span.action.micro_batch)
        for span in simulation.spans
    ]
    bars += [Bar(one.source, "transfer", one.start_s, one.end_s) for one in simulation.transfers]
    for update in simulation.updates:
        kind = "optimizer" if update.stage is None else "sum"
        if update.end_s > update.start_s:
            bars.append(Bar(update.device, kind, update.start_s, update.end_s))
    return StepChart(title="predicted", bars=tuple(bars), step_s=simulation.step_s)
