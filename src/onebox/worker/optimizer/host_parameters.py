"""Host parameters: copies of a GPU's parameters in host memory, updated there by an optimizer.

Gradients are copied to the host run by run, while the previous run is updated, and new values are copied back after
each. So transfers overlap with the CPU's kernels, and two runs of pinned memory suffice for the gradients of any model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from onebox.cost import RUN_BYTES, aligned_starts, runs, staging_bytes
from onebox.worker.accelerator import Accelerator
from onebox.worker.memory.async_copy import CopyStream, StreamCopy

Apply = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Updates some parameters, given by their positions, with their gradients."""


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
        sizes = [parameter.nbytes for parameter in parameters]
        starts, whole_bytes = aligned_starts(sizes)
        self._memory = accelerator.pinned(whole_bytes)
        self.tensors = [_over(self._memory, start, p).copy_(p) for p, start in zip(parameters, starts, strict=True)]
        self._runs = runs(sizes, run_bytes)
        self._starts = [start for run in self._runs for start in aligned_starts([sizes[index] for index in run])[0]]
        self._staging = [accelerator.pinned(buffer_bytes) for buffer_bytes in staging_bytes(sizes, run_bytes)]

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
