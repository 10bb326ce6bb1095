"""Splitting: a program is cut where something that other devices wait for is there well before its end. Pure.

What a skip connection takes past the rest of its stage, the first of several outputs, or the gradient of a stage's
input ahead of those of the parameters behind it: each is sent as soon as it is made, and travels while the rest is
computed. The pieces compute what the whole computes, operator by operator: not a bit of the result changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from onebox.graph import NamedProgram, PhaseKind, Port
from onebox.plan import Plan
from onebox.wire import Program, specs_by_slot

CALL_S = 1e-4
"""What a call of a program costs a worker and its device beside the program's work (``benchmarks/pipeline.py``)."""

WIRE_BPS = 1.1e9
"""Links are taken to be as quick as 10 Gbit Ethernet, which makes early sending worth less than it may be."""


def pays(left_s: float, size_bytes: int) -> bool:
    """Tell whether to cut a program for what it has made by then: what is gained has to be twice what a call costs.

    Args:
        left_s: Seconds of the program that are left.
        size_bytes: What is sent meanwhile.
    """
    return min(left_s, size_bytes / WIRE_BPS) > 2 * CALL_S


def early_ends(program: Program, sent: Iterable[int], seconds: float) -> tuple[int, ...]:
    """Return the operators of a program behind which it is cut, ascending.

    Args:
        program: The program.
        sent: Slots of what is sent to other devices.
        seconds: What the program is expected to take, spread evenly over its operators.
    """
    made = {slot: number for number, one in enumerate(program.operators) for slot in one.outs if slot is not None}
    specs, count = specs_by_slot(program), len(program.operators)
    ends: dict[int, int] = {}
    for slot in set(sent) & set(made):
        ends[made[slot]] = ends.get(made[slot], 0) + specs[slot].size_bytes
    return tuple(
        end
        for end, size_bytes in sorted(ends.items())
        if end < count - 1 and pays(seconds * (count - 1 - end) / count, size_bytes)
    )


def sent_by(phases: Iterable[tuple[int, NamedProgram]], plan: Plan, stage: int) -> frozenset[Port]:
    """Return the values that devices of other stages read of what a stage makes.

    Args:
        phases: The programs of all stages, each with its stage.
        plan: The plan.
        stage: The stage.
    """
    own = set(_devices(plan, stage))
    read: set[Port] = set()
    for reader, named in phases:
        if not own.issuperset(_devices(plan, reader)):
            read.update(port for port in named.inputs if port.kind == "value")
    return frozenset(read)


def expected_s(plan: Plan, stage: int, kind: PhaseKind) -> float:
    """Return what a phase is predicted to take for a micro-batch of the plan's size; nothing where nobody said."""
    if plan.predicted is None or plan.stages[stage].fate != "keep" or plan.update != "device":
        return 0.0  # what is on the host for a while has an order of its own
    forward_s, input_s, weight_s = plan.predicted.stages_s[stage]
    return {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s}[kind]


def _devices(plan: Plan, stage: int) -> Iterable[int]:
    return (device for replica in plan.stages[stage].replicas for device in replica)
