"""Treatments of late gradients from the first step on, and of a run whose state is looked at in between.

That each of them goes with each optimizer and layout is in ``test_covering_array``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onebox
from onebox.plan import ASYNC
from tests.kit.late import train_late
from tests.kit.models import CASES
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import staged, tensors_of
from tests.kit.trainer_arguments import grouped

SIZES = (4, 4, 4, 4, 4, 4)
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
}


DEVICES = 4
"""Workers of the pool."""


@pytest.mark.feature("Late gradients: Correct late gradients after exact first steps")
@pytest.mark.parametrize(
    ("rule", "delay", "warm_up"), [("SGD", "extrapolate", 0), ("AdamW", "extrapolate", 0), ("AdamW", "both", 2)]
)
def test_a_pipeline_treats_late_gradients_as_by_hand(rule: str, delay: str, warm_up: int, pool: onebox.Pool) -> None:
    """Two stages, one of them on two replicas; state is looked at in between, which changes nothing."""
    plan = staged("cnn", (0, (1, 2)), micro_batch=2, schedule=ASYNC)
    case = CASES["cnn"]
    model = case.model()

    arguments: dict[str, Any] = {"staleness": 1, "delay": delay, "warm_up": warm_up, "check_every": 1}
    optimizer = RULES[rule](model.parameters())
    with onebox.Trainer(model, case.loss, optimizer, **grouped(pool=pool, plan=plan, **arguments)) as trainer:
        losses = []
        for step, batch in enumerate(case.batches(list(SIZES))):
            losses.append(trainer.step(*batch))
            if step == warm_up + 1:
                trainer.tensors()
        tensors = tensors_of(trainer)
        delays = dict(trainer.delays)
    found = Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=tensors)
    model, batches = case.model(), case.batches(list(SIZES))
    optimizer = RULES[rule](model.parameters())
    assert_same(found, train_late(model, case.loss, optimizer, batches, plan, delay=delay, warm_up=warm_up))
    assert delays == {0: 1, 1: len(SIZES) - warm_up - 1}
