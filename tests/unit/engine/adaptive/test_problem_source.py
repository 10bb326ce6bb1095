"""What a run that follows its devices starts from agrees with what is measured of it."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from onebox.engine.adaptive.measurements import StepContext, measure_step
from onebox.engine.adaptive.problem_source import problem_maker
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.results import StepTrace
from onebox.plan import Action, Plan, ReplanController
from onebox.plan.model.problem import DeviceSpec, Problem
from onebox.plan.model.schedule import Kind
from onebox.plan.replan.measurements import StepMeasurement, TaskTime, TimedTask
from onebox.pool import DeviceInfo, Pool
from tests.unit.engine.adaptive.test_controller import cut, problem
from tests.unit.engine.recovery.test_replan import BATCH, Left, workload

KINDS: tuple[Kind, ...] = ("F", "B")


def made_of(plan: Plan, pool: Left, given: Problem | None = None) -> Problem:
    """Return the problem of a run of which five steps have been seen, each action taking 10 ms."""
    work = workload()
    took = {
        TimedTask(device, number, kind): TaskTime(0.01, 1)
        for number, stage in enumerate(plan.stages)
        for (device,) in stage.replicas
        for kind in KINDS
    }
    steps = [StepMeasurement(step=step, step_s=0.1, actions=took) for step in range(5)]
    make = problem_maker(cast(Pool, pool), lambda: work.captures, work.optimizer, lambda: work.batch, lambda: given)
    return make(plan, steps)


def test_a_micro_batch_larger_than_the_batch_is_one_of_the_whole() -> None:
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=2 * BATCH)
    found = made_of(plan, Left(set()))
    assert found.micro_batches == (BATCH,)
    ReplanController(found, plan, BATCH)


def test_where_cores_are_short_that_is_in_what_was_measured() -> None:
    """Else idle devices would look quicker than those at work, which have each other for neighbours already."""
    pool = Left(set())
    pool.devices = tuple(cast(DeviceInfo, replace(device, cores=1, threads=1)) for device in pool.devices)
    found = made_of(Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=BATCH // 2), pool)
    assert found.cores == {}
    assert len(found.devices) == len(pool.devices)


def test_shares_of_samples_stay_also_where_a_planner_might_have_set_others() -> None:
    """Each share is a micro-batch, and what these are does not change beside a run."""
    plan = Plan.data_parallel([0, 1], [1.0, 1.0])
    given = replace(problem(1.0), free_shares=True)
    assert not made_of(plan, Left({2, 3}), given).free_shares
    assert not made_of(plan, Left({2, 3})).free_shares


def processors(hosts: str) -> Problem:
    """Return the problem of six segments of 10 ms on a processor of each of some hosts, by their letters."""
    devices = tuple(
        DeviceSpec(number=number, type="cpu", host=host, processor=True) for number, host in enumerate(hosts)
    )
    return replace(problem(1.0), devices=devices)


@pytest.mark.parametrize(("hosts", "slow", "together"), [
    ("ab", (1.6, 1.8), {"a": 1.6, "b": 1.8}),  # they share something
    ("ab", (1.6, 0.9), {}),  # one of them is slower than planned
    ("ab", (0.7, 0.8), {}),
    ("aa", (1.6, 1.8), {}),  # a host is profiled with all of its devices at work
])  # fmt: skip
def test_hosts_that_all_take_longer_than_each_by_itself_share_a_processor(
    hosts: str, slow: tuple[float, float], together: dict[str, float]
) -> None:
    asked, plan = processors(hosts), cut(3)
    steps = [
        StepMeasurement(
            step=step,
            step_s=1.0,
            actions={
                TimedTask(device, device, kind): TaskTime(0.03 * factor * (1 + (kind == "B")), 4)
                for device, factor in enumerate(slow)
                for kind in KINDS
            },
        )
        for step in range(5)
    ]
    pool, work = cast(Pool, Left({2, 3})), workload()
    make = problem_maker(pool, lambda: work.captures, work.optimizer, lambda: work.batch, lambda: asked)
    assert make(plan, steps).together == pytest.approx(together)


def test_a_planned_problem_is_followed_with_the_batches_of_the_run() -> None:
    """The plan was made for a batch of another size, which the times of its stages are not those of."""
    given = replace(problem(1.0), batch=4 * BATCH, micro_batches=(BATCH // 2, 4 * BATCH))
    found = made_of(Plan.data_parallel([0, 1], [1.0, 1.0]), Left({2, 3}), given)
    assert (found.batch, found.micro_batches) == (BATCH, (BATCH // 2,))


@pytest.mark.parametrize("shares", [(3.0, 1.0), (1.0, 1.0), (1.0, 7.0)], ids=str)
def test_replicas_with_shares_of_their_own_are_as_planned_if_they_take_what_was_planned(
    shares: tuple[float, ...],
) -> None:
    asked = problem(1.0)
    plan = Plan.data_parallel([0, 1], shares)
    parts = plan.micro_batches(asked.batch)
    follower = ReplanController(replace(asked, free_shares=False), plan, asked.batch)
    for step in range(40):
        workers, begin = {}, step * 10**10
        for device, part in enumerate(parts):
            labels, times, now = [], [], begin
            for kind in KINDS:
                seconds = sum(each.forward_s["cpu"].sample_s for each in asked.segments) * part.size
                took = int(1e9 * seconds * (1 + (kind == "B")))
                labels.append(InstructionLabel("", "compute", Action(kind, 0, part.index)))
                times += [now, now + took]
                now += took
            workers[device] = (labels, tuple(times), ())
        trace = StepTrace(step=step, workers=workers)
        full = max(part.size for part in parts)
        whole = StepContext(
            trace=trace, micro_batches=parts, full=full, hosts={0: "", 1: ""}, timed=lambda one, other: False
        )
        assert follower.see(measure_step(whole)) is None
        assert not follower.doubts
    assert follower.outcomes == ()
