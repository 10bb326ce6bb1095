"""Emission: the instructions that run a part, its programs and the collectives between them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder
from onebox.engine.partition.phase_programs import PhaseProgram
from onebox.graph import Piece, Port
from onebox.graph.shard.search import AllReduce, RankStep
from onebox.wire.protocol.instructions import Free, Gather, Reduce


@dataclass(frozen=True, kw_only=True)
class PhaseCall:
    """A run of a part on a micro-batch.

    Args:
        part: The part.
        inputs: The buffer of each input.
        takes: Positions of inputs that are freed with it.
        label: Label of the instructions.
        group: The group of the ranks that share it; 0 if there is one rank.
        micro_batch: The micro-batch.
        cost_s: Its cost on an emulated device.
    """

    part: PhaseProgram
    inputs: Sequence[int]
    takes: Sequence[int]
    label: InstructionLabel
    group: int
    micro_batch: int = 0
    cost_s: float = 0.0


def emit(
    builder: RoutineBuilder,
    call: PhaseCall,
    steps: Sequence[RankStep],
    number_of: Callable[[Port], int],
    *,
    made: Callable[[Sequence[Port]], None] = lambda ports: None,
    done: Callable[[Sequence[Port]], None] = lambda ports: None,
) -> None:
    """Add the instructions that run a part.

    Args:
        builder: The routine.
        call: The run.
        steps: The steps of the part, or the pieces that its program was split into.
        number_of: Returns the buffer for an output.
        made: Called after each step with the outputs that are complete.
        done: Called after that with the outputs that no later step writes or reads.
    """
    part = call.part
    ports = dict(zip(part.slots, part.outputs, strict=True))
    place = dict(enumerate(call.inputs))
    mortal = set(call.takes)
    target_of = {step.source: step.target for step in steps if isinstance(step, AllReduce)}
    share_s = _shares(builder, steps, call.cost_s)

    def number(slot: int) -> int:
        end = target_of.get(slot, slot)
        if end in ports:
            mortal.update({end} if ports[end].kind == "chunk" else ())
            return number_of(ports[end])
        mortal.add(end)
        return builder.new()

    kept: list[int] = []
    for index, step in enumerate(steps):
        fresh: Sequence[int] = (step.target,) if not isinstance(step, Piece) else step.outputs
        later = {slot for other in steps[index + 1 :] for slot in _read(other)}
        if isinstance(step, Piece):
            for slot in step.outputs:
                place[slot] = number(slot)
                mortal.update({slot} if slot not in ports and slot not in target_of else ())
            builder.call(
                step.program,
                [place[slot] for slot in step.inputs],
                [place[slot] for slot in step.outputs],
                call.label,
                takes=[i for i, slot in enumerate(step.inputs) if slot in mortal and slot not in later],
                micro_batch=call.micro_batch,
                cost_s=share_s[index],
            )
        elif isinstance(step, AllReduce):
            place[step.target] = place[step.source]
            builder.add(Reduce((place[step.source],), call.group), InstructionLabel("reduce", "transfer"))
        else:
            place[step.target] = number(step.target)
            sizes = tuple(part.shape[step.dim] for part in step.parts)
            gather = Gather(place[step.source], place[step.target], step.spec, call.group, sizes, step.dim)
            builder.add(gather, InstructionLabel("gather", "transfer"))
            if step.source in mortal and step.source not in later:
                builder.add(Free((place[step.source],)), InstructionLabel("free"))
        fresh = [slot for slot in fresh if slot in ports]
        made([ports[slot] for slot in fresh])
        sent = tuple(place[slot] for slot in fresh if ports[slot].kind == "chunk" and slot not in later)
        if sent:
            builder.add(Free(sent), InstructionLabel("free"))
        kept += fresh
        done([ports[slot] for slot in kept if slot not in later])  # a gradient may be a value that is still read
        kept = [slot for slot in kept if slot in later]


def _shares(builder: RoutineBuilder, steps: Sequence[RankStep], cost_s: float) -> list[float]:
    """Return each step's share of the total cost, in proportion to the estimated times of programs."""
    if not cost_s or len(steps) == 1:
        return [cost_s] * len(steps)
    works = [builder.work(step.program) if isinstance(step, Piece) else 0.0 for step in steps]
    total = math.fsum(works)
    return [cost_s * work / total if total else cost_s / len(steps) for work in works]


def _read(step: RankStep) -> Sequence[int]:
    return step.inputs if isinstance(step, Piece) else (step.source,)
