"""Losses: means over samples, sums, weighted means, those over the whole batch, and what is no loss at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebox
from tests.process.plain.case import Case, case, check, equal_or_refused, refused
from tests.process.plain.data import integers, labelled, mlp, randn, sgd
from tests.process.plain.ways import Way
from tests.process.shelf import Shelf


def test_as_plain_pytorch(case: Case, way: str, pools: Shelf) -> None:
    check(case, way, pools)


WEIGHTS = (1.0, 2.0, 3.0, 4.0)


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS))


def weight_of(targets: Tensor) -> Tensor:
    """Return the sum of the class weights of targets."""
    return torch.tensor(WEIGHTS, device=targets.device)[targets].sum()


def counted(targets: Tensor) -> Tensor:
    """Return how many targets count."""
    return (targets != -100).sum()


def train(way: Way, loss: Any, batches: Any = None, model: nn.Module | None = None, **options: Any) -> None:
    way.train(model or mlp(), loss, sgd, batches or labelled(), **options)


def mostly_ignored() -> list[tuple[Tensor, Tensor]]:
    """Return batches whose first twelve targets are ignored."""
    return [(x, torch.where(torch.arange(16) < 12, -100, y)) for x, y in labelled(3)]


@case()
def label_smoothing(way: Way) -> None:
    train(way, nn.CrossEntropyLoss(label_smoothing=0.1), micro_batch=8)


@case(trainer=refused("loss_reduction"))
def class_weights(way: Way) -> None:
    train(way, weighted())


@case(devices=1)
def class_weights_in_one_micro_batch(way: Way) -> None:
    train(way, weighted())


@case()
def class_weights_said(way: Way) -> None:
    train(way, weighted(), loss_reduction=onebox.Weighted(weight_of))


@case()
def class_weights_said_with_micro_batches(way: Way) -> None:
    train(way, weighted(), micro_batch=3, loss_reduction=onebox.Weighted(weight_of))


@case(trainer=refused("loss_reduction"))
def ignored_targets(way: Way) -> None:
    train(way, F.cross_entropy, mostly_ignored())


@case()
def ignored_targets_said(way: Way) -> None:
    """One share has only ignored targets."""
    train(way, F.cross_entropy, mostly_ignored(), loss_reduction=onebox.Weighted(counted))


@case(trainer=refused("loss_reduction"))
def sum_over_samples(way: Way) -> None:
    train(way, nn.CrossEntropyLoss(reduction="sum"))


@case()
def sum_over_samples_said(way: Way) -> None:
    train(way, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")


@case()
def sum_over_samples_said_with_micro_batches(way: Way) -> None:
    train(way, nn.CrossEntropyLoss(reduction="sum"), labelled(2, samples=13), micro_batch=4, loss_reduction="sum")


@case()
def mean_said(way: Way) -> None:
    train(way, F.cross_entropy, micro_batch=4, loss_reduction="mean")


def contrastive(outputs: Tensor, targets: Any) -> Tensor:
    """Every sample against all others of the batch."""
    z = F.normalize(outputs, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z), device=z.device))


@case(trainer=refused("one micro-batch|whole batch"))
def contrastive_over_the_batch(way: Way) -> None:
    train(way, contrastive)


@case(devices=1)
def contrastive_in_one_micro_batch(way: Way) -> None:
    train(way, contrastive)


@case()
def contrastive_in_one_micro_batch_of_a_pool(way: Way) -> None:
    """A micro-batch as large as the batch goes to one of the devices."""
    train(way, contrastive, micro_batch=16)


@case()
def dict_of_outputs(way: Way) -> None:
    train(way, lambda o, t: F.cross_entropy(o["y"], t) + 0.1 * o["h"].pow(2).mean(), model=Named(), micro_batch=8)


class Named(nn.Module):
    """Outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x).relu()
        return {"h": h, "y": self.b(h)}


@case(trainer=refused("the loss is a dict"), vgpu=None)
def loss_that_is_a_dict(way: Way) -> None:
    train(way, lambda o, t: {"loss": F.cross_entropy(o, t)})


@case(trainer=refused("the loss is a tuple"), vgpu=None)
def loss_that_is_a_tuple(way: Way) -> None:
    train(way, lambda o, t: (F.cross_entropy(o, t), o.mean()))


@case(trainer=refused("must be a scalar"), vgpu=None)
def loss_of_each_sample(way: Way) -> None:
    train(way, nn.CrossEntropyLoss(reduction="none"))


@case()
def weight_decay_in_the_loss(way: Way) -> None:
    model = mlp()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())

    train(way, loss, model=model, micro_batch=8)


@case(trainer=refused(r"test_losses\.py:\d+.*values? of a tensor"))
def loss_that_decides_by_its_value(way: Way) -> None:
    train(way, lambda o, t: F.cross_entropy(o, t) * (2 if F.cross_entropy(o, t).item() > 1 else 1))


@case(trainer=equal_or_refused("ctc"))
def ctc(way: Way) -> None:
    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        labels, lengths, sizes = targets
        return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), labels, lengths, sizes, zero_infinity=True)

    targets = integers(1, 6, 16, 3), torch.full((16,), 12), integers(2, 4, 16)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
    train(way, loss, [(randn(16, 12, 8, seed=n), targets) for n in range(3)], model=model, micro_batch=8)


@case()
def batch_whose_last_one_is_smaller(way: Way) -> None:
    train(way, F.cross_entropy, [*labelled(2), *labelled(1, 5), *labelled(1), *labelled(1, 5)], micro_batch=8)


@case()
def batch_of_one_sample(way: Way) -> None:
    train(way, F.cross_entropy, labelled(3, samples=1))


@case()
def one_large_batch_in_micro_batches(way: Way) -> None:
    train(way, F.cross_entropy, labelled(2, samples=64), micro_batch=16)


@case()
def loss_with_parameters_of_its_own(way: Way) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs * self.scale, targets)

    train(way, Scaled(), micro_batch=8)
