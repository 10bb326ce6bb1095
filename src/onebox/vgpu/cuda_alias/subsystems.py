"""Parts of PyTorch beside ``torch.cuda`` for which ``cuda`` means the virtual devices: autocast, generators, loading of
files, ranks and their collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from onebox.vgpu.cuda_alias.cuda_generators import CudaGenerator
from onebox.vgpu.cuda_alias.device_names import number_of, to_vgpu_type
from onebox.vgpu.cuda_alias.functions import yes
from onebox.vgpu.distributed import process_group
from onebox.vgpu.patches import Patches

_BY_TYPE = ("get_autocast_dtype", "is_autocast_enabled", "set_autocast_dtype", "set_autocast_enabled")
"""Functions whose first argument is a device type, by default CUDA."""


def _by_type(function: Callable[..., Any], fewest: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def translated(*args: Any) -> Any:
        if len(args) < fewest:
            args = ("cuda", *args)
        return function(to_vgpu_type(args[0]), *args[1:])

    return translated


def translate_amp(patches: Patches) -> None:
    """Make autocast, and the queries of its state, accept ``cuda``."""
    for name in _BY_TYPE:
        translated = _by_type(getattr(torch, name), 2 if name.startswith("set") else 1)
        patches.set(torch, name, translated)
    available = torch._C._is_autocast_available
    patches.set(torch._C, "_is_autocast_available", _by_type(available, 1))
    patches.set(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda"))
    patches.set(torch, "set_autocast_gpu_dtype", lambda dtype: torch.set_autocast_dtype("cuda", dtype))


def translate_generators(patches: Patches) -> None:
    """Make generators of virtual devices for ``cuda``, and report that as their device."""
    patches.set(torch, "Generator", CudaGenerator)


_PRIORITY = 5
"""Before PyTorch's own for CUDA."""


def _no_mark(storage: Any) -> None:
    """Return no location tag: PyTorch's for CUDA applies."""


def _restored(storage: Any, location: str) -> Any:
    """Move a file's storage to the virtual device of its location tag."""
    return _there(storage, location) if location.startswith("cuda") else None


def _there(storage: Any, device: Any) -> Any:
    return storage.to(device=torch.device("vgpu", number_of(device)))


def translate_saved(patches: Patches) -> None:
    """Make loads onto ``cuda`` go to the virtual devices."""
    registry: list[Any] = torch.serialization._package_registry
    before = list(registry)
    torch.serialization.register_package(_PRIORITY, _no_mark, _restored)
    (entry,) = (each for each in registry if each not in before)
    patches.on_removal(lambda: registry.remove(entry))

    @functools.wraps(torch.UntypedStorage.cuda)
    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return _there(self, device)

    patches.set(torch.storage._StorageBase, "cuda", cuda)
    patches.set(safetensors.torch, "safe_open", _on_current_device(safetensors.safe_open))


def _on_current_device(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``cuda`` without a number the current device, for which safetensors has the first: with a rank for each
    device that one may be another rank's."""

    @functools.wraps(safe_open)
    def opened(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        place = f"cuda:{number_of(device)}" if device == "cuda" else device
        return safe_open(filename, framework, device=place, **options)

    return opened


_SCRIPT_BACKEND = "nccl"


def translate_distributed(patches: Patches) -> None:
    """Accept a script's names of backends."""
    backend = _script_name(distributed_c10d.get_backend)
    for module in (dist, distributed_c10d):
        patches.set(module, "get_backend", backend)
        patches.set(module, "is_nccl_available", yes)


def _script_name(get_backend: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(get_backend)
    def called(group: Any = None) -> str:
        name = get_backend(group)
        return _SCRIPT_BACKEND if name == process_group.NAME else name

    return called
