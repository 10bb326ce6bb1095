"""The host as a device: its work is complete when the call returns, so that streams and events have nothing to do."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from onebox.worker.accelerator.interface import DeviceIdentity, DeviceMemory, DeviceStream, DeviceTensors, Event, Graph

_Made = TypeVar("_Made")

_CPU_INFO = Path("/proc/cpuinfo")


class _HostEvent:
    """A mark that was reached when it was made."""

    def __init__(self) -> None:
        self._at_ns = time.monotonic_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def time_ns(self) -> int:
        return self._at_ns


class _HostStream:
    """A stream whose work is always complete."""

    def record(self, *, timed: bool = False, yields: bool = False) -> _HostEvent:
        return _HostEvent()

    def wait(self, event: Event) -> None:
        pass

    def wait_stream(self, other: DeviceStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class HostAccelerator(DeviceTensors):
    """The host's processors; implements :class:`~onebox.worker.accelerator.interface.Accelerator`."""

    asynchronous = False
    graphs = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.generator = torch.default_generator
        self.nccl = False
        self._stream = _HostStream()

    def identity(self) -> DeviceIdentity:
        """Return the product name of the processor."""
        for line in _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []:
            if line.startswith("model name"):
                return DeviceIdentity(line.split(":", 1)[1].strip())
        return DeviceIdentity(platform.processor() or platform.machine())

    def current(self) -> _HostStream:
        """Return the only stream."""
        return self._stream

    def stream(self) -> _HostStream:
        """Return the only stream."""
        return self._stream

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: all work is complete."""

    def keep(self, tensor: Tensor, stream: DeviceStream) -> None:
        """Do nothing: no work is left that could use it."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def pinned(self, size_bytes: int) -> Tensor:
        """Return new bytes, which need no lock."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> bool:
        """Do nothing: copies need no lock."""
        return True

    def unpin(self, memory: Tensor) -> None:
        """Do nothing: nothing was locked."""

    def memory(self) -> DeviceMemory:
        """Return the memory of the host."""
        found = psutil.virtual_memory()
        return DeviceMemory(int(found.total), int(found.available))

    def reset_peak(self) -> None:
        """Do nothing: PyTorch does not count a CPU's memory."""

    def limit(self, size_bytes: int) -> None:
        """Do nothing: the process is limited by the kernel."""

    def capture(self, work: Callable[[Callable[[], None]], _Made], draws: int) -> tuple[Graph, _Made]:
        """Refuse: there are no kernels without the operators."""
        raise RuntimeError(f"{self.device} captures no work")

    def new_generator(self, seed: int) -> torch.Generator:
        """Return a new generator."""
        return torch.Generator().manual_seed(seed)
