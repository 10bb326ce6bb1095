"""What ``adaptive.py`` trains, and on what: a chain of segments whose times are slept; devices, links, and cases."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, permutations

from pipeline_models import Case, Linears
from pipeline_sides import segments_of

from onebox.plan import Links, Plan
from onebox.plan.model.problem import ComputeTime, DeviceSpec, Problem, Segment, SegmentValue
from onebox.plan.search.baselines import even_plan
from onebox.plan.search.search import search
from onebox.pool import Link

PARTS = 64
"""Segments that take time, all equally long, so that cuts can be fine: what is in front of them, and the loss, are
free."""

PART_S = 0.6e-3
"""Seconds of each of forward, input gradient and weight gradient of a segment for a micro-batch, at speed 1: forward
takes 9.6 ms on each of 4 equal devices and 4.8 ms on each of 8, backward twice as long."""

EACH = 2
"""Micro-batches of a step for each device."""

TOKENS, WIDTH = 512, 256
MESSAGE_BYTES = 4 * TOKENS * WIDTH
"""Of what goes from a segment to the next for a micro-batch, and as much back."""

ETHERNET = Link(latency_s=0.2e-3, bandwidth_bps=125e6)
"""Between all devices: Gigabit Ethernet, on which such a message takes 4.4 ms."""

CALL_S = 0.4e-3
"""Seconds of an action beside its work, as the planner takes them to be."""

SLOW = 1 / 3
"""What becomes of a device's speed."""

WEAK = 1 / 10
"""What becomes of a link's bandwidth."""

CHANGE, RECOVERY, END = 50, 150, 200
"""Steps after which the machines change, are as before again, and the run ends."""

STEADY = 60
"""Steps of a run in which nothing changes."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Devices and links at some time.

    Args:
        name: Of it.
        speeds: Of each device.
        weak: The devices at the two ends of a link that has a tenth of its bandwidth.
    """

    name: str
    speeds: tuple[float, ...]
    weak: tuple[int, int] | None = None

    @property
    def links(self) -> dict[tuple[int, int], Link]:
        """The link of each pair of devices, in both directions."""
        weak = Link(latency_s=ETHERNET.latency_s, bandwidth_bps=WEAK * ETHERNET.bandwidth_bps)
        ends = set(self.weak or ())
        return {pair: weak if set(pair) == ends else ETHERNET for pair in permutations(range(len(self.speeds)), 2)}

    def busy_s(self, count: int) -> float:
        """Return what a step takes in which all devices are busy always: all work over the sum of all speeds.

        Where devices are uneven, nobody reaches that with whole segments; see :meth:`bound_s`.
        """
        return count * 3 * PARTS * PART_S / sum(self.speeds)

    def bound_s(self, count: int) -> float:
        """Return the work of the busiest device in a step, if each segment is on one device and they are dealt out
        best: the shortest time in which the devices, each with whole segments, get all of them done."""
        times = sorted({Fraction(parts) / _exact(speed) for speed in self.speeds for parts in range(1, PARTS + 1)})
        least = next(time for time in times if sum(int(time * _exact(speed)) for speed in self.speeds) >= PARTS)
        return count * 3 * PART_S * float(least)


def _exact(speed: float) -> Fraction:
    return Fraction(speed).limit_denominator(12)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A case of the benchmark.

    Args:
        name: Of it.
        states: From which step on the machines are in which state; the first from step 0.
        steps: How many there are.
    """

    name: str
    states: Mapping[int, State]
    steps: int

    @property
    def phases(self) -> list[tuple[State, int]]:
        """The states with the steps that each lasts."""
        begins = [*sorted(self.states), self.steps]
        return [(self.states[begin], end - begin) for begin, end in pairwise(begins)]


def scenarios(devices: int, shorter: int = 1) -> list[Scenario]:
    """Return the four cases.

    Args:
        devices: 4 or 8.
        shorter: Divides their steps.
    """
    change, recovery, end = (steps // shorter for steps in (CHANGE, RECOVERY, END))
    even = State(name="equal", speeds=(1.0,) * devices)
    uneven = State(name="uneven", speeds=(1.0,) * (devices // 2) + (0.5,) * (devices // 4) + (0.25,) * (devices // 4))
    middle = devices // 2
    slow = tuple(SLOW if device == middle else 1.0 for device in range(devices))
    slowed = State(name="a device at a third", speeds=slow)
    weak = State(name="a link at a tenth", speeds=even.speeds, weak=(middle - 1, middle))
    return [
        Scenario(name="equal devices", states={0: even}, steps=STEADY // shorter),
        Scenario(name="uneven devices", states={0: uneven}, steps=STEADY // shorter),
        Scenario(name="a device slows down", states={0: even, change: slowed, recovery: even}, steps=end),
        Scenario(name="a link drops", states={0: even, change: weak}, steps=recovery),
    ]


def coarsen() -> None:
    """Let there be a quarter of the segments, each four times as long, so that to try it out takes less."""
    global PARTS, PART_S
    PARTS, PART_S = PARTS // 4, 4 * PART_S


def slow_down(times: float) -> None:
    """Let all that is emulated take so many times as long, devices and links alike."""
    global PART_S, ETHERNET
    slower = Link(latency_s=ETHERNET.latency_s * times, bandwidth_bps=ETHERNET.bandwidth_bps / times)
    PART_S, ETHERNET = PART_S * times, slower


def case_of(count: int) -> Case:
    """Return the model, with batches of so many micro-batches of one sample."""
    return Linears(parts=PARTS, count=count, micro_batch=1, tokens=TOKENS, width=WIDTH).case()


def costs_of(segments: tuple[str, ...]) -> dict[str, tuple[float, float, float]]:
    """Return what each segment costs for a sample at speed 1: the embedding in front of the chain is free."""
    free, *chain = segments
    return {free: (0.0, 0.0, 0.0), **dict.fromkeys(chain, (PART_S, PART_S, PART_S))}


def problem_of(state: State, count: int, *, staleness: int = 1) -> Problem:
    """Return what the planner is told of a state: names and bytes of the real model, and what is emulated."""
    segments = segments_of(case_of(count))
    numbers = range(len(state.speeds))
    links = state.links
    size = 4 * WIDTH * (WIDTH + 1)
    return Problem(
        segments=tuple(
            Segment(
                name=name,
                forward_s={"cpu": ComputeTime(sample_s=times[0])},
                input_s={"cpu": ComputeTime(sample_s=times[1])},
                weight_s={"cpu": ComputeTime(sample_s=times[2])},
                update_s={},
                parameter_bytes=size,
                state_bytes=3 * size,
            )
            for name, times in costs_of(segments).items()
        ),
        devices=tuple(DeviceSpec(number=n, type="cpu", speed=state.speeds[n]) for n in numbers),
        links=Links(
            latency_s={a: {b: 0.0 if a == b else links[a, b].latency_s for b in numbers} for a in numbers},
            bandwidth_bps={
                a: {b: float("inf") if a == b else links[a, b].bandwidth_bps for b in numbers} for a in numbers
            },
        ),
        batch=count,
        micro_batches=(1,),
        values=tuple(
            SegmentValue(
                source=index, consumers=(index + 1,), forward_bytes=MESSAGE_BYTES, backward_bytes=MESSAGE_BYTES
            )
            for index in range(len(segments) - 1)
        ),
        call_s=CALL_S,
        replicable=False,
        staleness=staleness,
        schedules=("async-1f1b",) if staleness else ("1f1b",),
    )


@functools.cache
def planned(state: State, count: int, budget_s: float = 5.0) -> Plan:
    """Return the plan for a state that the planner finds, of the asynchronous schedule.

    Args:
        state: Devices and links.
        count: Micro-batches of a step.
        budget_s: About how many seconds the search may take, counted in what it simulates.
    """
    return search(problem_of(state, count), budget_s=budget_s).plan


def even_cuts(state: State, count: int, schedule: str) -> Plan:
    """Return the plan of even cuts."""
    nominal = problem_of(replace(state, speeds=(1.0,) * len(state.speeds)), count, staleness=0)
    return even_plan(nominal, range(len(state.speeds)), schedule, 1)
