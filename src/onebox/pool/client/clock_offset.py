"""The offset of a worker's monotonic clock from the client's, by messages that are answered at once. Pure."""

from __future__ import annotations

from collections import deque

_WINDOW = 15
"""Answers that are compared: those of a minute, or of two while the worker is idle; clocks drift by less than a
millisecond in a minute."""

_FIRST, _EVERY = 8, 8
"""The clock is asked at so many heartbeats, two of which come in a second or one while the worker is idle, and then at
one of so many."""


class ClockOffset:
    """The offset of a clock, by the answer of the shortest round trip of a window.

    The other clock was read at some time between question and answer; taken as that of the middle, it is wrong by half
    of the round trip at most, and by as much as the ways there and back differ.

    Example:
        >>> offset = ClockOffset()
        >>> offset.answer(asked_ns=100, read_ns=5_000, now_ns=300)
        >>> offset.answer(asked_ns=1_000, read_ns=5_815, now_ns=1_030)
        >>> offset.offset_ns
        4800
    """

    def __init__(self) -> None:
        self._answers: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        self.offset_ns = 0
        """What is to be subtracted from a time of the other clock; 0 as long as nothing is known."""
        self._beats = 0

    def beat(self) -> bool:
        """Return whether the other clock is to be asked at this heartbeat."""
        self._beats += 1
        return self._beats <= _FIRST or self._beats % _EVERY == 0

    def answer(self, *, asked_ns: int, read_ns: int, now_ns: int) -> None:
        """Take an answer; one from before its question is ignored.

        Args:
            asked_ns: When it was asked, on the own clock.
            read_ns: The other clock.
            now_ns: The present time of the own clock.
        """
        if 0 <= asked_ns <= now_ns:
            self._answers.append((now_ns - asked_ns, read_ns - (asked_ns + now_ns) // 2))
            self.offset_ns = min(self._answers)[1]
