"""Memory of a program from the lifetimes of its buffers alone, without running it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from onebox.wire import Program, overload, reads, shares_memory, specs_by_slot


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a run of a program needs beyond the buffers that are there when it starts.

    Args:
        peak_bytes: The most that it needs at any operator; never negative.
        peak_operator: The number of that operator.
        net_bytes: What is more (or less, when it takes inputs) after it has ended.
    """

    peak_bytes: int
    peak_operator: int
    net_bytes: int


def footprint(program: Program, takes: Collection[int] = ()) -> Footprint:
    """Follow the buffers of a program through its tape.

    Args:
        program: The tape, with deaths set.
        takes: Inputs that end with it: their memory goes after their last use, unless an output is a view of them.
    """
    specs = specs_by_slot(program)
    root = {slot: slot for slot in range(len(program.inputs))}
    alive = dict.fromkeys(root, 1)
    unread = set(takes) - {slot for operator in program.operators for slot in reads(operator)}
    now = -sum(specs[slot].size_bytes for slot in unread - set(program.outputs))
    peak, peak_operator = 0, 0
    for number, operator in enumerate(program.operators):
        view = shares_memory(overload(operator.name))
        for slot in (slot for slot in operator.outs if slot is not None):
            root[slot] = root[reads(operator)[0]] if view else slot
            alive[root[slot]] = alive.get(root[slot], 0) + 1
            now += 0 if view else specs[slot].size_bytes
        if now > peak:
            peak, peak_operator = now, number
        for slot in operator.dies:
            source = root[slot]
            alive[source] -= 1
            if alive[source] == 0 and (source >= len(program.inputs) or source in takes):
                now -= specs[source].size_bytes
    return Footprint(peak_bytes=peak, peak_operator=peak_operator, net_bytes=now)
