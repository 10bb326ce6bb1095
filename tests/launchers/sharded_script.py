"""What PyTorch shards by itself, a process for each rank: FSDP2, tensor parallelism, functional collectives.

``sharded_script.py fully_shard | tensor_parallel | functional``
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 5


def fully_sharded(model: nn.Sequential, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Shard the parameters of each layer among the ranks."""
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def tensor_parallel(model: nn.Sequential, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Divide the first layer by columns and the second by rows."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def with_functional(model: nn.Sequential, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Take the mean of the ranks' scores, by collectives that autograd follows."""
    group = dist.group.WORLD
    assert group is not None

    def forward(x: Tensor) -> Tensor:
        rows = functional.all_gather_single_autograd(model(x), gather_dim=0, group=group)
        mine = functional.reduce_scatter_single_autograd(rows, "sum", scatter_dim=0, group=group)
        return mine / dist.get_world_size()

    return forward


WAYS = {"fully_shard": fully_sharded, "tensor_parallel": tensor_parallel, "functional": with_functional}


def main() -> None:
    way = sys.argv[1]
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    layers = nn.Linear(8, 18, dtype=torch.float64), nn.Tanh(), nn.Linear(18, 5, dtype=torch.float64)
    model = nn.Sequential(*layers).to(device)
    samples = torch.randn(STEPS, 8, 8, dtype=torch.float64)
    forward = WAYS[way](model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        mine = samples[step] if way == "tensor_parallel" else samples[step, rank::size]
        loss = forward(mine.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print(json.dumps({"losses": losses, "ranks": size}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
