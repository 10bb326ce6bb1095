"""Treatments of late gradients through whole pipelines: the result of one process that does it by hand, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onebox
from onebox.plan import ASYNC, Plan
from tests.models import CASES
from tests.process.shelf import Shelf
from tests.process.stages import staged
from tests.reference import Outcome, assert_same, call, sizes_of, state_of

SIZES = (6, 6, 6, 6, 6, 6)
WARM_UP = 2
MOMENTUM = {"SGD": 0.9, "AdamW": 0.8}
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=MOMENTUM["SGD"], weight_decay=0.01),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, betas=(MOMENTUM["AdamW"], 0.99), weight_decay=0.1),
}


def expected_next(optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensor:
    """Return a weight with the update that its momentum expects, by the formulas of SpecTrain and XPipe."""
    group, state = optimizer.param_groups[0], optimizer.state[weight]
    value = weight.detach()
    if "momentum_buffer" in state:
        return value - group["lr"] * state["momentum_buffer"]
    first, second = (
        state[key] / (1 - beta ** float(state["step"]))
        for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
    )
    return value - group["lr"] * (first / (second.sqrt() + group["eps"]) + group["weight_decay"] * value)


def train_by_hand(name: str, rule: str, delay: str, plan: Plan) -> Outcome:
    """Train in this process with gradients that are a step late, and treated."""
    case = CASES[name]
    model = case.model()
    weights = list(model.parameters())
    optimizer = RULES[rule](weights)
    factor = {"lookahead": MOMENTUM[rule], "both": MOMENTUM[rule], "feedback": 1.0}.get(delay, 0.0)
    losses = []
    newest = [weight.detach().clone() for weight in weights]
    read, ahead, last = newest, newest, None
    for step, batch in enumerate(case.batches(list(SIZES))):
        late = step >= WARM_UP
        if step == WARM_UP:
            ahead = [expected_next(optimizer, weight) for weight in weights]
        _become(weights, read)
        optimizer.zero_grad()
        total, start, size = 0.0, 0, sizes_of(batch)
        for part in plan.micro_batches(size):
            inputs, targets = (each[start : start + part.size] for each in batch)
            value = case.loss(call(model, inputs), targets)
            (value * (part.size / size)).backward()
            total += float(value.detach()) * part.size / size
            start += part.size
        _become(weights, newest)
        if late and delay == "extrapolate":
            last = [expected_next(optimizer, weight) - weight.detach() for weight in weights]
        optimizer.step()
        before, made = newest, [weight.detach().clone() for weight in weights]
        newest = made
        if late and factor:
            updates = [new - old for new, old in zip(made, before, strict=True)]
            if last is not None:
                newest = [new + factor * (u - v) for new, u, v in zip(made, updates, last, strict=True)]
            last = updates
            _become(weights, newest)
        if not late:
            read = newest
        elif delay in ("predict", "extrapolate", "both"):
            read, ahead = ahead, [expected_next(optimizer, weight) for weight in weights]
            if delay == "extrapolate":
                updates = [each - new for each, new in zip(ahead, newest, strict=True)]
                ahead = [each + (u - v) for each, u, v in zip(ahead, updates, last, strict=True)]
        else:
            read = before
        losses.append(total)
    return Outcome(losses=losses, norms=[], tensors=state_of(model))


def _become(weights: list[Any], values: list[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


@pytest.fixture(scope="module")
def pool(pools: Shelf) -> onebox.Pool:
    return pools(4)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("delay", ["predict", "extrapolate", "lookahead", "both", "feedback"])
def test_a_pipeline_treats_late_gradients_as_by_hand(delay: str, rule: str, pool: onebox.Pool) -> None:
    """Two stages, one of them on two replicas; state is looked at in between, which changes nothing."""
    plan = staged("cnn", (0, (1, 2)), micro_batch=2, schedule=ASYNC)
    case = CASES["cnn"]
    model = case.model()
    arguments: dict[str, Any] = {"staleness": 1, "delay": delay, "warm_up": WARM_UP, "check_every": 1}
    optimizer = RULES[rule](model.parameters())
    with onebox.Trainer(model, case.loss, optimizer, pool=pool, plan=plan, **arguments) as trainer:
        losses = []
        for step, batch in enumerate(case.batches(list(SIZES))):
            losses.append(trainer.step(*batch))
            if step == WARM_UP + 1:
                trainer.tensors()
        tensors = {name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()}
        delays = dict(trainer.delays)
    found = Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=tensors)
    assert_same(found, train_by_hand("cnn", rule, delay, plan))
    assert delays == {0: 1, 1: len(SIZES) - WARM_UP - 1}
