"""Slowdown of processors that share cores: cases computed by hand, and pipelines against rates at each moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onebox.plan import ComputeTime, DeviceSpec, Links, Plan, Problem, Segment, SegmentValue, Stage, predict
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.crowding import TURN_S, crowding, wake_up_delays
from onebox.plan.model.layout import layout_of


def machine(seconds: tuple[float, ...] = (1.0, 1.0), *, cores: float = 2.0, load: float = 0.0) -> Problem:
    """Return a chain of segments for as many processors of one host; forward and backward of a sample take as long."""
    numbers = range(len(seconds))
    segments = tuple(
        Segment(
            name=f"s{number}",
            forward_s={"cpu": ComputeTime(sample_s=one_s)},
            input_s={"cpu": ComputeTime(sample_s=one_s)},
            weight_s={"cpu": ComputeTime()},
            update_s={"cpu": 0.0},
        )
        for number, one_s in enumerate(seconds)
    )
    return Problem(
        segments=segments,
        devices=tuple(DeviceSpec(number=n, type="cpu", host="h", processor=True, threads=1.0) for n in numbers),
        links=Links(
            latency_s={a: dict.fromkeys(numbers, 0.0) for a in numbers},
            bandwidth_bps={a: dict.fromkeys(numbers, 1e30) for a in numbers},
        ),
        batch=2,
        micro_batches=(1, 2),
        values=tuple(
            SegmentValue(source=n, consumers=(n + 1,), forward_bytes=1, backward_bytes=1) for n in numbers[:-1]
        ),
        cores={"h": cores},
        load={"h": load},
    )


def pipeline(problem: Problem, micro_batch: int, schedule: str = "gpipe") -> Plan:
    """Return the plan with a stage on each device."""
    stages = tuple(
        Stage(segments=(segment.name,), replicas=((number,),), shares=(1.0,))
        for number, segment in enumerate(problem.segments)
    )
    return Plan(stages=stages, micro_batch=micro_batch, schedule=schedule)


@pytest.mark.parametrize(
    ("busy", "expected", "why"),
    [
        ({0: 1.0}, {0: 1.0}, "one thread and one core of load, two cores"),
        ({0: 1.0, 1: 1.0}, {0: 1.5, 1: 1.5}, "three threads on two cores"),
        ({0: 0.5, 1: 0.5}, {0: 1.0, 1: 1.0}, "they take turns, as some device of a plan runs at any moment"),
        ({0: 1.0, 1: 0.5}, {0: 1.25, 1: 1.5}, "one runs alone for half of the time, the other never"),
        ({0: 0.75, 1: 0.75}, {0: 1 + 1 / 3, 1: 1 + 1 / 3}, "both for half of a step, two thirds of their own time"),
    ],
)
def test_each_device_counts_the_others_while_it_computes(
    busy: dict[int, float], expected: dict[int, float], why: str
) -> None:
    measured = 1.5  # both at work beside the load
    assert crowding(machine(load=1.0), busy) == pytest.approx({n: one / measured for n, one in expected.items()}), why


def test_several_others_run_together_where_they_are_busy_for_more_than_a_step() -> None:
    problem = machine((1.0,) * 4)  # measured with four threads on two cores: twice as slow as alone
    assert crowding(problem, dict.fromkeys(range(4), 1.0)) == pytest.approx(dict.fromkeys(range(4), 1.0))
    # beside each run 1.5 others on average: one or two of them, in turn
    assert crowding(problem, dict.fromkeys(range(4), 0.5)) == pytest.approx(
        dict.fromkeys(range(4), (1.0 + 1.5) / 2 / 2)
    )


def test_preparation_takes_cores_like_other_programs_but_was_not_there_when_times_were_measured() -> None:
    problem = replace(machine(load=1.0), preparing={"h": 1.0})
    assert crowding(problem, {0: 1.0, 1: 1.0}) == pytest.approx({0: 2.0 / 1.5, 1: 2.0 / 1.5})
    assert crowding(problem, {0: 0.5, 1: 0.5}) == pytest.approx({0: 1.0, 1: 1.0})


def test_what_has_cores_enough_is_neither_slowed_down_nor_rounded() -> None:
    problem = machine((0.1, 0.7), load=0.0)
    assert crowding(problem, {0: 0.3, 1: 1.0}) == {0: 1.0, 1: 1.0}
    plan = pipeline(problem, 1)
    assert predict(problem, plan)[0] == predict(replace(problem, cores={}, load={}), plan)[0]


def test_accelerators_do_not_share_cores() -> None:
    problem = machine(load=1.0)
    first, second = problem.devices
    beside = replace(problem, devices=(replace(first, processor=False, threads=0.0), second))
    assert crowding(beside, {0: 1.0, 1: 1.0}) == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_a_device_without_samples_takes_no_cores(micro_batch: int | None) -> None:
    problem = machine(load=1.0)
    both = Plan.data_parallel([0, 1], [1.0, 0.0], micro_batch=micro_batch)
    alone = Plan.data_parallel([0], [1.0], micro_batch=micro_batch)
    found, expected = (predict(problem, plan)[0].step_s for plan in (both, alone))
    assert found == pytest.approx(expected, rel=0.01)


def at_each_moment(forward_s: tuple[float, float], count: int, *, cores: float, load: float) -> float:
    """Return the seconds of GPipe with two stages where cores are shared anew whenever a device begins or ends."""
    rows = [[("F", m) for m in range(count)] + [("B", m) for m in reversed(range(count))] for _ in forward_s]
    done: set[tuple[int, str, int]] = set()
    left: dict[int, float] = {}
    now = 0.0
    while any(rows):
        for device, row in enumerate(rows):
            if row and device not in left:
                kind, micro_batch = row[0]
                before = (0, "F", micro_batch) if kind == "F" else (1, "B", micro_batch)
                if (device == 0) == (kind == "F") or before in done:
                    left[device] = forward_s[device]
        rate = min(1.0, cores / (len(left) + load))
        passed = min(left.values()) / rate
        now += passed
        for device in list(left):
            left[device] -= passed * rate
            if left[device] < 1e-12:
                del left[device]
                done.add((device, *rows[device].pop(0)))
    return now


@pytest.mark.parametrize("seconds", [(1.0, 1.0), (0.2, 1.0), (1.0, 0.4)])
@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("load", [0.5, 1.0, 3.0])
def test_a_pipeline_takes_about_as_long_as_with_rates_at_each_moment(
    seconds: tuple[float, float], micro_batch: int, load: float
) -> None:
    problem = machine(seconds, load=load)
    measured = max(1.0, (2 + load) / 2)
    own = tuple(micro_batch * one_s / measured for one_s in seconds)
    expected = at_each_moment(own, 2 // micro_batch, cores=2.0, load=load)
    found = predict(problem, pipeline(problem, micro_batch))[0].step_s
    all_the_time = predict(replace(problem, cores={}, load={}), pipeline(problem, micro_batch))[0].step_s
    assert found == pytest.approx(expected, rel=0.075)
    assert abs(found - expected) < 0.3 * (all_the_time - expected)


@pytest.mark.parametrize(
    ("cores", "load", "used", "delay_s", "why"),
    [
        (
            2.0,
            0.5,
            (0, 1),
            0.5 * TURN_S,
            "a program has the other core for half of the time",
        ),
        (2.0, 3.0, (0, 1), TURN_S, "another program has the turn"),
        (2.0, 0.0, (0, 1), 0.0, "there is nothing but the workers"),
        (1.0, 0.0, (0, 1), 0.0, "they wait for one another in any case"),
        (1.0, 0.5, (0, 1), 0.5 * TURN_S, "only while the program runs"),
        (3.0, 0.5, (0, 1), 0.0, "a core is free"),
        (3.0, 1.5, (0, 1), 0.5 * TURN_S, "for half of the time it is not"),
        (2.0, 0.5, (0,), 0.0, "a worker by itself has a core"),
    ],
)
def test_workers_wait_for_a_core_when_a_message_wakes_them_up(
    cores: float, load: float, used: tuple[int, ...], delay_s: float, why: str
) -> None:
    found = wake_up_delays(machine(cores=cores, load=load), used)
    assert found.get("h", 0.0) == pytest.approx(delay_s), why


def test_a_pipeline_beside_other_programs_waits_for_each_message_longer() -> None:
    plan = pipeline(machine(), 1)
    for load in (0.5, 1.0):
        problem = machine((TURN_S, TURN_S), load=load)
        late = load * TURN_S
        without = replace(problem, load={"h": 0.0}, cores={})
        quick = replace(without, devices=tuple(replace(d, processor=False) for d in without.devices))
        # forward to the second stage and back: two messages on the way that a step takes
        crowded = crowding(problem, CostModel(problem)._busy(layout_of(problem, plan)))
        slower = replace(quick, devices=tuple(replace(d, speed=1 / crowded[d.number]) for d in quick.devices))
        assert predict(problem, plan)[0].step_s == pytest.approx(predict(slower, plan)[0].step_s + 2 * late, rel=0.02)
    accelerators = replace(problem, devices=tuple(replace(d, processor=False) for d in problem.devices))
    assert wake_up_delays(accelerators, (0, 1)) == {}
