"""Rate limit of log lines: a few for each kind and cause, a limit for all, and a count of the rest.

Pure: the time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

LogValue = str | int | float | None

CAUSES = 1024
"""The most causes that are tracked; the one that has been quiet for the longest is dropped first."""

_REFUSALS = 5.0, 10.0
"""For one kind and cause: a burst of lines, then one in so many seconds. A client can cause these events at will."""

_DEALINGS = 300.0, 1.0
"""The same for events that follow from leases: a lease of 256 devices has a line for each worker started."""

_ALL_AT_ONCE = 10.0
"""The factor of both limits for all causes together."""


class EventSink(Protocol):
    """Interface of an event sink, such as a journal's ``tell``."""

    def __call__(self, event: str, **fields: LogValue) -> None:
        """Record an event."""


class TokenBucket:
    """A token bucket: a burst, then one token in every interval. Pure.

    Args:
        burst: Capacity in tokens.
        every_s: Seconds per token.
        now_s: The time.
    """

    def __init__(self, burst: float, every_s: float, now_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._tokens = burst
        self._at_s = now_s

    def allows(self, now_s: float) -> bool:
        """Return whether a token is available, and take it if so."""
        self._fill(now_s)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def full(self, now_s: float) -> bool:
        """Return whether the bucket is full."""
        self._fill(now_s)
        return self._tokens >= self._burst

    def _fill(self, now_s: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._at_s) / self._every_s)
        self._at_s = now_s


@dataclass
class _Cause:
    rate: TokenBucket
    unreported: int = 0
    fields: dict[str, LogValue] = field(default_factory=dict)


class LogRateLimiter:
    """Decides which events get a line. Suppressed ones are counted, and reported with the next line of their cause.

    Args:
        burst: Burst of lines of one kind and cause.
        every_s: Seconds until another line.
    """

    def __init__(self, burst: float = _REFUSALS[0], every_s: float = _REFUSALS[1]) -> None:
        self._burst = burst
        self._every_s = every_s
        self._known: OrderedDict[tuple[str, str], _Cause] = OrderedDict()
        self._all: TokenBucket | None = None

    def __len__(self) -> int:
        return len(self._known)

    def happened(self, event: str, cause: str, now_s: float, **fields: LogValue) -> int:
        """Count an event; return the number of events that a line now stands for, 0 for no line.

        Args:
            event: Name of the event.
            cause: Its origin: a client, an address.
            now_s: The time.
            **fields: Its details.
        """
        who = self._known.setdefault((event, cause), _Cause(TokenBucket(self._burst, self._every_s, now_s)))
        self._known.move_to_end((event, cause))
        if len(self._known) > CAUSES:
            self._known.popitem(last=False)
        who.unreported += 1
        who.fields = fields
        return self._take_count(who, now_s)

    def overdue(self, now_s: float, *, last: bool = False) -> list[tuple[str, dict[str, LogValue], int]]:
        """Return the suppressed events that may be reported now: the newest of each cause, with their number.

        Args:
            now_s: The time.
            last: Whether to return all that is left, because the agent ends.
        """
        found: list[tuple[str, dict[str, LogValue], int]] = []
        for (event, _), who in self._known.items():
            unreported = who.unreported
            if unreported and (last or self._take_count(who, now_s)):
                found.append((event, who.fields, unreported))
                who.unreported = 0
        return found

    def _take_count(self, who: _Cause, now_s: float) -> int:
        if self._all is None:
            self._all = TokenBucket(_ALL_AT_ONCE * self._burst, self._every_s / _ALL_AT_ONCE, now_s)
        if not who.rate.allows(now_s) or not self._all.allows(now_s):
            return 0
        count, who.unreported = who.unreported, 0
        return count


class Reporter:
    """Reports events, with a limit on the number of lines that others can cause.

    Args:
        tell: Sink of the lines.
    """

    def __init__(self, tell: EventSink) -> None:
        self._record = tell
        self._refusals, self._dealings = LogRateLimiter(), LogRateLimiter(*_DEALINGS)

    def __call__(self, event: str, **fields: LogValue) -> None:
        """Report an event of the agent itself, without a limit."""
        self._record(event, **fields)

    def refusal(self, event: str, cause: str, now_s: float, **fields: LogValue) -> None:
        """Report an event that a client can cause at will; see :meth:`LogRateLimiter.happened`."""
        self._pass_on(event, self._refusals.happened(event, cause, now_s, **fields), fields)

    def dealing(self, event: str, cause: str, now_s: float, **fields: LogValue) -> None:
        """Report an event that follows from a lease; see :meth:`LogRateLimiter.happened`."""
        self._pass_on(event, self._dealings.happened(event, cause, now_s, **fields), fields)

    def tick(self, now_s: float, *, last: bool = False) -> None:
        """Report suppressed events; see :meth:`LogRateLimiter.overdue`."""
        for quiet in (self._refusals, self._dealings):
            for event, fields, times in quiet.overdue(now_s, last=last):
                self._pass_on(event, times, fields)

    def _pass_on(self, event: str, times: int, fields: dict[str, LogValue]) -> None:
        if times:
            self._record(event, **fields, **({"times": times} if times > 1 else {}))
