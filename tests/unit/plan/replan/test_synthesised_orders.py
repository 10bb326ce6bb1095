"""Plans whose order of actions is made for them; it is of no use for other stages and shares, which get another one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from onebox.plan import Plan, Problem, even_plan
from onebox.plan.model.layout import layout_of
from onebox.plan.replan.change_search import ChangeSearch, ChangeTerms
from onebox.plan.replan.changes import changed_plan
from onebox.plan.replan.step_times import StepTimes
from tests.unit.plan.replan.simulated_cluster import State, even_noise, follow, noisy, step_s, truth
from tests.unit.plan.replan.test_controller import changing, cluster
from tests.unit.plan.replan.test_network_rates import followed, lab, staged

TERMS = ChangeTerms(horizon=100, pause_s=0.2, budget_actions=120_000, barred=lambda move: False)


def ordered(devices: int, segments: int) -> tuple[Problem, Plan]:
    problem = cluster(devices, segments=segments)
    return problem, even_plan(problem, range(devices), "auto", problem.micro_batches[0])


def tabled(problem: Problem, plan: Plan) -> Plan:
    """Return a plan with an order of actions that is made for it."""
    times = StepTimes(problem, plan, TERMS.budget_actions)
    return msgspec.structs.replace(plan, schedule="table", table=times.made(times.now).lines())


@pytest.mark.parametrize(("devices", "segments"), [(3, 3), (3, 6), (4, 8), (4, 12)])
def test_what_is_best_is_found_also_where_nothing_else_has_an_order(devices: int, segments: int) -> None:
    problem, plan = ordered(devices, segments)
    search = ChangeSearch(problem, plan, TERMS)
    found = search.best((plan,))
    assert found.step_s <= search.before_s
    assert len(found.layout.parts) == len(layout_of(problem, plan).parts)


@pytest.mark.parametrize("schedules", [("1f1b", "auto"), ("gpipe",), ("auto",)])
def test_an_idle_device_joins_stages_that_have_an_order_of_their_own(schedules: tuple[str, ...]) -> None:
    problem = replace(lab("abc"), schedules=schedules)
    plan = tabled(problem, staged(problem, (0,), (1,)))
    search = ChangeSearch(problem, plan, TERMS)
    found = search.best(())
    after = changed_plan(plan, problem, found)
    assert set(after.devices) == {0, 1, 2}
    named = [name for name in schedules if name != "auto"] or ["1f1b"]
    assert after.schedule in (*named, "table")
    assert step_s(problem, after) == pytest.approx(found.step_s)
    assert found.step_s < 0.8 * search.before_s


def test_a_slow_replica_gets_a_smaller_share_though_its_stage_has_an_order_of_its_own() -> None:
    problem = replace(lab("abc"), batch=48)
    plan = tabled(problem, staged(problem, (0,), (1, 2)))
    slow = truth(problem, State(slow={2: 4.0}))
    found = ChangeSearch(slow, plan, TERMS).best(())
    (_, shared) = found.layout.parts
    assert len(shared.devices) == 1 or shared.shares[0] > 2 * shared.shares[1]
    assert found.step_s < 0.8 * step_s(slow, plan)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_a_replica_behind_a_link_that_drops_is_back_in_a_hybrid_plan_of_any_order(
    seed: int, first: bool, cut: int
) -> None:
    """Without it, the order of actions is often one that is made for the two devices that are left."""
    problem = replace(lab("abc", value_bytes=50_000, seconds=4e-3), schedules=("gpipe", "1f1b", "zb-h1", "auto"))
    plan = staged(problem, *([(1, 2), (0,)] if first else [(0,), (1, 2)]), cut=cut if not first else 6 - cut)
    slow = State(links={(0, 2): 100.0, (1, 2): 100.0})
    states = changing(State(), (20, slow), (50, State()))
    noise = even_noise(seed)
    controller, made = followed(problem, plan, 150, states, change=lambda seen: noisy(seen, seen.step, noise))
    assert any(2 not in after.devices for _, _, after in made)
    assert step_s(problem, controller.plan) < 1.05 * step_s(problem, plan), [line for _, line, _ in made]


def test_a_run_with_an_order_of_its_own_is_followed_for_as_long_as_it_lasts() -> None:
    """Small changes, by which nothing is decided, and a large one in the end."""
    problem, plan = ordered(4, 8)
    usual, tired, slow = State(), State(slow={1: 1.3}), State(slow={2: 3.0})
    run = follow(problem, plan, 160, changing(usual, (20, tired), (60, usual), (120, slow)), noise=even_noise(4, 0.03))
    assert run.decisions, run.lines
    assert run.steps_s[-1] < run.steps_s[121]
