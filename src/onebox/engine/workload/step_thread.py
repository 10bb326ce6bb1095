"""The thread that begins steps, and calls of other threads that it makes for them.

A capture puts tensors without values into the user's model while it traces, so only the thread that the model is used
in may make one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from onebox.errors import OneboxError

_T = TypeVar("_T")

_SLICE_S = 0.1
"""Interval at which a thread that waits for its call looks whether it is to stop."""


class StepThread:
    """Calls that threads which work beside the steps leave to the thread that begins them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._own = threading.local()

    @contextlib.contextmanager
    def beside(self, stopped: threading.Event) -> Iterator[None]:
        """Leave the calls of the calling thread to the thread that begins steps.

        Args:
            stopped: Ends the wait for a call.
        """
        self._own.stopped = stopped
        try:
            yield
        finally:
            del self._own.stopped

    @property
    def elsewhere(self) -> bool:
        """Return whether the calling thread leaves its calls to another one."""
        return hasattr(self._own, "stopped")

    def call(self, function: Callable[[], _T]) -> _T:
        """Return the result of a function, which runs in the thread that begins steps, before the next of them.

        Args:
            function: The function.

        Raises:
            OneboxError: The calling thread was stopped before.
            Exception: Whatever the function raises.
        """
        if not self.elsewhere:
            return function()
        stopped: threading.Event = self._own.stopped
        done: Future[_T] = Future()
        self._waiting.append((function, done))
        while not stopped.is_set():
            if wait([done], _SLICE_S).done:
                return done.result()
        done.cancel()
        raise OneboxError("the run ended before its model was captured for another plan")

    def serve(self) -> None:
        """Make the calls that wait; called by the thread that begins steps."""
        while self._waiting:
            function, done = self._waiting.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)
            except BaseException:
                done.set_exception(OneboxError("the capture of the model for another plan was interrupted"))
                raise
