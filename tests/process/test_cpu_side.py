"""The CPU side of workers: the instruction sets that they use, the cores that they are on, and the formats of maps."""

from __future__ import annotations

import os
import pathlib

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import onebox
from onebox.pool.backends import local
from onebox.pool.launch.cpu_affinity import CoreAllocator, online_cores
from onebox.worker.system.instruction_sets import used_instruction_sets
from tests.kit.models import CASES
from tests.kit.reference import assert_same
from tests.kit.stages import reference, run, staged


def test_workers_use_the_instruction_sets_that_a_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that limit libraries reach workers, which say what they use; a device without values says none."""
    own = used_instruction_sets()  # which this process's libraries settle with their first operator
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    with onebox.open("cpu,sim") as pool:
        cpu, sim = (device.instructions for device in pool.devices)
    assert (cpu.aten, cpu.onednn) == ("DEFAULT", "SSE4.1")
    assert cpu.hardware == own.hardware
    assert (sim.aten, sim.onednn, sim.hardware) == ("", "", ())


@pytest.mark.feature("CPU workers: Train stages with channels last")
@pytest.mark.parametrize(("model", "devices"), [("unet", (0, 1, 0)), ("cnn", (1,))])
def test_stages_with_channels_last_train_as_one_process(
    model: str, devices: tuple[int, ...], pool: onebox.Pool
) -> None:
    """All stages, then every second one, whose neighbours on the same device are as captured."""
    plain = staged(model, devices)
    sizes = (6, 6, 6)
    expected = reference(model, plain, sizes)
    for every in (1, 2):
        stages = tuple(replace(stage, channels_last=place % every == 0) for place, stage in enumerate(plain.stages))
        plan = replace(plain, stages=stages)
        assert_same(run(pool, model, plan, sizes), expected)


@pytest.mark.feature("CPU workers: Fuse activations that are written out")
def test_fused_activations_train_as_one_process(pool: onebox.Pool, tmp_path: pathlib.Path) -> None:
    """In less memory; a run that is resumed fuses, too."""
    plan, sizes = staged("gpt2", (0, 1)), (6, 6, 6)
    assert_same(run(pool, "gpt2", plan, sizes, fuse=True), reference("gpt2", plan, sizes))
    case = CASES["gpt2"]
    peaks = []
    for fuse in (False, True):
        model = case.model()
        with onebox.Trainer(
            model, case.loss, sgd(model), pool=pool, plan=plan, engine=onebox.Engine(fuse=fuse)
        ) as trainer:
            peaks.append(trainer.predicted_memory(*case.batches([6])[0]))
            trainer.save(tmp_path)
    assert all(fused < plain for plain, fused in zip(peaks[0].values(), peaks[1].values(), strict=True))
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, sgd(model), pool=pool) as trainer:
        assert trainer.engine.fuse


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def on_host(process: int) -> set[int]:
    """Return the cores that most threads of a worker may run on."""
    threads = [int(path.name) for path in pathlib.Path(f"/proc/{process}/task").iterdir()]
    return set().union(*(os.sched_getaffinity(thread) for thread in threads))


def test_workers_of_a_host_have_cores_of_their_own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pools share the cores; a third one gets none, and so does who was limited; cores come back with a pool."""
    every = online_cores()
    if len(every) < 2 or os.sched_getaffinity(0) != every:
        pytest.skip("needs two cores and all of the host's")
    monkeypatch.setattr(local, "CoreAllocator", lambda: CoreAllocator(tmp_path))
    rest = len(every) - 1

    def cores_of(pool: onebox.Pool) -> list[set[int]]:
        return [os.sched_getaffinity(process) for process in pool.process_ids]

    with onebox.open("cpu", threads=1) as first:
        (one,) = cores_of(first)
        assert len(one) == 1
        assert on_host(first.process_ids[0]) == every, "threads that wait are on any core"
        with onebox.open("cpu,sim", threads=rest) as second, onebox.open("cpu", threads=1) as third:
            assert cores_of(second) == [every - one, every]
            assert cores_of(third) == [every]
    with onebox.open("cpu", threads=len(every)) as again:
        assert cores_of(again) == [every]
        dealt = CoreAllocator(tmp_path)
        assert dealt.allocate([1]) == ((),), "all cores are taken"
    assert dealt.allocate([1, 0]) == ((min(one),), ())
    dealt.close()
