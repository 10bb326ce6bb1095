"""Scripts that leave a bad batch out: the next one goes on as if it had not been there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kit.pools import Pools
from tests.process.plain.case import Case, case, check
from tests.process.plain.data import CLASSES, labelled, mlp, sgd, tokens
from tests.process.plain.ways import Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


def go_on(
    way: Way, model: nn.Module, batches: list[tuple[Any, Any]], loss: Any = F.cross_entropy, **options: Any
) -> None:
    """Train with batches, without those with which a step raises."""
    failed = []
    with way.loop(model, loss, options.pop("optimizer", sgd), **options) as loop:
        for number, batch in enumerate(batches):
            try:
                loop.step(*batch)
            except (RuntimeError, IndexError):
                failed.append(number)
        way.note(failed=failed)


def with_label(batches: list[tuple[Any, Tensor]], place: int, label: int) -> list[tuple[Any, Tensor]]:
    """Return batches in one of which the last sample has another label."""
    inputs, targets = batches[place][0], batches[place][1].clone()
    targets.view(-1)[-1] = label
    return [*batches[:place], (inputs, targets), *batches[place + 1 :]]


@case()
def a_label_that_is_too_large(way: Way) -> None:
    go_on(way, mlp(), with_label(labelled(), 1, CLASSES), micro_batch=8)


@case()
def a_negative_label(way: Way) -> None:
    go_on(way, mlp(), with_label(labelled(), 2, -1), micro_batch=8)


@case()
def a_bad_label_in_the_first_batch(way: Way) -> None:
    go_on(way, mlp(), with_label(labelled(), 0, 9), micro_batch=8)


@case()
def the_label_that_is_ignored(way: Way) -> None:
    go_on(way, mlp(), with_label(labelled(), 1, -100), nn.CrossEntropyLoss(), loss_reduction="mean", micro_batch=16)


@case()
def a_label_for_each_place(way: Way) -> None:
    batches = [(x, y[:, None].expand(-1, 5).contiguous()) for x, y in labelled(shape=(5, 8))]

    def loss(scores_BTC: Tensor, y_BT: Tensor) -> Tensor:
        return F.cross_entropy(scores_BTC.reshape(-1, CLASSES), y_BT.reshape(-1))

    go_on(way, mlp(), with_label(batches, 1, CLASSES + 3), loss, micro_batch=8)


@case()
def a_word_that_is_unknown(way: Way) -> None:
    batches = tokens(4)
    batches[2][0][-1, -1] = 20
    go_on(way, nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(30, CLASSES)), batches, micro_batch=8)


@case()
def a_word_that_is_unknown_with_adam(way: Way) -> None:
    batches = tokens(4)
    batches[1][0][0, 0] = -3

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    model = nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(30, CLASSES))
    go_on(way, model, batches, optimizer=adam, micro_batch=8)
