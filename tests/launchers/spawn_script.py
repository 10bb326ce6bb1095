"""``torch.multiprocessing.spawn``: a process for each rank, started by the script itself."""

from __future__ import annotations

import json
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, size: int, port: int, results: mp.Queue) -> None:
    on_gpu = torch.cuda.is_available()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=size)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4).double().to(device), device_ids=[rank] if on_gpu else None)
    samples = torch.randn(20, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = model(samples[rank::size].to(device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    results.put((rank, losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size = int(os.environ["RANKS"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(size, port, results), nprocs=size)
    found = sorted(results.get() for _ in range(size))
    print(json.dumps({"losses": [loss for _, losses in found for loss in losses], "ranks": size}), flush=True)
