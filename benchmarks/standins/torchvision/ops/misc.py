"""A batch normalisation whose statistics and parameters do not change."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Normalisation of [count, channels, height, width] by stored statistics."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
