"""Placements: the distribution of one tensor over the ranks of a group, and the effect of views on it.

A tensor is whole on every rank (:data:`REPLICATE`), cut along a dimension (:class:`Shard`), or a sum whose terms the
ranks hold (:data:`PARTIAL`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from onebox.errors import UsageError
from onebox.wire import TensorSpec


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor, the same to the last bit."""


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term; the tensor is their sum."""


@dataclass(frozen=True)
class Shard:
    """Every rank holds a share of a dimension.

    The dimension consists of ``blocks`` equal runs of ``sum(sizes)`` elements, and rank ``r`` has ``sizes[r]``
    consecutive elements of each run, in the order of the ranks. One block is a plain split. Several arise when
    dimensions are merged: heads split over ranks, merged behind a batch of B, are B blocks; queries, keys and values in
    one weight are three.

    Args:
        dim: The dimension, not negative.
        sizes: For each rank its elements of a block, at least one.
        blocks: Number of blocks.

    Example:
        >>> Shard(0, (2, 1), blocks=2).local((6, 5), 0)
        (4, 5)
    """

    dim: int
    sizes: tuple[int, ...]
    blocks: int = 1

    @property
    def block(self) -> int:
        """Elements of a block."""
        return sum(self.sizes)

    def local(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's share of a tensor."""
        return (*shape[: self.dim], self.blocks * self.sizes[rank], *shape[self.dim + 1 :])

    def fits(self, shape: Sequence[int], ranks: int) -> bool:
        """Return whether a tensor can be split in this way over a number of ranks."""
        whole = self.blocks > 0 and min(self.sizes, default=0) > 0 and len(self.sizes) == ranks
        return whole and 0 <= self.dim < len(shape) and shape[self.dim] == self.blocks * self.block

    def start(self, rank: int) -> int:
        """Return the start of a rank's share in a block."""
        return sum(self.sizes[:rank])

    def at(self, dim: int) -> Shard:
        """Return the same split of another dimension."""
        return Shard(dim, self.sizes, self.blocks)


Placement = Replicate | Partial | Shard

REPLICATE = Replicate()
PARTIAL = Partial()


def even_parts(size: int, ranks: int, unit: int = 1) -> tuple[int, ...] | None:
    """Divide a dimension among ranks as evenly as whole units allow; earlier ranks get the remainder.

    Args:
        size: Elements, a multiple of ``unit``.
        ranks: Number of ranks.
        unit: Elements that stay together.

    Returns:
        Elements of each rank, or ``None`` with fewer units than ranks.
    """
    units = size // unit
    if size % unit or units < ranks:
        return None
    return tuple(unit * (units // ranks + (rank < units % ranks)) for rank in range(ranks))


def local_spec(spec: TensorSpec, placement: Placement, rank: int) -> TensorSpec:
    """Return the spec of a rank's part of a tensor."""
    return TensorSpec(spec.dtype, placement.local(spec.shape, rank)) if isinstance(placement, Shard) else spec


def shard_of(tensor: Tensor, placement: Placement, rank: int) -> Tensor:
    """Return a rank's share of a tensor, in memory of its own if it is not the whole.

    Args:
        tensor: The whole.
        placement: :data:`REPLICATE` or a :class:`Shard` that fits its shape.
        rank: The rank.

    Raises:
        UsageError: The tensor does not fit the placement.
    """
    if isinstance(placement, Replicate):
        return tensor
    if isinstance(placement, Partial):
        raise UsageError("a whole tensor has no terms: place it as Replicate or Shard")
    dim = placement.dim
    if not placement.fits(tensor.shape, len(placement.sizes)):
        raise UsageError(f"{placement} does not fit a tensor of shape {list(tensor.shape)}")
    blocks = tensor.unflatten(dim, (placement.blocks, placement.block))
    share = blocks.narrow(dim + 1, placement.start(rank), placement.sizes[rank])
    return share.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def reshaped(before: Sequence[int], after: Sequence[int], shard: Shard) -> Shard | None:
    """Follow a split through a view of another shape with the elements in the same order.

    In the flat order a split is runs of ``block * inner`` elements, of which each rank has ``size * inner`` (``inner``
    elements lie behind one index of the dimension). The view has the same runs if they fit one of its dimensions.

    Returns:
        The split of the view, or ``None`` when the ranks' elements are not a split of it.

    Example:
        >>> reshaped((4, 12), (16, 3), Shard(1, (6, 6)))
        Shard(dim=0, sizes=(2, 2), blocks=4)
    """
    if not prod(before):
        return None
    inner = prod(before[shard.dim + 1 :])
    run = shard.block * inner
    for dim, size in enumerate(after):
        low = prod(after[dim + 1 :])
        if low * size % run == 0 and all(share * inner % low == 0 for share in shard.sizes):
            return Shard(dim, tuple(share * inner // low for share in shard.sizes), low * size // run)
    return None


def cuts_of(before: Sequence[int], after: Sequence[int]) -> dict[int, set[int]]:
    """Return the dimensions that a view splits or merges: for each size, the lengths of the runs in it."""
    if not prod(before) or not prod(after):
        return {}
    found: dict[int, set[int]] = {}
    steps = {prod(shape[dim:]) for shape in (before, after) for dim in range(len(shape) + 1)}
    for shape in (before, after):
        for dim, size in enumerate(shape):
            low = prod(shape[dim + 1 :])
            runs = {step // low for step in steps if low < step < low * size and step % low == 0}
            runs = {run for run in runs if size % run == 0}
            if runs:
                found.setdefault(size, set()).update(runs)
    return found
