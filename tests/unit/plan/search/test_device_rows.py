"""Stages on groups of consecutive devices: within memory, near the best groups and cuts, and used by the search."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest

from onebox.plan import Problem, predict, search
from onebox.plan.evaluate.bounds import least_step
from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import StageLayout
from onebox.plan.search.device_rows import DeviceOrder, RowLimits
from tests.unit.plan.problems import exhaustive, links, random_problem

HOUR_S = 3600.0


def chain_problem(seed: int, segments: int, devices: int) -> Problem:
    problem = random_problem(Random(seed), segments, devices, skips=False)
    return replace(problem, links=links(devices), batch=64, micro_batches=(1,), schedules=("1f1b",))


def busiest_s(evaluator: Evaluator, layout: StageLayout) -> float:
    """Return the seconds of the busiest device in a step, without waiting."""
    case, spent = evaluator.case(layout), dict[int, float]()
    for stage, row in zip(case.work.stages, case.routes, strict=True):
        for (device,) in row:
            took = stage.forward_s[device] + stage.input_s[device] + stage.weight_s[device] + 2 * case.work.call_s
            spent[device] = spent.get(device, 0.0) + took
    return max(spent.values())


@pytest.mark.parametrize("seed", range(4))
def test_groups_and_cuts_are_nearly_the_best_of_all(seed: int) -> None:
    problem = chain_problem(seed, 6, 4)
    evaluator = Evaluator(problem, effort=10**9, expired=lambda: False)
    order, row = tuple(range(6)), (0, 1, 2, 3)
    limits = RowLimits(samples=1, count=64, widest=4)
    found = DeviceOrder(evaluator.costs, order, row, limits).partition(1)
    every = []
    for stages in range(1, 5):
        for groups in combinations(range(1, 4), stages - 1):
            for cuts in combinations(range(1, 6), stages - 1):
                places = pairwise((0, *groups, 4))
                parts = [
                    found[0]._replace(
                        segments=order[a:b],
                        devices=row[first:end],
                        shares=evaluator.costs.shares(row[first:end], 1),
                    )
                    for (a, b), (first, end) in zip(pairwise((0, *cuts, 6)), places, strict=True)
                ]
                every.append(busiest_s(evaluator, StageLayout(tuple(parts), 1, "1f1b")))
    assert [index for part in found for index in part.segments] == list(order)
    assert [device for part in found for device in part.devices] == list(row)
    assert busiest_s(evaluator, StageLayout(found, 1, "1f1b")) <= 1.05 * min(every)


@pytest.mark.parametrize("seed", range(4))
def test_stages_fit_the_memory_of_their_devices(seed: int) -> None:
    problem = chain_problem(seed, 24, 6)
    whole = sum(one.state_bytes for one in problem.segments)
    rooms = [int(whole * part) for part in (0.25, 0.3, 0.5, 0.35, 0.3, 0.6)]
    devices = [replace(one, capacity_bytes=room) for one, room in zip(problem.devices, rooms, strict=True)]
    evaluator = Evaluator(replace(problem, devices=tuple(devices)), effort=10**9, expired=lambda: False)
    limits = RowLimits(samples=1, count=64, widest=6)
    parts = DeviceOrder(evaluator.costs, tuple(range(24)), tuple(range(6)), limits).partition(1)
    evaluation = evaluator.evaluate(StageLayout(parts, 1, "1f1b"))
    assert not evaluation.over_bytes
    tight = replace(problem, devices=tuple(replace(one, capacity_bytes=whole // 10) for one in problem.devices))
    assert not DeviceOrder(CostModel(tight), tuple(range(24)), tuple(range(6)), limits).partition(1)


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_stages_have_the_memory_for_gradients_that_zb_h1_defers(seed: int) -> None:
    problem = replace(chain_problem(seed, 24, 6), schedules=("1f1b", "zb-h1"))
    segments = tuple(
        replace(one, saved_bytes=4 * one.saved_bytes, late_bytes=one.saved_bytes) for one in problem.segments
    )
    whole = sum(one.state_bytes for one in segments)
    devices = tuple(replace(one, capacity_bytes=int(0.36 * whole)) for one in problem.devices)
    evaluator = Evaluator(replace(problem, segments=segments, devices=devices), effort=10**9, expired=lambda: False)
    limits = RowLimits(samples=1, count=64, widest=6)
    parts = DeviceOrder(evaluator.costs, tuple(range(24)), tuple(range(6)), limits).partition(1)
    assert parts
    assert not evaluator.evaluate(StageLayout(parts, 1, "zb-h1")).over_bytes


def test_devices_of_a_stage_are_equally_quick_where_that_is_asked_for() -> None:
    problem = chain_problem(0, 24, 8)
    speeds = (1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.25)
    kind = problem.devices[0].type
    devices = tuple(replace(one, type=kind, speed=speed) for one, speed in zip(problem.devices, speeds, strict=True))
    evaluator = Evaluator(replace(problem, devices=devices), effort=10**9, expired=lambda: False)
    limits = RowLimits(samples=1, count=64, widest=8)
    mixed, even = (
        DeviceOrder(evaluator.costs, tuple(range(24)), tuple(range(8)), replace(limits, spread=spread)).partition(2)
        or DeviceOrder(evaluator.costs, tuple(range(24)), tuple(range(8)), replace(limits, spread=spread)).partition(1)
        for spread in (float("inf"), 1.1)
    )
    assert any(len({speeds[device] for device in part.devices}) > 1 for part in mixed)
    assert all(len({speeds[device] for device in part.devices}) == 1 for part in even)
    assert any(len(part.devices) > 1 for part in even)
    layouts = [StageLayout(parts, 1, "1f1b") for parts in (mixed, even)]
    assert evaluator.estimate(layouts[0]) > evaluator.bound(layouts[0])
    assert evaluator.estimate(layouts[1]) == evaluator.bound(layouts[1])


def test_groups_are_not_narrower_than_asked_nor_wider_than_allowed() -> None:
    problem = chain_problem(0, 24, 8)
    costs = CostModel(problem)
    for widest, narrowest in ((8, 2), (1, 1), (3, 2)):
        limits = RowLimits(samples=1, count=64, widest=widest)
        parts = DeviceOrder(costs, tuple(range(24)), tuple(range(8)), limits).partition(narrowest)
        assert parts
        assert all(narrowest <= len(part.devices) <= widest for part in parts)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_quicker_than_the_least_step(seed: int) -> None:
    problem = random_problem(Random(seed), 4 + seed % 2, 2 + seed % 2, tight=seed % 3 == 2)
    best_s, _ = exhaustive(problem)
    assert least_step(problem) <= best_s
    assert least_step(problem) <= search(problem, budget_s=HOUR_S, effort=200_000).simulation.step_s


def test_devices_of_uneven_speed_and_memory_are_used_well() -> None:
    """100 segments on 16 devices of three speeds, which hold from 15 to 40 % of the model each."""
    problem = replace(random_problem(Random(1), 100, 16, skips=False), links=links(16))
    whole = sum(one.state_bytes for one in problem.segments)
    rooms = [int(whole * part) for part in (0.15, 0.25, 0.4, 0.15)]
    devices = tuple(replace(one, capacity_bytes=rooms[one.number // 4]) for one in problem.devices)
    problem = replace(
        problem, devices=devices, batch=512, micro_batches=(1, 2, 4, 8), schedules=("1f1b", "zb-h1"), policies=("keep",)
    )
    result = search(problem, budget_s=HOUR_S, effort=340_000)
    assert not predict(problem, result.plan)[1].over_bytes
    assert least_step(problem) / result.simulation.step_s >= 0.86
