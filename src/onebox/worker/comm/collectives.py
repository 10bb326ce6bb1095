"""Collectives, whatever carries them: what each rank came for, which others compare, and the results. Pure.

A sum is added up in the order of the ranks, so that its bits are the same on all of them, and for any number of hosts
among which they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec

Purpose = Literal["a sum", "a sum for one rank", "a broadcast"]
_PURPOSES = get_args(Purpose)


class MessageInfo(NamedTuple):
    """The part of a message beside its elements: for a collective, what a rank came for.

    Args:
        code: Purpose code.
        spec: Spec of its tensor.
        at_ns: Time since which it is available, on the monotonic clock.
    """

    code: int
    spec: TensorSpec
    at_ns: int = 0


def code_of(purpose: Purpose, fingerprint: int) -> int:
    """Return the purpose code of a message for a collective other than a gather; that of a gather is its dimension.

    Args:
        purpose: The kind of collective.
        fingerprint: A 32-bit fingerprint of the rank's call, which must equal that of the other ranks.
    """
    return -1 - (_PURPOSES.index(purpose) << 32 | fingerprint)


def flat_spec(specs: Sequence[TensorSpec]) -> TensorSpec:
    """Return the spec of tensors of one type, concatenated."""
    return TensorSpec(specs[0].dtype, (sum(math.prod(spec.shape) for spec in specs),))


def is_gather(code: int) -> bool:
    """Return whether a message belongs to a gather."""
    return code >= 0


def require_agreement(order: int, rank: int, calls: Sequence[MessageInfo]) -> None:
    """Require that all ranks came for the same collective.

    Args:
        order: The number of the collective in the group.
        rank: This rank.
        calls: What each rank came for.

    Raises:
        WireError: One of them differs.
    """
    own = calls[rank]
    for other, call in enumerate(calls):
        if call.code != own.code or _compared(call) != _compared(own):
            raise disagreement(order, rank, own, other, call)


def disagreement(order: int, rank: int, own: MessageInfo, peer: int, call: MessageInfo) -> WireError:
    """Return the error for ranks that call different collectives.

    Args:
        order: The number of the collective in the group.
        rank: This rank.
        own: What it came for.
        peer: The other rank.
        call: What that one came for.
    """
    other = _name(call) if _name(call) != _name(own) else "one of tensors of other sizes, or another rank"
    return WireError(
        f"the ranks disagree on collective {order} of the group: rank {rank} came for {_name(own)}, rank {peer} for "
        f"{other}"
    )


def rank_sum(parts: Sequence[Tensor], spare: int | None = None) -> Tensor:
    """Return the sum of flat parts, added up in the order of the ranks.

    Args:
        parts: The parts.
        spare: One of the first two that becomes the sum; ``None`` for a new tensor.
    """
    if len(parts) == 1:
        return parts[0].clone()
    total = torch.add(parts[0], parts[1], out=None if spare is None else parts[spare])
    for part in parts[2:]:
        total += part
    return total


def joined(parts: Sequence[Tensor], specs: Sequence[TensorSpec], dim: int) -> Tensor:
    """Return the concatenation of the ranks' parts, given flat or in their shapes."""
    return torch.cat([part.view(spec.shape) for part, spec in zip(parts, specs, strict=True)], dim)


def require_joint(specs: Sequence[TensorSpec], dim: int, spec: TensorSpec) -> None:
    """Require that the parts of a gather give a result.

    Raises:
        WireError: They do not.
    """
    own = specs[0]
    joint = sum(each.shape[dim] for each in specs)
    made = TensorSpec(own.dtype, (*own.shape[:dim], joint, *own.shape[dim + 1 :]))
    if made != spec:
        raise WireError(f"{made} comes of a gather along dimension {dim} where {spec} was to come")


def _compared(call: MessageInfo) -> TensorSpec:
    """Return a spec without the size in which parts of a gather may differ."""
    spec, dim = call.spec, call.code
    if not is_gather(dim):
        return spec
    return TensorSpec(spec.dtype, (*spec.shape[:dim], -1, *spec.shape[dim + 1 :]))


def _name(call: MessageInfo) -> str:
    code = call.code
    kind = f"a gather along dimension {code}" if is_gather(code) else _PURPOSES[(-1 - code >> 32) % len(_PURPOSES)]
    return f"{kind} of {call.spec}"
