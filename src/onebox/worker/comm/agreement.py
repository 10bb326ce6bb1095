"""Whether all ranks of a group mean the same collective: the same one in order, of the same type and sizes.

Libraries below add up whatever comes: float32 of one rank and int32 of another are as many bytes, and give a sum that
is wrong without a word. So each rank adds what it means, as some small whole numbers that all types hold exactly, to
the end of what is summed: where all mean the same, the sum there is as many times one's own. Where not, some rank's is
not.
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
"""How many numbers are added. Each tells one difference in eight from none: all of them, all but one in 2^24."""

_MOST = 7
_CODES = {name: code for code, name in enumerate(DTYPES)}
_EXACT = {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}
"""The largest whole number up to which a type holds all, where that is little."""


def collective_fingerprint(order: int, specs: Sequence[TensorSpec], *more: int) -> int:
    """Return a number of 32 bits for the sum, or the broadcast, that a rank means.

    Args:
        order: How many collectives of the group came before.
        specs: What this rank has for it, or is to have after it.
        more: What else all ranks must say.

    Raises:
        WireError: They are not of one type.
    """
    kinds = {spec.dtype for spec in specs}
    if len(kinds) != 1:
        names = ", ".join(sorted(kinds))
        raise WireError(f"tensors of {names or 'no type'} in one sum; they must be of one type")
    sizes = (math.prod(spec.shape) for spec in specs)
    return crc32(array("q", [order, _CODES[kinds.pop()], *sizes, *more]).tobytes())


def fingerprint_elements(meant: int, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return what a rank adds to the end of what is summed.

    Args:
        meant: What it means.
        dtype: Of what is summed.
        ranks: How many there are: the sum must be exact, too.
    """
    most = min(_MOST, _EXACT.get(dtype, 1 << 20) // ranks)
    return torch.tensor([(meant >> 3 * place & 7) % (most + 1) for place in range(FINGERPRINT_ELEMENTS)]).to(dtype)


def check_fingerprints(summed: Tensor, meant: int, ranks: int, order: int, *, times: int | None = None) -> None:
    """Require that all ranks meant the same.

    Args:
        summed: The end of the sum, of :data:`FINGERPRINT_ELEMENTS` elements.
        meant: What this rank meant.
        ranks: How many there are.
        order: Of the collective, for the message.
        times: Of how many ranks it is the sum; of all when ``None``.

    Raises:
        WireError: They did not.
    """
    own = fingerprint_elements(meant, summed.dtype, ranks)
    if not torch.equal(summed.cpu(), own * (ranks if times is None else times)):
        raise WireError(
            f"the ranks disagree on collective {order} of the group: one of them came for tensors of other types or "
            "sizes, or for another collective"
        )
