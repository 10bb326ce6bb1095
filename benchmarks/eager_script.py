"""The scripts that eager.py runs, in processes of their own: ordinary PyTorch that is told its device and nothing else.

Reads "STEPS" or "STEPS EVERY" from standard input, one a line, runs so many training steps, reading the loss in every
EVERY-th of them (0: only the last), and prints how many seconds they took.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from common import BATCH, batches, make
from torch import Tensor, nn

import onebox

READ_EVERY = 10
"""Steps from one look at the loss to the next, in the script as people write it."""

Data = Sequence[tuple[Tensor, Tensor]]


def host_batches(count: int, size: int, seed: int = 0) -> Data:
    """Return batches as a loader hands them out: images [B, 1, 28, 28] of float32 and labels [B], on the host."""
    return [(images.float() / 255, labels) for images, labels in batches(count, size, seed)]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    device: str,
    steps: int,
    every: int = READ_EVERY,
) -> float:
    """Train for so many steps and return the last loss.

    Args:
        model: On the device.
        optimizer: Of its parameters.
        data: Batches on the host, used in turn.
        device: Where to compute.
        steps: How many.
        every: The loss is read in every so many steps; 0 for only the last.
    """
    for step in range(steps):
        images, labels = data[step % len(data)]
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if every and step % every == 0:
            loss.item()
    return loss.item()


def one(name: str, device: str) -> Callable[[int, int], object]:
    """Return what runs steps of a model on one device."""
    model, _ = make(name)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = host_batches(8, BATCH)
    return lambda steps, every: train(model, optimizer, data, device, steps, every)


class Replicas:
    """Data parallel by hand, as in the published experiment: a thread a device, averages made on the host.

    Args:
        name: Of the model.
        devices: One for each replica.
    """

    def __init__(self, name: str, devices: Sequence[str]) -> None:
        self.devices = devices
        self.models = [make(name)[0].to(device) for device in devices]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in self.models]
        self.data = [host_batches(8, BATCH, seed) for seed in range(len(devices))]
        self.gradients: list[Tensor] = [torch.empty(0)] * len(devices)
        self.average = torch.empty(0)
        self.barrier = threading.Barrier(len(devices), action=self.reduce)
        self.failures: list[BaseException] = []

    def reduce(self) -> None:
        """Average the gradients of all replicas."""
        self.average = torch.stack(self.gradients).mean(dim=0)

    def step(self, rank: int, images: Tensor, labels: Tensor) -> Tensor:
        """Train one replica on its own samples, with the gradients of all; return its loss."""
        device, model, optimizer = self.devices[rank], self.models[rank], self.optimizers[rank]
        parameters = list(model.parameters())
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        self.gradients[rank] = torch.cat([each.grad.flatten() for each in parameters]).cpu()
        self.barrier.wait()
        shares = self.average.to(device).split([each.numel() for each in parameters])
        for parameter, share in zip(parameters, shares, strict=True):
            parameter.grad.copy_(share.view_as(parameter))
        optimizer.step()
        return loss

    def train(self, rank: int, steps: int, every: int) -> None:
        """Run the steps of one replica: what each thread does."""
        try:
            for step in range(steps):
                images, labels = self.data[rank][step % len(self.data[rank])]
                loss = self.step(rank, images, labels)
                if every and step % every == 0:
                    loss.item()
            loss.item()
        except threading.BrokenBarrierError:
            pass  # another thread failed, and says why
        except BaseException as failure:
            self.failures.append(failure)
            self.barrier.abort()

    def run(self, steps: int, every: int) -> None:
        """Run the steps of all replicas."""
        ranks = range(len(self.devices))
        threads = [threading.Thread(target=self.train, args=(rank, steps, every)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failure in self.failures:
            raise failure


def serve(run: Callable[[int, int], object]) -> None:
    """Run steps as told."""
    for line in sys.stdin:
        steps, every = [*map(int, line.split()), READ_EVERY][:2]
        begin = time.perf_counter()
        run(steps, every)
        print(time.perf_counter() - begin, flush=True)


def main() -> None:
    """``eager_script.py one MODEL DEVICE [POOL]`` or ``eager_script.py threads MODEL COUNT POOL``."""
    if len(sys.argv) == 1:
        print(main.__doc__)
        return
    torch.set_num_threads(1)
    kind, name, what, *pool = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        if pool:
            stack.enter_context(onebox.open(pool[0], threads=1))
        serve(one(name, what) if kind == "one" else Replicas(name, [f"vgpu:{k}" for k in range(int(what))]).run)


if __name__ == "__main__":
    main()
