"""Distribution of a machine's slowdown, from slices of measured steps. Pure.

How much steps spread depends on their length: in a short one another program runs all the time or not at all, over a
long one that averages out. So slices are also evaluated in parts, as steps that take less time than a slice.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from onebox.cost.model_profile import SegmentTimes, Slowdown, SlowdownWindow

FEWEST_SLICES = 8
"""Slices from which the quantiles of a machine's slowdown are known; with fewer there are only medians."""

_PARTS = (8, 4, 2, 1)
"""Numbers of parts of a slice for which there are quantiles."""

_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class SliceSlowdown:
    """Slowdown of the slowest device over a slice, as steps end with that.

    Args:
        seconds: Seconds that the slice took.
        parts: By number of equal parts, the slowdown of each part in which a device worked.
    """

    seconds: float
    parts: Mapping[int, tuple[float, ...]]

    @property
    def whole(self) -> float:
        """Slowdown of the whole slice."""
        return self.parts[1][0]


def slice_slowdown(devices: Sequence[Sequence[tuple[float, float]]]) -> SliceSlowdown:
    """Return the slowdown of a slice.

    Args:
        devices: For each device, the actions of the slice in the order of time: seconds, and undisturbed seconds.

    Example:
        >>> slice_slowdown([[(1.0, 1.0), (3.0, 1.0)], [(1.5, 1.0), (1.5, 1.0)]]).parts[2]
        (1.5, 3.0)
    """
    parts = {count: [_in_parts(actions, count) for actions in devices] for count in _PARTS}
    return SliceSlowdown(
        seconds=max(sum(seconds for seconds, _ in actions) for actions in devices),
        parts={
            count: tuple(max(found) for one in zip(*each, strict=True) if (found := [s for s in one if s is not None]))
            for count, each in parts.items()
        },
    )


def _in_parts(actions: Sequence[tuple[float, float]], count: int) -> list[float | None]:
    """Return the slowdown of parts with equal undisturbed times; ``None`` for a part most of which is in a long action
    of another one."""
    taken, least = [0.0] * count, [0.0] * count
    whole_s, done_s = max(sum(least_s for _, least_s in actions), _LEAST_S), 0.0
    for seconds, least_s in actions:
        part = min(int(count * (done_s + least_s / 2) / whole_s), count - 1)
        taken[part] += seconds
        least[part] += least_s
        done_s += least_s
    enough_s = 0.0 if count == 1 else whole_s / count / 2
    return [own_s / least_s if least_s > enough_s else None for own_s, least_s in zip(taken, least, strict=True)]


def at_median(undisturbed: SegmentTimes, slices: Sequence[SliceSlowdown]) -> SegmentTimes:
    """Return the times of segments at the median slowdown of a machine.

    Args:
        undisturbed: The times without other programs.
        slices: The slices of a type of device.
    """
    slowdowns = [one.whole for one in slices]
    median = statistics.median(slowdowns)
    seconds = tuple(
        (forward * median, inputs * median, weights * median) for forward, inputs, weights in undisturbed.seconds
    )
    if len(slowdowns) < FEWEST_SLICES:
        return replace(undisturbed, seconds=seconds)
    slice_s = max(statistics.median(one.seconds for one in slices), _LEAST_S)
    windows = []
    for count in _PARTS:
        known = [slowdown for one in slices for slowdown in one.parts[count]]
        if len(known) >= FEWEST_SLICES:
            low, high = _bounds(known, median)
            windows.append(SlowdownWindow(seconds=slice_s / count, low=low, high=high))
    slowdown = Slowdown(
        low=windows[-1].low, median=median, high=windows[-1].high, slices=len(slowdowns), windows=tuple(windows)
    )
    return replace(undisturbed, seconds=seconds, slowdown=slowdown)


def _bounds(slowdowns: Sequence[float], median: float) -> tuple[float, float]:
    """Return the 10th and the 90th percentile, around the median of whole slices."""
    cuts = statistics.quantiles(slowdowns, n=10, method="inclusive")
    return max(min(cuts[0], median), _LEAST_S), max(cuts[-1], median)  # equal slowdowns differ by rounding
