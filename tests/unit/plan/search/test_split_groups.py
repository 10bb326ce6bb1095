"""Stages whose layers are split over groups of devices: as good as by exhaustive search, and only where they may be."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import PlanError
from onebox.plan import Problem, predict, search, stage_work
from onebox.plan.evaluate.bounds import least_bytes, lower_bound
from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.model.layout import LayoutStage, StageLayout
from onebox.plan.model.problem import DeviceSpec, RankMessages, SegmentValue, SplitSegment
from onebox.plan.search.local_search import neighbours
from onebox.plan_names import SCHEDULE_TRAITS
from tests.unit.plan.problems import exhaustive, links, random_problem, segment, split_plans, with_splits
from tests.unit.plan.search.test_search import ENOUGH, HOUR_S, check

SHAPES = [(2, 2), (3, 2), (4, 2), (3, 3), (4, 3), (5, 2), (3, 4)]


def drawn(seed: int) -> Problem:
    random = Random(seed)
    segments, devices = SHAPES[seed % len(SHAPES)]
    ranks = (2,) if devices < 4 else (2, 4)
    return with_splits(random, random_problem(random, segments, devices, tight=seed % 3 == 2), *ranks)


@pytest.mark.parametrize("seed", range(28))
def test_small_problems_are_solved_as_well_as_by_exhaustive_search(seed: int) -> None:
    problem = drawn(seed)
    best_s, _ = exhaustive(problem)
    for given_problem in (problem, replace(problem, replicable=False)):
        result = search(given_problem, budget_s=HOUR_S, effort=ENOUGH)
        check(given_problem, result)
        assert result.simulation.step_s <= 1.02 * best_s


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_costs_of_splits_never_make_a_plan_worse(seed: int) -> None:
    problem = drawn(seed)
    try:
        without_s = search(replace(problem, splits={}), budget_s=HOUR_S, effort=ENOUGH).simulation.step_s
    except PlanError:
        return
    assert search(problem, budget_s=HOUR_S, effort=ENOUGH).simulation.step_s <= 1.02 * without_s


def large_layers(*, latency_s: float = 1e-6, hosts: tuple[str, ...] = ("h", "h"), sums: int = 1) -> Problem:
    """Return two large layers whose time does not depend on samples, for a batch of one sample on two devices."""
    share = SplitSegment(
        forward_share=0.5,
        backward_share=0.5,
        forward=RankMessages(sums=sums, sample_bytes=1e3),
        backward=RankMessages(sums=sums, sample_bytes=1e3),
        parameter_bytes=50_000_000,
        state_bytes=200_000_000,
    )
    return Problem(
        segments=tuple(segment(f"s{index}", 0.0, fixed=1e-2, state=400_000_000) for index in range(2)),
        devices=tuple(DeviceSpec(number=number, type="quick", host=host) for number, host in enumerate(hosts)),
        links=links(2, latency_s=latency_s, bandwidth_bps=1e9),
        batch=2,
        micro_batches=(1, 2),
        values=(SegmentValue(source=0, consumers=(1,), forward_bytes=10**4, backward_bytes=10**4),),
        splits={2: (share, share)},
    )


def test_large_layers_with_a_small_batch_are_split() -> None:
    """Two devices would exchange all weights as replicas, and wait for each other in a pipeline."""
    problem = large_layers()
    result = search(problem, budget_s=HOUR_S, effort=ENOUGH)
    check(problem, result)
    assert [stage.replicas for stage in result.plan.stages] == [((0, 1),)]
    assert result.plan.micro_batch == 2
    labels = {candidate.label: candidate for candidate in result.candidates}
    assert labels["layers split over 2 devices"].plan.split
    others = [one.step_s for one in result.candidates if not one.plan.split]
    assert result.simulation.step_s < 0.75 * min(others)


@pytest.mark.parametrize(
    "changes",
    [{"latency_s": 1e-2}, {"sums": 500, "latency_s": 1e-4}, {"hosts": ("a", "b")}],
    ids=["slow links", "many sums", "two hosts"],
)
def test_layers_stay_whole_where_that_is_quicker_or_devices_are_apart(changes: dict[str, object]) -> None:
    result = search(large_layers(**changes), budget_s=HOUR_S, effort=ENOUGH)  # type: ignore[arg-type]
    assert not result.plan.split


def test_unlike_devices_split_no_layers() -> None:
    problem = large_layers()
    first, second = problem.devices
    result = search(replace(problem, devices=(first, replace(second, speed=0.5))), budget_s=HOUR_S, effort=ENOUGH)
    assert not result.plan.split


def test_a_segment_that_fits_no_device_is_split() -> None:
    problem = large_layers(latency_s=1e-2)
    whole = replace(
        problem,
        devices=tuple(replace(one, capacity_bytes=450_000_000) for one in problem.devices),
        segments=tuple(replace(one, state_bytes=500_000_000) for one in problem.segments),
    )
    result = search(whole, budget_s=HOUR_S, effort=ENOUGH)
    check(whole, result)
    assert result.plan.split
    with pytest.raises(PlanError, match="no plan fits"):
        search(replace(whole, splits={}), budget_s=HOUR_S, effort=ENOUGH)


def test_where_nothing_fits_the_error_is_about_the_closest_plan() -> None:
    problem = large_layers()
    small = tuple(replace(one, capacity_bytes=399_000_000) for one in problem.devices)
    tight = replace(problem, devices=small, policies=("keep",), schedules=("1f1b",))
    with pytest.raises(PlanError, match="the closest has 1 stage, split over 2 devices, and micro-batches") as error:
        search(tight, budget_s=HOUR_S, effort=5000)
    with pytest.raises(PlanError) as whole:
        search(replace(tight, splits={}), budget_s=HOUR_S, effort=5000)
    assert error.value.missing_bytes and whole.value.missing_bytes
    assert error.value.missing_bytes < whole.value.missing_bytes


def evaluator_of(problem: Problem) -> Evaluator:
    return Evaluator(problem, effort=ENOUGH, expired=lambda: False)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([LayoutStage((0, 1), (0, 1), (1.0,), policy="recompute", ranks=2)], "kept as they are"),
        ([LayoutStage((0, 1), (0, 1), (1.0,), codec="bf16", ranks=2)], "kept as they are"),
        ([LayoutStage((0,), (0, 1), (1.0,), ranks=2), LayoutStage((1,), (0,), (1.0,))], "has another stage"),
        ([LayoutStage((0, 1), (0, 1, 2), (1.0,), ranks=3)], "cannot be split over 3 devices"),
    ],
)
def test_what_an_engine_or_the_costs_do_not_have_is_refused(parts: list[LayoutStage], reason: str) -> None:
    problem = drawn(6)
    assert reason in evaluator_of(problem).refusal(StageLayout(tuple(parts), 1, "1f1b"))


def test_replicas_join_to_a_group_and_part_again() -> None:
    evaluator = evaluator_of(large_layers())
    replicas = StageLayout((LayoutStage((0, 1), (0, 1), (0.5, 0.5)),), 1, "1f1b")
    group = StageLayout((LayoutStage((0, 1), (0, 1), (1.0,), ranks=2),), 1, "1f1b")
    stages = StageLayout((LayoutStage((0,), (0,), (1.0,)), LayoutStage((1,), (1,), (1.0,))), 1, "1f1b")
    assert group in list(neighbours(evaluator, replicas))
    assert group in list(neighbours(evaluator, stages))
    assert {replicas, stages} <= set(neighbours(evaluator, group))


@pytest.mark.parametrize(("share", "split"), [(0.7, True), (0.81, False)])
def test_a_split_that_gains_little_is_not_chosen(share: float, split: bool) -> None:
    """The best plan of whole layers, a pipeline whose gradients of weights fill idle time, takes 50 ms of 60."""
    problem = large_layers()
    part = replace(problem.splits[2][0], forward_share=share, backward_share=share)
    problem = replace(problem, splits={2: (part, part)}, schedules=("zb-h1",), replicable=False)
    result = search(problem, budget_s=HOUR_S, effort=ENOUGH)
    assert result.plan.split is split
    best_s = min(one.step_s for one in result.candidates if not one.refused)
    assert result.simulation.step_s == pytest.approx(best_s, rel=0.01) or not split


@pytest.mark.parametrize("seed", [3, 25, 32])
def test_a_split_plan_is_compared_with_the_best_one_of_whole_layers(seed: int) -> None:
    problem = drawn(seed)
    result = search(problem, budget_s=HOUR_S, effort=ENOUGH)
    assert result.plan.split
    whole = search(replace(problem, splits={}), budget_s=HOUR_S, effort=ENOUGH)
    listed = {one.label: one for one in result.candidates}
    assert len(listed) == len(result.candidates)
    assert listed["best with whole layers"].plan == whole.plan
    fitting = [one for one in result.candidates if not one.plan.split and not one.shortfalls and not one.refused]
    assert min(one.step_s for one in fitting) <= whole.simulation.step_s


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_no_split_plan_beats_the_bounds(seed: int, random: Random) -> None:
    problem = drawn(seed)
    plans = list(split_plans(problem))
    for plan in random.sample(plans, min(12, len(plans))):
        work, routes = stage_work(problem, plan), plan.routes(problem.batch)
        sizes = [part.size / (plan.micro_batch or 1) for part in plan.micro_batches(problem.batch)]
        predicted, simulation = predict(problem, plan)
        bound_s = lower_bound(work, routes, sizes, split=SCHEDULE_TRAITS[plan.schedule].halves)
        assert bound_s <= predicted.step_s * (1 + 1e-9)
        needs = least_bytes(work, routes)
        assert set(needs) == set(plan.devices)
        assert all(needs[device] <= simulation.peak_bytes[device] for device in plan.devices)
