"""What the run-time scheduler decides: only what is allowed, said in a line, judged, taken back if it was wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.plan import (
    ASYNC,
    CarriedBytes,
    ComputeTime,
    LinkTime,
    Plan,
    Problem,
    ReplanController,
    ReplanOptions,
    Schedule,
    Segment,
    Stage,
    StepMeasurement,
    TaskTime,
    TimedTask,
    even_plan,
    predict,
    stage_work,
    validate,
)
from onebox.plan.replan.decisions import describe_change
from tests.unit.plan.problems import random_problem
from tests.unit.plan.replan.simulated_cluster import Run, State, even_noise, follow, measured, noisy, step_s, truth
from tests.unit.plan.replan.test_controller import changing, cluster, planned


def lines_of(run: Run) -> str:
    """Return all that a person is told."""
    return "\n".join(run.lines)


def pipeline(problem: Problem, **changes: Any) -> Plan:
    """Return an even plan on all devices, with some things changed."""
    plan = even_plan(problem, [device.number for device in problem.devices], "1f1b", problem.micro_batches[0])
    return msgspec.structs.replace(plan, **changes)


def only(*kinds: str) -> Callable[[Run], bool]:
    """Return a test whether these were the decisions, in this order."""
    return lambda run: [decision.kind for decision in run.decisions] == list(kinds)


def test_what_made_steps_slower_is_taken_back_and_tried_again_ever_more_seldom() -> None:
    problem, plan = planned(uneven=False)
    slow = State(slow={1: 3.0}, hidden=lambda now: 0.0 if now.stages == plan.stages else 3.0)
    run = follow(problem, plan, 400, changing(State(), (50, slow)), noise=even_noise(1, 0.02))
    tried = [decision for decision in run.decisions if decision.kind == "recut"]
    assert len(tried) >= 3, lines_of(run)
    assert [d.kind for d in run.decisions] == ["recut", "back"] * len(tried)
    assert all(decision.plan == plan for decision in run.decisions[1::2])
    gaps = [later.step - earlier.step for earlier, later in pairwise(tried)]
    half = len(gaps) // 2
    assert sum(gaps[half:]) > 2 * sum(gaps[:half]), gaps
    steps = {plan.stages: [d.step for d in tried if d.plan.stages == plan.stages] for plan in (d.plan for d in tried)}
    assert all(b - a >= 50 for same in steps.values() for a, b in pairwise(same))
    assert [outcome.kept for outcome in run.follower.outcomes] == [False] * len(tried)
    assert all("taken back" in outcome.line for outcome in run.follower.outcomes)


def test_a_true_change_is_followed_soon_even_after_failures() -> None:
    problem, plan = planned(uneven=False)
    hidden = State(slow={1: 3.0}, hidden=lambda now: 0.0 if now.stages == plan.stages else 3.0)
    run = follow(problem, plan, 260, changing(State(), (50, hidden), (200, State(slow={2: 4.0}))))
    assert any(200 < decision.step <= 206 for decision in run.decisions), lines_of(run)
    assert run.steps_s[-1] < 0.6 * run.steps_s[201]


def test_moved_work_that_runs_slower_than_believed_is_taken_back() -> None:
    problem, plan = planned(uneven=False)
    usual, slow = State(), State(slow={1: 2.0})

    def at(step: int) -> State:
        return usual if step < 50 else slow

    follower = ReplanController(problem, plan, problem.batch)
    decisions = []
    for step in range(100):
        true = at(step)
        if follower.plan != plan:  # who gets more to do is slower by far
            true = State(slow={1: 2.0, 0: 6.0, 2: 6.0, 3: 6.0})
        found = follower.see(noisy(measured(problem, true, follower.plan), step, lambda: 1.0))
        if found is not None:
            decisions.append(found)
            follower.applied(found, found.cost_s)
    assert [decision.kind for decision in decisions[:2]] == ["recut", "back"]
    assert follower.outcomes[0].kept is False
    assert follower.outcomes[0].after_s > follower.outcomes[0].before_s


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32), schedule=st.sampled_from(["1f1b", ASYNC]))
def test_wrong_times_of_segments_are_learned_in_a_few_decisions(seed: int, schedule: str) -> None:
    problem, plan = planned(uneven=False, schedule=schedule)
    random = Random(seed)
    factors = {one.name: (random.uniform(0.6, 1.5), random.uniform(0.6, 1.5)) for one in problem.segments}
    true = replace(problem, segments=tuple(other_times(one, *factors[one.name]) for one in problem.segments))
    follower, noise = ReplanController(problem, plan, problem.batch), even_noise(seed, 0.05)
    took: list[float] = []
    decisions = 0
    seen = measured(true, State(), plan)
    for step in range(200):
        took.append(seen.step_s)
        found = follower.see(noisy(seen, step, noise))
        if found is not None:
            follower.applied(found, found.cost_s)
            seen = measured(true, State(), follower.plan)
            decisions += 1
    assert decisions <= 4
    assert took[-1] <= took[0] * (1 + ReplanOptions().worse)


def other_times(one: Segment, forward: float, backward: float) -> Segment:
    """Return a segment that takes longer by some factors."""

    def longer(times: Mapping[str, ComputeTime], factor: float) -> dict[str, ComputeTime]:
        return {
            kind: ComputeTime(fixed_s=t.fixed_s * factor, sample_s=t.sample_s * factor) for kind, t in times.items()
        }

    return replace(
        one,
        forward_s=longer(one.forward_s, forward),
        input_s=longer(one.input_s, backward),
        weight_s=longer(one.weight_s, backward),
    )


def test_a_decision_that_cannot_be_carried_out_is_not_repeated_at_once() -> None:
    problem, plan = planned(uneven=False)
    follower = ReplanController(problem, plan, problem.batch)
    seen = measured(problem, State(slow={1: 3.0}), plan)
    plans = []
    for step in range(45):
        found = follower.see(replace(seen, step=step))
        if found is not None:
            plans.append(found.plan)
            assert follower.see(replace(seen, step=step)) is None  # nothing else until it is told
            follower.refused(found)
    assert follower.plan == plan
    assert not follower.outcomes
    assert len(plans) > 1
    assert len({one.stages for one in plans}) == len(plans)


def test_a_decision_says_what_was_seen_what_is_done_and_what_is_expected() -> None:
    problem, plan = planned(uneven=False)
    victim = plan.stages[1].replicas[0][0]
    run = follow(problem, plan, 80, changing(State(), (58, State(slow={victim: 2.9}))))
    (decision,), (outcome,) = run.decisions, run.follower.outcomes
    begin = f"step 59: device {victim} takes 2.9 × as long as planned since step 58 → "
    end = f"{decision.after_s * 1e3:.0f} ms expected instead of {decision.before_s * 1e3:.0f} ms a step"
    assert decision.line.startswith(begin)
    assert re.search(r"segments? .*move.* device.* \(\d+ MB, about 0.2 s\); ", decision.line)
    assert decision.line.endswith(end)
    assert outcome.line.endswith("before: kept")
    assert outcome.after_s == pytest.approx(decision.after_s, rel=0.02)
    assert decision.moved_bytes == 4_000_000 * sum(
        a != b
        for name in problem.index
        for a, b in [tuple(next(s.replicas for s in one.stages if name in s.segments) for one in (plan, decision.plan))]
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1", ASYNC]), tight=st.booleans())
@example(seed=197, schedule="gpipe", tight=True)  # an order of the first plan's own stages that saves 3 %
def test_decisions_keep_micro_batches_the_order_of_segments_and_limits(seed: int, schedule: str, tight: bool) -> None:
    random = Random(seed)
    problem = random_problem(random, random.randrange(4, 9), random.randrange(2, 5), tight=tight)
    plan = pipeline(problem, schedule=schedule)
    lacking = predict(problem, plan)[1].over_bytes
    state = State(slow={random.randrange(len(problem.devices)): random.choice([0.4, 3.0, 5.0])})
    follower = ReplanController(problem, plan, problem.batch, ReplanOptions(budget_actions=20_000))
    seen = measured(problem, state, plan)
    decision = next(filter(None, (follower.see(replace(seen, step=step)) for step in range(9))), None)
    if decision is None:
        return
    after = decision.plan
    assert after.micro_batches(problem.batch) == plan.micro_batches(problem.batch)
    assert set(after.devices) <= set(problem.device)
    order = [name for stage in plan.stages for name in stage.segments]
    assert [name for stage in after.stages for name in stage.segments] == order
    assert (after.schedule == ASYNC) == (schedule == ASYNC)
    simulation = predict(problem, after)[1]
    assert sum(simulation.over_bytes.values()) <= sum(lacking.values())
    assert step_s(truth(problem, state), after) < 0.96 * step_s(truth(problem, state), plan)
    if after.schedule == "table":
        table, routes = Schedule.parse(after.table), after.routes(problem.batch)
        edges = [(edge.source, edge.target) for edge in stage_work(problem, after).edges]
        validate(table, routes, edges=edges)
        for row in table.rows.values():  # gradients are summed up in the order of the micro-batches
            for stage in range(len(routes)):
                turns = [action.micro_batch for action in row if action.stage == stage and action.kind in "BW"]
                assert turns == sorted(turns)


def test_an_order_of_actions_is_all_that_changes_where_cuts_cannot() -> None:
    problem = replace(cluster(2, segments=2), schedules=("gpipe", "1f1b", "zb-h1", "auto"))
    problem = replace(problem, links=replace(problem.links, bandwidth_bps={a: {0: 1e8, 1: 1e8} for a in (0, 1)}))
    plan = pipeline(problem)
    run = follow(problem, plan, 90, changing(State(), (50, State(links={(0, 1): 8.0}))))
    assert only("reorder")(run), lines_of(run)
    assert [stage.segments for stage in run.decisions[0].plan.stages] == [stage.segments for stage in plan.stages]
    assert "actions go in" in run.decisions[0].line
    assert run.steps_s[60] < 0.95 * run.steps_s[51]


def test_more_is_in_flight_where_a_slow_link_would_keep_an_asynchronous_pipeline_waiting() -> None:
    problem = cluster(2, segments=2)
    plan = pipeline(problem, schedule=ASYNC)
    run = follow(problem, plan, 70, changing(State(), (50, State(links={(0, 1): 30.0}))))
    assert only("reorder")(run), lines_of(run)
    assert max(run.decisions[0].plan.in_flight) > 2
    assert "micro-batches in flight" in run.decisions[0].line
    assert run.steps_s[60] < 0.7 * run.steps_s[51]
    assert [outcome.kept for outcome in run.follower.outcomes] == [True]


@pytest.mark.parametrize("micro_batch", [2, None])
def test_replicas_get_other_shares(micro_batch: int | None) -> None:
    problem = replace(cluster(4), replicable=True)
    plan = Plan.data_parallel([0, 1, 2, 3], [1.0] * 4, micro_batch=micro_batch)
    run = follow(problem, plan, 90, changing(State(), (50, State(slow={2: 3.0}))), noise=even_noise(4, 0.03))
    assert only("reshare")(run), lines_of(run)
    assert run.steps_s[60] < 0.6 * run.steps_s[51]
    assert "the devices compute other shares of" in run.decisions[0].line
    if micro_batch is None:
        fixed = replace(problem, free_shares=False)  # then the sizes of micro-batches are not to change
        kept = follow(fixed, plan, 70, changing(State(), (50, State(slow={2: 3.0}))))
        (decision,) = kept.decisions
        assert decision.plan.devices == (0, 1, 3)
        assert decision.plan.micro_batches(problem.batch) == plan.micro_batches(problem.batch)
        assert "leave device 2" in decision.line


def test_a_segment_stays_with_the_format_that_it_is_computed_in() -> None:
    problem = cluster(4)
    plan = pipeline(problem)
    stages = tuple(msgspec.structs.replace(stage, channels_last=n < 2) for n, stage in enumerate(plan.stages))
    run = follow(
        problem,
        msgspec.structs.replace(plan, stages=stages, predicted=None),
        70,
        changing(State(), (50, State(slow={1: 3.0}))),
    )
    assert run.decisions
    for stage, before in zip(run.decisions[0].plan.stages[:2], stages[:2], strict=True):
        assert stage.channels_last == before.channels_last
    formats = [
        {name: stage.channels_last for stage in one.stages for name in stage.segments}
        for one in (run.decisions[0].plan, msgspec.structs.replace(plan, stages=stages))
    ]
    assert formats[0] == formats[1]


def test_limits_of_memory_go_with_the_devices() -> None:
    problem, plan = planned(uneven=False)
    limits = {device: (device + 1) * 10**9 for device in plan.devices}
    plan = msgspec.structs.replace(plan, memory_bytes=tuple(limits[device] for device in plan.devices))
    a, b = plan.devices[1], plan.devices[2]
    run = follow(problem, plan, 60, changing(State(), (50, State(links={(a, b): 100.0}))))
    after = run.decisions[0].plan
    assert after.devices != plan.devices
    assert dict(zip(after.devices, after.memory_bytes, strict=True)) == limits


def test_a_link_that_nobody_uses_any_more_is_tried_again_some_day() -> None:
    problem, plan = planned(uneven=True)
    a, b = plan.devices[1], plan.devices[2]
    usual, slow = State(), State(links={(a, b): 100.0})
    run = follow(problem, plan, 320, changing(usual, (20, slow), (100, usual)), options=ReplanOptions(gain=0.0))
    assert run.decisions[0].step == 21
    assert run.follower.plan.stages == run.decisions[0].plan.stages or "tried again" in lines_of(run)


def test_an_idle_device_takes_the_place_of_a_slow_one_which_is_tried_again_some_day() -> None:
    problem, plan = planned(uneven=False)
    wide = replace(cluster(5), segments=problem.segments, values=problem.values)
    slow, usual = State(slow={1: 6.0}), State()
    run = follow(wide, plan, 300, changing(usual, (20, slow), (60, usual)), noise=even_noise(5, 0.03))
    assert run.decisions[0].step == 21
    assert set(run.decisions[0].plan.devices) == {0, 2, 3, 4}
    assert run.steps_s[30] < 1.02 * run.steps_s[0]
    assert only("recut", "recut")(run), lines_of(run)
    assert run.decisions[1].why == "device 1, which was slow, has not been used for long and is tried again"
    assert len(run.decisions[1].plan.stages) == 5
    assert run.steps_s[-1] < 0.95 * run.steps_s[0]


def test_a_device_that_is_too_slow_for_a_segment_is_left_idle() -> None:
    problem, plan = planned(uneven=False)
    run = follow(problem, plan, 70, changing(State(), (50, State(slow={plan.devices[1]: 40.0}))))
    after = run.decisions[0].plan
    assert set(after.devices) == set(plan.devices) - {plan.devices[1]}
    assert len(after.stages) == 3
    assert run.steps_s[60] < 1.5 * run.steps_s[49]


def test_steps_of_another_plan_tell_nothing() -> None:
    problem, plan = planned(uneven=False)
    other = pipeline(problem, stages=(plan.stages[1], plan.stages[0], *plan.stages[2:]))
    assert other.stages != plan.stages
    seen = StepMeasurement(step=0, step_s=1.0, actions={TimedTask(plan.devices[0], 3, "F"): TaskTime(99.0, 16)})
    follower = ReplanController(problem, plan, problem.batch)
    assert not any(follower.see(replace(seen, step=step)) for step in range(20))


def test_a_single_outlier_and_a_plan_for_one_device_change_nothing() -> None:
    problem, plan = planned(uneven=False)
    slow, usual = State(slow={1: 20.0}), State()
    run = follow(problem, plan, 80, lambda step: slow if step in (20, 40, 42, 60) else usual)
    assert not run.decisions
    alone = cluster(1)
    one = Plan.data_parallel([0], [1.0], micro_batch=2)
    assert not follow(alone, one, 40, lambda step: slow if step > 20 else usual).decisions


def test_plans_of_which_no_times_are_known_are_refused() -> None:
    problem = cluster(2)
    names = tuple(problem.index)
    split = Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,), segments=names),), micro_batch=2)
    with pytest.raises(UsageError, match="splits layers"):
        ReplanController(problem, split, 32)
    with pytest.raises(UsageError, match="uses device 7"):
        ReplanController(problem, Plan.data_parallel([7], [1.0]), 32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": float("nan")},
        {"actions": {TimedTask(0, 0, "F"): TaskTime(-1.0, 1)}},
        {"actions": {TimedTask(0, 0, "F"): TaskTime(1.0, 0)}},
        {"links": {(0, 1): LinkTime(1, float("inf"), 1)}},
        {"links": {(0, 1): LinkTime(1, 1.0, 0)}},
        {"update_s": {0: -1.0}},
        {"carried": {(0, 1): CarriedBytes(1, -1.0)}},
        {"carried": {(0, 1): CarriedBytes(0, 1.0)}},
    ],
)
def test_measurements_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="step 3"):
        StepMeasurement(**{"step": 3, "step_s": 1.0, "actions": {}, **wrong})


@pytest.mark.parametrize(
    "wrong", [{"gain": -0.1}, {"horizon": 0}, {"trial": 0}, {"dwell": -1}, {"pause_s": float("inf")}]
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ReplanOptions(**wrong)


def moved(owners: Sequence[int], *devices: tuple[int, ...], schedule: str = "1f1b") -> Plan:
    """Return a plan of segments a, b, ..., of which the stage of each is given, and the devices of each stage."""
    stages = tuple(
        Stage(
            segments=tuple(name for name, owner in zip("abcdefgh", owners, strict=False) if owner == number),
            replicas=tuple((device,) for device in own),
            shares=(1.0,) * len(own),
        )
        for number, own in enumerate(devices)
    )
    return Plan(stages=stages, micro_batch=2, schedule=schedule)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (moved([0, 0, 0, 1], (0,), (2,)), moved([0, 0, 1, 1], (0,), (2,)), "segment c moves from device 0 to device 2"),
        (
            moved([0, 1, 1, 1], (0,), (2,)),
            moved([0, 0, 0, 1], (0,), (2,)),
            "segments b, c move from device 2 to device 0",
        ),
        (
            moved([0, 0, 1, 1], (0,), (2,)),
            moved([0, 0, 1, 1], (2,), (0,)),
            "segments a, b move from device 0 to device 2; segments c, d move from device 2 to device 0",
        ),
        (
            moved([0, 1, 1, 1, 1, 1, 1], (0,), (2,)),
            moved([0, 0, 0, 0, 0, 0, 1], (0,), (2,)),
            "segments b … f (5) move from device 2 to device 0",
        ),
        (
            moved([0, 1, 2, 3], (0,), (1,), (2,), (3,)),
            moved([0, 1, 2, 3], (1,), (2,), (3,), (0,)),
            "4 segments move between devices 0, 1, 2, 3",
        ),
        (moved([0, 1], (0,), (1,)), moved([0, 1], (0,), (1,), schedule="gpipe"), "actions go in the order of gpipe"),
        (
            moved([0, 1, 1], (0, 1), (2,)),
            moved([0, 0, 1], (0, 1), (2,)),
            "segment b moves from device 2 to devices 0, 1",
        ),
        (moved([0, 0], (0, 2)), moved([0, 0], (0,)), "segments a, b leave device 2"),
        (moved([0, 1], (0,), (1,)), moved([0, 1], (0,), (1, 2)), "segment b comes to device 2, too"),
    ],
)
def test_what_is_done_is_said_in_words(before: Plan, after: Plan, told: str) -> None:
    assert describe_change(before, after, "abcdefgh", 8) == told
