"""Memory of a program from the lifetimes of its buffers alone, without running it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from onebox.cost.recurrent import recurrent
from onebox.wire import Operator, Program, overload, reads, shares_memory, specs_by_slot


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory that a run of a program needs beyond the buffers that exist when it starts.

    Args:
        peak_bytes: Maximum at any operator; never negative.
        peak_operator: The number of that operator.
        net_bytes: Increase (negative when it takes inputs) after its end.
    """

    peak_bytes: int
    peak_operator: int
    net_bytes: int


def owners(program: Program) -> dict[int, int]:
    """Return for each filled slot the slot that owns its memory: its own, or the base of its view."""
    found = {slot: slot for slot in range(len(program.inputs))}
    for operator in program.operators:
        view = shares_memory(overload(operator.name))
        for slot in (slot for slot in operator.outs if slot is not None):
            found[slot] = found[reads(operator)[0]] if view else slot
    return found


def footprint(program: Program, takes: Collection[int] = ()) -> Footprint:
    """Compute the memory of a program's buffers along its tape.

    An unread output takes memory while its operator runs, where the program specifies it; so does the workspace of a
    recurrent layer for all its time steps.

    Args:
        program: The tape, with deaths set.
        takes: Inputs that end with it: their memory is freed after their last use, unless an output is a view of them.
    """
    specs = specs_by_slot(program)
    root = owners(program)
    alive = dict.fromkeys(range(len(program.inputs)), 1)
    unread = set(takes) - {slot for operator in program.operators for slot in reads(operator)}
    now = -sum(specs[slot].size_bytes for slot in unread - set(program.outputs))
    peak, peak_operator = 0, 0
    for number, operator in enumerate(program.operators):
        for slot in (slot for slot in operator.outs if slot is not None):
            alive[root[slot]] = alive.get(root[slot], 0) + 1
            now += specs[slot].size_bytes if root[slot] == slot else 0
        layer = recurrent(operator, specs)
        passing = now + _unread_bytes(operator) + (layer.passing_bytes if layer else 0)
        if passing > peak:
            peak, peak_operator = passing, number
        for slot in operator.dies:
            source = root[slot]
            alive[source] -= 1
            if alive[source] == 0 and (source >= len(program.inputs) or source in takes):
                now -= specs[source].size_bytes
    return Footprint(peak_bytes=peak, peak_operator=peak_operator, net_bytes=now)


def alive_at(program: Program, number: int, takes: Collection[int] = ()) -> dict[int, int]:
    """Return the live bytes of each storage while an operator runs, by the slot that owns it.

    Inputs are among them, unless they have ended before. With the operator's unread outputs and workspace, their sum
    minus the inputs is the number that :func:`footprint` counts there.

    Args:
        program: The tape, with deaths set.
        number: The number of the operator.
        takes: Inputs that end with the program.
    """
    specs, root = specs_by_slot(program), owners(program)
    ends: dict[int, float] = {}
    born = dict.fromkeys(range(len(program.inputs)), -1)
    for place, operator in enumerate(program.operators):
        ends |= dict.fromkeys(operator.dies, place)
        born |= dict.fromkeys((slot for slot in operator.outs if slot is not None), place)
    read = {slot for operator in program.operators for slot in reads(operator)} | set(program.outputs)
    last: dict[int, float] = {}
    for slot in born:
        unread = slot in takes and slot not in read
        last[root[slot]] = max(last.get(root[slot], -1), -1 if unread else ends.get(slot, math.inf))
    kept = set(range(len(program.inputs))) - set(takes)
    return {slot: specs[slot].size_bytes for slot, end in last.items() if slot in kept or (born[slot] <= number <= end)}


def _unread_bytes(operator: Operator) -> int:
    """Return the bytes of an operator's unread outputs."""
    made = zip(operator.outs, operator.specs, strict=True)
    unread = sum(spec.size_bytes for slot, spec in made if slot is None and spec is not None)
    return 0 if unread and shares_memory(overload(operator.name)) else unread
