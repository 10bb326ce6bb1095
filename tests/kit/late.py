"""What steps with a staleness of one are compared with: plain PyTorch that applies each gradient one step late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.kit.reference import Cut, Outcome, backward, clipped, state_of

AHEAD, CORRECTS = ("predict", "extrapolate", "both"), ("lookahead", "both", "feedback")
"""Treatments that compute on weights that are ahead, and those that correct updates."""


def train_late(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Any, Any]],
    cut: Cut,
    *,
    delay: str = "none",
    max_norm: float | None = None,
    warm_up: int = 0,
    around: Callable[[int, int], contextlib.AbstractContextManager[Any]] | None = None,
    after_step: Callable[[], object] = lambda: None,
    skipped: Collection[int] = (),
) -> Outcome:
    """Train a model whose every step is computed with the weights from before the last update, or what stands for them.

    The first such step has no older weights, and is computed with the ones that there are.

    Args:
        model: Changed in place.
        loss: Maps (outputs, targets) to a scalar.
        optimizer: Over the model's parameters.
        batches: (inputs, targets) of each step.
        cut: Into micro-batches.
        delay: What is done about late gradients, by the formulas of docs/concepts/staleness.md; with ``predict``,
            ``extrapolate`` and ``both`` for SGD with momentum and optimizers of Adam's kind.
        max_norm: For clipping.
        warm_up: So many steps before are exact.
        around: From (step, micro-batch) to a context for forward.
        after_step: Called after each step, for a scheduler.
        skipped: Steps whose gradients are not applied; the next ones read what they would read after them.
    """
    losses, norms = [], []
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    read = newest = ahead = _copies(weights)
    last: list[Tensor] | None = None
    for step, batch in enumerate(batches):
        late = step >= warm_up
        if step in skipped:
            read = ahead if late and delay in AHEAD else newest
            continue
        if step == warm_up and delay in AHEAD:
            ahead = _expected(optimizer)
        _become(weights, read)
        optimizer.zero_grad()
        losses.append(backward(model, loss, batch, cut, lambda index, s=step: around(s, index) if around else None))
        norms.append(clipped(model, max_norm))
        before = newest
        _become(weights, before)
        known = any(optimizer.state.values())
        promised = [to - weight for to, weight in zip(_expected(optimizer), before, strict=True)]
        optimizer.step()
        if late and delay in CORRECTS:
            last = _correct(optimizer, before, last, feedback=delay == "feedback")
        newest = _copies(weights)
        if late and delay in AHEAD:
            read, ahead = ahead, _expected(optimizer)
            if delay == "extrapolate" and known:  # what is expected is carried on with its change
                changes = [to - weight - old for to, weight, old in zip(ahead, newest, promised, strict=True)]
                ahead = [to + change for to, change in zip(ahead, changes, strict=True)]
        else:
            read = before if late else newest
        after_step()
    return Outcome(losses=losses, norms=norms, tensors=state_of(model))


def _expected(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return weights with the update that their momentum expects, by the formulas of SpecTrain and XPipe."""
    return [_expected_next(optimizer, group, weight) for group in optimizer.param_groups for weight in group["params"]]


def _expected_next(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: Tensor) -> Tensor:
    state, value = optimizer.state[weight], weight.detach().clone()
    if "momentum_buffer" in state:
        return value - group["lr"] * state["momentum_buffer"]
    if "exp_avg" not in state:
        return value
    second_moment = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    first, second = (
        state[key] / (1 - beta ** float(state["step"]))
        for key, beta in zip(("exp_avg", second_moment), group["betas"], strict=True)
    )
    decay = group["weight_decay"] if isinstance(optimizer, torch.optim.AdamW) else 0.0
    return value - group["lr"] * (first / (second.sqrt() + group["eps"]) + decay * value)


def _correct(
    optimizer: torch.optim.Optimizer, before: Sequence[Tensor], last: list[Tensor] | None, *, feedback: bool
) -> list[Tensor]:
    """Let weights go further by what differs between this update and the last one; return this one."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    updates = [weight.detach() - old for weight, old in zip(weights, before, strict=True)]
    with torch.no_grad():
        for weight, group, new, old in zip(weights, groups, updates, last or updates, strict=True):
            factor = 1.0 if feedback else group["betas"][0] if "betas" in group else group["momentum"]
            weight.add_(new - old, alpha=factor)
    return updates


def _copies(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def _become(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
