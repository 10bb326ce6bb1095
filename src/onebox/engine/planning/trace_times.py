"""Times of segments from the traces of profiling runs. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from onebox.cost.model_profile import SegmentTimes
from onebox.engine.steps.results import TraceEvent

LEAST_S = 1e-7
"""Lower bound of a time, which must be positive."""

_UNDISTURBED = 0.25
"""Quantile of an action's times that counts as undisturbed: beside a load of one process a quarter of short actions
runs without an interruption."""


def durations_of(events: Iterable[TraceEvent], name: str, speed: float) -> list[float]:
    """Return the durations of the events of a name, at full speed."""
    return [event_s(event) * speed for event in events if event.name == name] or [0.0]


def event_s(event: TraceEvent) -> float:
    return (event.end_ns - event.start_ns) / 1e9


def low_quantile(seconds: Sequence[float]) -> float:
    """Return the quantile of times that counts as undisturbed."""
    ordered, place = sorted(seconds), _UNDISTURBED * (len(seconds) - 1)
    below = ordered[int(place)]
    return max(below + (place % 1) * (ordered[min(int(place) + 1, len(ordered) - 1)] - below), LEAST_S)


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Return the mean without the longest fifth, which other processes delayed."""
    kept = sorted(seconds)[: max(1, round(len(seconds) * 0.8))]
    return statistics.fmean(kept)


def _spans_ns(events: Iterable[TraceEvent]) -> dict[int, tuple[int, int]]:
    """Return start and end of each step."""
    spans: dict[int, tuple[int, int]] = {}
    for event in events:
        start, end = spans.get(event.step, (event.start_ns, event.end_ns))
        spans[event.step] = (min(start, event.start_ns), max(end, event.end_ns))
    return spans


def last_step_s(events: Iterable[TraceEvent]) -> float:
    """Return the seconds of the last step."""
    start_ns, end_ns = max(_spans_ns(events).items())[1]
    return (end_ns - start_ns) / 1e9


def gap_between_steps_s(events: Iterable[TraceEvent], visits: Sequence[range], first: int) -> float:
    """Return the median time between the end of a step and the start of the next, mainly the upload of a batch.

    Args:
        events: What a worker did.
        visits: Steps that followed one another without a pause.
        first: The first step before which it counts.
    """
    spans = _spans_ns(events)
    gaps = [
        (spans[step][0] - spans[step - 1][1]) / 1e9
        for steps in visits
        for step in steps[1:]
        if step >= first and {step, step - 1} <= spans.keys()
    ]
    return max(0.0, statistics.median(gaps)) if gaps else 0.0


def gap_between_actions_s(events: Iterable[TraceEvent]) -> float:
    """Return the median time between the end of an action and the start of the next."""
    actions = sorted((e for e in events if e.action is not None), key=lambda e: e.start_ns)
    gaps = [
        (later.start_ns - earlier.end_ns) / 1e9
        for earlier, later in itertools.pairwise(actions)
        if earlier.step == later.step
    ]
    return statistics.median(gaps) if gaps else 0.0


def median_of(times: Sequence[SegmentTimes]) -> SegmentTimes:
    """Return the medians over devices of one type."""
    return SegmentTimes(
        size=times[0].size,
        seconds=tuple(
            tuple(statistics.median(values) for values in zip(*segment, strict=True))
            for segment in zip(*(found.seconds for found in times), strict=True)
        ),
        update_s=statistics.median(found.update_s for found in times),
        call_s=statistics.median(found.call_s for found in times),
    )
