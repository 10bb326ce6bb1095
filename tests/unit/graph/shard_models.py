"""Small nets for splitting within layers, beside those of all tests. Shape letters as there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kit.models import CASES, CLASSES, Case, features, images, words


def alexnet() -> nn.Module:
    """AlexNet with fewer features, for images of 16 x 16: convolutions of several sizes, dropout before both layers."""
    return nn.Sequential(
        nn.Conv2d(2, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(), nn.Linear(96, 64), nn.ReLU(),
        nn.Dropout(), nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip


def vgg(norm: bool = False) -> nn.Module:
    """VGG with fewer features: pairs and triples of 3 x 3 convolutions between poolings."""
    layers: list[nn.Module] = []
    channels = 2
    for width in (8, 0, 16, 0, 24, 24, 0):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=not norm)]
            layers += [nn.BatchNorm2d(width)] if norm else []
            layers += [nn.ReLU()]
            channels = width
        else:
            layers += [nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(24 * 4, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 48), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Linear(48, CLASSES))


class Depthwise(nn.Module):
    """Convolutions of each channel by itself, a grouped one, and one with a stride; batch norm without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 12, 1)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=2, stride=2)
        self.norm = nn.GroupNorm(2, 12)
        self.frozen = nn.BatchNorm2d(12).eval()
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Classify images."""
        x_BCHW = functional.hardswish(self.each(functional.relu6(self.first(x_BCHW))))
        self.frozen.eval()
        x_BCHW = self.norm(self.grouped(self.frozen(self.point(x_BCHW))))
        return self.head(functional.avg_pool2d(x_BCHW, 2).mean((2, 3)))


class UNet(nn.Module):
    """Down, up again, and a skip connection that is joined to the channels; one is wider than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1)
        self.wide = nn.Conv2d(12, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.norm = nn.GroupNorm(4, 8)
        self.out = nn.Conv2d(14, CLASSES, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Classify images."""
        a_BCHW = torch.relu(self.down(x_BCHW))
        b_BCHW = functional.max_pool2d(a_BCHW, 2)
        c_BCHW = functional.interpolate(torch.relu(self.deep(b_BCHW)), scale_factor=2)
        d_BCHW = torch.tanh(self.norm(self.wide(torch.cat([a_BCHW, c_BCHW], 1))))
        e_BCHW = self.up(functional.avg_pool2d(d_BCHW, 2))
        return self.out(torch.cat([d_BCHW, functional.leaky_relu(e_BCHW)], 1)).mean((2, 3))


class Block(nn.Module):
    """A transformer block with plain attention: separate projections, softmax, dropout, features of a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 24)
        self.norms = nn.ModuleList([nn.LayerNorm(24), nn.LayerNorm(24)])
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24, bias=bias) for bias in (True, False, True, True))
        self.gate, self.up = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
        self.down = nn.Linear(40, 24)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify words."""
        x_BTD = self.embed(x_BT)
        y_BTD = self.norms[0](x_BTD)
        q, k, v = (layer(y_BTD).unflatten(-1, (4, 6)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = functional.dropout((q @ k.transpose(2, 3) / 6**0.5).softmax(-1), 0.1, self.training)
        x_BTD = x_BTD + self.o((weights @ v).transpose(1, 2).flatten(2))
        y_BTD = self.norms[1](x_BTD)
        x_BTD = x_BTD + functional.dropout(self.down(functional.silu(self.gate(y_BTD)) * self.up(y_BTD)), 0.1)
        return self.head(x_BTD.mean(1))


def larger(edge: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    """Return what makes images of so many pixels a side."""
    return lambda size, generator: images(size, generator, edge=edge)


OWN: dict[str, Case] = {
    "alexnet": Case(build=alexnet, data=larger(16)),
    "vgg": Case(build=vgg, data=larger(16)),
    "vgg-bn": Case(build=lambda: vgg(norm=True), data=larger(16)),
    "depthwise": Case(build=Depthwise, data=images),
    "unet": Case(build=UNet, data=images),
    "block": Case(build=Block, data=words),
    "wide": Case(build=lambda: nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, CLASSES)), data=features),
}

ALL: dict[str, Case] = {**CASES, **OWN}
"""Every kind of net that must be split exactly."""
