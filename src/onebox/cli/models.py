"""The models of ``onebox train``: small image classifiers that take raw uint8 pixels.

Each is one ``nn.Module`` with two parts, ``normalize`` and ``body``. Pixels are converted to floating point inside the
model, so that bytes are sent to the worker of the first stage, and the conversion is part of its graph.

Shape letters: B samples, C channels, H rows and W columns of an image, T tokens, D features of a token,
N heads, K features of a head.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShape:
    """Size of the images that a model takes.

    Args:
        channels: Colours per pixel.
        height: Rows.
        width: Columns.

    Raises:
        UsageError: One of them is not positive.
    """

    channels: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if min(self.channels, self.height, self.width) < 1:
            raise UsageError(f"an image has at least one channel, row and column, not {self}")


def build_model(
    name: str,
    *,
    classes: int,
    channels: int,
    height: int,
    width: int,
    mean: Sequence[float],
    std: Sequence[float],
    seed: int,
) -> nn.Module:
    """Build a model on the CPU, with weights drawn from a seed.

    The global random state is unchanged.

    Args:
        name: One of :data:`MODEL_NAMES`.
        classes: Number of classes.
        channels: Colours per pixel.
        height: Rows of an image.
        width: Columns of an image.
        mean: Mean of each channel, on a scale of 0 to 1.
        std: Standard deviation of each channel, on the same scale.
        seed: Seed of the weights.

    Returns:
        A model in training mode that maps uint8 [B, C, H, W] to logits [B, classes].

    Raises:
        UsageError: The name is unknown, or the sizes are invalid.

    Example:
        >>> model = build_model(
        ...     "mlp", classes=10, channels=1, height=8, width=8, mean=[0.3], std=[0.4], seed=0
        ... )
        >>> model(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape
        torch.Size([2, 10])
    """
    if name not in _BODIES:
        raise UsageError(f"there is no model {name!r}; choose one of {', '.join(MODEL_NAMES)}")
    if classes < 1:
        raise UsageError(f"a classifier has at least one class, not {classes}")
    image = ImageShape(channels=channels, height=height, width=width)
    if len(mean) != channels:
        raise UsageError(f"{len(mean)} means for {channels} channels; give one per channel")
    with seeded(seed):
        return nn.Sequential(OrderedDict(normalize=Normalize(mean, std), body=_BODIES[name](image, classes)))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make modules on the CPU, with weights drawn from a seed; the global random state is restored afterwards."""
    # The CPU generator alone: torch.manual_seed would also seed those of all devices.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class Normalize(nn.Module):
    """Normalise uint8 pixels to mean 0 and standard deviation 1.

    The constants are non-persistent buffers; they follow ``.to(dtype)`` like the parameters, and the output has their
    dtype.

    Args:
        mean: Mean of each channel, on a scale of 0 to 1.
        std: Standard deviation of each channel, on the same scale; positive.

    Raises:
        UsageError: The lengths differ, or a deviation is not positive.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise UsageError(
                f"got the means {list(mean)} and the standard deviations {list(std)}; "
                "give one of each per channel, every deviation above 0"
            )
        self.register_buffer("mean", torch.tensor(list(mean)).reshape(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).reshape(-1, 1, 1), persistent=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalise images [B, C, H, W]."""
        return (x_BCHW.to(self.mean.dtype) / 255 - self.mean) / self.std


class Mlp(nn.Sequential):
    """Two hidden layers.

    Args:
        image: Size of the images.
        classes: Number of classes.
        hidden: Features of each hidden layer.
    """

    def __init__(self, image: ImageShape, classes: int, *, hidden: int = 256) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(image.channels * image.height * image.width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )


class Cnn(nn.Sequential):
    """Blocks of convolution, batch normalisation and ReLU; every two halve the image, down to 4 to 7 pixels.

    Args:
        image: Size of the images; 8x8 gives one halving, 28x28 two and 32x32 three.
        classes: Number of classes.
        base_width: Channels of the first two blocks; each halving doubles them, up to four times as many.
        dropout: Dropout rate before the classifier; half of it after each halving.
    """

    def __init__(self, image: ImageShape, classes: int, *, base_width: int = 32, dropout: float = 0.2) -> None:
        layers: list[nn.Module] = []
        channels, height, width = image.channels, image.height, image.width
        features = base_width
        while True:
            layers += [_conv_bn_relu(channels, features), _conv_bn_relu(features, features)]
            channels = features
            if min(height, width) < 8:
                break
            layers += [nn.MaxPool2d(2), nn.Dropout(dropout / 2)]
            height, width = height // 2, width // 2
            features = min(2 * features, 4 * base_width)
        flat = channels * height * width
        super().__init__(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(flat, classes))


class ResNet(nn.Sequential):
    """ResNet-18 with the stem for small images: one 3x3 convolution, no pooling.

    He et al., "Deep Residual Learning for Image Recognition", 2016: the 18 layers of table 1, behind the stem
    of section 4.2.

    Args:
        image: Size of the images; any.
        classes: Number of classes.
        base_width: Channels of the first of the four groups; each further group has twice as many.
    """

    def __init__(self, image: ImageShape, classes: int, *, base_width: int = 64) -> None:
        blocks: list[nn.Module] = []
        channels = base_width
        for group in range(4):
            features = base_width * 2**group
            blocks.append(_BasicBlock(channels, features, stride=1 if group == 0 else 2))
            blocks.append(_BasicBlock(features, features, stride=1))
            channels = features
        super().__init__(
            _conv_bn_relu(image.channels, base_width),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # He et al., "Delving Deep into Rectifiers", 2015
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Gpt(nn.Module):
    """A causal transformer that reads an image row by row and classifies at the last row.

    The blocks are those of GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners",
    2019): normalisation first, and residual projections initialised smaller with depth.

    Args:
        image: Size of the images; each row is a token.
        classes: Number of classes.
        features: Features of a token.
        depth: Blocks.
        heads: Attention heads; a divisor of the features.
    """

    def __init__(self, image: ImageShape, classes: int, *, features: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(image.channels * image.width, features)
        self.positions = nn.Parameter(torch.empty(image.height, features))
        self.blocks = nn.Sequential(*(_GptBlock(features, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, classes)
        nn.init.normal_(self.positions, std=0.02)
        for block in self.modules():
            if isinstance(block, _GptBlock):
                nn.init.normal_(block.project.weight, std=0.02 / (2 * depth) ** 0.5)
                nn.init.normal_(block.mlp_out.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Classify images [B, C, H, W]; returns logits [B, classes]."""
        x_BTD = self.embed(x_BCHW.transpose(1, 2).flatten(2)) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)[:, -1]))
        return logits


class _GptBlock(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features)
        self.project = nn.Linear(features, features)
        self.norm_2 = nn.LayerNorm(features)
        self.mlp_in = nn.Linear(features, 4 * features)
        self.mlp_out = nn.Linear(4 * features, features)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.project(self._attend(self.norm_1(x_BTD)))
        update_BTD: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.norm_2(x_BTD))))
        return x_BTD + update_BTD

    def _attend(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, features = x_BTD.shape
        qkv = self.qkv(x_BTD).reshape(batch, tokens, 3, self.heads, features // self.heads)
        q_BNTK, k_BNTK, v_BNTK = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y_BNTK = functional.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK, is_causal=True)
        return y_BNTK.transpose(1, 2).flatten(2)


class _BasicBlock(nn.Module):
    def __init__(self, channels: int, features: int, *, stride: int) -> None:
        super().__init__()
        self.conv_1 = _conv_bn_relu(channels, features, stride=stride)
        self.conv_2 = _conv_bn(features, features, kernel=3)
        same = channels == features and stride == 1
        self.shortcut = nn.Identity() if same else _conv_bn(channels, features, kernel=1, stride=stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return functional.relu(self.conv_2(self.conv_1(x_BCHW)) + self.shortcut(x_BCHW))


def _conv_bn(channels: int, features: int, *, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, features, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(features),
    )


def _conv_bn_relu(channels: int, features: int, *, stride: int = 1) -> nn.Sequential:
    return _conv_bn(channels, features, kernel=3, stride=stride).append(nn.ReLU())


_BODIES: dict[str, Callable[[ImageShape, int], nn.Module]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "resnet": ResNet,
    "gpt": Gpt,
}

MODEL_NAMES = tuple(_BODIES)
"""Names that :func:`build_model` accepts."""
