"""Training on pictures for ``feed.py``: each stage alone, and all of them at once."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import onebox
from onebox.feed import Feed
from onebox.feed.sources import Cifar10
from onebox.plan import Plan
from onebox.plan.model.plan import Prediction

BATCH = 200
LEFT_OUT = 4
"""Steps at the beginning that are not counted: until they are done, the feed fills."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A kind of devices.

    Args:
        key: In the names of figures.
        name: For people.
        devices: What is opened.
        step_s: What emulated devices take for a step; 0 for real ones.
        by: What processes samples.
    """

    key: str
    name: str
    devices: str
    step_s: float = 0.0
    by: Literal["threads", "processes"] = "threads"


SIDES = (
    Side(key="cpu", name="a CPU worker, one thread", devices="cpu"),
    Side(key="sim", name="2 emulated devices of 60 ms a step", devices="sim*2", step_s=0.060),
    Side(key="process", name="2 emulated devices of 5 ms a step", devices="sim*2", step_s=0.005),
    Side(key="cpu_processes", name="a CPU worker; by processes", devices="cpu", by="processes"),
    Side(key="process_processes", name="2 of 5 ms; by processes", devices="sim*2", step_s=0.005, by="processes"),
)


class Network(nn.Module):
    """Three convolutions, two linear layers; 0.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 images [B, 3, 32, 32] to logits [B, 10]."""
        return self.body(images.to(torch.float32) / 255.0)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a round has found.

    Args:
        alone_s: Seconds that each stage takes for a batch by itself.
        fed_s: Seconds of a step with the feed.
        share: Part of it that the caller of the steps spent on uploading.
        own_share: Likewise where the steps upload their batches themselves.
    """

    alone_s: dict[str, float]
    fed_s: float
    share: float
    own_share: float


class Training:
    """A network that is trained on CIFAR-10's JPEGs.

    Args:
        side: The devices, and what processes samples.
        data: The folder with the archives.
        stack: Ends what is begun here.
    """

    def __init__(self, side: Side, data: Path, stack: ExitStack) -> None:
        self.source, self._by = Cifar10(data), side.by
        torch.manual_seed(0)
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        pool = stack.enter_context(onebox.open(side.devices, threads=1))
        count = len(pool.devices)
        plan = Plan.data_parallel(range(count), [1.0] * count)
        if side.step_s:
            stage_s = (side.step_s / 3, 0.0, 2 * side.step_s / 3)
            expected = Prediction(
                batch=BATCH, step_s=side.step_s, bubble=0.0, peak_bytes=(0,) * count, stages_s=(stage_s,)
            )
            plan = msgspec.structs.replace(plan, predicted=expected)
        loss = nn.functional.cross_entropy
        self.trainer = stack.enter_context(
            onebox.Trainer(
                model, loss, optimizer, pool=pool, plan=plan, engine=onebox.Engine(trace=False, check_every=0)
            )
        )

    def warm(self, steps: int) -> None:
        """Let everything be captured, and be as it will be."""
        self.fed(steps, 0)

    def measure(self, steps: int, turn: int) -> Turn:
        """Measure each stage alone, and all of them at once, in an order that changes with the turn."""
        alone_s: dict[str, float] = {}
        fed = own = (0.0, 0.0)
        for what in ("fed", "alone") if turn % 2 else ("alone", "fed"):
            if what == "fed":
                fed = self.fed(steps, turn)
            else:
                alone_s, own = self.alone(steps, turn)
        return Turn(alone_s=alone_s, fed_s=fed[0], share=fed[1], own_share=own[1])

    def fed(self, steps: int, epoch: int) -> tuple[float, float]:
        """Return seconds of a step with the feed, and the share of uploading."""
        with Feed(self.source, batch_size=BATCH, seed=0, process_by=self._by, upload=self.trainer.upload) as feed:
            return self._steps(((uploaded, None) for uploaded in feed.epoch(epoch)), steps)

    def alone(self, steps: int, epoch: int) -> tuple[dict[str, float], tuple[float, float]]:
        """Return seconds that each stage takes for a batch, and of computing also the share of uploading."""
        order = torch.randperm(len(self.source), generator=torch.Generator().manual_seed(epoch)).tolist()
        chosen = [order[number * BATCH : (number + 1) * BATCH] for number in range(steps)]
        begin = time.perf_counter()
        raw = [[self.source.read(index) for index in each] for each in chosen]
        read_s = (time.perf_counter() - begin) / steps
        begin = time.perf_counter()
        batches = [
            default_collate([self.source.decode(one, index) for one, index in zip(samples, indices, strict=True)])
            for samples, indices in zip(raw, chosen, strict=True)
        ]
        process_s = (time.perf_counter() - begin) / steps
        computed = self._steps(batches, steps)
        return {"read": read_s, "process": process_s, "compute": computed[0]}, computed

    def _steps(self, batches: Iterable[tuple[Any, Any]], steps: int) -> tuple[float, float]:
        """Return seconds of a step, and the share that its caller spent on uploading."""
        begin, uploading_s = 0.0, 0.0
        for number, (inputs, targets) in zip(range(steps), batches, strict=False):
            if number == LEFT_OUT:
                self.trainer.wait()
                begin, uploading_s = time.perf_counter(), self.trainer.upload_counters().caller_s
            self.trainer.step(inputs, targets)
        self.trainer.wait()
        lasted_s = time.perf_counter() - begin
        uploading_s = self.trainer.upload_counters().caller_s - uploading_s
        return lasted_s / (steps - LEFT_OUT), uploading_s / lasted_s
