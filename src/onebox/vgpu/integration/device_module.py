"""``torch.vgpu``: the module of the virtual devices, as ``torch.cuda`` is that of real ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.integration import generators
from onebox.vgpu.integration.events import VirtualEvent as Event
from onebox.vgpu.integration.events import VirtualStream as Stream
from onebox.vgpu.runtime import context
from onebox.vgpu.runtime.context import Device, current_context, current_device, device_count, place
from onebox.wire import DTYPES
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import WorkerMemory

# ---- devices


def is_available() -> bool:
    """Return whether there is a virtual device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return whether a pool is open and, in a process that shares one with others, a device was chosen or used.

    A launcher's processes that have done neither get the device of their local rank from PyTorch's ``DeviceMesh``.
    """
    queues = context.open_queues()
    return context.has_chosen_device() or any(queue.used or not queue.pool.attached for queue in queues)


def init() -> None:
    """Do nothing: opening a pool is the initialization."""


def _lazy_init() -> None:
    """Begin to use the devices; PyTorch calls it before it first makes a tensor of one.

    Raises:
        PoolError: No pool is open; or there is no object in C++ for this PyTorch, and none can be built.
    """
    current_context().begin()


def _is_in_bad_fork() -> bool:
    """Return whether this is a forked process whose parent has virtual devices."""
    return context.is_forked()


def set_device(device: Device) -> None:
    """Set this thread's current device."""
    context.set_current_device(place(device).worker)


class device(contextlib.ContextDecorator):
    """A context in which a device is the current one.

    Args:
        device: The device; ``None`` or a negative number for no change.
    """

    def __init__(self, device: Device) -> None:
        none = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if none else place(device).worker
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        if self.idx >= 0:
            context.set_current_device(self.idx)

    def __exit__(self, *exit_info: object) -> None:
        if self.idx >= 0:
            context.set_current_device(self._before)


class device_of(device):
    """A context in which the device of a tensor is the current one; no change for a host tensor."""

    def __init__(self, obj: Tensor) -> None:
        super().__init__(command_queue_of(obj).worker if is_virtual(obj) else None)


def exchange_device(number: int) -> int:
    """Set the current device and return the previous one."""
    before = current_device()
    if number >= 0:
        context.set_current_device(number)
    return before


_exchange_device = _maybe_exchange_device = maybe_exchange_device = exchange_device


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """Properties of a device.

    Args:
        name: Product name and host.
        total_memory: Memory in bytes.
        multi_processor_count: Streaming multiprocessors of a GPU, threads of a CPU.
        major: Major compute capability; 0 without a GPU.
        minor: Minor compute capability.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    warp_size: int = 32
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536

    @property
    def gcnArchName(self) -> str:
        """The name, as for CUDA; the default backend of ``torch.compile`` reads it even for graphs on the host."""
        return self.name

    @property
    def max_threads_per_multi_processor(self) -> int:
        """Most threads of a streaming multiprocessor, from the CUDA programming guide's table of compute
        capabilities."""
        return {(7, 5): 1024}.get((self.major, self.minor), 2048 if self.minor == 0 and self.major < 12 else 1536)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} of a virtual device is not known here; look for it on the machine of the worker")


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Return the properties of a device."""
    queue = place(device)
    info = queue.pool.devices[queue.worker]
    return DeviceProperties(
        name=f"{info.name} ({info.device} on {info.host})",
        total_memory=info.memory_bytes,
        multi_processor_count=info.processors or info.threads,
        major=info.capability[0],
        minor=info.capability[1],
    )


def get_device_name(device: Device = None) -> str:
    """Return the product name and the host of a device."""
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Return the compute capability of a device: (0, 0) without a GPU."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Return whether tensors go from one device to another without passing the client: always, within a pool."""
    return place(device).pool is place(peer_device).pool


# ---- order


def synchronize(device: Device = None) -> None:
    """Wait until a device has executed everything issued to it.

    Raises:
        OneboxError: Its worker is gone.
    """
    place(device).synchronize()


def current_stream(device: Device = None) -> Stream:
    """Return the stream of a device."""
    return Stream(device)


default_stream = current_stream


def set_stream(stream: Stream) -> None:
    """Make the device of a stream the current one."""
    context.set_current_device(stream.device_index)


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """A context in which a stream is the current one."""
    with device(None if stream is None else stream.device_index):
        yield


# ---- memory


def _memory(device: Device) -> WorkerMemory:
    queue = place(device)
    if queue.unused:
        queue.flush()
    if queue.unused:  # it may be another rank's, for whose collectives this process must not wait
        return queue.pool.memory(queue.worker)
    answer = queue.flush([Ask("memory")], wait=True)
    assert answer is not None
    (memory,) = (result for result in answer.results if isinstance(result, WorkerMemory))
    return memory


def memory_allocated(device: Device = None) -> int:
    """Return the bytes of buffers on a device."""
    return _memory(device).used_bytes


def max_memory_allocated(device: Device = None) -> int:
    """Return the peak of bytes of buffers on a device."""
    return _memory(device).peak_bytes


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset the peak of a device's buffers to their present bytes."""
    queue = place(device)
    if not queue.unused:
        queue.flush([Ask("peak")], wait=True)


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Do nothing: none of a virtual device's memory statistics is a sum over time."""
    place(device)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total bytes of a device."""
    total = get_device_properties(device).total_memory
    return max(0, total - memory_allocated(device)), total


def memory_stats(device: Device = None) -> dict[str, int]:
    """Return a device's memory statistics, by their names in ``torch.cuda``."""
    memory = _memory(device)
    return {
        f"{what}_bytes.all.{which}": value
        for what in ("allocated", "active", "reserved")
        for which, value in (("current", memory.used_bytes), ("peak", memory.peak_bytes))
    }


def empty_cache() -> None:
    """Flush the queues, so that unreferenced buffers are freed now."""
    for queue in context.open_queues():
        queue.flush()


# ---- random numbers


def manual_seed(seed: int) -> None:
    """Seed the random numbers of the current device."""
    generators.seed_device(place(None), seed)


def manual_seed_all(seed: int) -> None:
    """Seed the random numbers of all devices; without devices, do nothing."""
    if is_available():
        generators.seed_all(seed)


def seed() -> None:
    """Seed the random numbers of the current device with a random seed."""
    manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


def seed_all() -> None:
    """Seed the random numbers of all devices with a random seed."""
    manual_seed_all(int.from_bytes(os.urandom(8), "little") >> 1)


def initial_seed() -> int:
    """Return the seed of the current device's random numbers."""
    return place(None).seed


def get_rng_state(device: Device = None) -> Tensor:
    """Return the state of a device's random numbers, as bytes."""
    return generators.read_state(place(device), 0)


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    """Set the state of a device's random numbers."""
    generators.write_state(place(device), 0, new_state)


def get_rng_state_all() -> list[Tensor]:
    """Return the states of all devices' random numbers."""
    return [get_rng_state(number) for number in range(device_count())]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    """Set the states of all devices' random numbers."""
    for number, state in enumerate(new_states):
        set_rng_state(state, number)


SUPPORTED = tuple(DTYPES.values())
"""The element types of a device's tensors."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the element types that autocast may cast to."""
    return [torch.bfloat16, torch.float16]


class _Module(ModuleType):
    """A module some of whose names depend on whether a pool is open."""

    @property
    def _initialized(self) -> bool:  # read by torch.utils.checkpoint before it keeps random states
        return is_initialized()


PUBLIC = (
    "DeviceProperties", "Event", "Stream", "_exchange_device", "_is_in_bad_fork", "_lazy_init",
    "_maybe_exchange_device", "can_device_access_peer", "current_device", "current_stream", "default_stream",
    "device", "device_count", "device_of", "empty_cache", "exchange_device", "get_amp_supported_dtype",
    "get_device_capability", "get_device_name", "get_device_properties", "get_rng_state", "get_rng_state_all", "init",
    "initial_seed", "is_available", "is_initialized", "manual_seed", "manual_seed_all", "max_memory_allocated",
    "max_memory_cached", "max_memory_reserved", "maybe_exchange_device", "mem_get_info", "memory_allocated",
    "memory_cached", "memory_reserved", "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    "seed", "seed_all", "set_device", "set_rng_state", "set_rng_state_all", "set_stream", "stream", "synchronize",
)  # fmt: skip
"""The names of ``torch.vgpu``; those with an underscore are for PyTorch itself."""


def as_module() -> ModuleType:
    """Return the module that becomes ``torch.vgpu``."""
    made = _Module("torch.vgpu", __doc__)
    for name in PUBLIC:
        setattr(made, name, globals()[name])
    return made


__all__ = ["PUBLIC", "Event", "Stream", "as_module"]
