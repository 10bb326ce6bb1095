"""Plans whose order of actions is made for them: changes for which there is no order are no changes, and no end."""

from __future__ import annotations

import pytest

from onebox.plan import Plan, Problem, even_plan
from onebox.plan.model.layout import layout_of
from onebox.plan.replan.change_search import ChangeSearch, ChangeTerms
from tests.unit.plan.replan.simulated_cluster import State, even_noise, follow
from tests.unit.plan.replan.test_controller import changing, cluster

TERMS = ChangeTerms(horizon=100, pause_s=0.2, budget_actions=120_000, barred=lambda move: False)


def ordered(devices: int, segments: int) -> tuple[Problem, Plan]:
    problem = cluster(devices, segments=segments)
    return problem, even_plan(problem, range(devices), "auto", problem.micro_batches[0])


@pytest.mark.parametrize(("devices", "segments"), [(3, 3), (3, 6), (4, 8), (4, 12)])
def test_what_is_best_is_found_also_where_nothing_else_has_an_order(devices: int, segments: int) -> None:
    problem, plan = ordered(devices, segments)
    found = ChangeSearch(problem, plan, TERMS).best((plan,))
    assert found.step_s < float("inf")
    assert len(found.layout.parts) == len(layout_of(problem, plan).parts)


def test_a_run_with_an_order_of_its_own_is_followed_for_as_long_as_it_lasts() -> None:
    """Small changes, by which nothing is decided, and a large one in the end."""
    problem, plan = ordered(4, 8)
    usual, tired, slow = State(), State(slow={1: 1.3}), State(slow={2: 3.0})
    run = follow(problem, plan, 160, changing(usual, (20, tired), (60, usual), (120, slow)), noise=even_noise(4, 0.03))
    assert run.decisions, run.lines
    assert run.steps_s[-1] < run.steps_s[121]
