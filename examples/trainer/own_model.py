"""A model and a loss of one's own for ``onebox train``, ``plan``, ``profile`` and ``memory``.

onebox train --model own_model:Net --loss own_model:smooth --pool cpu*2, in the folder of this file
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from onebox.feed import Data


class Net(nn.Module):
    """A network for the images of any data set: a required argument called ``data`` is that data set."""

    def __init__(self, data: Data, width: int = 64):
        super().__init__()
        channels, height, columns = data.shape
        self.hidden = nn.Linear(channels * height * columns, width)
        self.head = nn.Linear(width, data.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images arrive as bytes, uint8 [B, C, H, W]; what leaves are logits [B, classes]."""
        logits: Tensor = self.head(self.hidden(images.flatten(1).float() / 255).relu())
        return logits


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the cross-entropy with smoothed labels."""
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)
