"""Times and memory of the instructions of a traced run."""

from __future__ import annotations

import time
from collections.abc import Callable

from onebox.worker.memory.buffers import BufferStore


class Trace:
    """Start, end and memory of each instruction of a run; see :class:`onebox.wire.protocol.requests.Run` for their
    definitions.

    Args:
        store: The buffers whose bytes are recorded; ``None`` for a disabled trace.
    """

    def __init__(self, store: BufferStore | None = None) -> None:
        self.times_ns: list[int] = []
        self.used_bytes: list[int] = []
        self._store = store
        self._until_ns = 0
        self._running = False
        self._peak_before = 0

    def begin(self) -> None:
        """Record the start of an instruction."""
        store = self._store
        if store is not None:
            self.times_ns.append(time.monotonic_ns())
            self._until_ns = 0
            self._running = True
            self._peak_before, store.peak_bytes = store.peak_bytes, store.used_bytes

    def ready(self) -> None:
        """Record that the inputs of the instruction are present, which is its effective start."""
        if self._running:
            self.times_ns[-1] = time.monotonic_ns()

    def until(self, end_ns: int) -> None:
        """Record the arrival time of the instruction's sends, which may be later than its end."""
        self._until_ns = end_ns

    def end(self) -> None:
        """Record the end of the instruction: the time, its peak, and the bytes in use after it."""
        store = self._store
        if store is not None:
            self.times_ns.append(max(time.monotonic_ns(), self._until_ns))
            self._running = False
            self.used_bytes += (store.peak_bytes, store.used_bytes)
            store.peak_bytes = max(self._peak_before, store.peak_bytes)

    def later(self) -> Callable[[int], None]:
        """Return a function that records the completion of the instruction's asynchronous work after its end."""
        times, place = self.times_ns, len(self.times_ns)

        def done(at_ns: int) -> None:
            if 0 < place < len(times):
                times[place] = max(times[place - 1], at_ns)

        return done
