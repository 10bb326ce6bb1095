"""The handle of a collective: its results are written to its tensors on the first wait, or, if it is collected without
one, before the next operator on the device.

The write is an operator of the device, which then waits for the other ranks; until then the device can execute later
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.vgpu.signals import shielded

_Work: Any = dist.Work
_Future: Any = torch.futures.Future
_core: Any = torch._C
_FOREVER = timedelta(milliseconds=-1)


PendingWrite = tuple[Tensor, Callable[[], Tensor]]

_issued: dict[_Write, None] = {}
"""The writes of all works, in order. What only a collected work refers to is finalized with it, so that it could not be
handed on: the worker would free the result before it is written."""


class _Write:
    """The write of a result to its tensor.

    Args:
        group: The group of the collective.
        pair: The tensor, and a function that returns the result.
        queue: The command queue of its device.
    """

    def __init__(self, group: object, pair: PendingWrite, queue: CommandQueue) -> None:
        self.group = group
        self.storages = storages_of(pair[0])
        self._pair: PendingWrite | None = pair
        self._queue = queue
        _issued[self] = None

    def __call__(self) -> None:
        """Write it. Idempotent."""
        _issued.pop(self, None)
        pair, self._pair = self._pair, None
        if pair is None:
            return
        tensor, result = pair
        with torch.no_grad():
            made = result()
            if made is not tensor:
                tensor.copy_(made.reshape(tensor.shape))

    def defer(self) -> None:
        """Let the next use of the device write it."""
        self._queue.write_before_use(self)
        _issued.pop(self, None)  # last, so that :func:`write_in_order` misses none

    def drop(self) -> None:
        """Leave it out."""
        _issued.pop(self, None)


def write_in_order(group: object, storages: Set[int]) -> None:
    """Write the results of a group's earlier collectives to the tensors with some storages.

    It finds the results of works that another thread's garbage collection is about to finalize, too: those have no weak
    references any more, and have not been deferred yet.
    """
    for write in list(_issued):
        if write.group is group and not write.storages.isdisjoint(storages):
            write()


class CollectiveWork(_Work):
    """A collective that has been issued.

    Issued in a backward pass, it ends with the pass at the latest: PyTorch's gradient reducer then waits for the
    future, without calling this object.

    Args:
        group: The group that has issued it.
        pairs: Pairs of tensor and result; results are called late, because a device waits at the first operator on one.
        tensors: Value of the future.
        queues: For each pair, the command queue of its device, which takes it over when this object is collected.
    """

    def __init__(
        self,
        group: object,
        pairs: Sequence[PendingWrite],
        tensors: list[Tensor],
        queues: Sequence[CommandQueue],
    ) -> None:
        super().__init__()
        self._writes = [_Write(group, pair, queue) for pair, queue in zip(pairs, queues, strict=True)]
        self._tensors = tensors
        self._future: Future | None = None
        if _in_node():
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Write the results to their tensors, and complete the future. Idempotent."""
        writes, self._writes = self._writes, []
        for write in writes:
            write()
        if self._future is not None:
            self._future.end(self._tensors)

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Order later operators of the device after the collective; for a host tensor, wait for it."""
        self.finish()
        return True

    def synchronize(self) -> None:
        """Do the same as :meth:`wait`."""
        self.finish()

    def is_completed(self) -> bool:
        """Return whether the results are in their tensors."""
        return not self._writes

    is_success = is_completed

    def exception(self) -> None:
        """Return None: errors are raised by reads of a result."""

    def result(self) -> list[Tensor]:
        """Return the tensors."""
        self.finish()
        return self._tensors

    def get_future(self) -> Any:
        """Return a future of the tensors."""
        if self._future is None:
            self._future = Future(self.finish)
            if not self._writes or not _in_node():
                self.finish()
        return self._future

    @shielded
    def __del__(self) -> None:  # wherever the garbage collector runs: no operator, no lock
        for write in self._writes:
            if self._future is None:
                write.defer()
            else:
                write.drop()


def storages_of(value: Any) -> frozenset[int]:
    """Return the addresses of the storages of a tensor, or of those in nested lists and tuples, without empty ones."""
    if isinstance(value, Tensor):
        return frozenset({value.untyped_storage().data_ptr()} - {0})
    if isinstance(value, list | tuple):
        return frozenset().union(*map(storages_of, value))
    return frozenset()


def _in_node() -> bool:
    """Return whether a backward pass is running a node, so that its final callbacks are still to come."""
    return _core._current_graph_task_id() != -1 and _core._current_autograd_node() is not None


class Future(_Future):
    """A future of a collective, which completes as soon as Python code queries it.

    Args:
        finish: Called to complete it.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish
        self._ended = False

    def end(self, tensors: list[Tensor]) -> None:
        """Set the result. Idempotent."""
        if not self._ended:
            self._ended = True
            self.set_result(tensors)

    def done(self) -> bool:
        """Return True, after completing the collective."""
        self._finish()
        return super().done()

    def wait(self) -> Any:
        """Return the tensors."""
        self._finish()
        return super().wait()

    def value(self) -> Any:
        """Return the tensors."""
        self._finish()
        return super().value()

    def then(self, callback: Any) -> Any:
        """Return a future of a function's result for this one."""
        self._finish()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        """Call a function with this future."""
        self._finish()
        super().add_done_callback(callback)


__all__ = ["CollectiveWork", "PendingWrite", "storages_of", "write_in_order"]
