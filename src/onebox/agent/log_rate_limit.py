"""Which of many like events get a line: a few of each kind and cause, not too many of all, the rest by their number.

Pure: the time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

LogValue = str | int | float | None

CAUSES = 1024
"""The most causes whose events are counted; the one that has been quiet for the longest is forgotten first."""

_REFUSALS = 5.0, 10.0
"""Of one kind and cause: so many lines at once, then one in so many seconds. A client can cause these at will."""

_DEALINGS = 300.0, 1.0
"""The same for what follows from leases: one of 256 devices has as many lines of workers that were started."""

_ALL_AT_ONCE = 10.0
"""So many times as much of all causes together, at once and later."""


class EventSink(Protocol):
    """How an agent reports what happens, such as a journal's ``tell``."""

    def __call__(self, event: str, **fields: LogValue) -> None:
        """Take the news of an event."""


class TokenBucket:
    """A token bucket: so many at once, then one in so many seconds; pure.

    Args:
        burst: How many at once.
        every_s: Seconds until there may be another one.
        now_s: The time.
    """

    def __init__(self, burst: float, every_s: float, now_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._tokens = burst
        self._at_s = now_s

    def allows(self, now_s: float) -> bool:
        """Tell whether there may be one more now, and count it if so."""
        self._fill(now_s)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def full(self, now_s: float) -> bool:
        """Tell whether there may be as many at once as at the beginning."""
        self._fill(now_s)
        return self._tokens >= self._burst

    def _fill(self, now_s: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._at_s) / self._every_s)
        self._at_s = now_s


@dataclass
class _Cause:
    rate: TokenBucket
    untold: int = 0
    fields: dict[str, LogValue] = field(default_factory=dict)


class LogRateLimiter:
    """Tells which events get a line. What is passed over is counted, and told with the next line of its cause.

    Args:
        burst: How many lines of one kind and cause at once.
        every_s: Seconds until there may be another one.
    """

    def __init__(self, burst: float = _REFUSALS[0], every_s: float = _REFUSALS[1]) -> None:
        self._burst = burst
        self._every_s = every_s
        self._known: OrderedDict[tuple[str, str], _Cause] = OrderedDict()
        self._all: TokenBucket | None = None

    def __len__(self) -> int:
        return len(self._known)

    def happened(self, event: str, cause: str, now_s: float, **fields: LogValue) -> int:
        """Take an event; return how many of its kind and cause a line is to tell of now, 0 for no line.

        Args:
            event: What happened.
            cause: Whose doing it is: a client, an address.
            now_s: The time.
            **fields: What is to be known of it.
        """
        who = self._known.setdefault((event, cause), _Cause(TokenBucket(self._burst, self._every_s, now_s)))
        self._known.move_to_end((event, cause))
        if len(self._known) > CAUSES:
            self._known.popitem(last=False)
        who.untold += 1
        who.fields = fields
        return self._told(who, now_s)

    def overdue(self, now_s: float, *, last: bool = False) -> list[tuple[str, dict[str, LogValue], int]]:
        """Return what was passed over and may be told by now: events, the newest of each cause, and how many.

        Args:
            now_s: The time.
            last: Whether all that is left is told, because there is no later.
        """
        found: list[tuple[str, dict[str, LogValue], int]] = []
        for (event, _), who in self._known.items():
            untold = who.untold
            if untold and (last or self._told(who, now_s)):
                found.append((event, who.fields, untold))
                who.untold = 0
        return found

    def _told(self, who: _Cause, now_s: float) -> int:
        if self._all is None:
            self._all = TokenBucket(_ALL_AT_ONCE * self._burst, self._every_s / _ALL_AT_ONCE, now_s)
        if not who.rate.allows(now_s) or not self._all.allows(now_s):
            return 0
        told, who.untold = who.untold, 0
        return told


class Reporter:
    """Tells of what happens, with a bound to how many lines anybody else can cause.

    Args:
        tell: Where the lines go.
    """

    def __init__(self, tell: EventSink) -> None:
        self._tell = tell
        self._refusals, self._dealings = LogRateLimiter(), LogRateLimiter(*_DEALINGS)

    def __call__(self, event: str, **fields: LogValue) -> None:
        """Tell of something that is the agent's own doing."""
        self._tell(event, **fields)

    def refusal(self, event: str, cause: str, now_s: float, **fields: LogValue) -> None:
        """Tell of something that somebody can cause as often as he likes; see :meth:`LogRateLimiter.happened`."""
        self._pass_on(event, self._refusals.happened(event, cause, now_s, **fields), fields)

    def dealing(self, event: str, cause: str, now_s: float, **fields: LogValue) -> None:
        """Tell of something that follows from a lease; see :meth:`LogRateLimiter.happened`."""
        self._pass_on(event, self._dealings.happened(event, cause, now_s, **fields), fields)

    def tick(self, now_s: float, *, last: bool = False) -> None:
        """Tell of what was passed over; see :meth:`LogRateLimiter.overdue`."""
        for quiet in (self._refusals, self._dealings):
            for event, fields, times in quiet.overdue(now_s, last=last):
                self._pass_on(event, times, fields)

    def _pass_on(self, event: str, times: int, fields: dict[str, LogValue]) -> None:
        if times:
            self._tell(event, **fields, **({"times": times} if times > 1 else {}))
