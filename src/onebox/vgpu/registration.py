"""Registration of ``vgpu`` as a device of PyTorch, and the patches of PyTorch for it.

Registered once in a process, when the first pool with virtual devices is opened; patched from then until
:func:`uninstall`. The internals of torch 2.11 to 2.13 that it uses are checked in
tests/unit/vgpu/test_registration.py.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler as torch_profiler
from torch.cuda import nccl
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils import dlpack
from torch.utils.data import DataLoader

from onebox.errors import PoolError
from onebox.vgpu import native, signals
from onebox.vgpu import patches as patching
from onebox.vgpu.compile import default_backend
from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.dispatch import copies, dispatch, host_arguments
from onebox.vgpu.dispatch.op_inference import SHAPED_BY_FLOATS
from onebox.vgpu.distributed import (
    data_parallel,
    ddp_reducer,
    process_group,
    ranks,
    sharded_random,
    sync_batchnorm,
    uneven_forward,
    uneven_ranks,
)
from onebox.vgpu.integration import (
    accelerator,
    default_dtype,
    device_module,
    elements,
    first_use,
    generators,
    profiler,
    shared_tensors,
    void_gradients,
)
from onebox.vgpu.ops import (
    attention,
    autocast,
    embedding_bags,
    histogram,
    one_hot,
    padded_batches,
    recurrent_cells,
    sequence_lengths,
)
from onebox.vgpu.patches import Patch, Patches
from onebox.vgpu.runtime import context

_lock = threading.Lock()
_registered: list[bool] = []


def install() -> None:
    """Register ``vgpu`` as a device of PyTorch and apply its patches. Idempotent.

    Raises:
        PoolError: Another extension has taken PyTorch's one name for private devices; or this version of PyTorch lacks
            what virtual devices replace.
    """
    with _lock:
        if not _registered:
            name = torch._C._get_privateuse1_backend_name()
            if name not in ("privateuseone", "vgpu"):
                raise PoolError(f"PyTorch has a device {name!r} of its own kind already, and room for one only")
            torch.utils.rename_privateuse1_backend("vgpu")
            torch._register_device_module("vgpu", device_module.as_module())
            torch.utils.generate_methods_for_privateuse1_backend()
            context.begin_device = _begin_device
            process_group.register()
            _import_for_storages()
            _registered.append(True)
        PATCHES.apply()


def _begin_device() -> None:
    """Load the device in C++, register it, and say what it asks of Python."""
    device = native.load()
    device.handle(dispatch.missed, dispatch.send_full, dispatch.write_due, generators.Generators(), profiler)
    device.register_kernels(sorted(SHAPED_BY_FLOATS))


def _import_for_storages() -> None:
    """Have PyTorch import, in one thread, its module of storages, which it does at the first check of an argument.

    The import is the first value of a static variable in C++: where it lets another thread run, and that one comes to
    the same variable with the interpreter's lock in hand, both wait for ever.
    """
    torch.empty(0, device="meta").set_(torch.UntypedStorage(0, device="meta"), 0, (0,), (1,))


def uninstall() -> None:
    """Remove all patches of PyTorch, also those of ``alias_cuda``; the name ``vgpu`` stays registered. Idempotent.

    Virtual devices do not work from then on, until a pool with such devices is opened.
    """
    patching.remove_all()


# ---- entries that are no plain replacements


def _implement_operators(patches: Patches) -> None:
    """Register operators that PyTorch calls above or below virtual tensors, or without one."""
    aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    patches.on_removal(aten._destroy)
    patches.on_removal(everything._destroy)
    for module in (autocast, one_hot, attention):
        module.implement(aten)
    autocast.implement_others(everything)


def _flush_after_steps(patches: Patches) -> None:
    """Flush each step's operators: equal boundaries in each step give equal batches."""
    patches.on_removal(torch_optimizer.register_optimizer_step_pre_hook(_before_step).remove)
    patches.on_removal(torch_optimizer.register_optimizer_step_post_hook(_after_step).remove)


_begun: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""The optimizers that have made a step."""


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Wait for the devices before the first step of an optimizer, and before one that follows operators on new shapes.

    An optimizer creates its state in the first step: after a failure that the script has not been told of, it would be
    void for good. And memory runs out with new shapes: the script is told before the state of the optimizer changes.
    """
    first = optimizer not in _begun
    if not first and not any(queue.has_learned for queue in context.open_queues()):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for queue in {command_queue_of(one): None for one in parameters if is_virtual(one)}:
        if first or queue.has_learned:
            queue.synchronize()
    _begun.add(optimizer)


def _scaling(original: Callable[[Any, torch.device], None]) -> Callable[[Any, torch.device], None]:
    """Wrap the function in which a ``GradScaler`` creates its state, likewise."""

    @functools.wraps(original)
    def begin(self: Any, device: torch.device) -> None:
        if device.type == "vgpu":
            context.queue_of(device).synchronize()
        original(self, device)

    return begin


def _after_step(*_: Any) -> None:
    for queue in context.open_queues():
        queue.flush()


def _parallel(name: str = "") -> Any:
    """Return a module of ``torch.nn.parallel``, some of which functions of the same name hide."""
    return sys.modules["torch.nn.parallel" + name]


def _by(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _in_calling_thread(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Make backward passes run in the thread that calls them.

    PyTorch starts threads for the devices that it knows at the first backward pass of the process, which may have been
    before this one was registered.
    """

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return engine(*args, **kwargs)

    return ddp_reducer.unpinned(run)


# ---- the table

_core: Any = torch._C
PATCHES = Patches(
    (
        lambda patches: patches.append(context.after_failures, void_gradients.drop_void_gradients),
        # operators, tensors and their types
        _implement_operators,
        *(Patch(torch, name, first_use.beginning) for name in ("Generator", "Stream", "Event")),
        Patch(torch.Tensor, "pin_memory", first_use.not_pinned, added=True),
        Patch(_core, "_set_default_dtype", default_dtype.followed),
        Patch(_core, "_set_default_tensor_type", default_dtype.followed),
        # torch.accelerator
        Patch(_core, "_get_accelerator", first_use.accelerator_of(_core)),
        *(
            Patch(_core, f"_accelerator_{name}", _by(answer), since=(2, 13) if name in accelerator.RECENT else (2, 11))
            for name, answer in accelerator.ANSWERS.items()
        ),
        # autograd
        Patch(torch.autograd.graph, "_engine_run_backward", _in_calling_thread, also=(torch.autograd,)),
        # optimizers
        _flush_after_steps,
        Patch(torch.amp.GradScaler, "_lazy_init_scale_growth_tracker", _scaling),
        # the profiler
        Patch(torch_profiler.profile, "__init__", profiler.timing),
        # storages, printed values, and queues between processes
        Patch(torch.storage._StorageBase, "byteswap", elements.swapping_on_host),
        *(Patch(_core, name, elements.exchanging_from_the_start) for name in ("_to_dlpack", "_to_dlpack_versioned")),
        Patch(dlpack, "to_dlpack", elements.exchanging_from_the_start),
        Patch(torch._tensor_str, "_str", elements.printed_at_once),
        shared_tensors.share_among_processes,
        # nn.DataParallel
        *(
            Patch(_core, name, functools.partial(data_parallel.either, function), added=True)
            for name, function in data_parallel.PRIMITIVES.items()
        ),
        Patch(nccl, "is_available", data_parallel.without_virtual),
        Patch(_parallel("._functions"), "_get_stream", data_parallel.copying_stream),
        Patch(_parallel(".parallel_apply"), "_get_device_index", _by(torch._utils._get_device_index)),  # of any device
        Patch(
            _parallel(".parallel_apply"),
            "parallel_apply",
            data_parallel.with_autocast,
            also=(_parallel(), _parallel(".data_parallel")),
        ),
        Patch(torch.nn.DataParallel, "forward", uneven_forward.forward_by_speed),
        # torch.distributed
        Patch(distributed_c10d, "init_process_group", ranks.beginning, also=(dist, device_mesh)),
        Patch(device_mesh.DeviceMesh, "__init__", sharded_random.meshing),
        Patch(DistributedDataParallel, "__init__", lambda own: uneven_ranks.weighting(ddp_reducer.noting(own))),
        Patch(DataLoader, "__init__", uneven_ranks.loading),
        Patch(DistributedDataParallel, "_set_static_graph", ddp_reducer.noting),
        Patch(dist.Reducer, "_set_forward_pass_work_handle", ddp_reducer.keeping),
        # torch.compile
        Patch(torch, "compile", default_backend.compiling),
        Patch(torch._TorchCompileInductorWrapper, "__call__", default_backend.either_backend),
        # Python
        signals.wrap_handlers,
        Patch(signal, "signal", signals.wrapping_set),
        Patch(signal, "getsignal", signals.unwrapping_get),
    )
)
"""The patches of PyTorch for any script on virtual devices."""


__all__ = [
    "PATCHES",
    "copies",
    "embedding_bags",
    "histogram",
    "host_arguments",
    "install",
    "padded_batches",
    "recurrent_cells",
    "sequence_lengths",
    "sync_batchnorm",
    "uninstall",
]
