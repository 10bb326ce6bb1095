"""Batches that are uploaded ahead of their steps: each worker its own part, the same results, no memory too many."""

from __future__ import annotations

import gc
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import onebox
from onebox.errors import OneboxError, UsageError
from onebox.plan import Plan
from onebox.pool import Pool, raise_first
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Ask, Free, Get
from onebox.wire.protocol.requests import Put
from onebox.wire.protocol.responses import WorkerMemory
from tests.kit.models import CASES, sgd
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, train
from tests.kit.slow_channel import slow_channel
from tests.kit.stages import outcome, staged
from tests.kit.trainer_arguments import grouped

MICRO_BATCH = 3
SIZES = [8, 8, 8, 5, 8, 8]

PLANS: dict[str, Plan] = {
    "three replicas": Plan.data_parallel([0, 1, 2], [1.0, 2.0, 1.0], micro_batch=MICRO_BATCH),
    "three stages": staged("mlp", [0, 1, 2], micro_batch=MICRO_BATCH),
    "two replicas of two stages": staged("mlp", [(0, 1), (2, 3)], micro_batch=MICRO_BATCH),
}


def trainer_of(pool: Pool, **options: Any) -> onebox.Trainer:
    case = CASES["mlp"]
    model = case.model()
    return onebox.Trainer(model, case.loss, sgd(model), **grouped(pool=pool, **{"micro_batch": MICRO_BATCH, **options}))


def planned(pool: Pool, plan: Plan, **options: Any) -> onebox.Trainer:
    return trainer_of(pool, plan=plan, **{"micro_batch": None, **options})


def expected(sizes: list[int] = SIZES) -> Outcome:
    case = CASES["mlp"]
    model = case.model()
    return train(model, case.loss, sgd(model), case.batches(sizes), MICRO_BATCH)


def used(pool: Pool) -> list[int]:
    answers = raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in pool.present])
    return [result.used_bytes for answer in answers for result in answer.results if isinstance(result, WorkerMemory)]


@pytest.mark.parametrize("name", PLANS)
def test_each_worker_is_sent_what_its_stages_read_and_nothing_else(name: str, pools: Pools) -> None:
    plan, size = PLANS[name], 12
    pool = pools(len(plan.devices))
    batch = CASES["mlp"].batches([size])[0]
    input_bytes, target_bytes = (tensor.nbytes // size for tensor in batch)
    routes = plan.routes(size)
    wanted = [0] * len(pool)
    for index, part in enumerate(plan.micro_batches(size)):
        for stage, a_sample in ((0, input_bytes), (-1, target_bytes)):
            for worker in routes[stage][index]:
                wanted[worker] += a_sample * part.size
    with planned(pool, plan) as trainer:
        trainer.step(*batch).item()
        before = pool.sent_bytes
        trainer.step(*batch).item()
        between = pool.sent_bytes
        trainer.step(trainer.upload(*batch)).item()
        assert [after - first for first, after in zip(before, between, strict=True)] == wanted
        assert [after - first for first, after in zip(between, pool.sent_bytes, strict=True)] == wanted
    assert sum(wanted) == sum(tensor.nbytes for tensor in batch)


@pytest.mark.feature("Trainer: Upload batches ahead of their steps")
@pytest.mark.parametrize(
    ("name", "ahead"), [("three replicas", 0), ("three replicas", 700), ("two replicas of two stages", 1 << 20)]
)
def test_what_is_uploaded_ahead_by_another_thread_trains_like_one_process(name: str, ahead: int, pools: Pools) -> None:
    plan = PLANS[name]
    batches = CASES["mlp"].batches(SIZES)
    with planned(pools(len(plan.devices)), plan, ahead=ahead) as trainer:
        with ThreadPoolExecutor(1) as thread:
            coming = [thread.submit(trainer.upload, *batch) for batch in batches]
            losses = [trainer.step(future.result()) for future in coming]
        assert_same(outcome(trainer, losses), expected())
        counters = trainer.upload_counters()
        assert counters.steps == len(SIZES)
        assert (counters.ahead == 0) == (ahead == 0)


def test_the_users_tensors_may_change_as_soon_as_they_are_uploaded(pools: Pools) -> None:
    with trainer_of(pools(2)) as trainer:
        losses = []
        for inputs, targets in CASES["mlp"].batches(SIZES):
            uploaded = trainer.upload(inputs, targets)
            inputs.zero_()
            targets.zero_()
            losses.append(trainer.step(uploaded))
            assert (uploaded.size, uploaded.nbytes) == (len(inputs), inputs.nbytes + targets.nbytes)
        assert_same(outcome(trainer, losses), expected())


def test_what_is_never_stepped_is_freed(pools: Pools) -> None:
    pool = pools(2)
    batch = CASES["mlp"].batches([8])[0]
    with trainer_of(pool) as trainer:
        trainer.step(*batch).item()
        idle = used(pool)
        first, second = trainer.upload(*batch), trainer.upload(*batch)
        third = trainer.upload(*batch)  # more than lie ahead at a time: it waits at the client
        assert sum(used(pool)) - sum(idle) == first.nbytes + second.nbytes
        first.close()
        first.close()
        assert sum(used(pool)) - sum(idle) == second.nbytes + third.nbytes
        trainer.step(second).item()
        assert sum(used(pool)) - sum(idle) == third.nbytes
        del second, third
        gc.collect()
        trainer.step(*batch).item()
        assert used(pool) == idle
        with pytest.raises(UsageError, match="stepped or closed"):
            trainer.step(first)
        left = trainer.upload(*batch)
    assert used(pool) == [0, 0]
    with pytest.raises(UsageError, match="closed"):
        trainer.step(left)


def test_an_upload_serves_one_step_of_its_own_trainer(pools: Pools) -> None:
    batch = CASES["mlp"].batches([8])[0]
    with trainer_of(pools(2)) as trainer, trainer_of(pools(2)) as other:
        uploaded = trainer.upload(*batch)
        with pytest.raises(UsageError, match="another trainer's"):
            other.step(uploaded)
        with pytest.raises(UsageError, match="has its targets already"):
            trainer.step(uploaded, batch[1])
        trainer.step(uploaded).item()
        with pytest.raises(UsageError, match="stepped or closed"):
            trainer.step(uploaded)
        with pytest.raises(UsageError, match="ahead"):
            trainer_of(pools(2), ahead=-1)


def test_a_step_that_just_fits_is_not_pushed_out_by_uploads() -> None:
    small, large = CASES["mlp"].batches([6, 24])
    with onebox.open("cpu", threads=1) as pool, trainer_of(pool) as trainer:
        most = trainer.predicted_memory(*large)[0]
    spare = sum(tensor.nbytes for tensor in small)
    quota = most + spare + spare // 2  # constants of both shapes are there, too
    with onebox.open("cpu", threads=1, memory=quota) as pool, trainer_of(pool) as trainer:
        trainer.step(*small).item()
        waiting = [trainer.upload(*small) for _ in range(2)]  # beside a step with the small batch both have room
        lie = used(pool)[0]
        trainer.step(*large).item()  # beside this one only one has
        assert lie - spare <= used(pool)[0] < lie - spare // 2
        for uploaded in waiting:
            trainer.step(uploaded).item()
        trainer.evaluate([large])
        memory = trainer.memory()[0]
        assert most <= memory.peak_bytes <= memory.quota_bytes


def test_after_a_loss_the_copy_of_the_client_serves() -> None:
    batches = CASES["mlp"].batches(SIZES)
    with onebox.open("cpu*2", threads=1) as pool, trainer_of(pool, recover=True) as trainer:
        losses = [trainer.step(*batches[0])]
        losses[0].item()
        uploads = [trainer.upload(*batch) for batch in batches[1:]]
        os.kill(pool.process_ids[1], signal.SIGKILL)
        losses += [trainer.step(uploaded) for uploaded in uploads]
        assert_same(outcome(trainer, losses), expected())
        assert len(trainer.recoveries) == 1
        held = used(pool)
        trainer.step(*batches[0]).item()
        assert used(pool) == held  # what the survivor had of them is not there any more


@pytest.mark.feature("Compression: Compress batches on slow links without loss")
@pytest.mark.parametrize("islands", [None, [[0], [1]]])
def test_slow_links_get_fewer_bytes_and_the_result_is_the_same(
    islands: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    dark = torch.rand(64, 3072, generator=generator) < 0.8
    images = torch.randint(256, (64, 3072), dtype=torch.uint8, generator=generator).masked_fill(dark, 0)
    classes = torch.randint(10, (64,), generator=generator)
    losses, sent = [], []
    for bandwidth_bps in (math.inf, 1e6):
        near = bandwidth_bps == math.inf
        monkeypatch.setattr(onebox.Pool, "near", lambda pool, worker, near=near: near)
        torch.manual_seed(0)
        model = nn.Linear(3072, 10)
        with (
            slow_channel(bandwidth_bps=bandwidth_bps),
            onebox.open("cpu*2", threads=1) as pool,
            onebox.Trainer(
                model,
                nn.functional.cross_entropy,
                sgd(model),
                pool=pool,
                on_device=lambda x: x.float() / 255,
                islands=islands,
            ) as trainer,
        ):
            trainer.step(images, classes).item()
            trainer.evaluate([(images, classes)])  # the first of a shape is checked with parts of it, too
            before = sum(pool.sent_bytes)
            uploaded = trainer.upload(images, classes)
            losses.append([trainer.step(uploaded).item(), trainer.evaluate([(images, classes)]).loss])
            sent.append((sum(pool.sent_bytes) - before) // 2)
    assert losses[0] == losses[1]
    assert sent[0] == images.nbytes + classes.nbytes
    assert sent[1] < 0.7 * sent[0]


def test_a_worker_refuses_frames_that_are_no_tensors(pools: Pools) -> None:
    pool, number = pools(1), 10**9
    for codec, frame, size in (("lz4", b"abc", 700), ("lz4", b"abc", 1 << 30), ("zstd", b"abc", 1 << 30)):
        put = Put((number,), (TensorSpec("uint8", (size,)),), (codec,))
        with pytest.raises(OneboxError, match=r"cannot unpack|cannot become"):
            pool.post(0, [put, Get((number,))], [frame], answer=True).result(30)
        pool.post(0, [Free((number,))])
