"""Splitting: a program is cut where a value for other devices is complete well before its end. Pure.

Examples are the value of a skip connection past the rest of its stage, the first of several outputs, and the gradient
of a stage's input before those of its parameters: each is sent as soon as it is complete, and travels while the rest is
computed. The pieces compute the same operators as the whole: the result is the same bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from onebox.cost.estimate import TYPICAL_RATES, operator_s
from onebox.graph import NamedProgram, PhaseKind, Port
from onebox.plan import Links, Plan
from onebox.plan.schedules.chunked_transfers import CALL_S, WORTH
from onebox.wire import Program, specs_by_slot

WIRE_BPS = 1.1e9
"""Assumed bandwidth of unknown links, that of 10 Gbit Ethernet, which may underestimate the gain of sending early."""


def pays(left_s: float, transfer_s: float) -> bool:
    """Return whether splitting a program for a value pays: the gain must be at least twice the cost of a call.

    Args:
        left_s: Remaining seconds of the program.
        transfer_s: Seconds of the value's transfer.
    """
    return min(left_s, transfer_s) > WORTH * CALL_S


def operator_times(program: Program, seconds: float) -> list[float]:
    """Return the approximate time of each operator of a program.

    Args:
        program: The program.
        seconds: Total time.
    """
    specs = specs_by_slot(program)
    times = [operator_s(operator, specs, TYPICAL_RATES) for operator in program.operators]
    total = math.fsum(times)
    return [seconds * each / total for each in times] if total else times


def early_ends(program: Program, sent: Mapping[int, float], seconds: float) -> tuple[int, ...]:
    """Return the operators of a program after which it is split, ascending.

    Args:
        program: The program.
        sent: For each slot of a value for other devices, the seconds of its transfer.
        seconds: Expected time of the program.
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
    """Return the values of a stage that devices of other stages read.

    Args:
        phases: The programs of all stages, each with its stage.
        plan: The plan.
        stage: The stage.
        links: Speeds of the links between devices; ``None`` if unknown.

    Returns:
        For each value, the bandwidth in bytes per second of the slowest link that it uses.
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
    """Return the known or assumed bandwidth of a link in bytes per second."""
    known = None if links is None else links.bandwidth_bps.get(source, {}).get(target)
    return WIRE_BPS if known is None else known


def expected_s(plan: Plan, stage: int, kind: PhaseKind) -> float:
    """Return the predicted time of a phase for a full micro-batch; 0 without a prediction."""
    if plan.predicted is None or plan.stages[stage].policy != "keep" or plan.update != "device":
        return 0.0  # offloaded values have an order of their own
    forward_s, input_s, weight_s = plan.predicted.stages_s[stage]
    return {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s}[kind]


def devices_of(plan: Plan, stage: int) -> Iterable[int]:
    """Return the devices of a stage."""
    return (device for replica in plan.stages[stage].replicas for device in replica)
