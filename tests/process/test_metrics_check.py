"""Metrics and losses of evaluations that are no means over samples are refused, with a remedy; means are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.errors import UsageError
from tests.kit.pools import Pools

Metric = Callable[[Any, Any], Tensor]


def batches(*sizes: int, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (scale * torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator))
        for size in sizes
    ]


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def count(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).sum()


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.amax(1) - targets).square().mean().sqrt()


def precision(outputs: Tensor, targets: Tensor) -> Tensor:
    """Divides by a number of outputs."""
    found = outputs.argmax(1) == 0
    return (found & (targets == 0)).sum() / found.sum().clamp(min=1)


def recall(outputs: Tensor, targets: Tensor) -> Tensor:
    """Divides by a number of targets."""
    wanted = targets == 0
    return ((outputs.argmax(1) == 0) & wanted).sum() / wanted.sum()


def evaluated(
    metric: Metric, data: list[tuple[Tensor, Tensor]], pool: onebox.Pool, *between: nn.Module, **options: Any
) -> onebox.Evaluation:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = options.pop("loss", functional.cross_entropy)
    with onebox.Trainer(model, loss, optimizer, pool=pool, metrics={"found": metric}, **options) as trainer:
        return trainer.evaluate(data)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (count, "metric 'found' is no mean over samples.*looks like a sum.*Evaluation.samples"),
        (rmse, "metric 'found' is no mean over samples.*a quotient or a root"),
        (precision, "metric 'found' is no mean over samples"),
        (recall, "metric 'found' is no mean over samples.*divides"),
    ],
)
def test_metrics_that_are_no_means_are_refused(metric: Metric, words: str, pools: Pools) -> None:
    with pytest.raises(UsageError, match=words):
        evaluated(metric, batches(12), pools(2))


def test_what_only_later_outputs_decide_is_refused(pools: Pools) -> None:
    """In the first batch all outputs are alike."""

    def sure(outputs: Tensor, targets: Tensor) -> Tensor:
        mask = outputs.softmax(1).amax(1) > 0.5
        return ((outputs.argmax(1) == targets) & mask).sum() / mask.sum().clamp(min=1)

    data = [*batches(12, scale=0.01), *batches(12, scale=2.0)]
    with pytest.raises(UsageError, match=r"a number that the outputs decide.*test_metrics_check\.py.*nothing has been"):
        evaluated(sure, data, pools(2))


def test_a_loss_of_an_evaluation_is_refused(pools: Pools) -> None:
    with pytest.raises(UsageError, match=r"the loss is no mean over samples.*loss_reduction=.sum"):
        evaluated(correct, batches(12), pools(2), loss=nn.CrossEntropyLoss(reduction="sum"))


def test_with_a_reduction_metrics_alone_are_checked(pools: Pools) -> None:
    loss = nn.CrossEntropyLoss(reduction="sum")
    found = evaluated(correct, batches(12), pools(2), loss=loss, loss_reduction="sum")
    assert 0 <= found.metrics["found"] <= 1
    with pytest.raises(UsageError, match="metric 'found'"):
        evaluated(count, batches(12), pools(2), loss=loss, loss_reduction="sum")


@pytest.mark.feature("Trainer: Compute metrics in an evaluation")
@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)])
def test_means_are_the_same_on_any_number_of_devices(between: nn.Module, pools: Pools) -> None:
    data = batches(12, 8)
    found = [evaluated(correct, data, pools(workers), between).metrics["found"] for workers in (1, 2)]
    assert 0 <= found[0] <= 1
    if getattr(between, "track_running_stats", True):
        assert found[0] == pytest.approx(found[1])


def test_one_micro_batch_needs_no_mean(pools: Pools) -> None:
    found = evaluated(count, batches(12), pools(1))
    assert found.metrics["found"] == round(found.metrics["found"])
