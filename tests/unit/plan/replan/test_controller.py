"""The run-time scheduler in a simulated cluster: what it finds, how soon, and that noise moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.plan import ASYNC, DeviceSpec, Plan, Problem, ReplanOptions, SegmentValue, search
from tests.unit.plan.problems import links, segment
from tests.unit.plan.replan.simulated_cluster import Run, State, even_noise, follow, normal_noise, step_s, truth

EFFORT = 60_000
"""Actions that the search for the best static plan simulates."""

UNEVEN = ("quick", "half", "quick", "slow", "half", "quick", "quick", "half")


def cluster(devices: int, *, uneven: bool = False, segments: int = 0, capacity: int | None = None) -> Problem:
    """Return a chain of segments that are not equal, and devices with a stage each in the plans that are sought."""
    count = segments or 4 * devices
    made = tuple(segment(f"s{i}", 1e-3 * (1 + 0.3 * (i * 7 % 3)), state=4_000_000, saved=1000) for i in range(count))
    values = (
        SegmentValue(source=i, consumers=(i + 1,), forward_bytes=200_000, backward_bytes=200_000)
        for i in range(count - 1)
    )
    return Problem(
        segments=made,
        devices=tuple(
            DeviceSpec(number=n, type=UNEVEN[n] if uneven else "quick", capacity_bytes=capacity) for n in range(devices)
        ),
        links=links(devices, latency_s=1e-4, bandwidth_bps=1e9),
        batch=32,
        micro_batches=(2,),
        values=tuple(values),
        call_s=1e-5,
        schedules=("1f1b",),
        replicable=False,
        max_stages=devices,
    )


@cache
def planned(devices: int = 4, *, uneven: bool, schedule: str = "1f1b") -> tuple[Problem, Plan]:
    """Return a cluster with its best plan, or with that under another schedule."""
    problem = cluster(devices, uneven=uneven)
    return problem, msgspec.structs.replace(best(problem), schedule=schedule, predicted=None)


def best(problem: Problem) -> Plan:
    """Return the best static plan that a search finds."""
    return search(problem, budget_s=60.0, effort=EFFORT).plan


def changing(first: State, *later: tuple[int, State]) -> Callable[[int], State]:
    """Return what is the first state, and from each of some steps on another one."""

    def at(step: int) -> State:
        return ([first] + [state for begin, state in later if step >= begin])[-1]

    return at


def within(run: Run, step: int, problem: Problem, state: State) -> float:
    """Return by what factor a step is slower than under the best static plan for a state."""
    true, schedule = truth(problem, state), run.plans[step].schedule
    plan = msgspec.structs.replace(best(true), schedule=schedule, predicted=None)
    return run.steps_s[step] / step_s(true, plan)


@pytest.mark.parametrize("schedule", ["1f1b", ASYNC])
@pytest.mark.parametrize(("devices", "uneven"), [(4, False), (8, True)])
def test_a_slow_device_is_relieved_and_later_as_busy_as_before(devices: int, uneven: bool, schedule: str) -> None:
    problem, plan = planned(devices, uneven=uneven, schedule=schedule)
    victim = plan.stages[devices // 2].replicas[0][0]
    usual, slow = State(), State(slow={victim: 3.0})
    run = follow(problem, plan, 170, changing(usual, (50, slow), (150, usual)), noise=even_noise(1, 0.03))
    assert within(run, 60, problem, slow) < 1.1
    assert run.steps_s[160] < 1.05 * run.steps_s[49]
    assert [decision.step for decision in run.decisions][:2] == [51, 151][: len(run.decisions)], run.lines
    assert len(run.decisions) <= 2, run.lines
    assert all(f"device {victim}" in decision.why for decision in run.decisions)
    assert all(outcome.kept for outcome in run.follower.outcomes)
    assert run.decisions[0].after_s == pytest.approx(run.steps_s[60], rel=0.1)


@pytest.mark.parametrize("schedule", ["1f1b", ASYNC])
@pytest.mark.parametrize(("devices", "uneven"), [(4, True), (8, False)])
def test_a_slow_link_is_left_to_who_needs_it_least(devices: int, uneven: bool, schedule: str) -> None:
    problem, plan = planned(devices, uneven=uneven, schedule=schedule)
    a, b = plan.stages[1].replicas[0][0], plan.stages[2].replicas[0][0]
    usual, slow = State(), State(links={(a, b): 100.0})
    run = follow(problem, plan, 70, changing(usual, (50, slow)), noise=even_noise(2, 0.03))
    assert run.steps_s[50] > 1.3 * run.steps_s[49]
    assert within(run, 60, problem, slow) < 1.1
    assert [decision.step for decision in run.decisions] == [51], run.lines


def test_changes_are_followed_under_noise() -> None:
    problem, plan = planned(uneven=False)
    usual, slow = State(), State(slow={2: 3.0})
    run = follow(problem, plan, 120, changing(usual, (50, slow)), noise=even_noise(3))
    assert 51 <= run.decisions[0].step <= 53, run.lines
    assert within(run, 70, problem, slow) < 1.1


@pytest.mark.parametrize("uneven", [False, True])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), even=st.booleans())
def test_noise_moves_nothing(uneven: bool, seed: int, even: bool) -> None:
    problem, plan = planned(uneven=uneven)
    noise = even_noise(seed) if even else normal_noise(seed, 0.15)
    run = follow(problem, plan, 300, changing(State()), noise=noise)
    assert not run.decisions, run.lines


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), gaps=st.lists(st.integers(4, 20), min_size=3, max_size=8), by=st.floats(1.5, 50.0))
def test_steps_that_are_slow_one_by_one_move_nothing(seed: int, gaps: list[int], by: float) -> None:
    """A device and a link are slow for a step, in all that they do, and usual for the next three, under noise."""
    problem, plan = planned(uneven=False)
    usual, hit = State(), [State(slow={seed % 4: by}), State(links={(plan.devices[1], plan.devices[2]): by})]
    states = [state for n, gap in enumerate(gaps) for state in (*[usual] * (gap - 1), hit[n % 2])]
    run = follow(problem, plan, len(states), states.__getitem__, noise=even_noise(seed))
    assert not run.decisions, run.lines


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), victim=st.integers(0, 3), begin=st.integers(4, 60))
def test_a_third_of_the_speed_is_found_within_three_steps_under_noise(seed: int, victim: int, begin: int) -> None:
    problem, plan = planned(uneven=False)
    state = changing(State(), (begin, State(slow={victim: 3.0})))
    run = follow(problem, plan, begin + 6, state, noise=even_noise(seed))
    assert len(run.decisions) == 1
    assert begin < run.decisions[0].step <= begin + 3


LOOK = 24
"""Usual steps that are looked at together, where steps are short."""


def short(problem: Problem, plan: Plan) -> ReplanOptions:
    """Return options by which so many usual steps are looked at together."""
    return ReplanOptions(look_s=(LOOK - 0.5) * step_s(problem, plan))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), gaps=st.lists(st.integers(4 * LOOK, 6 * LOOK), min_size=2, max_size=6))
def test_a_device_that_is_slow_for_several_short_steps_moves_nothing(seed: int, gaps: list[int]) -> None:
    """For just less than the time that is looked at together, however many steps it befalls."""
    problem, plan = planned(uneven=False)
    usual, slow = State(), State(slow={seed % 4: 8.0})
    options = short(problem, plan)
    burst = int(options.look_s * 0.9 / step_s(truth(problem, slow), plan))
    assert burst > 1
    states = [state for gap in gaps for state in (*[usual] * gap, *[slow] * burst)]
    run = follow(problem, plan, len(states), states.__getitem__, noise=even_noise(seed), options=options)
    assert not run.decisions, run.lines


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), victim=st.integers(0, 3), begin=st.integers(4 * LOOK, 8 * LOOK))
def test_a_third_of_the_speed_is_found_though_steps_are_short(seed: int, victim: int, begin: int) -> None:
    problem, plan = planned(uneven=False)
    options = short(problem, plan)
    state = changing(State(), (begin, State(slow={victim: 3.0})))
    run = follow(problem, plan, begin + 4 * LOOK, state, noise=even_noise(seed), options=options)
    (decision,) = run.decisions
    seen_s = sum(run.steps_s[begin : decision.step + 1])
    assert options.look_s < seen_s < 4.5 * options.look_s, "two to four looks, of which the first began before"
    slowest = max(run.steps_s)
    assert decision.before_s == pytest.approx(slowest, rel=0.2), "of a step, not of a look"
    assert f"device {victim} takes" in decision.why
