"""Chunked sends: values whose first part travels while the rest is computed. Pure.

Where steps overlap, a large value computed at the end of its program (usually a stage's output activation, and the
gradient that it sends back) is computed and sent in several parts if that is predicted to pay. The prediction uses the
plan's stage times, the known link speeds, and the costs of calls and of concatenation
(:mod:`onebox.plan.schedules.chunked_transfers`, :mod:`onebox.graph.shard.sample_chunks`). A program has at most one
such value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from onebox.engine.partition.early_send import devices_of, expected_s, operator_times, sent_by
from onebox.graph import ModelPrograms, NamedProgram, Phase, Port
from onebox.graph.shard.sample_chunks import Tail, find_tail, in_chunks, put_together, samples_of
from onebox.plan import Links, Plan
from onebox.plan.schedules.chunked_transfers import CALL_S, MOST, best_parts
from onebox.wire import TensorSpec, specs_by_slot

PART_S = 3e-4
"""Cost of one additional part: a call, a message, and the wake-up of its receiver (``benchmarks/halves.py``)."""

LEAST = 0.1
"""Least gain as a fraction of the phase's time: predictions are no more accurate than that."""

OPERATOR_S = 2e-5
"""Cost of calling an operator once more for fewer samples: products of fewer rows use a device less well."""

COPY_BPS = 2e9
"""Bytes per second of concatenation, read and written."""

ENOUGH = 2.0
"""Ratio of a tail's time to its value's transfer time from which a longer tail hides no more."""


class ChunkOf(NamedTuple):
    """A chunk of a value.

    Args:
        port: The value.
        whole: Spec of the whole value.
        first: First row of the chunk, an index of the first dimension.
    """

    port: Port
    whole: TensorSpec
    first: int


@dataclass(frozen=True, kw_only=True)
class ValueChunking:
    """Chunking of one value of a phase.

    Args:
        port: The value.
        tail: The end of the program that computes it.
        length: Number of tail operators that are computed chunk by chunk.
        samples: Number of samples in each chunk.
        keep: Whether its own device reads the value as well.
        gained_s: Predicted gain in arrival time.
    """

    port: Port
    tail: Tail
    length: int
    samples: tuple[int, ...]
    keep: bool
    gained_s: float = 0.0

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each chunk."""
        return tuple(self.tail.rows[self.tail.slot].each * count for count in self.samples)


@dataclass(frozen=True, kw_only=True)
class ChunkedProgram:
    """A phase's program with chunks among its outputs.

    Args:
        named: The program; chunks have their own ports.
        chunks: The chunk of each such port.
        slots: Their slots, in order.
    """

    named: NamedProgram
    chunks: Mapping[Port, ChunkOf]
    slots: tuple[int, ...]


def choose_chunks(programs: ModelPrograms, plan: Plan, samples: int, links: Links | None) -> dict[Phase, ValueChunking]:
    """Return the phases that compute a value in chunks, with the chunking of each.

    An asynchronous pipeline deep enough to hide its transfers never waits for them: chunks would cost time there and
    gain nothing.

    Args:
        programs: The programs of all stages.
        plan: The plan.
        samples: Samples of a micro-batch.
        links: Speeds of the links between devices; ``None`` if unknown.
    """
    if any(plan.in_flight):
        return {}
    found: dict[Phase, ValueChunking] = {}
    phases = [(phase.stage, named) for phase, named in programs.phases.items()]
    for phase, named in programs.phases.items():
        seconds = expected_s(plan, phase.stage, phase.kind) * samples / (plan.micro_batch or samples)
        if not seconds or plan.stages[phase.stage].ranks > 1:
            continue
        kept = _read_nearby(phases, plan, phase.stage)
        sent, times = sent_by(phases, plan, phase.stage, links), operator_times(named.program, seconds)
        specs = specs_by_slot(named.program)
        chosen = [
            choice
            for port, slot in zip(named.outputs, named.program.outputs, strict=True)
            if port in sent
            for choice in _choices(
                named, port, slot, samples, times, specs[slot].size_bytes / sent[port], keep=port in kept
            )
        ]
        if chosen:
            found[phase] = max(chosen, key=lambda choice: choice.gained_s)
    return _agreed(programs, found)


def _choices(
    named: NamedProgram, port: Port, slot: int, samples: int, times: list[float], transfer_s: float, *, keep: bool
) -> Iterable[ValueChunking]:
    """Yield the chunkings of a value that pay, with longer and longer tails."""
    if transfer_s < CALL_S:
        return
    tail = find_tail(named.program, slot, samples)
    tail_s, calls, phase_s = 0.0, 0, math.fsum(times)
    specs = specs_by_slot(named.program)
    for length, number in enumerate(tail.operators if tail else (), 1):
        assert tail is not None
        tail_s += times[number]
        if not times[number]:
            continue  # a view
        calls += 1
        together = put_together(tail, length, keep=keep)
        copied = sum(specs[made].size_bytes for made, own in together.items() if own)
        parts, gained_s = best_parts(
            tail_s,
            transfer_s,
            each_s=PART_S + calls * OPERATOR_S,
            once_s=copied / COPY_BPS + (CALL_S if copied else 0.0),
            most=min(MOST, samples),
        )
        if parts > 1 and gained_s > LEAST * phase_s:
            yield ValueChunking(
                port=port, tail=tail, length=length, samples=samples_of(samples, parts), keep=keep, gained_s=gained_s
            )
        if tail_s > ENOUGH * transfer_s:
            break


def _read_nearby(phases: Iterable[tuple[int, NamedProgram]], plan: Plan, stage: int) -> set[Port]:
    """Return the values that devices of a stage read themselves."""
    own = set(devices_of(plan, stage))
    near = (named for reader, named in phases if not own.isdisjoint(devices_of(plan, reader)))
    return {port for named in near for port in named.inputs}


def _agreed(programs: ModelPrograms, found: Mapping[Phase, ValueChunking]) -> dict[Phase, ValueChunking]:
    """Make all phases that may compute a value, such as the halves of a backward and the whole, use the same chunks."""
    kept: dict[Phase, ValueChunking] = {}
    for phase, choice in found.items():
        makers = [other for other, named in programs.phases.items() if choice.port in named.outputs]
        others = [found.get(maker) for maker in makers]
        if all(other is not None and other.port == choice.port for other in others):
            fewest = min((other.samples for other in others if other is not None), key=len)
            kept[phase] = ValueChunking(
                port=choice.port,
                tail=choice.tail,
                length=choice.length,
                samples=fewest,
                keep=choice.keep,
                gained_s=choice.gained_s,
            )
    return kept


def chunked(named: NamedProgram, choice: ValueChunking) -> ChunkedProgram:
    """Return the program of a phase with a chunked value."""
    whole = specs_by_slot(named.program)[choice.tail.slot]
    made = in_chunks(choice.tail, choice.length, choice.samples, keep=choice.keep)
    firsts = [sum(made.rows[:place]) for place in range(len(made.rows))]
    chunks = {
        Port("chunk", f"{choice.port.name}.{place}"): ChunkOf(choice.port, whole, first)
        for place, first in enumerate(firsts)
    }
    outputs = tuple(port for port in named.outputs if choice.keep or port != choice.port)
    program = NamedProgram(program=made.program, inputs=named.inputs, outputs=(*outputs, *chunks))
    return ChunkedProgram(named=program, chunks=chunks, slots=made.chunks)
