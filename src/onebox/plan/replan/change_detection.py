"""One running estimate: the factor by which a time exceeds the plan, with detection of its changes. Pure.

A cumulative sum of the samples' deviations from the estimate tells a change from noise (Page 1954,
doi:10.1093/biomet/41.1-2.100); each sample is clipped to a few standard deviations, so that a single outlier is no
change. Changes too small for it in one sample are detected by the median of a long window. The estimate moves only at a
detection, so decisions based on it do not follow noise.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

AGAIN = 1.12
"""Factor within which an estimate is reported as planned."""

NOISE = 0.2
"""Initial standard deviation, of logarithms: 20 % of a time."""

_LEAST_NOISE = 0.04
"""Smallest change that is detected: a few per cent are not worth a change of plan."""

_MEMORY = 32
"""Samples over which the noise is averaged, and of the long window."""

_SLACK, _ALARM, _CLIP = 1.75, 5.0, 3.5
"""In standard deviations: the drift subtracted from the sum per sample, the threshold of the sum, and the clipping of a
sample. Noise alone exceeds the threshold once in some ten million samples (exp(2 · 1.75 · 5), Siegmund 1985,
doi:10.1007/978-1-4757-1862-1, chapter 2); a change of more than five standard deviations does after three samples."""

_CLEAR = _CLIP
"""In standard deviations: two consecutive samples this far away on the same side, the second one with each of its
parts, indicate a change. Of normal noise one sample in 4300 lies so far away on a side: two in a row do once in 18
million, and hardly ever with all parts of one."""

_SURE = 6.0
"""Standard errors between the median of the long window and the estimate that indicate a change: more than for normal
samples, since medians of even noise vary more."""

MEDIAN_ERROR = 1.2533
"""Standard error of a median of normal samples, over that of their mean: the square root of pi / 2."""

YOUNG = 8
"""Number of samples after a change during which the estimate follows the median."""

_OUTLIER = 2.0
"""Clipping, in standard deviations, of a sample's contribution to the noise."""

_UNKNOWN = (0.0, math.inf)
"""Least and most factor of unknown parts."""

_VAGUE, _FAR, _WHOLE = range(3)
"""Distance of a sample from the estimate: near; far; far with all its parts."""


class DriftDetector:
    """A running estimate of the factor by which a time exceeds the planned one.

    Args:
        factor: The initial estimate.

    Attributes:
        since: The step since which the factor holds; ``None`` before the first change.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self._believed = math.log(factor)
        self._samples: deque[float] = deque(maxlen=_MEMORY)
        self._steps: deque[int] = deque(maxlen=_MEMORY)
        self._variance = NOISE**2
        self._sums = [0.0, 0.0]
        self._runs = [0, 0]
        self._clear = [_VAGUE, _VAGUE]
        self._young = False
        self.since: int | None = None

    @property
    def factor(self) -> float:
        """The estimated ratio of the actual time to the planned one."""
        return math.exp(self._believed)

    @property
    def alarmed(self) -> bool:
        """Return whether the last samples may be the beginning of a change."""
        return max(self._runs) > 1

    @property
    def doubted(self) -> bool:
        """Return whether one more sample like the last would indicate a change."""
        return max(self._clear) > _VAGUE

    def see(self, factor: float, step: int, parts: tuple[float, float] = _UNKNOWN) -> bool:
        """Process a sample.

        Args:
            factor: The measured time over the planned one, positive.
            step: The step of the sample.
            parts: The least and the most factor of any part of it, where the sample is a mean.

        Returns:
            Whether the estimate has changed, or has become certain after a change.
        """
        sample = math.log(factor)
        noise = max(_LEAST_NOISE, math.sqrt(self._variance))
        run = self._sum_up((sample - self._believed) / noise)
        run = self._twice(sample, parts, _CLEAR * noise) or run
        changed = run > 0
        self._samples.append(sample)
        self._steps.append(step)
        if changed:
            self._forget(run)
        middle = median(self._samples)
        if not changed:
            away = min(abs(sample - middle), _OUTLIER * noise)
            self._variance += (away**2 - self._variance) / _MEMORY
        if changed or self._young:
            self._believed = middle
            made_sure = not changed and len(self._samples) == YOUNG
            self._young = not made_sure
            return changed or made_sure
        error = MEDIAN_ERROR * noise / math.sqrt(len(self._samples))
        if len(self._samples) == _MEMORY and abs(middle - self._believed) > max(_LEAST_NOISE, _SURE * error):
            self._believed, self.since = middle, self._steps[0]
            return True
        return False

    def believe(self, factor: float, since: int | None = None) -> None:
        """Set the estimate, and discard all samples."""
        self._believed = math.log(factor)
        self._samples.clear()
        self._steps.clear()
        self._sums, self._runs, self._clear = [0.0, 0.0], [0, 0], [_VAGUE, _VAGUE]
        self._young, self.since = False, since

    def _sum_up(self, away: float) -> int:
        """Add a sample to the sums of both sides; return the number of samples since a detected change, or 0."""
        away = max(-_CLIP, min(_CLIP, away))
        for side, sign in enumerate((1.0, -1.0)):
            self._sums[side] = max(0.0, self._sums[side] + sign * away - _SLACK)
            self._runs[side] = self._runs[side] + 1 if self._sums[side] else 0
        return max(self._runs) if max(self._sums) > _ALARM else 0

    def _twice(self, sample: float, parts: tuple[float, float], far: float) -> int:
        """Record whether a sample is far away on a side; return the number of samples since a detected change, or 0."""
        told = 0
        for side, (sign, part) in enumerate(zip((1.0, -1.0), parts, strict=True)):
            before, now = self._clear[side], _VAGUE
            if sign * (sample - self._believed) > far:
                whole = part > 0 and sign * (math.log(part) - self._believed) > far
                now = _WHOLE if whole else _FAR
            self._clear[side] = now
            if before and now == _WHOLE:
                told = 2 if before == _WHOLE else 1  # the factor of half a step is unknown
        return told

    def _forget(self, run: int) -> None:
        """Keep only the samples since a change."""
        while len(self._samples) > run:
            self._samples.popleft()
            self._steps.popleft()
        self._sums, self._runs, self._clear = [0.0, 0.0], [0, 0], [_VAGUE, _VAGUE]
        self.since = self._steps[0]


class RateChange(NamedTuple):
    """A change of an estimate.

    Args:
        what: A readable name of its object.
        devices: The devices concerned.
        factor: The ratio to the planned time.
        since: The step since which it holds.
        by: The ratio to the previous estimate.
        hoped: Whether it is assumed without a measurement.
        rate: Readable rate of a link between hosts, which no plan changes; empty for others.
    """

    what: str
    devices: tuple[int, ...]
    factor: float
    since: int
    by: float
    hoped: bool = False
    rate: str = ""

    @property
    def text(self) -> str:
        """A readable description."""
        if self.hoped:
            return f"{self.what}, which was slow, has not been used for long and is tried again"
        if self.rate:
            factor = self.factor if self.factor >= 1 else 1 / self.factor
            compared = f"{factor:.1f} × {'less' if self.factor >= 1 else 'more'} than" if self.differs else "as"
            return f"{self.what} carries {self.rate} since step {self.since}, {compared} planned"
        if not self.differs:
            return f"{self.what} takes as long as planned since step {self.since}"
        times = f"{self.factor:.1f} × as long" if self.factor >= 1 else f"{1 / self.factor:.1f} × less time"
        return f"{self.what} takes {times} {'as' if self.factor >= 1 else 'than'} planned since step {self.since}"

    @property
    def differs(self) -> bool:
        """Return whether the estimate differs from the plan."""
        return not 1 / AGAIN < self.factor < AGAIN

    @property
    def plain(self) -> bool:
        """Return whether it is more than a refinement of an earlier change."""
        return not 1 / AGAIN < self.by < AGAIN

    def touches(self, devices: frozenset[int]) -> bool:
        """Return whether it concerns any of some devices, or a link of one."""
        return not devices.isdisjoint(self.devices)
