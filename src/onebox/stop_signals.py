"""Ctrl-C, SIGTERM and SIGHUP as requests to end a training loop between two steps, with its state saved."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from onebox.errors import UsageError
from onebox.portable import END_SIGNALS, wake_main_thread

CLOSING_S = 5.0
"""A further signal within this time is ignored while a program closes down; workers have ended by then."""

_T = TypeVar("_T")


class RecentSignals:
    """The signals that a program has handled, of which repetitions are to be told apart."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    @property
    def any(self) -> bool:
        """True if there was one."""
        return self._last_s > -math.inf

    def note(self) -> bool:
        """Record a signal, and return whether another one came shortly before."""
        before_s, self._last_s = self._last_s, time.monotonic()
        return self._last_s - before_s <= CLOSING_S

    def forget(self) -> None:
        """Forget all."""
        self._last_s = -math.inf


RECENT = RecentSignals()
"""Those of this process."""


class StopSignals:
    """Makes Ctrl-C, SIGTERM and SIGHUP requests to stop, which a training loop fulfils between two steps.

    A scheduler that takes a node away sends SIGTERM some seconds before it kills; a terminal that is closed sends
    SIGHUP. The first signal sets :attr:`requested`. When the ``with`` block has not been left within the given time,
    or at a second Ctrl-C, it is ended where it is, by ``KeyboardInterrupt`` after Ctrl-C and by ``SystemExit`` after
    the others; a checkpoint that is then being written is dropped, and earlier ones are whole. Signals that were
    ignored before, as SIGHUP under ``nohup``, stay so. Only in the main thread; elsewhere nothing happens.

    Args:
        within_s: Seconds from the first signal until the block is ended; with 0 it is ended at once.

    Raises:
        UsageError: The time is negative or infinite.

    Example:
        >>> import onebox
        >>> with onebox.StopSignals(within_s=20) as stop:
        ...     for step in range(3):
        ...         pass  # trainer.step(...)
        ...         if stop.requested:
        ...             break  # after trainer.save(...)
        >>> stop.status  # for sys.exit(): 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP
        0
    """

    def __init__(self, within_s: float = 20.0) -> None:
        if not 0 <= within_s < math.inf:
            raise UsageError(f"within_s={within_s}: allowed are 0 seconds and more")
        self.within_s = within_s
        self.signal: signal.Signals | None = None
        """The signal that requested the stop, if any."""
        self.expired = False
        """True once the time has passed."""
        self._waiting = False
        self._left = False
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._handlers.enter_context(handling(self._handle))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left = True  # from here on no signal ends anything
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
        if self.requested:
            RECENT.note()  # the program closes down
        self._handlers.close()

    @property
    def requested(self) -> bool:
        """True if a stop has been requested."""
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status after the signal, as a shell has it; 0 without one."""
        return 0 if self.signal is None else exit_status(self.signal)

    def wait_for(self, wait: Callable[[], _T]) -> _T | None:
        """Return the result of a wait that a request ends at once; ``None`` then, and its result may be lost."""
        try:
            try:
                self._waiting = True
                return None if self.requested else wait()
            finally:
                self._waiting = False
        except _WaitEnded:
            return None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        RECENT.note()
        if self._left:
            return
        if self.signal is not None:
            if self.expired or number == signal.SIGINT:
                self._end()
            return  # a scheduler, or a shell, may send its signal more than once
        self.signal = signal.Signals(number)
        if not self.within_s:
            self._end()
        self._timer = threading.Timer(self.within_s, self._expire)
        self._timer.daemon = True
        self._timer.start()
        if self._waiting:
            self._waiting = False
            raise _WaitEnded

    def _expire(self) -> None:
        """Send the signal once more, which ends the block; also a system call that it waits in."""
        with self._lock:
            if not self._left and self.signal is not None:
                self.expired = True
                wake_main_thread(self.signal)

    def _end(self) -> None:
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.status)


class InterruptibleClock:
    """A monotonic clock that the first Ctrl-C within its context sets to infinity: every deadline has passed then.

    A second Ctrl-C has its earlier effect. Only in the main thread; elsewhere, and where Ctrl-C is ignored, it is an
    ordinary clock.

    Args:
        enabled: Whether Ctrl-C has this effect.

    Attributes:
        interrupted: True after the first Ctrl-C.

    Example:
        >>> with InterruptibleClock() as clock:
        ...     end_s = clock() + 0.01
        ...     while clock() < end_s:
        ...         pass
        >>> clock.interrupted
        False
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self.interrupted = False
        self._handlers = contextlib.ExitStack()
        self._earlier: dict[int, Any] = {}

    def __call__(self) -> float:
        """Return the time in seconds."""
        return math.inf if self.interrupted else time.monotonic()

    def __enter__(self) -> Self:
        if self._enabled:
            self._earlier = {number: signal.getsignal(number) for number in END_SIGNALS}  # before one can come
            self._handlers.enter_context(handling(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.interrupted:
            self.interrupted = True
        elif callable(earlier := self._earlier[number]):
            earlier(number, frame)
        else:  # the system's own
            signal.signal(number, earlier)
            signal.raise_signal(number)


class _WaitEnded(BaseException):
    """Ends a wait; not an ``Exception``, which whoever waits might handle."""


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[dict[int, Any]]:
    """Set a handler of the signals that end a program; those that are ignored stay so, and forked processes have the
    earlier handlers.

    Nothing happens in other threads than the main one, which have no handlers.

    Args:
        handler: The handler.

    Yields:
        The signals, with the handlers that they will have after the context: the earlier ones.
    """
    before: dict[int, Any] = {}
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handler(number, frame)
        else:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    def restore(number: int) -> None:
        signal.signal(number, before[number])

    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            for number in END_SIGNALS:
                earlier = signal.getsignal(number)
                if earlier not in (signal.SIG_IGN, None):  # None: not set by Python
                    before[number] = earlier
                    undo.callback(restore, number)  # first: a signal of another kind may end this here
                    signal.signal(number, handle)
        yield before


def exit_status(number: int) -> int:
    """Return the exit status of a program that a signal has ended, as a shell has it."""
    return 128 + number
