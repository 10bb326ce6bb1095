"""Batches in an order that can be taken up again anywhere.

The order is a pure function of (seed, epoch): no generator's state has to be saved. A run that stopped before
batch ``index`` of an epoch goes on with ``epoch(epoch, start=index)`` and sees what the uninterrupted run
would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from onebox.errors import UsageError
from onebox.feed.checks import require_int
from onebox.feed.dataset import Split
from onebox.feed.order import order_of


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a split, epoch after epoch.

    Args:
        split: The samples.
        batch_size: Samples in a batch.
        seed: Decides, with the epoch, the order of the samples.
        shuffle: A new order each epoch; otherwise the split's own, always.
        drop_last: Leave out the last batch of an epoch where it is smaller than the others.

    Raises:
        UsageError: A batch size below 1, or so large that ``drop_last`` leaves nothing.

    Example:
        >>> import torch
        >>> split = Split(images=torch.zeros(5, 1, 8, 8, dtype=torch.uint8), labels=torch.arange(5))
        >>> batches = Batches(split=split, batch_size=2, seed=0, shuffle=False)
        >>> [labels.tolist() for _, labels in batches.epoch(0, start=1)]
        [[2, 3], [4]]
    """

    split: Split
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size, least=1)
        require_int("seed", self.seed)
        if self.drop_last and self.batch_size > len(self.split):
            came = f"batch_size is {self.batch_size} and drop_last is set"
            raise UsageError(f"{came}, which leaves no batch: allowed are at most {len(self.split)}, the samples.")

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(len(self.split), self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def order(self, epoch: int) -> Tensor:
        """The samples' indices in the order of an epoch: ``int64 [N]``, the same on every call.

        Raises:
            UsageError: A negative epoch.
        """
        return order_of(len(self.split), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, from number ``start`` on.

        Args:
            epoch: Number of the epoch, from 0.
            start: Number of the first batch, from 0; ``len(self)`` gives none.

        Returns:
            Iterator: Pairs of images ``uint8 [B, C, H, W]`` and labels ``int64 [B]``, copies of the split's.

        Raises:
            UsageError: A negative epoch, or a start outside of the epoch.
        """
        require_int("start", start, least=0)
        if start > len(self):
            raise UsageError(f"start is {start}; the epoch has {len(self)} batches, so at most that is allowed.")
        return self._cut(self.order(epoch), start)

    def _cut(self, order_N: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(start, len(self)):
            chosen_B = order_N[number * self.batch_size : (number + 1) * self.batch_size]
            yield self.split.images[chosen_B], self.split.labels[chosen_B]
