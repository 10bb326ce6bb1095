"""Small models whose graphs have something unusual: they too train as in one process, on one worker and on three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import onebox
from onebox.errors import CaptureError
from tests.kit.models import CLASSES, features, sgd
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, train
from tests.kit.trainer_arguments import grouped

MICRO_BATCH = 3
SIZES = [8, 8, 2, 5, 8]


class Small(nn.Module):
    """A linear layer, parts by name (modules, parameters, buffers), and a forward of all that."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.line = nn.Linear(10, CLASSES)
        self.compute = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x_BD: Tensor) -> Any:
        """Return logits [B, classes], and whatever the loss wants besides."""
        return self.compute(self, x_BD)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def plus_scalars(outputs: tuple[Tensor, ...], y_B: Tensor) -> Tensor:
    logits, *scalars = outputs
    return functional.cross_entropy(logits, y_B) + sum(scalars)


def count(self: Any, x_BD: Tensor) -> Tensor:
    self.calls += 1
    return self.line(x_BD)


def swap(self: Any, x_BD: Tensor) -> Tensor:
    self.left.copy_(self.right)
    return self.line(x_BD)


def convolve(self: Any, x_BD: Tensor) -> Tensor:
    x_BCHW = functional.pad(x_BD, (0, 6)).view(-1, 1, 4, 4)
    return self.line(self.body(x_BCHW).flatten(1)[:, :10])


def channels_last() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1))
    return Small(convolve, body=body.to(memory_format=torch.channels_last))


def frozen_norm() -> nn.Module:
    model = Small(lambda self, x: self.norm(self.line(x)), norm=nn.BatchNorm1d(CLASSES))
    model.norm.eval()
    return model


def mixed() -> nn.Module:
    model = Small(lambda self, x: self.line(x) + self.other(x.float()).double(), other=nn.Linear(10, CLASSES))
    model.line.double()
    return model


Loss = Callable[[Any, Tensor], Tensor]

GRAPHS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "parameter added to the loss": (
        lambda: Small(lambda self, x: (self.line(x), self.one), one=weight()),
        plus_scalars,
    ),
    "parameters with one gradient": (
        lambda: Small(lambda self, x: (self.line(x), self.one, self.two), one=weight(), two=weight()),
        plus_scalars,
    ),
    "gradient that is expanded": (
        lambda: Small(lambda self, x: (self.line(x), self.many.mean()), many=weight(3, 4)),
        plus_scalars,
    ),
    "gradient that is transposed": (
        lambda: Small(lambda self, x: torch.einsum("bi,oi->bo", x, self.line.weight)),
        functional.cross_entropy,
    ),
    "two broadcast parameters": (
        lambda: Small(lambda self, x: self.line(x) + self.one + self.two, one=weight(CLASSES), two=weight(1)),
        functional.cross_entropy,
    ),
    "buffer copied to another": (
        lambda: Small(swap, left=torch.zeros(3), right=torch.ones(3)),
        functional.cross_entropy,
    ),
    "counter that counts in eval mode too": (
        lambda: Small(count, calls=torch.zeros((), dtype=torch.int64)),
        functional.cross_entropy,
    ),
    "recomputation": (
        lambda: Small(lambda self, x: checkpoint(lambda y: self.line(y).tanh(), x, use_reentrant=False)),
        functional.cross_entropy,
    ),
    "weight norm": (
        lambda: Small(
            lambda self, x: self.more(self.line(x)),
            more=nn.utils.parametrizations.weight_norm(nn.Linear(CLASSES, CLASSES)),
        ),
        functional.cross_entropy,
    ),
    "channels last": (channels_last, functional.cross_entropy),
    "batch norm in eval mode": (frozen_norm, functional.cross_entropy),
    "indices": (
        lambda: Small(lambda self, x: self.line(x)[:, torch.tensor([4, 3, 2, 1, 0])]),
        functional.cross_entropy,
    ),
    "in-place operators": (
        lambda: Small(lambda self, x: functional.relu(self.line(x).add_(1).mul_(2), inplace=True)),
        functional.cross_entropy,
    ),
    "loss with a tensor of its own": (
        lambda: Small(lambda self, x: self.line(x)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ),
    "two types of elements": (mixed, functional.cross_entropy),
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = make()
        return model if make is mixed else model.double()


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [features(size, generator) for size in sizes]


def train_on(pool: onebox.Pool, model: nn.Module, loss: Loss, sync: str) -> Outcome:
    options = {"micro_batch": MICRO_BATCH, "sync": sync, "check_every": 1}
    with onebox.Trainer(model, loss, sgd(model), **grouped(pool=pool, **options)) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches(SIZES)]
        found = trainer.tensors()
    tensors = {name.removeprefix("model."): tensor for name, tensor in found.items() if name.startswith("model.")}
    return Outcome(losses=losses, norms=[], tensors=tensors)


@pytest.mark.parametrize(("workers", "sync"), [(1, "workers"), (3, "workers"), (2, "client")])
@pytest.mark.parametrize("name", GRAPHS)
def test_unusual_graphs_train_as_in_one_process(name: str, workers: int, sync: str, pools: Pools) -> None:
    make, loss = GRAPHS[name]
    found = train_on(pools(workers), build(make), loss, sync)
    model = build(make)
    expected = train(model, loss, sgd(model), batches(SIZES), MICRO_BATCH)
    assert_same(found, expected, 1e-5 if make is mixed else 1e-10)


# ---- buffers that change

UPDATES: dict[str, Callable[[Any, Tensor], object]] = {
    "running mean, in place": lambda self, y: self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1),
    "running mean, interpolated": lambda self, y: self.mean.lerp_(y.mean(0), 0.1),
    "running mean, assigned": lambda self, y: setattr(self, "mean", 0.9 * self.mean + y.mean(0) / 10),
    "last mean": lambda self, y: self.mean.copy_(y.mean(0)),
    "sum": lambda self, y: self.mean.add_(y.sum(0)),
    "decay": lambda self, y: self.mean.add_(1).mul_(0.5),
    "count of micro-batches": lambda self, y: self.whole.add_(1),
    "count of positive values": lambda self, y: self.whole.add_((y > 0).sum(0)),
    "two at once": lambda self, y: (self.whole.add_((y > 0).sum(0)), self.mean.sub_(y.mean(0), alpha=0.2)),
}


def updating(update: Callable[[Any, Tensor], object]) -> nn.Module:
    def forward(self: Any, x_BD: Tensor) -> Tensor:
        y_BD = self.line(x_BD)
        update(self, y_BD.detach())
        return y_BD

    return Small(forward, mean=torch.zeros(CLASSES), whole=torch.zeros(CLASSES, dtype=torch.int64))


@pytest.mark.parametrize("sync", ["workers", "client"])
@pytest.mark.parametrize("name", UPDATES)
def test_replicas_share_the_updates_of_buffers_exactly(name: str, sync: str, pools: Pools) -> None:
    found = train_on(pools(3), build(lambda: updating(UPDATES[name])), functional.cross_entropy, sync)
    model = build(lambda: updating(UPDATES[name]))
    assert_same(found, train(model, functional.cross_entropy, sgd(model), batches(SIZES), MICRO_BATCH))


def greatest(self: Any, y_BD: Tensor) -> None:
    self.mean.copy_(torch.maximum(self.mean, y_BD.amax(0)))


def test_one_worker_runs_an_update_that_replicas_cannot_share(pools: Pools) -> None:
    found = train_on(pools(1), build(lambda: updating(greatest)), functional.cross_entropy, "workers")
    model = build(lambda: updating(greatest))
    assert_same(found, train(model, functional.cross_entropy, sgd(model), batches(SIZES), MICRO_BATCH))


def test_replicas_refuse_an_update_that_they_cannot_share(pools: Pools) -> None:
    with pytest.raises(CaptureError, match=r"buffer model\.mean changes in a way .* train this model on one device"):
        train_on(pools(2), build(lambda: updating(greatest)), functional.cross_entropy, "workers")
