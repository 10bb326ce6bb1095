"""Which stages get channels last and bf16: those whose segments were measured to gain by it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from onebox.cost.model_profile import AS_CAPTURED, ModelBytes, ModelProfile, SegmentBytes, SegmentTimes, SegmentVariant
from onebox.engine.problem.stage_formats import (
    LEAST_GAIN,
    LEAST_WORK,
    compared,
    convolution_work,
    product_work,
    ways_of,
    with_formats,
    with_precisions_of,
)
from onebox.graph import ModelPrograms, Precision, TracedModel
from onebox.plan import ActivationPolicy, Plan, Stage
from onebox.pool import DeviceInfo
from onebox.wire.protocol.responses import InstructionSets
from tests.kit.captures import capture

Ways = tuple[tuple[SegmentVariant, tuple[tuple[float, float, float], ...]], ...]

NAMES = ("first", "second", "third")
SECONDS = ((0.1, 0.1, 0.1), (0.2, 0.1, 0.1), (0.1, 0.0, 0.0))


def segment(name: str) -> SegmentBytes:
    return SegmentBytes(
        name=name, parameter_bytes=8, state_bytes=8, saved_bytes=8, late_bytes=0, forward_work_bytes=0,
        backward_work_bytes=0,
    )  # fmt: skip


LAST, NARROW, BOTH = (
    SegmentVariant(channels_last=True),
    SegmentVariant(bf16=True),
    SegmentVariant(channels_last=True, bf16=True),
)


def profile(*gains: tuple[float, ...], kind: str = "cpu", way: SegmentVariant = LAST, more: Ways = ()) -> ModelProfile:
    """Return a profile with what a way gains over the usual one, for micro-batches of 1, 2, 4 … samples."""
    times = tuple(
        SegmentTimes(
            size=1 << place,
            seconds=SECONDS,
            update_s=0.0,
            call_s=0.0,
            ways=((AS_CAPTURED, SECONDS), (way, less(own)), *more) if own else (),
        )
        for place, own in enumerate(gains)
    )
    memory = ModelBytes(graph="g", size=1, segments=tuple(map(segment, NAMES)), values=(), ties=())
    return ModelProfile(bytes=memory, times={kind: times})


def less(gains: tuple[float, ...]) -> tuple[tuple[float, float, float], ...]:
    """Return the usual seconds with something off each segment's forward."""
    return tuple((forward - gain, *rest) for (forward, *rest), gain in zip(SECONDS, gains, strict=True))  # type: ignore[misc]


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


def precisions(plan: Plan) -> list[tuple[bool, str | None]]:
    return [(stage.channels_last, stage.precision) for stage in plan.stages]


def test_bf16_has_to_be_faster_than_the_best_way_without() -> None:
    """By the least gain: what changes results has to pay."""
    gain = 0.4
    for more, chosen in (
        (((BOTH, less((0.405, 0.0, 0.0))),), (True, None)),
        (((BOTH, less((0.45, 0.0, 0.0))),), (True, "bf16")),
        (((BOTH, less((0.45, 0.0, 0.0))), (NARROW, less((0.46, 0.0, 0.0)))), (False, "bf16")),
        (((NARROW, less((0.3, 0.0, 0.0))),), (True, None)),
    ):
        measured = profile((gain, 0.0, 0.0), more=more)
        assert precisions(with_formats(plan(NAMES[:2], NAMES[2:]), measured, devices("cpu", "cpu"))) == [
            chosen, (False, None),
        ]  # fmt: skip


def test_replicas_of_several_types_agree_or_stay_as_captured() -> None:
    one = profile((0.2, 0.2, 0.2), way=NARROW)
    for other, chosen in ((0.2, "bf16"), (0.0, None)):
        times = {**one.times, **profile((other,) * 3, kind="a card", way=NARROW).times}
        stage = Stage(segments=NAMES, replicas=((0,), (1,)), shares=(1.0, 1.0))
        mixed = Plan(stages=(stage,), micro_batch=1)
        found = with_formats(mixed, ModelProfile(bytes=one.bytes, times=times), devices("cpu", "cuda:0"))
        assert precisions(found) == [(False, chosen)]


def test_plans_for_what_is_left_have_the_precisions_of_those_before() -> None:
    before = plan(NAMES[:2], NAMES[2:])
    before = replace(before, stages=(replace(before.stages[0], precision="bf16"), before.stages[1]))
    assert precisions(with_precisions_of(plan(NAMES[:1], NAMES[1:]), before, NAMES)) == [(False, "bf16"), (False, None)]
    whole = Plan.data_parallel((0,), (1.0,))
    assert with_precisions_of(whole, before, NAMES) == whole
    narrow = replace(whole, stages=(replace(whole.stages[0], precision="bf16"),))
    assert precisions(with_precisions_of(plan(NAMES[:1], NAMES[1:]), narrow, NAMES)) == [(False, "bf16")] * 2


@pytest.mark.parametrize("policy", ["offload", "swap"])
def test_a_plan_that_offloads_takes_over_codecs_of_gradients_alone(policy: ActivationPolicy) -> None:
    """No plan has coded activations and offloads others; one that recomputes has both."""
    before = plan(NAMES[:2], NAMES[2:])
    before = replace(before, stages=tuple(replace(s, gradients="int8", activations="bf16") for s in before.stages))
    after = plan(NAMES[:1], NAMES[1:])
    for chosen, expected in ((policy, "none"), ("recompute", "bf16")):
        less = replace(after, stages=(replace(after.stages[0], policy=chosen), after.stages[1]))
        found = with_precisions_of(less, before, NAMES).stages
        assert found[0].activations == expected
        assert found[0].gradients == "int8"
        assert [stage.policy for stage in found] == [stage.policy for stage in less.stages]


def test_times_are_those_of_the_fastest_way() -> None:
    seconds = ((0.2, 0.1, 0.1), (0.1, 0.1, 0.1), (0.1, 0.0, 0.0))
    plain, last = (SegmentTimes(size=1, seconds=s, update_s=0.5, call_s=0.25) for s in (SECONDS, seconds))
    found = compared({AS_CAPTURED: plain, LAST: last})
    assert found.seconds == (SECONDS[0], seconds[1], SECONDS[2])
    assert found.ways == ((AS_CAPTURED, SECONDS), (LAST, seconds))
    assert (found.update_s, found.call_s) == (0.5, 0.25)
    assert compared({AS_CAPTURED: plain}) == plain


@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_bf16_is_tried_where_it_is_asked_for_and_all_devices_have_instructions(precision: Precision) -> None:
    """A CPU without takes a thousand times as long."""
    has = InstructionSets(onednn="AVX-512 with Intel DL Boost and bfloat16 support", hardware=("AVX-512", "bf16"))
    lacks = InstructionSets(onednn="AVX2", hardware=("AVX2",))
    limited = InstructionSets(onednn="AVX2", hardware=("AVX-512", "bf16"))
    (cpu,) = devices("cpu")
    large, small = work_of(nn.Conv2d(3, 256, 3, padding=1), 64), work_of(nn.Conv2d(3, 8, 3), 8)
    matrix = work_of(nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 64)), 64)
    for said, there in (((has,), True), ((has, lacks), False), ((limited,), False)):
        found = [dataclasses.replace(cpu, instructions=each) for each in said]
        narrow = there and precision == "auto"
        assert ways_of("cpu", found, large, precision) == (AS_CAPTURED, LAST, NARROW, BOTH)[: 4 if narrow else 2]
        assert ways_of("cpu", found, matrix, precision) == (AS_CAPTURED, NARROW)[: 1 + narrow]
        assert ways_of("cpu", found, small, precision) == (AS_CAPTURED,)
    for capability, there in (((8, 0), True), ((7, 5), False)):
        (card,) = devices("cuda:0")
        narrow = there and precision == "auto"
        cards = [dataclasses.replace(card, capability=capability)]
        assert ways_of("cuda", cards, large, precision) == (AS_CAPTURED, NARROW)[: 1 + narrow]


def work_of(model: nn.Module, size: int) -> ModelPrograms:
    """Return the programs of a model of images, or of vectors."""
    x = torch.randn(4, 3, size, size) if isinstance(model, nn.Conv2d) else torch.randn(64, size)
    return TracedModel(capture(model, lambda out, _: out.mean(), (x, torch.zeros(1))), backward=True).divide()


@pytest.mark.parametrize(("dtype", "work"), [(torch.float32, 2 * 8 * 6 * 6 * 3 * 9), (torch.float64, 0)])
def test_work_of_convolutions(dtype: torch.dtype, work: int) -> None:
    """It is counted in multiplications, of the types that oneDNN convolves; small models have too little of it."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)).to(dtype)
    batch = torch.randn(2, 3, 8, 8, dtype=dtype), torch.randint(5, (2,))
    traced = TracedModel(capture(model, nn.functional.cross_entropy, batch), backward=True)
    assert convolution_work(traced.divide()) == work < LEAST_WORK
    assert product_work(traced.divide()) == work + (2 * 288 * 5 if work else 0)
