"""Costs of actions on emulated devices: the plan's predictions, or given costs of the model's segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onebox.errors import UsageError
from onebox.plan import Action, Plan
from onebox.trainer_options import SegmentCosts, check_costs


@dataclass(frozen=True, kw_only=True)
class EmulatedCosts:
    """Costs of actions on emulated devices at full speed: the time that they sleep.

    Args:
        plan: The plan.
        speeds: Speed of each device, by which the plan's predictions for it are divided.
        segments: Costs of the segments; ``None`` for the plan's predictions. Given costs stay valid when a plan is made
            from measurements, whose predictions include a device's slowness.

    Raises:
        UsageError: Segments of the plan are missing, or have invalid costs.
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
        """Return the cost of an action.

        Args:
            worker: The worker.
            action: The action.
            samples: Samples of its micro-batch.
            full: Samples of the largest micro-batch, to which the plan's predictions refer.
            late: Whether no other stage waits for the input gradient of its stage: the whole backward then counts as
                weight gradient.
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
