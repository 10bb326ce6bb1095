"""Loss reductions: combining micro-batch losses as means over samples, sums, or means over another quantity.

A micro-batch's loss and gradients have a weight: its fraction of the samples if the loss is a mean over samples, 1 if
it is a sum, and else its fraction of a normaliser given by the user (:class:`Weighted`). The first two are constants of
a routine. The third depends on the targets, and is sent with each batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    """A loss that is a mean over another quantity than samples, such as tokens that are not ignored.

    Args:
        normaliser: Maps targets, of a batch or a slice of one, to the loss's divisor: a number from 0 up, or a tensor
            of one. It must be additive over slices. It runs in the client.

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
            UsageError: It is not a number from 0 up.
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
"""``None`` for a mean over samples, which is checked."""

ReductionName = Literal["mean", "sum", "weighted"]


def reduction_name(reduction: LossReduction) -> ReductionName | None:
    """Return the name of a loss reduction in checkpoints."""
    return "weighted" if isinstance(reduction, Weighted) else reduction


def check_reduction(reduction: Any) -> None:
    """Refuse an invalid loss reduction.

    Raises:
        UsageError: It is invalid; the message lists the allowed values.
    """
    if reduction not in (None, "mean", "sum") and not isinstance(reduction, Weighted):
        raise UsageError(
            f"loss_reduction={reduction!r}: allowed are None (a mean over samples, checked), 'mean' (not checked), "
            "'sum', and onebox.Weighted(fn), where fn maps targets to what the loss divides by"
        )
    if isinstance(reduction, Weighted) and not callable(reduction.normaliser):
        raise UsageError(f"Weighted({reduction.normaliser!r}): a function of the targets is needed")


def normalisers(reduction: LossReduction, batch: Batch, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
    """Return the divisor of each micro-batch's loss: samples, 1 for a sum, or the user's normaliser.

    Raises:
        UsageError: The user's function returns something else than a number from 0 up.
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
    """Return the weight of each micro-batch's loss.

    If every normaliser is 0, the loss is a mean over nothing, and weights are fractions of the samples.

    Raises:
        UsageError: The user's function returns something else than a number from 0 up.
    """
    found = normalisers(reduction, batch, micro_batches)
    if reduction == "sum":
        return found
    return shares_of(found, [part.size for part in micro_batches])


def shares_of(found: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
    """Return normalisers as fractions of their sum; if that is 0, fractions of the samples.

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
    """Return the weighted sum of losses; a loss with weight 0 adds nothing, even if it is NaN.

    Example:
        >>> total_of([2.0, float("nan")], [1.0, 0.0])
        2.0
    """
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)


@dataclass(frozen=True, kw_only=True)
class TravellingWeights:
    """Weights of micro-batches, sent as an additional tensor with their batch.

    A micro-batch with weight 0 must add nothing to the gradients, but 0 times the loss of a mean over nothing is NaN.
    So its targets are replaced by others with a normaliser; its inputs stay, and with them the statistics of batch
    norm.

    Args:
        reduction: The reduction with the normaliser.
        leaf: Index of the weight among the tensors of a batch: after the last one.
        dtype: Element type of the loss.
    """

    reduction: Weighted
    leaf: int
    dtype: torch.dtype

    def tensor(self, batch: Batch, micro_batches: Sequence[MicroBatch], index: int) -> Tensor:
        """Return the weight of a micro-batch."""
        return torch.tensor(weights_of(self.reduction, batch, micro_batches)[index], dtype=self.dtype)

    def replaced(self, batch: Batch, micro_batches: Sequence[MicroBatch], index: int, leaf: int) -> Tensor | None:
        """Return the replacement for a tensor of a micro-batch; ``None`` if it is unchanged."""
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
        """Return a sample with a positive normaliser, from samples with one in total."""
        while size > 1:
            half = size // 2
            if self.reduction.of(_targets(batch, start, half)):
                size = half
            else:
                start, size = start + half, size - half
        return start


def _targets(batch: Batch, start: int, size: int) -> Any:
    """Return the targets of some samples in their original nesting."""
    _, targets = batch.structure.nest(batch.slice(start, size))
    return targets


def _inputs(batch: Batch) -> int:
    """Return the number of input tensors of a batch; the others are targets."""
    inputs, _ = batch.structure.nest(batch.leaves)
    return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inputs))
