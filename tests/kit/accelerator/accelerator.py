"""A modelled accelerator, by the worker's interface of accelerators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from onebox.worker.accelerator.interface import DeviceIdentity, DeviceMemory, DeviceTensors
from tests.kit.accelerator import operators
from tests.kit.accelerator.allocator import CachingAllocator, PinnedMemory
from tests.kit.accelerator.graph import ModelGraph, capture
from tests.kit.accelerator.happens_before import Race
from tests.kit.accelerator.streams import ModelStream, Scheduler

_Made = TypeVar("_Made")

MEMORY_BYTES = 2 << 30
"""Memory of a modelled device."""


@dataclass(frozen=True)
class Counters:
    """Counts since the beginning.

    Args:
        launches: Kernels that were queued.
        synchronisations: Waits of the host.
        pageable_copies: Copies from or to memory of the host that is not page-locked.
    """

    launches: int
    synchronisations: int
    pageable_copies: int


class ModelAccelerator(DeviceTensors):
    """A modelled accelerator; there can be one in a process. It watches the thread that makes it.

    Args:
        seed: Decides the order of what nothing orders.
        memory_bytes: Its memory.
    """

    asynchronous = True
    graphs = True

    def __init__(self, seed: int = 0, *, memory_bytes: int = MEMORY_BYTES) -> None:
        super().__init__(torch.device(operators.device_name(), 0))
        self.generator: torch.Generator = torch.default_generator
        self.nccl = False
        self._scheduler = Scheduler(seed)
        self._allocator = CachingAllocator(self._scheduler, memory_bytes)
        self._pinned = PinnedMemory(self._scheduler)
        self._operators = operators.ModelOperators(self._scheduler, self._allocator, self._pinned)
        self._watch = operators.HostAccessWatch(self._scheduler, self._pinned)
        operators.install(self._operators)
        self._watch.__enter__()

    @property
    def races(self) -> Sequence[Race]:
        """Races so far."""
        return tuple(self._scheduler.races)

    @property
    def counters(self) -> Counters:
        """Counts so far."""
        scheduler = self._scheduler
        return Counters(scheduler.launches, scheduler.synchronisations, self._operators.pageable_copies)

    def close(self) -> None:
        """End the device, in the thread that made it; its tensors can only be freed."""
        self._watch.__exit__(None, None, None)
        operators.uninstall()

    def identity(self) -> DeviceIdentity:
        """Return its make."""
        return DeviceIdentity("modelled accelerator")

    # ---- streams

    def current(self) -> ModelStream:
        """Return the stream of this thread."""
        return self._scheduler.current()

    def stream(self) -> ModelStream:
        """Return a new stream."""
        return self._scheduler.stream()

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Direct the work of this thread to a stream."""
        return self._scheduler.on(stream)

    def synchronize(self) -> None:
        """Wait for all work.

        Raises:
            ModelledFailure: There was a race, or a kernel failed.
        """
        self._scheduler.synchronize()

    # ---- memory

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host, after waiting for its elements."""
        return tensor.cpu()

    def pinned(self, size_bytes: int) -> Tensor:
        """Return new page-locked bytes of the host."""
        return self._pinned.bytes(size_bytes)

    def pin(self, memory: Tensor) -> bool:
        """Page-lock memory of the host; return whether that was possible."""
        return self._pinned.register(memory)

    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin`."""
        self._pinned.unregister(memory)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Delay the reuse of a tensor's memory until the present work of a stream is over when it is freed."""
        if tensor.device.type == self.device.type:
            self._allocator.keep(tensor, stream)

    def memory(self) -> DeviceMemory:
        """Return its memory at present."""
        found = self._allocator
        free_bytes = found.size_bytes - found.reserved_bytes
        return DeviceMemory(found.size_bytes, free_bytes, found.allocated_bytes, found.peak_bytes, found.reserved_bytes)

    def reset_peak(self) -> None:
        """Begin to count the peak anew."""
        self._allocator.peak_bytes = self._allocator.allocated_bytes

    def limit(self, size_bytes: int) -> None:
        """Limit the memory of tensors."""
        self._allocator.limit_bytes = min(size_bytes, self._allocator.size_bytes)

    def capture(self, work: Callable[[Callable[[], None]], _Made], draws: int) -> tuple[ModelGraph, _Made]:
        """Capture the kernels of a function; see :meth:`onebox.worker.accelerator.interface.Accelerator.capture`."""
        return capture(self._scheduler, self._allocator, self._operators, work, draws)

    def new_generator(self, seed: int) -> torch.Generator:
        """Return a new generator of random numbers."""
        return torch.Generator().manual_seed(seed)


__all__ = ["MEMORY_BYTES", "Counters", "ModelAccelerator"]
