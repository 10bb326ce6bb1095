"""When the instructions of a traced run began and ended."""

from __future__ import annotations

import time
from collections.abc import Callable


class Trace:
    """Start and end of each instruction of a run; see :class:`onebox.wire.messages.Run` for what they mean.

    Args:
        active: Whether times are taken.
    """

    def __init__(self, active: bool = False) -> None:
        self.times_ns: list[int] = []
        self._active = active
        self._until_ns = 0
        self._running = False

    def begin(self) -> None:
        """Note that an instruction begins."""
        if self._active:
            self.times_ns.append(time.monotonic_ns())
            self._until_ns = 0
            self._running = True

    def ready(self) -> None:
        """Note that what the instruction reads is there, so that it begins only now."""
        if self._running:
            self.times_ns[-1] = time.monotonic_ns()

    def until(self, end_ns: int) -> None:
        """Note when what the instruction has sent is there, which may be later than its end."""
        self._until_ns = end_ns

    def end(self) -> None:
        """Note that the instruction has ended."""
        if self._active:
            self.times_ns.append(max(time.monotonic_ns(), self._until_ns))
            self._running = False

    def later(self) -> Callable[[int], None]:
        """Return what notes when that which the instruction has started was there, after it has ended."""
        times, place = self.times_ns, len(self.times_ns)

        def done(at_ns: int) -> None:
            if 0 < place < len(times):
                times[place] = max(times[place - 1], at_ns)

        return done
