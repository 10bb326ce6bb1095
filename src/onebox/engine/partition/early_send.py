"""Splitting: a program is cut where something that other devices wait for is there well before its end. Pure.

What a skip connection takes past the rest of its stage, the first of several outputs, or the gradient of a stage's
input ahead of those of the parameters behind it: each is sent as soon as it is made, and travels while the rest is
computed. The pieces compute what the whole computes, operator by operator: not a bit of the result changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from onebox.cost.estimate import DeviceRates, operator_s
from onebox.graph import NamedProgram, PhaseKind, Port
from onebox.plan import Links, Plan
from onebox.plan.schedules.chunked_transfers import CALL_S, WORTH
from onebox.wire import Program, specs_by_slot

WIRE_BPS = 1.1e9
"""Links of which nothing is known are taken to be as quick as 10 Gbit Ethernet, which makes sending early worth less
than it may be."""

RATES = DeviceRates(flops=4e10, bandwidth_bps=8e9, operator_s=5e-6)
"""Of a core of 2020. What a program takes is known; these only say how that is shared out among its operators."""


def pays(left_s: float, transfer_s: float) -> bool:
    """Tell whether to cut a program for what it has made by then: what is gained has to be twice what a call costs.

    Args:
        left_s: Seconds of the program that are left.
        transfer_s: Seconds in which that travels.
    """
    return min(left_s, transfer_s) > WORTH * CALL_S


def operator_times(program: Program, seconds: float) -> list[float]:
    """Return about how long each operator of a program takes.

    Args:
        program: The program.
        seconds: What it takes altogether.
    """
    specs = specs_by_slot(program)
    times = [operator_s(operator, specs, RATES) for operator in program.operators]
    total = math.fsum(times)
    return [seconds * each / total for each in times] if total else times


def early_ends(program: Program, sent: Mapping[int, float], seconds: float) -> tuple[int, ...]:
    """Return the operators of a program behind which it is cut, ascending.

    Args:
        program: The program.
        sent: For each slot of what is sent to other devices, the seconds in which it travels.
        seconds: What the program is expected to take.
    """
    made = {slot: number for number, one in enumerate(program.operators) for slot in one.outs if slot is not None}
    times, last = operator_times(program, seconds), len(program.operators) - 1
    ends: dict[int, float] = {}
    for slot in set(sent) & set(made):
        ends[made[slot]] = ends.get(made[slot], 0.0) + sent[slot]
    return tuple(
        end for end, transfer_s in sorted(ends.items()) if end < last and pays(math.fsum(times[end + 1 :]), transfer_s)
    )


def sent_by(
    phases: Iterable[tuple[int, NamedProgram]], plan: Plan, stage: int, links: Links | None = None
) -> dict[Port, float]:
    """Return the values that devices of other stages read of what a stage makes.

    Args:
        phases: The programs of all stages, each with its stage.
        plan: The plan.
        stage: The stage.
        links: How fast the links between devices are; ``None`` where nobody knows.

    Returns:
        For each value the bytes a second of the slowest link that it takes.
    """
    own = set(devices_of(plan, stage))
    found: dict[Port, float] = {}
    for reader, named in phases:
        others = set(devices_of(plan, reader))
        if own.issuperset(others):
            continue
        slowest_bps = min(bandwidth_bps(links, a, b) for a in own for b in others if a != b)
        for port in named.inputs:
            if port.kind == "value":
                found[port] = min(slowest_bps, found.get(port, math.inf))
    return found


def bandwidth_bps(links: Links | None, source: int, target: int) -> float:
    """Return how fast a link is, in bytes a second, or is taken to be."""
    known = None if links is None else links.bandwidth_bps.get(source, {}).get(target)
    return WIRE_BPS if known is None else known


def expected_s(plan: Plan, stage: int, kind: PhaseKind) -> float:
    """Return what a phase is predicted to take for a micro-batch of the plan's size; nothing where nobody said."""
    if plan.predicted is None or plan.stages[stage].policy != "keep" or plan.update != "device":
        return 0.0  # what is on the host for a while has an order of its own
    forward_s, input_s, weight_s = plan.predicted.stages_s[stage]
    return {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s}[kind]


def devices_of(plan: Plan, stage: int) -> Iterable[int]:
    """Return the devices that a stage is on."""
    return (device for replica in plan.stages[stage].replicas for device in replica)
