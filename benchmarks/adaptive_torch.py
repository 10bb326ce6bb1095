"""A rank of ``torch.distributed.pipelining`` on emulated devices and links, for ``adaptive.py``; a process of its own.

``adaptive_torch.py RANK SIZE PORT PARTS SECONDS`` for a chain of so many parts, each of which sleeps so many seconds
in each of forward, input gradient and weight gradient of a micro-batch, at speed 1. Reads commands from standard input,
one a line, and answers each with a number on a line of its own:

- ``state JSON``: from now on the rank has ``speed``, and its way to each other rank ``ways`` ``[seconds of latency,
  seconds that a message takes to leave]``; answers 0;
- ``SCHEDULE COUNT STEPS``: runs one step more than those, of so many micro-batches; the seconds from the end of the
  first to the end of the last.

**The links.** What a stage hands on carries the time at which it may be used at the other end: it leaves when what was
sent before on this way has left, takes its bytes over the bandwidth to leave, and arrives one latency later; just as
on an emulated link of onebox. Who computes with it sleeps until then. The message itself has a few bytes and travels
by Gloo at once. So a transfer never holds up a rank that has something else to compute, neither its sender nor who
receives other messages: with real messages of that size this peer would be slower, not quicker.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pipeline_models import STAGES_PER_DEVICE, place, wake_on_time
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch_pipeline import SCHEDULES

_WIDTH = 2
"""Elements of a message: when it arrives, and one that makes a loss of two classes possible."""

_FARTHEST_S = 600.0
"""No message takes so long. To learn of shapes torch also computes with memory in which anything may stand."""


class World:
    """What is emulated in this rank.

    Args:
        rank: Its number.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.speed = 1.0
        self._ways: dict[int, tuple[float, float]] = {}
        self._free_s: dict[int, float] = {}

    def change(self, state: dict[str, Any]) -> None:
        """Be as fast, and send as fast, as is said from now on."""
        self.speed = state["speed"]
        self._ways = {int(target): tuple(way) for target, way in state["ways"].items()}

    def work(self, after_s: float, seconds: float) -> None:
        """Sleep for what takes so long at speed 1, and can begin only when its input has arrived."""
        if after_s < time.monotonic() + _FARTHEST_S:  # else, or where it is no number, it is no time
            sleep_until(after_s)
        sleep_until(time.monotonic() + seconds / self.speed)

    def sent(self, target: int) -> float:
        """Send something now; return when it arrives."""
        now_s = time.monotonic()
        if target == self.rank:
            return now_s
        latency_s, leaving_s = self._ways[target]
        self._free_s[target] = max(now_s, self._free_s.get(target, 0.0)) + leaving_s
        return self._free_s[target] + latency_s


def sleep_until(end_s: float) -> None:
    """Sleep until a time on the clock that all processes of a host share; at once where that has passed."""
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(left_s)


class _Inputs(torch.autograd.Function):
    """Forward, and the gradient of its inputs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stage: Stage) -> Tensor:
        """Return what goes to the next stage, which is stamped with when it arrives."""
        ctx.stage = stage
        if value.is_meta:  # torch only asks for shapes
            return value.clone()
        stage.world.work(float(value[0, 0]) if stage.before is not None else 0.0, stage.seconds)
        made = torch.zeros_like(value)
        if stage.behind is not None:
            made[0, 0] = stage.world.sent(stage.behind)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient that goes back to the stage before, likewise."""
        stage: Stage = ctx.stage
        stage.world.work(float(gradient[0, 0]) if stage.behind is not None else 0.0, stage.seconds)
        made = torch.zeros_like(gradient)
        if stage.before is not None:
            made[0, 0] = stage.world.sent(stage.before)
        return made, None


class _Weights(torch.autograd.Function):
    """The gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: Stage) -> Tensor:
        """Return zeros: nothing comes of the weights but their gradient's time."""
        ctx.stage = stage
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return zeros, so many seconds later."""
        stage: Stage = ctx.stage
        stage.world.work(float(gradient[0, 0]) if stage.behind is not None else 0.0, stage.seconds)
        return torch.zeros_like(gradient), None


class Stage(nn.Module):
    """A stage that sleeps.

    Args:
        world: What is emulated.
        seconds: Of each of forward, input gradient and weight gradient, at speed 1.
        before: The rank of the stage before it.
        behind: The rank of the stage behind it.
    """

    def __init__(self, world: World, seconds: float, before: int | None, behind: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, _WIDTH, dtype=torch.float64))
        self.world = world
        self.seconds = seconds
        self.before = before
        self.behind = behind

    def forward(self, value: Tensor) -> Tensor:
        """Map [1, 2] to the same."""
        if not value.requires_grad and torch.is_grad_enabled():
            value = value.clone().requires_grad_()  # the first stage has an input gradient as the others have
        return _Inputs.apply(value, self) + _Weights.apply(self.weight, self)


def loss_of(made: Tensor, target: Tensor) -> Tensor:
    """Return a loss whose gradient is any."""
    return nn.functional.mse_loss(made, target)


def runner(world: World, schedule: str, count: int, parts: int, seconds: float) -> Callable[[], None]:
    """Return what runs a step.

    Args:
        world: What is emulated.
        schedule: One of :data:`SCHEDULES`.
        count: Micro-batches.
        parts: Of the model.
        seconds: Of each part.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = size * STAGES_PER_DEVICE.get(schedule, 1)
    mine = [stage for stage in range(stages) if place(schedule, stage, size) == rank]

    def rank_of(stage: int) -> int | None:
        return place(schedule, stage, size) if 0 <= stage < stages else None

    modules = [Stage(world, seconds * parts / stages, rank_of(stage - 1), rank_of(stage + 1)) for stage in mine]
    made = [
        PipelineStage(module, stage, stages, torch.device("cpu")) for module, stage in zip(modules, mine, strict=True)
    ]
    given: Any = made if stages > size else made[0]
    pipeline = SCHEDULES[schedule](given, count, loss_fn=loss_of)
    optimizer = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.0)
    nothing = torch.zeros(count, _WIDTH, dtype=torch.float64)
    inputs = (nothing,) if 0 in mine else ()
    targets = nothing if stages - 1 in mine else None

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        pipeline.step(*inputs, target=targets, return_outputs=False)
        optimizer.step()

    return step


def main() -> None:
    """Serve commands until standard input ends."""
    rank, size, port, parts = map(int, sys.argv[1:5])
    seconds = float(sys.argv[5])
    torch.set_num_threads(1)
    wake_on_time()
    world = World(rank)

    @functools.cache
    def maker(schedule: str, count: int) -> Callable[[], None]:
        return runner(world, schedule, count, parts, seconds)

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        for line in sys.stdin:
            command, _, rest = line.strip().partition(" ")
            if command == "state":
                world.change(json.loads(rest))
                print(0.0, flush=True)
                continue
            count, steps = map(int, rest.split())
            step = maker(command, count)
            step()
            begin_s = time.monotonic()
            for _ in range(steps):
                step()
            print(time.monotonic() - begin_s, flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
