"""What steps with a staleness of one are compared with: plain PyTorch that applies each gradient one step late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.reference import Outcome, call, sizes_of, state_of


def train_late(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Any, Any]],
    cut: Callable[[int], Sequence[int]],
    *,
    max_norm: float | None = None,
    warm_up: int = 0,
    around: Callable[[int, int], contextlib.AbstractContextManager[Any]] | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> Outcome:
    """Train a model whose every step is computed with the weights from before the last update.

    The first such step has no older weights, and is computed with the ones that there are.

    Args:
        model: Changed in place.
        loss: Maps (outputs, targets) to a scalar.
        optimizer: Over the model's parameters.
        batches: (inputs, targets) of each step.
        cut: From the samples of a batch to those of each micro-batch.
        max_norm: For clipping.
        warm_up: So many steps before are exact.
        around: From (step, micro-batch) to a context for forward.
        after_step: Called after each step, for a scheduler.
    """
    losses, norms = [], []
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    for step, batch in enumerate(batches):
        newest = [p.detach().clone() for p in parameters]
        if step > warm_up:
            _become(parameters, before)
        optimizer.zero_grad()
        total, start, size = 0.0, 0, sizes_of(batch)
        for index, part in enumerate(cut(size)):
            inputs, targets = tree_map(lambda t, a=start, b=start + part: t[a:b], batch)
            with around(step, index) if around else contextlib.nullcontext():
                value = loss(call(model, inputs), targets)
            (value * (part / size)).backward()
            total += float(value.detach()) * part / size
            start += part
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        _become(parameters, newest)
        optimizer.step()
        after_step()
        before = newest
        losses.append(total)
    return Outcome(losses=losses, norms=norms, tensors=state_of(model))


def _become(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
