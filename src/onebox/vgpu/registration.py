"""Registration of ``vgpu`` as a device of PyTorch; the one place that touches its internals for that.

Done once in a process, when the first pool is opened. The internals of torch 2.11 to 2.13 that it uses are checked in
tests/unit/vgpu/test_registration.py: the setup of a Python backend in ``torch.utils.backend_registration`` and the
parts of ``torch.utils._foreach_utils`` that optimizers use.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.utils._foreach_utils as foreach_utils
from torch.fx.experimental import proxy_tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from onebox.errors import PoolError
from onebox.vgpu import signals
from onebox.vgpu.compile import default_backend
from onebox.vgpu.core.tensor import VirtualTensor
from onebox.vgpu.dispatch import copies, factories, host_arguments
from onebox.vgpu.distributed import data_parallel, ddp_reducer, process_group, ranks, sync_batchnorm
from onebox.vgpu.integration import (
    accelerator,
    backward,
    default_dtype,
    device_module,
    lazy_modules,
    module_conversion,
    serialization,
)
from onebox.vgpu.integration.generators import VirtualGenerator
from onebox.vgpu.ops import (
    attention,
    autocast,
    histogram,
    out_arguments,
    padded_batches,
    recurrent_cells,
    sequence_lengths,
    sparse,
)
from onebox.vgpu.runtime import context

_lock = threading.Lock()
_done: list[bool] = []


def install() -> None:
    """Register ``vgpu`` as a device of PyTorch. Idempotent.

    Raises:
        PoolError: Another extension has taken PyTorch's one name for private devices.
    """
    with _lock:
        if _done:
            return
        name = torch._C._get_privateuse1_backend_name()
        if name not in ("privateuseone", "vgpu"):
            raise PoolError(f"PyTorch has a device {name!r} of its own kind already, and room for one only")
        _setup_privateuseone_for_python_backend(
            rename="vgpu", backend_module=device_module.as_module(), device_guard=backward.VirtualDeviceGuard()
        )
        factories.register()
        default_dtype.register()
        serialization.register()
        autocast.register()
        accelerator.register()
        sequence_lengths.register()
        data_parallel.register()
        process_group.register()
        ranks.register()
        ddp_reducer.register()
        out_arguments.register()
        sparse.register()
        lazy_modules.register()
        attention.register()
        default_backend.register()
        torch.Generator = VirtualGenerator  # type: ignore[misc]
        backward.register()
        signals.register()
        _let_optimizers_group()
        _let_graphs_record()
        module_conversion.register()
        torch_optimizer.register_optimizer_step_post_hook(_after_step)
        _done.append(True)


def _let_optimizers_group() -> None:
    """Make optimizers update all parameters in one operator, as on a GPU; they check exact types."""
    kinds = torch_optimizer._foreach_supported_types
    if VirtualTensor not in kinds:
        kinds.append(VirtualTensor)
    names = foreach_utils._get_foreach_kernels_supported_devices()
    if "vgpu" not in names:
        wider = [*names, "vgpu"]
        foreach_utils._get_foreach_kernels_supported_devices = lambda: wider
        torch_optimizer._get_foreach_kernels_supported_devices = lambda: wider


def _let_graphs_record() -> None:
    """Make ``make_fx``, and so ``torch.func.linearize``, record operators on virtual tensors.

    It ignores unknown tensor classes: their operators would be missing from the graph, and their results be constants
    in it.
    """
    kinds = proxy_tensor.HANDLED_TYPES
    if VirtualTensor not in kinds:
        proxy_tensor.HANDLED_TYPES = (*kinds, VirtualTensor)  # type: ignore[assignment]


def _after_step(*_: Any) -> None:
    """Flush a step's operators: equal boundaries in each step give equal batches."""
    if context.device_count():
        for queue in context.current_context().queues:
            queue.flush()


__all__ = ["copies", "histogram", "host_arguments", "install", "padded_batches", "recurrent_cells", "sync_batchnorm"]
