"""What ``gpu_steps.py`` trains: ResNet-50 on pictures of 224 x 224 and GPT-2 small on 1,024 tokens, and tiny ones.

Shape letters: B samples, C channels, H rows, W columns, T tokens, D features of a token, N heads, K features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hybrid_models import resnet50
from torch import Tensor, nn
from torch.nn import functional


class Pixels(nn.Module):
    """A network behind bytes of colours, which are a quarter of the upload that floats would be.

    Args:
        body: It.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map uint8 images [B, 3, H, W] to what the network makes of numbers from -1 to 1."""
        return self.body(x_BCHW.float() / 127.5 - 1)


class Block(nn.Module):
    """A block of GPT-2: causal attention and two linear layers, each behind a layer norm and beside a shortcut.

    Args:
        width: Features of a token.
        heads: Of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to the same shape."""
        batch, tokens, width = x_BTD.shape
        qkv = self.attend(self.norm_attention(x_BTD)).view(batch, tokens, 3, self.heads, width // self.heads)
        q_BNTK, k_BNTK, v_BNTK = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y_BNTK = functional.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK, is_causal=True)
        x_BTD = x_BTD + self.project(y_BNTK.transpose(1, 2).reshape(batch, tokens, width))
        return x_BTD + self.narrow(functional.gelu(self.widen(self.norm_mlp(x_BTD)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 (Radford and others, 2019): 124 million parameters with the sizes of its small one; no dropout.

    Args:
        words: Of the vocabulary.
        tokens: Longest text.
        width: Features of a token.
        depth: Blocks.
        heads: Of each attention.
    """

    def __init__(self, *, words: int, tokens: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("numbers", torch.arange(tokens), persistent=False)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Map words [B, T] to logits [B, T, words]; the output layer is the embedding."""
        x_BTD = self.words(x_BT) + self.places(self.numbers)
        return functional.linear(self.norm(self.blocks(x_BTD)), self.words.weight)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its data.

    Args:
        build: Makes the model.
        batch: Makes inputs and targets from a generator.
        optimizer: Makes the optimizer; ``capturable`` where a CUDA graph is to hold its step.
        loss: Maps (outputs, targets) to a mean.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module, bool], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]

    def model(self) -> nn.Module:
        """Return the model, the same every time."""
        torch.manual_seed(0)
        return self.build()

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches, the same every time."""
        generator = torch.Generator().manual_seed(1)
        return [self.batch(generator) for _ in range(count)]


def words_loss(logits_BTV: Tensor, y_BT: Tensor) -> Tensor:
    """Return the cross entropy of the logits of each token."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), y_BT.flatten())


def _sgd(model: nn.Module, capturable: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _adamw(model: nn.Module, capturable: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=capturable)


def _resnet(batch: int, edge: int, classes: int, width: int, depths: tuple[int, ...]) -> Case:
    def build() -> nn.Module:
        body = resnet50(width, depths)
        body[-1][-1] = nn.Linear(body[-1][-1].in_features, classes)
        return Pixels(body)

    def data(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_BCHW = torch.randint(0, 256, (batch, 3, edge, edge), dtype=torch.uint8, generator=generator)
        return x_BCHW, torch.randint(0, classes, (batch,), generator=generator)

    return Case(build=build, batch=data, optimizer=_sgd, loss=functional.cross_entropy)


def _gpt(batch: int, tokens: int, words: int, width: int, depth: int, heads: int) -> Case:
    def data(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(0, words, (batch, tokens + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Case(
        build=lambda: Gpt(words=words, tokens=tokens, width=width, depth=depth, heads=heads),
        batch=data,
        optimizer=_adamw,
        loss=words_loss,
    )


CASES = {
    "resnet50": _resnet(batch=64, edge=224, classes=1000, width=64, depths=(3, 4, 6, 3)),
    "gpt2": _gpt(batch=8, tokens=1024, words=50257, width=768, depth=12, heads=12),
}
"""The models of the papers."""

TINY = {
    "resnet50": _resnet(batch=8, edge=64, classes=10, width=8, depths=(1, 1, 1, 1)),
    "gpt2": _gpt(batch=4, tokens=32, words=97, width=32, depth=2, heads=2),
}
"""Small ones, for trying the benchmark out without a GPU."""
