"""The handle of a buffer on a worker, with the storage that represents the buffer in this process."""

from __future__ import annotations

import threading

from onebox.vgpu.core.storage import VirtualStorage, new_storage
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.vgpu.signals import shielded

_lock = threading.Lock()


class Handle:
    """The number of a buffer on a worker; the buffer is freed with it.

    Args:
        queue: Command queue of the device.
        number: The buffer.
    """

    __slots__ = ("_storage", "number", "queue")

    _storage: VirtualStorage  # set on first use

    @shielded
    def __init__(self, queue: CommandQueue, number: int) -> None:
        self.queue = queue
        self.number = number

    @shielded
    def __del__(self) -> None:
        self.queue.dead.append(self.number)  # by any thread that collects it; the next record processes it

    def storage(self, size_bytes: int) -> VirtualStorage:
        """Return the storage of the buffer: the same one until the buffer has another size.

        Args:
            size_bytes: The size of the buffer now.
        """
        with _lock:
            known = getattr(self, "_storage", None)
            if known is None or known.nbytes() != size_bytes:
                known = self._storage = new_storage(size_bytes, self.queue.device)
        return known
