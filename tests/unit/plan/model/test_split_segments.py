"""Costs of stages whose layers are split: work of a rank, collectives, memory, traffic; plans and layouts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from onebox.errors import UsageError
from onebox.plan import Plan, Problem, Stage, predict, stage_work
from onebox.plan.evaluate.traffic import gradient_traffic, rank_traffic, step_traffic, value_traffic
from onebox.plan.model.crowding import wake_up_delays
from onebox.plan.model.layout import LayoutStage, layout_of, plan_of
from onebox.plan.model.problem import DeviceSpec, RankMessages, SegmentValue, SplitSegment
from onebox.plan.replan.controller import ReplanController
from tests.unit.plan.problems import links, random_problem, segment, with_splits

LATENCY_S, BPS, CALL_S = 1e-4, 1e8, 1e-5


def problem() -> Problem:
    """Return two segments over four devices, each of which may be split over two."""
    parts = (
        SplitSegment(
            forward_share=0.5,
            backward_share=0.6,
            forward=RankMessages(gathers=1, sample_bytes=1000),
            backward=RankMessages(sums=2, fixed_bytes=500, sample_bytes=100),
            forward_end_bytes=4000,
            parameter_bytes=600,
            state_bytes=2400,
            saved_bytes=50,
        ),
        SplitSegment(
            forward_share=0.75,
            backward_share=1.0,
            forward=RankMessages(sums=1, sample_bytes=300),
            backward_end_bytes=6000,
            parameter_bytes=1000,
            state_bytes=4000,
            saved_bytes=100,
        ),
    )
    return Problem(
        segments=(segment("a", 1e-3, state=4000, saved=100), segment("b", 2e-3, state=8000, saved=200)),
        devices=tuple(DeviceSpec(number=number, type="quick", host="h") for number in range(4)),
        links=links(4, latency_s=LATENCY_S, bandwidth_bps=BPS),
        batch=4,
        micro_batches=(2, 4),
        values=(SegmentValue(source=0, consumers=(1,), forward_bytes=4000, backward_bytes=6000),),
        call_s=CALL_S,
        splits={2: parts},
    )


def split(*replicas: tuple[int, ...], micro_batch: int = 4) -> Plan:
    return Plan(stages=(Stage(replicas=replicas, shares=(1.0,) * len(replicas)),), micro_batch=micro_batch)


def test_a_rank_has_its_part_of_the_work_and_waits_for_collectives() -> None:
    (stage,) = stage_work(problem(), split((0, 1))).stages
    forward_s = 4 * (0.5 * 1e-3 + 0.75 * 2e-3)
    collective_s = (1 + 2) * LATENCY_S + 4 * 1300 / BPS + 2 * CALL_S
    assert stage.forward_s == {d: pytest.approx(forward_s + collective_s) for d in (0, 1)}
    backward_s = 4 * (0.6 * 1e-3 + 2e-3)
    collective_s = 2 * 2 * LATENCY_S + (500 + 4 * 100) / BPS + 2 * CALL_S
    assert stage.input_s == {d: pytest.approx(backward_s + collective_s) for d in (0, 1)}
    assert stage.weight_s == {d: pytest.approx(backward_s) for d in (0, 1)}
    assert (stage.gradient_bytes, stage.state_bytes, stage.saved_bytes) == (1600, 6400, 4 * 150)
    whole = stage_work(problem(), Plan.data_parallel([0], [1.0], micro_batch=4)).stages[0]
    assert stage.update_s[0] == pytest.approx(whole.update_s[0] * (600 / 1000 * 4000 + 1000 / 2000 * 8000) / 12000)


def test_ranks_wake_up_late_for_the_messages_of_collectives_beside_other_programs() -> None:
    idle, given = replace(problem(), cores={"h": 2.0}), split((0, 1))
    devices = tuple(replace(device, processor=True, threads=1.0) for device in idle.devices)
    idle = replace(idle, devices=devices)
    busy = replace(idle, load={"h": 1.0})
    late_s = wake_up_delays(busy, (0, 1))["h"]
    assert late_s > 0
    (alone,), (beside,) = stage_work(idle, given).stages, stage_work(busy, given).stages
    whole = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=4)
    slower = stage_work(busy, whole).stages[0].forward_s[0] / stage_work(idle, whole).stages[0].forward_s[0]
    computing_s = alone.forward_s[0] - (1 + 2) * LATENCY_S - 4 * 1300 / BPS - 2 * CALL_S
    assert beside.forward_s[0] - alone.forward_s[0] == pytest.approx((slower - 1) * computing_s + (1 + 2) * late_s)


def test_what_ranks_hold_in_shares_is_gathered_at_the_ends_of_a_stage() -> None:
    stages = (
        Stage(segments=("a",), replicas=((0, 1),), shares=(1.0,)),
        Stage(segments=("b",), replicas=((2, 3),), shares=(1.0,)),
    )
    first, second = stage_work(problem(), Plan(stages=stages, micro_batch=4)).stages
    end_s = LATENCY_S + 4 * 4000 / 2 / BPS + CALL_S
    assert first.forward_s[0] == pytest.approx(4 * 0.5e-3 + LATENCY_S + 4 * 1000 / BPS + CALL_S + end_s)
    end_s = LATENCY_S + 4 * 6000 / 2 / BPS + CALL_S
    assert second.input_s[2] == pytest.approx(4 * 2e-3 + end_s)


def test_groups_are_replicas_of_each_other_rank_by_rank() -> None:
    plan, given = split((0, 1), (2, 3), micro_batch=2), problem()
    predicted, simulation = predict(given, plan)
    assert set(simulation.busy_s) == {0, 1, 2, 3}
    assert len(predicted.replicas_s[0]) == 2
    sums = gradient_traffic(given, plan)
    assert set(sums) == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert set(sums.values()) == {1600.0}
    ranks = rank_traffic(given, plan)
    assert set(ranks) == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert set(ranks.values()) == {2 * (1300 + 100) + 500}
    assert not value_traffic(given, plan)
    assert step_traffic(given, plan) == {**sums, **ranks}


def test_a_rank_holds_its_part() -> None:
    given = problem()
    whole, _ = predict(given, Plan.data_parallel([0], [1.0], micro_batch=4))
    halves, simulation = predict(given, split((0, 1)))
    assert halves.peak_bytes[0] == halves.peak_bytes[1] < 0.75 * whole.peak_bytes[0]
    tight = tuple(replace(device, capacity_bytes=halves.peak_bytes[0] - 1) for device in given.devices)
    assert predict(replace(given, devices=tight), split((0, 1)))[1].over_bytes == {0: 1, 1: 1}
    assert not simulation.over_bytes


@pytest.mark.parametrize("seed", range(6))
def test_plans_with_groups_are_layouts_and_back(seed: int) -> None:
    given = with_splits(Random(seed), random_problem(Random(seed), 4, 4), 2)
    names = [one.name for one in given.segments]
    stages = (
        Stage(segments=tuple(names[:2]), replicas=((3, 1),), shares=(1.0,)),
        Stage(segments=tuple(names[2:]), replicas=((0,), (2,)), shares=(0.5, 0.5)),
    )
    for plan in (
        Plan(stages=stages, micro_batch=2, schedule="zb-h1"),
        Plan(stages=(Stage(replicas=((0, 1), (3, 2)), shares=(0.25, 0.75)),), micro_batch=2),
    ):
        assert plan_of(given, layout_of(given, plan)) == plan


def test_replicas_of_a_layout() -> None:
    assert LayoutStage((0,), (5, 4, 3, 2), (0.5, 0.5), ranks=2).replicas == ((5, 4), (3, 2))
    assert LayoutStage((0,), (5, 4), (0.5, 0.5)).replicas == ((5,), (4,))


def test_numbers_of_ranks_without_times_are_refused() -> None:
    for given in (problem(), replace(problem(), splits={})):
        with pytest.raises(UsageError, match="no times are known"):
            layout_of(given, split((0, 1, 2, 3)) if given.splits else split((0, 1)))
    with pytest.raises(UsageError, match="1 segments over 2 ranks: there are 2"):
        replace(problem(), splits={2: problem().splits[2][:1]})
    with pytest.raises(UsageError, match="a finite part"):
        SplitSegment(forward_share=-0.1, backward_share=1.0)


def test_plans_that_split_layers_are_not_adapted() -> None:
    with pytest.raises(UsageError, match="no times are known"):
        ReplanController(problem(), split((0, 1)), 4)
