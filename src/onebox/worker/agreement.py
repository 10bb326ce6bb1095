"""Whether all ranks of a group mean the same collective: the same one in order, of the same type and sizes.

Libraries below add up whatever comes: float32 of one rank and int32 of another are as many bytes, and give a sum that
is wrong without a word. So each rank adds what it means, as some small whole numbers that all types hold exactly, to
the end of what is summed: where all mean the same, the sum there is as many times one's own. Where not, some rank's is
not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, dtype_name

MARKS = 8
"""How many numbers are added. Each tells one difference in eight from none: all of them, all but one in 2^24."""

_MOST = 7
_CODES = {dtype: code for code, dtype in enumerate(DTYPES.values())}
_EXACT = {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}
"""The largest whole number up to which a type holds all, where that is little."""


def meaning(order: int, tensors: Sequence[Tensor]) -> int:
    """Return a number of 32 bits for the sum that a rank means.

    Args:
        order: How many collectives of the group came before.
        tensors: What this rank has for it.

    Raises:
        WireError: They are not of one type.
    """
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) != 1:
        names = ", ".join(sorted(dtype_name(kind) for kind in kinds))
        raise WireError(f"tensors of {names or 'no type'} in one sum; they must be of one type")
    return crc32(array("q", [order, _CODES[kinds.pop()], *(tensor.numel() for tensor in tensors)]).tobytes())


def marks(meant: int, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return what a rank adds to the end of what is summed.

    Args:
        meant: What it means.
        dtype: Of what is summed.
        ranks: How many there are: the sum must be exact, too.
    """
    most = min(_MOST, _EXACT.get(dtype, 1 << 20) // ranks)
    return torch.tensor([(meant >> 3 * place & 7) % (most + 1) for place in range(MARKS)]).to(dtype)


def check_marks(summed: Tensor, meant: int, ranks: int, order: int) -> None:
    """Require that all ranks meant the same.

    Args:
        summed: The end of the sum, of :data:`MARKS` elements.
        meant: What this rank meant.
        ranks: How many there are.
        order: Of the collective, for the message.

    Raises:
        WireError: They did not.
    """
    own = marks(meant, summed.dtype, ranks)
    if not torch.equal(summed.cpu(), own * ranks):
        raise WireError(
            f"the ranks disagree on collective {order} of the group: one of them came for tensors of other types or "
            "sizes, or for another collective"
        )
