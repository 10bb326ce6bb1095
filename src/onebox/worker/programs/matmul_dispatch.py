"""Products of float32 matrices, and convolutions that are such products, by the faster of two libraries.

ATen leaves a product of float32 matrices to MKL, which keeps its newest kernels for Intel's processors: on one of AMD
with AVX-512 it reaches what AVX2 does, less than half of what oneDNN does there. oneDNN computes in float32 as well and
sums in another order. Which of the two computes follows from processor, torch and shapes alone, so that the same worker
gives the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onebox.wire import Many, Operator, SlotArgument, TensorSpec
from onebox.worker.system.instruction_sets import used_instruction_sets

LEAST_WORK = 1 << 22
"""Multiplications from which oneDNN is faster, whose call takes 10 µs more: measured with 2^18 to 2^30 of them."""

LEAST_ROWS = 8
"""Fewer rows are a matter of reading the other matrix once, at which oneDNN is not better."""

_SLOW_BATCH = 16
"""On one thread and below so many samples ATen computes convolutions of 1 x 1 by products of MKL, one a sample."""

_MATMUL, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
_CONVOLUTION, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def faster_implementation(
    operator: Operator, specs: Mapping[int, TensorSpec], device: torch.device
) -> Callable[..., Any] | None:
    """Return what computes an operator faster than ATen; ``None`` where that is ATen's to do.

    Args:
        operator: The operator; what is returned takes the same positional arguments.
        specs: What each slot of its program holds.
        device: Where it runs.
    """
    if device.type != "cpu" or operator.kwargs or operator.name not in _WAYS or not onednn_is_faster():
        return None
    read = [specs[value.index] for value in operator.args if isinstance(value, SlotArgument)]
    if any(spec.dtype != "float32" for spec in read):
        return None
    fits, compute = _WAYS[operator.name]
    try:
        return compute if fits(operator, read) else None
    except (TypeError, ValueError, IndexError):  # no product at all, which is ATen's to refuse
        return None


def onednn_is_faster() -> bool:
    """Tell whether oneDNN multiplies float32 matrices faster than MKL on this processor."""
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
    """Tell whether ATen would compute a convolution sample by sample, slower than one product does."""
    one_by_one = len(maps.shape) == 4 and weight.shape[2:] == (1, 1)
    return one_by_one and maps.shape[0] < _SLOW_BATCH and torch.get_num_threads() == 1


# ---- the ways


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if 1 not in right.stride() or 0 in right.stride():  # as no product of a model's own is
        return _MATMUL(left, right)
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    if 1 not in right.stride() or 0 in right.stride() or not bias.is_contiguous():
        return _ADDMM(bias, left, right)
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")


def _convolution(x_NCHW: Tensor, weight_KC11: Tensor, bias_K: Tensor | None, *rest: Any) -> Tensor:
    """Convolve maps whose channels are last in memory, which are the rows of a matrix."""
    if not x_NCHW.is_contiguous(memory_format=torch.channels_last):
        return _CONVOLUTION(x_NCHW, weight_KC11, bias_K, *rest)
    linear = torch.ops.mkldnn._linear_pointwise
    return _maps(linear(_rows(x_NCHW), weight_KC11.flatten(1), bias_K, "none", [], ""), x_NCHW)


def _convolution_backward(
    gradient_NKHW: Tensor, x_NCHW: Tensor, weight_KC11: Tensor, sizes: Any, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of what a convolution reads, of maps whose channels are last in memory."""
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
    """Return maps whose channels are last in memory as a matrix: a row for each pixel, a column for each channel."""
    return maps_NCHW.permute(0, 2, 3, 1).flatten(0, 2)


def _maps(rows: Tensor, like_NCHW: Tensor) -> Tensor:
    """Return a row for each pixel as maps of the samples and size of others, channels last in memory."""
    samples, _, height, width = like_NCHW.shape
    return rows.view(samples, height, width, -1).permute(0, 3, 1, 2)


_WAYS: dict[str, tuple[Callable[[Operator, list[TensorSpec]], bool], Callable[..., Any]]] = {
    "aten.mm.default": (_fits_mm, _mm),
    "aten.addmm.default": (_fits_addmm, _addmm),
    "aten.convolution.default": (_fits_convolution, _convolution),
    "aten.convolution_backward.default": (_fits_backward, _convolution_backward),
}
