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


class Decoder(nn.Module):
    """A GPT that decodes greedily: 4 layers of 256 with 4 heads, and 512 words.

    Args:
        growing: Whether the cache of keys and values grows by a token at a time, rather than have its final size.
    """

    def __init__(self, *, growing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.growing = growing
        self.words, self.places = nn.Embedding(512, 256), nn.Embedding(LONGEST, 256)
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(9))
        self.projections = nn.ModuleList(nn.Linear(256, 768) for _ in range(4))
        self.joins = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.widenings = nn.ModuleList(nn.Linear(256, 1024) for _ in range(4))
        self.narrowings = nn.ModuleList(nn.Linear(1024, 256) for _ in range(4))

    def forward(self, word: Tensor, place: Tensor, cache: list[Tensor]) -> Tensor:
        """Return the next word [1, 1], and add this one's keys and values to the cache.

        Args:
            word: The word [1, 1].
            place: Its place [1].
            cache: Keys and values of each layer [1, 4, T, 64], in turn.
        """
        x = self.words(word) + self.places(place)
        seen = None if self.growing else (torch.arange(LONGEST, device=word.device) <= place)[None, None, None]
        for layer in range(4):
            parts = self.projections[layer](self.norms[2 * layer](x)).view(1, 1, 3, 4, 64).permute(2, 0, 3, 1, 4)
            for number, made in zip((2 * layer, 2 * layer + 1), parts[1:].unbind(0), strict=True):
                if self.growing:
                    cache[number] = torch.cat([cache[number], made], 2)
                else:
                    cache[number].index_copy_(2, place, made)
            keys, values = cache[2 * layer : 2 * layer + 2]
            found = nn.functional.scaled_dot_product_attention(parts[0], keys, values, attn_mask=seen)
            x = x + self.joins[layer](found.transpose(1, 2).reshape(1, 1, 256))
            wide = nn.functional.gelu(self.widenings[layer](self.norms[2 * layer + 1](x)))
            x = x + self.narrowings[layer](wide)
        return (self.norms[8](x) @ self.words.weight.t()).argmax(-1)


LONGEST = 128
"""The most tokens of a text."""


def decode(cache: str, device: str) -> Callable[[int, int], object]:
    """Return what decodes so many tokens, and reads each."""
    growing = cache == "growing"
    model = Decoder(growing=growing).to(device)

    @torch.no_grad()
    def run(tokens: int, every: int) -> list[int]:
        held = [torch.zeros(1, 4, 0 if growing else LONGEST, 64, device=device) for _ in range(8)]
        word = torch.zeros(1, 1, dtype=torch.int64, device=device)
        read = []
        for number in range(tokens):
            word = model(word, torch.tensor([number], device=device), held)
            read.append(int(word))
        return read

    return run


def serve(run: Callable[[int, int], object]) -> None:
    """Run steps as told."""
    for line in sys.stdin:
        steps, every = [*map(int, line.split()), READ_EVERY][:2]
        begin = time.perf_counter()
        run(steps, every)
        print(time.perf_counter() - begin, flush=True)


def main() -> None:
    """``eager_script.py one MODEL DEVICE [POOL]``, ``decode CACHE DEVICE [POOL]`` or ``threads MODEL COUNT POOL``."""
    if len(sys.argv) == 1:
        print(main.__doc__)
        return
    torch.set_num_threads(1)
    kind, name, what, *pool = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        if pool:
            stack.enter_context(onebox.open(pool[0], threads=1))
        if kind == "threads":
            serve(Replicas(name, [f"vgpu:{k}" for k in range(int(what))]).run)
        serve({"one": one, "decode": decode}[kind](name, what))


if __name__ == "__main__":
    main()
