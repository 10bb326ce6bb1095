"""A label that is no class: on a GPU an assertion on the device, after which its context is of no use.

The error is one of the operator or of the worker, comes within seconds, and leaves no such worker in the pool.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onebox
from onebox.errors import OneboxError

pytestmark = pytest.mark.gpu

CLASSES = 3

MANY = 40_000
"""Samples of a batch whose labels are too many to be looked at before the step."""


def _trainer(pool: onebox.Pool) -> onebox.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, recovery=None)


def _steps(pool: onebox.Pool, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    with _trainer(pool) as trainer:
        return [
            float(
                trainer.step(
                    torch.randn(8, 10, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator)
                )
            )
            for _ in range(count)
        ]


def _fails(pool: onebox.Pool) -> None:
    """Train with a wrong label, and require an error in time."""
    inputs, labels = torch.randn(MANY, 10), torch.full((MANY,), CLASSES + 4)
    with _trainer(pool) as trainer:
        trainer.step(inputs, labels % CLASSES).item()
        with pytest.raises(OneboxError) as caught:
            for _ in range(3):
                trainer.step(inputs, labels)
            trainer.step(inputs, labels % CLASSES).item()
        assert "worker " in str(caught.value)


def test_the_error_comes_in_time_and_the_pool_trains_again(device: str) -> None:
    with onebox.open(device, threads=1) as pool:
        expected = _steps(pool, 3)
        _fails(pool)
        pool.recover_workers()
        assert _steps(pool, 3) == pytest.approx(expected, rel=1e-5)


def test_a_worker_with_a_broken_context_ends(device: str, on_gpu: None) -> None:
    with onebox.open(device, threads=1) as pool:
        (before,) = pool.process_ids
        _fails(pool)
        assert pool.recover_workers().replaced == (0,)
        (after,) = pool.process_ids
        assert before != after


def test_other_workers_of_the_pool_are_unharmed(device: str) -> None:
    with onebox.open(f"{device},cpu", threads=1) as pool:
        _, other = pool.process_ids
        _fails(pool)
        pool.recover_workers()
        assert pool.process_ids[1] == other
        assert len(_steps(pool, 2)) == 2
