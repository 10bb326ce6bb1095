"""Layouts with policies: they fit, beat the policies that need no planner, and are timed and counted as they will
run."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import PlanError
from onebox.plan import (
    ComputeTime,
    DeviceSpec,
    Edge,
    Links,
    Plan,
    PlanWork,
    Problem,
    SegmentValue,
    Stage,
    StageWork,
    block_schedule,
    named_schedule,
    predict,
    search,
    simulate,
)
from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.model.work import OffloadedBytes
from onebox.plan.policies.apply import baseline_layouts, processor_of
from onebox.plan.policies.explain import explain_policies
from tests.unit.plan.cases import equal_links, even
from tests.unit.plan.problems import links, random_problem, segment

HOUR_S = 3600.0


def alone(seed: int, part: float, **more: Any) -> Problem:
    """Return a chain on one device, which has its state and a part of what the batch saves."""
    problem = random_problem(Random(seed), 10, 1, skips=False)
    state = sum(one.state_bytes for one in problem.segments)
    saved = sum(one.saved_bytes for one in problem.segments) * problem.batch
    device = replace(problem.devices[0], capacity_bytes=int(state + saved * part))
    return replace(problem, devices=(device,), micro_batches=(problem.batch,), **more)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 0.9))
def test_no_policy_that_fits_is_quicker(seed: int, part: float) -> None:
    problem = alone(seed, part)
    try:
        result = search(problem, budget_s=HOUR_S)
    except PlanError as error:
        assert "no plan fits" in str(error)
        return
    best, *others = result.candidates
    assert not best.shortfalls
    assert {"recompute", "offload", "swap"} & {stage.policy for stage in result.plan.stages} or len(others) == 1
    for one in others:
        assert one.shortfalls or one.step_s >= best.step_s * (1 - 1e-9)
    assert Plan.from_json(result.plan.to_json()) == result.plan
    predicted, simulation = predict(problem, result.plan)
    assert predicted == result.plan.predicted
    assert not simulation.over_bytes


def test_less_memory_never_makes_a_step_quicker() -> None:
    times = [search(alone(7, part), budget_s=HOUR_S).simulation.step_s for part in (1.5, 0.9, 0.7, 0.6, 0.5)]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_policies_are_listed_with_what_they_lack() -> None:
    result = search(alone(7, 0.5), budget_s=HOUR_S)
    labels = {one.label: one for one in result.candidates}
    assert labels["device 0 alone"].shortfalls
    for name in ("recompute all, each segment", "recompute all, in spans of the root", "offload all"):
        assert f"device 0 alone, {name}" in labels


def test_every_stage_says_why() -> None:
    problem = alone(7, 0.5)
    plan = search(problem, budget_s=HOUR_S).plan
    found = explain_policies(problem, plan)
    assert [one.policy for one in found] == [stage.policy for stage in plan.stages]
    assert sum(one.segments for one in found) == len(problem.segments)
    for one in found:
        assert 0 <= one.saved_bytes <= one.activation_bytes
        wait_s = one.wait_s
        assert one.paid_s == {"keep": 0.0, "recompute": one.again_s, "offload": wait_s, "swap": wait_s}[one.policy]
        said = {"keep": "room", "recompute": "make again", "offload": "the copies", "swap": "the copies wait"}
        assert said[one.policy] in one.text
    paid = sum(one.paid_s for one in found)
    plain = search(alone(7, 5.0), budget_s=HOUR_S).simulation.step_s
    calls = 2 * problem.call_s * len(plan.stages)
    assert plan.predicted is not None
    assert plan.predicted.step_s == pytest.approx(plain + paid + calls, abs=calls)


def test_the_optimizer_goes_to_the_host_where_its_state_does_not_fit() -> None:
    problem = alone(3, 1.0)
    made = tuple(replace(one, optimizer_bytes=one.state_bytes // 2) for one in problem.segments)
    state = sum(one.state_bytes for one in made)
    problem = replace(problem, segments=made, devices=(replace(problem.devices[0], capacity_bytes=int(state * 0.9)),))
    with pytest.raises(PlanError, match="no plan fits"):
        search(problem, budget_s=HOUR_S)
    plan = search(replace(problem, updates=("device", "host")), budget_s=HOUR_S).plan
    assert plan.update == "host"
    only = search(replace(problem, updates=("host",), devices=(DeviceSpec(number=0, type="quick"),)), budget_s=HOUR_S)
    assert only.plan.update == "host"
    assert {stage.policy for stage in only.plan.stages} == {"keep"}


def test_where_gradients_do_not_fit_beside_parameters_they_are_with_the_optimizer() -> None:
    """A chain of which state without the optimizer's is more than there is: only swapped stages can do with less."""
    problem = alone(3, 1.0)
    made = tuple(
        replace(one, parameter_bytes=one.state_bytes // 3, optimizer_bytes=one.state_bytes // 3)
        for one in problem.segments
    )
    held = sum(one.state_bytes - one.optimizer_bytes for one in made)
    room = DeviceSpec(number=0, type="quick", capacity_bytes=int(held * 0.9), host_bps=1e6)
    problem = replace(problem, segments=made, devices=(room,), micro_batches=(1,), updates=("device", "host"))
    loose = tuple(policy for policy in problem.policies if policy != "swap")
    with pytest.raises(PlanError, match="no plan fits"):
        search(replace(problem, policies=loose), budget_s=HOUR_S)
    plan = search(problem, budget_s=HOUR_S).plan
    assert plan.update == "host"
    assert "swap" in {stage.policy for stage in plan.stages}
    predicted, _ = predict(problem, plan)
    assert predicted.peak_bytes[0] <= held * 0.9
    slower, _ = predict(replace(problem, devices=(replace(room, host_bps=1e5),)), plan)
    assert slower.step_s > predicted.step_s, "the way of gradients has its price"


def test_a_limit_of_fates_is_kept() -> None:
    for policies in (("keep", "recompute"), ("keep", "offload")):
        plan = search(alone(3, 0.7, policies=policies), budget_s=HOUR_S).plan
        assert {stage.policy for stage in plan.stages} == set(policies)


@pytest.mark.parametrize(
    ("saved", "place", "again"),
    [
        (100, 0, (0,)),  # all that its backward reads, the next one's reads, too
        (101, 0, (0, 1)),  # something else, as well
        (100, 1, (0, 1)),  # on another device, which holds a copy
    ],
)
def test_what_the_next_stage_holds_is_not_computed_again(saved: int, place: int, again: tuple[int, ...]) -> None:
    segments = (segment("a", 1.0, saved=50), segment("b", 2.0, saved=saved), segment("c", 4.0, saved=10))
    values = tuple(
        SegmentValue(source=source, consumers=(source + 1,), forward_bytes=100, backward_bytes=100) for source in (0, 1)
    )
    devices = tuple(DeviceSpec(number=number, type="quick") for number in (0, 1))
    problem = Problem(
        segments=segments, devices=devices, links=links(2), batch=1, micro_batches=(1,), values=values, replicable=False
    )
    spans = (
        Stage(segments=("a", "b"), replicas=((0,),), shares=(1.0,), policy="recompute"),
        Stage(segments=("c",), replicas=((place,),), shares=(1.0,)),
    )
    predicted, _ = predict(problem, Plan(stages=spans, micro_batch=1))
    forward = [one.forward_s["quick"].sample_s for one in segments]
    gradients = 2 * (forward[0] + forward[1])
    assert predicted.stages_s[0][1:] == pytest.approx((gradients + sum(forward[index] for index in again), 0.0))


def hybrid(*, cpu_s: float) -> Problem:
    """Return a model whose first segments save much and compute little, on a device and a processor beside it."""
    times = {"gpu": (1e-3, 4e-3), "cpu": (cpu_s, 4e-2)}
    made = []
    for index in range(6):
        plain = segment(f"s{index}", 1e-3, state=1_000, saved=4_000_000 if index < 2 else 400_000)
        own = {kind: ComputeTime(sample_s=found[index >= 2]) for kind, found in times.items()}
        made.append(replace(plain, forward_s=own, input_s=own, weight_s=own, update_s={}))
    return Problem(
        segments=tuple(made),
        devices=(
            DeviceSpec(number=0, type="gpu", capacity_bytes=60_000_000, host_bps=1e8),
            DeviceSpec(number=1, type="cpu", processor=True),
        ),
        links=links(2, bandwidth_bps=1e9),
        batch=8,
        micro_batches=(8,),
        values=tuple(
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=200_000, backward_bytes=200_000)
            for index in range(5)
        ),
        replicable=False,
        policies=("keep", "recompute", "offload", "cpu"),
    )


@pytest.mark.feature("CPU workers: Place a stage on the CPU beside a device")
def test_any_number_of_first_segments_may_be_on_the_cpu() -> None:
    """Of few segments; of many, eighths."""
    for count, wanted in ((6, {1, 2, 3, 4, 5}), (40, {5, 10, 15, 20, 25, 30, 35})):
        problem = hybrid(cpu_s=1e-3)
        made = tuple(replace(problem.segments[0], name=f"s{index}") for index in range(count))
        problem = replace(problem, segments=made, values=())
        found = {
            len(layout.parts[0].segments)
            for name, layout in baseline_layouts(Evaluator(problem, effort=10**6, expired=lambda: False), 0, 8)
            if name == "the first segments on the CPU"
        }
        assert found == wanted


@pytest.mark.feature("CPU workers: Place a stage on the CPU beside a device")
@pytest.mark.parametrize(("cpu_s", "on_cpu"), [(1.2e-3, True), (4e-2, False)])
def test_what_saves_much_and_computes_little_goes_to_the_processor(cpu_s: float, on_cpu: bool) -> None:
    problem = hybrid(cpu_s=cpu_s)
    result = search(problem, budget_s=HOUR_S)
    first = result.plan.stages[0]
    assert (first.replicas == ((1,),)) is on_cpu
    assert any("segments on the CPU" in one.label for one in result.candidates)
    assert not predict(problem, result.plan)[1].over_bytes
    if on_cpu:
        assert "processor" in explain_policies(problem, result.plan)[0].text


def test_the_processor_beside_a_device_is_one_of_its_host_that_has_more_memory() -> None:
    base = random_problem(Random(1), 3, 4)
    cpu = DeviceSpec(number=0, type="quick", host="a", processor=True, capacity_bytes=10)
    devices = (
        cpu,
        replace(cpu, number=1, capacity_bytes=20),
        replace(cpu, number=2, capacity_bytes=None, host="b"),
        DeviceSpec(number=3, type="half", host="a", capacity_bytes=100),
    )
    problem = replace(base, devices=devices)
    assert [processor_of(problem, number) for number in range(4)] == [1, None, None, 1]


# ---- what is offloaded, as the simulator plays it


def offloading(stages: int, *, size_bytes: int = 100, host_bps: float = 100.0, lent: int = 0) -> PlanWork:
    """Return stages on device 0 of 1 s forward and 2 s backward, the first of which is offloaded in 1 s."""
    offloaded = ((OffloadedBytes(0, size_bytes - lent), OffloadedBytes(1, lent)), *((),) * (stages - 1))
    return PlanWork(
        stages=tuple(
            StageWork(
                forward_s={0: 1.0}, input_s={0: 1.0}, weight_s={0: 1.0}, update_s={0: 0.0}, offloaded=offloaded[stage]
            )
            for stage in range(stages)
        ),
        edges=tuple(Edge(source=n, target=n + 1, forward_bytes=0, backward_bytes=0) for n in range(stages - 1)),
        links=Links(latency_s={}, bandwidth_bps={}),
        capacity_bytes={},
        host_bps={0: host_bps},
    )


@pytest.mark.parametrize(
    ("host_bps", "step_s", "why"),
    [
        (100.0, 12.0, "both copies hide"),
        (50.0, 13.0, "2 s to the host: one waits under 1 s of forward; 2 s back hide under 2 s of backward"),
        (25.0, 17.0, "4 s each way: 3 s are waited for, then 2 s"),
    ],
)
def test_what_does_not_hide_is_waited_for(host_bps: float, step_s: float, why: str) -> None:
    routes = even(1, 1, 4)
    work = offloading(4, host_bps=host_bps)
    found = simulate(block_schedule("1f1b", routes), routes, work)
    assert found.step_s == pytest.approx(step_s), why
    assert found.busy_s == {0: 12.0}


def test_memory_of_what_is_away_is_free() -> None:
    routes = even(1, 1, 5)
    work = offloading(5)
    schedule = block_schedule("1f1b", routes)
    assert simulate(schedule, routes, work).peak_bytes == {0: 100}
    busy = replace(work, stages=(*work.stages[:3], replace(work.stages[3], forward_work_bytes=70), work.stages[4]))
    assert simulate(schedule, routes, busy).peak_bytes == {0: 100}  # gone by then
    early = replace(work, stages=(work.stages[0], replace(work.stages[1], forward_work_bytes=70), *work.stages[2:]))
    assert simulate(schedule, routes, early).peak_bytes == {0: 170}  # leaving
    third = replace(work, stages=(*work.stages[:2], replace(work.stages[2], forward_work_bytes=70), *work.stages[3:]))
    assert simulate(schedule, routes, third).peak_bytes == {0: 100}
    lent = replace(third, stages=(offloading(5, lent=40).stages[0], *third.stages[1:]))
    assert simulate(schedule, routes, lent).peak_bytes == {0: 110}  # what the second stage reads leaves later


def test_what_is_too_near_stays() -> None:
    routes = even(1, 1, 2)
    work = replace(offloading(2, host_bps=1.0), links=equal_links({0}))
    found = simulate(named_schedule("gpipe", routes), routes, work)
    assert found.step_s == 6.0
    assert found.peak_bytes == {0: 100}


# ---- cores


def test_workers_that_share_too_few_cores_are_as_slow_as_they_were_measured_only_while_all_work() -> None:
    problem = replace(random_problem(Random(5), 4, 3), call_s=0.0)
    devices = tuple(replace(device, type="quick", processor=True, threads=1.0, host="h") for device in problem.devices)
    roomy = replace(problem, devices=devices, cores={"h": 3.0})
    tight = replace(roomy, cores={"h": 1.5})
    assert predict(tight, one := _on(problem, (0,)))[0].step_s == pytest.approx(predict(roomy, one)[0].step_s / 2)
    assert predict(tight, two := Plan.data_parallel((0, 1), [0.5, 0.5], micro_batch=2))[0].stages_s[0] == pytest.approx(
        [part_s * (2 / 1.5) / 2 for part_s in predict(roomy, two)[0].stages_s[0]]
    )
    prepared = replace(tight, preparing={"h": 2.0})  # as busy as with all workers
    assert predict(prepared, one)[0] == predict(roomy, one)[0]
    every = Plan.data_parallel((0, 1, 2), [1 / 3] * 3, micro_batch=2)
    assert predict(tight, every)[0] == predict(roomy, every)[0]
    stages = _on(problem, (0, 1, 2))  # which wait for each other, and leave cores to those that do not
    assert predict(tight, stages)[0].step_s < predict(roomy, stages)[0].step_s
    beside = (*devices[:2], replace(devices[2], processor=False, threads=0.0))
    assert predict(replace(tight, devices=beside), one)[0].step_s < predict(roomy, one)[0].step_s


def _on(problem: Problem, numbers: tuple[int, ...]) -> Plan:
    """Return a plan of a stage on each of some devices, in micro-batches of two samples."""
    names = [one.name for one in problem.segments]
    stages = tuple(
        Stage(
            segments=tuple(names[place:] if place == len(numbers) - 1 else names[place : place + 1])
            if len(numbers) > 1
            else (),
            replicas=((number,),),
            shares=(1.0,),
        )
        for place, number in enumerate(numbers)
    )
    return Plan(stages=stages, micro_batch=2)
