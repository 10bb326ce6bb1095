"""The planner: as good as exhaustive search where that is possible, within every memory, better than trivial plans."""

from __future__ import annotations

import signal
from dataclasses import replace
from importlib import import_module
from itertools import count as counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import PlanError
from onebox.plan import (
    SCHEDULES,
    DeviceSpec,
    Links,
    Plan,
    Problem,
    Schedule,
    SearchResult,
    SegmentValue,
    auto_schedule,
    block_schedule,
    even_plan,
    predict,
    search,
    simulate,
    stage_work,
    validate,
)
from onebox.plan.evaluate.bounds import least_step
from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.search.search import problem_among
from onebox.plan_names import ACTIVATION_POLICIES, ChainPolicy
from onebox.sizes import enough_text
from onebox.stop_signals import InterruptibleClock
from tests.recorded.planning import RUNS, Search
from tests.unit.plan.problems import KINDS, exhaustive, links, random_problem, segment

HOUR_S, ENOUGH = 3600.0, 1_700_000
"""No clock ends a search in these tests: what they find does not depend on the machine."""

SHAPES = [(3, 2), (4, 2), (5, 2), (6, 2), (4, 3), (5, 3), (6, 3), (4, 4)]


def check(problem: Problem, result: SearchResult) -> None:
    """Check that a plan is one for the problem, that its schedule is valid, and that its prediction is true."""
    plan = result.plan
    assert Plan.from_json(plan.to_json()) == plan
    work, sizes = stage_work(problem, plan), None
    if plan.micro_batch is not None:
        sizes = [part.size / plan.micro_batch for part in plan.micro_batches(problem.batch)]
    routes = plan.routes(problem.batch)
    edges = [(edge.source, edge.target) for edge in work.edges]
    schedule = (
        Schedule.parse(plan.table) if plan.schedule == "table" else block_schedule(plan.schedule, routes, edges=edges)
    )
    validate(schedule, routes, work=work, sizes=sizes)
    predicted, simulation = predict(problem, plan)
    assert predicted == plan.predicted
    assert not simulation.over_bytes
    caps = problem.capacity_bytes
    assert all(peak <= caps.get(device, peak) for device, peak in simulation.peak_bytes.items())


@pytest.mark.parametrize("seed", range(32))
def test_small_problems_are_solved_as_well_as_by_exhaustive_search(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random, *SHAPES[seed % len(SHAPES)], tight=seed % 3 == 2)
    best_s, _ = exhaustive(problem)
    assert best_s < float("inf")
    for given_problem in (problem, replace(problem, replicable=False)):
        result = search(given_problem, budget_s=HOUR_S, effort=ENOUGH)
        check(given_problem, result)
        assert result.simulation.step_s <= 1.02 * best_s


@pytest.mark.parametrize("seed", [100, 103])
def test_eight_segments_on_four_devices(seed: int) -> None:
    problem = random_problem(Random(seed), 8, 4, tight=bool(seed % 2))
    best_s, _ = exhaustive(problem)
    result = search(problem, budget_s=HOUR_S, effort=1_000_000)
    check(problem, result)
    assert result.simulation.step_s <= 1.02 * best_s


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 5), st.integers(2, 3), st.booleans())
def test_random_problems_are_solved_as_well_as_by_exhaustive_search(
    seed: int, segments: int, devices: int, tight: bool
) -> None:
    problem = random_problem(Random(seed), segments, devices, tight=tight)
    best_s, _ = exhaustive(problem)
    try:
        result = search(problem, budget_s=HOUR_S, effort=ENOUGH)
    except PlanError:
        assert best_s == float("inf")
    else:
        check(problem, result)
        assert result.simulation.step_s <= 1.02 * best_s


def uneven(batch: int = 32, *, slow_bps: float = 1e8) -> Problem:
    """Return 16 equal segments on devices of speeds 1, 1, 0.5 and 0.25, with one slow link between the middle ones."""
    speeds = (1.0, 1.0, 0.5, 0.25)
    bandwidth = {a: {b: slow_bps if {a, b} == {1, 2} else 1e9 for b in range(4)} for a in range(4)}
    latency = dict.fromkeys(range(4), dict.fromkeys(range(4), 1e-3))
    return Problem(
        segments=tuple(segment(f"s{index}", 1e-3, state=16_000_000, saved=500_000) for index in range(16)),
        devices=tuple(
            DeviceSpec(number=number, type="quick", speed=speed, host=f"h{number}")
            for number, speed in enumerate(speeds)
        ),
        links=Links(latency_s=latency, bandwidth_bps=bandwidth),
        batch=batch,
        micro_batches=(1, 2, 4, 8),
        values=tuple(
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=500_000, backward_bytes=500_000)
            for index in range(15)
        ),
        call_s=1e-4,
    )


@pytest.mark.parametrize(("batch", "against_gpipe"), [(32, 2.8), (64, 2.8)])
def test_uneven_devices_against_even_cuts(batch: int, against_gpipe: float) -> None:
    """With 4 and 8 micro-batches; all devices' speed together, 2.75, would allow 3.6 and 3.2 times GPipe's."""
    problem = uneven(batch)
    found_s = search(problem, budget_s=HOUR_S, effort=700_000).simulation.step_s
    gpipe, one = (predict(problem, even_plan(problem, range(4), name, 8))[0].step_s for name in ("gpipe", "1f1b"))
    assert gpipe / found_s >= against_gpipe
    assert one / found_s >= 1.5
    whole_s = batch * 16 * 3e-3
    assert found_s >= whole_s / 2.75


def test_trivial_plans_are_among_the_candidates() -> None:
    problem = replace(uneven(), replicable=False, schedules=("1f1b",))
    result = search(problem, budget_s=HOUR_S, effort=200_000)
    known = {candidate.label: candidate for candidate in result.candidates}
    assert {f"device {number} alone" for number in (0, 2, 3)} <= set(known)
    assert {"even cuts, gpipe", "even cuts, 1f1b"} <= set(known)
    assert "replicas" in known["data parallel, equal shares"].refused
    assert "replicas" in known["data parallel, shares by speed"].refused
    assert "gpipe" in known["even cuts, gpipe"].refused
    best, *others = result.candidates
    assert best.plan == result.plan
    assert all(best.step_s <= 1.005 * one.step_s for one in others if not one.refused and not one.shortfalls)
    assert known["device 3 alone"].step_s == pytest.approx(4 * known["device 0 alone"].step_s, rel=0.01)
    assert all(len(stage.replicas) == 1 for stage in result.plan.stages)
    assert result.plan.schedule == "1f1b"


def test_a_candidate_that_does_not_fit_says_what_is_missing() -> None:
    problem = uneven()
    roomy = 16 * 16_000_000 // 2
    problem = replace(problem, devices=tuple(replace(one, capacity_bytes=roomy) for one in problem.devices))
    result = search(problem, budget_s=HOUR_S, effort=200_000)
    check(problem, result)
    (alone,) = (one for one in result.candidates if one.label == "device 0 alone")
    (short,) = alone.shortfalls
    assert (short.stage, short.device, short.capacity_bytes) == (0, 0, roomy)
    assert alone.plan.predicted is not None
    assert alone.plan.predicted.peak_bytes == (roomy + short.missing_bytes,)
    assert str(short) == f"stage 0 misses device 0 by {enough_text(short.missing_bytes)}"


def test_equal_searches_give_equal_plans() -> None:
    problem = random_problem(Random(7), 12, 4, tight=True)
    once, again = (search(problem, budget_s=HOUR_S, effort=150_000, seed=3) for _ in range(2))
    assert once == again


def test_the_clock_ends_a_search() -> None:
    times = iter(range(10_000))
    result = search(uneven(), budget_s=40, clock=lambda: float(next(times)))
    assert not result.complete
    assert result.simulated < 100
    check(uneven(), result)


def test_ctrl_c_ends_a_search_with_the_best_plan_so_far() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    calls = counter(1)
    try:
        with InterruptibleClock() as clock:

            def interrupted() -> float:
                if next(calls) == 60:
                    signal.raise_signal(signal.SIGINT)
                return clock()

            result = search(uneven(), budget_s=HOUR_S, effort=10**9, clock=interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert clock.interrupted and not result.complete
    assert result.simulated < 100
    check(uneven(), result)


def test_limits_are_kept() -> None:
    result = search(
        replace(uneven(), max_stages=2, micro_batches=(4,), free_shares=False), budget_s=HOUR_S, effort=ENOUGH
    )
    places = [stage.replicas for stage in result.plan.stages]
    assert sum(one != other for one, other in pairwise(places)) < 2
    assert result.plan.micro_batch == 4


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_devices_are_used_than_allowed(most: int) -> None:
    result = search(replace(uneven(), max_devices=most), budget_s=HOUR_S, effort=300_000)
    assert result.plan.devices == (0, 1)[:most] or set(result.plan.devices) == {0, 1}
    assert next(one for one in result.candidates if one.label == "even cuts, 1f1b").refused.startswith("more than")


def branched() -> Problem:
    """Return two towers of three segments that one segment joins, on two devices."""
    towers = [(0, 2), (2, 4), (4, 6), (1, 3), (3, 5), (5, 6)]
    return Problem(
        segments=(*(segment(f"s{index}", 1e-3) for index in range(6)), segment("join", 1e-5)),
        devices=(DeviceSpec(number=0, type="quick"), DeviceSpec(number=1, type="quick")),
        links=links(2),
        batch=1,
        micro_batches=(1,),
        values=tuple(SegmentValue(source=a, consumers=(b,), forward_bytes=10, backward_bytes=10) for a, b in towers),
        replicable=False,
    )


def test_parallel_branches_run_on_different_devices() -> None:
    """With one micro-batch a chain gains nothing from a second device; towers side by side take half the time."""
    problem = branched()
    result = search(problem, budget_s=HOUR_S, effort=ENOUGH)
    check(problem, result)
    alone_s = next(one.step_s for one in result.candidates if one.label == "device 0 alone")
    assert result.simulation.step_s < 0.52 * alone_s
    towers = [{int(name[1:]) % 2 for name in stage.segments if name != "join"} for stage in result.plan.stages]
    assert {frozenset(tower) for tower in towers if tower} == {frozenset({0}), frozenset({1})}


def tight(capacity_bytes: int, **changes: object) -> Problem:
    problem = random_problem(Random(5), 6, 3)
    devices = tuple(replace(device, capacity_bytes=capacity_bytes) for device in problem.devices)
    return replace(problem, devices=devices, schedules=SCHEDULES, **changes)


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match="no plan fits the memory of the devices") as caught:
        search(tight(18_000_000), budget_s=HOUR_S, effort=ENOUGH)
    error, message = caught.value, str(caught.value)
    assert error.missing_bytes is not None
    assert error.missing_bytes > 0
    assert f"stage {error.stage} misses device {error.device} by {enough_text(error.missing_bytes)}" in message
    assert "or more devices" in message


def test_the_memory_that_is_said_to_be_enough_is_enough() -> None:
    problem = tight(18_000_000)
    with pytest.raises(PlanError) as caught:
        search(problem, budget_s=HOUR_S, effort=ENOUGH)
    enough = 18_000_000 + (caught.value.missing_bytes or 0)
    check(tight(enough), search(tight(enough), budget_s=HOUR_S, effort=ENOUGH))


@pytest.mark.parametrize(("policies", "enough"), [(("keep",), 3), (ACTIVATION_POLICIES, 5)])
def test_the_micro_batch_that_is_said_to_be_enough_is_enough(policies: tuple[ChainPolicy, ...], enough: int) -> None:
    """State alone fits; a micro-batch of the only allowed size does not."""
    made = tuple(segment(f"s{index}", 1e-3, state=1_000_000, saved=1_000_000) for index in range(2))
    problem = Problem(
        segments=made,
        devices=(DeviceSpec(number=0, type="quick", capacity_bytes=10_000_000),),
        links=links(1),
        batch=16,
        micro_batches=(8,),
        policies=policies,
    )
    with pytest.raises(PlanError, match=f"or micro-batches of {enough};"):
        search(problem, budget_s=HOUR_S, effort=ENOUGH)
    smaller = replace(problem, micro_batches=(enough,))
    check(smaller, search(smaller, budget_s=HOUR_S, effort=ENOUGH))


def test_a_hundred_segments_on_sixteen_devices_in_four_hosts() -> None:
    random = Random(11)
    kinds = list(KINDS)
    near = {a: {b: 1e-5 if a // 4 == b // 4 else 1e-4 for b in range(16)} for a in range(16)}
    wide = {a: {b: 1e10 if a // 4 == b // 4 else 1e9 for b in range(16)} for a in range(16)}
    problem = replace(
        random_problem(random, 100, 16),
        devices=tuple(
            DeviceSpec(number=n, type=kinds[n // 4 % 3], host=f"h{n // 4}", capacity_bytes=250_000_000)
            for n in range(16)
        ),
        links=Links(latency_s=near, bandwidth_bps=wide),
        batch=32,
        schedules=SCHEDULES,
    )
    result = search(problem, budget_s=HOUR_S, effort=600_000)
    check(problem, result)
    power = sum(KINDS[device.type] for device in problem.devices)
    ideal = 3 * problem.batch * sum(one.forward_s["quick"].sample_s for one in problem.segments) / power
    even = next(one for one in result.candidates if one.label == "even cuts, 1f1b")
    assert ideal <= result.simulation.step_s <= 1.35 * ideal
    assert result.simulation.step_s < 0.6 * even.step_s


def chain(segments: int, devices: int, *, gap_s: float, state: int = 4_000_000) -> Problem:
    """Return a chain of equal segments on equal devices, between which messages take a while."""
    return Problem(
        segments=tuple(segment(f"s{index}", 1e-4, fixed=1e-4, state=state, saved=10**5) for index in range(segments)),
        devices=tuple(DeviceSpec(number=number, type="quick") for number in range(devices)),
        links=links(devices, latency_s=gap_s, bandwidth_bps=1e9),
        batch=16,
        micro_batches=(1, 2, 4, 8, 16),
        values=tuple(
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=50_000, backward_bytes=50_000)
            for index in range(segments - 1)
        ),
        call_s=1e-5,
        schedules=("gpipe", "1f1b", "interleaved"),
    )


@pytest.mark.parametrize(("gap_s", "state"), [(0.0, 4_000_000), (1e-3, 400_000), (1e-2, 40_000), (1e-3, 40_000_000)])
def test_more_devices_are_never_slower(gap_s: float, state: int) -> None:
    """What is best on fewer devices is a candidate on more; plainer plans may cost half a percent."""
    counts = (1, 2, 4, 8, 16)
    steps = [
        search(chain(10, count, gap_s=gap_s, state=state), budget_s=HOUR_S, effort=400_000).simulation.step_s
        for count in counts
    ]
    assert all(more <= fewer * 1.0051 for fewer, more in pairwise(steps)), steps


@pytest.mark.parametrize(("gap_s", "worth"), [(0.0, False), (1e-2, True)])
def test_fewer_devices_are_searched_only_where_they_may_be_better(
    gap_s: float, worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the devices take at least twice as long where messages take no time, and may be best where they do."""
    sizes = list[int]()

    def noted(fewer: Problem, **options: Any) -> Evaluator:
        sizes.append(len(fewer.devices))
        return Evaluator(fewer, **options)

    monkeypatch.setattr(import_module("onebox.plan.search.search"), "Evaluator", noted)
    search(chain(10, 8, gap_s=gap_s, state=40_000), budget_s=HOUR_S, effort=100_000)
    assert (min(sizes) < 8) == worth


@pytest.mark.parametrize(("cores", "load"), [(4.0, 0.0), (8.0, 6.0), (8.0, 0.0)])
def test_fewer_devices_are_as_quick_among_themselves_as_beside_idle_ones(cores: float, load: float) -> None:
    """Times were measured while all of them were busy."""
    made = chain(10, 8, gap_s=0.0)
    devices = tuple(replace(device, host="h", processor=True, threads=1.0) for device in made.devices)
    whole = replace(made, devices=devices, cores={"h": cores}, load={"h": load})
    some, plan = (4, 5, 6, 7), Plan.data_parallel((4, 5, 6, 7), [0.25] * 4, micro_batch=4)
    expected = predict(whole, plan)[0].step_s
    fewer = problem_among(whole, some)
    assert [device.number for device in fewer.devices] == list(some)
    assert predict(fewer, plan)[0].step_s == pytest.approx(expected)
    assert least_step(fewer) <= expected


@pytest.mark.parametrize(
    ("name", "within_s"), [("search: three devices", 0.183), ("search: little memory, sharded, on the host", 0.190)]
)
def test_more_effort_finds_what_less_effort_finds(name: str, within_s: float) -> None:
    """With more effort other layouts are best under named schedules, or without limits of memory."""
    (problem,) = (run.problem() for label, run in RUNS.items() if label == name and isinstance(run, Search))
    steps = [search(problem, budget_s=HOUR_S, effort=effort).simulation.step_s for effort in (40_000, ENOUGH)]
    assert steps[0] < 0.2
    assert steps[1] < within_s


@pytest.mark.parametrize("budget_s", [5, 50, 100])
def test_nothing_is_simulated_after_the_deadline(budget_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation takes a second here; those of the plans that need no planner are made first, whatever they take."""
    begun: list[float] = []

    def taking_a_second(*args: object, **named: object) -> object:
        begun.append(float(len(begun)))
        return simulate(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("onebox.plan.evaluate.predict.simulate", taking_a_second)
    problem = replace(chain(12, 8, gap_s=1e-3), schedules=("gpipe", "1f1b", "auto"))
    result = search(problem, budget_s=budget_s, effort=10**9, clock=lambda: float(len(begun)))
    check(problem, result)
    assert len(begun) <= max(budget_s, 30), "thirty are those of the plans that need no planner, on nested devices"
    assert not result.complete


def test_the_schedule_search_ends_with_the_time() -> None:
    problem = chain(8, 4, gap_s=1e-3)
    work = stage_work(problem, plan := even_plan(problem, range(4), "1f1b", 2))
    calls = counter()
    auto_schedule(plan.routes(problem.batch), work, budget_s=HOUR_S, expired=lambda: next(calls) > 50)
    assert next(calls) < 60
