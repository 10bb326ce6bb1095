"""Calls that other threads run in the client loop's thread, because it alone may touch the sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import zmq

from onebox.errors import PoolError

_T = TypeVar("_T")


class LoopCalls:
    """A queue of calls."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[zmq.Poller], Any], Future[Any]]] = deque()

    def add(self, action: Callable[[zmq.Poller], _T]) -> Future[_T]:
        """Add a call; the future holds its result or error."""
        done: Future[_T] = Future()
        self._waiting.append((action, done))
        return done

    def run(self, poller: zmq.Poller) -> None:
        """Run all queued calls; called by the thread that owns the queue."""
        while self._waiting:
            action, done = self._waiting.popleft()
            try:
                done.set_result(action(poller))
            except Exception as error:
                done.set_exception(error)


def call_result(done: Future[_T], timeout_s: float) -> _T:
    """Wait for a call and return its result.

    Raises:
        PoolError: The call did not finish in time.
    """
    try:
        return done.result(timeout_s)
    except FutureTimeout:
        raise PoolError(f"the client's own thread did not answer within {timeout_s:.0f} s") from None
