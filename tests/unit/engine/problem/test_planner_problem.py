"""The planner's problem: what a busy machine does to the times of plans that use fewer devices than were measured."""

from __future__ import annotations

import msgspec
import pytest

from onebox.cost.model_profile import ModelBytes, ModelProfile, SegmentBytes, SegmentTimes, Slowdown, SlowdownWindow
from onebox.engine.problem.planner_problem import make_problem
from onebox.plan import Links, Plan, Prediction, Problem, predict
from onebox.plan.model.crowding import TURN_S
from onebox.pool import DeviceInfo

TIMES = SegmentTimes(size=4, seconds=((0.01, 0.0, 0.02),), update_s=0.0, call_s=0.0)
BUSY = Slowdown(low=1.25, median=1.5, high=1.8, slices=20)


def problem(slowdown: Slowdown | None, *, cores: int = 2, device: str = "cpu") -> Problem:
    segment = SegmentBytes(
        name="only", parameter_bytes=0, state_bytes=0, saved_bytes=0, late_bytes=0, forward_work_bytes=0,
        backward_work_bytes=0,
    )  # fmt: skip
    memory = ModelBytes(graph="g", size=4, segments=(segment,), values=(), ties=())
    times = (msgspec.structs.replace(TIMES, slowdown=slowdown),)
    devices = [
        DeviceInfo(
            number=n, host="localhost", device=device, name="a core", threads=1, memory_bytes=1 << 30, cores=cores
        )
        for n in range(2)
    ]
    numbers = range(2)
    links = Links(
        latency_s={a: dict.fromkeys(numbers, 0.0) for a in numbers},
        bandwidth_bps={a: dict.fromkeys(numbers, 1e12) for a in numbers},
    )
    profile = ModelProfile(bytes=memory, times={"cpu": times})
    return make_problem(profile, devices, links, batch=8, micro_batches=[4])


def predicted(given: Problem, *devices: int) -> Prediction:
    shares = [1 / len(devices)] * len(devices)
    return predict(given, Plan.data_parallel(devices, shares, micro_batch=4))[0]


def test_a_plan_that_leaves_a_core_to_other_programs_is_not_slowed_down_by_them() -> None:
    busy, alone = problem(BUSY), problem(None)
    assert busy.load == {"localhost": pytest.approx(1.0)}
    waits_s = 2 * TURN_S  # for a core, at both messages of the sum
    assert predicted(busy, 0, 1).step_s == pytest.approx(predicted(alone, 0, 1).step_s + waits_s)
    assert predicted(busy, 0).step_s == pytest.approx(predicted(alone, 0).step_s / 1.5)


def test_a_slowdown_beside_free_cores_has_other_causes() -> None:
    roomy = problem(BUSY, cores=8)
    assert not roomy.load
    assert predicted(roomy, 0).step_s == pytest.approx(predicted(problem(None), 0).step_s)


def test_the_interval_is_that_of_the_machine_as_all_actions_of_a_step_are_slowed_down_together() -> None:
    found = predicted(problem(BUSY), 0, 1)
    assert found.interval_s == pytest.approx((found.step_s * 1.25 / 1.5, found.step_s * 1.8 / 1.5))
    assert predicted(problem(None), 0, 1).interval_s is None


@pytest.mark.parametrize(
    ("times", "low", "high"),
    [
        (0.25, 1.0, 2.0),  # shorter than all
        (1.0, 1.0, 2.0),
        (2.0, 1.1, 1.8),  # half way to four times as long
        (4.0, 1.2, 1.6),
        (9.0, 1.2, 1.6),  # longer than all
    ],
)
def test_the_interval_is_that_of_times_as_long_as_the_step(times: float, low: float, high: float) -> None:
    step_s = predicted(problem(BUSY), 0, 1).step_s
    shortest_s = step_s / times
    windows = (
        SlowdownWindow(seconds=shortest_s, low=1.0, high=2.0),
        SlowdownWindow(seconds=4 * shortest_s, low=1.2, high=1.6),
    )
    found = predicted(problem(msgspec.structs.replace(BUSY, windows=windows)), 0, 1)
    assert found.step_s == step_s
    assert found.interval_s == pytest.approx((step_s * low / 1.5, step_s * high / 1.5))


def test_steps_of_emulated_devices_do_not_vary() -> None:
    assert not problem(BUSY, cores=0, device="sim").spread
    assert problem(BUSY).spread


def test_profiles_from_before_slowdowns_were_measured_are_read() -> None:
    old = {name: value for name, value in msgspec.to_builtins(TIMES).items() if name != "slowdown"}
    assert msgspec.convert(old, SegmentTimes) == TIMES


@pytest.mark.parametrize("changed", [{"low": 1.6}, {"high": float("inf")}, {"slices": 0}])
def test_quantiles_ascend(changed: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError, match="quantiles are positive"):
        msgspec.convert(msgspec.to_builtins(BUSY) | changed, Slowdown)
