"""What tests share does what it says: the example of CONTRIBUTING, and each part of it on its own."""

from __future__ import annotations

import pytest
import torch

import onebox
from onebox.plan import Plan
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools, untouched
from tests.kit.reference import Outcome, assert_same, micro_batches, train
from tests.kit.stages import outcome, staged
from tests.kit.waiting import until


def test_a_pipeline_gives_the_result_of_one_process(pool: onebox.Pool) -> None:
    case, plan = CASES["cnn"], staged("cnn", [0, 1], micro_batch=3)
    model, plain, optimizer = case.model(), case.model(), OPTIMIZERS["adamw"]
    with onebox.Trainer(model, case.loss, optimizer(model), pool=pool, plan=plan) as trainer:
        found = outcome(trainer, [trainer.step(*batch) for batch in case.batches([8, 5])])
    assert_same(found, train(plain, case.loss, optimizer(plain), case.batches([8, 5]), plan))


def test_results_that_differ_are_not_the_same() -> None:
    one = Outcome(losses=[1.0], norms=[], tensors={"w": torch.zeros(2)})
    assert_same(one, one)
    for other in (
        Outcome(losses=[1.0 + 1e-9], norms=[], tensors=one.tensors),
        Outcome(losses=[1.0], norms=[], tensors={"w": torch.tensor([0.0, 1e-9])}),
        Outcome(losses=[1.0], norms=[], tensors={}),
    ):
        with pytest.raises(AssertionError):
            assert_same(other, one)


def test_a_batch_is_cut_by_a_number_a_plan_or_a_function() -> None:
    assert list(micro_batches(3, 8)) == [3, 3, 2] and list(micro_batches(4, 8)) == [4, 4]
    assert list(micro_batches(Plan.data_parallel([0], [1.0], micro_batch=3), 8)) == [3, 3, 2]
    assert list(micro_batches(lambda size: [size], 8)) == [8]


def test_a_pool_is_shared_until_something_is_left_on_it(pools: Pools) -> None:
    assert pools(1) is pools(1)
    assert untouched(pools(1))


def test_a_wait_ends_with_what_holds() -> None:
    looks = iter((0, 0, 7))
    assert until(lambda: next(looks), turn=lambda: None) == 7
    with pytest.raises(AssertionError, match="does not hold"):
        until(lambda: False, within_s=0.0, turn=lambda: None)
