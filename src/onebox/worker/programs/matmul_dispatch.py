"""Matmul dispatch: float32 matrix products, and convolutions that are such products, by the faster of two libraries.

ATen computes float32 matrix products with MKL, which uses its newest kernels on Intel's processors only: on an AMD
processor with AVX-512 it reaches the speed of AVX2, less than half of oneDNN's. oneDNN also computes in float32, with
another order of summation. The choice depends on processor, torch and shapes alone, so that results on one worker are
reproducible bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onebox.wire import Many, Operator, SlotArgument, TensorSpec
from onebox.worker.system.instruction_sets import used_instruction_sets

LEAST_WORK = 1 << 22
"""Multiplications from which oneDNN is faster, whose call takes 10 µs more: measured from 2^18 to 2^30."""

LEAST_ROWS = 8
"""With fewer rows the time is that of reading the other matrix once, where oneDNN is not faster."""

_SLOW_BATCH = 16
"""On one thread and below this number of samples, ATen computes 1 x 1 convolutions as MKL products, one for each
sample."""

_MATMUL, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
_CONVOLUTION, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def faster_implementation(
    operator: Operator, specs: Mapping[int, TensorSpec], device: torch.device
) -> Callable[..., Any] | None:
    """Return a faster implementation of an operator than ATen's; ``None`` if there is none.

    Args:
        operator: The operator; the implementation takes the same positional arguments.
        specs: Spec of each slot of its program.
        device: Its device.
    """
    if device.type != "cpu" or operator.kwargs or operator.name not in _WAYS or not onednn_is_faster():
        return None
    read = [specs[value.index] for value in operator.args if isinstance(value, SlotArgument)]
    if any(spec.dtype != "float32" for spec in read):
        return None
    fits, compute = _WAYS[operator.name]
    try:
        return compute if fits(operator, read) else None
    except (TypeError, ValueError, IndexError):  # an invalid product, which ATen refuses
        return None


def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than MKL on this processor."""
    used = used_instruction_sets()
    return used.maker != "GenuineIntel" and "AVX-512" in used.onednn and torch.backends.mkl.is_available()


def _large(left: TensorSpec, right: TensorSpec) -> bool:
    (rows, inner), (same, columns) = left.shape, right.shape
    return inner == same and rows >= LEAST_ROWS and rows * inner * columns >= LEAST_WORK


def _fits_mm(_: Operator, read: list[TensorSpec]) -> bool:
    return _large(*read)


def _fits_addmm(_: Operator, read: list[TensorSpec]) -> bool:
    bias, left, right = read
    return bias.shape == right.shape[1:] and _large(left, right)


def _fits_convolution(operator: Operator, read: list[TensorSpec]) -> bool:
    return operator.args[3:9] == _ONE_BY_ONE and _slow(read[0], read[1])


def _fits_backward(operator: Operator, read: list[TensorSpec]) -> bool:
    return operator.args[4:10] == _ONE_BY_ONE and _slow(read[1], read[2])


_ONE_BY_ONE = (Many((1, 1)), Many((0, 0)), Many((1, 1)), False, Many((0, 0)), 1)
"""Stride, padding, dilation, transposed, output padding and groups of a convolution that is a product."""


def _slow(maps: TensorSpec, weight: TensorSpec) -> bool:
    """Return whether ATen would compute a convolution sample by sample, slower than as one product."""
    one_by_one = len(maps.shape) == 4 and weight.shape[2:] == (1, 1)
    return one_by_one and maps.shape[0] < _SLOW_BATCH and torch.get_num_threads() == 1


# ---- implementations


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if 1 not in right.stride() or 0 in right.stride():  # a model's own products have no such strides
        return _MATMUL(left, right)
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    if 1 not in right.stride() or 0 in right.stride() or not bias.is_contiguous():
        return _ADDMM(bias, left, right)
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")


def _convolution(x_NCHW: Tensor, weight_KC11: Tensor, bias_K: Tensor | None, *rest: Any) -> Tensor:
    """Convolve feature maps in channels-last layout, whose pixels are the rows of a matrix."""
    if not x_NCHW.is_contiguous(memory_format=torch.channels_last):
        return _CONVOLUTION(x_NCHW, weight_KC11, bias_K, *rest)
    linear = torch.ops.mkldnn._linear_pointwise
    return _maps(linear(_rows(x_NCHW), weight_KC11.flatten(1), bias_K, "none", [], ""), x_NCHW)


def _convolution_backward(
    gradient_NKHW: Tensor, x_NCHW: Tensor, weight_KC11: Tensor, sizes: Any, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a convolution of feature maps in channels-last layout."""
    last = torch.channels_last
    if not (x_NCHW.is_contiguous(memory_format=last) and gradient_NKHW.is_contiguous(memory_format=last)):
        return _BACKWARD(gradient_NKHW, x_NCHW, weight_KC11, sizes, *rest)
    wanted = rest[-1]
    rows_RK = _rows(gradient_NKHW)
    return (
        _maps(_mm(rows_RK, weight_KC11.flatten(1)), x_NCHW) if wanted[0] else None,
        _mm(rows_RK.t(), _rows(x_NCHW)).view(weight_KC11.shape) if wanted[1] else None,
        rows_RK.sum(0) if wanted[2] else None,
    )


def _rows(maps_NCHW: Tensor) -> Tensor:
    """Return channels-last feature maps as a matrix: a row for each pixel, a column for each channel."""
    return maps_NCHW.permute(0, 2, 3, 1).flatten(0, 2)


def _maps(rows: Tensor, like_NCHW: Tensor) -> Tensor:
    """Return a matrix with a row for each pixel as channels-last feature maps of a given shape."""
    samples, _, height, width = like_NCHW.shape
    return rows.view(samples, height, width, -1).permute(0, 3, 1, 2)


_WAYS: dict[str, tuple[Callable[[Operator, list[TensorSpec]], bool], Callable[..., Any]]] = {
    "aten.mm.default": (_fits_mm, _mm),
    "aten.addmm.default": (_fits_addmm, _addmm),
    "aten.convolution.default": (_fits_convolution, _convolution),
    "aten.convolution_backward.default": (_fits_backward, _convolution_backward),
}
