"""Search for the largest batch that fits, by interpolation between few exact answers. Pure.

Memory is linear in the number of samples as long as the peak is at the same operator, and steeper beyond a change of
operator: it is convex. So the line through one size that fits and one that does not leads to a size that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_TRIES = 14


@dataclass(frozen=True, kw_only=True)
class LargestFit:
    """Largest size that fits; each number was verified.

    Args:
        fits: The largest size known to fit; 0 if there is none.
        fails: The smallest size known not to fit; ``None`` if none was found up to the limit.
        tried: Number of sizes that were tried.
    """

    fits: int
    fails: int | None
    tried: int

    @property
    def exact(self) -> bool:
        """True if the next larger size is known not to fit."""
        return self.fails == self.fits + 1


def find_largest(excess: Callable[[int], float], start: int, most: int, *, tries: int = _TRIES) -> LargestFit:
    """Return the largest size whose memory fits.

    Args:
        excess: Returns the bytes by which a size exceeds the memory, at most 0 if it fits, and infinity if it cannot be
            tried.
        start: The size to begin with, at least 1.
        most: The largest size of interest, at least ``start``.
        tries: Most sizes to try.

    Example:
        >>> find_largest(lambda size: 10 * size - 123, 4, 1000)
        LargestFit(fits=12, fails=13, tried=4)
    """
    known: dict[int, float] = {start: excess(start)}
    while len(known) < tries:
        fitting = [size for size, over in known.items() if over <= 0]
        failing = [size for size, over in known.items() if over > 0]
        size = _next(known, max(fitting, default=0), min(failing, default=None), most)
        if size is None:
            break
        known[size] = excess(size)
    fits = max((size for size, over in known.items() if over <= 0), default=0)
    fails = min((size for size, over in known.items() if over > 0 and size > fits), default=None)
    return LargestFit(fits=fits, fails=fails, tried=len(known))


def _next(known: dict[int, float], fits: int, fails: int | None, most: int) -> int | None:
    """Return the next size to try; ``None`` if the search is complete."""
    if fails is None:
        if fits >= most:
            return None
        below = [size for size in known if size < fits]
        rate = (known[fits] - known[max(below)]) / (fits - max(below)) if below else 0.0
        ahead = -known[fits] / rate if rate > 0 else math.inf if below else fits
        return min(most, fits + max(1, int(min(ahead, most))))
    if fails - fits <= 1:
        return None
    first, last = known.get(fits), known[fails]
    if first is None:  # no size is known to fit: a line through two that do not, else half
        above = [size for size in known if size > fails and known[size] < math.inf]
        if last < math.inf and above:
            rate = (known[min(above)] - last) / (min(above) - fails)
            ahead = fails - last / rate if rate > 0 else 0.0
            return min(fails - 1, max(1, int(ahead)))
        return max(1, fails // 2)
    if last == math.inf:
        return (fits + fails) // 2
    root = fits + int(-first * (fails - fits) / (last - first))
    return min(fails - 1, max(fits + 1, root))
