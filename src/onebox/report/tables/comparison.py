"""Comparison of predictions of plans and islands with measurements, in time and memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from onebox.plan import Action, Kind, MicroBatch, Plan
from onebox.plan.evaluate.islands import IslandsPrediction

if TYPE_CHECKING:  # importing the engine takes a second, and tables do not need it
    from onebox.engine import TraceEvent

_KINDS: tuple[Kind, ...] = ("F", "I", "W", "B")


@dataclass(frozen=True, kw_only=True)
class PredictedMeasured:
    """A predicted and a measured value of the same quantity.

    Args:
        predicted: The prediction; ``None`` where there is none.
        measured: The measurement; ``None`` where there is none.
    """

    predicted: float | None = None
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction, above 0 where it is too high; ``None`` if a value is missing."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    def to_data(self) -> dict[str, float | None]:
        """Return it as JSON values."""
        return {"predicted": self.predicted, "measured": self.measured, "error": self.error}


@dataclass(frozen=True, kw_only=True)
class StageComparison:
    """Comparison of a replica of a stage.

    Args:
        stage: The stage.
        devices: The replica's devices; several split its layers.
        samples: Samples of the micro-batch to which the times apply.
        seconds: Seconds of an action, for each kind. ``B`` is ``I`` and ``W`` at once; so is the ``W`` of a stage
            without ``I``, because no gradient leaves it.
    """

    stage: int
    devices: tuple[int, ...]
    samples: int
    seconds: Mapping[Kind, PredictedMeasured]


@dataclass(frozen=True, kw_only=True)
class DeviceComparison:
    """Comparison of a device.

    Args:
        device: Its number in the pool.
        peak_bytes: Peak of its memory.
        exact_bytes: The same from the buffer lifetimes of its programs, where known.
    """

    device: int
    peak_bytes: PredictedMeasured
    exact_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """Comparison of a run with its plan. Measured times are medians.

    Args:
        batch: Samples of the compared steps.
        steps: Number of measured steps.
        step_s: Seconds from the first computation of a step to the end of its last.
        bubble: Fraction of the devices' time in a step in which they are idle.
        stages: Each replica of each stage.
        devices: Each device of the plan.
    """

    batch: int
    steps: int
    step_s: PredictedMeasured
    bubble: PredictedMeasured
    stages: tuple[StageComparison, ...]
    devices: tuple[DeviceComparison, ...]

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "batch": self.batch,
            "steps": self.steps,
            "step_s": self.step_s.to_data(),
            "bubble": self.bubble.to_data(),
            "stages": [
                {
                    "stage": row.stage,
                    "devices": list(row.devices),
                    "samples": row.samples,
                    "seconds": {kind: pair.to_data() for kind, pair in row.seconds.items()},
                }
                for row in self.stages
            ],
            "devices": [
                {"device": row.device, "exact_bytes": row.exact_bytes, "peak_bytes": row.peak_bytes.to_data()}
                for row in self.devices
            ],
        }


@dataclass(frozen=True, kw_only=True)
class IslandsComparison:
    """Comparison of a run of islands with its prediction.

    Args:
        batch: Samples of the compared steps, of all islands.
        steps: Number of measured steps.
        step_s: Seconds from the end of a step to that of the next, with its part of the outer steps.
        sums_s: Seconds of a step's part of the sums between islands.
        link_bps: Bytes per second of the busiest link between islands during these.
        islands: The comparison of each island's steps with its plan.
    """

    batch: int
    steps: int
    step_s: PredictedMeasured
    sums_s: PredictedMeasured
    link_bps: PredictedMeasured
    islands: tuple[PlanComparison, ...]

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "batch": self.batch,
            "steps": self.steps,
            "step_s": self.step_s.to_data(),
            "sums_s": self.sums_s.to_data(),
            "link_bps": self.link_bps.to_data(),
            "islands": [each.to_data() for each in self.islands],
        }


def compare_islands(
    prediction: IslandsPrediction,
    islands: Sequence[PlanComparison],
    events: Iterable[TraceEvent],
    sums_s: float | None,
    *,
    every: int,
    steps: Collection[int],
) -> IslandsComparison:
    """Compare a run of islands with its prediction.

    Args:
        prediction: The prediction.
        islands: The comparison of each island with its plan.
        events: The workers' events.
        sums_s: Measured seconds of a step's part of the sums between islands, if known.
        every: Steps between two outer steps.
        steps: The steps with a whole batch.
    """
    busiest = max(prediction.traffic.values(), default=0.0)

    def rate(seconds: float | None) -> float | None:
        return busiest / seconds if seconds and busiest else None

    return IslandsComparison(
        batch=prediction.batch,
        steps=max(each.steps for each in islands),
        step_s=PredictedMeasured(predicted=prediction.step_s, measured=step_interval_s(events, every, steps)),
        sums_s=PredictedMeasured(predicted=prediction.sums_s, measured=sums_s),
        link_bps=PredictedMeasured(predicted=rate(prediction.sums_s), measured=rate(sums_s)),
        islands=tuple(islands),
    )


def step_interval_s(events: Iterable[TraceEvent], every: int, steps: Collection[int]) -> float | None:
    """Return the mean seconds between the ends of consecutive steps, of which every so many are alike.

    For each place in a period it is the median: so an evaluation between two steps does not count. It is that of the
    worker with the longest steps.

    Args:
        events: The workers' events.
        every: Steps of a period.
        steps: The steps to consider.
    """
    ends: dict[int, dict[int, int]] = {}
    for event in events:
        if event.track == "compute" and event.step in steps:
            own = ends.setdefault(event.worker, {})
            own[event.step] = max(own.get(event.step, 0), event.end_ns)
    means = []
    for own in ends.values():
        alike: dict[int, list[float]] = {}
        for step, end_ns in own.items():
            if step - 1 in own:
                alike.setdefault(step % every, []).append((end_ns - own[step - 1]) * 1e-9)
        if len(alike) == every:
            means.append(sum(map(median, alike.values())) / every)
    return max(means, default=None)


def compare(
    plan: Plan,
    events: Iterable[TraceEvent],
    *,
    batch: int,
    steps: Collection[int] | None = None,
    exact: Mapping[int, int] | None = None,
) -> PlanComparison:
    """Compare a run with its plan, in time and memory, by the same steps.

    Args:
        plan: The plan; without a prediction for this batch, only measurements are returned.
        events: The workers' events, from :meth:`~onebox.engine.Trainer.events`.
        batch: Samples of the compared steps.
        steps: The steps with such a batch; ``None`` for all.
        exact: Peak bytes that follow from buffer lifetimes, from :meth:`~onebox.engine.Trainer.predicted_memory`.

    Returns:
        The comparison; missing measurements are ``None``.
    """
    by_step: dict[int, list[TraceEvent]] = {}
    memory: dict[int, int] = {}
    for event in events:
        if steps is None or event.step in steps:
            memory[event.worker] = max(memory.get(event.worker, 0), event.peak_bytes)
            if event.track == "compute":
                by_step.setdefault(event.step, []).append(event)
    predicted = plan.predicted if plan.predicted is not None and plan.predicted.batch == batch else None
    spans_ns = [_span_ns(found) for found in by_step.values()]
    busy = [sum(e.end_ns - e.start_ns for e in found) for found in by_step.values()]
    rooms = [span_ns * len(plan.devices) for span_ns in spans_ns]
    peaks = predicted.peak_bytes if predicted else (None,) * len(plan.devices)
    return PlanComparison(
        batch=batch,
        steps=len(by_step),
        step_s=PredictedMeasured(
            predicted=predicted.step_s if predicted else None,
            measured=_median(span_ns * 1e-9 for span_ns in spans_ns),
        ),
        bubble=PredictedMeasured(
            predicted=predicted.bubble if predicted else None,
            measured=_median(1 - part / room for part, room in zip(busy, rooms, strict=True) if room),
        ),
        stages=_stages(plan, batch, _seconds(by_step.values())),
        devices=tuple(
            DeviceComparison(
                device=device,
                peak_bytes=PredictedMeasured(predicted=peak, measured=memory.get(device) or None),
                exact_bytes=(exact or {}).get(device),
            )
            for device, peak in zip(plan.devices, peaks, strict=True)
        ),
    )


def typical_step(events: Iterable[TraceEvent], steps: Collection[int] | None = None) -> int | None:
    """Return the step of median duration; of an even number of steps, the shorter one of the two in the middle.

    Args:
        events: The workers' events.
        steps: The steps to consider; ``None`` for all.
    """
    by_step: dict[int, list[TraceEvent]] = {}
    for event in events:
        if event.track == "compute" and (steps is None or event.step in steps):
            by_step.setdefault(event.step, []).append(event)
    order = sorted(by_step, key=lambda step: (_span_ns(by_step[step]), step))
    return order[(len(order) - 1) // 2] if order else None


def _span_ns(computed: Sequence[TraceEvent]) -> int:
    """Return the time from the first computation to the end of the last."""
    return max(event.end_ns for event in computed) - min(event.start_ns for event in computed)


def _seconds(steps: Iterable[Sequence[TraceEvent]]) -> dict[tuple[int, Action], float]:
    """Return each device's time for each action: the median over the steps of the sum over its parts."""
    found: dict[tuple[int, Action], list[float]] = {}
    for events in steps:
        sums: dict[tuple[int, Action], int] = {}
        for event in events:
            if event.action is not None:
                key = (event.worker, event.action)
                sums[key] = sums.get(key, 0) + event.end_ns - event.start_ns
        for key, taken_ns in sums.items():
            found.setdefault(key, []).append(taken_ns * 1e-9)
    return {key: median(values) for key, values in found.items()}


def _stages(plan: Plan, batch: int, seconds: Mapping[tuple[int, Action], float]) -> tuple[StageComparison, ...]:
    parts, routes = plan.micro_batches(batch), plan.routes(batch)
    rows = []
    for stage, (route, described) in enumerate(zip(routes, plan.stages, strict=True)):
        for place, devices in enumerate(described.replicas):
            own = [part for part, replica in zip(parts, route, strict=True) if replica == devices]
            if not own:
                continue
            samples = max(part.size for part in own)
            largest = [part for part in own if part.size == samples]
            expected = _expected(plan, batch, stage, place, samples, parts)
            measured = {kind: _measured(seconds, kind, stage, devices, largest) for kind in _KINDS}
            if measured["I"] is None and measured["B"] is None:
                measured["B"] = measured["W"]  # no gradient leaves the stage: the weight gradient is all
            split = measured["I"] is not None
            kinds: tuple[Kind, ...] = ("F", "I", "W") if split else ("F", "B")
            rows.append(
                StageComparison(
                    stage=stage,
                    devices=devices,
                    samples=samples,
                    seconds={
                        kind: PredictedMeasured(predicted=expected(kind), measured=measured[kind]) for kind in kinds
                    },
                )
            )
    return tuple(rows)


def _expected(
    plan: Plan, batch: int, stage: int, place: int, samples: int, parts: Sequence[MicroBatch]
) -> Callable[[Kind], float | None]:
    """Return a function from the kind of action to the predicted seconds of a replica's micro-batches of some
    samples."""
    predicted = plan.predicted
    if predicted is None or predicted.batch != batch:
        return lambda kind: None
    times = predicted.replicas_s[stage][place] if predicted.replicas_s else predicted.stages_s[stage]
    full = plan.micro_batch or max(part.size for part in parts)
    forward_s, input_s, weight_s = (seconds * samples / full for seconds in times)
    return {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s}.__getitem__


def _measured(
    seconds: Mapping[tuple[int, Action], float],
    kind: Kind,
    stage: int,
    devices: Sequence[int],
    parts: Sequence[MicroBatch],
) -> float | None:
    """Return the median over the micro-batches of the time of a replica's slowest device."""
    return _median(
        max(seconds[device, action] for device in devices if (device, action) in seconds)
        for action in (Action(kind, stage, part.index) for part in parts)
        if any((device, action) in seconds for device in devices)
    )


def _median(values: Iterable[float]) -> float | None:
    found = [value for value in values if math.isfinite(value)]
    return median(found) if found else None
