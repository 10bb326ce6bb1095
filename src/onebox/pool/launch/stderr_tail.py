"""The end of a process's standard error: bounded in size, and in the rate at which the process can write it."""

from __future__ import annotations

import os
import re
import select
import threading
from typing import IO

from onebox.wire.clean_text import clean_text

KEPT_BYTES = 64 << 10
"""Bytes that are kept, the last ones."""

RATE_BPS = 1 << 20
"""Bytes per second that are taken; a process that writes more waits."""

_READ_BYTES = 64 << 10
_PIPE_BYTES = 1 << 20  # more than a pipe holds


_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def without_addresses(text: str) -> str:
    """Return a text without addresses of memory, which reports of crashes have: other processes may have the same.

    Example:
        >>> without_addresses("Thread 0x00007f0d5c7fa640 in 0x12")
        'Thread 0x… in 0x12'
    """
    return _ADDRESS.sub("0x…", text)


class StderrTail:
    """A pipe for a process's standard error, and a thread that keeps the end of what comes.

    Attributes:
        inlet: The process's end; to be closed here once the process has it.
    """

    def __init__(self) -> None:
        self._outlet, inlet = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._outlet, False)
        self.inlet: IO[bytes] = open(inlet, "wb", buffering=0)  # noqa: SIM115 (closed by its user)
        try:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:  # this process has as many descriptors as it may
            self.inlet.close()
            os.close(self._outlet)
            raise
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._collect, name="onebox-stderr", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many
            self.inlet.close()
            os.close(self._outlet)
            os.close(self._stop)
            raise

    def text(self, last: int) -> str:
        """Return the end of what the process has written until now, cleaned of what would steer a terminal.

        Args:
            last: Most bytes.
        """
        with self._lock:
            taken = 0
            while taken <= _PIPE_BYTES and (came := self._take()):
                taken += came
            return clean_text(self._kept[-last:].decode(errors="replace").strip(), lines=True)

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._outlet < 0

    def close(self) -> None:
        """End the thread, and close the pipe. Idempotent."""
        self.inlet.close()
        if self.closed:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            os.close(self._outlet)
            os.close(self._stop)
            self._outlet = -1

    def _take(self) -> int:
        """Read what has come; return its length, 0 if there is nothing now or ever."""
        try:
            part = os.read(self._outlet, _READ_BYTES) if self._outlet >= 0 else b""
        except BlockingIOError:
            return 0
        self._kept += part
        del self._kept[:-KEPT_BYTES]
        return len(part)

    def _collect(self) -> None:
        wait, pause = select.poll(), select.poll()
        for poll in (wait, pause):
            poll.register(self._stop, select.POLLIN)
        wait.register(self._outlet, select.POLLIN)
        while True:
            ready = dict(wait.poll())
            if self._stop in ready:
                return
            with self._lock:
                came = self._take()
            if not came and ready[self._outlet] & select.POLLHUP:
                return  # the process has ended
            if pause.poll(1000 * came / RATE_BPS):
                return
