"""Measurement of the bandwidth from this process to its workers."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future

from onebox.errors import OneboxError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.errors import raise_first
from onebox.pool.network.measured_pool import MeasuredPool
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Ask, Free
from onebox.wire.protocol.requests import Instruction, Put

_ROUND_TRIPS = 3
_FIRST_BYTES, _MOST_BYTES = 16 << 10, 4 << 20
_LONG_S = 0.02
"""A transfer that exceeds a round trip by this, and by half of a round trip, is long enough for a measurement."""


def measure_client_bandwidth(pool: MeasuredPool, workers: Sequence[int]) -> dict[int, float]:
    """Return the bytes per second to each of some workers while all of them are sent to.

    Takes some tens of milliseconds, on slow links up to a second; the workers should be idle.

    Args:
        pool: The pool.
        workers: Its workers to measure.

    Raises:
        OneboxError: A worker failed or ended.
    """
    best_s = dict.fromkeys(workers, math.inf)
    for _ in range(_ROUND_TRIPS):
        for worker, took_s in _timed(pool, workers, 0).items():
            best_s[worker] = min(best_s[worker], took_s)
    found: dict[int, float] = {}
    left, size = list(workers), _FIRST_BYTES
    while left:
        took = {worker: max(seconds - best_s[worker], 1e-6) for worker, seconds in _timed(pool, left, size).items()}
        found |= {worker: size / seconds for worker, seconds in took.items()}
        long_s = {worker: max(_LONG_S, best_s[worker] / 2) for worker in left}
        left = [worker for worker in left if took[worker] < long_s[worker] and size < _MOST_BYTES]
        size *= 4
    return found


def _timed(pool: MeasuredPool, workers: Sequence[int], size: int) -> dict[int, float]:
    """Return the seconds until each worker has acknowledged a number of bytes."""
    ends: dict[int, float] = {}
    begin_s = time.monotonic()
    futures = []
    for worker in workers:
        number = pool.new_number()
        put: list[Instruction] = [Put((number,), (TensorSpec("uint8", (size,)),)), Free((number,))] if size else []
        futures.append(pool.post(worker, [*put, Ask("memory")], [os.urandom(size)] if size else [], answer=True))
        futures[-1].add_done_callback(functools.partial(_note, ends, worker))
    raise_first(futures)
    return {worker: ends.get(worker, time.monotonic()) - begin_s for worker in workers}


def _note(ends: dict[int, float], worker: int, future: Future[WorkerReply]) -> None:
    ends[worker] = time.monotonic()


class ClientBandwidth:
    """The links from this process to the workers of a pool, each measured on first use.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: MeasuredPool) -> None:
        self._pool = pool
        self._bps: dict[int, float] = {}

    def bps(self, workers: Sequence[int]) -> dict[int, float]:
        """Return the bytes per second to each of some workers; infinite where they are on this machine.

        Raises:
            OneboxError: A worker failed or ended.
        """
        self._bps |= {worker: math.inf for worker in workers if self._pool.near(worker)}
        unknown = [worker for worker in workers if worker not in self._bps]
        try:
            self._bps |= measure_client_bandwidth(self._pool, unknown) if unknown else {}
        except OneboxError:
            if self._pool.broken:
                raise
            self._bps |= dict.fromkeys(unknown, math.inf)  # no memory for the transfer: little will be sent
        return {worker: self._bps[worker] for worker in workers}
