"""What onebox is compared with, in processes of their own: plain eager PyTorch, and DistributedDataParallel on Gloo.

Reads numbers of steps from standard input, one a line, runs them, and prints how many seconds they took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import BATCH, batches, make
from torch import nn


def training(name: str, wrap: Callable[[nn.Module], nn.Module], seed: int) -> Callable[[int], None]:
    """Return what runs so many training steps of a model."""
    model, optimizer = make(name)
    wrapped = wrap(model)
    data = batches(8, BATCH, seed)

    def run(steps: int) -> None:
        for step in range(steps):
            images, labels = data[step % len(data)]
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(wrapped(images), labels)
            loss.backward()
            optimizer.step()
        loss.item()

    return run


def serve(run: Callable[[int], None]) -> None:
    """Run steps as told."""
    for line in sys.stdin:
        begin = time.perf_counter()
        run(int(line))
        print(time.perf_counter() - begin, flush=True)


def main() -> None:
    """``peers.py eager MODEL`` or ``peers.py ddp MODEL RANK SIZE PORT``."""
    torch.set_num_threads(1)
    kind, name, *rest = sys.argv[1:]
    if kind == "eager":
        serve(training(name, lambda model: model, 0))
        return
    rank, size, port = map(int, rest)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        serve(training(name, lambda m: nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True), rank))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
