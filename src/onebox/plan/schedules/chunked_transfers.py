"""Chunks: in how many parts a value leaves, of which the first travels while the rest is computed. Pure.

Of a value that is made in t seconds, at the end of its program, and travels for x, in n equal parts the last arrives
t / n + x / n + (n - 1) max(t, x) / n after its making began, rather than t + x. So (n - 1) / n of the lesser of both is
hidden, for what n - 1 more calls cost.
"""

from __future__ import annotations

import math

CALL_S = 1e-4
"""What a call of a program costs a worker and its device beside the program's work (``benchmarks/pipeline.py``)."""

MOST = 8
"""No value is sent in more parts: each further one would hide a fiftieth at most."""

WORTH = 2.0
"""What is hidden has to be so many times what that costs: predictions are no better."""


def hidden_s(tail_s: float, transfer_s: float, parts: int) -> float:
    """Return how much earlier a value arrives that is made and sent in parts.

    Args:
        tail_s: Seconds in which it is made.
        transfer_s: Seconds in which it travels.
        parts: How many.
    """
    return (parts - 1) / parts * min(tail_s, transfer_s)


def best_parts(
    tail_s: float, transfer_s: float, *, each_s: float, once_s: float, most: int = MOST
) -> tuple[int, float]:
    """Return in how many parts a value is best made and sent, and the seconds that are gained.

    Args:
        tail_s: Seconds in which it is made, if at once.
        transfer_s: Seconds in which it travels.
        each_s: What each part costs beyond the first.
        once_s: What it costs to have parts at all.
        most: At most so many.

    Returns:
        1 and nothing where it does not pay.
    """
    shared_s, most = min(tail_s, transfer_s), min(most, MOST)
    near = math.sqrt(shared_s / max(each_s, 1e-12))  # where the derivative is nothing
    tried = {min(most, max(1, math.floor(near))), min(most, max(1, math.floor(near) + 1))}
    gains = {parts: hidden_s(tail_s, transfer_s, parts) - (parts - 1) * each_s - once_s for parts in tried}
    best = max(sorted(gains), key=gains.__getitem__)
    cost_s = (best - 1) * each_s + once_s
    if best < 2 or hidden_s(tail_s, transfer_s, best) <= WORTH * cost_s:
        return 1, 0.0
    return best, gains[best]
