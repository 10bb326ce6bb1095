"""The handle of a collective of a process group: what it gives is written to its tensors when somebody waits.

Writing is an operator of the device, which then waits for the other ranks; until then it can go on with what is behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.errors import OneboxError

_Work: Any = dist.Work
_Future: Any = torch.futures.Future
_core: Any = torch._C
_FOREVER = timedelta(milliseconds=-1)


PendingWrite = tuple[Tensor, Callable[[], Tensor]]


class CollectiveWork(_Work):
    """A collective that has been issued.

    Issued by a node of a backward pass it ends with the pass at the latest: PyTorch's reducer of gradients then waits
    for the future, without asking this object.

    Args:
        pairs: Which tensors get what; called when it is time, as a device waits with the first operator on a result.
        tensors: What the future gives.
    """

    def __init__(self, pairs: Sequence[PendingWrite], tensors: list[Tensor]) -> None:
        super().__init__()
        self._pairs = pairs
        self._tensors = tensors
        self._future: Future | None = None
        if _in_node():
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Write the results to their tensors, and end the future. Idempotent."""
        pairs, self._pairs = self._pairs, ()
        with torch.no_grad():
            for tensor, result in pairs:
                made = result()
                if made is not tensor:
                    tensor.copy_(made.reshape(tensor.shape))
        if self._future is not None:
            self._future.end(self._tensors)

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Let what comes on the device be after the collective; for a tensor of the host, wait for it."""
        self.finish()
        return True

    def synchronize(self) -> None:
        """Do as :meth:`wait`."""
        self.finish()

    def is_completed(self) -> bool:
        """Tell whether the results are in their tensors."""
        return not self._pairs

    is_success = is_completed

    def exception(self) -> None:
        """Return nothing: whoever reads a result is told what went wrong."""

    def result(self) -> list[Tensor]:
        """Return the tensors."""
        self.finish()
        return self._tensors

    def get_future(self) -> Any:
        """Return a future of the tensors."""
        if self._future is None:
            self._future = Future(self.finish)
            if not self._pairs or not _in_node():
                self.finish()
        return self._future

    def __del__(self) -> None:
        if self._pairs and self._future is None:
            with contextlib.suppress(OneboxError):  # whoever uses the device next is told
                self.finish()


def _in_node() -> bool:
    """Tell whether a backward pass is running a node, so that what it calls in the end is still to come."""
    return _core._current_graph_task_id() != -1 and _core._current_autograd_node() is not None


class Future(_Future):
    """A future of a collective, which ends as soon as anybody in Python asks.

    Args:
        finish: Called to let it end.
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
        """Tell that it is done."""
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
        """Return a future of what a function makes of this one."""
        self._finish()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        """Call a function with this future."""
        self._finish()
        super().add_done_callback(callback)


__all__ = ["CollectiveWork", "PendingWrite"]
