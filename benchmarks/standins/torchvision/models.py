"""A residual network of 18 layers (He et al., arXiv:1512.03385)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.beside = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (self.body(x) + self.beside(x)).relu()
        return found


class ResNet(nn.Module):
    """The network; its first layer and its last are attributes that scripts replace.

    Args:
        num_classes: Outputs.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = (64, 64, 128, 256, 512)
        for number in range(1, 5):
            first = _Block(widths[number - 1], widths[number], 1 + (number > 1))
            self.add_module(f"layer{number}", nn.Sequential(first, _Block(widths[number], widths[number], 1)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [count, 3, height, width] to [count, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        found: Tensor = self.fc(self.avgpool(x).flatten(1))
        return found


def resnet18(weights: None = None, **options: Any) -> ResNet:
    """Return the network, without weights."""
    return ResNet(**options)
