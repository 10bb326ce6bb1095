"""Reclaiming of devices that were given up: once their hosts are back, workers are started on them again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from onebox.errors import OneboxError
from onebox.pool.backends.base import WorkerHandle

FIRST_S, MOST_S = 1.0, 60.0
"""Intervals between two attempts to start a worker: each twice the one before, after refusals."""

_JOIN_S = 10.0

_LOG = logging.getLogger("onebox")

Replace = Callable[[int], tuple[WorkerHandle, str] | None]
"""Starts a worker for a device, with its public key; ``None`` while its host cannot be reached."""


class RetryTimes:
    """Times at which devices are tried again. Pure: the time is an argument.

    A host that cannot be reached is looked for at the first interval, which costs nothing: its agent's connection is
    restored by itself. Only attempts that are refused become rarer, such as those for a device that others lease.
    """

    def __init__(self) -> None:
        self._due: dict[int, tuple[float, float]] = {}  # the time, and the interval before it

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, device: int, now_s: float, interval_s: float = FIRST_S) -> None:
        """Try a device from now on, after an interval."""
        self._due.setdefault(device, (now_s + interval_s, interval_s))

    def remove(self, device: int) -> None:
        """Stop trying a device."""
        self._due.pop(device, None)

    def unreachable(self, device: int, now_s: float) -> None:
        """Record that a device's host could not be reached."""
        self._due[device] = now_s + FIRST_S, FIRST_S

    def refused(self, device: int, now_s: float) -> None:
        """Record a failed attempt."""
        interval_s = min(2 * self._due[device][1], MOST_S)
        self._due[device] = now_s + interval_s, interval_s

    def due(self, now_s: float) -> int | None:
        """Return the device that has been due for the longest time; ``None`` where none is."""
        device = min(self._due, key=lambda each: self._due[each][0], default=None)
        return device if device is not None and self._due[device][0] <= now_s else None

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until a device is due; ``None`` where there is none."""
        return max(0.0, min(due_s for due_s, _ in self._due.values()) - now_s) if self._due else None


@dataclass(frozen=True)
class ReclaimedWorker:
    """A worker on a device that had been given up.

    Args:
        handle: The worker.
        key: Its public key.
        away_s: Seconds since the device was given up.
    """

    handle: WorkerHandle
    key: str
    away_s: float


class Reclaimer:
    """Starts workers for devices that were given up, in a thread of its own.

    Args:
        replace: Starts a worker.
    """

    def __init__(self, replace: Replace) -> None:
        self._replace = replace
        self._times = RetryTimes()
        self._since_s: dict[int, float] = {}
        self._intervals: dict[int, float] = {}
        self._found: dict[int, ReclaimedWorker] = {}
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> bool:
        """True if devices are back, and no other one is just being tried: so all devices of a host come together."""
        if not self._found:
            return False
        with self._changed:
            return not self._busy and self._times.due(time.monotonic()) is None

    def seek(self, devices: Collection[int], *, doubtful: bool = False) -> None:
        """Try some devices from now on.

        Args:
            devices: The devices.
            doubtful: Whether they were back already, and of no use: then the first interval grows from time to time.
        """
        now_s = time.monotonic()
        with self._changed:
            for device in devices if not self._closed else ():
                interval_s = min(2 * self._intervals.get(device, FIRST_S), MOST_S) if doubtful else FIRST_S
                self._intervals[device] = interval_s
                self._since_s.setdefault(device, now_s)
                self._times.add(device, now_s, interval_s)
            if self._times and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="onebox-reclaim", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self) -> Mapping[int, ReclaimedWorker]:
        """Return the workers that were started, which belong to the caller from now on."""
        with self._changed:
            found, self._found = self._found, {}
        return found

    def accepted(self, device: int) -> None:
        """Record that a device is in use again."""
        self._since_s.pop(device, None)

    def stop(self) -> None:
        """Begin no further attempt."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, after the sources of workers, whose end ends an attempt under way. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        for worker in self.take().values():
            worker.handle.close(grace_s=0.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not self._closed and (device := self._times.due(time.monotonic())) is None:
                    self._changed.wait(self._times.wait_s(time.monotonic()))
                if self._closed:
                    return
                self._busy = True
            assert device is not None
            self._try(device)

    def _try(self, device: int) -> None:
        made, refused = None, False
        try:
            made = self._replace(device)
        except Exception as error:  # leased to others, or not started: the next attempt may go better
            refused = True
            if not isinstance(error, OneboxError):  # such as a limit of this process
                _LOG.warning("a device that was given up could not be tried again: %s: %s", type(error).__name__, error)
        now_s = time.monotonic()
        with self._changed:
            if made is not None:
                self._times.remove(device)
                self._found[device] = ReclaimedWorker(*made, now_s - self._since_s[device])
            elif refused:
                self._times.refused(device, now_s)
            else:
                self._times.unreachable(device, now_s)


__all__ = ["ReclaimedWorker", "Reclaimer", "RetryTimes"]
