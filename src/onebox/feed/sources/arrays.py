"""Arrays in memory as samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onebox.errors import UsageError
from onebox.feed.checks import check_classes


class Arrays:
    """Inputs and targets in memory, a sample a row.

    Args:
        inputs: ``[N, ...]``, a tensor or an array of NumPy's, whose memory is shared.
        targets: ``[N, ...]``; None for samples that are inputs only.
        classes: Names of the classes, where targets number them.
        where: Its name, for messages.

    Attributes:
        inputs: The inputs, a tensor.
        targets: The targets, a tensor, or None.
        classes: Names of the classes, or None.

    Raises:
        UsageError: No rows, or not as many targets as inputs.

    Example:
        >>> source = Arrays(torch.eye(3), torch.arange(3))
        >>> source.read(1)
        (tensor([0., 1., 0.]), tensor(1))
    """

    def __init__(
        self,
        inputs: Tensor | np.ndarray,
        targets: Tensor | np.ndarray | None = None,
        *,
        classes: Sequence[str] | None = None,
        where: str = "arrays",
    ) -> None:
        self.inputs = torch.as_tensor(inputs)
        self.targets = None if targets is None else torch.as_tensor(targets)
        self.classes = None if classes is None else check_classes(classes)
        self.where = where
        if self.inputs.dim() == 0 or len(self.inputs) == 0:
            raise UsageError(f"inputs are {list(self.inputs.shape)}; they have to have rows, one a sample.")
        if self.targets is not None and self.targets.shape[:1] != self.inputs.shape[:1]:
            came = f"inputs are {list(self.inputs.shape)} and targets {list(self.targets.shape)}"
            raise UsageError(f"{came}; there has to be one target an input.")

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.inputs)

    def read(self, index: int) -> Tensor | tuple[Tensor, Tensor]:
        """Return a row of the inputs, and of the targets; they share memory with the arrays."""
        row = self.inputs[index]
        return row if self.targets is None else (row, self.targets[index])

    def decode(self, raw: Tensor | tuple[Tensor, Tensor], index: int) -> Tensor | tuple[Tensor, Tensor]:
        """Return the row unchanged."""
        return raw

    def read_batch(self, indices: Sequence[int]) -> Tensor | tuple[Tensor, Tensor]:
        """Return some rows, copied at once: the result of collating them one by one."""
        chosen = torch.tensor(indices)
        rows = self.inputs[chosen]
        return rows if self.targets is None else (rows, self.targets[chosen])

    def name(self, index: int) -> str:
        """The number of a row."""
        return f"{self.where}: {index}"
