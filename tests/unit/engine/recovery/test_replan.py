"""Plans that are sought for the devices that are left, on pools that nobody has opened."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from onebox.cost import store
from onebox.cost.model_profile import SegmentTimes
from onebox.engine.problem.planner_problem import CachedTimes, divided_bytes, times_key
from onebox.engine.recovery.replan import ReplanWorkload, replan_devices
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.errors import PlanError
from onebox.plan import ASYNC, Plan, Stage, UpdateAt
from onebox.pool import DeviceInfo, Pool

WIDTH, LAYERS, BATCH, SIZE = 32, 4, 8, 2
DEVICES = 4
LAYER_BYTES = 4 * WIDTH * WIDTH * 4
"""Of a layer's weight, its gradient and what Adam remembers."""

PLENTY = 1 << 30


class Left:
    """What a plan is sought for: devices, some of which have gone."""

    def __init__(self, gone: set[int], memory_bytes: int = PLENTY) -> None:
        self.devices = tuple(
            DeviceInfo(
                number=number,
                name="a CPU",
                device="cpu",
                host="localhost",
                memory_bytes=memory_bytes,
                threads=1,
            )
            for number in range(DEVICES)
        )
        self.gone = frozenset(gone)
        self.present = tuple(number for number in range(DEVICES) if number not in gone)
        self.links: dict[Any, Any] = {}
        self.plain_links = False

    def __len__(self) -> int:
        return DEVICES


@functools.cache
def workload() -> ReplanWorkload:
    """Return what is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = torch.optim.Adam(model.parameters())
    trained = frozenset(f"model.{name}" for name, _ in model.named_parameters())
    recipe = CaptureSpec(
        model=model, loss=nn.functional.mse_loss, metrics={}, precision="fp32", device_type="cpu", trained=trained
    )
    x_BD = torch.zeros(BATCH, WIDTH)
    return ReplanWorkload(
        captures=Captures(recipe), optimizer=optimizer, batch=as_batch(x_BD, x_BD), max_norm=0.0, in_flight=2
    )


@functools.cache
def names() -> tuple[str, ...]:
    """Return the model's segments."""
    return workload().captures.segments(workload().batch, SIZE)


def staged(*replicas: tuple[tuple[int, ...], ...]) -> Plan:
    bounds = [len(names()) * place // len(replicas) for place in range(len(replicas) + 1)]
    stages = tuple(
        Stage(segments=names()[bounds[place] : bounds[place + 1]], replicas=found, shares=(1.0,) * len(found))
        for place, found in enumerate(replicas)
    )
    return Plan(stages=stages, micro_batch=SIZE)


def found(plan: Plan, gone: set[int], memory_bytes: int = PLENTY) -> Plan:
    return replan_devices(plan, workload(), cast(Pool, Left(gone, memory_bytes)))


@pytest.fixture(autouse=True)
def no_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


SHAPES = (
    lambda: staged(((0,),), ((1,),), ((2,),), ((3,),)),
    lambda: staged(((0, 1),), ((2, 3),)),
    lambda: staged(((0,), (1,)), ((2,), (3,))),
    lambda: staged(((0,), (1,), (2,)), ((3,),)),
    lambda: staged(((0,),), ((1,),), ((0,),), ((1,),)),
    lambda: Plan.data_parallel(range(DEVICES), [1.0, 2.0, 3.0, 4.0], micro_batch=SIZE),
    lambda: Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=SIZE, sync="client"),
)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SHAPES), st.sets(st.integers(0, DEVICES - 1), max_size=DEVICES - 1), st.floats(1.5, 9.0))
def test_what_is_found_computes_every_segment_once_on_what_is_left_within_its_memory(
    shape: Any, gone: set[int], layers: float
) -> None:
    plan, memory_bytes = shape(), int(layers * LAYER_BYTES)
    try:
        new = found(plan, gone, memory_bytes)
    except PlanError as error:
        assert error.missing_bytes is not None and error.missing_bytes > 0
        most = -(-LAYERS // (DEVICES - len(gone)))  # layers of a device, if all that are left have their part
        assert layers < 1.5 * most + 1  # a layer takes about 1.4 times its state
        return
    if not gone & set(plan.devices):
        assert new is plan
        return
    assert set(new.devices) <= set(range(DEVICES)) - gone
    computed = [name for stage in new.stages for name in stage.segments or names()]
    assert sorted(computed) == sorted(names())
    assert new.micro_batches(BATCH) == plan.micro_batches(BATCH)
    assert all(abs(sum(stage.shares) - 1.0) < 1e-9 for stage in new.stages)
    peaks = workload().peaks(new, cast(Pool, Left(gone, memory_bytes)))
    assert max(peaks.values()) <= memory_bytes


def test_a_shape_that_can_be_kept_is_kept() -> None:
    new = found(staged(((0,), (1,)), ((2,), (3,))), {1, 2})
    assert [stage.replicas for stage in new.stages] == [((0,),), ((3,),)]


def test_steps_that_are_late_stay_so_within_the_memory() -> None:
    """What is sought is asynchronous, and counted with the versions that it needs."""
    late = dataclasses.replace(workload(), staleness=1)
    left = cast(Pool, Left({2, 3}, int(4.6 * LAYER_BYTES)))
    new = replan_devices(replace(staged(((0,),), ((1,),), ((2,),), ((3,),)), schedule=ASYNC), late, left)
    assert (new.schedule, new.devices, len(new.stages)) == (ASYNC, (0, 1), 2)
    taken = late.peaks(new, left)
    assert max(taken.values()) <= left.devices[0].memory_bytes
    alone = Plan.data_parallel([0], [1.0], micro_batch=SIZE)
    assert late.peaks(alone, left)[0] - workload().peaks(alone, left)[0] >= LAYERS * LAYER_BYTES // 4


def test_a_shape_that_can_be_kept_but_has_no_room_is_given_up() -> None:
    """One device has no room for what two shared; with the idle ones it is cut into stages."""
    plan = staged(((0, 1),))
    new = found(plan, {1, 2}, int(3.6 * LAYER_BYTES))
    assert set(new.devices) == {0, 3}
    with pytest.raises(PlanError):
        found(plan, {1, 2, 3}, int(3.6 * LAYER_BYTES))


def test_times_that_were_measured_before_are_heeded() -> None:
    plan = staged(((0,),), ((1,),), ((2,),), ((3,),))
    room = int(4.5 * LAYER_BYTES)  # for three layers, so that replicas of the whole model are no choice
    counted = found(plan, {2, 3}, room)
    assert [len(stage.segments) for stage in counted.stages] == [LAYERS // 2] * 2
    slow, quick = (3e-3,) * 3, (1e-3,) * 3
    measured = SegmentTimes(size=SIZE, seconds=(slow, *[quick] * (len(names()) - 1)), update_s=0.0, call_s=1e-5)
    programs_bytes = divided_bytes(workload().captures, workload().batch, SIZE, workload().optimizer)[1]
    key = times_key(programs_bytes.graph, Left(set()).devices, workload().optimizer, SIZE, "fp32")
    store(key, CachedTimes(times={"cpu": measured}))
    assert found(plan, {2, 3}, room).stages[0].segments == names()[:1]


def test_when_all_have_gone_that_is_said() -> None:
    with pytest.raises(PlanError, match="every device of the pool has gone"):
        found(staged(((0,),)), set(range(DEVICES)))


@functools.cache
def lively() -> ReplanWorkload:
    """Return a model that makes more than it holds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(2 * LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    trained = frozenset(f"model.{name}" for name, _ in model.named_parameters())
    recipe = CaptureSpec(
        model=model, loss=nn.functional.mse_loss, metrics={}, precision="fp32", device_type="cpu", trained=trained
    )
    x_BD = torch.zeros(2048, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    batch = as_batch(x_BD, x_BD)
    return ReplanWorkload(captures=Captures(recipe), optimizer=optimizer, batch=batch, max_norm=0.0, in_flight=1)


def test_steps_that_overlap_keep_activations_on_the_device() -> None:
    """What is on its way to a host's memory at a step's end cannot be left to the next one."""
    size = lively().batch.size // 2
    plan, work = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=size), dataclasses.replace(lively(), overlap=True)
    alone, left = Plan.data_parallel([0], [1.0], micro_batch=size), cast(Pool, Left({1, 2, 3}))
    peak = work.peaks(alone, left)[0]
    less = cast(Pool, Left({1, 2, 3}, int(peak * 0.85)))
    new = replan_devices(plan, work, less)
    assert "recompute" in {stage.policy for stage in new.stages}
    assert not {"offload", "swap"} & {stage.policy for stage in new.stages}
    assert work.peaks(new, less)[0] <= peak * 0.85


@pytest.mark.parametrize("update", ["device", "host"])
def test_what_is_left_gets_fates_where_its_memory_is_short(update: UpdateAt) -> None:
    size = lively().batch.size // 2
    plan = replace(Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=size), update=update)
    alone = replace(Plan.data_parallel([0], [1.0], micro_batch=size), update=update)
    peak = lively().peaks(alone, cast(Pool, Left(set())))[0]
    left = cast(Pool, Left({1, 2, 3}, int(peak * 0.7)))
    new = replan_devices(plan, lively(), left)
    assert new.devices == (0,)
    assert new.update == update
    assert new.micro_batch == size
    assert {"recompute", "offload"} & {stage.policy for stage in new.stages}
    assert lively().peaks(new, left)[0] <= peak * 0.7
