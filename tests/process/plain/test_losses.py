"""Losses: means over samples, sums, weighted means, those over the whole batch, and what is no loss at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebox
from tests.kit.pools import Pools
from tests.process.plain.case import EQUAL, TORCH_2_11, Case, case, check, equal_or_refused, refused, warned
from tests.process.plain.data import integers, labelled, mlp, randn, sgd
from tests.process.plain.ways import Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
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


@case()
def classes_as_bytes(way: Way) -> None:
    train(way, F.cross_entropy, [(x, y.byte()) for x, y in labelled()])


def onto(loss: Any, kind: torch.dtype) -> Any:
    """Return a loss that takes targets of a type as the distance of each output to them."""
    return lambda outputs, targets: loss(outputs, targets.to(kind).unsqueeze(1).expand_as(outputs))


@case()
def distances_to_integers(way: Way) -> None:
    train(way, onto(F.smooth_l1_loss, torch.int64))


@case(trainer=None if TORCH_2_11 else EQUAL, vgpu=None if TORCH_2_11 else EQUAL)
def distances_to_another_precision(way: Way) -> None:
    train(way, onto(F.mse_loss, torch.float32))


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


# ---- losses that are means over samples at first, or in eval mode, or in one state of Python

NO_MEAN = "the loss is no mean over samples"
OF_OUTPUTS = r"divides by a number that the outputs decide.*test_losses\.py:\d+"


def scaled(*scales: float, samples: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Return a batch for each factor of its inputs."""
    return [(x * scale, t) for scale, (x, t) in zip(scales, labelled(len(scales), samples), strict=True)]


def violated(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a mean over violated margins."""
    each = F.multi_margin_loss(outputs, targets, reduction="none", margin=0.5)
    return each.sum() / (each > 0).sum().clamp(min=1)


@case(trainer=refused(OF_OUTPUTS))
def mean_over_violated_margins(way: Way) -> None:
    train(way, violated, scaled(0.01, 0.01, 30.0, 30.0))


@case()
def mean_over_violated_margins_of_one_micro_batch(way: Way) -> None:
    train(way, violated, scaled(0.01, 30.0), micro_batch=12)


@case()
def mean_over_margins_that_are_all_violated(way: Way) -> None:
    train(way, violated, scaled(0.01, 0.01, 0.01))


def confident(outputs: Tensor, targets: Tensor, least: float = 0.4) -> Tensor:
    """Return FixMatch's loss: that of confident samples with their own labels, beside that of all."""
    best, labels = outputs.softmax(1).max(1)
    mask = (best > least).to(outputs.dtype)
    own = F.cross_entropy(outputs, labels, reduction="none")
    return F.cross_entropy(outputs, targets) + (own * mask).sum() / mask.sum().clamp(min=1)


@case(trainer=refused(OF_OUTPUTS))
def threshold_of_confidence(way: Way) -> None:
    train(way, confident, scaled(0.01, *[3.0] * 6))


@case(trainer=refused(OF_OUTPUTS))
def threshold_that_one_sample_passes(way: Way) -> None:
    """The least value of the divisor hides that the other micro-batch has none."""
    x, t = labelled(1, 12)[0]
    one = x * 0.01
    one[3] *= 3000
    train(way, confident, [(x * 0.01, t), (one, t)])


@case(trainer=refused(r"divides by a number that the outputs decide"))
def ignored_labels_that_outputs_choose(way: Way) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        chosen = torch.where(outputs.amax(1) > 0.5, targets, -100)
        return F.cross_entropy(outputs, chosen) + F.cross_entropy(outputs, targets)

    train(way, loss, scaled(30.0, 30.0))


@case(trainer=refused("function of a mean.*abs"))
def flooding_that_begins_late(way: Way) -> None:
    """An absolute value is a mean as long as all micro-batches are on one side."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (F.cross_entropy(outputs, targets) - 1.1).abs() + 1.1

    train(way, loss, labelled(1, 12) * 30)


@case(trainer=refused("function of a mean.*(clamp|relu)"))
def free_bits(way: Way) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + (outputs.square().mean() - 0.06).clamp(min=0.0)

    train(way, loss, scaled(0.01, 0.01, *[1.0] * 8))


@case()
def absolute_value_on_one_side(way: Way) -> None:
    train(way, lambda o, t: (F.cross_entropy(o, t) + 5).abs(), scaled(1.0, 1.0))


class Annealed(nn.Module):
    """Has a contrastive term that begins late."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        unit = F.normalize(outputs, dim=1)
        alike = F.cross_entropy(unit @ unit.T * 5, torch.arange(len(outputs), device=outputs.device))
        return F.cross_entropy(outputs, targets) + self.beta * alike


@case(trainer=refused(NO_MEAN))
def contrastive_term_that_begins_late(way: Way) -> None:
    loss = Annealed()
    train(way, loss, before=lambda step, loop: setattr(loss, "beta", float(step >= 2)))


@case(trainer=refused(NO_MEAN))
def sum_from_a_later_step_on(way: Way) -> None:
    class Squares(nn.Module):
        """Computes the loss, and holds its options."""

        def __init__(self) -> None:
            super().__init__()
            self.reduction = "mean"

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(outputs, F.one_hot(targets, 4).to(outputs), reduction=self.reduction)

    loss = Squares()
    train(way, loss, before=lambda step, loop: setattr(loss, "reduction", "mean" if step < 2 else "sum"))


class Auxiliary(nn.Module):
    """Has a term over the batch in training alone."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), *between, nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        if not self.training:
            return h, h.sum() * 0
        unit = F.normalize(h, dim=1)
        return h, F.cross_entropy(unit @ unit.T * 5, torch.arange(len(h), device=h.device))


def with_term(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + outputs[1]


@case(trainer=refused(NO_MEAN))
def term_in_training_alone(way: Way) -> None:
    train(way, with_term, model=Auxiliary())


@case(trainer=refused(NO_MEAN), vgpu=None)
def term_in_training_alone_beside_dropout(way: Way) -> None:
    train(way, with_term, model=Auxiliary(nn.Dropout(1e-300)))


@case(trainer=refused(NO_MEAN), vgpu=None)
def term_in_training_alone_beside_batch_norm(way: Way) -> None:
    train(way, with_term, model=Auxiliary(nn.BatchNorm1d(8, track_running_stats=False)))


@case(trainer=refused(NO_MEAN), vgpu=None)
def sum_beside_random_numbers(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.AlphaDropout(0.1), nn.Linear(8, 4))
    train(way, nn.CrossEntropyLoss(reduction="sum"), model=model)


class CustomNorm(nn.Module):
    """A batch norm in Python, with statistics of the micro-batch in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        mean = x.mean(0)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(mean.detach() * 0.1)
        return x - mean


@case(trainer=warned("computes by micro-batches in training"), vgpu=None)
def batch_norm_in_python(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 8), CustomNorm(), nn.Linear(8, 4))
    train(way, F.cross_entropy, model=model, micro_batch=8)


@case(trainer=refused(NO_MEAN))
def root_of_a_mean(way: Way) -> None:
    train(way, lambda o, t: F.mse_loss(o, F.one_hot(t, 4).to(o)).sqrt())


@case(trainer=refused(NO_MEAN))
def floor_of_a_count_of_targets(way: Way) -> None:
    """One micro-batch has a target that counts and the other none."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        mask = (targets == 0).to(outputs.dtype)
        return (F.cross_entropy(outputs, targets, reduction="none") * mask).sum() / mask.sum().clamp(min=1)

    x, _ = labelled(1, 12)[0]
    train(way, loss, [(x, torch.tensor([0, 1] * 6)), (x, torch.tensor([0] + [1] * 11))])
