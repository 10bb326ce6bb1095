"""A wait for the work of an asynchronous device or for a message, whichever comes first; it costs nothing meanwhile."""

from __future__ import annotations

import math
import os
import threading
from contextlib import suppress
from queue import SimpleQueue

import zmq

from onebox.worker.accelerator import Accelerator, Event

_END_S = 5.0
"""Longest time that :meth:`DeviceWaiter.close` waits for the device."""


class DeviceWaiter:
    """A thread that waits for the device, and wakes the working thread when it has come to an event.

    The thread is started with the first wait, and ends with :meth:`close` or with its process.

    Args:
        accelerator: The device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._latest: Event | None = None
        self._bell = -1
        self._thread = threading.Thread(target=self._serve, name="onebox-device", daemon=True)

    def wait(self, event: Event, within_s: float, *sockets: zmq.Socket[bytes]) -> None:
        """Wait until the device may have come to an event, or has failed, and no longer than until a message comes.

        Args:
            event: The event; not before the one of the last call.
            within_s: Most seconds.
            sockets: Where messages come from.
        """
        if self._bell < 0:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread.start()
        if event is not self._latest:
            self._latest = event
            self._events.put(event)
        poller = zmq.Poller()
        for source in (self._bell, *sockets):
            poller.register(source, zmq.POLLIN)
        poller.poll(max(0, math.ceil(within_s * 1000)))
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def close(self) -> None:
        """End the thread. If the device does not come to its last event, the thread ends with the process."""
        if self._bell >= 0:
            self._events.put(None)
            self._thread.join(_END_S)
            if not self._thread.is_alive():
                os.close(self._bell)

    def _serve(self) -> None:
        with self._accelerator.on(self._accelerator.current()):  # CUDA would use GPU 0 in this thread
            while (event := self._events.get()) is not None:
                with suppress(Exception):  # the working thread meets a failure of the device as well
                    event.synchronize()
                os.eventfd_write(self._bell, 1)
