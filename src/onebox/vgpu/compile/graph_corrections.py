"""Corrections of traced graphs where a trace differs from the worker's computation.

A trace treats ``vgpu`` like a GPU; a worker's own device may be a CPU, and its PyTorch has its own defaults.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import default_partition
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from onebox.graph.capture.joint import widen_statistics
from onebox.vgpu.core.tensor import is_virtual
from onebox.vgpu.ops.attention import attend, attend_by, choose
from onebox.vgpu.runtime.context import queue_of
from onebox.wire.attention import MATH

aten = torch.ops.aten


def choose_kernels(module: fx.GraphModule) -> None:
    """Make attention in a graph of Dynamo call the worker's fused kernel, as in eager mode.

    Args:
        module: The graph, each node with its value's description under ``example_value``.
    """
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=functional.scaled_dot_product_attention):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _stand_in)
        given = inspect.signature(attend).bind(*args, **kwargs)
        given.apply_defaults()
        tensors = given.args[:3]
        if all(is_virtual(tensor) for tensor in tensors):
            choice = choose(given.args, given.kwargs)
            if choice != MATH:
                node.target, node.args, changed = attend_by, (choice, *node.args), True
    if changed:
        module.recompile()


def _stand_in(node: fx.Node) -> Any:
    """Return a tensor without values that has a node's layout, or a node's number."""
    value = node.meta["example_value"]
    if not isinstance(value, Tensor):
        return value
    with _disable_current_modes():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def partition(module: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph into forward and backward, which saves the values it needs; nothing is recomputed.

    Args:
        module: The joint graph of AOTAutograd.
        inputs: Its inputs.
        **options: As for ``torch._functorch.partitioners.default_partition``.
    """
    correct(module.graph)
    return default_partition(module, inputs, **options)


def correct(graph: fx.Graph) -> None:
    """Make a graph describe the worker's computation. Idempotent.

    Args:
        graph: A functional ATen graph, each node with its value's description under ``val``.
    """
    widen_statistics(graph)
    for node in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        if _kind(node.meta["val"][0].device) != "cuda":
            _leave_out_statistics(node)
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not node.all_input_nodes:
            _name_type(node)


def _kind(device: torch.device) -> str:
    if device.type != "vgpu":
        return device.type
    queue = queue_of(device)
    return queue.pool.devices[queue.worker].kind


def _leave_out_statistics(node: fx.Node) -> None:
    """Correct the shape of the statistics that batch norm in eval mode returns: on CPUs they are empty."""
    for index in (1, 2):
        _put(node, index, node.meta["val"][index].new_empty(0))


def _put(node: fx.Node, index: int, value: Tensor) -> None:
    """Correct the description of one of several results."""
    values = list(node.meta["val"])
    values[index] = value
    node.meta["val"] = tuple(values)
    for user in node.users:
        if user.args[1] == index:
            user.meta["val"] = value


def _name_type(node: fx.Node) -> None:
    """Add the element type to an operator that makes a tensor from none, because a worker has its own default."""
    value = node.meta.get("val")
    names = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    if isinstance(value, Tensor) and "dtype" in names and node.kwargs.get("dtype") is None:
        node.kwargs = {**node.kwargs, "dtype": value.dtype}
