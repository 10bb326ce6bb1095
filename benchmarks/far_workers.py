"""Scripts whose worker is far, 30 ms each way and 100 Mbit/s, emulated: what scripts.py measures of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from common import batches, make
from torch import Tensor, nn

import onebox
from onebox.vgpu import attach
from onebox.vgpu.runtime.context import current_context
from tests.kit.slow_channel import slow_channel

FAR_S = 0.03
FAR_BPS = 12.5e6

BATCH = 32

DARK = 0.8
"""Share of the pixels that are 0, as in MNIST."""

FIRST = 60
"""Steps before the first turn, in which operators become known and the link is measured."""

TURN_S = 4.0
"""Seconds of a turn; its last step is waited for, which takes a round trip."""

UPLOADS = ("on the device", "bytes", "floats")
"""Batches that the device has already, and uploads in each step: images as bytes, and as floats."""

READ_EVERY = 10

Data = Sequence[tuple[Tensor, Tensor]]


class Pools(NamedTuple):
    """Two pools of one worker, of which one is far."""

    near: onebox.Pool
    far: onebox.Pool


class FarSteps(NamedTuple):
    """Measured steps of a script that reads nothing.

    Args:
        near: Milliseconds of a step beside the worker, in each turn.
        far: Likewise on the far worker.
        near_bytes: Bytes of tensors sent in a step.
        far_bytes: Likewise to the far worker.
    """

    near: list[float]
    far: list[float]
    near_bytes: float
    far_bytes: float


@contextlib.contextmanager
def open_pools() -> Iterator[Pools]:
    """Open a pool with a worker of this machine, and one whose worker is taken for that of another one."""
    with contextlib.ExitStack() as stack:
        near = stack.enter_context(onebox.open("cpu", threads=1))
        stack.enter_context(slow_channel(FAR_S, FAR_BPS))
        far = stack.enter_context(onebox.open("cpu", threads=1, virtual_devices=False))
        far.near = lambda worker: False  # type: ignore[method-assign]
        yield Pools(near, far)


def images(count: int, kind: str) -> Data:
    """Return batches of images [B, 1, 28, 28], of a kind of :data:`UPLOADS`."""
    generator, made = torch.Generator().manual_seed(1), []
    for pixels, labels in batches(count, BATCH):
        dark = pixels.masked_fill(torch.rand(pixels.shape, generator=generator) < DARK, 0)
        made.append((dark if kind == "bytes" else dark / 255, labels))
    return [(x.to("vgpu:0"), y.to("vgpu:0")) for x, y in made] if kind == UPLOADS[0] else made


class Training:
    """A script that trains on the devices of the pool that was attached last.

    Args:
        name: Of the model.
        kind: Of the batches, of :data:`UPLOADS`.
    """

    def __init__(self, name: str, kind: str = UPLOADS[0]) -> None:
        self.model = make(name)[0].to("vgpu:0")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.data = images(8, kind)
        self.steps = 0

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Train for one step; return the loss, the number of hits and the norm of a gradient."""
        x, y = self.data[self.steps % len(self.data)]
        self.steps += 1
        there, labels = x.to("vgpu:0", non_blocking=True), y.to("vgpu:0", non_blocking=True)
        self.optimizer.zero_grad()
        out = self.model(there)
        loss = nn.functional.cross_entropy(out, labels)
        loss.backward()
        self.optimizer.step()
        norm = next(self.model.parameters()).grad.norm()  # type: ignore[union-attr]
        return loss, (out.argmax(1) == labels).sum(), norm

    def run(self, steps: int) -> float:
        """Train for some steps and wait for the last one; return the milliseconds of one."""
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        current_context().queues[0].synchronize()
        return (time.perf_counter() - begin_s) / steps * 1e3


def train_near_and_far(pools: Pools, name: str, kind: str, rounds: Iterable[int]) -> FarSteps:
    """Train beside a worker and far from one, in turn.

    Args:
        pools: The pools.
        name: Of the model.
        kind: Of the batches.
        rounds: Numbers of the turns.
    """
    times: tuple[list[float], list[float]] = [], []
    sent, sides = [0.0, 0.0], []
    for pool in pools:
        attach(pool)
        sides.append(Training(name, kind))
        sides[-1].run(FIRST)
    attach(pools.near)
    steps = max(1, round(TURN_S * 1e3 / sides[0].run(FIRST)))
    for turn in rounds:
        for number in (0, 1) if turn % 2 else (1, 0):  # so that a growing load of the machine meets both
            pool, side = pools[number], sides[number]
            attach(pool)
            before = pool.sent_bytes[0]
            times[number].append(side.run(steps))
            sent[number] = (pool.sent_bytes[0] - before) / steps
    return FarSteps(*times, *sent)


def round_trips(pool: onebox.Pool) -> dict[str, int]:
    """Return how often scripts wait for a far worker: that read three values of a step, and a loss at each tenth."""
    attach(pool)
    training = Training("mlp")

    def three() -> None:
        for value in training.step():
            value.item()

    def ten() -> None:
        for number in range(READ_EVERY):
            loss, *_ = training.step()
            if number == READ_EVERY - 1:
                loss.item()

    return {"three_reads": _waits(three), "ten_steps": _waits(ten)}


def _waits(run: Callable[[], Any]) -> int:
    """Return how often a function waits for the worker, once it is known what is read."""
    channel = current_context().queues[0].channel
    for _ in range(3):
        before = channel.waits
        run()
    return channel.waits - before
