"""Agreement check of collectives: all ranks of a group must call the same one in order, type and sizes.

The underlying libraries sum mismatched inputs silently: float32 of one rank and int32 of another have equal sizes. So
each rank appends a fingerprint of its call to the data, as small integers that all types represent exactly. If all
ranks agree, the sum is the fingerprint times the number of ranks; else it differs on some rank.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec

FINGERPRINT_ELEMENTS = 8
"""Number of appended elements. Each misses one difference in eight; all together miss one in 2^24."""

_CPU = torch.device("cpu")
_MOST = 7
_CODES = {name: code for code, name in enumerate(DTYPES)}
_EXACT = {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}
"""Largest integer up to which a type represents all integers, for types where it is small."""


def collective_fingerprint(order: int, specs: Sequence[TensorSpec], *more: int) -> int:
    """Return the 32-bit fingerprint of a rank's reduction or broadcast.

    Args:
        order: Number of earlier collectives of the group.
        specs: Specs of this rank's inputs or outputs.
        more: Further values that must be equal on all ranks.

    Raises:
        WireError: The specs have different element types.
    """
    kinds = {spec.dtype for spec in specs}
    if len(kinds) != 1:
        names = ", ".join(sorted(kinds))
        raise WireError(f"tensors of {names or 'no type'} in one sum; they must be of one type")
    sizes = (math.prod(spec.shape) for spec in specs)
    return crc32(array("q", [order, _CODES[kinds.pop()], *sizes, *more]).tobytes())


def fingerprint_elements(fingerprint: int, dtype: torch.dtype, ranks: int, device: torch.device = _CPU) -> Tensor:
    """Return the elements to append to a rank's data, made on its device: a copy from the host would make it wait.

    Args:
        fingerprint: Its fingerprint.
        dtype: Element type of the data.
        ranks: Number of ranks: the sum must be exact, too.
        device: The device.
    """
    most = min(_MOST, _EXACT.get(dtype, 1 << 20) // ranks)
    places = torch.arange(0, 3 * FINGERPRINT_ELEMENTS, 3, device=device)
    return torch.bitwise_right_shift(fingerprint, places).bitwise_and_(7).remainder_(most + 1).to(dtype)


def check_fingerprints(summed: Tensor, fingerprint: int, ranks: int, order: int, *, times: int | None = None) -> None:
    """Require that the fingerprints of all ranks are equal.

    Args:
        summed: The last :data:`FINGERPRINT_ELEMENTS` elements of the sum, in the host's memory.
        fingerprint: This rank's fingerprint.
        ranks: Number of ranks.
        order: Number of the collective, for the message.
        times: Number of ranks in the sum; all if ``None``.

    Raises:
        WireError: They differ.
    """
    own = fingerprint_elements(fingerprint, summed.dtype, ranks)
    if not torch.equal(summed, own * (ranks if times is None else times)):
        raise WireError(
            f"the ranks disagree on collective {order} of the group: one of them came for tensors of other types or "
            "sizes, or for another collective"
        )
