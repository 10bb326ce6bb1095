"""Small models of every kind that the tests train, each with a batch, a loss and parameter groups.

Weights and data are drawn from fixed seeds in float64. Shape letters: B samples, C channels, H rows, W columns,
T tokens, D features of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.cli.models import ImageShape, ResNet

CLASSES = 5
TOKENS = 4
WORDS = 19


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to train.

    Args:
        build: Makes the model; called under a fixed seed.
        data: Makes (inputs, targets) of so many samples from a generator.
        loss: Maps (outputs, targets) to a scalar, a mean over samples.
        draws: Whether training draws random numbers.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor] = field(default=functional.cross_entropy)
    draws: bool = False

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Return the model, with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)
            model = self.build()._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # not complex ones
        BUILT[model] = self
        return model

    def batches(self, sizes: list[int], dtype: torch.dtype = torch.float64) -> list[tuple[Any, Any]]:
        """Return a batch of each size, the same each time."""
        generator = torch.Generator().manual_seed(11)
        found = [self.data(size, generator) for size in sizes]
        return torch.utils._pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, found)


def images(size: int, generator: torch.Generator, *, edge: int = 8) -> tuple[Tensor, Tensor]:
    """Return images [B, 2, edge, edge] and classes [B]."""
    x_BCHW = torch.randn(size, 2, edge, edge, dtype=torch.float64, generator=generator)
    return x_BCHW, torch.randint(CLASSES, (size,), generator=generator)


def larger_images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images that the resnet does not shrink to one pixel.

    Batch norm over the pixels of two or three samples is chaotic: 1e-15 more in a weight grows to 1 in a few steps.
    """
    return images(size, generator, edge=16)


def features(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return features [B, 10] and classes [B]."""
    x_BD = torch.randn(size, 10, dtype=torch.float64, generator=generator)
    return x_BD, torch.randint(CLASSES, (size,), generator=generator)


def words(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return words [B, T] and classes [B]."""
    return (
        torch.randint(WORDS, (size, TOKENS), generator=generator),
        torch.randint(CLASSES, (size,), generator=generator),
    )


def text(size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return words under the name that Hugging Face's models want, and the words that follow."""
    x_BT, _ = words(size, generator)
    y_BT, _ = words(size, generator)
    return {"input_ids": x_BT}, y_BT


def mlp() -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, CLASSES)
    )


def cnn() -> nn.Module:
    """Convolutions with batch norm.

    The convolutions have no bias: batch norm takes it out again, so that its gradient would be rounding noise, which
    Adam would blow up to whole steps.
    """
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8, momentum=0.3),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def resnet() -> nn.Module:
    """ResNet-18, narrow."""
    return ResNet(ImageShape(channels=2, height=16, width=16), CLASSES, base_width=4)


def alexnet() -> nn.Module:
    """Five convolutions and three linear layers, as in AlexNet: pools that overlap, responses normalised, dropout."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 5, padding=2), nn.ReLU(), nn.LocalResponseNorm(3), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.LocalResponseNorm(3), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 12), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, CLASSES)),
    )


def vgg() -> nn.Module:
    """Three blocks of small convolutions, each with a pool behind it, and three linear layers with dropout."""
    layers: list[nn.Module] = []
    before = 2
    for count, channels in ((1, 4), (2, 6), (2, 8)):
        for _ in range(count):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
            before = channels
        layers.append(nn.MaxPool2d(2))
    for features in (12, 12):
        layers += [nn.Flatten(), nn.Linear(before, features), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        before = features
    return nn.Sequential(*layers, nn.Linear(before, CLASSES))


def gpt2(dropout: float = 0.0) -> nn.Module:
    """A 2-layer GPT-2 of Hugging Face, whose output layer is its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=TOKENS, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def vit() -> nn.Module:
    """A small ViT of Hugging Face."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def logits_of_words(outputs: Any, y_BT: Tensor) -> Tensor:
    """Cross entropy of the logits [B, T, words] that a Hugging Face model returns."""
    return functional.cross_entropy(outputs.logits.transpose(1, 2), y_BT)


def logits_of_class(outputs: Any, y_B: Tensor) -> Tensor:
    """Cross entropy of the logits [B, classes] that a Hugging Face model returns."""
    return functional.cross_entropy(outputs.logits, y_B)


class Recurrent(nn.Module):
    """An LSTM of two layers, a GRU behind it, and the last state of that."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 10, num_layers=2, batch_first=True)
        self.gru = nn.GRU(10, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify words [B, T]."""
        states_BTD, _ = self.lstm(self.embed(x_BT))
        states_BTD, _ = self.gru(states_BTD)
        return self.head(states_BTD[:, -1])


class Attention(nn.Module):
    """Embeddings, multi-head attention with a mask, and a mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12, padding_idx=0)
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, CLASSES)
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify words [B, T]."""
        x_BTD = self.embed(x_BT)
        y_BTD, _ = self.attend(x_BTD, x_BTD, x_BTD, attn_mask=self.mask, need_weights=False)
        return self.head(self.norm(x_BTD + y_BTD).mean(1))


class Branches(nn.Module):
    """Nested inputs, several outputs, a frozen layer, a layer that nothing reads, and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(10, 8).requires_grad_(False)
        self.left = nn.Linear(8, 6)
        self.right = nn.Linear(3, 6)
        self.unused = nn.Linear(2, 2)
        self.classify = nn.Linear(6, CLASSES)
        self.measure = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], scale: Tensor) -> dict[str, Any]:
        """Return logits [B, classes] and, nested, a value [B]."""
        x_BD, named = pair
        hidden = torch.tanh(self.left(self.frozen(x_BD)) + self.right(named["extra"]) * scale[:, None])
        if self.training:
            self.calls += 1
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return {"logits": self.classify(hidden), "more": (self.measure(hidden).squeeze(1), hidden.detach())}


def nested(size: int, generator: torch.Generator) -> tuple[Any, Any]:
    """Return ((features, {"extra": …}), scale) and {"class": …, "value": …}."""
    x_BD, y_B = features(size, generator)
    extra = torch.randn(size, 3, dtype=torch.float64, generator=generator)
    scale = torch.rand(size, dtype=torch.float64, generator=generator)
    return ((x_BD, {"extra": extra}), scale), {"class": y_B, "value": scale.sin()}


def two_losses(outputs: dict[str, Any], targets: dict[str, Tensor]) -> Tensor:
    """Classification plus regression."""
    value, _ = outputs["more"]
    return functional.cross_entropy(outputs["logits"], targets["class"]) + functional.mse_loss(value, targets["value"])


class Tied(nn.Module):
    """One weight in three places: twice as a layer, and as a module that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.again = self.first
        self.other = nn.Linear(10, 10)
        self.other.weight = self.first.weight
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Classify features [B, 10]."""
        x_BD = torch.tanh(self.again(torch.tanh(self.first(x_BD))))
        return self.head(torch.tanh(self.other(x_BD)) @ self.other.weight)


class Dropping(nn.Module):
    """Dropout between layers, in attention, and as ``functional.dropout``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.attend = nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True)
        self.body = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 12))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify words [B, T]."""
        x_BTD = functional.dropout(self.embed(x_BT), 0.1, self.training)
        y_BTD, _ = self.attend(x_BTD, x_BTD, x_BTD, need_weights=False)
        return self.head((x_BTD + self.body(x_BTD + y_BTD)).mean(1))


class UNet(nn.Module):
    """Down twice and up twice, with skips from each level to its like."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(2, 4), self.block(4, 6)])
        self.middle = self.block(6, 8)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(8, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)])
        self.up = nn.ModuleList([self.block(12, 6), self.block(8, 4)])
        self.head = nn.Conv2d(4, CLASSES, 1)

    @staticmethod
    def block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.SiLU())

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Classify each pixel: logits [B, classes, H, W]."""
        skips: list[Tensor] = []
        for block in self.down:
            skips.append(block(x_BCHW))
            x_BCHW = functional.max_pool2d(skips[-1], 2)
        x_BCHW = self.middle(x_BCHW)
        for grow, block in zip(self.grow, self.up, strict=True):
            x_BCHW = block(torch.cat([skips.pop(), grow(x_BCHW)], 1))
        return self.head(x_BCHW)


def maps(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images [B, 2, 8, 8] and a class for each pixel [B, 8, 8]."""
    x_BCHW, _ = images(size, generator)
    return x_BCHW, torch.randint(CLASSES, (size, 8, 8), generator=generator)


class Inception(nn.Module):
    """Two blocks of four branches each: convolutions of several sizes, and a pool, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.ModuleList(self.branches(channels) for channels in (4, 12))
        self.head = nn.Linear(12, CLASSES)

    @staticmethod
    def branches(channels: int) -> nn.ModuleList:
        """Return the branches of a block, each of which gives three channels."""
        small = nn.Sequential(nn.Conv2d(channels, 2, 1), nn.Tanh(), nn.Conv2d(2, 3, 3, padding=1))
        large = nn.Sequential(nn.Conv2d(channels, 2, 1), nn.Tanh(), nn.Conv2d(2, 3, 5, padding=2))
        pool = nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), nn.Conv2d(channels, 3, 1))
        return nn.ModuleList([nn.Conv2d(channels, 3, 1), small, large, pool])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Classify images."""
        x_BCHW = self.stem(x_BCHW)
        for block in self.blocks:
            x_BCHW = functional.gelu(torch.cat([branch(x_BCHW) for branch in block], 1))
        return self.head(x_BCHW.mean((2, 3)))


class Late(nn.Module):
    """Several inputs: some are read by late layers alone, one by the first layer and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8 + 3, 8)
        self.last = nn.Linear(8 + 10, CLASSES)

    def forward(self, x_BD: Tensor, extra_BD: Tensor, scale_B: Tensor) -> Tensor:
        """Classify features [B, 10], given more [B, 3] and a factor [B] of the logits."""
        y_BD = self.second(self.first(x_BD).tanh()).tanh()
        y_BD = self.third(torch.cat([y_BD, extra_BD], 1)).tanh()
        return self.last(torch.cat([y_BD, x_BD], 1)) * scale_B[:, None]


def several(size: int, generator: torch.Generator) -> tuple[Any, Tensor]:
    """Return (features, more, factor) and classes [B]."""
    ((x_BD, named), scale_B), targets = nested(size, generator)
    return (x_BD, named["extra"], scale_B), targets["class"]


class Prompted(nn.Module):
    """Words behind a learned prompt that is made of parameters alone, by layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Embedding(2, 6)
        self.widen = nn.Linear(6, 8)
        self.embed = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify words [B, T]."""
        prompt_PD = self.widen(self.prompt.weight.tanh()).tanh()
        x_BTD = self.embed(x_BT)
        x_BTD = torch.cat([prompt_PD.expand(len(x_BTD), -1, -1), x_BTD], 1)
        x_BTD = x_BTD + self.mix(x_BTD).tanh() * prompt_PD.sum(0)
        return self.head(x_BTD.mean(1))


class Waves(nn.Module):
    """Complex weights, complex buffers, one a running mean, a complex constant, and products with conjugates."""

    running: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(10, 12)
        self.turn = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.register_buffer("running", torch.randn(6, dtype=torch.complex128))
        self.register_buffer("offset", torch.randn(6, dtype=torch.complex128))
        self.leave = nn.Linear(12, CLASSES)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Classify features [B, 10]."""
        # times 2, because optimizers of PyTorch take no gradients that are still to be conjugated
        z_BK = torch.view_as_complex(self.enter(x_BD).tanh().view(-1, 6, 2))
        z_BK = z_BK @ self.turn * torch.exp(1j * torch.arange(6.0, dtype=torch.float64)) + (2 * self.shift).conj()
        if self.training:
            self.running.lerp_(z_BK.detach().mean(0), 0.1)
        z_BK = z_BK + z_BK.conj() * (0.5 + 0.25j) + self.offset
        return self.leave(torch.view_as_real(z_BK @ (2 * self.turn).mH).flatten(1))


BUILT: WeakKeyDictionary[nn.Module, Case] = WeakKeyDictionary()
"""The models that cases have built, for who wants to know what a model is."""

CASES: dict[str, Case] = {
    "mlp": Case(build=mlp, data=features),
    "cnn": Case(build=cnn, data=images),
    "resnet": Case(build=resnet, data=larger_images),
    "gpt2": Case(build=gpt2, data=text, loss=logits_of_words),
    "vit": Case(build=vit, data=images, loss=logits_of_class),
    "recurrent": Case(build=Recurrent, data=words),
    "attention": Case(build=Attention, data=words),
    "branches": Case(build=Branches, data=nested, loss=two_losses),
    "tied": Case(build=Tied, data=features),
    "unet": Case(build=UNet, data=maps),
    "inception": Case(build=Inception, data=images),
    "late": Case(build=Late, data=several),
    "prompted": Case(build=Prompted, data=words),
    "dropping": Case(build=Dropping, data=words, draws=True),
}
"""Every kind of model that must train exactly; all but ``dropping`` draw no random numbers."""

COVERED: dict[str, Case] = {**CASES, "complex": Case(build=Waves, data=features)}
"""The models whose every two settings meet; complex numbers are not all that a case of ``CASES`` goes through."""

FATED: dict[str, Case] = {
    "alexnet": Case(build=alexnet, data=larger_images, draws=True),
    "vgg": Case(build=vgg, data=images, draws=True),
    "unet": CASES["unet"],
    "resnet": CASES["resnet"],
    "gpt2": Case(build=lambda: gpt2(dropout=0.2), data=text, loss=logits_of_words, draws=True),
}
"""Models whose segments get every policy: what becomes of their activations, and where they are computed."""

Groups = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)


def adam_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with two groups: matrices, and the others with options of their own."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "lr": 2e-3, "weight_decay": 1e-3},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 5e-3, "betas": (0.8, 0.99)},
    ]
    return torch.optim.Adam(groups, amsgrad=True)


OPTIMIZERS: dict[str, Groups] = {"sgd": sgd, "adamw": adamw, "adam-in-groups": adam_in_groups}
"""The optimizers that every model must train with."""
