"""Deferral of signal handlers: Ctrl-C ends a cell or a script, and leaves a consistent state.

Python runs a handler between any two steps of the main thread, and an exception of the handler, ``KeyboardInterrupt``
above all, is raised there. In the middle of a message to a worker that would leave client and worker with inconsistent
state; in a finalizer Python drops the exception, and Ctrl-C with it.

So, once virtual devices are open, ``signal.signal`` wraps handlers. A signal that comes in a :func:`shielded` function,
or in its callees, is raised again a moment later. Waits for a worker let it through (:func:`interruptible`).
"""

from __future__ import annotations

import _thread
import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from onebox.vgpu.patches import Patches

_F = TypeVar("_F", bound=Callable[..., Any])

AGAIN_S = 0.002
"""Delay after which a deferred signal is raised again."""

_MOST_SILENT = 500
"""Delays after which it is raised once more although its handler has not returned."""

PATIENCE_S = 3.0
"""Deferral after which a signal is let through in any case: something hangs, and the user wants to end it."""


_shielded: set[Any] = set()
_interruptible: set[Any] = set()
"""The interruptible functions, by their code objects."""

_waiting: dict[int, float] = {}
"""Deferred signals, with the time of the first one."""

_coming: set[int] = set()
"""Signals whose handlers are about to be called; further ones until then are merged with them."""

_resent: set[int] = set()
"""Signals that were raised again, whose handler has not returned since. Of two at a time the later one may come in the
first line of the earlier one's handler and end the deferral, so that the earlier one looks like another signal."""

_sending = threading.RLock()
"""Held while a signal is raised again, or its deferral ends."""


def shielded(function: _F) -> _F:
    """Decorator: defers handlers until the function has returned."""
    _shielded.add(function.__code__)
    return function


def interruptible(function: _F) -> _F:
    """Decorator: handlers run in the function, even if a shielded one has called it."""
    _interruptible.add(function.__code__)
    return function


def deliver_signals() -> None:
    """Raise the deferred signals, in an interruptible function that may be too short to be met by chance."""
    for number in tuple(_waiting):
        signal.raise_signal(number)


def _must_wait(frame: FrameType | None) -> bool:
    """Return whether a signal that interrupted a frame came where no handler may run."""
    while frame is not None:
        if frame.f_code in _shielded:
            return True
        if frame.f_code in _interruptible:
            return False
        frame = frame.f_back
    return False


class _Patient:
    """A handler that can be deferred."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        try:
            return self._called(number, frame)
        finally:
            _resent.discard(number)

    def _called(self, number: int, frame: FrameType | None) -> Any:
        if number in _coming:
            return None
        frame = _users_frame(frame)
        since_s = _waiting.get(number)
        patient = since_s is None or time.monotonic() - since_s < PATIENCE_S
        if patient and _must_wait(frame):
            if since_s is None:
                _waiting[number] = time.monotonic()
                _thread.start_new_thread(_come_again, (number,))
            return None
        if since_s is not None and not _no_more(number):
            return None  # it came again meanwhile, which has called the handler
        return self.handler(number, frame)


def _come_again(number: int) -> None:
    waits, silent = True, 0
    while waits:
        time.sleep(AGAIN_S)
        with _sending:
            waits = number in _waiting
            silent = silent + 1 if number in _resent else 0
            if waits and silent in (0, _MOST_SILENT):  # another handler's exception may have ended this one's
                _resent.add(number)
                silent = 0
                signal.raise_signal(number)


def _no_more(number: int) -> bool:
    """End the deferral of a signal, even if it was raised again already without a call of its handler.

    Returns False if it is no longer deferred.
    """
    _coming.add(number)
    try:
        with _sending:
            if _waiting.pop(number, None) is None:
                return False
        signal.raise_signal(number)  # runs the handlers of all pending signals, any of which may raise
    finally:
        _coming.remove(number)
    return True


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the interrupted frame, or the one that has called this module."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _theirs(handler: Any) -> Any:
    """Return the user's handler from its wrapper."""
    return handler.handler if isinstance(handler, _Patient) else handler


def wrapping_set(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``signal.signal``, to wrap handlers."""

    @functools.wraps(original)
    def set_(number: int, handler: Any, /) -> Any:
        patient = handler if isinstance(handler, int) or not callable(handler) else _Patient(_theirs(handler))
        return _theirs(original(number, patient))

    return set_


def unwrapping_get(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``signal.getsignal``, to unwrap handlers."""

    @functools.wraps(original)
    def get(number: int, /) -> Any:
        return _theirs(original(number))

    return get


def wrap_handlers(patches: Patches) -> None:
    """Wrap the existing handlers; before the functions are replaced that set and return them.

    Python sets handlers in the main thread only. Where another thread opens the devices, existing handlers stay
    unwrapped.
    """
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, int | _Patient):
                signal.signal(number, _Patient(handler))
    patches.on_removal(_unwrap_handlers)


def _unwrap_handlers() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, _Patient):
                signal.signal(number, handler.handler)


__all__ = [
    "deliver_signals",
    "interruptible",
    "shielded",
    "unwrapping_get",
    "wrap_handlers",
    "wrapping_set",
]
