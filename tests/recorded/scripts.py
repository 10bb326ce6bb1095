"""Scripts on virtual devices: plain PyTorch that says ``vgpu`` or ``cuda``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import onebox
from tests.recorded.hashing import hash_of, text
from tests.recorded.inner import alias_cuda, spawn
from tests.recorded.models import CASES

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script on virtual devices.

    Its messages are not recorded: operators travel together that come while earlier ones are on their way, so what is
    in a message depends on times.

    Args:
        body: The script; it returns what is recorded.
        workers: Devices of the pool.
    """

    body: Callable[[], Record]
    workers: int = 2

    def __call__(self, folder: Path) -> Record:
        with onebox.open(f"cpu*{self.workers}", threads=1):
            torch.manual_seed(3)
            return self.body()


def operators() -> Record:
    """Operators of many kinds: views, in place, random, indexing, reductions, linear algebra, copies."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randint(-256, 257, (6, 8), generator=generator).double() / 256).to("vgpu:0")
    found: list[Tensor] = [x + 1, x @ x.T, x.softmax(1), x.sum(0), x.std(), x.sort(1).values, x.cumsum(1)]
    y = x.clone()
    y[1:3, ::2] *= 2
    y.view(8, 6)[0].add_(x[0, :6]).clamp_(-0.5, 0.5)
    found += [y, torch.cat([x, y], 1), torch.where(x > 0, x, y), x[x > 0.25], x.nonzero(), y.topk(2).indices]
    found += [
        torch.linalg.inv(x[:, :6] + 8 * torch.eye(6, dtype=x.dtype, device="vgpu:0")),
        torch.einsum("ij,kj", x, y),
    ]
    torch.manual_seed(4)
    found += [torch.randn(5, device="vgpu:0"), torch.randperm(7, device="vgpu:0"), torch.rand(3, device="vgpu:1")]
    found += [functional.dropout(x, 0.5), x.to(torch.bfloat16) * 2, x.to("vgpu:1") - y.to("vgpu:1")]
    conv = functional.conv2d(x.view(1, 1, 6, 8), x[:3, :3].reshape(1, 1, 3, 3), padding=1)
    found += [conv, functional.interpolate(conv, scale_factor=2, mode="bilinear"), torch.fft.rfft(x).abs()]
    return {"values": [hash_of(each.cpu()) for each in found]}


def train(name: str, device: str, *, optimizer: Callable[[Any], Any], steps: int = 4, compiled: bool = False) -> Record:
    """Train a model on a device, as a script does."""
    case = CASES[name]
    model = case.model().to(device)
    function: Any = torch.compile(model, backend="onebox") if compiled else model
    stepper = optimizer(model.parameters())
    losses = []
    for inputs, targets in case.batches((4,) * steps):
        stepper.zero_grad()
        loss = case.loss(function(inputs.to(device)), targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        losses.append(loss.detach())
    return {"losses": [text(loss.item()) for loss in losses], **state(model, stepper)}


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
    """Return the hashes of parameters, buffers and the optimizer's state."""
    return {"parameters": hash_of(model.state_dict()), "optimizer": hash_of(optimizer.state_dict())}


def two_devices() -> Record:
    """Train a model whose halves are on two devices."""
    case = CASES["deep"]
    model = case.model()
    assert isinstance(model, nn.Sequential)
    first, second = model[:4].to("vgpu:0"), model[4:].to("vgpu:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for inputs, targets in case.batches((6, 6, 6)):
        optimizer.zero_grad()
        loss = case.loss(second(first(inputs.to("vgpu:0")).to("vgpu:1")), targets.to("vgpu:1"))
        loss.backward()
        optimizer.step()
        losses.append(text(loss.item()))
    return {"losses": losses, **state(model, optimizer)}


def mixed_precision() -> Record:
    """Train in float16 with a scaler, by the name of cuda, the third step with an infinite gradient."""
    with alias_cuda():
        case = CASES["cnn"]
        model = case.model(torch.float32).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        losses, scales = [], []
        for step, (inputs, targets) in enumerate(case.batches((4,) * 5, torch.float32)):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = case.loss(model(inputs.cuda()), targets.cuda())
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(text(loss.item()))
            scales.append(scaler.get_scale())
        return {"losses": losses, "scales": scales, **state(model, optimizer)}


def data_parallel() -> Record:
    """Train by ``nn.DataParallel`` over two devices, which are called cuda."""
    with alias_cuda():
        case = CASES["deep"]
        model = case.model().to("cuda")
        parallel = nn.DataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for inputs, targets in case.batches((6, 5, 6)):
            optimizer.zero_grad()
            loss = case.loss(parallel(inputs.cuda()), targets.cuda())
            loss.backward()
            optimizer.step()
            losses.append(text(loss.item()))
        return {"losses": losses, **state(model, optimizer)}


def ranks() -> Record:
    """Train by ``DistributedDataParallel``, a rank for each of two devices, and a collective of each kind."""
    returned: dict[int, Record] = {}

    def main(rank: int) -> None:
        dist.init_process_group("onebox")
        device = f"vgpu:{rank}"
        case = CASES["deep"]
        model = nn.parallel.DistributedDataParallel(case.model().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for inputs, targets in case.batches((6, 6, 6)):
            optimizer.zero_grad()
            loss = case.loss(model(inputs.chunk(2)[rank].to(device)), targets.chunk(2)[rank].to(device))
            loss.backward()
            optimizer.step()
            losses.append(text(loss.item()))
        x = torch.arange(4.0, device=device) + rank
        dist.all_reduce(x)
        gathered = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(gathered, x * (rank + 1))
        scattered = torch.empty(2, device=device)
        dist.reduce_scatter(scattered, list(x.chunk(2)))
        dist.broadcast(x, src=1)
        collectives = hash_of([x, gathered, scattered])
        returned[rank] = {"losses": losses, "collectives": collectives, **state(model.module, optimizer)}
        dist.destroy_process_group()

    spawn(main, nprocs=2)
    return {f"rank {rank}": returned[rank] for rank in sorted(returned)}


RUNS: dict[str, Script] = {
    "vgpu: operators": Script(body=operators),
    "vgpu: training": Script(
        body=lambda: train("cnn", "vgpu:1", optimizer=lambda own: torch.optim.AdamW(own, lr=1e-2))
    ),
    "vgpu: training many steps, dropout": Script(
        body=lambda: train("dropping", "vgpu", optimizer=lambda own: torch.optim.SGD(own, lr=0.1), steps=12)
    ),
    "vgpu: lstm": Script(body=lambda: train("recurrent", "vgpu", optimizer=torch.optim.RMSprop)),
    "vgpu: compiled": Script(
        body=lambda: train("deep", "vgpu", optimizer=lambda own: torch.optim.SGD(own, lr=0.1), compiled=True)
    ),
    "vgpu: a model on two devices": Script(body=two_devices),
    "vgpu: float16 with a scaler, as cuda": Script(body=mixed_precision),
    "vgpu: data parallel, as cuda": Script(body=data_parallel),
    "vgpu: a process group": Script(body=ranks),
}
