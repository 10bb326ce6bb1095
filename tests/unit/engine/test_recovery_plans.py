"""Plans for what is left when devices have gone."""

from __future__ import annotations

import pytest

from onebox.engine.replan import plan_without
from onebox.errors import PlanError
from onebox.plan import Plan, Stage


def staged(*replicas: tuple[tuple[int, ...], ...]) -> Plan:
    stages = tuple(
        Stage(segments=(f"s{number}",), replicas=found, shares=(1.0,) * len(found))
        for number, found in enumerate(replicas)
    )
    return Plan(stages=stages, micro_batch=2)


def test_a_plan_that_lost_nobody_stays() -> None:
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=4)
    assert plan_without(plan, {2}, [3], 16) is plan


def test_fewer_replicas_share_the_same_micro_batches() -> None:
    plan = Plan.data_parallel([0, 1, 2], [1.0, 2.0, 3.0], micro_batch=4, sync="client")
    found = plan_without(plan, {1}, [], 24)
    assert found.devices == (0, 2)
    assert found.stages[0].shares == (1.0, 3.0)
    assert found.sync == "client"
    assert found.micro_batches(24) == plan.micro_batches(24)


def test_what_was_one_micro_batch_each_stays_as_large() -> None:
    plan = Plan.data_parallel([0, 1, 2, 3], [1.0] * 4)
    found = plan_without(plan, {0, 3}, [], 24)
    assert found.devices == (1, 2)
    assert found.micro_batches(24) == plan.micro_batches(24)


def test_a_stage_keeps_its_other_replicas() -> None:
    found = plan_without(staged(((0,), (1,)), ((2,), (3,))), {1}, [], 8)
    assert [stage.replicas for stage in found.stages] == [((0,),), ((2,), (3,))]


def test_idle_devices_take_the_places_of_those_that_have_gone() -> None:
    found = plan_without(staged(((0,),), ((1,),)), {1}, [2, 3], 8)
    assert [stage.replicas for stage in found.stages] == [((0,),), ((2,),)]


def test_an_idle_device_takes_one_place_only() -> None:
    with pytest.raises(PlanError, match="stage 1 was on device 1"):
        plan_without(staged(((0,),), ((1,),)), {0, 1}, [2], 8)


def test_a_stage_with_nobody_left_is_refused() -> None:
    with pytest.raises(PlanError, match="resume from the last checkpoint") as caught:
        plan_without(staged(((0,),), ((1,),)), {1}, [], 8)
    assert caught.value.stage == 1


def test_a_schedule_that_names_devices_is_given_up() -> None:
    plan = Plan(
        stages=staged(((0,), (1,)), ((2,),)).stages,
        micro_batch=2,
        schedule="auto",
    )
    assert plan_without(plan, {0}, [], 8).schedule == "1f1b"
