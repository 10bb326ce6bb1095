"""A GPU by CUDA: with ``cuda_graph`` the only user of ``torch.cuda`` in the worker; not yet run on one."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.worker.accelerator.cuda_graph import GraphCapture
from onebox.worker.accelerator.interface import DeviceIdentity, DeviceMemory, gpu_place
from onebox.worker.accelerator.pinned_pages import locked_pages

_ANCHOR_NS = 1_000_000_000
"""Age at which clocks are compared anew: 20 ppm are 20 µs then; ``elapsed_time``, a float of ms, is exact to 60 ns."""


class _CudaEvent(torch.cuda.Event):
    anchor: Any = None  # of a timed one

    def time_ns(self) -> int:
        return self.anchor[1] + round(self.anchor[0].elapsed_time(self) * 1e6)


class _CudaStream:
    def __init__(self, stream: Any, accelerator: CudaAccelerator) -> None:
        self.stream = stream
        self._accelerator = accelerator

    def record(self, *, timed: bool = False, yields: bool = False) -> _CudaEvent:
        event = _CudaEvent(enable_timing=timed, blocking=yields)
        event.anchor = self._accelerator.anchor() if timed else None
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event)

    def wait_stream(self, other: Any) -> None:
        self.stream.wait_stream(other.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaAccelerator(GraphCapture):
    """A GPU; implements :class:`~onebox.worker.accelerator.interface.Accelerator`, which describes the methods."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cuda", device.index or 0))
        self.nccl = dist.is_nccl_available()
        self._idle: torch.cuda.Stream | None = None
        self._anchor: tuple[torch.cuda.Event, int] | None = None

    def anchor(self) -> tuple[torch.cuda.Event, int]:
        """Return an event that was reached at a known time, on a stream that is always idle."""
        if self._anchor is None or time.monotonic_ns() - self._anchor[1] > _ANCHOR_NS:
            self._idle = self._idle or torch.cuda.Stream(self.device)
            event, begin_ns = torch.cuda.Event(enable_timing=True), time.monotonic_ns()
            event.record(self._idle)
            event.synchronize()
            self._anchor = event, (begin_ns + time.monotonic_ns()) // 2
        return self._anchor

    def identity(self) -> DeviceIdentity:
        found = torch.cuda.get_device_properties(self.device)
        return DeviceIdentity(found.name, (found.major, found.minor), found.multi_processor_count, gpu_place(found))

    def current(self) -> _CudaStream:
        return _CudaStream(torch.cuda.current_stream(self.device), self)

    def stream(self) -> _CudaStream:
        return _CudaStream(torch.cuda.Stream(self.device), self)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream.stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        if tensor.is_cuda:
            tensor.record_stream(stream.stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def pinned(self, size_bytes: int) -> Tensor:
        return locked_pages(size_bytes, self)

    def pin(self, memory: Tensor) -> bool:
        if not int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            return True
        with suppress(RuntimeError):  # clears the driver's error, which the next kernel launch would report
            torch.zeros(1, device=self.device)
        return False

    def unpin(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.device)
        counts = (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved)
        return DeviceMemory(total, free, *(count(self.device) for count in counts))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def limit(self, size_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / self.memory().total_bytes), self.device)

    def new_generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)
