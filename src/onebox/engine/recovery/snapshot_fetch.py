"""Download of snapshot parts to the client, which keeps them if no other worker can."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire.protocol.snapshots import Extent, Read, pieces

_AHEAD = 16
"""Pieces requested at once, so that the network stays busy between polls."""


class SnapshotFetch:
    """Download of a part of a worker's slot.

    Args:
        pool: The pool.
        worker: The worker.
        slot: Number of its slot.
        runs: Byte ranges to fetch; they are concatenated.
        over_s: Seconds over which the requests are spread.
    """

    def __init__(self, pool: Pool, worker: int, slot: int, runs: Sequence[Extent], over_s: float) -> None:
        self.buffer = bytearray(sum(size for _, size in runs))
        self._pool = pool
        self._worker = worker
        self._slot = slot
        self._left = deque(pieces(runs))
        self._count = len(self._left)
        self._running: deque[Future[WorkerReply]] = deque()
        self._end = 0
        self._over_s = over_s
        self._begun_s = time.monotonic()

    @property
    def whole(self) -> bool:
        """True if the download is complete."""
        return self._end == len(self.buffer)

    def look(self) -> None:
        """Process received pieces and request more.

        Raises:
            OneboxError: The worker was lost.
        """
        while self._running and self._running[0].done():
            frame = memoryview(raise_first([self._running.popleft()])[0].frames[0])
            self.buffer[self._end : self._end + len(frame)] = frame
            self._end += len(frame)
        share = (time.monotonic() - self._begun_s) / self._over_s if self._over_s else 1.0
        due = math.ceil(self._count * min(1.0, share))
        while self._left and len(self._running) < _AHEAD and self._count - len(self._left) < due:
            start, size = self._left.popleft()
            self._running.append(self._pool.post(self._worker, [Read(self._slot, start, size)], answer=True))
