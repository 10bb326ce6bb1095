"""Plans for what is left when devices have gone: the same shape, as long as every stage finds somebody."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from onebox.engine.recovery.reduced_plan import reduced_plan
from onebox.plan import Plan, Stage

DEVICES = 8
BATCH = 12


def staged(*replicas: tuple[tuple[int, ...], ...]) -> Plan:
    stages = tuple(
        Stage(segments=(f"s{number}",), replicas=found, shares=(1.0,) * len(found))
        for number, found in enumerate(replicas)
    )
    return Plan(stages=stages, micro_batch=2)


def replicas_of(plan: Plan | None) -> list[tuple[tuple[int, ...], ...]]:
    assert plan is not None
    return [stage.replicas for stage in plan.stages]


def test_a_plan_that_lost_nobody_stays() -> None:
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=4)
    assert reduced_plan(plan, {2}, [3], 16) is plan


def test_fewer_replicas_share_the_same_micro_batches() -> None:
    plan = Plan.data_parallel([0, 1, 2], [1.0, 2.0, 3.0], micro_batch=4, sync="client")
    found = reduced_plan(plan, {1}, [], 24)
    assert found is not None
    assert found.devices == (0, 2)
    assert found.stages[0].shares == (0.25, 0.75)
    assert found.sync == "client"
    assert found.micro_batches(24) == plan.micro_batches(24)


def test_fates_formats_and_where_the_optimizer_steps_stay() -> None:
    plan = staged(((0,),), ((1,), (2,)))
    first, second = plan.stages
    stages = (replace(first, policy="recompute"), replace(second, channels_last=True))
    plan = replace(plan, stages=stages, update="host")
    for lost in (0, 2):
        found = reduced_plan(plan, {lost}, [3], 8)
        assert found is not None
        assert [stage.policy for stage in found.stages] == ["recompute", "keep"]
        assert [stage.channels_last for stage in found.stages] == [False, True]
        assert found.update == "host"


def test_what_was_one_micro_batch_each_stays_as_large() -> None:
    plan = Plan.data_parallel([0, 1, 2, 3], [1.0] * 4)
    found = reduced_plan(plan, {0, 3}, [], 24)
    assert found is not None
    assert found.devices == (1, 2)
    assert found.micro_batches(24) == plan.micro_batches(24)


def test_a_stage_keeps_its_other_replicas() -> None:
    assert replicas_of(reduced_plan(staged(((0,), (1,)), ((2,), (3,))), {1}, [4], 8)) == [((0,),), ((2,), (3,))]


def test_idle_devices_take_the_places_of_those_that_have_gone() -> None:
    assert replicas_of(reduced_plan(staged(((0,),), ((1,),)), {1}, [2, 3], 8)) == [((0,),), ((2,),)]


def test_a_device_with_two_stages_is_replaced_in_both_by_the_same_one() -> None:
    plan = staged(((0,),), ((1,),), ((0,),), ((1,),))
    assert replicas_of(reduced_plan(plan, {1}, [2, 3], 8)) == [((0,),), ((2,),), ((0,),), ((2,),)]


def test_an_idle_device_takes_one_place_only() -> None:
    assert reduced_plan(staged(((0,),), ((1,),)), {0, 1}, [2], 8) is None


def test_a_stage_with_replicas_lends_one() -> None:
    plan = staged(((0,), (1,)), ((2,),), ((3,), (4,), (5,)))
    assert replicas_of(reduced_plan(plan, {2}, [], 8)) == [((0,), (1,)), ((5,),), ((3,), (4,))]


def test_layers_that_were_split_find_a_rank_or_are_split_over_fewer() -> None:
    plan = staged(((0, 1),), ((2,),))
    assert replicas_of(reduced_plan(plan, {1}, [3], 8)) == [((0, 3),), ((2,),)]
    assert replicas_of(reduced_plan(plan, {1}, [], 8)) == [((0,),), ((2,),)]
    assert reduced_plan(plan, {0, 1}, [], 8) is None
    two = staged(((0, 1), (2, 3)), ((4,),))
    assert replicas_of(reduced_plan(two, {1, 4}, [], 8)) == [((2, 3),), ((0,),)]  # 0 has nobody to share with


def test_a_stage_with_nobody_left_is_none_of_the_same_shape() -> None:
    assert reduced_plan(staged(((0,),), ((1,),)), {1}, [], 8) is None


def test_a_schedule_that_names_devices_is_given_up() -> None:
    plan = Plan(stages=staged(((0,), (1,)), ((2,),)).stages, micro_batch=2, schedule="auto")
    found = reduced_plan(plan, {0}, [], 8)
    assert found is not None
    assert found.schedule == "1f1b"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan over some of the devices: stages of their own devices, some of them split."""
    free = draw(st.permutations(range(DEVICES)))
    stages = []
    for number in range(draw(st.integers(1, 4))):
        ranks = draw(st.integers(1, 2))
        count = draw(st.integers(1, 3))
        if ranks * count > len(free) - (3 - number):
            ranks, count = 1, 1
        replicas = tuple(tuple(free[place * ranks : (place + 1) * ranks]) for place in range(count))
        free = free[ranks * count :]
        shares = tuple(draw(st.floats(0.1, 10.0)) for _ in replicas)
        stages.append(Stage(segments=(f"s{number}", f"t{number}"), replicas=replicas, shares=shares))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "auto"]))
    return Plan(stages=tuple(stages), micro_batch=draw(st.integers(1, BATCH)), schedule=schedule)


@given(plans(), st.sets(st.integers(0, DEVICES - 1)))
def test_every_segment_is_computed_once_by_nobody_who_has_gone(plan: Plan, gone: set[int]) -> None:
    idle = [device for device in range(DEVICES) if device not in plan.devices]
    found = reduced_plan(plan, gone, idle, BATCH)
    left = set(range(DEVICES)) - gone
    if found is None:
        assert len(left) < sum(stage.ranks for stage in plan.stages)  # a rank for each would have been enough
        return
    assert [stage.segments for stage in found.stages] == [stage.segments for stage in plan.stages]
    assert set(found.devices) <= left
    places = Counter(device for stage in found.stages for replica in stage.replicas for device in replica)
    assert max(places.values()) == 1
    assert found.micro_batches(BATCH) == plan.micro_batches(BATCH)
    if found is not plan:
        assert all(abs(sum(stage.shares) - 1.0) < 1e-9 for stage in found.stages)
    assert all(new.ranks <= old.ranks for new, old in zip(found.stages, plan.stages, strict=True))
