"""A profile is corrected by what the first steps of a run took: devices, segments, the load of other programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import msgspec
import pytest

from onebox.plan import ComputeTime, DeviceSpec, Links, Plan, Prediction, Problem, Segment, SegmentValue, Stage, predict
from onebox.plan.model.cost_model import stage_work
from onebox.plan.replan.measurements import TimedTask, action_times
from onebox.plan.replan.profile_correction import (
    FEWEST_STEPS,
    ProfileCorrection,
    TimedStep,
    TimeFactors,
    correct_profile,
    is_sure,
)

NAMES = tuple("abcd")
BATCH, MICRO_BATCH = 32, 4


def machine(*, load: float = 0.0, cores: float | None = None, hosts: str = "hh") -> Problem:
    """Return four segments for a processor on each of some hosts; the gradients take twice as long as forward."""
    numbers = range(len(hosts))

    def segment(name: str, seconds: float) -> Segment:
        each = {"cpu": ComputeTime(fixed_s=1e-3, sample_s=seconds)}
        return Segment(name=name, forward_s=each, input_s=each, weight_s=each, update_s={"cpu": 1e-3})

    return Problem(
        segments=tuple(segment(name, 1e-3 * (1 + place % 2)) for place, name in enumerate(NAMES)),
        devices=tuple(
            DeviceSpec(number=n, type="cpu", host=host, processor=True, threads=1.0) for n, host in enumerate(hosts)
        ),
        links=Links(
            latency_s={a: dict.fromkeys(numbers, 1e-5) for a in numbers},
            bandwidth_bps={a: dict.fromkeys(numbers, 1e9) for a in numbers},
        ),
        batch=BATCH,
        micro_batches=(MICRO_BATCH,),
        values=tuple(
            SegmentValue(source=n, consumers=(n + 1,), forward_bytes=8, backward_bytes=8) for n in range(len(NAMES) - 1)
        ),
        cores={} if cores is None else dict.fromkeys(hosts, cores),
        load={} if cores is None else dict.fromkeys(hosts, load),
    )


def staged(*devices: int, schedule: str = "1f1b") -> Plan:
    """Return a plan of stages with equally many segments."""
    each = len(NAMES) // len(devices)
    stages = tuple(
        Stage(segments=NAMES[each * n : each * (n + 1)], replicas=((device,),), shares=(1.0,))
        for n, device in enumerate(devices)
    )
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule=schedule)


REPLICAS = Plan.data_parallel([0, 1], [0.5, 0.5], micro_batch=MICRO_BATCH)


def planned(problem: Problem, plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, predicted=predict(problem, plan)[0])


def run(
    true: Problem,
    plan: Plan,
    *,
    count: int = FEWEST_STEPS,
    slower: Mapping[int, float] | None = None,
    undisturbed: Problem | None = None,
) -> list[TimedStep]:
    """Return steps of a plan as they are on a machine.

    Args:
        true: The machine.
        plan: The plan.
        count: Number of steps.
        slower: Factors of whole steps that something disturbs, by number.
        undisturbed: The machine at the moments at which no other program runs: every other action is as there, and the
            mean is that of the machine.
    """
    step_s, steps = predict(true, plan)[0].step_s, []
    whole, quick = (actions_of(each, plan) for each in (true, undisturbed or true))
    for step in range(count):
        factor = (slower or {}).get(step, 1.0)
        actions = {
            task: [(quick[task] if turn % 2 else 2 * mean_s - quick[task]) * factor for turn in range(8)]
            for task, mean_s in whole.items()
        }
        steps.append(TimedStep(10 + step, step_s * factor, actions))
    return steps


def actions_of(true: Problem, plan: Plan) -> dict[TimedTask, float]:
    """Return the seconds of each kind of action: backward as a whole or, for zb-h1, in halves, of which the first stage
    computes both at once, as workers do."""
    phases, found = action_times(stage_work(true, plan)), dict[TimedTask, float]()
    for task, seconds in phases.items():
        forward, both = task.kind == "F", sum(phases[task._replace(kind=half)] for half in ("I", "W"))  # type: ignore[arg-type]
        if forward or (plan.halves and task.stage > 0):
            found[task] = seconds
        elif task.kind == "W":
            found[task if plan.halves else task._replace(kind="B")] = both
    return found


def slowed(problem: Problem, factors: Mapping[int, float]) -> Problem:
    devices = tuple(replace(one, speed=one.speed / factors.get(one.number, 1.0)) for one in problem.devices)
    return replace(problem, devices=devices)


def test_steps_as_planned_correct_nothing() -> None:
    problem = machine()
    plan = planned(problem, staged(0, 1))
    found = correct_profile(plan, run(problem, plan), problem)
    assert (found.first, found.steps) == (10, FEWEST_STEPS)
    assert found.line == ""
    assert found.factors is None
    assert found.devices == pytest.approx({0: 1.0, 1: 1.0})
    assert found.predicted.step_s == pytest.approx(plan.predicted.step_s if plan.predicted else 0)


@pytest.mark.parametrize(
    "plan",
    [staged(0, 1), staged(0, 1, 0, 1), REPLICAS, staged(0, 1, schedule="zb-h1")],
    ids=["stages", "four stages", "replicas", "halves"],
)
@pytest.mark.parametrize("factor", [2.0, 0.4])
def test_a_device_that_is_slower_or_quicker_is_found_and_other_plans_are_predicted_for_it(
    plan: Plan, factor: float
) -> None:
    problem = machine()
    true, plan = slowed(problem, {1: factor}), planned(problem, plan)
    found = correct_profile(plan, run(true, plan), problem)
    assert found.devices == pytest.approx({0: 1.0, 1: factor})
    assert found.factors is not None
    assert found.factors.devices == pytest.approx({1: factor})
    corrected = found.factors.applied(problem)
    for other in (staged(0, 1), staged(1, 0), staged(1), REPLICAS, staged(0, 1, schedule="zb-h1")):
        assert predict(corrected, other)[0].step_s == pytest.approx(predict(true, other)[0].step_s, rel=1e-6)
    assert f"device 1 {factor:.2f} times" in found.line
    assert "device 0" not in found.line


def test_a_little_more_is_of_the_segments_and_moves_with_them_but_not_if_replicas_differ() -> None:
    problem = machine()
    plan = planned(problem, staged(0, 1))
    found = correct_profile(plan, run(slowed(problem, {1: 1.3}), plan), problem)
    assert found.factors is not None
    assert found.factors.devices == {}
    assert found.factors.segments.keys() == {"cpu"}
    assert found.factors.segments["cpu"] == {
        name: pytest.approx((f,) * 3) for name, f in zip("abcd", (1, 1, 1.3, 1.3), strict=True)
    }
    plan = planned(problem, REPLICAS)
    found = correct_profile(plan, run(slowed(problem, {1: 1.4}), plan), problem)
    assert found.factors is not None
    assert found.factors.devices == pytest.approx({1: 1.4}), "the other replica takes as long as planned"
    assert found.factors.segments["cpu"]["a"] == pytest.approx((1.0,) * 3)
    found = correct_profile(plan, run(slowed(problem, {0: 1.25, 1: 1.3}), plan), problem)
    assert found.factors is not None
    assert found.factors.devices == {}
    assert found.factors.segments["cpu"]["a"] == pytest.approx((1.275,) * 3)


def test_the_kinds_of_action_have_their_own_factors() -> None:
    problem = machine()
    plan = planned(problem, staged(0, 1))
    steps = [
        step._replace(
            step_s=1.3 * step.step_s,
            actions={task: [s * (1.3 if task.kind == "F" else 1.0) for s in own] for task, own in step.actions.items()},
        )
        for step in run(problem, plan)
    ]
    found = correct_profile(plan, steps, problem)
    assert found.factors is not None
    assert found.factors.segments["cpu"]["a"] == pytest.approx((1.3, 1.0, 1.0))
    assert found.stages[TimedTask(0, 0, "F")] == pytest.approx(1.3)
    assert found.rest > 1.1, "a step that takes longer than its actions waits for something else"
    assert "for another reason than computing" in found.line


@pytest.mark.parametrize(("before", "now"), [(0.0, 0.6), (0.5, 1.2), (0.8, 0.1)])
@pytest.mark.parametrize("plan", [staged(0, 1), REPLICAS], ids=["stages", "replicas"])
def test_another_load_than_in_the_profile_is_found_and_holds_for_other_plans(
    plan: Plan, before: float, now: float
) -> None:
    alone = machine(cores=2)
    problem = TimeFactors(load={"h": before}).applied(alone)
    true, plan = TimeFactors(load={"h": now}).applied(alone), planned(problem, plan)
    found = correct_profile(plan, run(true, plan, undisturbed=alone), problem)
    assert found.devices == pytest.approx({0: 1.0, 1: 1.0}, rel=1e-6), "at moments without other programs"
    assert found.differs
    assert found.factors is not None
    assert found.factors.load["h"] == pytest.approx(now, abs=0.03)
    for other in (staged(0, 1), staged(0), REPLICAS):
        expected = predict(true, other)[0].step_s
        assert predict(found.factors.applied(problem), other)[0].step_s == pytest.approx(expected, rel=0.02)
    assert f"other programs want {now:.1f} cores of h" in found.line


@pytest.mark.parametrize("plan", [staged(0, 1), REPLICAS], ids=["stages", "replicas"])
def test_programs_that_never_pause_are_a_load_and_no_slow_devices(plan: Plan) -> None:
    problem = machine(cores=2)
    true, plan = TimeFactors(load={"h": 2.0}).applied(problem), planned(problem, plan)
    found = correct_profile(plan, run(true, plan), problem)
    assert min(found.devices.values()) > 1.4
    assert found.factors is not None
    assert found.factors.devices == {}
    for other in (staged(0, 1), staged(0), REPLICAS):
        expected = predict(true, other)[0].step_s
        assert predict(found.factors.applied(problem), other)[0].step_s == pytest.approx(expected, rel=0.05)
    assert "other programs want 2.0 cores of h" in found.line
    assert "device" not in found.line
    alone = planned(problem, staged(0))
    found = correct_profile(alone, run(slowed(problem, {0: 2.0}), alone), problem)
    assert found.factors is not None
    assert found.factors.devices == pytest.approx({0: 2.0}), "beside a free core it is the device"


@pytest.mark.parametrize("plan", [staged(0, 1), REPLICAS], ids=["stages", "replicas"])
def test_steps_that_take_longer_than_their_actions_show_no_load(plan: Plan) -> None:
    problem = machine(cores=2)
    plan = planned(problem, plan)
    steps = [step._replace(step_s=1.5 * step.step_s) for step in run(problem, plan)]
    found = correct_profile(plan, steps, problem)
    assert found.factors is not None
    assert found.factors.load == {}
    assert found.rest == pytest.approx(1.5, rel=0.01)
    assert "other programs" not in found.line
    assert "for another reason than computing" in found.line


def test_a_load_does_not_follow_from_a_plan_that_leaves_a_core_free_or_uses_several_hosts() -> None:
    for problem, plan in ((machine(cores=2), staged(0)), (machine(cores=1, hosts="ab"), staged(0, 1))):
        plan = planned(problem, plan)  # noqa: PLW2901
        found = correct_profile(plan, run(problem, plan, slower=dict.fromkeys(range(FEWEST_STEPS), 1.2)), problem)
        assert found.factors is not None
        assert found.factors.load == {}


def test_steps_that_spread_are_too_noisy_to_correct_by() -> None:
    problem = machine()
    plan = planned(problem, staged(0, 1))
    slower = {step: 1.0 + 0.1 * step for step in range(FEWEST_STEPS)}
    steps = run(problem, plan, slower=slower)
    found = correct_profile(plan, steps, problem)
    assert found.noisy
    assert found.factors is None
    assert found.predicted == plan.predicted
    assert "too noisy to choose a plan by" in found.line
    assert not is_sure([step.step_s for step in steps])


def test_more_steps_make_a_median_sure_that_few_do_not() -> None:
    random = Random(0)
    steps_s = [random.gauss(1.0, 0.16) for _ in range(60)]
    assert not is_sure(steps_s[: FEWEST_STEPS - 1])
    assert not is_sure(steps_s[:12])
    assert is_sure(steps_s)


def test_a_few_disturbed_steps_make_no_difference() -> None:
    problem = machine()
    plan = planned(problem, staged(0, 1))
    found = correct_profile(plan, run(problem, plan, slower={0: 3.0, 5: 2.0}), problem)
    assert found.line == ""
    assert found.devices == pytest.approx({0: 1.0, 1: 1.0})


def test_the_prediction_has_the_measured_median_and_interval() -> None:
    problem = machine()
    plan = planned(problem, staged(0, 1))
    factors = {step: 1.5 + 0.01 * step for step in range(FEWEST_STEPS)}
    found = correct_profile(plan, run(problem, plan, slower=factors), problem)
    assert plan.predicted is not None
    assert found.predicted.step_s == found.measured_s == pytest.approx(1.54 * plan.predicted.step_s)
    assert found.predicted.interval_s == pytest.approx([f * plan.predicted.step_s for f in (1.508, 1.572)])
    assert found.predicted.stages_s[0][0] > 1.5 * plan.predicted.stages_s[0][0], "of the corrected segments"
    step_s = plan.predicted.step_s
    wide = msgspec.structs.replace(plan.predicted, interval_s=(0.99 * step_s, 1.2 * step_s))
    for given in (problem, None):
        steps = run(problem, plan, slower=factors)
        found = correct_profile(msgspec.structs.replace(plan, predicted=wide), steps, given)
        assert found.predicted.interval_s == pytest.approx((1.508 * step_s, 1.2 * 1.54 * step_s)), "the wider ends"


def test_an_interval_counts_as_well_as_a_tenth() -> None:
    problem = machine()
    plan = planned(problem, staged(0, 1))
    steps = run(problem, plan, slower=dict.fromkeys(range(FEWEST_STEPS), 1.07))
    assert plan.predicted is not None

    def line(interval: Sequence[float] | None) -> str:
        assert plan.predicted is not None
        ends = None if interval is None else tuple(end * plan.predicted.step_s for end in interval)
        told = msgspec.structs.replace(plan.predicted, interval_s=ends)
        return correct_profile(msgspec.structs.replace(plan, predicted=told), steps, problem).line

    assert line(None) == ""
    assert line((0.9, 1.1)) == ""
    assert line((0.95, 1.05)).startswith("steps take 1.07 times as long as planned")


def test_without_a_problem_devices_are_compared_with_the_prediction_alone() -> None:
    problem = machine()
    for plan in (staged(0, 1), REPLICAS):
        plan = planned(problem, plan)  # noqa: PLW2901
        found = correct_profile(plan, run(slowed(problem, {1: 2.0}), plan))
        assert found.devices == pytest.approx({0: 1.0, 1: 2.0})
        assert found.factors is None
        assert found.predicted.step_s == found.measured_s


def test_the_order_of_actions_of_a_table_is_kept() -> None:
    problem = machine()
    plan = planned(problem, staged(0, 1, schedule="auto"))
    found = correct_profile(plan, run(slowed(problem, {0: 2.0}), plan), problem)
    assert found.devices == pytest.approx({0: 2.0, 1: 1.0})
    assert found.rest == pytest.approx(1.0, rel=0.05)


def with_gpu(problem: Problem) -> Problem:
    """Return a problem whose device 1 is of another type, which computes segments in half the time."""
    segments = tuple(
        replace(
            segment,
            **{
                name: {**times, "cuda": ComputeTime(fixed_s=5e-4, sample_s=times["cpu"].sample_s / 2)}
                for name in ("forward_s", "input_s", "weight_s")
                for times in [getattr(segment, name)]
            },
            update_s={"cpu": 1e-3, "cuda": 1e-3},
        )
        for segment in problem.segments
    )
    first, second = problem.devices
    return replace(problem, segments=segments, devices=(first, replace(second, type="cuda", processor=False)))


def test_segments_are_corrected_for_the_type_of_device_that_computed_them() -> None:
    problem = with_gpu(machine())
    plan = planned(problem, staged(0, 1))
    found = correct_profile(plan, run(slowed(problem, {0: 1.3}), plan), problem)
    assert found.factors is not None
    assert found.factors.segments == {
        "cpu": {name: pytest.approx((1.3,) * 3) for name in "ab"},
        "cuda": {name: pytest.approx((1.0,) * 3) for name in "cd"},
    }
    first, same = found.factors.applied(problem).segments[0], problem.segments[0]
    assert first.forward_s["cpu"].sample_s == pytest.approx(1.3 * same.forward_s["cpu"].sample_s)
    assert first.forward_s["cuda"] == same.forward_s["cuda"]
    later = found.factors.then(TimeFactors(segments={"cpu": {"b": (2.0,) * 3, "c": (2.0,) * 3}}))
    assert later.segments["cpu"] == {
        name: pytest.approx((f,) * 3) for name, f in zip("abc", (1.3, 2.6, 2.0), strict=True)
    }
    assert later.segments["cuda"] == found.factors.segments["cuda"]


def test_a_replica_of_another_type_does_not_make_a_device_slow() -> None:
    problem = with_gpu(machine())
    plan = planned(problem, REPLICAS)
    found = correct_profile(plan, run(slowed(problem, {0: 1.3}), plan), problem)
    assert found.factors is not None
    assert not found.factors.devices
    assert found.factors.segments == {
        "cpu": {name: pytest.approx((1.3,) * 3) for name in NAMES},
        "cuda": {name: pytest.approx((1.0,) * 3) for name in NAMES},
    }


def test_corrections_follow_one_another() -> None:
    problem = machine(cores=2)
    first = TimeFactors(devices={1: 2.0}, segments={"cpu": {"a": (1.5, 1.0, 1.0)}}, load={"h": 0.5})
    second = TimeFactors(
        devices={0: 0.5, 1: 2.0}, segments={"cpu": {"a": (2.0, 2.0, 1.0), "b": (1.1,) * 3}}, load={"h": 1.0}
    )
    both, turns = first.then(second).applied(problem), second.applied(first.applied(problem))
    assert both.load == turns.load == {"h": 1.0}
    for one, other in zip(both.devices, turns.devices, strict=True):
        assert one.speed == pytest.approx(other.speed)
    for segment, same in zip(both.segments, turns.segments, strict=True):
        assert segment.forward_s["cpu"].sample_s == pytest.approx(same.forward_s["cpu"].sample_s)
    assert TimeFactors().applied(problem) == problem
    assert first.then(TimeFactors()) == first


def test_what_a_problem_does_not_contain_is_ignored() -> None:
    problem = machine()
    assert (
        TimeFactors(devices={7: 2.0}, segments={"cpu": {"z": (2.0,) * 3}}, load={"elsewhere": 1.0}).applied(problem)
        == problem
    )


def test_devices_that_a_plan_leaves_out_are_as_quick_as_all_of_their_kind_but_not_as_slow() -> None:
    problem = machine(hosts="hhg")
    plan = planned(problem, staged(0))
    quick, slow = (
        correct_profile(plan, run(slowed(problem, {0: factor}), plan), problem).factors for factor in (0.5, 2.0)
    )
    assert quick is not None
    assert quick.devices == pytest.approx({0: 0.5, 1: 0.5})
    assert slow is not None
    assert slow.devices == pytest.approx({0: 2.0})


def test_a_correction_beyond_all_limits_leaves_a_problem_that_can_be_planned() -> None:
    problem = machine(cores=0.5)
    factors = TimeFactors(
        devices={0: 1e300, 1: 1e-300}, segments={"cpu": {"a": (1e300, 1e-300, 1e300)}}, load={"h": 1e308}
    )
    corrected = factors.applied(problem)
    assert 1 < predict(corrected, staged(0, 1))[0].step_s < 1e9
    assert corrected.load == {"h": 4.0}


@pytest.mark.parametrize(
    "wrong",
    [{"devices": {0: 0.0}}, {"segments": {"cpu": {"a": (1.0, math.inf, 1.0)}}}, {"load": {"h": -1.0}}, {"more": 1}],
)
def test_a_stored_correction_is_checked(wrong: dict[str, object]) -> None:
    with pytest.raises((msgspec.ValidationError, ValueError)):
        msgspec.convert(wrong, TimeFactors)


def test_lines_say_what_differs() -> None:
    prediction = Prediction(batch=8, step_s=0.08, bubble=0.0, peak_bytes=(0,), stages_s=((1.0, 1.0, 1.0),))
    found = ProfileCorrection(
        first=4,
        steps=9,
        planned=prediction,
        measured_s=0.104,
        spread=0.02,
        devices={0: 1.02, 1: 1.5},
        stages={},
        rest=1.0,
        factors=TimeFactors(load={"lab": 0.62}),
        predicted=prediction,
    )
    assert found.line == (
        "steps take 1.30 times as long as planned (104 ms instead of 80 ms): device 1 1.50 times, "
        "other programs want 0.6 cores of lab"
    )
