"""Shared-memory messages copied by an accelerator: posted when the copy is complete, returned after they have been
read.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import NamedTuple

from torch import Tensor

from onebox.wire import TensorSpec
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.shm.arena import MemoryBlock
from onebox.worker.comm.shm.gpu_copy import ShmCopier, ShmCopy
from onebox.worker.comm.shm.layout import ShmMessage
from onebox.worker.comm.shm.receiver import PendingReceive
from onebox.worker.comm.shm.segment import SharedMemory
from onebox.worker.comm.shm.sender import BlockRegion, ShmSender

_CLOSE_S = 30.0
"""Longest wait of a leaving worker for its sends to be completed by the accelerator."""


class _Waiting(NamedTuple):
    done: ShmCopy
    peer: int
    channel: int
    block: MemoryBlock
    spec: TensorSpec | None  # none if more parts follow


class GpuShmSender:
    """Sends and receives for a device that copies asynchronously.

    A thread waits for copies and posts them in order, so that the worker can wait for other ranks that depend on them.

    Args:
        sender: The sender of this rank.
        copier: The copier.
    """

    def __init__(self, sender: ShmSender, copier: ShmCopier) -> None:
        self._sender = sender
        self._copier = copier
        self._failure = ""
        self._reading: deque[tuple[ShmCopy, PendingReceive]] = deque()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._post, name="onebox-post", daemon=True)
        self._thread.start()

    def send(self, tensor: Tensor, peer: int, channel: int, place: BlockRegion) -> BlockRegion:
        """Begin to send a tensor, or a part of one; return its location, with its block.

        Raises:
            RankLost: An earlier copy failed; the group has been left.
        """
        self.settle()
        if self._failure:
            raise RankLost(f"the group has been left: {self._failure}")
        block = place.block or self._sender.take(place.whole.size_bytes)
        done = self._copier.out(tensor, self._sender.memory, block.offset, place.start, place.whole.size_bytes)
        self._queue.put(_Waiting(done, peer, channel, block, place.whole if place.last else None))
        return place._replace(block=block)

    def receive(self, expected: PendingReceive, message: ShmMessage, memory: SharedMemory) -> Tensor:
        """Return a tensor of the device with the elements of a message, which is returned when they have been
        copied.
        """
        made, done = self._copier.into(memory, message.offset, message.spec)
        self._reading.append((done, expected))
        return made

    def settle(self) -> None:
        """Return the messages that have been read."""
        while self._reading and self._reading[0][0].over():
            self._reading.popleft()[1].give_back()

    def close(self) -> None:
        """Post pending sends, wait for reads, and release all memory. Idempotent."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self._copier.release()
        while self._reading:
            self._reading.popleft()[1].give_back()

    def _post(self) -> None:
        while (waiting := self._queue.get()) is not None:
            try:
                waiting.done.wait()
            except Exception as error:  # reported everywhere: peers see the group left, this worker the next call
                self._failure = str(error) or type(error).__name__
                self._sender.leave()
                return
            if waiting.spec is not None:
                self._sender.post(waiting.peer, waiting.channel, waiting.block, waiting.spec)
            del waiting
