"""DistributedDataParallel with batches by speed gives what one process gives with all samples, in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from onebox.integrations.torch import UnevenSampler, weight_by_samples
from onebox.vgpu import SHARES
from onebox.vgpu.distributed import uneven_ranks
from onebox.vgpu.runtime.command_queue import CommandQueue
from tests.process.vgpu.jobs import RANKS, Net, assert_same, sgd, state_of, together
from tests.process.vgpu.two_ranks import launched

DEVICES = RANKS
SHARE = [4.0, 1.0, 2.0]
BATCH = 3
SAMPLES = 23

pytestmark = pytest.mark.usefixtures("pool", "in_float64")


def data() -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 2, 5, 5, generator=source), torch.randint(4, (SAMPLES,), generator=source)
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def plainly(model: nn.Module) -> nn.Module:
    """Train a model with the batches of all ranks, two epochs."""
    optimizer, samples = sgd(model), data()
    loaders = [DistributedSampler(samples, num_replicas=RANKS, rank=rank) for rank in range(RANKS)]
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        for parts in zip(*(DataLoader(samples, BATCH, sampler=each) for each in loaders), strict=True):
            x, y = (torch.cat(part) for part in zip(*parts, strict=True))
            step(model, optimizer, x, y)
    return model


@pytest.mark.feature("Launchers: Give ranks batches by the speed of their devices")
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}], ids=str)
def test_training_is_that_of_all_samples(options: dict[str, Any]) -> None:
    def run(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"), **options)
        weight_by_samples(model)
        optimizer, samples = sgd(model), data()
        batches = UnevenSampler(DistributedSampler(samples, num_replicas=RANKS, rank=rank), BATCH, shares=SHARE)
        loader = DataLoader(samples, batch_sampler=batches)
        sizes[rank] = [len(y) for _, y in loader]
        for epoch in range(2):
            batches.set_epoch(epoch)
            for x, y in loader:
                step(model, optimizer, x.to(f"vgpu:{rank}"), y.to(f"vgpu:{rank}"))
        return state_of(model.module)

    plain, sizes = Net(), dict[int, list[int]]()
    states = together(run)
    assert sizes == {0: [6, 6, 4], 1: [1, 1, 1], 2: [2, 2, 1]}
    assert_same(plainly(plain), states)


class Injected:
    """A mark of a device whose forward passes take a second, or four on the second device."""

    reached: ClassVar[dict[int, float]] = {}

    def __init__(self, queue: CommandQueue) -> None:
        self.time_s = self.reached[queue.worker] = self.reached.get(queue.worker, 1.0) + 1 + 3 * (queue.worker == 1)


def test_a_slow_rank_is_named_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One comparison, in the eighth step."""

    def run(rank: int, weighted: bool = False) -> None:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"))
        if weighted:
            weight_by_samples(model)
        optimizer, (x, y) = sgd(model), data()[:3]
        for _ in range(20):
            step(model, optimizer, x.to(f"vgpu:{rank}"), y.to(f"vgpu:{rank}"))

    plain = Net()
    monkeypatch.setattr(uneven_ranks, "Mark", Injected)
    together(run)
    assert "rank" not in capfd.readouterr().err, "devices of one kind are not compared"
    monkeypatch.setattr(uneven_ranks, "differ", lambda queues: True)
    together(run, True)
    assert "rank" not in capfd.readouterr().err, "nor are ranks that have unequal batches"
    together(run)
    said = [line for line in capfd.readouterr().err.splitlines() if "--uneven" in line]
    assert said == ["onebox: rank 1 takes 4 times as long as rank 0: --uneven would save 67 % of a step"]


SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_default_dtype(torch.float64)
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
place = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
samples = TensorDataset(torch.randn(22, 3), torch.randn(22, 2))
model = DistributedDataParallel(torch.nn.Linear(3, 2).to(place))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(samples)
loader = DataLoader(samples, batch_size=4, sampler=sampler)
sizes = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        sizes.append(len(x))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.to(place)), y.to(place)).backward()
        optimizer.step()
with open(f"{sys.argv[1]}{rank}", "w") as file:
    json.dump([sizes, model.module.weight.cpu().tolist()], file)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_an_unmodified_script_under_torchrun(tmp_path: Path) -> None:
    """The shares are those that --uneven would have measured."""
    run = ["onebox", "run", "--pool", "cpu*2", "--threads", "1", "torchrun"]
    ours = launched(run, SCRIPT, tmp_path / "ours", **{SHARES: "1,0.25"})
    theirs = launched(["torch.distributed.run"], SCRIPT, tmp_path / "theirs")
    assert [sizes for sizes, _ in ours] == [[7, 7, 5] * 2, [1, 1, 1] * 2]
    assert [sizes for sizes, _ in theirs] == [[4, 4, 3] * 2] * 2
    for _, weight in ours:
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(theirs[0][1]), rtol=0, atol=1e-12)
