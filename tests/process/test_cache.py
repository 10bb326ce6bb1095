"""Samples that stay on the workers: the same bits with fewer bytes, within a budget that gives way to steps."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import onebox
from onebox.errors import UsageError
from onebox.plan import Plan
from onebox.pool import Pool
from tests.kit.models import CASES, CLASSES, sgd
from tests.kit.pools import Pools
from tests.kit.stages import staged
from tests.kit.trainer_arguments import grouped

MICRO_BATCH = 3
SAMPLES, BATCH, EPOCHS = 26, 8, 4
A_ROW = 10 * 8  # bytes of features; a class takes no more than the place of one
PLACE = 4

DATA = (
    torch.randn(SAMPLES, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(4)),
    torch.randint(CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(5)),
)

Given = tuple[Tensor, Tensor, Tensor]


def epochs() -> list[list[Given]]:
    """Return the batches of some epochs, each with its samples; the last of an epoch is smaller."""
    generator = torch.Generator().manual_seed(6)
    orders = [torch.randperm(SAMPLES, generator=generator) for _ in range(EPOCHS)]
    return [[(DATA[0][own], DATA[1][own], own) for own in order.split(BATCH)] for order in orders]


def run(pool: Pool, *, ahead: bool = False, given: list[list[Given]] | None = None, **options: Any) -> Any:
    """Train; return losses, tensors, bytes sent in each epoch, and the counters."""
    case = CASES["mlp"]
    model = case.model()
    if "plan" not in options:
        options["micro_batch"] = MICRO_BATCH
    with onebox.Trainer(model, case.loss, sgd(model), **grouped(pool=pool, **options)) as trainer:
        losses, sent = [], []
        for batches in given or epochs():
            before = sum(pool.sent_bytes)
            if ahead:
                with ThreadPoolExecutor(1) as thread:
                    coming = [thread.submit(trainer.upload, *batch) for batch in batches]
                    losses += [trainer.step(future.result()) for future in coming]
            else:
                losses += [trainer.step(*batch) for batch in batches]
            trainer.wait()
            sent.append(sum(pool.sent_bytes) - before)
        return [float(loss) for loss in losses], trainer.tensors(), sent, trainer.upload_counters()


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


PLANS: dict[str, Plan] = {
    "one": Plan.data_parallel([0], [1.0], micro_batch=MICRO_BATCH),
    "three replicas": Plan.data_parallel([0, 1, 2], [1.0, 2.0, 1.0], micro_batch=MICRO_BATCH),
    "three stages": staged("mlp", [0, 1, 2], micro_batch=MICRO_BATCH),
}


@pytest.mark.feature("Trainer: Keep samples on the workers")
@pytest.mark.parametrize(
    ("name", "ahead"), [("one", False), ("three replicas", False), ("three replicas", True), ("three stages", True)]
)
def test_the_bits_are_the_same_and_only_places_travel(name: str, ahead: bool, pools: Pools) -> None:
    plan, pool = PLANS[name], pools(3)
    losses, tensors, plain, counters = run(pool, plan=plan)
    assert (counters.hits, counters.misses) == (0, 0)
    found, cached, sent, counters = run(pool, plan=plan, cache=1 << 20, ahead=ahead)
    assert found == losses
    assert same_bits(cached, tensors)
    assert counters.hits + counters.misses == SAMPLES * EPOCHS
    if name == "three replicas":  # samples move from replica to replica
        assert 0 < counters.hits < SAMPLES * (EPOCHS - 1)
        assert sent[-1] < sent[0] == max(sent)
        assert sum(sent[1:]) < sum(plain[1:])
    else:
        assert counters.misses == SAMPLES
        assert sent[1:] == [plain[1] - (A_ROW - PLACE) * SAMPLES] * (EPOCHS - 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sample_goes_once_to_each_island(ahead: bool, pools: Pools) -> None:
    """Whatever the order of an epoch: an island keeps what it has seen."""
    islands: dict[str, Any] = {"islands": [[0], [1]], "outer": onebox.Outer(every=3, shares=[2, 1])}
    losses, tensors, plain, _ = run(pools(2), **islands)
    found, cached, sent, counters = run(pools(2), cache=1 << 20, ahead=ahead, **islands)
    assert found == losses
    assert same_bits(cached, tensors)
    assert counters.hits + counters.misses == SAMPLES * EPOCHS
    assert counters.misses <= 2 * SAMPLES
    assert sent[-1] < sent[0] and sum(sent[1:]) < sum(plain[1:])


@pytest.mark.parametrize("rows", [5, 17])
def test_what_finds_no_room_travels_as_before(rows: int, pools: Pools) -> None:
    losses, tensors, _, _ = run(pools(2))
    found, cached, _, counters = run(pools(2), cache=rows * A_ROW)
    assert found == losses
    assert same_bits(cached, tensors)
    assert 0 < counters.hits < SAMPLES * (EPOCHS - 1)


def test_a_batch_may_have_a_sample_twice_and_others_that_nobody_names(pools: Pools) -> None:
    own = torch.tensor([3, 3, 4, 5, 5, 5, 6, 7])
    given = [
        [(DATA[0][own], DATA[1][own], own), (DATA[0][:4], DATA[1][:4], None), (DATA[0][:8], DATA[1][:8], range(8))]
    ]
    losses, tensors, _, _ = run(pools(2), given=given * 3)  # type: ignore[arg-type]
    found, cached, _, counters = run(pools(2), given=given * 3, cache="1MiB")  # type: ignore[arg-type]
    assert found == losses
    assert same_bits(cached, tensors)
    assert counters.hits


def test_a_step_that_needs_the_room_gets_it() -> None:
    case = CASES["mlp"]
    small, large = case.batches([8, 64])
    model = case.model()
    with (
        onebox.open("cpu", threads=1) as pool,
        onebox.Trainer(model, case.loss, sgd(model), pool=pool) as trainer,
    ):
        trainer.step(*small).item()
        most = trainer.predicted_memory(*large)[0]
    with (
        onebox.open("cpu", threads=1, memory=most + 200) as pool,
        onebox.Trainer(model, case.loss, sgd(model), pool=pool, staging=onebox.Staging(cache=1 << 30)) as trainer,
    ):
        for _ in range(3):
            trainer.step(*small, range(8)).item()
        bare = trainer.predicted_memory(*small)[0]
        assert trainer.upload_counters().hits == 2 * 8
        assert bare <= most + 200
        trainer.step(*large).item()
        assert trainer.predicted_memory(*small)[0] < bare - 8 * A_ROW
        assert trainer.memory()[0].peak_bytes <= most + 200


def test_an_evaluation_that_needs_the_room_gets_it() -> None:
    case = CASES["mlp"]
    small, large = case.batches([8, 400])
    peaks = []
    for cache in (None, 1 << 30):
        model = case.model()
        with (
            onebox.open("cpu", threads=1, memory=peaks[0] + 200 if peaks else None) as pool,
            onebox.Trainer(model, case.loss, sgd(model), pool=pool, staging=onebox.Staging(cache=cache)) as trainer,
        ):
            for _ in range(3):
                trainer.step(*small, range(8)).item()
            assert trainer.upload_counters().hits == (2 * 8 if cache else 0)
            trainer.evaluate([large])
            peaks.append(trainer.memory()[0].peak_bytes)
    assert peaks[1] <= peaks[0] + 200


def test_after_a_loss_it_is_filled_anew(pools: Pools) -> None:
    expected, tensors, _, _ = run(pools(2))
    case = CASES["mlp"]
    model = case.model()
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(
            model,
            case.loss,
            sgd(model),
            pool=pool,
            plan=onebox.DataParallel(micro_batch=MICRO_BATCH),
            staging=onebox.Staging(cache="1MiB"),
            recovery=onebox.Recovery(),
        ) as trainer,
    ):
        losses = []
        for number, batches in enumerate(epochs()):
            losses += [trainer.step(*batch) for batch in batches]
            if number == 1:
                os.kill(pool.process_ids[1], signal.SIGKILL)
        assert [float(loss) for loss in losses] == expected
        assert same_bits(trainer.tensors(), tensors)
        assert len(trainer.recoveries) == 1
        assert trainer.upload_counters().hits


def test_nothing_is_left_when_the_trainer_is_closed(pools: Pools) -> None:
    pool = pools(2)
    run(pool, cache="1MiB", ahead=True)
    pools.look()
    assert pools(2) is pool


def test_what_are_no_samples_or_sizes_is_refused(pools: Pools) -> None:
    case = CASES["mlp"]
    model = case.model()
    for cache in ("much", -1, 1.5):
        with pytest.raises(UsageError, match="cache"):
            onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), staging=onebox.Staging(cache=cache))  # type: ignore[arg-type]
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), staging=onebox.Staging(cache=1000)) as trainer:
        for samples in (range(3), torch.rand(8), [[1] * 8]):
            with pytest.raises(UsageError, match="samples="):
                trainer.upload(*case.batches([8])[0], samples)
