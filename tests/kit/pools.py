"""Pools of CPU workers that stay open from test to test, as long as what used them leaves them whole and empty."""

from __future__ import annotations

import gc

import onebox
from onebox.errors import OneboxError
from onebox.pool import Pool
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import WorkerMemory

MOST = 2
"""Pools that are open at a time: a test may use two side by side, and each worker takes memory."""

PATIENCE_S = 30.0
"""For a worker to say what it holds."""


class Pools:
    """From a number of workers to a pool of so many CPU workers; for tests that leave it whole."""

    def __init__(self) -> None:
        self._open: dict[int, Pool] = {}

    def __call__(self, workers: int) -> Pool:
        found = self._open.pop(workers, None)
        if found is None:
            while len(self._open) >= MOST:  # the one that was not asked for longest
                self._open.pop(next(iter(self._open))).close()
            found = onebox.open(f"cpu*{workers}", threads=1)
        self._open[workers] = found
        return found

    def look(self) -> None:
        """Close each pool that has lost a worker, or whose workers still hold something."""
        gc.collect()
        for workers, pool in list(self._open.items()):
            if not untouched(pool):
                del self._open[workers]
                pool.close()

    def close(self) -> None:
        """Close all pools."""
        while self._open:
            self._open.popitem()[1].close()


def untouched(pool: Pool) -> bool:
    """Tell whether all workers of a pool answer, and hold no buffer and nothing of the host's memory."""
    try:
        answers = [pool.post(worker, [Ask("memory")], answer=True) for worker in range(len(pool))]
        results = [result for answer in answers for result in answer.result(PATIENCE_S).results]
    except (OneboxError, TimeoutError):
        return False
    held = [result.used_bytes + result.host_bytes for result in results if isinstance(result, WorkerMemory)]
    return held == [0] * len(pool)
