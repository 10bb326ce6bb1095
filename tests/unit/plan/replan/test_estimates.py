"""Estimates of devices that are not in use: of their segments, which others compute, and of their updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from onebox.plan import Plan, TimedTask, stage_work
from onebox.plan.replan.estimates import RateEstimator
from tests.unit.plan.replan.simulated_cluster import State, even_noise, measured, noisy, step_s
from tests.unit.plan.replan.test_controller import changing
from tests.unit.plan.replan.test_network_rates import followed, lab, staged

PATIENCE = 40
"""Steps without use after which a slow device is tried again."""


def by_degrees(*used: int, begin: int, each: int, links: dict[tuple[int, int], float]) -> Callable[[int], State]:
    """Return that some devices become slow by degrees, which take some steps each, and are as before all at once."""
    usual, *degrees = (State(slow=dict.fromkeys(used, factor), links=links) for factor in (1.0, 1.35, 1.8, 2.4))
    begins = range(begin, begin + 3 * each, each)
    return changing(usual, *zip(begins, degrees, strict=True), (begin + 3 * each, usual))


@pytest.mark.parametrize("seed", range(8))
def test_segments_that_look_slow_because_of_their_device_are_as_planned_again_with_it(seed: int) -> None:
    problem, noise = lab("abc"), even_noise(seed, 0.05)
    plan, states = staged(problem, (0,), (1,)), by_degrees(0, 1, begin=10, each=25, links={})
    estimates, told = RateEstimator(problem, plan, PATIENCE), []
    for step in range(100):
        told += estimates.see(noisy(measured(problem, states(step), plan), step, noise))
    now = estimates.problem()
    for device, own in zip(now.devices, problem.devices, strict=True):
        for segment, planned in zip(now.segments, problem.segments, strict=True):
            assert segment.forward_s[device.type].sample_s == pytest.approx(planned.forward_s[own.type].sample_s, 0.1)
    last = {change.what: change for change in told}["the work of device 1"]
    assert last.text.startswith("the work of device 1 takes as long as planned since step 8")


@pytest.mark.parametrize("seed", range(8))
def test_an_idle_device_is_used_again_after_the_others_were_slow_by_degrees(seed: int) -> None:
    problem = lab("abc", value_bytes=50_000, seconds=4e-3)
    plan, noise = staged(problem, (0,), (1,), (2,)), even_noise(seed, 0.05)
    away = {(0, 2): 100.0, (1, 2): 100.0}
    states, usual = by_degrees(0, 1, 2, begin=40, each=25, links=away), State()
    controller, made = followed(
        problem,
        plan,
        180,
        lambda step: states(step) if 20 <= step < 120 else usual,
        change=lambda seen: noisy(seen, seen.step, noise),
    )
    assert any(2 not in after.devices for _, _, after in made)
    assert step_s(problem, controller.plan) < 1.05 * step_s(problem, plan), [line for _, line, _ in made]


def test_the_update_of_a_device_that_is_not_used_is_as_planned_again_some_day() -> None:
    problem = lab("abc")
    plan = Plan.data_parallel([0, 1, 2], [1.0] * 3, micro_batch=4)
    estimates, told = RateEstimator(problem, plan, PATIENCE), []
    usual = measured(problem, State(), plan)
    for step in range(5):
        slow = {**usual.update_s, 1: 30 * usual.update_s[1], 2: 30 * usual.update_s[2]}
        estimates.see(replace(usual, step=step, update_s=slow))
    before = dict(problem.segments[0].update_s)["quick"]
    assert estimates.problem().segments[0].update_s["quick@2"] == pytest.approx(30 * before)
    fewer = Plan.data_parallel([0, 1], [1.0] * 2, micro_batch=4)
    estimates.follow(fewer)
    for step in range(5, 5 + PATIENCE):
        seen = measured(problem, State(), fewer)
        told = estimates.see(replace(seen, step=step, update_s={**seen.update_s, 1: 30 * seen.update_s[1]}))
    (change,) = told
    assert change.text == "device 2, which was slow, has not been used for long and is tried again"
    assert estimates.problem().segments[0].update_s["quick@2"] == pytest.approx(before)
    assert estimates.problem().segments[0].update_s["quick@1"] == pytest.approx(30 * before), "it is in use"


def test_a_stage_that_computes_both_gradients_at_once_where_others_have_halves_is_as_planned() -> None:
    """The first stage of a pipeline: nobody waits for the gradient of its inputs."""
    problem = lab("ab")
    plan = msgspec.structs.replace(staged(problem, (0,), (1,)), schedule="zb-h1")
    usual, work = measured(problem, State(), plan), stage_work(problem, plan)
    actions = {task: took for task, took in usual.actions.items() if task.kind == "F"}
    both = usual.actions[TimedTask(0, 0, "B")]
    actions[TimedTask(0, 0, "W")] = both
    actions[TimedTask(1, 1, "I")] = both._replace(mean_s=work.stages[1].input_s[1])
    actions[TimedTask(1, 1, "W")] = both._replace(mean_s=work.stages[1].weight_s[1])
    estimates, told = RateEstimator(problem, plan, PATIENCE), []
    for step in range(20):
        told += estimates.see(replace(usual, step=step, actions=actions))
    assert told == []
    slow = {task: took._replace(mean_s=took.mean_s * (1 if task.device else 3)) for task, took in actions.items()}
    for step in range(20, 30):
        told += estimates.see(replace(usual, step=step, actions=slow))
    assert told[0].text.startswith("device 0 takes 3.0 × as long as planned")
