"""Apportionment of a batch to devices. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.errors import UsageError

ALIKE = 1.15
"""Factor of speeds within which devices get equal shares: the noise of a short measurement."""


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Apportion whole units in proportion to weights, by largest remainders.

    Args:
        total: Units, such as samples or micro-batches.
        weights: One for each receiver; not negative, not all zero.

    Returns:
        Units of each receiver; they add up to ``total``, and equal inputs give equal results.

    Raises:
        UsageError: A weight is negative or not finite, or all are zero.

    Example:
        >>> apportion(10, [2.0, 1.0])
        [7, 3]
    """
    if not weights or any(not 0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise UsageError(f"shares {list(weights)}: allowed are finite numbers from 0 up, not all 0")
    largest = max(weights)
    parts = [weight / largest for weight in weights]  # avoids overflow of sums and products
    exact = [total * part / sum(parts) for part in parts]
    units = [int(unit) for unit in exact]
    order = sorted(range(len(weights)), key=lambda index: (units[index] - exact[index], index))
    for index in order[: total - sum(units)]:
        units[index] += 1
    return units


def shares_from_speeds(speeds: Sequence[float]) -> list[float]:
    """Convert measured speeds to shares that add up to 1; similar speeds count as equal.

    Args:
        speeds: Samples per second of each device, positive.
    """
    if max(speeds) < ALIKE * min(speeds):
        return [1 / len(speeds)] * len(speeds)
    return [speed / sum(speeds) for speed in speeds]


def deal(count: int, weights: Sequence[float]) -> list[int]:
    """Assign units one by one to receivers, so that at any time each has about its part.

    Args:
        count: Units.
        weights: One for each receiver, as for :func:`apportion`.

    Returns:
        The receiver of each unit; in all, each receives what :func:`apportion` says.

    Example:
        >>> deal(6, [2.0, 1.0])
        [0, 1, 0, 0, 1, 0]
    """
    units = apportion(count, weights)
    due = [(position + 0.5) / unit for unit in units for position in range(unit)]
    owner = [receiver for receiver, unit in enumerate(units) for _ in range(unit)]
    return [owner[index] for index in sorted(range(count), key=lambda index: (due[index], owner[index]))]
