"""The two sides of ``pipeline.py``: onebox under a schedule, and ``torch.distributed.pipelining`` in its processes."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from common import Peer
from pipeline_models import STAGES_PER_DEVICE, Case, place, sgd

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Prediction, Stage

Run = Callable[[int], float]
"""Runs so many steps and returns how many seconds they took."""

Times = Sequence[tuple[float, float, float]]
"""For each stage, seconds of forward, input gradient and weight gradient."""


def segments_of(case: Case) -> tuple[str, ...]:
    """Return the names of the segments of a case's model: ``model.parts.PART.…``."""
    inputs, targets = case.data()
    example = (inputs[: case.micro_batch], targets[: case.micro_batch])
    return TracedModel(capture(case.model(), case.loss, example), backward=True).segments


def plan_for(case: Case, segments: Sequence[str], schedule: str, devices: int, times: Times | None = None) -> Plan:
    """Return a plan whose stages are the same parts, on the same devices, as on the other side.

    Args:
        case: What is trained.
        segments: From :func:`segments_of`.
        schedule: Its name.
        devices: How many there are.
        times: What the stages take; an emulated device sleeps as long, and ``auto`` plans with it.
    """
    count = devices * STAGES_PER_DEVICE.get(schedule, 1)
    parts = 1 + max(int(name.split(".")[2]) for name in segments)
    stages = tuple(
        Stage(
            segments=tuple(name for name in segments if int(name.split(".")[2]) * count // parts == stage),
            replicas=((place(schedule, stage, devices),),),
            shares=(1.0,),
        )
        for stage in range(count)
    )
    predicted = None
    if times is not None:
        step_s = case.count * sum(map(sum, times)) / devices
        nothing = (0,) * devices
        predicted = Prediction(batch=case.batch, step_s=step_s, bubble=0.0, peak_bytes=nothing, stages_s=tuple(times))
    return Plan(stages=stages, micro_batch=case.micro_batch, schedule=schedule, predicted=predicted)


def at_weights(times: Times) -> Times:
    """Return times with those of the first stage's input gradient counted as its weight gradient's.

    Nobody needs the gradient of the first stage's inputs: all that its backward does is for its weights.
    """
    (forward_s, input_s, weight_s), *others = times
    return [(forward_s, 0.0, input_s + weight_s), *others]


class Ours:
    """A model trained under a plan.

    Args:
        case: What is trained.
        pool: Where.
        plan: How.
        stack: Closes it.
        dtype: Type of the parameters.
    """

    def __init__(
        self, case: Case, pool: onebox.Pool, plan: Plan, stack: ExitStack, dtype: torch.dtype = torch.float32
    ) -> None:
        model = case.model(dtype)
        self._trainer = stack.enter_context(
            onebox.Trainer(model, case.loss, sgd(model.parameters()), pool=pool, plan=plan)
        )
        self._data = case.data()

    def run(self, steps: int) -> float:
        """Run so many steps and return how many seconds they took."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._trainer.step(*self._data)
        self._trainer.wait()
        return time.perf_counter() - begin

    def loss(self, steps: int) -> float:
        """Return the loss of the last of so many steps."""
        return [self._trainer.step(*self._data).item() for _ in range(steps)][-1]

    def stage_times(self) -> Times:
        """Return the median seconds of each stage's forward, input gradient and weight gradient in the last steps."""
        found: dict[tuple[int, str], list[float]] = defaultdict(list)
        for event in self._trainer.events():
            if event.action is not None:
                found[event.action.stage, event.action.kind].append((event.end_ns - event.start_ns) / 1e9)
        stages = 1 + max(stage for stage, _ in found)
        return [
            tuple(statistics.median(found.get((stage, kind), [0.0])) for kind in ("F", "I", "W"))  # type: ignore[misc]
            for stage in range(stages)
        ]

    def require_work(self, work_s: Mapping[int, float]) -> None:
        """Require that in every step each device was busy at least as long as its work takes.

        Args:
            work_s: Seconds of the work of each device in a step.
        """
        found: dict[tuple[int, int], float] = defaultdict(float)
        for event in self._trainer.events():
            if event.action is not None:
                found[event.worker, event.step] += (event.end_ns - event.start_ns) / 1e9
        for (worker, step), seconds in found.items():
            if seconds < work_s[worker] * (1 - 1e-6):
                raise SystemExit(f"device {worker} slept for {seconds} s in step {step}, not for {work_s[worker]} s")


class Theirs:
    """The ranks of ``torch_pipeline.py``.

    Args:
        name: What they train.
        size: How many there are.
        stack: Ends them.
    """

    def __init__(self, name: str, size: int, stack: ExitStack) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._ranks = []
        for rank in range(size):
            self._ranks.append(Peer(name, str(rank), str(size), port, script="torch_pipeline.py"))
            stack.callback(self._ranks[-1].close)

    def ask(self, command: str) -> list[float]:
        """Return what each rank answers to a command."""
        for rank in self._ranks:
            rank.start(command)
        return [rank.seconds() for rank in self._ranks]

    def runner(self, schedule: str) -> Run:
        """Return what runs steps under a schedule and says how long the slowest rank took."""
        return lambda steps: max(self.ask(f"{schedule} {steps}"))

    def loss(self, schedule: str) -> float:
        """Return the loss of the third step in float64."""
        (found,) = (loss for loss in self.ask(f"loss {schedule}") if not math.isnan(loss))
        return found


def in_turn(sides: Mapping[str, Run], rounds: int, steps: int, most_s: float) -> dict[str, list[float]]:
    """Run all sides in turn, in every round; return the seconds of a step of each side in each round.

    Args:
        sides: What runs steps of each.
        rounds: How many.
        steps: Of a side in a round.
        most_s: After so many seconds no further round begins, if there have been three.
    """
    for run in sides.values():
        run(2)
    found: dict[str, list[float]] = {name: [] for name in sides}
    begin = time.perf_counter()
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() > begin + most_s:
            break
        for name, run in sides.items():
            found[name].append(run(steps) / steps)
    return found


def best(found: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Return the side with the least median."""
    return min(names, key=lambda name: statistics.median(found[name]))


def ratios(part: Sequence[float], whole: Sequence[float]) -> list[float]:
    """Return the ratios of two series, round by round."""
    return [p / w for p, w in zip(part, whole, strict=True)]
