"""The interface of a device: what it shares with others, and what an asynchronous one needs in addition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

_Made = TypeVar("_Made")


class DeviceFailed(Exception):
    """The device can do no more work in this process, as after a failed assertion in one of its kernels."""


@dataclass(frozen=True)
class DeviceIdentity:
    """The make of a device.

    Args:
        product: Its product name.
        capability: Compute capability of a GPU; zeros for others.
        multiprocessors: Streaming multiprocessors of a GPU; 0 for others.
        place: Place of a GPU in its host; see :func:`gpu_place`.
    """

    product: str
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    place: str = ""


def gpu_place(properties: Any) -> str:
    """Return what tells a GPU from others: its address on the bus, which NCCL, too, takes for its identity.

    MIG slices of a GPU have UUIDs of their own, but one address.

    Args:
        properties: Its properties, by CUDA. Those of an earlier torch lack the address: the place is then the UUID, or
            nothing for a MIG slice.
    """
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in address:
        return ":".join(map(str, address))
    return "" if " MIG " in properties.name else str(properties.uuid)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device at one moment.

    Args:
        total_bytes: All that it has.
        free_bytes: Bytes that no process uses.
        allocated_bytes: Bytes of this process's tensors; 0 where PyTorch does not count them, as on a CPU.
        peak_bytes: Most of those bytes since the start, or since :meth:`Accelerator.reset_peak`.
        reserved_bytes: Bytes that PyTorch's allocator holds, those of tensors included.
    """

    total_bytes: int
    free_bytes: int
    allocated_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0


class Event(Protocol):
    """A mark in the work of a stream."""

    def query(self) -> bool:
        """Return whether the work before it is complete.

        Raises:
            RuntimeError: The device has failed.
        """

    def synchronize(self) -> None:
        """Wait on the host until the work before it is complete.

        Raises:
            RuntimeError: The device has failed.
        """

    def time_ns(self) -> int:
        """Return the time at which a complete timed event was reached, by ``time.monotonic_ns``."""


class DeviceStream(Protocol):
    """Work that a device performs in the order of its requests, in parallel to that of other streams."""

    def record(self, *, timed: bool = False, yields: bool = False) -> Event:
        """Return a mark after the present work.

        Args:
            timed: Whether its time will be asked for.
            yields: Whether a thread that waits for it yields its core, which wakes it later.
        """

    def wait(self, event: Event) -> None:
        """Order the next work after that before an event."""

    def wait_stream(self, other: DeviceStream) -> None:
        """Order the next work after the present work of another stream."""

    def synchronize(self) -> None:
        """Wait on the host until the present work is complete.

        Raises:
            RuntimeError: The device has failed.
        """


class Graph(Protocol):
    """Kernels that were captured once, and are launched together: with the same addresses, in memory of their own."""

    size_bytes: int
    """Bytes of that memory; it is the graph's until nothing refers to the graph and its tensors."""

    def replay(self, seeds: Sequence[int]) -> None:
        """Launch the kernels on the stream of this thread.

        Args:
            seeds: The seed of each random operator, in their order.
        """


class Accelerator(Protocol):
    """A device of this process.

    Tensors of an asynchronous one may be in host memory, too (a modelled one), so that neither their device nor
    ``is_cuda`` says which they are: :meth:`to_host` and :meth:`to_device` do.
    """

    device: torch.device
    """The device of its tensors, by PyTorch."""

    asynchronous: bool
    """True if the host runs ahead of it: operators only queue work on the stream of their thread."""

    generator: torch.Generator
    """Its default generator of random numbers."""

    nccl: bool
    """True if NCCL takes its tensors."""

    graphs: bool
    """True if it can capture work; see :meth:`capture`."""

    def identity(self) -> DeviceIdentity:
        """Return its make."""

    # ---- order

    def current(self) -> DeviceStream:
        """Return the stream that operators of this thread use."""

    def stream(self) -> DeviceStream:
        """Return a new stream."""

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Let operators of this thread use a stream in the context."""

    def synchronize(self) -> None:
        """Wait on the host until all work of all streams is complete.

        Raises:
            RuntimeError: The device has failed.
        """

    # ---- memory

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of the device, owned by the stream of this thread."""

    def keep(self, tensor: Tensor, stream: DeviceStream) -> None:
        """Let a tensor's memory be reused only after the present work of a stream that does not own it; tensors that
        are not the device's are left alone.
        """

    def to_device(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        """Return a tensor of the device with the elements of one of the host, or the tensor if it is there already.

        Args:
            tensor: The tensor, which may be overwritten afterwards if it was copied.
            copy: Whether to copy it in any case.
        """

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host with the elements of one of the device, after waiting for them; or the tensor if
        it is there already.
        """

    def pinned(self, size_bytes: int) -> Tensor:
        """Return new page-locked bytes of the host, with which copies are asynchronous, in less than a page more."""

    def pin(self, memory: Tensor) -> bool:
        """Page-lock existing memory of the host; return whether that was possible.

        Args:
            memory: Its bytes, whole pages.
        """

    def unpin(self, memory: Tensor) -> None:
        """Release memory that :meth:`pin` has page-locked, and that no copy uses any more."""

    def memory(self) -> DeviceMemory:
        """Return its memory at present."""

    def reset_peak(self) -> None:
        """Begin to count :attr:`DeviceMemory.peak_bytes` anew."""

    def limit(self, size_bytes: int) -> None:
        """Limit the bytes that PyTorch's allocator takes for this process."""

    # ---- graphs

    def capture(self, work: Callable[[Callable[[], None]], _Made], draws: int) -> tuple[Graph, _Made]:
        """Capture the kernels of a function, which do not run.

        Args:
            work: The function; it is given one to call before each random operator.
            draws: The number of random operators.

        Returns:
            The graph, and the result of the function; its tensors are filled by each replay.

        Raises:
            RuntimeError: The device cannot capture it, such as a read by the host.
        """

    # ---- random numbers

    def new_generator(self, seed: int) -> torch.Generator:
        """Return a new generator of random numbers."""


class DeviceTensors:
    """Creation of tensors on a device by PyTorch, for accelerators whose tensors are on a device of their own.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor; see :meth:`Accelerator.empty`."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def to_device(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        """Return a tensor there; see :meth:`Accelerator.to_device`."""
        return tensor.to(self.device, copy=copy)
