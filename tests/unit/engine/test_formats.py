"""Which stages get channels last: those on CPUs whose segments were measured to gain by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onebox.cost.model import ModelBytes, ModelProfile, SegmentBytes, SegmentTimes
from onebox.engine.formats import LEAST_GAIN, LEAST_WORK, compared, convolution_work, with_formats
from onebox.graph import TracedModel, capture
from onebox.plan import Plan, Stage
from onebox.pool import DeviceInfo

NAMES = ("first", "second", "third")
SECONDS = ((0.1, 0.1, 0.1), (0.2, 0.1, 0.1), (0.1, 0.0, 0.0))


def segment(name: str) -> SegmentBytes:
    return SegmentBytes(
        name=name, parameter_bytes=8, state_bytes=8, saved_bytes=8, late_bytes=0, forward_work_bytes=0,
        backward_work_bytes=0,
    )  # fmt: skip


def profile(*gains: tuple[float, ...], kind: str = "cpu") -> ModelProfile:
    """Return a profile with what channels last gain, for micro-batches of 1, 2, 4 … samples."""
    times = tuple(
        SegmentTimes(size=1 << place, seconds=SECONDS, update_s=0.0, call_s=0.0, last_gain_s=own)
        for place, own in enumerate(gains)
    )
    memory = ModelBytes(graph="g", size=1, segments=tuple(map(segment, NAMES)), values=(), ties=())
    return ModelProfile(bytes=memory, times={kind: times})


def devices(*names: str) -> list[DeviceInfo]:
    return [
        DeviceInfo(number=number, host="localhost", device=name, name="a card", threads=1, memory_bytes=1)
        for number, name in enumerate(names)
    ]


def plan(*parts: tuple[str, ...], micro_batch: int = 1) -> Plan:
    stages = tuple(Stage(segments=part, replicas=((device,),), shares=(1.0,)) for device, part in enumerate(parts))
    return Plan(stages=stages, micro_batch=micro_batch)


def test_stages_whose_segments_gain_in_all() -> None:
    found = with_formats(plan(NAMES[:2], NAMES[2:]), profile((0.2, -0.1, -0.05)), devices("cpu", "cpu"))
    assert found.channels_last == {0}
    assert with_formats(found, profile((-0.2, 0.1, 0.05)), devices("cpu", "cpu")).channels_last == {1}


def test_small_gains_are_noise() -> None:
    few = LEAST_GAIN * 0.7
    for gain, chosen in ((few * 0.9, set()), (few * 1.2, {0})):
        found = with_formats(plan(NAMES[:2], NAMES[2:]), profile((gain, 0.0, 0.0)), devices("cpu", "cpu"))
        assert found.channels_last == chosen


def test_the_size_that_is_nearest_counts() -> None:
    measured = profile((0.2, 0.2, 0.2), (-0.2, -0.2, -0.2))
    for micro_batch, chosen in ((1, {0}), (2, set()), (64, set())):
        found = with_formats(plan(NAMES, micro_batch=micro_batch), measured, devices("cpu"))
        assert found.channels_last == chosen


@pytest.mark.parametrize(
    ("device", "kind", "gains"), [("cuda:0", "cpu", (0.2,) * 3), ("cpu", "cpu", ()), ("cpu", "a card", (0.2,) * 3)]
)
def test_where_nothing_was_measured(device: str, kind: str, gains: tuple[float, ...]) -> None:
    """On GPUs, and of models for which it does not matter."""
    assert not with_formats(plan(NAMES), profile(gains, kind=kind), devices(device)).channels_last


def test_layers_that_are_split_stay_as_captured() -> None:
    whole = Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,)),), micro_batch=1)
    assert not with_formats(whole, profile((0.2,) * 3), devices("cpu", "cpu")).channels_last


def test_times_are_those_of_the_faster_format() -> None:
    last = SegmentTimes(size=1, seconds=((0.2, 0.1, 0.1), (0.1, 0.1, 0.1), (0.1, 0.0, 0.0)), update_s=0.0, call_s=0.0)
    found = compared(SegmentTimes(size=1, seconds=SECONDS, update_s=0.5, call_s=0.25), last)
    assert found.seconds == (SECONDS[0], last.seconds[1], SECONDS[2])
    assert found.last_gain_s == pytest.approx((-0.1, 0.1, 0.0))
    assert (found.update_s, found.call_s) == (0.5, 0.25)


@pytest.mark.parametrize(("dtype", "work"), [(torch.float32, 2 * 8 * 6 * 6 * 3 * 9), (torch.float64, 0)])
def test_work_of_convolutions(dtype: torch.dtype, work: int) -> None:
    """It is counted in multiplications, of the types that oneDNN convolves; small models have too little of it."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)).to(dtype)
    batch = torch.randn(2, 3, 8, 8, dtype=dtype), torch.randint(5, (2,))
    traced = TracedModel(capture(model, nn.functional.cross_entropy, batch), backward=True)
    assert convolution_work(traced.divide()) == work < LEAST_WORK
