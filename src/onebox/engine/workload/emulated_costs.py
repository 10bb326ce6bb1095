"""What actions cost devices that compute nothing: what the plan expects, or what is told of the model's segments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onebox.errors import UsageError
from onebox.plan import Action, Plan

SegmentCosts = Mapping[str, tuple[float, float, float]]
"""For segments, by their names, seconds of forward, input gradient and weight gradient of a sample at full speed."""


@dataclass(frozen=True, kw_only=True)
class EmulatedCosts:
    """What actions cost devices that compute nothing, at full speed: the time that they sleep.

    Args:
        plan: The plan.
        speeds: Of each device, by which what the plan predicts for it has been divided.
        segments: What the segments cost. They go on costing it when a plan is made of what was measured, which has the
            slowness of a device in its prediction. ``None`` for what the plan predicts.

    Raises:
        UsageError: Some of the plan's segments are not there, or cost what nothing can.
    """

    plan: Plan
    speeds: Mapping[int, float]
    segments: SegmentCosts | None = None

    def __post_init__(self) -> None:
        if self.segments is None:
            return
        check_costs(self.segments)
        missing = [name for stage in self.plan.stages for name in stage.segments if name not in self.segments]
        if missing:
            raise UsageError(f"costs= says nothing of segment {missing[0]!r}; it has to name all of the model")

    def seconds(self, worker: int, action: Action, samples: int, full: int, *, late: bool) -> float:
        """Return what an action costs.

        Args:
            worker: Who does it.
            action: What is done.
            samples: Of its micro-batch.
            full: Samples of the largest micro-batch, for which the plan predicts.
            late: Whether nobody waits for the input gradient of its stage: all of a backward then is the weights'.
        """
        forward_s, input_s, weight_s = self._stage_s(worker, action.stage, full)
        if action.kind == "W" and late:
            input_s, weight_s = 0.0, input_s + weight_s
        seconds = {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s}[action.kind]
        return seconds * samples / full

    def _stage_s(self, worker: int, number: int, full: int) -> Sequence[float]:
        """Return the seconds of forward, input gradient and weight gradient of a stage for the largest micro-batch."""
        stage, predicted = self.plan.stages[number], self.plan.predicted
        if self.segments is not None:
            found = [self.segments[name] for name in stage.segments or self.segments]
            return [full * sum(times[kind] for times in found) for kind in range(3)]
        if predicted is None:
            return (0.0, 0.0, 0.0)
        if not predicted.replicas_s:
            return predicted.stages_s[number]
        place = next(index for index, replica in enumerate(stage.replicas) if worker in replica)
        return [seconds * self.speeds[worker] for seconds in predicted.replicas_s[number][place]]


def check_costs(costs: SegmentCosts) -> None:
    """Refuse costs of segments that cannot be.

    Raises:
        UsageError: Some are no three times.
    """
    for name, times in costs.items():
        if len(times) != 3 or not all(0 <= seconds < math.inf for seconds in times):
            raise UsageError(f"costs of segment {name!r} are {times}: three times in seconds are right, from 0 up")
