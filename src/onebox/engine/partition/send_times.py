"""Departure times of values between stages: at the end of actions, or earlier where programs are split. Pure.

The simulator takes them as edges (:class:`onebox.plan.model.work.Edge`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from onebox.cost.estimate import TYPICAL_RATES, program_s
from onebox.engine.partition.early_send import devices_of
from onebox.engine.partition.phase_programs import PhaseProgram, PhasePrograms
from onebox.graph import PhaseKind, Piece, Port
from onebox.plan import Plan
from onebox.plan.model.work import Edge, MessageChunk


def leaving_of(parts: PhasePrograms, plan: Plan, *, halves: bool = False) -> tuple[Edge, ...]:
    """Return the edges between stages, with the departure time of each part of their values.

    Args:
        parts: Parts that workers run in each phase.
        plan: The plan.
        halves: Whether backward is split into input and weight gradients.
    """
    back: PhaseKind = "I" if halves else "B"
    reads = {
        (stage, forward): {
            port
            for phase, named in parts.programs.phases.items()
            if phase.stage == stage and (phase.kind == "F") == forward
            for port in named.inputs
            if port.kind == "value"
        }
        for stage in range(len(plan.stages))
        for forward in (True, False)
    }
    found = []
    for source in range(len(plan.stages)):
        for target in range(source + 1, len(plan.stages)):
            there = _parts(parts, plan, source, "F", reads[target, True] | reads[target, False])
            back_again = _parts(parts, plan, target, back, reads[source, False])
            sizes = (sum(size for _, size in there), sum(size for _, size in back_again))
            if any(sizes):
                shares = [
                    tuple(MessageChunk(time, size / total) for time, size in each) if total else ()
                    for each, total in zip((there, back_again), sizes, strict=True)
                ]
                found.append(
                    Edge(
                        source=source,
                        target=target,
                        forward_bytes=sizes[0],
                        backward_bytes=sizes[1],
                        forward_parts=shares[0],
                        backward_parts=shares[1],
                    )
                )
    return tuple(found)


def _parts(parts: PhasePrograms, plan: Plan, stage: int, kind: PhaseKind, read: set[Port]) -> list[tuple[float, int]]:
    """Return (fraction of the phase's time, bytes) for the values that another stage reads."""
    part = parts.of(next(iter(devices_of(plan, stage))), stage, kind)
    sent: dict[float, int] = {}
    for share, port, size_bytes in _made(part):
        value = part.chunks[port].port if port in part.chunks else port
        if value in read and port not in part.in_chunks:
            sent[share] = sent.get(share, 0) + size_bytes
    return sorted(sent.items())


def _made(part: PhaseProgram) -> Iterator[tuple[float, Port, int]]:
    """Yield (fraction of the part's time, port, bytes) for each output."""
    ports = {slot: (port, spec) for slot, port, spec in zip(part.slots, part.outputs, part.made, strict=True)}
    works = [program_s(step.program, TYPICAL_RATES) if isinstance(step, Piece) else 0.0 for step in part.steps]
    total = math.fsum(works)
    for number, step in enumerate(part.steps):
        done = math.fsum(works[: number + 1]) / total if total and number + 1 < len(works) else 1.0
        for slot in step.outputs if isinstance(step, Piece) else (step.target,):
            if slot in ports:
                yield done, ports[slot][0], ports[slot][1].size_bytes
