"""Runs that go on with fewer devices than their plan had, under a plan that is made for what is left."""

from __future__ import annotations

import functools
import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.engine.state.checkpoint_files import read
from onebox.engine.steps.launch import StepRequest
from onebox.engine.steps.observer import StepObserver
from onebox.errors import CheckpointError, OneboxError, PlanError, PoolError
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from onebox.pool import Fault, open_pool
from onebox.pool.backends.local import LocalSource

WIDTH = 64
LAYERS = 4
STEPS = 8
SAMPLES = 12
MICRO_BATCH = 4
EVERY = 3
"""Steps between snapshots."""

LAYER_BYTES = 4 * WIDTH * WIDTH * 8
"""Of a layer's weight: itself, its gradient and what AdamW remembers."""

ROOM_BYTES = int(3.5 * LAYER_BYTES)
"""Enough for two layers and their values, not for three."""

NUMERICS = {"rtol": 1e-10, "atol": 1e-10}


def parts() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return a model of as many equal layers, with dropout between them, its loss and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)]
        model = nn.Sequential(*layers).double()
    return model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters(), lr=0.01)


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a run, [B, D] each."""
    generator = torch.Generator().manual_seed(2)
    shape = (SAMPLES, WIDTH)
    draw = functools.partial(torch.randn, shape, generator=generator, dtype=torch.float64)
    return [(draw(), draw()) for _ in range(STEPS)]


@functools.cache
def cut(stages: int) -> tuple[tuple[str, ...], ...]:
    """Return the segments of the model in so many stages of as many layers."""
    model, loss, _ = parts()
    names = TracedModel(capture(model, loss, batches()[0]), backward=True).segments
    bounds = [len(names) * place // stages for place in range(stages + 1)]
    return tuple(names[start:end] for start, end in itertools.pairwise(bounds))


def staged(*replicas: tuple[tuple[int, ...], ...], schedule: str = "1f1b") -> Plan:
    """Return a plan of equal stages, each with its replicas."""
    stages = tuple(
        Stage(segments=segments, replicas=found, shares=(1.0,) * len(found))
        for segments, found in zip(cut(len(replicas)), replicas, strict=True)
    )
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule=schedule)


def trainer_on(pool: onebox.Pool, plan: Plan) -> onebox.Trainer:
    return onebox.Trainer(*parts(), pool=pool, plan=plan, seed=3, recovery=onebox.Recovery(snapshot_every=EVERY))


def train(pool: onebox.Pool, plan: Plan) -> tuple[dict[str, Tensor], tuple[RecoveryRecord, ...], Plan | None]:
    """Train; return the weights, what was lost, and the last plan."""
    with trainer_on(pool, plan) as trainer:
        for batch in batches():
            trainer.step(*batch)
        return trainer.tensors(), trainer.recoveries, trainer.plan


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    """The weights of a run on one device."""
    with open_pool("cpu", threads=1) as pool:
        return train(pool, staged(((0,),)))[0]


@pytest.fixture
def no_restart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No worker is started again, as when its host is gone."""
    monkeypatch.setattr(LocalSource, "replace", lambda *_: None)
    yield


def four_stages() -> Plan:
    return staged(((0,),), ((1,),), ((2,),), ((3,),))


def split_layers() -> Plan:
    """Return a plan of two stages, of which the first is split over two devices."""
    return staged(((0, 1),), ((2,),))


def even_replicas() -> Plan:
    return staged(((0,), (1,)), ((2,),), schedule="zb-h1")


@pytest.mark.feature("Recovery: Go on with fewer devices")
@pytest.mark.parametrize(
    ("plan", "devices", "gone"),
    [
        (four_stages, 4, (3, 1)),  # two layers fit a device: all of both that are left are needed
        (split_layers, 3, (1,)),
        (even_replicas, 3, (2,)),
    ],
)
@pytest.mark.usefixtures("no_restart")
def test_a_new_plan_for_what_is_left_ends_with_the_same_numbers(
    plan: Callable[[], Plan], devices: int, gone: tuple[int, ...], undisturbed: dict[str, Tensor]
) -> None:
    faults = {device: (Fault("kill", "optimizerstep", 3 + turn * 2),) for turn, device in enumerate(gone)}
    with open_pool(f"cpu*{devices}", threads=1, memory=ROOM_BYTES, faults=faults) as pool:
        found, stories, last = train(pool, plan())
        assert pool.gone == set(gone)
    assert last is not None
    assert set(last.devices) == set(range(devices)) - set(gone)
    assert sorted(name for stage in last.stages for name in stage.segments) == sorted(cut(1)[0])
    assert sorted(device for story in stories for device in story.gone) == sorted(gone)
    assert stories[-1].plan == last.describe()
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(found[name], tensor, **NUMERICS)


class KillAfterRecovery(StepObserver):
    """Kills worker 0 as the first step after a recovery is about to be launched."""

    def __init__(self, trainer: onebox.Trainer) -> None:
        self._trainer = trainer

    def requested(self, work: StepRequest) -> None:
        if len(self._trainer.recoveries) == 1:
            os.kill(self._trainer.pool.process_ids[0], signal.SIGKILL)


def test_a_device_that_a_new_plan_does_without_is_not_taken_for_one_that_was_away(
    undisturbed: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps the snapshots of the only one in use, and must not be given up when that is lost in the next step."""
    replace = LocalSource.replace
    monkeypatch.setattr(
        LocalSource, "replace", lambda self, number, key: None if number == 2 else replace(self, number, key)
    )
    plan = staged(((0,),), ((1,),), ((2,),))
    with (
        open_pool("cpu*3", threads=1, faults={2: (Fault("kill", "optimizerstep", 3),)}) as pool,
        trainer_on(pool, plan) as trainer,
    ):
        trainer._run.subscribe(KillAfterRecovery(trainer))
        for batch in batches():
            trainer.step(*batch)
            trainer.wait()
        assert [story.lost for story in trainer.recoveries] == [(2,), (0,)]
        assert trainer.plan is not None and trainer.plan.devices == (0,), "such a small model is faster on one"
        assert pool.gone == {2}
        found = trainer.tensors()
    assert not [line for line in caplog.messages if "back before" in line]
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(found[name], tensor, **NUMERICS)


@pytest.mark.usefixtures("no_restart")
def test_what_does_not_fit_what_is_left_is_one_error_and_the_checkpoint_is_whole(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    faults = {1: (Fault("kill", "optimizerstep", 6),)}
    with open_pool("cpu*2", threads=1, memory=ROOM_BYTES, faults=faults) as pool:
        trainer = trainer_on(pool, staged(((0,),), ((1,),)))
        for batch in batches()[:5]:
            trainer.step(*batch)
        saved = trainer.save(tmp_path)
        with pytest.raises(PlanError, match=r"device 1 .* has gone.*bytes.*resume from the last checkpoint") as caught:
            trainer.step(*batches()[5]).item()
        assert str(saved) in str(caught.value)
        assert caught.value.device == 0
        assert caught.value.missing_bytes is not None
        assert caught.value.missing_bytes > LAYER_BYTES // 2
        for call in (trainer.tensors, lambda: trainer.step(*batches()[5]), lambda: trainer.save(tmp_path)):
            with pytest.raises(OneboxError) as again:
                call()
            assert again.value is caught.value
        assert list(tmp_path.iterdir()) == [saved]
    with open_pool("cpu*2", threads=1) as pool, onebox.Trainer.resume(tmp_path, *parts(), pool=pool) as resumed:
        for batch in batches()[resumed.steps_done :]:
            resumed.step(*batch)
        for name, tensor in resumed.tensors().items():
            torch.testing.assert_close(tensor, undisturbed[name], **NUMERICS)


def test_a_worker_that_is_lost_again_and_again_is_one_error_and_the_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, Tensor]
) -> None:
    begin = LocalSource._start

    def sickly(self: LocalSource, number: int, key: str, folder: str, _: Any) -> Any:
        return begin(self, number, key, folder, (Fault("kill", "define", 1),))

    # The plan leaves the second worker idle, so that it keeps the snapshots of the first.
    with open_pool("cpu*2", threads=1) as pool, trainer_on(pool, staged(((0,),))) as trainer:
        for batch in batches()[:5]:
            trainer.step(*batch)
        saved = trainer.save(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(LocalSource, "_start", sickly)
            os.kill(pool.process_ids[0], signal.SIGKILL)
            with pytest.raises(PoolError, match="no step ended in between; resume from the last checkpoint") as caught:
                trainer.step(*batches()[5]).item()
        with pytest.raises(PoolError) as again:
            trainer.tensors()
        assert again.value is caught.value
    with open_pool("cpu*1", threads=1) as pool, onebox.Trainer.resume(saved, *parts(), pool=pool) as resumed:
        for batch in batches()[resumed.steps_done :]:
            resumed.step(*batch)
        assert all(torch.equal(found, undisturbed[name]) for name, found in resumed.tensors().items())


def test_a_checkpoint_that_finds_no_room_is_an_error_of_saving_alone(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_pool("cpu*1", threads=1) as pool, trainer_on(pool, staged(((0,),))) as trainer:
        for batch in batches()[:5]:
            trainer.step(*batch)
        saved = trainer.save(tmp_path)
        trainer.step(*batches()[5])
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LAYER_BYTES // 2, before[1]))
            with pytest.raises(
                CheckpointError, match=r"could not be written to .*make room, or save to another"
            ) as caught:
                trainer.save(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.path == tmp_path
        assert list(tmp_path.iterdir()) == [saved]
        assert read(tmp_path).manifest.step == 5
        for batch in batches()[6:]:
            trainer.step(*batch)
        assert trainer.save(tmp_path).name == "step-00000008"
        assert all(torch.equal(found, undisturbed[name]) for name, found in trainer.tensors().items())
