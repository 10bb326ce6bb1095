"""A model and a loss of one's own for ``onebox train``, ``plan``, ``profile`` and ``memory``.

onebox train --model own_model:Net --loss own_model:smooth --pool cpu*2, in the folder of this file
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from onebox.feed import Data


class Block(nn.Module):
    """A normalised layer with a residual connection."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Features, [B, width], before and after."""
        return x + self.back(self.wide(self.norm(x)).relu())


class Net(nn.Module):
    """A network for the images of any data set: a required argument called ``data`` is that data set."""

    def __init__(self, data: Data, width: int = 512, depth: int = 6):
        super().__init__()
        channels, height, columns = data.shape
        self.first = nn.Linear(channels * height * columns, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, data.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images arrive as bytes, uint8 [B, C, H, W]; what leaves are logits [B, classes]."""
        logits: Tensor = self.head(self.blocks(self.first(images.flatten(1).float() / 255)))
        return logits


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the cross-entropy with smoothed labels."""
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)
