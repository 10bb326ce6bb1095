"""DistributedDataParallel with ranks that are threads gives what one process gives, in float64."""

from __future__ import annotations

import argparse
import copy
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import onebox
from onebox.vgpu import spawn
from onebox.vgpu.runtime.context import current_context
from tests.process.vgpu.jobs import (
    EACH,
    EXACT,
    RANKS,
    STEPS,
    Net,
    assert_same,
    batch,
    plainly_trained,
    sgd,
    share,
    state_of,
    together,
)

DEVICES = RANKS
pytestmark = pytest.mark.usefixtures("pool", "in_float64")


@pytest.mark.feature("Virtual devices: Train with DistributedDataParallel")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-4},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"device_ids": None},
    ],
    ids=str,
)
def test_ddp_trains_as_one_process(options: dict[str, Any]) -> None:
    def run(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)  # they start with the parameters of rank 0
        model = DistributedDataParallel(
            copy.deepcopy(models[rank]).to(f"vgpu:{rank}"), **{"device_ids": [rank], **options}
        )
        optimizer = sgd(model)
        for step in range(STEPS):
            x, y = share(rank, step)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return state_of(model.module)

    models = [Net() for _ in range(RANKS)]
    states = together(run, backend="nccl")
    assert_same(plainly_trained(models[0]), states)


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "power"])
def test_ddp_with_communication_hooks(hook: str) -> None:
    def run(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"), bucket_cap_mb=1e-3)
        if hook == "power":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(default_hooks, f"{hook}_hook", default_hooks.fp16_compress_hook))
        optimizer = sgd(model)
        for step in range(STEPS):
            x, y = share(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return state_of(model.module)

    plain = Net()
    states = together(run)
    if hook == "allreduce":
        assert_same(plainly_trained(plain), states)
        return
    for name, value in plainly_trained(plain).state_dict().items():
        assert all(torch.equal(state[name], states[0][name]) for state in states)
        torch.testing.assert_close(states[0][name], value, rtol=0, atol=1e-3 if hook == "fp16" else 0.5)


def test_no_forward_of_a_rank_seems_to_go_on_afterwards() -> None:
    """``torch.compile`` would cut later models at the buckets of a module that is gone."""
    entered, left = threading.Event(), threading.Event()

    def run(rank: int) -> None:
        model = DistributedDataParallel(nn.Linear(2, 2).to(f"vgpu:{rank}"))
        if rank == 0:
            with model._inside_ddp_forward():
                entered.set()
                assert left.wait(60)
        elif rank == 1:
            assert entered.wait(60)
            with model._inside_ddp_forward():
                left.set()
                time.sleep(0.2)  # the other one leaves first

    assert DistributedDataParallel._active_ddp_module is None
    together(run)
    assert DistributedDataParallel._active_ddp_module is None


class Forked(nn.Module):
    """A model that uses some of its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 2) for _ in range(RANKS + 1)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x) + self.branches[0](x)


def test_ddp_with_parameters_that_some_ranks_do_not_use() -> None:
    def run(rank: int) -> dict[str, Tensor | None]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"), find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            model(x.to(f"vgpu:{rank}"), rank).square().sum().backward()
        named = model.module.named_parameters()
        return {name: None if value.grad is None else value.grad.cpu() for name, value in named}

    plain = Forked()
    x = torch.randn(3, 4)
    grads = together(run)
    sum(plain(x, rank).square().sum() for rank in range(RANKS)).backward()
    for name, value in plain.named_parameters():
        for each in grads:
            if value.grad is None:
                assert each[name] is None
            else:
                torch.testing.assert_close(each[name], value.grad / RANKS, **EXACT)


def test_ddp_accumulates_gradients_without_exchange() -> None:
    def run(rank: int) -> list[Tensor]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"))
        with model.no_sync():
            x, y = share(rank, 0)
            nn.functional.cross_entropy(model(x), y).backward()
        own = [value.grad.cpu() for value in model.parameters()]
        x, y = share(rank, 1)
        nn.functional.cross_entropy(model(x), y).backward()
        return own + [value.grad.cpu() for value in model.parameters()]

    plain = Net()
    results = together(run)
    for step in range(2):
        x, y = batch(step)
        nn.functional.cross_entropy(plain(x), y).backward()
    count = len(list(plain.parameters()))
    assert not torch.equal(results[0][0], results[1][0])
    for result in results:
        for value, known in zip(result[count:], plain.parameters(), strict=True):
            torch.testing.assert_close(value, known.grad, **EXACT)


def test_ddp_shares_buffers_of_rank_0() -> None:
    def run(rank: int) -> list[dict[str, Tensor]]:
        torch.manual_seed(rank)
        norm = nn.BatchNorm1d(4).to(f"vgpu:{rank}")
        norm.running_mean.fill_(rank + 1)
        model = DistributedDataParallel(norm)
        states = [state_of(norm)]
        for step in range(2):
            model(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(f"vgpu:{rank}"))
            states.append(state_of(norm))
        model.eval()
        model(torch.randn(5, 4, device=f"vgpu:{rank}"))
        return states

    states = together(run)
    assert all(each[0]["running_mean"].eq(1).all() for each in states)
    plain = nn.BatchNorm1d(4)
    plain.running_mean.fill_(1)
    for step in range(2):
        plain(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step)))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(states[0][2][name], value, **EXACT)
    assert not torch.equal(states[1][2]["running_mean"], states[0][2]["running_mean"]), "until the next forward"


def test_ddp_with_uneven_inputs() -> None:
    """Rank r has r + 1 batches; ranks that have no more shadow the others' exchanges."""

    def run(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=False):
            for step in range(rank + 1):
                x, y = share(rank, step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return state_of(model.module)

    plain = Net()
    states = together(run)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(RANKS):
        x, y = (torch.cat(part.chunk(RANKS)[step:]) for part in batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert_same(plain, states)


class Halves(nn.Module):
    """A model over two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.places = first, second
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)

    def place(self) -> Halves:
        self.first.to(self.places[0])
        self.second.to(self.places[1])
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.to(self.places[0]))).to(self.places[1]))


def test_ddp_of_a_model_over_devices() -> None:
    def run(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(plain)
        model.places = f"vgpu:{rank}", f"vgpu:{rank + 2}"
        parallel = DistributedDataParallel(model.place())
        optimizer = sgd(parallel)
        for step in range(3):
            optimizer.zero_grad()
            parallel(x.chunk(2)[rank] + step).square().mean().backward()
            optimizer.step()
        return state_of(model)

    plain = Halves("cpu", "cpu")
    x = torch.randn(6, 4)
    with onebox.open("cpu*4", threads=1):
        states = together(run, ranks=2)
    optimizer = sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        plain(x + step).square().mean().backward()
        optimizer.step()
    assert_same(plain, states)


def test_a_step_waits_for_nothing() -> None:
    def run(rank: int) -> list[int]:
        model = DistributedDataParallel(Net().to(f"vgpu:{rank}"), device_ids=[rank])
        optimizer = sgd(model)
        stream = current_context().queues[rank]
        waited = []
        for step in range(6):
            x, y = share(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            waited.append(stream.channel.waits)
        return waited

    for waited in together(run):
        assert waited[-1] == waited[2], "the buckets are as they remain, and all operators are known"


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_over_all_ranks(affine: bool) -> None:
    """Statistics and gradients are those of the whole batch, also where the ranks' parts are unequal."""
    sizes = (4, 1, 3)

    def run(rank: int) -> list[Any]:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).to(f"vgpu:{rank}")
        parallel = DistributedDataParallel(model, device_ids=[rank])
        part = x.split(sizes)[rank].to(f"vgpu:{rank}").requires_grad_()
        out = parallel(part)
        (out.pow(3).sum() * RANKS).backward()
        grads = [value.grad.cpu() for value in model.parameters()]
        return [out.detach().cpu(), part.grad.cpu(), grads, state_of(model)]

    plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, affine=affine))
    x = torch.randn(sum(sizes), 2, 3, 3)
    results = together(run)
    whole = x.clone().requires_grad_()
    out = plain(whole)
    out.pow(3).sum().backward()
    torch.testing.assert_close(torch.cat([each[0] for each in results]), out.detach(), **EXACT)
    torch.testing.assert_close(torch.cat([each[1] for each in results]), whole.grad * RANKS, rtol=0, atol=1e-10)
    for each in results:
        for value, known in zip(each[2], plain.parameters(), strict=True):
            torch.testing.assert_close(value, known.grad, rtol=0, atol=1e-10)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(each[3][name], value, **EXACT)


# ---- a script as it is written for processes


def main_worker(gpu: int, gpus: int, args: argparse.Namespace) -> None:
    args.gpu = gpu
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group(backend="nccl", init_method="env://", world_size=gpus, rank=gpu)
    torch.vgpu.set_device(args.gpu)  # type: ignore[attr-defined]
    torch.manual_seed(args.seed)
    x, y = batch(0)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=1, sampler=sampler)
    model = DistributedDataParallel(Net().to(f"vgpu:{args.gpu}"), device_ids=[args.gpu])
    optimizer = sgd(model)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y.to(args.gpu))
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"state": model.state_dict(), "optimizer": optimizer.state_dict()}, args.file)
    dist.barrier()
    saved = torch.load(args.file, map_location={"vgpu:0": f"vgpu:{gpu}"})
    assert saved["state"]["module.conv.weight"].get_device() == gpu
    model.load_state_dict(saved["state"])
    optimizer.load_state_dict(saved["optimizer"])
    correct = torch.tensor([0.0, 0.0], device=args.gpu)
    with torch.no_grad():
        for x, y in loader:
            correct += torch.stack([(model(x.to(gpu)).argmax(1) == y.to(gpu)).sum(), torch.tensor(len(y), device=gpu)])
    dist.all_reduce(correct)
    args.results.put((gpu, loss.item(), correct.tolist()))
    dist.destroy_process_group()


def test_a_script_for_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # the script sets them; afterwards they are as before
    results: queue.Queue[Any] = queue.Queue()  # cannot be copied, which ranks share as processes do
    args = argparse.Namespace(seed=5, file=tmp_path / "saved.pt", results=results)
    spawn(main_worker, nprocs=RANKS, args=(RANKS, args))
    assert not hasattr(args, "gpu"), "ranks have copies of their own"
    found = sorted(results.get_nowait() for _ in range(RANKS))
    assert [gpu for gpu, _, _ in found] == list(range(RANKS))
    assert len({loss for _, loss, _ in found}) == RANKS, "each has samples of its own"
    assert len({tuple(correct) for _, _, correct in found}) == 1
    assert found[0][2][1] == RANKS * EACH
