"""The sides of ``adaptive.py``: trainers of onebox on emulated devices, and ``torch.distributed.pipelining``."""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import adaptive_world as world_of
from adaptive_world import (
    MESSAGE_BYTES,
    Scenario,
    State,
    case_of,
    costs_of,
)
from common import Peer
from pipeline_models import sgd
from pipeline_sides import segments_of

import onebox
from onebox.plan import Plan

WARM = 3
"""Steps of any side that are not counted: the pipeline fills in the first, and workers are slow."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
"""Of the peer."""


class World:
    """Emulated devices that change their speeds and links during a run.

    Args:
        state: The first.
        stack: Ends them.
    """

    def __init__(self, state: State, stack: ExitStack) -> None:
        self.state = state
        spec = ",".join(f"sim@{speed}" for speed in state.speeds)
        self.pool = stack.enter_context(onebox.open(spec, links=state.links))

    def change(self, state: State) -> None:
        """Let devices and links be in another state, for whatever is posted from now on."""
        for device, (old, new) in enumerate(zip(self.state.speeds, state.speeds, strict=True)):
            if old != new:
                self.pool.retime(device, speed=new)
        before = self.state.links
        for (source, target), link in state.links.items():
            if source < target and link != before[source, target]:
                self.pool.relink(source, target, bandwidth_bps=link.bandwidth_bps)
        self.state = state


class Ours:
    """A trainer of onebox.

    Args:
        world: Where.
        plan: How.
        count: Micro-batches of a step.
        stack: Closes it.
        options: More arguments of the trainer.
    """

    def __init__(self, world: World, plan: Plan, count: int, stack: ExitStack, **options: Any) -> None:
        case = case_of(count)
        model = case.model()
        self.plan = plan
        self.trainer = stack.enter_context(
            onebox.Trainer(
                model,
                case.loss,
                sgd(model.parameters()),
                pool=world.pool,
                plan=plan,
                engine=onebox.Engine(costs=costs_of(segments_of(case))),
                **options,
            )
        )
        self._data = case.data()

    def run(self, steps: int) -> float:
        """Return the seconds of a step, of so many behind those that are not counted."""
        return statistics.fmean(self.times(steps + WARM)[WARM:])

    def times(self, steps: int, before: Callable[[int], None] = lambda step: None) -> list[float]:
        """Run steps; return for each the seconds from the end of the one before it to its own.

        Args:
            steps: How many.
            before: Called with the number of each step before it begins.
        """
        ends = [time.perf_counter()]
        losses: list[Any] = []
        for step in range(steps):
            before(step)
            losses.append(self.trainer.step(*self._data))
            while losses and losses[0].done:
                losses.pop(0)
                ends.append(time.perf_counter())
        for loss in losses:
            loss.item()
            ends.append(time.perf_counter())
        self.trainer.wait()
        return [end - begin for begin, end in pairwise(ends)]

    def through(self, scenario: Scenario, world: World) -> list[float]:
        """Return the seconds of each step of a case, in which the machines change before some of them."""

        def before(step: int) -> None:
            if step - WARM in scenario.states:
                world.change(scenario.states[step - WARM])

        return self.times(scenario.steps + WARM, before)[WARM:]


class Theirs:
    """The ranks of ``adaptive_torch.py``.

    Args:
        size: How many there are.
        stack: Ends them.
    """

    def __init__(self, size: int, stack: ExitStack) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._ranks = []
        for rank in range(size):
            arguments = (str(rank), str(size), port, str(world_of.PARTS), repr(world_of.PART_S))
            self._ranks.append(Peer(*arguments, script="adaptive_torch.py"))
            stack.callback(self._ranks[-1].close)

    def change(self, state: State) -> None:
        """Let devices and links be in another state."""
        commands = []
        for rank, speed in enumerate(state.speeds):
            ways = {
                target: [link.latency_s, MESSAGE_BYTES / link.bandwidth_bps]
                for (source, target), link in state.links.items()
                if source == rank
            }
            commands.append("state " + json.dumps({"speed": speed, "ways": ways}))
        self._ask(commands)

    def runner(self, schedule: str, count: int) -> Callable[[int], float]:
        """Return what runs steps of so many micro-batches and says how long one took on the slowest rank."""

        def run(steps: int) -> float:
            return max(self._ask([f"{schedule} {count} {steps}"] * len(self._ranks))) / steps

        return run

    def _ask(self, commands: Sequence[str]) -> list[float]:
        for rank, command in zip(self._ranks, commands, strict=True):
            rank.start(command)
        return [rank.seconds() for rank in self._ranks]


def in_turn(sides: Mapping[str, Callable[[int], float]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Run all sides in turn, in every round; return the seconds of a step of each side in each round."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            found[name].append(run(steps))
    return found
