"""One running estimate: by what factor something takes longer than planned, and whether that has changed. Pure.

A cumulative sum of how far samples lie from what is believed tells a change from noise (Page 1954,
doi:10.1093/biomet/41.1-2.100); each sample counts for no more than a few standard deviations, so that a single outlier
tells nothing. Changes too small for it in one sample are told by the median of a long window. What is believed moves
only when one of the two speaks; so what is decided on it does not follow noise.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

NOISE = 0.2
"""Standard deviation, of logarithms, that is assumed before anything is known: 20 % of a time."""

_LEAST_NOISE = 0.04
"""Less is not believed: a change of a few parts in a hundred is worth no change of plan."""

_MEMORY = 32
"""Samples over which the noise is averaged, and of the long window."""

_SLACK, _ALARM, _CLIP = 1.75, 5.0, 3.5
"""In standard deviations: what each sample gives back to the sum, the sum that tells a change, and what a sample counts
at most. With them noise alone takes some ten million samples to tell one (exp(2 · 1.75 · 5), Siegmund 1985,
doi:10.1007/978-1-4757-1862-1, chapter 2); a change of more than five standard deviations is told by three samples."""

_CLEAR = _CLIP
"""In standard deviations: two samples in a row that are so far away on the same side, of the second one every single
part, tell a change. Of normal noise one sample in 4300 lies so far away on a side: two in a row do once in 18 million,
and hardly ever with all parts of one."""

_SURE = 6.0
"""Standard errors by which the median of the long window lies away from what is believed, for it to tell a change:
more than for normal samples, as those of even noise have medians that vary more."""

_MEDIAN_ERROR = 1.2533
"""Standard error of a median of normal samples, over that of their mean: the root of half of pi."""

YOUNG = 8
"""After a change, what is believed follows the median until there are so many samples."""

_OUTLIER = 2.0
"""A sample adds to the noise as one so many standard deviations away, at most."""

_UNKNOWN = (0.0, math.inf)
"""The least and the most factor of parts of which nobody knows."""

_VAGUE, _FAR, _WHOLE = range(3)
"""A sample is near to what is believed; it is far away; so are all its parts."""


class DriftDetector:
    """How much longer something takes than planned.

    Args:
        factor: What is believed to begin with.

    Attributes:
        since: The step from which on the factor is what it is; ``None`` where it never changed.
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
        """By what it takes longer than planned, as far as is believed."""
        return math.exp(self._believed)

    @property
    def alarmed(self) -> bool:
        """Whether the last samples may be the begin of a change."""
        return max(self._runs) > 1

    @property
    def doubted(self) -> bool:
        """Whether the last sample was so far from what is believed that another one like it would tell a change."""
        return max(self._clear) > _VAGUE

    def see(self, factor: float, step: int, parts: tuple[float, float] = _UNKNOWN) -> bool:
        """Take a sample.

        Args:
            factor: The time that was measured over the one that was planned, positive.
            step: The step that it is of.
            parts: The least and the most factor of any part of it, where the sample is a mean.

        Returns:
            Whether what is believed has changed, or has been made sure after a change.
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
        error = _MEDIAN_ERROR * noise / math.sqrt(len(self._samples))
        if len(self._samples) == _MEMORY and abs(middle - self._believed) > max(_LEAST_NOISE, _SURE * error):
            self._believed, self.since = middle, self._steps[0]
            return True
        return False

    def believe(self, factor: float, since: int | None = None) -> None:
        """Go by another factor from now on, and forget all samples."""
        self._believed = math.log(factor)
        self._samples.clear()
        self._steps.clear()
        self._sums, self._runs, self._clear = [0.0, 0.0], [0, 0], [_VAGUE, _VAGUE]
        self._young, self.since = False, since

    def _sum_up(self, away: float) -> int:
        """Add a sample to the sums of either side; return of how many samples one tells a change, or 0."""
        away = max(-_CLIP, min(_CLIP, away))
        for side, sign in enumerate((1.0, -1.0)):
            self._sums[side] = max(0.0, self._sums[side] + sign * away - _SLACK)
            self._runs[side] = self._runs[side] + 1 if self._sums[side] else 0
        return max(self._runs) if max(self._sums) > _ALARM else 0

    def _twice(self, sample: float, parts: tuple[float, float], far: float) -> int:
        """Note whether a sample is far away on either side, and all its parts; return how many tell a change, or 0."""
        told = 0
        for side, (sign, part) in enumerate(zip((1.0, -1.0), parts, strict=True)):
            before, now = self._clear[side], _VAGUE
            if sign * (sample - self._believed) > far:
                whole = part > 0 and sign * (math.log(part) - self._believed) > far
                now = _WHOLE if whole else _FAR
            self._clear[side] = now
            if before and now == _WHOLE:
                told = 2 if before == _WHOLE else 1  # of half a step, the factor is not known
        return told

    def _forget(self, run: int) -> None:
        """Keep the samples since a change alone."""
        while len(self._samples) > run:
            self._samples.popleft()
            self._steps.popleft()
        self._sums, self._runs, self._clear = [0.0, 0.0], [0, 0], [_VAGUE, _VAGUE]
        self.since = self._steps[0]
