"""A profile that is scaled to what steps took predicts these, and shares them out as was estimated."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from onebox.cost.model_profile import ModelBytes, ModelProfile, SegmentBytes, SegmentTimes
from onebox.engine.adaptive.measurements import JITTER_S
from onebox.engine.adaptive.profile_scaling import scale_profile, with_measured_links
from onebox.plan import Links, Plan, Stage
from onebox.plan.replan.measurements import LinkTime, StepMeasurement, TaskTime, TimedTask

PLAN = Plan(
    stages=(
        Stage(segments=("a", "b"), replicas=((0,),), shares=(1.0,)),
        Stage(segments=("c",), replicas=((1,),), shares=(1.0,)),
    ),
    micro_batch=4,
)
DEVICES = cast(
    Any, [SimpleNamespace(number=0, kind="cpu", speed=1.0), SimpleNamespace(number=1, kind="cpu", speed=0.5)]
)


def profile() -> ModelProfile:
    def segment(name: str) -> SegmentBytes:
        return SegmentBytes(
            name=name,
            parameter_bytes=10,
            state_bytes=30,
            saved_bytes=0,
            late_bytes=0,
            forward_work_bytes=0,
            backward_work_bytes=0,
            update_bytes=30.0,
        )

    found = ModelBytes(graph="", size=4, segments=tuple(map(segment, "abc")), values=(), ties=())
    seconds = ((1.0, 2.0, 1.0), (3.0, 2.0, 3.0), (1.0, 1.0, 1.0))
    return ModelProfile(bytes=found, times={"cpu": (SegmentTimes(size=4, seconds=seconds, update_s=1.0, call_s=1.0),)})


def seen(**more: Any) -> StepMeasurement:
    actions = {
        TimedTask(0, 0, "F"): TaskTime(0.4, 2),
        TimedTask(0, 0, "B"): TaskTime(1.6, 2),
        TimedTask(1, 1, "F"): TaskTime(6.0, 2),
    }
    return StepMeasurement(step=3, step_s=1.0, actions=actions, update_s={0: 0.2, 1: 0.2}, **more)


def test_stages_take_what_they_took_at_the_speed_of_their_device() -> None:
    (found,) = scale_profile(profile(), PLAN, [seen()] * 3, DEVICES, 4).times["cpu"]
    a, b, c = found.seconds
    assert (a[0], b[0]) == pytest.approx((0.1, 0.3)), "in the proportions of the estimate"
    assert a[1] + a[2] + b[1] + b[2] == pytest.approx(1.6)
    assert c[0] == pytest.approx(3.0), "at full speed, of which the device has half"
    assert found.call_s == 0.0, "it is in what was measured"
    assert found.update_s == pytest.approx(0.3), "two of three parts in 0.2 s, or one at half speed in as long"


def test_times_of_other_sizes_are_scaled_alike() -> None:
    one = profile()
    (known,) = one.times["cpu"]
    larger = SegmentTimes(
        size=16, seconds=((2.0, 4.0, 2.0), (6.0, 4.0, 6.0), (2.0, 2.0, 2.0)), update_s=1.0, call_s=1.0
    )
    for times in ((known, larger), (larger, known)):
        both = ModelProfile(bytes=one.bytes, times={"cpu": times})
        found = {each.size: each for each in scale_profile(both, PLAN, [seen()] * 3, DEVICES, 4).times["cpu"]}
        assert found[4] == scale_profile(one, PLAN, [seen()] * 3, DEVICES, 4).times["cpu"][0]
        for small, large in zip(found[4].seconds, found[16].seconds, strict=True):
            assert large == pytest.approx([2 * seconds for seconds in small])


def test_links_are_as_fast_as_long_messages_went_and_those_that_are_known_stay() -> None:
    links = Links(
        latency_s={a: dict.fromkeys(range(2), 0.0) for a in range(2)},
        bandwidth_bps={a: dict.fromkeys(range(2), math.inf) for a in range(2)},
    )
    steps = [seen(links={(0, 1): LinkTime(1000, 10 * JITTER_S, 1), (1, 0): LinkTime(10, JITTER_S / 2, 1)})]
    found = with_measured_links(links, steps, frozenset())
    assert found.bandwidth_bps[0][1] == pytest.approx(1000 / (9 * JITTER_S))
    assert found.bandwidth_bps[1][0] == math.inf, "short messages say nothing"
    assert with_measured_links(links, steps, frozenset({(0, 1)})) == links


def test_a_gradient_of_parameters_without_one_of_inputs_is_both() -> None:
    """As of the first stage where a schedule divides backward."""
    whole, halves = (
        replace(seen(), actions={TimedTask(0, 0, "F"): TaskTime(0.4, 2), TimedTask(0, 0, kind): TaskTime(1.6, 2)})
        for kind in ("B", "W")
    )
    assert scale_profile(profile(), PLAN, [whole] * 3, DEVICES, 4) == scale_profile(
        profile(), PLAN, [halves] * 3, DEVICES, 4
    )
