"""Features of CUDA that virtual devices do not support: each name raises an error with an alternative."""

from __future__ import annotations

import types
from typing import Any, NoReturn

_ELSEWHERE = "leave it out, or run this script on a machine that has the GPU"
_REPLAYED = "leave it out: operators that repeat are stored on the worker and called by number without being asked to"
_MEMORY = "leave it out; the memory of a worker is limited by onebox run --memory"
_OWN_CODE = "write it with PyTorch's operators: a worker runs those, and no code that a client sends"
_COLLECTIVES = "use torch.distributed or torch.nn.DataParallel"
_WATCHED = "look at the machine of the worker, with nvidia-smi or with onebox devices"

ADVICE = {
    "CUDAGraph": _REPLAYED,
    "CUDAPluggableAllocator": _MEMORY,
    "MemPool": _MEMORY,
    "_compile_kernel": _OWN_CODE,
    "caching_allocator_alloc": _MEMORY,
    "caching_allocator_delete": _MEMORY,
    "caching_allocator_disabled": _MEMORY,
    "caching_allocator_enable": _MEMORY,
    "change_current_allocator": _MEMORY,
    "clock_rate": _WATCHED,
    "device_memory_used": _WATCHED,
    "graph": _REPLAYED,
    "graph_pool_handle": _REPLAYED,
    "graphs": _REPLAYED,
    "jiterator": _OWN_CODE,
    "list_gpu_processes": _WATCHED,
    "make_graphed_callables": _REPLAYED,
    "memory_usage": _WATCHED,
    "nccl": _COLLECTIVES,
    "power_draw": _WATCHED,
    "profiler": "use torch.profiler, or onebox profile",
    "set_per_process_memory_fraction": _MEMORY,
    "temperature": _WATCHED,
    "use_mem_pool": _MEMORY,
    "utilization": _WATCHED,
}
"""Alternatives, by the last or the last but one part of a name; for all others :data:`_ELSEWHERE`."""


def raise_unsupported(name: str) -> NoReturn:
    """Raise the error for an unsupported feature.

    Args:
        name: Its full name, such as ``torch.cuda.CUDAGraph``.

    Raises:
        NotImplementedError: Always.
    """
    parts = name.split(".")
    advice = ADVICE.get(parts[-1]) or (ADVICE.get(parts[2]) if len(parts) > 3 else None) or _ELSEWHERE
    raise NotImplementedError(f"{name} has no counterpart on the virtual devices that cuda stands for; {advice}")


def unsupported_stub(name: str, original: Any) -> Any:
    """Return the replacement of a function or class: calling it raises, ``isinstance`` with it works."""
    short = name.rpartition(".")[2]

    def refusing(*args: Any, **kwargs: Any) -> NoReturn:
        raise_unsupported(name)

    refusing.__name__ = refusing.__qualname__ = short
    refusing.__module__ = name.rpartition(".")[0]
    refusing.__doc__ = f"Not on virtual devices; what it is elsewhere: {getattr(original, '__doc__', None)}"
    if not isinstance(original, type):
        return refusing
    members = {"__new__": refusing, "__doc__": refusing.__doc__, "__module__": refusing.__module__}
    return types.new_class(short, (), {}, lambda namespace: namespace.update(members))
