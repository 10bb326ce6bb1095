"""The weights of micro-batches, and how far two ways to compute a loss may be apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onebox.engine.steps.loss_check import PartsComparison, alike, proportional, tolerance_of
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.loss_reduction import (
    TravellingWeights,
    Weighted,
    check_reduction,
    normalisers,
    reduction_name,
    shares_of,
    total_of,
    weights_of,
)
from onebox.errors import UsageError
from onebox.graph import Port, TracedModel
from onebox.plan import Plan
from tests.kit.captures import capture

VALID = Weighted(lambda targets: (targets != -100).sum())


def labelled(*targets: int) -> Batch:
    return as_batch(torch.arange(len(targets) * 2.0).view(-1, 2), torch.tensor(targets))


def parts(batch: Batch, micro_batch: int) -> Any:
    return Plan.data_parallel([0], [1.0], micro_batch=micro_batch).micro_batches(batch.size)


def test_means_weigh_by_samples_and_sums_by_one() -> None:
    batch = labelled(0, 1, 2, 3, 0)
    assert weights_of(None, batch, parts(batch, 2)) == (0.4, 0.4, 0.2)
    assert weights_of("mean", batch, parts(batch, 2)) == (0.4, 0.4, 0.2)
    assert weights_of("sum", batch, parts(batch, 2)) == (1.0, 1.0, 1.0)


def test_a_normaliser_is_asked_of_the_targets_of_each_part_once() -> None:
    asked: list[list[int]] = []

    def count(targets: torch.Tensor) -> torch.Tensor:
        asked.append(targets.tolist())
        return (targets != -100).sum()

    batch = labelled(0, -100, 2, 3, -100)
    for _ in range(2):
        assert weights_of(Weighted(count), batch, parts(batch, 2)) == (1 / 3, 2 / 3, 0.0)
    assert asked == [[0, -100], [2, 3], [-100]]
    assert normalisers(VALID, batch, parts(batch, 5)) == (3.0,)


def test_where_nothing_counts_weights_are_shares_of_the_samples() -> None:
    assert shares_of([0.0, 0.0], [3, 1]) == (0.75, 0.25)
    assert total_of([float("nan"), 2.0], [0.0, 0.5]) == 1.0


def test_a_part_without_a_normaliser_gets_targets_that_have_one_and_keeps_its_inputs() -> None:
    batch = labelled(-100, 7, -100, -100, 5)
    weights = TravellingWeights(reduction=VALID, leaf=2, dtype=torch.float32)
    cut = parts(batch, 2)
    replaced = weights.replaced(batch, cut, 1, 1)
    assert replaced is not None
    assert replaced.tolist() == [7, 7]
    assert weights.replaced(batch, cut, 1, 0) is None
    assert weights.replaced(batch, cut, 0, 1) is None
    assert weights.tensor(batch, cut, 0).item() == 0.5
    assert weights.tensor(batch, cut, 1).item() == 0.0
    assert weights.tensor(batch, cut, 1).dtype is torch.float32


def test_where_all_parts_have_none_they_keep_their_targets() -> None:
    batch = labelled(-100, -100, -100)
    weights = TravellingWeights(reduction=VALID, leaf=2, dtype=torch.float64)
    assert weights.replaced(batch, parts(batch, 1), 1, 1) is None


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (-1, "-1.0"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("many", "a str"),
        (torch.ones(2), r"a tensor of shape \[2\]"),
    ],
)
def test_a_normaliser_is_a_number_from_0_up(returned: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Weighted(lambda targets: returned).of(torch.ones(1))


def test_reductions_are_checked_and_named() -> None:
    for reduction in (None, "mean", "sum", VALID):
        check_reduction(reduction)
    for other in ("total", 1, torch.nn.MSELoss()):
        with pytest.raises(UsageError, match="loss_reduction="):
            check_reduction(other)
    with pytest.raises(UsageError, match="a function of the targets"):
        check_reduction(Weighted(3))  # type: ignore[arg-type]
    assert [reduction_name(each) for each in (None, "sum", VALID)] == [None, "sum", "weighted"]


# ---- the check


@pytest.mark.parametrize(
    ("first", "second", "tolerance", "same"),
    [
        (1.0, 1.0 + 1e-10, 1e-9, True),
        (1.0, 1.0 + 1e-8, 1e-9, False),
        (0.0, 0.0, 1e-9, True),
        (float("nan"), float("nan"), 1e-9, True),
        (1.0, float("nan"), 1e-1, False),
    ],
)
def test_numbers_are_alike_but_for_rounding(first: float, second: float, tolerance: float, same: bool) -> None:
    assert alike(first, second, tolerance) is same


def test_the_coarsest_type_says_how_far_results_may_be_apart() -> None:
    assert tolerance_of({"float64"}) < tolerance_of({"float64", "float32"}) < tolerance_of({"float32", "bfloat16"})
    assert tolerance_of({"int64"}) == 0.0


def test_a_comparison_says_both_numbers_and_what_it_looks_like() -> None:
    PartsComparison(samples=4, part=2, loss=(1.0, 1.0), norm=(2.0, 2.0), tolerance=1e-9).require()
    with pytest.raises(UsageError, match=r"is 4 and .* 6, but .* 2 and 3\. It looks like a sum"):
        PartsComparison(samples=4, part=2, loss=(4.0, 2.0), norm=(6.0, 3.0), tolerance=1e-9).require()
    with pytest.raises(UsageError, match="one micro-batch on one replica"):
        PartsComparison(samples=4, part=2, loss=(1.0, 1.0), norm=(6.0, 3.0), tolerance=1e-9).require()


def test_what_the_loss_divides_by_is_in_proportion_to_samples() -> None:
    assert proportional([6.0, 2.0], [3, 1])
    assert proportional([0.0, 0.0], [3, 1])
    assert not proportional([3.0, 0.0], [3, 1])
    assert not proportional([3.0, 2.0], [2, 2])


def by_mask(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mask = (targets >= 0).to(outputs.dtype)
    each = torch.nn.functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.5])


@pytest.mark.parametrize(
    ("loss", "kinds", "value"),
    [
        (torch.nn.CrossEntropyLoss(), ["targets"], 3.0),
        (torch.nn.CrossEntropyLoss(ignore_index=1), ["targets"], 2.0),
        (torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), ["classes"], 6.5),
        (by_mask, ["other"], 3.0),
        (torch.nn.CrossEntropyLoss(reduction="sum"), [], 0.0),
        (lambda outputs, targets: (outputs[:, 0] - targets).square().mean(), [], 0.0),
        (lambda outputs, targets: outputs.mean() / outputs.std(), [], 0.0),
    ],
)
def test_what_the_loss_divides_by_is_found(loss: Any, kinds: list[str], value: float) -> None:
    targets = torch.tensor([0, 1, 2, -100 if kinds != ["targets"] or loss.ignore_index == -100 else 1])
    targets = targets if kinds != ["other"] else targets.clamp(min=-1)
    example = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)
    traced = TracedModel(capture(torch.nn.Linear(5, 3), loss, example), backward=True)
    assert [divisor.kind for divisor in traced.divisors] == kinds
    tensors = {Port("leaf", 1): targets, Port("buffer", "loss.weight"): CLASS_WEIGHTS}
    assert [divisor.of(tensors.__getitem__) for divisor in traced.divisors] == [(value, value)] * len(kinds)
