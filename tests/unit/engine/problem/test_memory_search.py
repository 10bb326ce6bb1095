"""The planner shares out the optimizer's state where that is what makes a quick plan fit."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import msgspec
import pytest

from onebox.engine.memory.forecast import MemoryForecast
from onebox.engine.problem.memory_search import search_sharing, search_within
from onebox.errors import PlanError
from onebox.plan import ASYNC, OptimizerStateLayout, Plan, predict
from onebox.plan.model.problem import DeviceSpec, Problem
from tests.unit.plan.problems import links, segment
from tests.unit.plan.search.test_split_groups import large_layers

STATE = 40 << 20


def problem(capacity: float, *, devices: int = 2) -> Problem:
    """Return a model of one segment, half of whose state is the optimizer's, on devices of so many times its state."""
    one = replace(segment("only", 1e-3, state=STATE, saved=1 << 10), optimizer_bytes=STATE // 2)
    return Problem(
        segments=(one,),
        devices=tuple(DeviceSpec(number=n, type="quick", capacity_bytes=int(capacity * STATE)) for n in range(devices)),
        links=links(devices, latency_s=1e-6, bandwidth_bps=1e12),
        batch=64,
        micro_batches=(1, 64),
        policies=("keep",),
    )


def exact(given: Problem) -> object:
    """Return what takes the planner's own estimate for the exact count."""

    def count(plan: Plan) -> MemoryForecast:
        made, _ = predict(given, plan)
        return MemoryForecast(dict(zip(plan.devices, made.peak_bytes, strict=True)))

    return count


def test_replicas_that_share_it_fit_where_each_with_all_of_it_does_not() -> None:
    given = problem(0.9)
    _, plan, answered = search_sharing(given, exact(given), 5.0)  # type: ignore[arg-type]
    assert plan.optimizer == "sharded"
    assert answered.sharded
    assert len(plan.devices) == 2
    found, _ = predict(given, plan)
    assert found.peak_bytes[0] == pytest.approx(0.75 * STATE, rel=0.01)
    assert max(found.peak_bytes) <= 0.9 * STATE


def test_it_stays_everywhere_where_that_fits_and_is_as_quick() -> None:
    given = problem(1.5)
    given = replace(given, segments=(replace(given.segments[0], update_s={"quick": 0.0, "half": 0.0, "slow": 0.0}),))
    _, plan, answered = search_sharing(given, exact(given), 5.0)  # type: ignore[arg-type]
    assert (plan.optimizer, answered.sharded) == ("replicated", False)


def test_what_fits_neither_way_is_refused() -> None:
    given = problem(0.6)
    with pytest.raises(PlanError):
        search_sharing(given, exact(given), 5.0)  # type: ignore[arg-type]


def test_versions_of_weights_go_together_with_it() -> None:
    """A plan of replicas for late gradients is predicted to take less where their state is shared out."""
    given = replace(problem(1.0), schedules=(ASYNC,), staleness=1, versions=4)
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=given.micro_batches[0])
    whole, shared = (
        predict(given, msgspec.structs.replace(plan, optimizer=kind))[0] for kind in get_args(OptimizerStateLayout)
    )
    assert max(shared.peak_bytes) < min(whole.peak_bytes)


@pytest.mark.parametrize(("share", "split"), [(0.5, True), (0.81, False)])
def test_split_layers_that_gain_little_are_not_reconsidered(share: float, split: bool) -> None:
    given = large_layers()
    part = replace(given.splits[2][0], forward_share=share, backward_share=share)
    given = replace(given, splits={2: (part, part)}, schedules=("zb-h1",), replicable=False)
    _, plan = search_within(given, exact(given), 5.0)  # type: ignore[arg-type]
    assert plan.split is split
