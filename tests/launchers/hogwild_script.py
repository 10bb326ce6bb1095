"""Several processes that update one shared model in turn, so that the result does not depend on their speeds."""

from __future__ import annotations

import json

import torch
import torch.multiprocessing as mp
from torch import nn


def work(rank: int, model: nn.Module, before: mp.Event, after: mp.Event, losses: mp.SimpleQueue) -> None:
    before.wait()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        loss = (model(torch.randn(16, 8, generator=generator, dtype=torch.float64).to(device)) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.put(loss.item())
    after.set()


if __name__ == "__main__":
    context = mp.get_context("spawn")
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    if torch.cuda.is_available():
        model.cuda()
    model.share_memory()
    turns, losses = [context.Event() for _ in range(3)], context.SimpleQueue()
    workers = [
        context.Process(target=work, args=(rank, model, turns[rank], turns[rank + 1], losses)) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    turns[0].set()
    found = [losses.get() for _ in workers]
    for worker in workers:
        worker.join()
    assert all(worker.exitcode == 0 for worker in workers)
    weights = sum(parameter.sum().item() for parameter in model.parameters())
    print(json.dumps({"losses": [*found, weights], "ranks": 1}), flush=True)
