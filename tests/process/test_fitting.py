"""What is said of a model without running it is what happens: what fits trains, what does not fails."""

from __future__ import annotations

import pytest
import torch

import onebox
from onebox.cost.estimate import DeviceRates
from onebox.engine.planning.memory_fit import FitReport, estimate_memory
from onebox.engine.workload.batch import as_batch
from onebox.errors import DeviceMemoryError, UsageError
from onebox.plan import Plan
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools

NAME = "cnn"
BATCH = 24
RATES = DeviceRates(flops=1e10, bandwidth_bps=1e9, operator_s=1e-6)
STEPS = 2
PARALLEL = onebox.DataParallel()


def asked(memory: int | str | None, batch: int = BATCH, name: str = NAME, **options: object) -> FitReport:
    """Ask about a case on one CPU device."""
    case = CASES[name]
    model = case.model()
    optimizer = OPTIMIZERS["adamw"](model)
    more = {"pool": "cpu", "memory": memory, "rates": RATES, **options}
    return estimate_memory(model, case.loss, optimizer, *case.batches([batch])[0], **more)  # type: ignore[arg-type]


def train(
    memory: int, plan: Plan | onebox.DataParallel = PARALLEL, batch: int = BATCH, name: str = NAME
) -> list[float]:
    """Train a case on one CPU worker with so much memory."""
    case = CASES[name]
    model = case.model()
    optimizer = OPTIMIZERS["adamw"](model)
    with (
        onebox.open("cpu", threads=1, memory=memory) as pool,
        onebox.Trainer(model, case.loss, optimizer, pool=pool, plan=plan, recovery=None) as trainer,
    ):
        losses = [trainer.step(*case.batches([batch])[0]) for _ in range(STEPS)]
        return [loss.item() for loss in losses]


@pytest.mark.feature("Memory: Ask whether a model fits")
def test_what_fits_to_the_byte_trains_and_a_byte_less_fails() -> None:
    peak = asked(None).peaks[0].size_bytes
    assert asked(peak).fits
    assert not asked(peak - 1).fits
    assert len(train(peak)) == STEPS
    with pytest.raises(DeviceMemoryError) as caught:
        train(peak - 1)
    operator = asked(peak).peaks[0].operator
    assert operator in str(caught.value), "it fails where the peak was said to be"


@pytest.mark.feature("Memory: Learn what would fit, and the largest batch")
def test_the_largest_batch_trains_and_one_more_sample_fails() -> None:
    budget = asked(None).peaks[0].size_bytes // 2
    found = asked(budget)
    assert found.largest.exact
    assert 0 < found.largest.fits < BATCH
    assert found.largest.fails == found.largest.fits + 1
    assert len(train(budget, batch=found.largest.fits)) == STEPS
    with pytest.raises(DeviceMemoryError):
        train(budget, batch=found.largest.fails)


@pytest.mark.feature("Memory: Learn what would fit, and the largest batch")
def test_a_way_that_fits_trains_within_the_budget() -> None:
    budget = asked(None, name="unet").peaks[0].size_bytes * 3 // 4
    found = asked(budget, name="unet", plan=onebox.DataParallel(micro_batch=BATCH))
    assert found.basis == "estimated for 10 GFLOP/s and 1 GB/s, as was said"
    assert found.ways[0].fits, "those that fit come first"
    assert all(one.plan.micro_batch == BATCH for one in found.ways), "the micro-batch was given"
    best = found.ways[0]
    assert best.peak_bytes[0] <= budget
    assert best.plan.update == "host" or any(stage.policy != "keep" for stage in best.plan.stages)
    assert [way.fits for way in found.ways] == sorted((way.fits for way in found.ways), reverse=True)
    assert train(budget, best.plan, name="unet") == pytest.approx(train(4 * budget, name="unet"), rel=1e-10)


def test_an_open_pool_is_asked_about_as_it_is(pools: Pools) -> None:
    pool, case = pools(2), CASES[NAME]
    model = case.model()
    batch = case.batches([BATCH])[0]
    optimizer = OPTIMIZERS["adamw"](model)
    found = onebox.estimate_memory(model, case.loss, optimizer, *batch, pool=pool)
    assert found.fits
    assert found.ways == ()
    assert found.largest.fits > BATCH
    with onebox.Trainer(model, case.loss, optimizer, pool=pool, recovery=None) as trainer:
        assert trainer.predicted_memory(*batch) == {d: peak.size_bytes for d, peak in found.peaks.items()}
    with pytest.raises(UsageError, match="leave memory and threads out"):
        onebox.estimate_memory(model, case.loss, optimizer, *batch, pool=pool, memory="1GiB")


def test_questions_that_cannot_be_answered_are_refused() -> None:
    with pytest.raises(UsageError, match="the plan uses device 3, but there are 1"):
        asked(None, plan=Plan.data_parallel([3], [1.0]))


def test_nothing_fits() -> None:
    found = asked("8KiB")
    assert not found.fits
    assert found.largest.fits == 0
    assert found.ways == ()
    assert "device 0" in found.refusal


def test_a_model_that_is_asked_about_stays_as_it_was() -> None:
    case = CASES[NAME]
    model = case.model()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    optimizer = OPTIMIZERS["adamw"](model)
    estimate_memory(model, case.loss, optimizer, *case.batches([4])[0], pool="sim", memory="1GiB")
    assert all(torch.equal(*pair) for pair in zip(before, model.state_dict().values(), strict=True))
    assert not optimizer.state
    assert as_batch(*case.batches([4])[0]).size == 4
