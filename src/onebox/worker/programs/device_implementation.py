"""Implementations of operators by device, for programs that CPUs and GPUs run.

A program for a pool with a GPU states what the GPU's kernels return. Those of CPUs keep the statistics of norms in
bfloat16 where GPUs have float32, return nothing where these return running statistics, and values for the gradients of
log-sigmoid and of bags of embeddings, which GPUs compute again or do without. A program for CPUs alone states what they
make, and nothing is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onebox.wire import Operator, SlotArgument, TensorSpec, Value

_aten = torch.ops.aten

_LOW = ("bfloat16", "float16")

_MAXIMA = 2  # the mode of a bag of embeddings, after sums and means


def device_implementation(
    operator: Operator, specs: Mapping[int, TensorSpec], device: torch.device
) -> Callable[..., Any] | None:
    """Return an implementation whose outputs are those that the program states; ``None`` if the operator's own are.

    Args:
        operator: The operator; the result takes the same positional arguments.
        specs: Spec of each slot of its program.
        device: Its device.
    """
    if device.type != "cpu" or operator.name not in _CONVERTED or operator.kwargs:
        return None
    differs, run = _CONVERTED[operator.name]
    try:
        return run if differs(operator, specs) else None
    except IndexError:  # too few arguments, which the operator refuses
        return None


def _spec(value: Value, specs: Mapping[int, TensorSpec]) -> TensorSpec | None:
    return specs[value.index] if isinstance(value, SlotArgument) else None


# ---- conditions


def _states_wide(operator: Operator, specs: Mapping[int, TensorSpec]) -> bool:
    """Return whether statistics of a norm in a low precision are stated in float32."""
    x, statistics = _spec(operator.args[0], specs), operator.specs[1]
    return x is not None and x.dtype in _LOW and statistics is not None and statistics.dtype == "float32"


def _states_running(operator: Operator, specs: Mapping[int, TensorSpec]) -> bool:
    """Return whether a batch norm states statistics that CPUs return otherwise, or not at all."""
    statistics = operator.specs[1]
    evaluates = operator.name == _NO_TRAINING or operator.args[5] is False
    if evaluates:  # CPUs alone state none, also in a low precision
        return statistics is not None and statistics.shape != (0,)
    return _states_wide(operator, specs)


def _reads_wide(x: int, mean: int) -> Callable[[Operator, Mapping[int, TensorSpec]], bool]:
    """Return whether a gradient takes float32 statistics of an input in a low precision."""

    def reads(operator: Operator, specs: Mapping[int, TensorSpec]) -> bool:
        source, statistics = _spec(operator.args[x], specs), _spec(operator.args[mean], specs)
        return bool(source and statistics) and source.dtype in _LOW and statistics.dtype == "float32"  # type: ignore[union-attr]

    return reads


def _states_no_buffer(operator: Operator, _: Mapping[int, TensorSpec]) -> bool:
    return operator.specs[1] is not None and operator.specs[1].shape == (0,)


def _reads_no_buffer(operator: Operator, specs: Mapping[int, TensorSpec]) -> bool:
    x, buffer = _spec(operator.args[1], specs), _spec(operator.args[2], specs)
    return x is not None and buffer is not None and buffer.shape == (0,) != x.shape


def _states_bags(operator: Operator, specs: Mapping[int, TensorSpec]) -> bool:
    """Return whether a bag of embeddings states what GPUs return for the gradient."""
    offsets, (_, _, sizes, maxima) = _spec(operator.args[2], specs), operator.specs
    longer = len(operator.args) > 7 and operator.args[7] is True  # CPUs leave out the last offset
    same = offsets is not None and sizes is not None and sizes.shape == offsets.shape
    return (maxima is not None and maxima.shape == (0,)) or (longer and same)


# ---- operators


def _layer_norm(*args: Any) -> tuple[Tensor, ...]:
    out, mean, deviation = _aten.native_layer_norm.default(*args)
    return out, mean.float(), deviation.float()


def _layer_norm_backward(gradient: Tensor, x: Tensor, shape: Any, mean: Tensor, deviation: Tensor, *rest: Any) -> Any:
    own = x.dtype if rest[0] is None else rest[0].dtype
    return _aten.native_layer_norm_backward.default(gradient, x, shape, mean.to(own), deviation.to(own), *rest)


def _batch_norm_of_evaluation(x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, *rest: Any) -> Any:
    out, *_ = _aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, variance, *rest)
    return out, *_running(x, mean, variance, rest[-1])


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, training: bool, *rest: Any) -> Any:
    kernel = _aten._native_batch_norm_legit_functional.default
    out, own_mean, own_deviation, *after = kernel(x, weight, bias, mean, variance, training, *rest)
    if training:
        return out, own_mean.float(), own_deviation.float(), *after
    return out, *_running(x, mean, variance, rest[-1]), *after


def _batch_norm_alone(*args: Any) -> tuple[Tensor, ...]:
    out, mean, deviation = _aten._native_batch_norm_legit.no_stats(*args)
    return out, mean.float(), deviation.float()


def _running(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return running statistics as GPUs return them for the gradient."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return mean.to(wide, copy=True), (variance.to(wide) + eps).rsqrt()


def _batch_norm_backward(
    gradient: Tensor, x: Tensor, weight: Any, running: Any, variance: Any, mean: Tensor, deviation: Tensor, *rest: Any
) -> Any:
    own = next((tensor.dtype for tensor in (weight, running) if tensor is not None), mean.dtype)
    kernel = _aten.native_batch_norm_backward.default
    return kernel(gradient, x, weight, running, variance, mean.to(own), deviation.to(own), *rest)


def _embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out, bags, sizes, maxima = _aten._embedding_bag.default(weight, indices, offsets, *rest)
    if bags.shape != indices.shape:  # left out in fast sums
        places = torch.arange(len(indices), device=indices.device)
        bags = torch.searchsorted(offsets, places, right=True).sub_(1).to(indices.dtype)
    if sizes.shape != offsets.shape:
        sizes = torch.cat([sizes, sizes.new_zeros(1)])
    return out, bags, sizes, maxima if len(rest) > 1 and rest[1] == _MAXIMA else maxima.new_empty(0)


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return _aten.log_sigmoid_forward.default(x)[0], x.new_empty(0)


def _log_sigmoid_backward(gradient: Tensor, x: Tensor, _: Tensor) -> Any:
    return _aten.log_sigmoid_backward.default(gradient, x, x.abs().neg().exp())


_NO_TRAINING = "aten._native_batch_norm_legit_no_training.default"

_CONVERTED: Mapping[str, tuple[Callable[[Operator, Mapping[int, TensorSpec]], bool], Callable[..., Any]]] = {
    "aten.native_layer_norm.default": (_states_wide, _layer_norm),
    "aten.native_layer_norm_backward.default": (_reads_wide(1, 3), _layer_norm_backward),
    _NO_TRAINING: (_states_running, _batch_norm_of_evaluation),
    "aten._native_batch_norm_legit_functional.default": (_states_running, _batch_norm),
    "aten._native_batch_norm_legit.no_stats": (_states_wide, _batch_norm_alone),
    "aten.native_batch_norm_backward.default": (_reads_wide(1, 5), _batch_norm_backward),
    "aten._embedding_bag.default": (_states_bags, _embedding_bag),
    "aten._embedding_bag_forward_only.default": (_states_bags, _embedding_bag),
    "aten.log_sigmoid_forward.default": (_states_no_buffer, _log_sigmoid),
    "aten.log_sigmoid_backward.default": (_reads_no_buffer, _log_sigmoid_backward),
}
"""For each operator the condition, and the operator with the outputs, or the gradient from the outputs, of GPUs."""
