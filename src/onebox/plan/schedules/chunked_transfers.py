"""Chunks: the number of parts in which a value is sent, so that the first travel while the rest is computed. Pure.

A value made in t seconds at the end of its program and transferred in x seconds arrives t + x after its computation
begins; sent in n equal parts, t / n + x / n + (n - 1) max(t, x) / n after it. This hides (n - 1) / n of the smaller of
the two, at the cost of n - 1 more calls.
"""

from __future__ import annotations

import math

CALL_S = 1e-4
"""Overhead of a program call on a worker and its device, beside the program's work (``benchmarks/pipeline.py``)."""

MOST = 8
"""Maximum number of parts: each further one would hide a fiftieth at most."""

WORTH = 2.0
"""Minimum ratio of the hidden time to its cost: predictions are no more precise."""


def hidden_s(tail_s: float, transfer_s: float, parts: int) -> float:
    """Return how much earlier a value arrives that is made and sent in parts.

    Args:
        tail_s: Seconds in which it is made.
        transfer_s: Seconds of its transfer.
        parts: Number of parts.
    """
    return (parts - 1) / parts * min(tail_s, transfer_s)


def best_parts(
    tail_s: float, transfer_s: float, *, each_s: float, once_s: float, most: int = MOST
) -> tuple[int, float]:
    """Return the best number of parts of a value, and the seconds gained.

    Args:
        tail_s: Seconds in which it is made, if at once.
        transfer_s: Seconds of its transfer.
        each_s: Cost of each part beyond the first.
        once_s: Fixed cost of sending in parts.
        most: Maximum number of parts.

    Returns:
        ``(1, 0.0)`` where parts do not pay.
    """
    shared_s, most = min(tail_s, transfer_s), min(most, MOST)
    near = math.sqrt(shared_s / max(each_s, 1e-12))  # where the derivative is zero
    tried = {min(most, max(1, math.floor(near))), min(most, max(1, math.floor(near) + 1))}
    gains = {parts: hidden_s(tail_s, transfer_s, parts) - (parts - 1) * each_s - once_s for parts in tried}
    best = max(sorted(gains), key=gains.__getitem__)
    cost_s = (best - 1) * each_s + once_s
    if best < 2 or hidden_s(tail_s, transfer_s, best) <= WORTH * cost_s:
        return 1, 0.0
    return best, gains[best]
