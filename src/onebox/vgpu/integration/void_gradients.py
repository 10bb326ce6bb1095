"""Gradients that are void after a failure, which are dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from onebox.errors import OneboxError
from onebox.vgpu.core.tensor import Handle, all_tensors, command_queue_of, handle_of, is_virtual
from onebox.vgpu.runtime.command_queue import CommandQueue


def drop_void_gradients(queues: Sequence[CommandQueue]) -> None:
    """Drop the gradients that are void because of a failure, as it would have prevented the backward pass.

    They are searched for among all objects of the process: an error is rare, and where it is raised, nothing else tells
    the parameters that a backward pass has reached.

    Args:
        queues: The command queues of the devices.
    """
    found: dict[CommandQueue, list[tuple[Tensor, Handle]]] = {queue: [] for queue in queues}
    for each in all_tensors():
        queue = command_queue_of(each)
        # a gradient is where its leaf is; those of other devices may be set by another rank's thread meanwhile
        if queue in found and _is_leaf(each):
            gradient = each.grad
            if is_virtual(gradient):
                found[queue].append((each, handle_of(gradient)))
    for queue, leaves in found.items():
        if leaves:
            with contextlib.suppress(OneboxError, torch.OutOfMemoryError):  # the failure that is raised comes first
                filled = queue.filled([handle.number for _, handle in leaves])
                for leaf, handle in leaves:
                    if handle.number not in filled:
                        leaf.grad = None


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view of a tensor that has other memory now: PyTorch cannot say how it came to be
        return False


__all__ = ["drop_void_gradients"]
