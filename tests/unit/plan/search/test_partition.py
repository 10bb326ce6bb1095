"""The dynamic program over cuts finds the best bottleneck; bounds bound; costs are sums; orders are orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.plan import (
    ComputeTime,
    DeviceSpec,
    Edge,
    Plan,
    Problem,
    Segment,
    SegmentValue,
    Stage,
    Tie,
    auto_schedule,
    even_plan,
    named_schedule,
    predict,
    simulate,
    stage_work,
)
from onebox.plan.evaluate.bounds import least_bytes, lower_bound
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import LayoutStage
from onebox.plan.search.baselines import cut
from onebox.plan.search.partition import PartitionLimits, alike, partitions
from onebox.plan.search.seeds import orders
from onebox.plan_names import SCHEDULE_TRAITS
from tests.unit.plan.problems import every_plan, links, random_problem, segment


def busy_s(problem: Problem, segments: tuple[int, ...], number: int, samples: int) -> float:
    """Return seconds of a micro-batch on a device."""
    device = problem.device[number]
    made = (problem.segments[index] for index in segments)
    times = (time for one in made for time in (one.forward_s, one.input_s, one.weight_s))
    return sum(time[device.type].at(samples) for time in times) / device.speed


def bottleneck_s(problem: Problem, parts: tuple[LayoutStage, ...], samples: int) -> float:
    return max(busy_s(problem, part.segments, part.devices[0], samples) for part in parts)


def singles(problem: Problem, samples: int, **changes: int) -> PartitionLimits:
    count = problem.batch // samples
    limits = {"in_flight": count, "stages": len(problem.devices), **changes}
    units = alike([(device,) for device in problem.devices])
    return PartitionLimits(units=units, samples=samples, count=count, joined=(1,), **limits)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 7), st.integers(2, 4))
def test_the_bottleneck_is_the_least_possible(seed: int, segments: int, devices: int) -> None:
    problem = replace(random_problem(Random(seed), segments, devices), call_s=0.0, links=links(devices))
    order = tuple(range(segments))
    found = partitions(CostModel(problem), order, singles(problem, 2))
    best = float("inf")
    for stages in range(1, min(segments, devices) + 1):
        for chosen in permutations(range(devices), stages):
            for cuts in combinations(range(1, segments), stages - 1):
                pieces = pairwise((0, *cuts, segments))
                best = min(
                    best, max(busy_s(problem, order[a:b], d, 2) for (a, b), d in zip(pieces, chosen, strict=True))
                )
    reached = [bottleneck_s(problem, parts, 2) for parts in found]
    assert best <= min(reached) * (1 + 1e-9)
    assert min(reached) <= best * 1.0101
    for parts in found:
        assert tuple(index for part in parts for index in part.segments) == order
        used = [device for part in parts for device in part.devices]
        assert len(set(used)) == len(used)


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_what_is_proposed_fits_one_micro_batch_in_flight(seed: int) -> None:
    problem = random_problem(Random(seed), 6, 3, tight=True)
    for parts in partitions(CostModel(problem), range(6), singles(problem, 1, in_flight=1)):
        stages = tuple(
            Stage(
                segments=tuple(problem.segments[index].name for index in part.segments) if len(parts) > 1 else (),
                replicas=(part.devices,),
                shares=(1.0,),
            )
            for part in parts
        )
        plan = Plan(stages=stages, micro_batch=1)
        needs = least_bytes(stage_work(problem, plan), plan.routes(problem.batch))
        assert all(size <= problem.capacity_bytes[device] for device, size in needs.items())


def test_nothing_is_proposed_where_nothing_fits() -> None:
    problem = random_problem(Random(1), 6, 3)
    problem = replace(problem, devices=tuple(replace(device, capacity_bytes=1000) for device in problem.devices))
    assert partitions(CostModel(problem), range(6), singles(problem, 1)) == []


def test_a_cut_is_laid_where_little_crosses() -> None:
    """A slow link cannot carry the value in the middle in time; the cut moves to where it can."""
    made = tuple(segment(f"s{index}", 1e-3) for index in range(4))
    sizes = (100, 10**6, 100)
    values = tuple(
        SegmentValue(source=index, consumers=(index + 1,), forward_bytes=size, backward_bytes=size)
        for index, size in enumerate(sizes)
    )
    problem = Problem(
        segments=made,
        devices=(DeviceSpec(number=0, type="quick"), DeviceSpec(number=1, type="quick")),
        links=links(2, bandwidth_bps=1e6),
        batch=4,
        micro_batches=(1,),
        values=values,
    )
    best = min(partitions(CostModel(problem), range(4), singles(problem, 1)), key=lambda p: bottleneck_s(problem, p, 1))
    assert sorted(len(part.segments) for part in best) == [1, 3]
    free = replace(problem, links=links(2))
    best = min(partitions(CostModel(free), range(4), singles(free, 1)), key=lambda p: bottleneck_s(free, p, 1))
    assert [len(part.segments) for part in best] == [2, 2]


def test_units_of_several_devices_share_by_speed() -> None:
    made = tuple(segment(f"s{index}", 1e-3) for index in range(6))
    devices = tuple(DeviceSpec(number=n, type="quick", speed=(1.0, 0.5)[n % 2], host=f"h{n // 2}") for n in range(4))
    problem = Problem(segments=made, devices=devices, links=links(4), batch=12, micro_batches=(1,))
    units = alike([devices[:2], devices[2:]])
    assert units == [[(0, 1), (2, 3)]]
    limits = PartitionLimits(units=units, samples=1, count=12, in_flight=12, joined=(1,), stages=4)
    found = partitions(CostModel(problem), range(6), limits)
    halves = next(parts for parts in found if len(parts) == 2)
    assert [len(part.segments) for part in halves] == [3, 3]
    assert all(part.shares == pytest.approx((2 / 3, 1 / 3)) for part in halves)


def test_devices_are_alike_by_type_speed_memory_and_place() -> None:
    same = DeviceSpec(number=0, type="a", host="x", capacity_bytes=5)
    others = [
        replace(same, number=1),
        replace(same, number=2),
        replace(same, number=3, speed=0.5),
        replace(same, number=4, capacity_bytes=6),
    ]
    units = [(one,) for one in (same, *others)]
    assert alike(units) == [[(0,), (1,), (2,)], [(3,)], [(4,)]]
    assert alike(units, near=((0, 1, 3, 4), (2,))) == [[(0,), (1,)], [(2,)], [(3,)], [(4,)]]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 3), st.randoms(use_true_random=False))
def test_no_schedule_beats_the_bound(seed: int, segments: int, devices: int, random: Random) -> None:
    problem = random_problem(Random(seed), segments, devices)
    plans = list(every_plan(problem))
    names = [one.name for one in problem.segments]
    half = segments // 2
    shares = tuple(random.uniform(0.2, 1) for _ in range(devices))
    replicas = tuple((device,) for device in range(devices))
    replicated = Plan(
        stages=(
            Stage(segments=tuple(names[:half]), replicas=replicas, shares=shares),
            Stage(segments=tuple(names[half:]), replicas=replicas[::-1], shares=shares),
        ),
        micro_batch=1,
    )
    shared = Plan.data_parallel(range(devices), shares)
    for plan in [plans[0], *random.sample(plans, min(8, len(plans))), replicated, shared]:
        work = stage_work(problem, plan)
        routes = plan.routes(problem.batch)
        parts = plan.micro_batches(problem.batch)
        sizes = [part.size / (plan.micro_batch or max(one.size for one in parts)) for part in parts]
        edges = [(edge.source, edge.target) for edge in work.edges]
        step_s = simulate(named_schedule(plan.schedule, routes, edges=edges), routes, work, sizes).step_s
        assert lower_bound(work, routes, sizes, split=SCHEDULE_TRAITS[plan.schedule].halves) <= step_s * (1 + 1e-9)
        if plan in (replicated, plans[0]):
            table = auto_schedule(routes, work, sizes, budget_s=0.01)
            bound_s = lower_bound(work, routes, sizes, split=True)
            assert bound_s <= simulate(table, routes, work, sizes).step_s * (1 + 1e-9)


def joined() -> Problem:
    """Return four segments; a value of the first goes to all others, and the first and last share a parameter."""
    return Problem(
        segments=tuple(
            Segment(
                name=f"s{index}",
                forward_s={"a": ComputeTime(fixed_s=1.0, sample_s=0.5)},
                input_s={"a": ComputeTime(sample_s=1.0)},
                weight_s={"a": ComputeTime(sample_s=2.0)},
                update_s={"a": 0.25},
                parameter_bytes=10,
                state_bytes=40,
                saved_bytes=3,
                late_bytes=2,
                forward_work_bytes=index,
                backward_work_bytes=5 * index,
            )
            for index in range(4)
        ),
        devices=tuple(DeviceSpec(number=n, type="a", speed=(1.0, 2.0, 1.0)[n]) for n in range(3)),
        links=links(3, latency_s=0.5, bandwidth_bps=10.0),
        batch=8,
        micro_batches=(2,),
        values=(
            SegmentValue(source=0, consumers=(1, 2, 3), forward_bytes=7, backward_bytes=6),
            SegmentValue(source=1, consumers=(2,), forward_bytes=1, backward_bytes=0, kept=False),
        ),
        ties=(Tie(segments=(0, 3), parameter_bytes=20, state_bytes=80),),
    )


def stage(device: int, *names: str) -> Stage:
    return Stage(segments=names, replicas=((device,),), shares=(1.0,))


def test_stages_cost_the_sum_of_their_segments() -> None:
    plan = Plan(stages=(stage(0, "s0"), stage(1, "s1", "s2"), stage(2, "s3")), micro_batch=2)
    work = stage_work(joined(), plan)
    first, middle, last = work.stages
    assert (first.forward_s, middle.forward_s, last.forward_s) == ({0: 2.0}, {1: 2.0}, {2: 2.0})
    assert (middle.input_s, middle.weight_s) == ({1: 2.0}, {1: 4.0})
    assert middle.update_s == {1: 0.25}
    assert (first.state_bytes, middle.state_bytes, last.state_bytes) == (40 + 80, 80, 40 + 80)
    assert (first.gradient_bytes, middle.gradient_bytes, last.gradient_bytes) == (30, 20, 30)
    # What a stage receives and keeps counts as saved; the value of the second segment stays within its stage.
    assert (first.saved_bytes, middle.saved_bytes, last.saved_bytes) == (6, 12 + 14, 6 + 14)
    assert (middle.late_bytes, middle.forward_work_bytes, middle.backward_work_bytes) == (8, 4, 20)
    # The value goes once to each stage that uses it, not once for each segment.
    assert work.edges == (
        Edge(source=0, target=1, forward_bytes=14, backward_bytes=12),
        Edge(source=0, target=2, forward_bytes=14, backward_bytes=12),
    )


def test_tied_parameters_are_summed_over_the_stages_that_hold_them() -> None:
    """Two stages exchange 20 bytes in a ring: two messages of 10 bytes, 0.5 s and 1 s each."""
    apart = stage_work(joined(), Plan(stages=(stage(0, "s0"), stage(1, "s1", "s2"), stage(2, "s3")), micro_batch=2))
    assert apart.stages[0].update_s == {0: 0.25 + 3.0}
    assert apart.stages[2].update_s == {2: 0.25 + 3.0}
    together = Plan(stages=(Stage(replicas=((0,),), shares=(1.0,)),), micro_batch=2)
    (whole,) = stage_work(joined(), together).stages
    assert whole.update_s == {0: 1.0}
    assert (whole.state_bytes, whole.gradient_bytes) == (160 + 80, 40 + 20)


def test_a_replica_with_a_small_share_still_pays_what_is_fixed() -> None:
    plan = Plan(stages=(Stage(replicas=((0,), (2,)), shares=(3.0, 1.0)),))
    problem = joined()
    (whole,) = stage_work(problem, plan).stages
    parts = plan.micro_batches(problem.batch)
    assert [part.size for part in parts] == [6, 2]
    assert whole.forward_s[0] == pytest.approx(4 * (1.0 + 6 * 0.5))
    assert whole.forward_s[2] * 2 / 6 == pytest.approx(4 * (1.0 + 2 * 0.5))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((stage(0, "s0"), stage(1, "s1", "s2", "s9")), "'s9', which the model does not have"),
        ((stage(0, "s0"), stage(1, "s1", "s2")), "no stage for segment 's3'"),
        ((stage(0, "s0", "s1", "s2"), stage(7, "s3")), "device 7; there are"),
        ((stage(0, "s1", "s2", "s3"), stage(1, "s0")), "'s1' of stage 0 uses a value of 's0' of stage 1"),
        ((stage(0, "s0", "s1", "s2"), Stage(segments=("s3",), replicas=((1, 2),), shares=(1.0,))), "splits layers"),
    ],
)
def test_a_plan_that_is_none_for_the_problem_is_refused(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict(joined(), Plan(stages=stages, micro_batch=2))


def test_even_plans_cut_by_time() -> None:
    problem = random_problem(Random(2), 8, 3, skips=False)
    problem = replace(problem, segments=(segment("long", 6e-3), *(segment(f"s{n}", 1e-3) for n in range(7))))
    plan = even_plan(problem, (2, 0), "gpipe", 2)
    assert [len(one.segments) for one in plan.stages] == [2, 6] or [len(one.segments) for one in plan.stages] == [1, 7]
    assert [one.replicas for one in plan.stages] == [((2,),), ((0,),)]
    assert (plan.schedule, plan.micro_batch) == ("gpipe", 2)
    with pytest.raises(UsageError, match="9 devices for 8 segments"):
        even_plan(problem, [0] * 9, "gpipe", 2)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.data())
def test_cuts_leave_nothing_out_and_nothing_empty(work: list[float], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=1, max_size=len(work)))
    ranges = cut(work, weights)
    assert len(ranges) == len(weights)
    assert all(start < end for start, end in ranges)
    assert [ranges[0][0], *(end for _, end in ranges)] == [*(start for start, _ in ranges), len(work)]


@given(st.integers(1, 10), st.data())
def test_orders_are_topological(count: int, data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).map(sorted).filter(lambda p: p[0] < p[1])
    edges = data.draw(st.lists(pairs, max_size=15)) if count > 1 else []
    problem = replace(
        random_problem(Random(0), count, 1, skips=False),
        values=tuple(SegmentValue(source=a, consumers=(b,), forward_bytes=1, backward_bytes=1) for a, b in edges),
    )
    for order in orders(problem):
        place = {index: position for position, index in enumerate(order)}
        assert sorted(order) == list(range(count))
        assert all(place[a] < place[b] for a, b in edges)


def test_orders_go_through_one_branch_after_the_other() -> None:
    forks = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
    problem = replace(
        random_problem(Random(0), 6, 1, skips=False),
        values=tuple(SegmentValue(source=a, consumers=(b,), forward_bytes=1, backward_bytes=1) for a, b in forks),
    )
    assert orders(problem) == [(0, 1, 2, 3, 4, 5), (0, 1, 3, 2, 4, 5)]


@given(st.floats(0, 5), st.floats(1e-3, 5), st.sets(st.integers(1, 100), min_size=2, max_size=5))
def test_a_line_is_found_again(fixed: float, each: float, sizes: set[int]) -> None:
    found = ComputeTime.fit({size: fixed + each * size for size in sizes})
    assert all(found.at(size) == pytest.approx(fixed + each * size, rel=1e-4) for size in sizes)


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-6, 1e3), min_size=1, max_size=5))
def test_fitted_times_are_never_negative(measured: dict[int, float]) -> None:
    found = ComputeTime.fit(measured)
    assert found.fixed_s >= 0
    assert found.sample_s >= 0
    if len(measured) == 1:
        ((size, seconds),) = measured.items()
        assert found.fixed_s == 0
        assert found.at(size) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": ()}, "at least one segment"),
        ({"batch": 0}, "1 to the batch"),
        ({"micro_batches": ()}, "1 to the batch"),
        ({"micro_batches": (9,)}, "1 to the batch"),
        ({"schedules": ("best",)}, "allowed are gpipe"),
        ({"schedules": ()}, "at least one"),
        ({"max_stages": 0}, "max_stages=0"),
        ({"max_devices": 0}, "max_devices=0"),
        ({"links": links(2)}, "no link from device 0 to 2"),
        ({"devices": (DeviceSpec(number=0, type="a"),) * 2}, "each number is there once"),
        ({"devices": (DeviceSpec(number=0, type="b"),)}, "no times of segment 's0' for 'b'"),
        ({"devices": (DeviceSpec(number=0, type="a", speed=0.0),)}, "more than 0"),
        ({"values": (SegmentValue(source=2, consumers=(1,), forward_bytes=0, backward_bytes=0),)}, "only later ones"),
        ({"ties": (Tie(segments=(0, 4), parameter_bytes=0, state_bytes=0),)}, "there are 4"),
    ],
)
def test_a_problem_that_is_none_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(joined(), **changes)


def test_times_are_refused() -> None:
    with pytest.raises(UsageError, match="finite, from 0 up"):
        ComputeTime(fixed_s=-1.0)
    with pytest.raises(UsageError, match="at least one is needed"):
        ComputeTime.fit({})
    with pytest.raises(UsageError, match="positive samples"):
        ComputeTime.fit({0: 1.0})


@pytest.mark.parametrize("forward_bytes", [100_000, 1_000_000, 3_000_000])
def test_each_segment_is_in_one_stage_also_where_links_push_cuts_behind_what_crosses_less(forward_bytes: int) -> None:
    random, count = Random(0), 24
    problem = Problem(
        segments=tuple(segment(f"s{index}", random.uniform(0.5, 2) * 1e-3) for index in range(count)),
        devices=tuple(DeviceSpec(number=number, type="quick") for number in range(8)),
        links=links(8, latency_s=2e-4, bandwidth_bps=115e6),
        batch=32,
        micro_batches=(1, 2, 4),
        values=tuple(
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=size, backward_bytes=size)
            for index in range(count - 1)
            for size in [int(forward_bytes * random.choice([0.1, 0.3, 1, 3]))]
        ),
        call_s=1e-5,
    )
    found = partitions(CostModel(problem), range(count), singles(problem, 2))
    assert found
    for parts in found:
        assert [index for part in parts for index in part.segments] == list(range(count))
