"""Synthesised schedules: valid, within the memory, never slower than the named ones, the same every time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.plan import NAMED, Action, PlanWork, Routes, Schedule, auto_schedule, named_schedule, simulate, validate
from onebox.plan.schedules.critical_path import ScheduleSearch, lower_bound_s
from onebox.plan.schedules.list_scheduler import list_schedule
from onebox.plan.schedules.named import as_schedule
from onebox.plan.schedules.synthesis import dispatch_rules, one_by_one
from onebox.plan.simulate.event_loop import execute_rows
from onebox.plan.simulate.instance import instance_of
from tests.unit.plan.cases import Case, cases, edges_of, equal_links, even, work_for


def best_named_s(routes: Routes, work: PlanWork, sizes: tuple[float, ...] | None = None) -> float:
    """Return the least time of the named schedules that fit."""
    found = [
        simulate(named_schedule(name, routes, edges=edges_of(work)), routes, work, sizes, detail=False)
        for name in NAMED
    ]
    return min((one.step_s for one in found if not one.over_bytes), default=float("inf"))


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.002, 0.01]))
def test_valid_within_memory_and_never_slower_than_a_named_one(case: Case, budget_s: float) -> None:
    routes, work, sizes = case
    schedule = auto_schedule(routes, work, sizes, budget_s=budget_s)
    validate(schedule, routes, edges_of(work))
    found = simulate(schedule, *case, detail=False)
    named_s = best_named_s(*case)
    assert found.step_s <= named_s or found.over_bytes
    if named_s < float("inf"):
        assert not found.over_bytes
    if not found.over_bytes:
        validate(schedule, routes, edges_of(work), work, sizes)  # the memory, counted once more
    assert schedule == auto_schedule(routes, work, sizes, budget_s=budget_s)


def _peaks(case: Case, order: list[Action]) -> dict[int, float]:
    """Return each device's most bytes when the actions run one after another, from definitions."""
    routes, work, sizes = case
    level = {
        device: float(
            sum(work.stages[stage].state_bytes for stage, row in enumerate(routes) if any(device in who for who in row))
        )
        for row in routes
        for who in row
        for device in who
    }
    most = dict(level)
    for kind, stage, m in order:
        cost = work.stages[stage]
        for device in routes[stage][m]:
            level[device] += cost.saved_bytes * sizes[m] if kind == "F" else 0
            working = cost.forward_work_bytes if kind == "F" else cost.backward_work_bytes
            most[device] = max(most[device], level[device] + working)
            level[device] -= cost.saved_bytes * sizes[m] if kind == "B" else 0
    return most


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_schedule_is_better_than_the_bound_at_which_the_search_ends(case: Case) -> None:
    bound_s = lower_bound_s(instance_of(*case))
    for name in NAMED:
        found = simulate(named_schedule(name, case.routes, edges=edges_of(case.work)), *case, detail=False)
        assert found.step_s >= bound_s * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_what_fits_one_by_one_is_found_to_fit(case: Case) -> None:
    """Memory that is enough for one micro-batch after another always gives a schedule that fits."""
    routes, work, sizes = case
    order = [
        Action(kind, stage, m)  # type: ignore[arg-type]
        for m in range(len(sizes))
        for kind, stages in (("F", range(len(routes))), ("B", range(len(routes) - 1, -1, -1)))
        for stage in stages
    ]
    peaks = _peaks(case, order)
    found = simulate(auto_schedule(routes, work, sizes, budget_s=0.005), *case, detail=False)
    if all(peaks[device] <= limit for device, limit in work.capacity_bytes.items() if device in peaks):
        assert not found.over_bytes


@settings(max_examples=40, deadline=None)
@given(cases(wide=False), st.integers(0, 40))
def test_every_rule_heeds_the_memory(case: Case, more: int) -> None:
    """Where one micro-batch after another fits, with equal sizes, each list schedule does."""
    routes, work, _ = case
    alone = Schedule(
        rows=dict(zip(instance_of(routes, work).devices, one_by_one(instance_of(routes, work)), strict=True))
    )
    late = sum(stage.late_bytes for stage in work.stages)
    peaks = simulate(alone, routes, work, detail=False).peak_bytes
    work = replace(work, capacity_bytes={device: most + late + more for device, most in peaks.items()})
    instance = instance_of(routes, work)
    if any(len({row[m] for m in range(instance.count)}) > 1 for row in routes):
        return  # with replicas a device may have a micro-batch in one of its stages only, and no order is promised
    for rule in dispatch_rules(instance):
        found = simulate(as_schedule(instance, list_schedule(instance, rule)), routes, work, detail=False)
        assert not found.over_bytes


def test_weight_gradients_wait_for_room() -> None:
    """One stage's weight gradient needs memory to work in, which the other's frees when it has run."""
    routes: Routes = (((0,), (0,)), ((0,), (0,)))
    work = work_for(routes, capacity={0: 2})
    stages = (replace(work.stages[0], backward_work_bytes=1), replace(work.stages[1], late_bytes=1))
    work = replace(work, stages=stages)
    instance = instance_of(routes, work)
    for rule in dispatch_rules(instance):
        found = simulate(as_schedule(instance, list_schedule(instance, rule)), routes, work, detail=False)
        assert not found.over_bytes


def test_room_is_kept_for_the_oldest_micro_batch() -> None:
    """The first device waits for the way there and back with room for its last stage, not with two first ones."""
    routes = even(2, 4, 2, vee=True)
    work = work_for(routes, saved_bytes=10, capacity={0: 20, 1: 20})
    instance = instance_of(routes, work)
    for rule in dispatch_rules(instance):
        found = simulate(as_schedule(instance, list_schedule(instance, rule)), routes, work, detail=False)
        assert not found.over_bytes


def test_work_on_the_critical_path_mends_a_bad_start() -> None:
    routes = even(3, 6)
    work = work_for(routes, size_bytes=1, links=equal_links({0, 1, 2}, latency_s=0.5))
    instance = instance_of(routes, work)
    search = ScheduleSearch(instance, 0.2)
    start = one_by_one(instance)
    search.consider(start)
    search.improve()
    schedule = as_schedule(instance, search.rows)
    validate(schedule, routes)
    before = simulate(as_schedule(instance, start), routes, work, detail=False).step_s
    assert simulate(schedule, routes, work, detail=False).step_s < 0.6 * before


def test_memory_is_used_up_to_the_cap_and_not_beyond() -> None:
    """With more memory the step takes less, until there is enough to reach the bound."""
    routes = even(4, 8)
    times = []
    for held in (1, 2, 4, 6, 8):
        work = work_for(routes, capacity=dict.fromkeys(range(4), 10 * held + 5), saved_bytes=10, late_bytes=5)
        found = simulate(auto_schedule(routes, work), routes, work)
        assert not found.over_bytes
        times.append(found.step_s)
    assert times[0] > times[1] > times[2] == times[3] == times[4] == 8 * 3 + 3


def test_where_nothing_fits_it_lacks_as_little_as_can_be() -> None:
    routes = even(2, 4)
    work = work_for(routes, capacity={0: 3, 1: 100}, saved_bytes=10)
    found = simulate(auto_schedule(routes, work), routes, work)
    assert found.over_bytes == {0: 7}


def test_slow_links_are_hidden_by_more_micro_batches_in_flight() -> None:
    routes = even(2, 16)
    work = work_for(routes, size_bytes=1, links=equal_links({0, 1}, latency_s=3.0))
    busy_s, ramp_s = 16 * 3, 1 + 3  # the second device starts after a forward and a message
    found = simulate(auto_schedule(routes, work), routes, work, detail=False)
    assert found.step_s == busy_s + ramp_s
    assert best_named_s(routes, work) > busy_s + ramp_s


def test_backward_is_split_only_where_that_gains() -> None:
    routes = even(1, 4)
    work = work_for(routes, call_s=0.1)
    schedule = auto_schedule(routes, work)
    assert {action.kind for action in schedule.rows[0]} == {"F", "B"}


@pytest.mark.parametrize("vee", [False, True])
def test_even_devices_are_brought_near_the_bound(vee: bool) -> None:
    routes = even(4, 12, 2, vee=vee)
    found = simulate(auto_schedule(routes, work_for(routes)), routes, work_for(routes), detail=False)
    assert found.step_s == 12 * 6 + 3  # all work, and the ramp until the last device has something to do


def test_uneven_stages() -> None:
    routes = even(3, 10)
    work = work_for(routes, seconds=[(1.0, 1.5, 0.5), (2.0, 1.0, 1.0), (0.5, 0.5, 0.5)])
    found = simulate(auto_schedule(routes, work), routes, work, detail=False)
    # the busiest stage begins after 1 and never waits; its last weight gradients end together with the first stage
    assert found.step_s == 1 + 10 * 4


@pytest.mark.feature("Pipelines: Synthesise a schedule for uneven stages")
def test_uneven_stages_and_links_gain_over_every_named_schedule() -> None:
    routes = even(4, 10)
    seconds = [(1.0, 1.5, 0.5), (2.0, 1.0, 1.0), (0.5, 0.5, 0.5), (1.2, 0.7, 1.6)]
    work = work_for(routes, seconds=seconds, size_bytes=1, links=equal_links({0, 1, 2, 3}, latency_s=0.7))
    found = simulate(auto_schedule(routes, work), routes, work, detail=False)
    assert found.step_s < 0.97 * best_named_s(routes, work)


def every_row(stage: int, micro_batches: int) -> list[tuple[Action, ...]]:
    """Return every order in which a device may run one stage, each backward whole or split, each kind ascending."""
    found: list[tuple[Action, ...]] = []

    def extend(row: tuple[Action, ...], forward: int, back: int, late: tuple[int, ...]) -> None:
        if forward == back == micro_batches and not late:
            found.append(row)
        if forward < micro_batches:
            extend((*row, Action("F", stage, forward)), forward + 1, back, late)
        if back < forward:
            extend((*row, Action("B", stage, back)), forward, back + 1, late)
            extend((*row, Action("I", stage, back)), forward, back + 1, (*late, back))
        if late:
            extend((*row, Action("W", stage, late[0])), forward, back, late[1:])

    extend((), 0, 0, ())
    return found


def best_of_all_s(routes: Routes, work: PlanWork) -> float:
    """Return the least time over every schedule of a chain with one stage a device."""
    instance = instance_of(routes, work)
    count = instance.count
    best = float("inf")
    for rows in product(*(every_row(stage, count) for stage in range(len(routes)))):
        played = execute_rows(instance, rows)
        if all(done == len(row) for done, row in zip(played.done, rows, strict=True)):
            best = min(best, max(played.free))
    return best


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from([0.5, 1.0, 1.7])] * 3), min_size=2, max_size=3),
    st.sampled_from([0.0, 0.4, 2.0]),
)
def test_near_the_best_of_all_schedules(seconds: list[tuple[float, float, float]], latency_s: float) -> None:
    routes = even(len(seconds), 2)
    links = equal_links(set(range(len(seconds))), latency_s=latency_s)
    work = work_for(routes, seconds=seconds, size_bytes=1, links=links)
    found = simulate(auto_schedule(routes, work, budget_s=0.02), routes, work, detail=False)
    assert found.step_s <= 1.02 * best_of_all_s(routes, work)
