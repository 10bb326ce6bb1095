"""Who is alive: signs of life in, verdicts out. Pure: the time is an argument.

Silence has two causes that look alike: a worker that is hung, and a network that is cut. Where somebody else on the
worker's host can be heard, which is its agent, they can be told apart: a worker that is silent while its host is heard
is hung. One whose host is silent, too, is waited for as long as a cut may last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SILENCE_S = 4.0
"""A worker that has given no sign of life for so long is hung. It gives one every half second, and a cut of three
seconds, with what comes before and after it, is not to look like that; but who is hung is to be noticed within five."""

STALL_S = 3.0
"""A worker whose work has made no progress and used no processor for so long is hung."""

_PAUSE_S = 1.5
"""A client that was itself not running for so long cannot tell silence from its own sleep."""

_GAP_S = 1.5
"""A host that has not been heard for so long was cut off; agents are heard every half second."""


@dataclass
class Liveness:
    """Watches the signs of life of the workers of a pool.

    Args:
        patience_s: For how long a worker may give none, by its number, where that is longer than usual: because it may
            be cut off for so long. While its host is heard it may not: see :meth:`overhear`.
    """

    patience_s: Mapping[int, float] = field(default_factory=dict)
    _last_s: dict[int, float] = field(default_factory=dict)
    _stalled: dict[int, tuple[float, str]] = field(default_factory=dict)
    _heard: dict[int, tuple[float, float]] = field(default_factory=dict)
    _checked_s: float | None = None

    def beat(self, worker: int, now_s: float, stalled_s: float = 0.0, doing: str = "") -> None:
        """Take a sign of life."""
        self._last_s[worker] = now_s
        self._stalled[worker] = (stalled_s, doing)

    def overhear(self, worker: int, heard_s: float) -> None:
        """Take the news of when somebody else on a worker's host was last heard."""
        since_s, last_s = self._heard.get(worker, (heard_s, heard_s))
        self._heard[worker] = (since_s if heard_s - last_s < _GAP_S else heard_s), max(heard_s, last_s)

    def forget(self, worker: int) -> None:
        """No longer watch a worker."""
        self._last_s.pop(worker, None)
        self._stalled.pop(worker, None)
        self._heard.pop(worker, None)

    def hung(self, now_s: float) -> dict[int, str]:
        """Return the workers that are hung, and why."""
        if self._checked_s is not None and now_s - self._checked_s > _PAUSE_S:
            self._last_s = dict.fromkeys(self._last_s, now_s)
        self._checked_s = now_s
        verdicts: dict[int, str] = {}
        for worker, last_s in self._last_s.items():
            stalled_s, doing = self._stalled[worker]
            since_s, heard_s = self._heard.get(worker, (now_s, now_s))
            if now_s - last_s > self.patience_s.get(worker, SILENCE_S):
                verdicts[worker] = f"gave no sign of life for {now_s - last_s:.1f} s"
            elif heard_s - max(since_s, last_s) > SILENCE_S:
                verdicts[worker] = f"gave no sign of life for {now_s - last_s:.1f} s, while its host could be heard"
            elif stalled_s > STALL_S:
                verdicts[worker] = f"has made no progress with its {doing} instruction for {stalled_s:.1f} s"
        return verdicts
