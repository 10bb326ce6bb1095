"""Holdings: who holds a parameter, who sums its gradient, and who answers for it."""

from __future__ import annotations

import pytest

from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.engine.partition.sharding_spec import ShardingSpec, find_sharding_spec
from onebox.plan import Plan
from tests.unit.engine.nets import PLANS, build, lower, plan, programs, stage, state_of

NAMES = tuple(state_of(build()))


def holdings(made: Plan) -> ShardingSpec:
    stages = None if len(made.stages) == 1 else tuple(each.segments for each in made.stages)
    return find_sharding_spec(made, PhasePrograms(programs(2, stages, train=True, halves=False), made, halves=()))


def test_a_tied_weight_is_held_where_it_is_read() -> None:
    found = holdings(plan(stage("ab", 3), stage("cd", 1)))
    assert found.holders["model.b.weight"] == (3, 1)
    assert found.holders["model.a.weight"] == (3,)
    assert found.holders["model.d.weight"] == (1,)


def test_a_tied_weight_of_one_stage_has_one_holder() -> None:
    found = holdings(plan(stage("a", 3), stage("bcd", 1)))
    assert found.holders["model.b.weight"] == (1,)


def test_replicas_and_stages_that_share_a_weight_are_one_set() -> None:
    found = holdings(plan(stage("ab", 0, 1), stage("c", 1, 2), stage("d", 3)))
    assert found.holders["model.b.weight"] == (0, 1, 2)
    assert found.holders["model.a.weight"] == (0, 1)
    assert found.stages == (((0,), (1,)), ((1,), (2,)), ((3,),))


def test_what_is_frozen_is_held_where_it_is_read() -> None:
    found = holdings(plan(stage("ab", 0), stage("cd", 1)))
    assert found.holders["model.b.bias"] == (0,)


def test_buffers_are_held_by_the_stage_that_changes_them() -> None:
    found = holdings(plan(stage("ab", 0), stage("cd", 1, 2)))
    assert found.holders["model.norm.running_mean"] == (0,)
    assert found.holders["model.mean"] == found.holders["model.calls"] == (1, 2)


def test_equal_sets_of_workers_are_one_group_in_whatever_order_the_plan_names_them() -> None:
    """Members of a group have one order: that of the plan's devices."""
    found = holdings(plan(stage("ab", 2, 0), stage("cd", 0, 2)))
    assert {found.members(worker, stage) for worker in (0, 2) for stage in (0, 1)} == {(2, 0)}
    assert set(found.holders.values()) == {(2, 0)}
    assert found.groups(["model.a.weight", "model.d.bias"], ["model.mean"]) == [(2, 0)]


@pytest.mark.parametrize("name", PLANS)
def test_each_name_has_one_owner_and_that_is_a_holder(name: str) -> None:
    found = holdings(PLANS[name])
    for tensor, members in found.holders.items():
        owners = [worker for worker in found.devices if tensor in found.owned_by(worker, NAMES)]
        assert owners == [members[0]]
        assert [worker for worker in found.devices if tensor in found.held_by(worker, NAMES)] == list(members)
        assert list(members) == [worker for worker in found.devices if worker in members]


@pytest.mark.parametrize("name", PLANS)
def test_groups_are_those_that_sum_something_and_all_have_more_than_one_member(name: str) -> None:
    found = holdings(PLANS[name])
    groups = found.groups(NAMES, [])
    voting = {tuple(sorted(found.devices))} if len(found.devices) > 1 else set()
    summing = {members for members in found.holders.values() if len(members) > 1}
    assert summing <= set(groups) <= summing | voting
    assert found.devices in groups or voting <= set(groups)
    assert [len(members) for members in groups] == sorted(map(len, groups), reverse=True)


def test_all_that_is_exchanged_has_a_group() -> None:
    for made in PLANS.values():
        lowered = lower(made, 8, max_norm=1.0)
        needed = {lowered.holdings.holders[name] for name in lowered.trained}
        assert {members for members in needed if len(members) > 1} <= set(lowered.numbers.groups)
