"""Fit of a link to the times of a few messages, and the choice of their sizes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

CEILING_BPS = 1e15
"""Maximum bandwidth, for links without a visible limit, such as those between devices that compute nothing. A number,
because JSON has no infinity."""

SMALLEST_BYTES = 4
_SECOND_BYTES = 16 << 10
LARGEST_BYTES = 8 << 20

_ENOUGH_S = 0.003
"""Seconds beyond the smallest message's time from which a message determines the bandwidth: clocks and wake-ups err by
some 10 µs."""

_WAYS, _LONGEST_S = 6, 0.5
"""Multiple of the smallest message's time that a longer one must take beyond it, and its limit in seconds: while a
connection's window opens, a message takes a few round trips rather than the time for its bytes."""

_BUDGET_S = 0.005
"""Seconds for the repeats of one size in one direction."""

LEAST_REPEATS, _MOST_REPEATS = 2, 16

_MOST_GROWTH = 32
"""Maximum ratio of consecutive sizes: the one before may have passed in a burst, and the resulting overestimate would
fill a slow link for minutes."""

_PROBE_BYTES, _PROBE_S = 4 << 10, 0.04
"""Bytes of the first message of a probe after the smallest, and the seconds beyond the smallest message's time that end
it on a link without much latency."""

_BURST_BYTES, _BURST_GROWTH, _PROBE_GROWTH = 64 << 10, 1.3, 4
"""Bytes that a link may pass at once, the ratio of consecutive sizes up to these, and beyond: at 1 Mbit/s and more a
probe in one direction takes less than 0.4 s, also behind a burst, and less than 60 latencies on a long way."""

_BEHIND_BURST_S = 0.01
"""Seconds that the message before the last of a probe takes: it has used up the burst, and the last shows the rate."""

_CHANGED = 1.5
"""Ratio of a link's times, then and now, from which it counts as changed."""

_ALIKE = 1.3
"""Ratio of a link's two directions above which they are measured again."""


def fit_link(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return latency, in seconds, and bandwidth, in bytes per second: the line through the smallest and the largest.

    Sizes in between are ignored: many a link, a shaped one or one behind a buffer, passes a burst at once that does not
    show its rate for large messages. A fit to all of them would promise a multiple of it.

    Args:
        seconds: Times in one direction, by the bytes of the message.

    Raises:
        ValueError: There are none, or one is not positive and finite.
    """
    if not seconds or not all(size >= 0 and 0 < taken < math.inf for size, taken in seconds.items()):
        raise ValueError(f"times of messages {dict(seconds)}: at least one, of 0 bytes or more and a positive time")
    smallest, largest = min(seconds), max(seconds)
    longer_s = seconds[largest] - seconds[smallest]
    if longer_s * CEILING_BPS <= largest - smallest:
        return seconds[smallest], CEILING_BPS
    bandwidth = (largest - smallest) / longer_s
    latency = seconds[smallest] - smallest / bandwidth
    return (latency, bandwidth) if latency >= 0 else (0.0, largest / seconds[largest])


def next_size(seconds: Mapping[int, float], most_bytes: int = LARGEST_BYTES) -> int | None:
    """Return the size of the next message to time, or ``None`` where there are enough.

    Sizes grow until a message takes well longer than the smallest, so that slow links are not filled for long, and
    messages on fast ones are long enough for the clock.

    Args:
        seconds: Times in one direction, by the bytes of the message, at least of the smallest.
        most_bytes: The largest message that there is room for.
    """
    smallest, largest = min(seconds), max(seconds)
    if largest == smallest:
        return _whole(min(_SECOND_BYTES, most_bytes), above=largest)
    enough_s = long_enough_s(seconds[smallest], _ENOUGH_S)
    if seconds[largest] - seconds[smallest] >= enough_s:
        return None
    per_byte = max(seconds[largest] - seconds[smallest], 1e-9) / (largest - smallest)
    wanted = min(max(2.0 * largest, 2 * enough_s / per_byte), float(_MOST_GROWTH * largest))
    return _whole(int(min(wanted, LARGEST_BYTES, most_bytes)), above=largest)


def next_probe_size(seconds: Mapping[int, float], most_bytes: int = LARGEST_BYTES) -> int | None:
    """Return the size of a probe's next message, or ``None`` where there are enough; sizes are chosen by time.

    Args:
        seconds: Times in one direction, by the bytes of the message, at least of the smallest.
        most_bytes: The largest message that there is room for.
    """
    sizes = sorted(seconds)
    smallest, largest = sizes[0], sizes[-1]
    longer_s = [seconds[size] - seconds[smallest] for size in sizes]
    if longer_s[-1] >= long_enough_s(seconds[smallest], _PROBE_S) and longer_s[-2] >= _BEHIND_BURST_S:
        return None
    growth = _BURST_GROWTH if largest < _BURST_BYTES else _PROBE_GROWTH
    wanted = _PROBE_BYTES if largest == smallest else int(growth * largest)
    return _whole(min(wanted, LARGEST_BYTES, most_bytes), above=largest)


def long_enough_s(latency_s: float, least_s: float) -> float:
    """Return how long a message must be under way, beyond its latency, to show the rate of a link.

    Args:
        latency_s: Seconds that the smallest message takes, one way.
        least_s: Seconds on a link without latency.
    """
    return max(least_s, min(_WAYS * latency_s, _LONGEST_S))


def has_changed(before: tuple[float, float], now: tuple[float, float]) -> bool:
    """Return whether a link has clearly become slower or faster, for a message of 64 KiB or for a long one.

    Args:
        before: Latency and bandwidth.
        now: Likewise.
    """
    pairs = [sorted((_seconds(before, size), _seconds(now, size))) for size in (64 << 10, LARGEST_BYTES)]
    return any(longer > _CHANGED * shorter for shorter, longer in pairs)


def repeats(expected_s: float) -> int:
    """Return the number of repeats of a message with an expected round-trip time."""
    return max(LEAST_REPEATS, min(_MOST_REPEATS, int(_BUDGET_S / max(expected_s, 1e-9))))


def is_doubtful(link: tuple[float, float], way_back: tuple[float, float]) -> bool:
    """Return whether a link should be measured again, because the opposite direction is much faster.

    Wires are mostly alike in both directions, and disturbances only make a measurement slower.

    Args:
        link: Latency and bandwidth.
        way_back: Of the opposite direction.
    """
    return any(_seconds(link, size) > _ALIKE * _seconds(way_back, size) for size in (0, LARGEST_BYTES))


def _seconds(link: tuple[float, float], size: int) -> float:
    return link[0] + size / link[1]


def _whole(size: int, *, above: int) -> int | None:
    """Return a size as whole float32 elements, if it is larger than another one."""
    size -= size % SMALLEST_BYTES
    return size if size > above else None
