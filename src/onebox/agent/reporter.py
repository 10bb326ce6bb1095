"""Reports of events, of which others can cause few lines a minute. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

LogValue = str | int | float | None

REFUSALS = 5
"""Lines a minute of one kind and cause for what a client or a stranger can cause at will."""

DEALINGS = 300
"""The same for what follows from leases: a lease of 256 devices has a line for each worker started."""

CAUSES = 64
"""Kinds and causes with lines of their own in a minute; all others of a kind have one cause together."""

_OTHERS = "others"
_MINUTE_S = 60.0


class EventSink(Protocol):
    """Interface of an event sink, such as a journal's ``tell``."""

    def __call__(self, event: str, **fields: LogValue) -> None:
        """Record an event."""


@dataclass
class _Count:
    lines: int = 0
    untold: int = 0
    newest: dict[str, LogValue] = field(default_factory=dict)


class Reporter:
    """Reports events, and of those that others cause too often in a minute the newest one and how many they were.

    Args:
        tell: Sink of the lines.
    """

    def __init__(self, tell: EventSink) -> None:
        self._tell = tell
        self._minute = 0
        self._counts: dict[tuple[str, str], _Count] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __call__(self, event: str, **fields: LogValue) -> None:
        """Report an event of the agent itself, without a limit."""
        self._tell(event, **fields)

    def refusal(self, event: str, cause: str, now_s: float, **fields: LogValue) -> None:
        """Report an event that a client can cause at will.

        Args:
            event: Its name.
            cause: Its origin: a client, an address.
            now_s: The time.
            **fields: Its details.
        """
        self._count(event, cause, now_s, REFUSALS, fields)

    def dealing(self, event: str, cause: str, now_s: float, **fields: LogValue) -> None:
        """Report an event that follows from a lease; see :meth:`refusal`."""
        self._count(event, cause, now_s, DEALINGS, fields)

    def tick(self, now_s: float, *, last: bool = False) -> None:
        """Report what the last minute has left untold, once it is over, or because the agent ends."""
        minute = int(now_s // _MINUTE_S)
        if minute == self._minute and not last:
            return
        counts, self._counts, self._minute = self._counts, {}, minute
        for (event, _), count in counts.items():
            if count.untold:
                self._tell(event, **count.newest, **({"times": count.untold} if count.untold > 1 else {}))

    def _count(self, event: str, cause: str, now_s: float, most: int, fields: dict[str, LogValue]) -> None:
        self.tick(now_s)
        key = event, cause
        if key not in self._counts and len(self._counts) >= CAUSES:
            key = event, _OTHERS
        count = self._counts.setdefault(key, _Count())
        if count.lines < most:
            count.lines += 1
            self._tell(event, **fields)
        else:
            count.untold, count.newest = count.untold + 1, fields
