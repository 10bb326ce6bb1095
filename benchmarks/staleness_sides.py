"""A run of staleness.py: one task, one optimizer, one treatment of late gradients, one seed."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from staleness_tasks import TASKS, Task, batches, score
from torch import Tensor, nn

import onebox
from onebox.engine.workload.delay_compensation import choose_delay
from onebox.engine.workload.parameter_groups import options_of
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.worker import AHEAD
from onebox.worker.optimizer.native import NativeOptimizer

RULES: Mapping[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 1e-4},
    "AdamW": {"weight_decay": 0.01},
    "Muon": {"weight_decay": 0.01},
}
"""The optimizers, with what is not their default."""

SIDES = ("sync", "none", "predict", "extrapolate", "lookahead", "both", "feedback")
"""Synchronous, stale without treatment, and with each."""

RISE = 0.05
"""The part of a run over which the learning rate rises."""

WARM_UP = 0.2
"""The part of a run in which no gradient is late."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Args:
        loss: Mean loss on what was not trained on.
        accuracy: What is right of it, in percent.
        seconds: How long it took.
        delays: How many updates were how late.
    """

    loss: float
    accuracy: float
    seconds: float
    delays: Mapping[int, int]


def make(task: Task, rule: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer, and the scheduler of its learning rate: up, and down by a cosine."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = getattr(torch.optim, rule)(model.parameters(), lr=task.rates[rule], **RULES[rule])
    rise = max(1, round(RISE * task.steps))

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / task.steps))

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def warm_up(task: Task) -> int:
    """Return how many steps of a task have no late gradients."""
    return max(1, round(WARM_UP * task.steps))


def alone(name: str, rule: str, side: str, seed: int) -> Outcome:
    """Train in this process, with the worker's own optimizer: what a pipeline without end does to the gradients.

    Args:
        name: Of the task.
        rule: The optimizer.
        side: Of :data:`SIDES`.
        seed: Of the weights and the order of batches.
    """
    task = TASKS[name]
    model, optimizer, scheduler = make(task, rule, seed)
    weights = list(model.parameters())
    delay = "none" if side == "sync" else choose_delay(optimizer, side).delay
    groups = ((tuple(range(len(weights))), options_of(optimizer)[0]),)
    newest = [weight.detach().clone() for weight in weights]
    native = NativeOptimizer(OptimizerSpec(rule, groups, tuple(range(len(weights))), delay=delay), newest, [])
    previous: list[Tensor] = []
    ahead: list[Tensor] = []
    start, first, late = time.perf_counter(), warm_up(task), 0
    for step, (inputs, targets) in enumerate(batches(task, seed)):
        stale = side != "sync" and step >= first
        if stale and not previous:
            previous = [tensor.clone() for tensor in newest]
            ahead = [torch.empty_like(tensor) for tensor in newest] if delay in AHEAD else []
            _expect(native, ahead)
        with torch.no_grad():
            for weight, value in zip(weights, previous or newest, strict=True):
                weight.copy_(value)
        gradients = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), weights)
        late += stale and step > first
        with torch.inference_mode():
            native.set_options(options_of(optimizer))
            was = [tensor.clone() for tensor in newest] if stale and not ahead else []
            native.step(list(gradients), task.clip, late=stale)
            if stale:
                previous, ahead = (ahead, previous) if ahead else (was, ahead)
                _expect(native, ahead)
        with warnings.catch_warnings():  # the optimizer that steps is another one
            warnings.simplefilter("ignore", UserWarning)
            scheduler.step()
    with torch.no_grad():
        for weight, value in zip(weights, newest, strict=True):
            weight.copy_(value)
    loss, accuracy = score(model, task)
    counts = {0: task.steps - late} | ({1: late} if late else {})
    return Outcome(loss=loss, accuracy=accuracy, seconds=time.perf_counter() - start, delays=counts)


def through(pool: onebox.Pool, name: str, rule: str, side: str, seed: int) -> Outcome:
    """Train on a worker of a pool; see :func:`alone`."""
    task = TASKS[name]
    model, optimizer, scheduler = make(task, rule, seed)
    start = time.perf_counter()
    stale = None if side == "sync" else onebox.StaleGradients(correction=side, warm_up=warm_up(task))
    plan = onebox.Plan.data_parallel([0], [1.0])
    trainer = onebox.Trainer(
        model,
        nn.functional.cross_entropy,
        optimizer,
        pool=pool,
        plan=plan,
        clip_grad_norm=task.clip or None,
        seed=seed,
        stale=stale,
    )
    with trainer:
        for inputs, targets in batches(task, seed):
            trainer.step(inputs, targets)
            with warnings.catch_warnings():  # the optimizer steps on the worker, which the scheduler does not see
                warnings.simplefilter("ignore", UserWarning)
                scheduler.step()
        trainer.pull()
        delays = dict(trainer.delays)
    loss, accuracy = score(model, task)
    return Outcome(loss=loss, accuracy=accuracy, seconds=time.perf_counter() - start, delays=delays)


def _expect(native: NativeOptimizer, ahead: list[Tensor]) -> None:
    with torch.inference_mode():
        for index, tensor in enumerate(ahead):
            native.expect(index, tensor)


@functools.cache
def auto(rule: str) -> tuple[str, str, str | None]:
    """Return what ``auto`` chooses for an optimizer, why, and its warning."""
    weight = nn.Parameter(torch.zeros(2, 2))
    chosen = choose_delay(getattr(torch.optim, rule)([weight], lr=0.1, **RULES[rule]))
    return chosen.delay, chosen.why, chosen.warning
