"""Deferred optimizer: replaces another one while some of its parameters are in transit from other workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from onebox.wire.protocol.instructions import Branch
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.wire.protocol.snapshots import Recall, StateEntry
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.native import NativeOptimizer


class DeferredOptimizer:
    """Definition of an optimizer that is created at first use, so that nothing waits before that.

    Args:
        spec: Class, groups and options.
        before: The optimizer that it replaces; ``None`` if there was none.
    """

    def __init__(self, spec: OptimizerSpec, before: NativeOptimizer | None) -> None:
        self.numbers = spec.parameters
        self.charged_bytes = 0
        self.postponed: list[Recall | Branch] = []
        """Instructions to apply after its creation."""
        self._spec = spec
        self._entries, self._tensors = _kept(before, spec.parameters)
        if before is not None and not before.on_host:
            self.charged_bytes = sum(tensor.nbytes for tensor in self._tensors)

    def make(
        self,
        parameters: Callable[[Sequence[int]], list[Tensor]],
        made: Callable[[OptimizerSpec, list[Tensor], list[Tensor], HostMemory], NativeOptimizer],
        host: HostMemory,
    ) -> NativeOptimizer:
        """Return the optimizer.

        Args:
            parameters: Waits for buffers.
            made: Creates an optimizer over parameters.
            host: The count of host memory.
        """
        optimizer = made(self._spec, parameters(self.numbers), [], host)
        optimizer.remember(self._entries, self._tensors)
        return optimizer

    def close(self) -> None:
        """Do nothing: it holds no resources."""


def _kept(before: NativeOptimizer | None, parameters: Sequence[int]) -> tuple[list[StateEntry], list[Tensor]]:
    """Return an optimizer's state of parameters that it shares with another one, as entries of the latter."""
    entries: list[StateEntry] = []
    tensors: list[Tensor] = []
    if before is None:
        return entries, tensors
    places = {number: place for place, number in enumerate(parameters)}
    old, remembered = before.state()
    left = iter(remembered)
    for entry in old:
        tensor = None if isinstance(entry.value, bool | int | float | None) else next(left)
        place = places.get(before.numbers[entry.parameter])
        if place is None:
            continue
        entries.append(StateEntry(place, entry.key, entry.value))
        if tensor is not None:
            tensors.append(tensor)
    return entries, tensors
