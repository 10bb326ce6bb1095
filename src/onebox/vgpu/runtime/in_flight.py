"""Messages in flight to a worker: a limit on their number and size, and failures not yet reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from onebox.errors import OperatorError, PeerLost
from onebox.pool import WorkerReply
from onebox.pool.errors import CAUSE_S

MESSAGES = 256
"""Limit of messages in flight to a worker, so that queues stay bounded: enough for a channel with a round trip of 60 ms
to a device that does 1,000 steps a second, of four messages each."""

BYTES = 256 << 20
"""Limit of bytes of uploads in flight."""

_LOOK_S = 0.002
"""Interval of checks for failures on other devices."""


class InFlight:
    """The messages in flight to one worker, which answers in order; for one thread at a time."""

    def __init__(self) -> None:
        self._messages: deque[tuple[Future[WorkerReply], int]] = deque()
        self._size_bytes = 0
        self._failed: BaseException | None = None
        self._lost_peer = False

    def __len__(self) -> int:
        """Return the number of messages that have not been answered."""
        self._look()
        return len(self._messages)

    def add(self, message: Future[WorkerReply], size_bytes: int) -> None:
        """Add a message with the size of its tensors."""
        self._messages.append((message, size_bytes))
        self._size_bytes += size_bytes

    def too_far(self) -> Future[WorkerReply] | None:
        """Return the oldest message if the limits are exceeded, so that it is waited for."""
        self._look()
        if len(self._messages) > MESSAGES or self._size_bytes > BYTES:
            return self._messages[0][0]
        return None

    def failed(self) -> BaseException | None:
        """Return the error of the first failed message that has not been reported."""
        self._look()
        return self._failed

    def mark_reported(self) -> None:
        """Mark all failures so far as reported."""
        self._look()
        self._failed = None

    def note(self, error: BaseException | None) -> None:
        """Note a failure, or that there was none."""
        self._failed = self._failed or error
        self._lost_peer = self._lost_peer or isinstance(error, PeerLost)

    def take_lost_peer(self) -> bool:
        """Return whether a message has failed since the last call because data from another worker did not come."""
        self._look()
        lost, self._lost_peer = self._lost_peer, False
        return lost

    def _look(self) -> None:
        while self._messages and self._messages[0][0].done():
            message, size_bytes = self._messages.popleft()
            self._size_bytes -= size_bytes
            self.note(message.exception())


def first_failure(others: Sequence[tuple[AbstractContextManager[Any], InFlight]]) -> OperatorError | None:
    """Return the failure on another device, where this device's error is only that data from there is missing.

    The other device may report it later, up to :data:`~onebox.pool.errors.CAUSE_S`.

    Args:
        others: The messages in flight to the other devices, each with its lock.
    """
    end_s, busy = time.monotonic() + CAUSE_S, True
    while busy and time.monotonic() < end_s:
        busy = False
        for lock, in_flight in others:
            with lock:
                busy = busy or len(in_flight) > 0
                found = in_flight.failed()
                if isinstance(found, OperatorError):
                    in_flight.mark_reported()
                    return found
        time.sleep(_LOOK_S if busy else 0)
    return None
