"""How the losses of micro-batches make up that of their batch: means over samples, sums, or means over something else.

A micro-batch's loss, and with it its gradients, counts with a weight: its share of the samples where the loss is a mean
over samples, 1 where it is a sum, its share of a normaliser that the user gives (:class:`Weighted`) otherwise. The
first two are constants of a routine. The third depends on the targets, and travels with each batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onebox.engine.workload.batch import Batch
from onebox.errors import UsageError
from onebox.plan import MicroBatch


@dataclass(frozen=True)
class Weighted:
    """A loss that is a mean over something else than samples, such as tokens that are not ignored.

    Args:
        normaliser: Maps targets, of a batch or a slice of one, to what the loss divides by: a number from 0 up, or a
            tensor of one. Of two slices together it has to be the sum of both. It runs in the client.

    Example:
        >>> import torch, onebox
        >>> tokens = onebox.Weighted(lambda targets: (targets != -100).sum())
        >>> tokens.of(torch.tensor([[3, 4, -100], [5, -100, -100]]))
        3.0
    """

    normaliser: Callable[[Any], Any]

    def of(self, targets: Any) -> float:
        """Return the normaliser of targets.

        Raises:
            UsageError: It is no number from 0 up.
        """
        found = self.normaliser(targets)
        if isinstance(found, Tensor) and found.numel() != 1:
            raise UsageError(f"{_WRONG} a tensor of shape {list(found.shape)}; {_ALLOWED}")
        try:
            value = float(found)
        except (TypeError, ValueError):
            raise UsageError(f"{_WRONG} a {type(found).__name__}; {_ALLOWED}") from None
        if not 0 <= value < math.inf:
            raise UsageError(f"{_WRONG} {value}; {_ALLOWED}")
        return value


_WRONG = "the normaliser of loss_reduction=Weighted(...) returned"
_ALLOWED = "allowed are a finite number from 0 up, or a tensor of one"

LossReduction = Literal["mean", "sum"] | Weighted | None
"""``None`` for a mean over samples that is checked to be one."""

ReductionName = Literal["mean", "sum", "weighted"]


def reduction_name(reduction: LossReduction) -> ReductionName | None:
    """Return what a checkpoint says of a loss reduction."""
    return "weighted" if isinstance(reduction, Weighted) else reduction


def resumed_reduction(name: ReductionName | None, options: Mapping[str, Any]) -> LossReduction:
    """Return the loss reduction of a trainer that goes on from a checkpoint.

    Args:
        name: What the checkpoint says.
        options: What the user asks for.

    Raises:
        UsageError: It is a function, which no checkpoint holds, and the user does not give it again.
    """
    if name != "weighted":
        return name
    if "loss_reduction" not in options:
        raise UsageError(
            "the checkpoint was made with loss_reduction=onebox.Weighted(fn), and a function is in no checkpoint: "
            "give the same one to resume(..., loss_reduction=onebox.Weighted(fn))"
        )
    return None  # the user's takes its place


def check_reduction(reduction: Any) -> None:
    """Refuse what is no loss reduction.

    Raises:
        UsageError: What is allowed.
    """
    if reduction not in (None, "mean", "sum") and not isinstance(reduction, Weighted):
        raise UsageError(
            f"loss_reduction={reduction!r}: allowed are None (a mean over samples, checked), 'mean' (not checked), "
            "'sum', and onebox.Weighted(fn), where fn maps targets to what the loss divides by"
        )
    if isinstance(reduction, Weighted) and not callable(reduction.normaliser):
        raise UsageError(f"Weighted({reduction.normaliser!r}): a function of the targets is needed")


def normalisers(reduction: LossReduction, batch: Batch, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
    """Return what the loss of each micro-batch divides by: samples, or 1 for a sum, or what the user says.

    Raises:
        UsageError: The user's function returns no number from 0 up.
    """
    if reduction == "sum":
        return (1.0,) * len(micro_batches)
    if not isinstance(reduction, Weighted):
        return tuple(float(part.size) for part in micro_batches)
    cuts = tuple((part.start, part.size) for part in micro_batches)
    if cuts not in batch.normalisers:
        batch.normalisers[cuts] = tuple(reduction.of(_targets(batch, *cut)) for cut in cuts)
    return batch.normalisers[cuts]


def weights_of(reduction: LossReduction, batch: Batch, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
    """Return the weight of each micro-batch's loss in that of its batch.

    Where every normaliser is 0 the loss is a mean over nothing: then they are shares of the samples.

    Raises:
        UsageError: The user's function returns no number from 0 up.
    """
    found = normalisers(reduction, batch, micro_batches)
    if reduction == "sum":
        return found
    return shares_of(found, [part.size for part in micro_batches])


def shares_of(found: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
    """Return normalisers as shares of their sum; where that is 0, shares of the samples.

    Args:
        found: The normalisers.
        sizes: Samples of each micro-batch.

    Example:
        >>> shares_of([3.0, 0.0, 1.0], [2, 2, 1]), shares_of([0.0, 0.0], [3, 1])
        ((0.75, 0.0, 0.25), (0.75, 0.25))
    """
    total = sum(found)
    if not total:
        return tuple(size / sum(sizes) for size in sizes)
    return tuple(value / total for value in found)


def total_of(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the sum of losses with their weights; one without a weight adds nothing, whatever it is.

    Example:
        >>> total_of([2.0, float("nan")], [1.0, 0.0])
        2.0
    """
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)


@dataclass(frozen=True, kw_only=True)
class TravellingWeights:
    """The weights of micro-batches, as a tensor that comes behind those of their batch.

    A micro-batch with weight 0 must add nothing to the gradients, but 0 times the loss of a mean over nothing is NaN.
    So other targets, which have a normaliser, take the place of its own; inputs stay, and with them the statistics of
    batch norm.

    Args:
        reduction: Gives the normalisers.
        leaf: The number that the weight has among the tensors of a batch: the one behind the last.
        dtype: The type of the loss.
    """

    reduction: Weighted
    leaf: int
    dtype: torch.dtype

    def tensor(self, batch: Batch, micro_batches: Sequence[MicroBatch], index: int) -> Tensor:
        """Return the weight of a micro-batch."""
        return torch.tensor(weights_of(self.reduction, batch, micro_batches)[index], dtype=self.dtype)

    def replaced(self, batch: Batch, micro_batches: Sequence[MicroBatch], index: int, leaf: int) -> Tensor | None:
        """Return what takes the place of a tensor of a micro-batch; ``None`` where it stays."""
        if leaf not in range(_inputs(batch), len(batch.leaves)):
            return None
        found = normalisers(self.reduction, batch, micro_batches)
        if found[index] or not any(found):
            return None
        donor = micro_batches[next(place for place, value in enumerate(found) if value)]
        row = self._with_normaliser(batch, donor.start, donor.size)
        tensor = batch.leaves[leaf][row : row + 1]
        return tensor.expand(micro_batches[index].size, *tensor.shape[1:]).contiguous()

    def _with_normaliser(self, batch: Batch, start: int, size: int) -> int:
        """Return a sample, among those that have a normaliser together, that has one by itself."""
        while size > 1:
            half = size // 2
            if self.reduction.of(_targets(batch, start, half)):
                size = half
            else:
                start, size = start + half, size - half
        return start


def _targets(batch: Batch, start: int, size: int) -> Any:
    """Return the targets of some samples, nested as they came."""
    _, targets = batch.structure.nest(batch.slice(start, size))
    return targets


def _inputs(batch: Batch) -> int:
    """Return how many of a batch's tensors are inputs; the others are targets."""
    inputs, _ = batch.structure.nest(batch.leaves)
    return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inputs))
