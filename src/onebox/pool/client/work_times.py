"""Times for which devices have worked for scripts, and waited for each other, as replies tell."""

from __future__ import annotations

from collections.abc import Iterable

from onebox.wire.protocol.responses import MessageTimes


class WorkTimes:
    """Sums of the times of messages, by worker; written by one thread, read by any.

    Attributes:
        busy_ns: Nanoseconds for which each device has worked.
        waited_ns: Nanoseconds for which it has waited for other workers within messages.
    """

    def __init__(self) -> None:
        self.busy_ns: dict[int, int] = {}
        self.waited_ns: dict[int, int] = {}

    def add(self, worker: int, messages: Iterable[MessageTimes]) -> None:
        """Add the messages that a worker has executed."""
        for each in messages:
            self.busy_ns[worker] = self.busy_ns.get(worker, 0) + each.busy_ns
            self.waited_ns[worker] = self.waited_ns.get(worker, 0) + each.waited_ns
