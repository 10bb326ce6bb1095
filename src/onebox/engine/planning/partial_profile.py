"""Profiles that a time limit cuts short: the limit, and estimates in the place of times that were not measured.

An estimate is a roofline's (see :mod:`onebox.cost.estimate`) times the ratio of measured to estimated times of what is
most like it: the same action of the segment at another size, else actions whose slowest operator is the same, else all.
Pure, but for the clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from onebox.cost.model_profile import SegmentTimes
from onebox.engine.planning.trace_times import LEAST_S
from onebox.engine.problem.estimate import EstimatedTimes

PROFILING_S = 5.0
"""Seconds for which a run that plans by itself measures its model. With at most 5 s of search, 1 s for devices and
links, and about 3 s of upload and installation, its training begins within 15 s, not counting captures."""

NOT_MEASURED = math.nan
"""The time of what was not measured, before it is completed."""


class TimeLimit:
    """A time until which something may be begun.

    Args:
        seconds: Seconds from now on; infinity for no limit.
        clock: The time in seconds.

    Example:
        >>> TimeLimit(0.0).over, TimeLimit().over
        (True, False)
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds

    @property
    def bounded(self) -> bool:
        """True if there is a limit."""
        return self._end_s < math.inf

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative afterwards."""
        return self._end_s - self._clock()

    @property
    def over(self) -> bool:
        """True once the time has passed."""
        return self.left_s <= 0

    def share(self, parts: int) -> TimeLimit:
        """Return a limit of an equal part of the seconds that are left."""
        return TimeLimit(max(0.0, self.left_s) / parts, self._clock)


def not_measured(size: int, segments: int) -> SegmentTimes:
    """Return the times of a size of which nothing was measured."""
    nothing = (NOT_MEASURED, NOT_MEASURED, NOT_MEASURED)
    return SegmentTimes(size=size, seconds=(nothing,) * segments, update_s=NOT_MEASURED, call_s=NOT_MEASURED)


def all_actions(times: SegmentTimes) -> bool:
    """Return whether all actions of all segments were measured."""
    return not any(math.isnan(seconds) for each in times.seconds for seconds in each)


def is_whole(times: SegmentTimes) -> bool:
    """Return whether everything was measured."""
    return all_actions(times) and not math.isnan(times.update_s) and not math.isnan(times.call_s)


@dataclass(frozen=True)
class _Ratio:
    """Measured over estimated seconds of an action."""

    size: int
    segment: int
    place: int
    operator: str
    value: float


def completed(found: Sequence[SegmentTimes], estimates: Mapping[int, EstimatedTimes]) -> tuple[SegmentTimes, ...]:
    """Return times in which estimates stand for what was not measured; what was measured is left as it is.

    Args:
        found: Times of one type of device, one for each size.
        estimates: By size.
    """
    ratios = [
        _Ratio(times.size, segment, place, estimate.operators[segment][place], seconds / guess)
        for times in found
        for estimate in [estimates[times.size]]
        for segment, pair in enumerate(zip(times.seconds, estimate.times.seconds, strict=True))
        for place, (seconds, guess) in enumerate(zip(*pair, strict=True))
        if guess > 0 and not math.isnan(seconds)
    ]
    return tuple(times if is_whole(times) else _filled(times, estimates[times.size], ratios, found) for times in found)


def _filled(
    times: SegmentTimes, estimate: EstimatedTimes, ratios: Sequence[_Ratio], found: Sequence[SegmentTimes]
) -> SegmentTimes:
    """Return the times of one size without gaps."""

    def filled(segment: int, place: int) -> float:
        known, guess = times.seconds[segment][place], estimate.times.seconds[segment][place]
        if not math.isnan(known):
            return known
        return max(LEAST_S, guess * _ratio(ratios, times.size, segment, place, estimate.operators[segment][place]))

    seconds = tuple((filled(n, 0), filled(n, 1), filled(n, 2)) for n in range(len(times.seconds)))
    parts = [
        (filled_s, not math.isnan(known_s))
        for each in zip(seconds, times.seconds, estimate.times.seconds, strict=True)
        for filled_s, known_s, guess_s in zip(*each, strict=True)
        if guess_s > 0
    ]
    updates = [own.update_s for own in found if not math.isnan(own.update_s)]
    calls = [own.call_s for own in found if not math.isnan(own.call_s)]
    overall = statistics.median([ratio.value for ratio in ratios] or [1.0])
    return replace(
        times,
        seconds=seconds,
        update_s=_known(times.update_s, updates, estimate.times.update_s * overall),  # the same for all sizes
        call_s=_known(times.call_s, calls, estimate.times.call_s),
        measured=math.fsum(s for s, known in parts if known) / (math.fsum(s for s, _ in parts) or 1.0),
    )


def _ratio(ratios: Sequence[_Ratio], size: int, segment: int, place: int, operator: str) -> float:
    """Return the ratio of what is most like an action; 1 if nothing was measured."""
    own = [each for each in ratios if (each.segment, each.place) == (segment, place)]
    if own:
        return min(own, key=lambda each: abs(math.log(each.size / size))).value
    like: tuple[Callable[[_Ratio], bool], ...] = (
        lambda each: each.operator == operator and each.size == size,
        lambda each: each.operator == operator,
        lambda each: each.size == size,
        lambda each: True,
    )
    for is_like in like:
        values = [each.value for each in ratios if is_like(each)]
        if values:
            return statistics.median(values)
    return 1.0


def _known(own: float, others: Sequence[float], guess: float) -> float:
    """Return a time of this size, of others, or its estimate."""
    return own if not math.isnan(own) else statistics.median(others) if others else guess


def profile_line(measured: float, took_s: float | None = None) -> str:
    """Return a line that says how much of a profile was measured.

    Args:
        measured: The part of its times that was measured.
        took_s: The seconds that it took, if known.

    Example:
        >>> profile_line(0.606, 6.2)
        'profile: 60 % measured in 6 s; the rest is estimated'
    """
    within = "" if took_s is None else f" in {took_s:.0f} s"
    rest = "; the rest is estimated" if measured < 1 else ", some of it only once"
    return f"profile: {math.floor(100 * measured)} % measured{within}{rest}"
