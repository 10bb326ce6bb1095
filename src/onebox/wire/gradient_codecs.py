"""Lossy gradient codecs: their names, and the form in which encoded values travel. Pure.

A codec encodes blocks of :data:`BLOCK` values, so that encoded values can be divided between any two blocks. ``bf16``
rounds each value to the nearest bfloat16, ties to even. ``int8`` stores a block as a float32 scale, its largest
absolute value divided by 127, and for each value the nearest multiple of the scale, ties to even, as a signed byte.

``e3m0`` has a sign, three bits of exponent and no mantissa, as the outer gradients of Streaming DiLoCo (Douillard et
al., 2025, arXiv:2501.18512). It stores a block as a float32 scale, its largest absolute value, and for each value the
nearest of 0 and ±1, ±1/2, ±1/4 … ±1/64 times the scale, ties to the larger. The bits are ``seee``, with ``e`` = 7 for 1
and ``e`` = 0 for 0; byte ``i`` after the scale has value ``i`` in its lower half and ``i + 128`` in its upper half.

``powersgd`` replaces the sum of a matrix by a product of two thin ones, whose sums are exact (Vogels, Karimireddy and
Jaggi, PowerSGD: practical low-rank gradient compression for distributed optimization, 2019, arXiv:1905.13727).
"""

from __future__ import annotations

from math import prod

from onebox.plan_names import ActivationCodec, GradientCodec
from onebox.wire.program import TensorSpec

BLOCK = 256
"""Values that share a scale: with 4 bytes for the scale, int8 takes 1.6 % more than a byte for each value."""

SCALE_BYTES = 4
"""Bytes of a block's scale, a float32, before its values."""

CODED_TYPES = ("float32", "float64")
"""Element types of gradients that are encoded; others are summed as they are."""


RANK = 4
"""Rank of ``powersgd``: the largest that its paper uses."""

_TYPICAL_RATIO = 1 / 16
"""Assumed part of the bytes of gradients that ``powersgd`` sends; it depends on the shapes of matrices."""


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the shape of a gradient as a matrix, rows of its first dimension; ``None`` if it is summed exactly.

    Vectors are, and matrices of which thin ones have more than half as many elements.
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], prod(shape[1:])
    return (rows, columns) if 2 * RANK * (rows + columns) <= rows * columns else None


def padded_elements(elements: int, slices: int) -> int:
    """Return the number of values, with zeros at the end, that divide into slices of whole blocks."""
    return -(-elements // (BLOCK * slices)) * BLOCK * slices


def encoded_spec(codec: GradientCodec, elements: int) -> TensorSpec:
    """Return the spec of encoded values, one row for each block.

    Args:
        codec: ``bf16``, ``int8`` or ``e3m0``.
        elements: The number of values, a multiple of :data:`BLOCK`.
    """
    blocks = elements // BLOCK
    match codec:
        case "bf16":
            return TensorSpec("bfloat16", (blocks, BLOCK))
        case "int8":
            return TensorSpec("int8", (blocks, SCALE_BYTES + BLOCK))
        case _:
            return TensorSpec("uint8", (blocks, SCALE_BYTES + BLOCK // 2))


def is_coded(codec: ActivationCodec, spec: TensorSpec) -> bool:
    """Return whether a value between stages is encoded: one that becomes smaller by it."""
    if codec == "none" or spec.dtype not in CODED_TYPES or not prod(spec.shape):
        return False
    return encoded_spec(codec, padded_elements(prod(spec.shape), 1)).size_bytes < spec.size_bytes


def encoded_bytes(codec: GradientCodec, size_bytes: int, item_bytes: int = 4) -> int:
    """Return the bytes of gradients after encoding.

    Args:
        codec: The codec; ``none`` leaves them as they are.
        size_bytes: Bytes of the gradients.
        item_bytes: Bytes of each value.

    Example:
        >>> encoded_bytes("bf16", 4096), encoded_bytes("int8", 4096), encoded_bytes("none", 4096)
        (2048, 1040, 4096)
    """
    if codec == "none":
        return size_bytes
    if codec == "powersgd":
        return int(size_bytes * _TYPICAL_RATIO)
    return encoded_spec(codec, padded_elements(size_bytes // item_bytes, 1)).size_bytes
