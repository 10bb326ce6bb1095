"""Sides of ``benchmarks/slow_links.py`` on hosts with slow links, compared with one process in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import slow_links_model as models
from slow_links import Group

from tests.net.hosts import unavailable

SIZE = models.SIZES["tiny"]
EVERY, STEPS, SEED = 2, 6, 3
RATE = 100


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """Two hosts, 20 ms from one another, with links of 100 Mbit/s."""
    if why := unavailable():
        pytest.skip(why)
    with Group({"size": "tiny", "every": EVERY, "dtype": "float64"}, 2, 0.02) as made:
        try:
            made.limit(RATE)
        except RuntimeError as error:
            pytest.skip(f"no links of a limited rate here: {error}")
        yield made


def trained(replicas: int, join: Callable[[int, Sequence[Tensor], Sequence[Sequence[Tensor]]], None]) -> float:
    """Return the loss of one process, of replicas that each train on a part of every batch.

    Args:
        replicas: Their number.
        join: Called after each step, with its number, the parameters of the beginning, and those of all replicas, each
            once for each replica; these it may change.
    """
    made = [models.made(SIZE, SEED, torch.float64) for _ in range(replicas)]
    first = [parameter.detach().clone() for parameter in made[0][0].parameters()]
    for step in range(STEPS):
        whole = models.batch(SIZE, SEED, step)
        for rank, (model, optimizer) in enumerate(made):
            for options in optimizer.param_groups:
                options["lr"] = SIZE.rate * models.rate_factor(step, STEPS)
            inputs, targets = models.part(whole, rank, replicas)
            optimizer.zero_grad()
            models.loss_of(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            join(step, first, [list(each) for each in zip(*(model.parameters() for model, _ in made), strict=True)])
    return models.held_out_loss(made[0][0], SIZE)


def alone() -> float:
    """Return the loss of one replica."""
    return trained(1, lambda step, first, copies: None)


def averaged() -> float:
    """Return the loss of two replicas that are averaged after the first of some steps, and at the end."""

    def join(step: int, first: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]) -> None:
        if step % EVERY == 0 or step == STEPS - 1:
            for tensors in copies:
                mean = torch.stack(list(tensors)).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)

    return trained(2, join)


def joined_outside() -> float:
    """Return the loss of two replicas that an outer optimizer joins after the last of some steps (DiLoCo)."""
    outer: list[tuple[Tensor, torch.optim.Optimizer]] = []

    def join(step: int, first: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]) -> None:
        if not outer:
            for start in first:
                kept = start.clone()
                outer.append((kept, torch.optim.SGD([kept], lr=0.7, momentum=0.9, nesterov=True)))
        if step % EVERY == EVERY - 1:
            for (kept, optimizer), tensors in zip(outer, copies, strict=True):
                kept.grad = kept - torch.stack(list(tensors)).mean(0)
                optimizer.step()
                for tensor in tensors:
                    tensor.copy_(kept)

    return trained(2, join)


def loss_of(group: Group, side: str) -> float:
    """Return the loss of a side."""
    group.make(side, seed=SEED, steps=STEPS)
    group.crew(side).steps(side, STEPS)
    loss = group.crew(side).loss(side)
    group.drop(side)
    return loss


@pytest.mark.parametrize("side", ["ddp", "sync", "single", "default", "pipelined"])
def test_an_exact_side_has_the_loss_of_one_process(group: Group, side: str) -> None:
    assert loss_of(group, side) == pytest.approx(alone(), abs=1e-10)


def test_post_local_sgd_averages_after_one_of_some_steps(group: Group) -> None:
    expected = averaged()
    assert loss_of(group, "post-local sgd") == pytest.approx(expected, abs=1e-10)
    assert abs(expected - alone()) > 1e-6


def test_islands_are_joined_by_an_outer_optimizer(group: Group) -> None:
    expected = joined_outside()
    assert loss_of(group, "islands") == pytest.approx(expected, abs=1e-10)
    assert abs(expected - averaged()) > 1e-6


@pytest.mark.parametrize("side", ["ddp fp16", "ddp powersgd"])
def test_a_hook_changes_the_result_and_sends_less(group: Group, side: str) -> None:
    sent, losses = {}, {}
    for each in ("ddp", side):
        before = group.sent_bytes
        losses[each] = loss_of(group, each)
        sent[each] = group.sent_bytes - before
    assert sent[side] < sent["ddp"]
    assert 1e-10 < abs(losses[side] - losses["ddp"]) < 0.1
