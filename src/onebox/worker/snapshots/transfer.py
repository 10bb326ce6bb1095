"""Snapshot transfer of a worker: sends and receives slots while the worker computes.

Each transfer has a thread of its own, of low priority, and a group of its own with one other worker. Slots travel in
pieces; the receiver acknowledges each, and the sender is at most :data:`PIECES_IN_FLIGHT` pieces ahead. So for a state
of any size, only a few pieces are in memory besides the slots.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from onebox.wire import TensorSpec
from onebox.wire.protocol.snapshots import Give, Take, end_to_end, pieces
from onebox.worker.comm.api import Finish, WorkerGroup
from onebox.worker.faults import FaultInjector
from onebox.worker.snapshots.slots import SnapshotSlot
from onebox.worker.system.cpu_affinity import use_all_cores

PIECES_IN_FLIGHT = 2
"""Pieces in flight: one is copied while the next one travels."""

_NICE = 10
_JOIN_S = 2.0
_WORD = TensorSpec("uint8", (1,))


class SnapshotTransfer:
    """The snapshot transfers of a worker.

    Args:
        faults: Faults to inject, for tests.
    """

    def __init__(self, faults: FaultInjector) -> None:
        self._faults = faults
        self._running: dict[int, _Transfer] = {}  # by group

    def give(self, give: Give, slot: SnapshotSlot, group: WorkerGroup) -> None:
        """Begin to send parts of a slot."""
        for start, size_bytes in give.runs:
            slot.bytes_at(start, size_bytes)
        self._begin(give.group, _Transfer(slot, group, lambda transfer: self._send(give, transfer)))

    def take(self, take: Take, slot: SnapshotSlot, group: WorkerGroup) -> None:
        """Begin to fill a slot."""
        self._begin(take.group, _Transfer(slot, group, lambda transfer: self._receive(take, transfer)))

    def stop(self, group: int) -> None:
        """Stop a transfer soon, before its group is left."""
        transfer = self._running.get(group)
        if transfer is not None:
            transfer.stopped.set()

    def close(self) -> None:
        """Wait briefly for all transfers, whose groups have been left."""
        for transfer in self._running.values():
            transfer.stopped.set()
        for transfer in self._running.values():
            transfer.thread.join(_JOIN_S)

    def _begin(self, group: int, transfer: _Transfer) -> None:
        before = self._running.get(group)
        if before is not None:
            before.thread.join(_JOIN_S)  # the next slot follows the arrival of the previous one, so it is about to end
        self._running = {number: other for number, other in self._running.items() if other.thread.is_alive()}
        self._running[group] = transfer
        transfer.thread.start()

    def _send(self, give: Give, transfer: _Transfer) -> None:
        slot, group = transfer.slot, transfer.group
        slot.settle()
        total = sum(size for _, size in give.runs)
        words: deque[Finish] = deque()
        begin_s, sent = time.monotonic(), 0
        for start, size in pieces(give.runs):
            if len(words) == PIECES_IN_FLIGHT:
                words.popleft()()
            if transfer.stopped.wait(max(0.0, begin_s + give.over_s * sent / total - time.monotonic())):
                return
            self._faults.at("giving")
            group.send(slot.bytes_at(start, size), give.peer, 0)
            words.append(group.receive(_WORD, give.peer, 0))
            sent += size
        for word in words:
            word()

    def _receive(self, take: Take, transfer: _Transfer) -> None:
        slot, group = transfer.slot, transfer.group
        taken = torch.zeros(1, dtype=torch.uint8)
        expected: deque[tuple[int, int, Finish]] = deque()

        def arrive() -> None:
            start, size, finish = expected.popleft()
            part = finish().tensor
            self._faults.at("taking")
            ctypes.memmove(slot.bytes_at(start, size).data_ptr(), part.data_ptr(), size)
            group.send(taken, take.peer, 0)

        for start, size in pieces(end_to_end(take.sizes)):
            expected.append((start, size, group.receive(TensorSpec("uint8", (size,)), take.peer, 0)))
            if len(expected) == PIECES_IN_FLIGHT:
                arrive()
        while expected:
            arrive()
        slot.filled = True


class _Transfer:
    """A transfer in progress.

    Args:
        slot: The source or destination slot.
        group: The group, exclusive to this transfer.
        carry: Performs the transfer.
    """

    def __init__(self, slot: SnapshotSlot, group: WorkerGroup, carry: Callable[[_Transfer], None]) -> None:
        self.slot = slot
        self.group = group
        self.stopped = threading.Event()
        self._carry = carry
        slot.carriers += 1
        self.thread = threading.Thread(target=self._run, name="onebox-courier", daemon=True)

    def _run(self) -> None:
        use_all_cores()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # of this thread; the filter of system calls allows no other
        try:
            with torch.inference_mode():
                self._carry(self)
        except Exception as error:  # the client reads it by polling
            self.slot.fail(str(error) or type(error).__name__)
        finally:
            self.slot.carriers -= 1
