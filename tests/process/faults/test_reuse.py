"""One pool, many trainers: what a trainer takes it gives back, whether it ended well or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import onebox
from onebox.errors import DeviceMemoryError
from onebox.pool import open_pool, raise_first
from onebox.sizes import size_text
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import WorkerMemory
from tests.process.faults.training import (
    AT_ONCE_S,
    batch,
    fails,
    parts,
    questions,
    steps,
    train,
    trainer_on,
)

QUOTA_BYTES = 4 << 20
MANY_STEPS = 200
GROWTH_BYTES = 2 << 20
"""How much a process may grow over :data:`MANY_STEPS`, allocators' habits included: a leak of 10 KB a step fails."""


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    """A pool whose workers have a quota."""
    with open_pool("cpu*2", threads=1, memory=QUOTA_BYTES) as opened:
        yield opened


def used_bytes(pool: onebox.Pool) -> list[int]:
    """Return the bytes in use on each worker."""
    answers = raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in range(len(pool))])
    return [result.used_bytes for answer in answers for result in answer.results if isinstance(result, WorkerMemory)]


@pytest.mark.parametrize("sync", ["workers", "client"])
def test_trainers_one_after_the_other_get_the_same_result_and_free_their_memory(pool: onebox.Pool, sync: str) -> None:
    first = train(pool, sync)
    assert used_bytes(pool) == [0, 0]
    second = train(pool, sync)
    assert used_bytes(pool) == [0, 0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def wide(pool: onebox.Pool) -> onebox.Trainer:
    """Return a trainer whose intermediate values take 8 KB a sample and layer."""
    model, loss, optimizer = parts(width=1024)
    return onebox.Trainer(model, loss, optimizer, pool=pool)


@pytest.mark.parametrize("how", ["train", "evaluate"])
def test_a_batch_over_the_quota_is_refused_and_a_smaller_one_fits(pool: onebox.Pool, how: str) -> None:
    large, small = batch(0, 1024), batch(0, 16)
    with wide(pool) as trainer:
        run = {"train": lambda: trainer.step(*large).item(), "evaluate": lambda: trainer.evaluate([large])}[how]
        error = fails(run).error
        assert isinstance(error, DeviceMemoryError)
        assert error.operator.startswith("aten.")
        assert error.worker in (0, 1)
        assert error.device == "cpu"
        assert f"the quota is {size_text(QUOTA_BYTES)}" in str(error)
        assert "smaller micro" in str(error)
    assert used_bytes(pool) == [0, 0]
    with wide(pool) as trainer:
        trainer.step(*small).item()
        trainer.evaluate([small])


def test_a_model_over_the_quota_is_refused_and_a_smaller_one_fits(pool: onebox.Pool) -> None:
    model = nn.Linear(8, QUOTA_BYTES // 32).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool) as trainer:
        error = fails(lambda: trainer.step(*batch(0)).item()).error
        assert isinstance(error, DeviceMemoryError), error
    assert used_bytes(pool) == [0, 0]
    train(pool, "workers", 1)


@pytest.mark.parametrize("sync", ["workers", "client"])
def test_many_steps_leak_nothing(pool: onebox.Pool, sync: str) -> None:
    processes = [psutil.Process(), *map(psutil.Process, pool.process_ids)]
    with trainer_on(pool, sync) as trainer:
        steps(trainer, 20)
        used = used_bytes(pool)
        sizes = [process.memory_info().rss for process in processes]
        descriptors = [process.num_fds() for process in processes]
        steps(trainer, 20 + MANY_STEPS)
        assert used_bytes(pool) == used
        assert not pool._client_loop._pending.futures
        assert [process.num_fds() for process in processes] == descriptors
        grown = [process.memory_info().rss - size for process, size in zip(processes, sizes, strict=True)]
        assert max(grown) < GROWTH_BYTES, grown


@pytest.mark.parametrize("sync", ["workers", "client"])
def test_a_step_that_is_interrupted_half_way_is_void_and_holds_up_nobody(
    pool: onebox.Pool, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(worker: int, *message: Any, **options: Any) -> Any:
        if worker == 1:
            raise KeyboardInterrupt
        return post(worker, *message, **options)

    post = pool.post
    with trainer_on(pool, sync) as trainer:
        steps(trainer, 2)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pool, "post", interrupted)
            trainer.step(*batch(2))
        for question in questions(trainer):
            raised = fails(question)
            assert "interrupted" in str(raised.error)
            assert raised.after_s < AT_ONCE_S
    train(pool, sync)
    assert used_bytes(pool) == [0, 0]
