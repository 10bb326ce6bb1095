"""How often a script waits for its virtual device: round trips of ordinary training steps, over a slow channel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import BATCH, make
from eager_script import Data, host_batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onebox
from onebox.vgpu.runtime.context import current_context
from tests.kit.slow_channel import slow_channel

LATER = 5
"""Steps that are measured after the first."""

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What the steps of one kind of script cost.

    Args:
        first: Round trips of the first step.
        later: Of a later step, the mean.
        messages: Messages of a later step, the mean.
        client_ms: Milliseconds that the script itself is in a later step, the median.
    """

    first: int
    later: float
    messages: float
    client_ms: float


def kinds(device: str, other: str) -> dict[str, Step]:
    """Return the kinds of steps, by what the table calls them; each has a model of its own.

    Args:
        device: Where they are.
        other: Another device, for a model over two of them; the same one where there is no other.
    """
    return {
        "training, nothing read": training(device),
        "training, loss.item() in each step": training(device, read=True),
        "training with Adam": training(device, adam=True),
        "training with clip_grad_norm_": training(device, clip=True),
        "training under autocast (bfloat16)": training(device, amp=True),
        "training under autocast with GradScaler": training(device, amp=True, scaler=True),
        "training with checkpointing": training(device, checkpointed=True),
        "CNN with dropout, nothing read": training(device, name="cnn"),
        "training over two devices": over_two(device, other),
        "evaluation, hits counted on the device": evaluation(device, read=False),
        "evaluation, hits read in each step": evaluation(device, read=True),
        "upload of a batch": upload(device),
    }


def training(
    device: str,
    *,
    name: str = "mlp",
    read: bool = False,
    adam: bool = False,
    clip: bool = False,
    amp: bool = False,
    scaler: bool = False,
    checkpointed: bool = False,
) -> Step:
    """Return a training step."""
    model = make(name)[0].to(device)
    place = torch.device(device).type
    kind = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-3)
    scale = torch.amp.GradScaler(place, enabled=scaler)

    def step(images: Tensor, labels: Tensor) -> None:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.autocast(place, dtype=torch.bfloat16, enabled=amp):
            logits = checkpoint(model, images, use_reentrant=False) if checkpointed else model(images)
            loss = nn.functional.cross_entropy(logits, labels)
        if scaler:
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
        else:
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if read:
            loss.item()

    return step


def over_two(first: str, second: str) -> Step:
    """Return a training step of a model whose halves are on two devices."""
    body = make("mlp")[0].body
    halves = body[:3].to(first), body[3:].to(second)
    optimizer = torch.optim.SGD([*halves[0].parameters(), *halves[1].parameters()], lr=1e-3)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        logits = halves[1](halves[0](images.to(first)).to(second))
        nn.functional.cross_entropy(logits, labels.to(second)).backward()
        optimizer.step()

    return step


def evaluation(device: str, *, read: bool) -> Step:
    """Return a step of an evaluation."""
    model = make("mlp")[0].to(device).eval()
    hits = torch.zeros((), device=device)

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.no_grad():
            right = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
            hits.add_(right)
            if read:
                right.item()

    return step


def upload(device: str) -> Step:
    """Return a step that only brings data."""
    return lambda images, labels: (images.to(device), labels.to(device))


def measure_waits(pool: str, latency_s: float) -> dict[str, Waits]:
    """Run all kinds of steps behind a slow channel.

    Args:
        pool: The workers; the second is used by a model over two devices only.
        latency_s: Seconds that each message takes in addition, each way.
    """
    data = host_batches(2, BATCH)
    with slow_channel(latency_s), onebox.open(pool, threads=1) as opened:
        return {name: _measure(step, data) for name, step in kinds("vgpu:0", f"vgpu:{len(opened) - 1}").items()}


def _measure(step: Step, data: Data) -> Waits:
    streams = current_context().queues
    waits, _ = _counts()
    step(*data[0])
    first = _counts()[0] - waits
    for stream in streams:
        stream.synchronize()
    (waits, messages), times = _counts(), []
    for number in range(LATER):
        begin = time.perf_counter()
        step(*data[number % len(data)])
        times.append(time.perf_counter() - begin)
    for stream in streams:
        stream.flush()
    more_waits, more_messages = _counts()
    for stream in streams:
        stream.synchronize()
    return Waits(
        first=first,
        later=(more_waits - waits) / LATER,
        messages=(more_messages - messages) / LATER,
        client_ms=statistics.median(times) * 1e3,
    )


def _counts() -> tuple[int, int]:
    """Return how often the client has waited for a device so far, and how many messages it has sent."""
    streams = current_context().queues
    return sum(stream.channel.waits for stream in streams), sum(stream.channel.messages for stream in streams)
