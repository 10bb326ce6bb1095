"""The planner where gradients may be a step late: cuts for throughput, within the memory that versions take."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from onebox.errors import UsageError
from onebox.plan import (
    ASYNC,
    SCHEDULES,
    DeviceSpec,
    Plan,
    PlanCandidate,
    Problem,
    SearchResult,
    SegmentValue,
    Stage,
    predict,
    repeated_routes,
    search,
    stage_work,
    steady_window,
    unrolled,
    validate,
)
from onebox.plan.evaluate.bounds import least_period
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import layout_of
from tests.unit.plan.problems import exhaustive, links, random_problem, segment

HOUR_S, ENOUGH = 3600.0, 1_700_000
"""No clock ends a search in these tests: what they find does not depend on the machine."""

SHAPES = [(3, 2), (5, 2), (6, 2), (4, 3), (5, 3), (6, 3), (4, 4)]


def late(problem: Problem) -> Problem:
    """Return a problem with the asynchronous schedule as the only one, with room for what that holds twice."""
    devices = [
        each if each.capacity_bytes is None else replace(each, capacity_bytes=each.capacity_bytes * 3 // 2)
        for each in problem.devices
    ]
    return replace(problem, devices=tuple(devices), schedules=(ASYNC,), staleness=1)


def check(problem: Problem, result: SearchResult) -> None:
    """Check that a plan is one for the problem, that its windows are valid, and that its prediction is true."""
    plan = result.plan
    assert Plan.from_json(plan.to_json()) == plan
    routes = plan.routes(problem.batch)
    edges = [(edge.source, edge.target) for edge in stage_work(problem, plan).edges]
    if plan.schedule == ASYNC:
        validate(unrolled(steady_window(routes, edges), len(routes[0]), 3), repeated_routes(routes, 3), edges)
    predicted, simulation = predict(problem, plan)
    assert predicted == plan.predicted
    assert not simulation.over_bytes
    parts = plan.micro_batches(problem.batch)
    work, sizes = CostModel(problem).work(layout_of(problem, plan), parts)
    assert predicted.step_s >= least_period(work, routes, sizes) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(14))
def test_small_chains_are_cut_as_well_as_by_exhaustive_search(seed: int) -> None:
    problem = late(random_problem(Random(seed), *SHAPES[seed % len(SHAPES)], tight=seed % 3 == 2))
    best_s, _ = exhaustive(problem)
    if best_s == float("inf"):  # only with several stages a device, or with policies
        check(problem, search(problem, budget_s=HOUR_S, effort=ENOUGH))
        return
    for given in (problem, replace(problem, replicable=False)):
        result = search(given, budget_s=HOUR_S, effort=ENOUGH)
        check(given, result)
        assert result.simulation.step_s <= 1.01 * best_s


def alike(count: int = 8, devices: int = 4, *, capacity: int | None = None) -> Problem:
    """Return equal segments on equal devices, with few micro-batches, so that an exact step has a large bubble."""
    return Problem(
        segments=tuple(segment(f"s{index}", 1e-3, state=16_000_000, saved=500_000) for index in range(count)),
        devices=tuple(DeviceSpec(number=n, type="quick", capacity_bytes=capacity) for n in range(devices)),
        links=links(devices, latency_s=1e-5, bandwidth_bps=1e8),  # too slow for replicas
        batch=16,
        micro_batches=(4,),
        values=tuple(
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=1000, backward_bytes=1000)
            for index in range(count - 1)
        ),
        staleness=1,
        schedules=(*SCHEDULES, ASYNC),
    )


def of(result: SearchResult, label: str) -> PlanCandidate:
    (found,) = (one for one in result.candidates if one.label == label)
    return found


def test_the_bound_of_the_busiest_device_is_reached() -> None:
    problem = alike()
    result = search(problem, budget_s=HOUR_S, effort=ENOUGH)
    assert result.plan.schedule == ASYNC
    check(problem, result)
    busiest = max(result.simulation.busy_s.values())
    assert result.simulation.step_s <= 1.01 * busiest
    assert busiest <= 1.01 * sum(result.simulation.busy_s.values()) / 4
    exact = search(replace(problem, staleness=0, schedules=("1f1b",)), budget_s=HOUR_S, effort=ENOUGH)
    assert exact.simulation.step_s > 1.2 * result.simulation.step_s
    assert of(result, "best under 1f1b").step_s > result.simulation.step_s  # what being late gains is shown


def test_what_is_exact_is_preferred_where_nothing_is_gained() -> None:
    problem = alike(4, 1)
    result = search(problem, budget_s=HOUR_S, effort=ENOUGH)
    assert result.plan.schedule != ASYNC
    assert len(result.plan.stages) == 1


def test_versions_that_do_not_fit_leave_an_exact_plan() -> None:
    both = replace(alike(4, 2), schedules=("1f1b", ASYNC), policies=("keep",), replicable=False)
    roomy = search(both, budget_s=HOUR_S, effort=ENOUGH)
    assert roomy.plan.schedule == ASYNC
    exact = search(replace(both, staleness=0, schedules=("1f1b",)), budget_s=HOUR_S, effort=ENOUGH)
    late_peak, exact_peak = (max(one.simulation.peak_bytes.values()) for one in (roomy, exact))
    assert exact_peak < late_peak
    between = tuple(replace(device, capacity_bytes=(exact_peak + late_peak) // 2) for device in both.devices)
    result = search(replace(both, devices=between), budget_s=HOUR_S, effort=ENOUGH)
    check(replace(both, devices=between), result)
    assert result.plan.schedule == "1f1b"


def test_three_versions_take_more() -> None:
    problem = alike()
    plan = search(problem, budget_s=HOUR_S, effort=ENOUGH).plan
    two, three = (predict(replace(problem, versions=count), plan)[0].peak_bytes for count in (2, 3))
    parameters = [4_000_000 * len(stage.segments) for stage in plan.stages]
    assert [b - a for a, b in zip(two, three, strict=True)] == parameters


def test_more_in_flight_hides_slow_links() -> None:
    problem = replace(alike(8, 2), links=links(2, latency_s=6e-3, bandwidth_bps=1e9))
    names = [one.name for one in problem.segments]
    stages = tuple(
        Stage(segments=tuple(names[a:b]), replicas=((device,),), shares=(1.0,))
        for device, (a, b) in enumerate([(0, 4), (4, 8)])
    )
    rule, more = (Plan(stages=stages, micro_batch=4, schedule=ASYNC, in_flight=each) for each in ((), (3, 1)))
    assert predict(problem, more)[0].step_s < 0.95 * predict(problem, rule)[0].step_s


def test_the_asynchronous_schedule_needs_staleness() -> None:
    with pytest.raises(UsageError, match="async-1f1b needs stale gradients"):
        replace(alike(), staleness=0)
    with pytest.raises(UsageError, match="staleness=2"):
        replace(alike(), staleness=2)
    with pytest.raises(UsageError, match="in_flight"):
        Plan(stages=(Stage(replicas=((0,),), shares=(1.0,)),), in_flight=(1,))
