"""Host parameters: copies of a GPU's parameters in host memory, updated there by an optimizer.

Gradients are copied to the host run by run, while the previous run is updated, and new values are copied back after
each. So transfers overlap with the CPU's kernels, and two runs of pinned memory suffice for the gradients of any model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from onebox.worker.accelerator import Accelerator
from onebox.worker.memory.async_copy import CopyStream, StreamCopy

RUN_BYTES = 32 << 20
"""Size of a run that is transferred or scaled at once: 1 to 3 ms of a PCIe link, so that the few kernels of a run cost
nothing."""

_ALIGN_BYTES = 64

Apply = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Updates some parameters, given by their positions, with their gradients."""


def runs(tensors: Sequence[Tensor], most_bytes: int = RUN_BYTES) -> list[range]:
    """Divide tensors into runs of at most the given bytes; a larger tensor is a run of its own.

    Example:
        >>> import torch
        >>> runs([torch.zeros(2), torch.zeros(2), torch.zeros(9), torch.zeros(1)], 16)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    found: list[range] = []
    start, size_bytes = 0, 0
    for index, tensor in enumerate(tensors):
        if index > start and size_bytes + tensor.nbytes > most_bytes:
            found.append(range(start, index))
            start, size_bytes = index, 0
        size_bytes += tensor.nbytes
    return [*found, range(start, len(tensors))] if tensors else found


def _starts(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in memory for all of them, and its size."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return starts, end


def _over(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a part of memory as a tensor of the type and shape of another."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


class HostParameters:
    """Copies of parameters, kept equal to the originals.

    Args:
        parameters: The parameters, on their device. Other writers of one must call :meth:`refresh`.
        accelerator: Their device.
        run_bytes: Bytes that are transferred at once.
    """

    def __init__(self, parameters: Sequence[Tensor], accelerator: Accelerator, *, run_bytes: int = RUN_BYTES) -> None:
        self._accelerator = accelerator
        self.parameters = list(parameters)
        self._copies = CopyStream(accelerator) if accelerator.asynchronous else None
        starts, whole_bytes = _starts(parameters)
        self._memory = accelerator.pinned(whole_bytes)
        self.tensors = [_over(self._memory, start, p).copy_(p) for p, start in zip(parameters, starts, strict=True)]
        self._runs = runs(self.tensors, run_bytes)
        self._starts: list[int] = []
        longest = 0
        for run in self._runs:
            starts, run_bytes = _starts([self.tensors[index] for index in run])
            self._starts += starts
            longest = max(longest, run_bytes)
        self._staging = [accelerator.pinned(longest) for _ in self._runs[:2]]

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies and of the gradient buffers."""
        return sum(memory.nbytes for memory in (self._memory, *self._staging))

    def move(self, index: int, place: Tensor) -> None:
        """Relocate a parameter from its next step on, which overwrites all of it."""
        self.parameters[index] = place

    def refresh(self, index: int) -> None:
        """Update a copy from its parameter, which has been written to."""
        self.tensors[index].copy_(self.parameters[index])

    def step(self, gradients: Mapping[int, Tensor], factor: Tensor | None, apply: Apply) -> None:
        """Update copies, and their parameters from them.

        Args:
            gradients: One for each updated parameter, by position, on the device.
            factor: Factor for them; ``None`` for no scaling.
            apply: Updates a run of the copies in :attr:`tensors`.
        """
        if factor is not None:
            factor = self._accelerator.to_host(factor)
        if self._copies is not None:
            self._copies.follow()
        stepped = [[index for index in run if index in gradients] for run in self._runs]
        stepped = [run for run in stepped if run]
        coming = self._bring(0, stepped[0], gradients) if stepped else ([], None)
        for number, run in enumerate(stepped):
            staged, arrived = coming
            if number + 1 < len(stepped):  # into the buffer of the gradients that were used last
                coming = self._bring(number + 1, stepped[number + 1], gradients)
            if arrived is not None:
                arrived.finish()
            if factor is not None:
                for gradient in staged:
                    gradient.mul_(factor.to(gradient.dtype))
            apply(run, staged)
            self._copy([(self.tensors[index], self.parameters[index]) for index in run])
        if self._copies is not None:  # readers of the parameters, and writers to the gradients' memory, wait
            self._copies.settle()

    def _bring(
        self, number: int, run: Sequence[int], gradients: Mapping[int, Tensor]
    ) -> tuple[list[Tensor], StreamCopy | None]:
        """Begin to copy a run of gradients to the host; return the destination and the copy, if it is in progress."""
        buffer = self._staging[number % 2]
        staged = []
        for index in run:
            staged.append(_over(buffer, self._starts[index], gradients[index]))
        return staged, self._copy([(gradients[index], place) for index, place in zip(run, staged, strict=True)])

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> StreamCopy | None:
        """Copy each source to its target, in parallel to a GPU's work."""
        if self._copies is not None:
            return self._copies.copy(pairs)
        for source, target in pairs:
            target.copy_(source)
        return None
