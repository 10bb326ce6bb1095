"""Functions of ``torch.cuda`` on virtual devices that differ from those of ``torch.vgpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.cuda_alias.device_names import number_of, to_cuda
from onebox.vgpu.cuda_alias.unsupported import raise_unsupported
from onebox.vgpu.integration import device_module
from onebox.vgpu.runtime import context
from onebox.vgpu.runtime.command_queue import CommandQueue

_BFLOAT16 = _TENSOR_FLOAT32 = 8
"""The first compute capability with these types in hardware."""


def no(*args: Any) -> bool:
    """Return False."""
    return False


def yes(*args: Any) -> bool:
    """Return True."""
    return True


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: virtual devices need no such call."""


def call(callable: Callable[[], Any], **kwargs: Any) -> None:
    """Call a function that PyTorch would call once CUDA is initialized, which it is."""
    callable()


# ---- devices

_counted: list[int] = [0]


def device_count() -> int:
    """Return the number of devices; in a forked process, that of its parent."""
    if not device_module._is_in_bad_fork():
        _counted[0] = context.device_count()
    return _counted[0]


def is_available() -> bool:
    """Return whether there is a device."""
    return device_count() > 0


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Return whether tensors go from one device to another without passing the client: always, except to itself."""
    here, there = number_of(device), number_of(peer_device)
    return here != there and device_module.can_device_access_peer(here, there)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether bfloat16 works: on every worker, though slowly on some."""
    return including_emulation or device_module.get_device_capability()[0] >= _BFLOAT16


def is_tf32_supported() -> bool:
    """Return whether the current device has TensorFloat-32."""
    return device_module.get_device_capability()[0] >= _TENSOR_FLOAT32


def nccl_version() -> tuple[int, int, int]:
    """Return the first version of NCCL with everything that the workers' collectives do; PyTorch compares it before
    DistributedDataParallel sends bfloat16, and logs it with errors."""
    return (2, 10, 3)


def get_arch_list() -> list[str]:
    """Return the client's CUDA architectures: none, workers have their own."""
    return []


def get_gencode_flags() -> str:
    """Return the client's compilation flags for CUDA: none, workers have their own."""
    return ""


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Accept ``"default"`` and reject all else: waits are not reported."""
    if debug_mode not in (0, "default"):
        raise_unsupported("torch.cuda.set_sync_debug_mode")


def get_sync_debug_mode() -> int:
    """Return 0: waits are not reported."""
    return 0


# ---- random numbers


def get_rng_state(device: Any = "cuda") -> Tensor:
    """Return the state of a device's random numbers, as bytes."""
    return device_module.get_rng_state(number_of(device))


def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
    """Set the state of a device's random numbers."""
    device_module.set_rng_state(new_state, number_of(device))


# ---- accelerators, PyTorch's general term for CUDA devices and the like


def accelerator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that returns the accelerator, to return the script's name of it."""

    def translated(*args: Any) -> Any:
        found = function(*args)
        return None if found is None else to_cuda(found)

    return translated


def accelerator_index(function: Callable[..., int]) -> Callable[..., int]:
    """Wrap a function that returns the index of an accelerator's device, which PyTorch itself calls ``vgpu``."""

    def translated(device: Any, optional: bool = False) -> int:
        is_place = isinstance(device, str | torch.device)
        return function(to_cuda(torch.device(device)) if is_place else device, optional)

    return translated


# ---- annotations for a profiler, which have no effect here


class Range:
    """A named range: a context, or a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exit_info: object) -> None:
        pass

    def __call__(self, function: Any) -> Any:
        return function


def depth(*args: Any, **kwargs: Any) -> int:
    """Return the depth of nested ranges, which is not tracked."""
    return 0


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """Return the statistics of :func:`torch.cuda.memory_stats`, one dictionary in another for each dot."""
    nested: dict[str, Any] = {}
    for name, value in device_module.memory_stats(number_of(device)).items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return a device's memory statistics as a table of text."""
    number = number_of(device)
    figures = device_module.memory_stats(number)
    free, total = device_module.mem_get_info(number)
    rows = [
        ("in use", figures["allocated_bytes.all.current"]),
        ("most in use", figures["allocated_bytes.all.peak"]),
        ("free", free),
        ("of the device", total),
    ]
    lines = [f"memory of cuda:{number}, {device_module.get_device_name(number)}"]
    lines += [f"  {what:<14} {size_bytes / 2**20:12.1f} MiB" for what, size_bytes in rows]
    return "\n".join(lines)


def get_per_process_memory_fraction(device: Any = None) -> float:
    """Return the share of a device's memory that this process may use."""
    queue, total = _memory_of(device)
    return queue.most_bytes / total if queue.most_bytes else 1.0


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Set the share of a device's memory that this process may use, within the limit of the pool.

    Raises:
        ValueError: It is not a number from 0 to 1.
    """
    if not (isinstance(fraction, float | int) and 0 <= fraction <= 1):
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0 to 1")
    queue, total = _memory_of(device)
    queue.bound_memory(most_bytes=max(1, int(fraction * total)) if fraction < 1 else 0)


def _memory_of(device: Any) -> tuple[CommandQueue, int]:
    """Return a device's queue, and the bytes of its memory."""
    number = number_of(device)
    return context.place(number), device_module.get_device_properties(number).total_memory
