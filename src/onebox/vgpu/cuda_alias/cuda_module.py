"""``torch.cuda`` on virtual devices: the implementation of each of its names.

Every name is in one of three groups: those mapped here, those whose code in PyTorch works once the first are mapped
(:data:`KEPT`), and the rest, which raise an error. New names of a later PyTorch raise an error until they are added
here. Names with an underscore are left alone, except those that PyTorch's code or scripts use.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable
from typing import Any

import torch

from onebox.vgpu.cuda_alias import cuda_generators, functions, streams
from onebox.vgpu.cuda_alias.cuda_tensors import TENSOR_TYPES
from onebox.vgpu.cuda_alias.device_names import number_of
from onebox.vgpu.cuda_alias.unsupported import unsupported_stub
from onebox.vgpu.integration import device_module
from onebox.vgpu.patches import Patches

KEPT = {
    "AcceleratorError",
    "CudaError",
    "DeferredCudaCallError",
    "OutOfMemoryError",
    "cudaStatus",
    "device",
    "device_of",
}
"""Functions and classes kept from PyTorch, because they only use mapped names."""

KEPT_MODULES = {"torch.cuda.amp", "torch.cuda.comm", "torch.cuda.sparse"}
"""Likewise, submodules kept as a whole."""

NAMED_TOO = {
    "_compile_kernel",
    "_dump_snapshot",
    "_record_memory_history",
    "_sleep",
    "_snapshot",
}
"""Functions with an underscore that scripts nevertheless call."""

_OF_DEVICES = (
    "current_device",
    "empty_cache",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state_all",
)
"""Functions taken from ``torch.vgpu``."""

_OF_ONE = (
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "synchronize",
)
"""Likewise, with a device argument."""

_OWN: dict[str, Any] = {
    "Event": streams.CudaEvent,
    "Stream": streams.CudaStream,
    "StreamContext": streams.StreamContext,
    "_exchange_device": device_module.exchange_device,
    "_get_generator": cuda_generators.default_generator,
    "_initialized": True,
    "_is_in_bad_fork": device_module._is_in_bad_fork,
    "_lazy_call": functions.call,
    "_lazy_init": functions.nothing,
    "_maybe_exchange_device": device_module.exchange_device,
    "can_device_access_peer": functions.can_device_access_peer,
    "current_stream": streams.current_stream,
    "default_generators": cuda_generators.DefaultGenerators(),
    "default_stream": streams.current_stream,
    "device_count": functions.device_count,
    "get_arch_list": functions.get_arch_list,
    "get_gencode_flags": functions.get_gencode_flags,
    "get_per_process_memory_fraction": functions.get_per_process_memory_fraction,
    "get_rng_state": functions.get_rng_state,
    "get_sync_debug_mode": functions.get_sync_debug_mode,
    "ipc_collect": functions.nothing,
    "is_available": functions.is_available,
    "is_bf16_supported": functions.is_bf16_supported,
    "is_current_stream_capturing": functions.no,
    "is_tf32_supported": functions.is_tf32_supported,
    "memory_stats_as_nested_dict": functions.memory_stats_as_nested_dict,
    "memory_summary": functions.memory_summary,
    "reset_accumulated_memory_stats": functions.nothing,
    "set_per_process_memory_fraction": functions.set_per_process_memory_fraction,
    "set_rng_state": functions.set_rng_state,
    "set_stream": streams.set_stream,
    "set_sync_debug_mode": functions.set_sync_debug_mode,
    "stream": streams.StreamContext,
}

OF_SUBMODULES: dict[str, Any] = {
    "torch.cuda.nccl.is_available": functions.no,
    "torch.cuda.nccl.version": functions.nccl_version,
    "torch.cuda.nvtx.mark": functions.nothing,
    "torch.cuda.nvtx.range": functions.Range,
    "torch.cuda.nvtx.range_end": functions.nothing,
    "torch.cuda.nvtx.range_pop": functions.depth,
    "torch.cuda.nvtx.range_push": functions.depth,
    "torch.cuda.nvtx.range_start": functions.depth,
    "torch.cuda.tunable.is_enabled": functions.no,
}
"""Replacements of names in submodules only."""


def mapped() -> dict[str, Any]:
    """Return the replacements of names of ``torch.cuda``."""
    found: dict[str, Any] = {name: getattr(device_module, name) for name in _OF_DEVICES}
    found |= {name: _of_one(getattr(device_module, name)) for name in _OF_ONE}
    reset = found["reset_peak_memory_stats"]
    return found | {"reset_max_memory_allocated": reset, "reset_max_memory_cached": reset} | TENSOR_TYPES | _OWN


def _of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    def translated(device: Any = None) -> Any:
        return function(number_of(device))

    return translated


def translate_surface(patches: Patches) -> None:
    """Replace ``torch.cuda`` and its submodules by those of the virtual devices."""
    stands = {name: _disguised(value, getattr(torch.cuda, name, None)) for name, value in mapped().items()}
    originals = {name: getattr(torch.cuda, name, None) for name in stands}
    same = {id(original): stands[name] for name, original in originals.items() if callable(original)}
    for name, stand in stands.items():
        patches.set(torch.cuda, name, stand)
    for name in _public(torch.cuda):
        if name not in stands and name not in KEPT:
            patches.set(torch.cuda, name, unsupported_stub(f"torch.cuda.{name}", getattr(torch.cuda, name)))
    for inner in submodules():
        _translate_submodule(patches, inner, same)
    kernel = torch.cuda.jiterator._JittedFunction  # made at the import of PyTorch's own tests, and then not called
    patches.set(kernel, "__call__", unsupported_stub("torch.cuda.jiterator._create_jit_fn", kernel.__call__))


def _translate_submodule(patches: Patches, inner: types.ModuleType, same: dict[int, Any]) -> None:
    """Give a submodule the replacements that ``torch.cuda`` has under the same names; the rest of its own raises
    errors."""
    for name, value in list(vars(inner).items()):
        full = f"{inner.__name__}.{name}"
        if full in OF_SUBMODULES:
            patches.set(inner, name, _disguised(OF_SUBMODULES[full], value))
        elif id(value) in same:
            patches.set(inner, name, same[id(value)])
        elif name in _public(inner) and name not in KEPT and inner.__name__ not in KEPT_MODULES:
            patches.set(inner, name, unsupported_stub(full, value))


def submodules() -> list[types.ModuleType]:
    """Return the submodules of ``torch.cuda`` that scripts may import, whose import has no effects."""
    names = [found.name for found in pkgutil.iter_modules(torch.cuda.__path__)]
    return [importlib.import_module(f"torch.cuda.{name}") for name in names if not name.startswith("_")]


def _public(owner: types.ModuleType) -> list[str]:
    """Return the public functions and classes of a module of ``torch.cuda`` and its submodules."""
    return [
        name
        for name, value in vars(owner).items()
        if (name in NAMED_TOO or not name.startswith("_"))
        and callable(value)
        and str(_home(value)).startswith(("torch.cuda", "torch._C"))
    ]


def _home(value: Any) -> Any:
    return getattr(value, "__module__", None)


def _disguised(stand: Any, original: Any) -> Any:
    """Return a function with the name, signature and documentation of the one that it replaces."""
    if not inspect.isfunction(stand) or not callable(original):
        return stand

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return stand(*args, **kwargs)

    return function
