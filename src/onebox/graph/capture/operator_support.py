"""Operator support: a graph that runs on every kind of device, and autocast to bfloat16.

A model is captured with CPU tensors, wherever the graph is to run: a client needs no GPU. The graph of a pool with a
GPU states the outputs of operators as GPUs make them, and its CPU workers convert their own
(:mod:`onebox.worker.programs.device_implementation`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten

_LOW = (torch.bfloat16, torch.float16)

_MAXIMA = 2  # the mode of a bag of embeddings, after sums and means

BATCH_NORMS = {
    _aten._native_batch_norm_legit.no_stats: 2,
    _aten._native_batch_norm_legit_functional.default: 4,
    _aten._native_batch_norm_legit_no_training.default: 4,
}
"""Batch norms, with the number of tensors after the input: weight and bias, and running statistics where it has any."""

_NORMS = {
    functional.layer_norm,
    functional.group_norm,
    functional.rms_norm,
    torch.layer_norm,
    torch.group_norm,
    torch.rms_norm,
}
"""Normalisations whose GPU kernels require one element type of input and weight."""


@contextlib.contextmanager
def portable_operators(device_type: str) -> Iterator[None]:
    """Exclude CPU-only operators from a graph made within the context, unless it is for CPUs.

    Args:
        device_type: The type of device on which the graph is to run.
    """
    if device_type == "cpu":
        yield
        return
    onednn = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags() would also warn
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)


@contextlib.contextmanager
def bfloat16_autocast() -> Iterator[None]:
    """Run matrix products and convolutions in bfloat16: PyTorch's autocast for CPUs, but normalise in float32.

    On CPUs autocast leaves normalisations in bfloat16 with weights in float32, which GPUs cannot compute; on GPUs it
    runs them in float32, as here.
    """
    with torch.autocast("cpu", torch.bfloat16), _NormsInFloat32():
        yield


class _NormsInFloat32(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _NORMS and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(argument) for argument in args)
            kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def state_gpu_outputs(graph: fx.Graph) -> None:
    """State the outputs of operators in a graph as GPUs make them, where those of CPUs differ.

    Statistics of layer norm and batch norm in bfloat16 and float16 are float32; batch norm with running statistics
    returns them, where CPUs return nothing; log-sigmoid returns no values for its gradient. Bags of embeddings return
    the bag of each index, a size for each offset, and places only where they have maxima (``_embedding_bag_cuda``).
    """
    for node in graph.find_nodes(op="call_function", target=_aten.native_layer_norm.default):
        _, *statistics = node.meta["val"]
        if node.args[0].meta["val"].dtype in _LOW:
            restate(node, {place: value.to(torch.float32) for place, value in enumerate(statistics, 1)})
    for target in BATCH_NORMS:
        for node in graph.find_nodes(op="call_function", target=target):
            x = node.args[0].meta["val"]
            dtype = torch.float32 if x.dtype in _LOW else x.dtype
            restate(node, {place: x.new_empty(x.shape[1], dtype=dtype) for place in (1, 2)})
    for target in (_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default):
        for node in graph.find_nodes(op="call_function", target=target):
            indices, offsets = (value.meta["val"] for value in node.args[1:3])
            found = {1: indices.new_empty(indices.shape), 2: indices.new_empty(offsets.shape)}
            if len(node.args) < 5 or node.args[4] != _MAXIMA:
                found[3] = indices.new_empty(0)
            restate(node, found)
    for node in graph.find_nodes(op="call_function", target=_aten.log_sigmoid_forward.default):
        restate(node, {1: node.meta["val"][1].new_empty(0)})


def restate(node: fx.Node, changed: Mapping[int, Tensor]) -> None:
    """Set what some outputs of a node are like, and so of the nodes that name them."""
    values = [changed.get(place, value) for place, value in enumerate(node.meta["val"])]
    node.meta["val"] = tuple(values)
    for user in node.users:
        place = user.args[1]
        assert isinstance(place, int)
        user.meta["val"] = values[place]
