"""Sides of ``benchmarks/slow_links.py`` on hosts with slow links, compared with one process in float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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


def alone(replicas: int = 1, every: int = 1) -> float:
    """Return the loss of one process, of replicas on parts of each batch that are averaged after one of some steps."""
    made = [models.made(SIZE, SEED, torch.float64) for _ in range(replicas)]
    for step in range(STEPS):
        whole = models.batch(SIZE, SEED, step)
        for rank, (model, optimizer) in enumerate(made):
            for options in optimizer.param_groups:
                options["lr"] = SIZE.rate * models.rate_factor(step, STEPS)
            inputs, targets = models.part(whole, rank, replicas)
            optimizer.zero_grad()
            models.loss_of(model(inputs), targets).backward()
            optimizer.step()
        if step % every == 0 or step == STEPS - 1:
            with torch.no_grad():
                for tensors in zip(*(model.parameters() for model, _ in made), strict=True):
                    mean = torch.stack(list(tensors)).mean(0)
                    for tensor in tensors:
                        tensor.copy_(mean)
    return models.held_out_loss(made[0][0], SIZE)


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
    assert loss_of(group, "post-local sgd") == pytest.approx(alone(2, EVERY), abs=1e-10)
    assert abs(alone(2, EVERY) - alone()) > 1e-6


@pytest.mark.parametrize("side", ["ddp fp16", "ddp powersgd"])
def test_a_hook_changes_the_result_and_sends_less(group: Group, side: str) -> None:
    sent, losses = {}, {}
    for each in ("ddp", side):
        before = group.sent_bytes
        losses[each] = loss_of(group, each)
        sent[each] = group.sent_bytes - before
    assert sent[side] < sent["ddp"]
    assert 1e-10 < abs(losses[side] - losses["ddp"]) < 0.1
