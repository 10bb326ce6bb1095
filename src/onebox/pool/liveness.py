"""Liveness of workers: heartbeats in, verdicts out. Pure: the time is an argument.

Silence has two causes that look alike: a hung worker and an interrupted network. An agent on the worker's host tells
them apart: a worker that is silent while its agent is heard is hung. Where the agent is silent, too, the wait lasts as
long as an interruption may.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from onebox.worker.system.process_watch import DISK_WAIT_S

SILENCE_S = 4.5
"""Silence after which a worker counts as hung. It sends a heartbeat every second at least; a network interruption of
three seconds, with its margins, must not count, and a hung worker is to be noticed within five."""

STALL_S = 3.0
"""Time without progress and without processor use after which a worker counts as hung."""

QUIET_S = 2.0
"""Silence of two heartbeats at least, after which a worker may have stopped, or its network."""

_LOOK_S = 2.0
"""Silence after which it is looked whether a worker's process reads from a disk, and for how long that counts."""

_PAUSE_S = 2.0
"""A pause of the client's own after which it cannot tell a worker's silence from its own."""

_GAP_S = 2.5
"""Silence after which a host counts as cut off; agents are heard every second."""


@dataclass
class Liveness:
    """Monitors the heartbeats of a pool's workers.

    Args:
        patience_s: Permitted silence by worker number, where it is longer than usual because the network may be
            interrupted for so long. It does not apply while the worker's host is heard: see :meth:`overhear`.
    """

    patience_s: Mapping[int, float] = field(default_factory=dict)
    _last_s: dict[int, float] = field(default_factory=dict)
    _stalled: dict[int, tuple[float, str]] = field(default_factory=dict)
    _heard: dict[int, tuple[float, float]] = field(default_factory=dict)
    _disk: dict[int, tuple[int, float]] = field(default_factory=dict)
    _checked_s: float | None = None

    def beat(self, worker: int, now_s: float, stalled_s: float = 0.0, doing: str = "") -> None:
        """Record a heartbeat."""
        self._last_s[worker] = now_s
        self._stalled[worker] = (stalled_s, doing)
        self._disk.pop(worker, None)

    def overhear(self, worker: int, heard_s: float) -> None:
        """Record the time at which the agent of a worker's host was last heard."""
        since_s, last_s = self._heard.get(worker, (heard_s, heard_s))
        self._heard[worker] = (since_s if heard_s - last_s < _GAP_S else heard_s), max(heard_s, last_s)

    def silence_s(self, worker: int, now_s: float) -> float:
        """Return the seconds since a worker's last heartbeat; 0 for one that is not monitored."""
        return now_s - self._last_s.get(worker, now_s)

    def silent(self, now_s: float) -> list[int]:
        """Return the workers whose silence is long enough to look what their processes do."""
        return [worker for worker, last_s in self._last_s.items() if now_s - last_s > _LOOK_S]

    def look(self, worker: int, now_s: float, *, disk_reads: int, waits: bool) -> None:
        """Record what the process of a silent worker does: one that reads its pages from a disk is slow, not hung.

        Args:
            worker: The worker.
            now_s: The time.
            disk_reads: Number of pages that it has read from disks.
            waits: Whether it waits for a disk now.
        """
        before, _ = self._disk.get(worker, (disk_reads, 0.0))
        if waits or disk_reads != before:
            self._disk[worker] = disk_reads, now_s
        else:
            self._disk.setdefault(worker, (disk_reads, -math.inf))

    def _reads(self, worker: int, now_s: float) -> bool:
        _, at_s = self._disk.get(worker, (0, -math.inf))
        return now_s - at_s < _LOOK_S and now_s - self._last_s[worker] < DISK_WAIT_S

    def forget(self, worker: int) -> None:
        """Stop monitoring a worker."""
        self._disk.pop(worker, None)
        self._last_s.pop(worker, None)
        self._stalled.pop(worker, None)
        self._heard.pop(worker, None)

    def hung(self, now_s: float) -> dict[int, str]:
        """Return the workers that are hung, each with the reason."""
        if self._checked_s is not None and now_s - self._checked_s > _PAUSE_S:
            self._last_s = dict.fromkeys(self._last_s, now_s)
        self._checked_s = now_s
        verdicts: dict[int, str] = {}
        for worker, last_s in self._last_s.items():
            stalled_s, doing = self._stalled[worker]
            since_s, heard_s = self._heard.get(worker, (now_s, now_s))
            if self._reads(worker, now_s):
                continue
            if now_s - last_s > self.patience_s.get(worker, SILENCE_S):
                verdicts[worker] = f"gave no sign of life for {now_s - last_s:.1f} s"
            elif heard_s - max(since_s, last_s) > SILENCE_S:
                verdicts[worker] = f"gave no sign of life for {now_s - last_s:.1f} s, while its host could be heard"
            elif stalled_s > STALL_S:
                verdicts[worker] = f"has made no progress with its {doing} instruction for {stalled_s:.1f} s"
        return verdicts
