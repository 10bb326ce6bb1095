"""DistributedDataParallel, as the tutorials of PyTorch have it: a process for each rank, started by torchrun."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def main() -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    samples, labels = torch.randn(STEPS * 32, 16, dtype=torch.float64), torch.randint(0, 4, (STEPS * 32,))
    parallel = DistributedDataParallel(model.to(device), device_ids=[local] if on_gpu else None)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        mine = slice(32 * step + rank, 32 * (step + 1), size)
        scores = parallel(samples[mine].to(device))
        loss = nn.functional.cross_entropy(scores, labels[mine].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    if rank == 0:
        print(json.dumps({"losses": losses, "ranks": size}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
