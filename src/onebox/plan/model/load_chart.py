"""The predicted work of a plan's devices in a step, as a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onebox.drawing import Bar, StepChart
from onebox.plan.model.schedule import Routes

StageTimes = tuple[float, float, float]
"""Seconds of forward, input gradient and weight gradient of a micro-batch."""


def load_chart(
    times: Sequence[Sequence[StageTimes]],
    replicas: Sequence[Sequence[tuple[int, ...]]],
    routes: Routes,
    fractions: Sequence[float],
    *,
    halves: bool,
    step_s: float,
) -> StepChart:
    """Return the work of each device, stage by stage and kind by kind without gaps; what is left of the step is idle.

    Args:
        times: For each stage and each of its replicas, the times of a whole micro-batch.
        replicas: For each stage the devices of its replicas.
        routes: The replicas that compute the micro-batches.
        fractions: Size of each micro-batch, as a fraction of a whole one.
        halves: Whether input and weight gradients are separate actions.
        step_s: Seconds of the step.
    """
    bars: list[Bar] = []
    end_s: dict[int, float] = {}
    for stage, route in enumerate(routes):
        for replica, (forward, inputs, weights) in zip(replicas[stage], times[stage], strict=True):
            share = math.fsum(part for part, taken in zip(fractions, route, strict=True) if taken == replica)
            kinds = {"F": forward, **({"I": inputs, "W": weights} if halves else {"B": inputs + weights})}
            for device in replica:
                for kind, seconds in kinds.items():
                    start = end_s.get(device, 0.0)
                    end_s[device] = start + seconds * share
                    if seconds * share > 0:
                        bars.append(Bar(device, kind, start, end_s[device], stage))
    return StepChart(title="predicted work, without waits and updates", bars=tuple(bars), step_s=step_s)
