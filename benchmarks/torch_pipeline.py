"""A rank of ``torch.distributed.pipelining`` on Gloo, for ``pipeline.py``, in a process of its own.

``torch_pipeline.py MODEL RANK SIZE PORT`` with MODEL one of ``pipeline_models.CASES``, or ``sleep:SECONDS:COUNT`` for
stages that sleep so long, all those of a rank together, for so many micro-batches. Reads commands from standard input,
one a line, and answers each with a number on a line of its own:

- ``SCHEDULE STEPS``: runs training steps; how many seconds they took;
- ``alone STEPS``: trains the whole model in this rank alone, without a pipeline; likewise;
- ``loss SCHEDULE``: the loss of the third step in float64; not-a-number where this rank doesn't have the last stage.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from pipeline_models import CASES, STAGES_PER_DEVICE, Case, Parts, place, sgd, sleepers, wake_on_time
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """A schedule of this rank.

    Args:
        name: One of :data:`SCHEDULES`.
        find: Returns what is trained, for a number of stages.
        dtype: Type of the parameters.
    """

    def __init__(self, name: str, find: Callable[[int], Case], dtype: torch.dtype = torch.float32) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        count = size * STAGES_PER_DEVICE.get(name, 1)
        case = find(count)
        parts = case.model(dtype).parts
        each = len(parts) // count
        mine = [stage for stage in range(count) if place(name, stage, size) == rank]
        modules = [Parts(parts[stage * each : (stage + 1) * each]) for stage in mine]
        stages = [
            PipelineStage(module, stage, count, torch.device("cpu"))
            for module, stage in zip(modules, mine, strict=True)
        ]
        given = stages if count > size else stages[0]
        self._schedule = SCHEDULES[name](given, case.count, loss_fn=case.loss)
        self._optimizer = sgd([parameter for module in modules for parameter in module.parameters()])
        inputs, targets = case.data()
        self._inputs = (inputs,) if 0 in mine else ()
        self._targets = targets if count - 1 in mine else None

    def step(self) -> float:
        """Run a step; return its loss, not-a-number where it isn't known."""
        losses: list[Tensor] = []
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step(*self._inputs, target=self._targets, losses=losses, return_outputs=False)
        self._optimizer.step()
        return torch.stack(losses).mean().item() if losses else math.nan


def alone(case: Case) -> Callable[[], float]:
    """Return what runs a step of the whole model, micro-batch by micro-batch."""
    model = case.model()
    optimizer = sgd(model.parameters())
    inputs, targets = case.data()
    pairs = list(zip(inputs.split(case.micro_batch), targets.split(case.micro_batch), strict=True))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for some_inputs, some_targets in pairs:
            loss = case.loss(model(some_inputs), some_targets) / len(pairs)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def finder(name: str, size: int) -> Callable[[int], Case]:
    """Return what returns the case for a number of stages; parts that sleep are as many, and share the seconds."""
    if name in CASES:
        return lambda stages: CASES[name]
    _, seconds, count = name.split(":")
    wake_on_time()
    return lambda stages: sleepers(stages, float(seconds) * size / stages, int(count))


def answer(command: str, find: Callable[[int], Case], maker: Callable[[str], Callable[[], float]]) -> float:
    """Do what a command says."""
    first, second = command.split()
    if first == "loss":
        pipeline = Pipeline(second, find, torch.float64)
        return [pipeline.step() for _ in range(3)][-1]
    step = maker(first)
    begin = time.perf_counter()
    for _ in range(int(second)):
        step()
    return time.perf_counter() - begin


def main() -> None:
    """Serve commands until standard input ends."""
    name, rank, size, port = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    find = finder(name, size)

    @functools.cache
    def maker(kind: str) -> Callable[[], float]:
        return alone(find(1)) if kind == "alone" else Pipeline(kind, find).step

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        for line in sys.stdin:
            print(answer(line, find, maker), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
