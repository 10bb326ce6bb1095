"""Random numbers belong to the run, not to the plan: (seed, step, micro-batch, operator) decide what is drawn.

That dropout draws what the design says is proved in ``test_numerics.py``, with the model ``dropping``.
"""

from __future__ import annotations

import pytest
import torch

import onebox
from tests.kit.models import CASES, adamw
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same
from tests.kit.trainer_arguments import grouped

GUARDED = True

CASE = CASES["dropping"]
SIZES = [9, 9, 4, 9, 7]


@pytest.fixture(scope="module")
def alone(pools: Pools) -> Outcome:
    """How the run ends on one worker."""
    return run(pools(1))


def run(pool: onebox.Pool, *, seed: int = 1, sync: str = "workers", in_flight: int = 2) -> Outcome:
    model = CASE.model()
    options = {"micro_batch": 3, "seed": seed, "sync": sync, "in_flight": in_flight}
    with onebox.Trainer(model, CASE.loss, adamw(model), **grouped(pool=pool, **options)) as trainer:
        losses = [trainer.step(*batch) for batch in CASE.batches(SIZES)]
        return Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=trainer.tensors())


@pytest.mark.feature("Trainer: Draw the same random numbers on any devices")
@pytest.mark.parametrize(("workers", "sync"), [(2, "workers"), (2, "client"), (3, "workers")])
def test_any_number_of_workers_draws_the_same(workers: int, sync: str, pools: Pools, alone: Outcome) -> None:
    assert_same(run(pools(workers), sync=sync), alone)


@pytest.mark.feature("Precision: Repeat a run to the last bit")
def test_two_runs_are_the_same_to_the_last_bit(pools: Pools) -> None:
    assert_same(run(pools(2), in_flight=4), run(pools(2), in_flight=1), tolerance=0)


def test_another_seed_draws_something_else(pools: Pools, alone: Outcome) -> None:
    assert run(pools(1), seed=2).losses != alone.losses


def test_every_step_and_micro_batch_draws_anew(pools: Pools) -> None:
    model = CASE.model()
    ((x_BT, y_B),) = CASE.batches([1])
    rows = 4
    batch = x_BT.expand(rows, -1), y_B.expand(rows)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    with onebox.Trainer(model, CASE.loss, still, pool=pools(1), plan=onebox.DataParallel(micro_batch=1)) as trainer:
        for size in (1, 1, 2, rows):
            seen.append(float(trainer.step(batch[0][:size], batch[1][:size])))
    assert len(set(seen)) == len(seen)


def test_the_global_random_numbers_of_the_client_are_left_alone(pools: Pools) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    run(pools(1))
    assert torch.equal(torch.rand(3), expected)


def test_evaluation_draws_nothing(pools: Pools) -> None:
    model = CASE.model()
    batches = CASE.batches([6, 5])
    with onebox.Trainer(model, CASE.loss, adamw(model), pool=pools(2), seed=4) as trainer:
        assert trainer.evaluate(batches) == trainer.evaluate(batches)


def test_a_trainer_goes_on_drawing_where_the_steps_before_ended(pools: Pools, alone: Outcome) -> None:
    model, losses = CASE.model(), []
    optimizer = adamw(model)
    batches = CASE.batches(SIZES)
    for step, part in ((0, batches[:2]), (2, batches[2:])):
        options = grouped(pool=pools(2), micro_batch=3, seed=1)
        with onebox.Trainer(model, CASE.loss, optimizer, **options, step=step) as trainer:
            losses += [float(trainer.step(*batch)) for batch in part]
            assert trainer.steps_done == step + len(part)
            trainer.pull()
            tensors = trainer.tensors()
    assert_same(Outcome(losses=losses, norms=[], tensors=tensors), alone)


@pytest.mark.parametrize("step", [-1, 1.0, "2"])
def test_what_is_no_number_of_steps_is_refused(step: object, pools: Pools) -> None:
    model = CASE.model()
    with pytest.raises(onebox.OneboxError, match=f"step={step!r}: allowed are whole numbers from 0 up"):
        onebox.Trainer(model, CASE.loss, adamw(model), pool=pools(1), step=step)  # type: ignore[arg-type]
