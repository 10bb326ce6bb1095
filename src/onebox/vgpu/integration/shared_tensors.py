"""Queues between processes, which take tensors of devices that the processes share."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from onebox.pool.sharing import parent_address
from onebox.vgpu.core.metadata import from_wire
from onebox.vgpu.core.tensor import Handle, alias_of, command_queue_of, is_virtual, layout_of, wrap
from onebox.vgpu.patches import Patches
from onebox.vgpu.runtime import context
from onebox.wire import Strided


def share_among_processes(patches: Patches) -> None:
    """Let queues between processes take virtual tensors."""
    for kind in (Tensor, torch.nn.Parameter):
        patches.put(_reducers, kind, _either(_reducers[kind]))


_reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]


def _either(reduce: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda tensor: _shared(tensor) if is_virtual(tensor) else reduce(tensor)


def _shared(tensor: Tensor) -> Any:
    """Return the reduction of a tensor for another process that uses the same pool: it gets the same elements.

    As with CUDA, what either of them writes the other reads. The buffer has a second number for the way, so that it is
    there however long that takes; the receiver frees it.

    Raises:
        NotImplementedError: The devices are this process's alone.
        RuntimeError: The tensor is a result that autograd would have to follow into another process.
    """
    if not parent_address():
        raise NotImplementedError(
            f"a tensor of {tensor.device} cannot be sent to another process: the devices are this one's alone; "
            "send tensor.cpu(), or start the script by onebox run, which shares its devices"
        )
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a tensor that requires a gradient and is no leaf cannot be sent to another process, whose autograd would "
            "not know how it was computed; send tensor.detach()"
        )
    queue = command_queue_of(tensor)
    queue.has_shared = True
    number = alias_of(tensor.detach()).pass_on()
    queue.flush(wait=True)  # it must exist when the receiver's message comes
    return _received, (
        queue.worker,
        number,
        layout_of(tensor).strided(),
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    )


def _received(worker: int, number: int, layout: Strided, requires_grad: bool, parameter: bool) -> Any:
    """Return the tensor that another process has sent."""
    queue = context.queue_of(torch.device("vgpu", worker))
    queue.has_shared = True
    passed = wrap(Handle(queue, number), from_wire(layout))  # the number is freed with it
    made = wrap(alias_of(passed), layout_of(passed))
    queue.flush()  # before the sender is told that it may end, with which its buffers are freed
    return torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)
