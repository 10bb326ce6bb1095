"""Parts: the work of each worker in each phase, whole or one rank's part of a split stage. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onebox.engine.partition.early_send import early_ends, expected_s, sent_by
from onebox.engine.partition.value_chunks import ChunkOf, ValueChunking, choose_chunks, chunked
from onebox.graph import ModelPrograms, NamedProgram, Phase, PhaseKind, Port, split
from onebox.graph.shard.placements import REPLICATE, Placement
from onebox.graph.shard.search import RankStep, RankTape, shard_tapes
from onebox.plan import Links, Plan
from onebox.wire import Program, TensorSpec, specs_by_slot


@dataclass(frozen=True, kw_only=True)
class PhaseProgram:
    """One worker's work in a phase.

    Args:
        inputs: Port of each input; input ``i`` arrives in slot ``i``.
        given: Spec of each input.
        outputs: Port of each output.
        made: Spec of each output.
        slots: Slot of each output.
        steps: The steps to run.
        program: The whole program, if it is the only step.
        ends: Operators after which the steps split it.
        chunks: Outputs that are chunks, with the value of each.
    """

    inputs: tuple[Port, ...]
    given: tuple[TensorSpec, ...]
    outputs: tuple[Port, ...]
    made: tuple[TensorSpec, ...]
    slots: tuple[int, ...]
    steps: tuple[RankStep, ...]
    program: Program | None = None
    ends: tuple[int, ...] = ()
    chunks: Mapping[Port, ChunkOf] = field(default_factory=dict)

    @property
    def in_chunks(self) -> frozenset[Port]:
        """Values that are sent in chunks."""
        return frozenset(chunk.port for chunk in self.chunks.values())

    def specs(self, kind: str) -> dict[str, TensorSpec]:
        """Return the specs of the outputs of a kind of port, by name."""
        pairs = zip(self.outputs, self.made, strict=True)
        return {str(port.name): spec for port, spec in pairs if port.kind == kind}


def whole_program(named: NamedProgram, ends: tuple[int, ...] = ()) -> PhaseProgram:
    """Return a program as a part, split after some operators."""
    program = named.program
    specs = specs_by_slot(program)
    return PhaseProgram(
        inputs=named.inputs,
        given=program.inputs,
        outputs=named.outputs,
        made=tuple(specs[slot] for slot in program.outputs),
        slots=program.outputs,
        steps=tuple(split(program, ends)),
        program=program,
        ends=ends,
    )


def _rank_part(named: NamedProgram, tape: RankTape) -> PhaseProgram:
    return PhaseProgram(
        inputs=named.inputs,
        given=tape.inputs,
        outputs=named.outputs,
        made=tape.specs,
        slots=tape.outputs,
        steps=tape.steps,
    )


class PhasePrograms:
    """Parts of a model under a plan.

    Args:
        programs: The programs of its stages.
        plan: The plan.
        halves: Split stages whose backward is divided into input and weight gradients; that of others is whole.
        settled: Placements of parameters and buffers that are fixed by earlier parts.
        links: Speeds of the links between devices; ``None`` if unknown.
    """

    def __init__(
        self,
        programs: ModelPrograms,
        plan: Plan,
        *,
        halves: Iterable[int] = (),
        settled: Mapping[str, Placement] | None = None,
        links: Links | None = None,
    ) -> None:
        self.programs = programs
        self._links = links
        self._chunkings: Mapping[Phase, ValueChunking] = {}
        self._in_chunks: dict[int, PhasePrograms] = {}
        self.placements: dict[str, Placement] = {}
        self._place = {
            (stage, device): (replica, rank)
            for stage, found in enumerate(plan.stages)
            for replica, devices in enumerate(found.replicas)
            for rank, device in enumerate(devices)
        }
        self._plan = plan
        self._others: dict[int, dict[Port, float]] = {}
        self._whole: dict[tuple[int, PhaseKind], PhaseProgram] = {}
        self._ranks: dict[tuple[int, PhaseKind], tuple[PhaseProgram, ...]] = {}
        for stage, found in enumerate(plan.stages):
            if len(found.replicas[0]) > 1:
                self._shard(stage, len(found.replicas[0]), stage in set(halves), settled or {})

    def in_chunks(self, samples: int) -> PhasePrograms:
        """Return the parts for overlapping steps, in which values may be sent in chunks.

        Args:
            samples: Samples of the micro-batch.
        """
        if samples not in self._in_chunks:
            chunkings = choose_chunks(self.programs, self._plan, samples, self._links)
            self._in_chunks[samples] = made = copy.copy(self) if chunkings else self
            if chunkings:
                made._chunkings, made._whole = chunkings, {}
        return self._in_chunks[samples]

    def rows(self, port: Port) -> tuple[int, ...]:
        """Return the number of rows of each chunk of a value; empty if it is sent whole."""
        return next((chunking.rows for chunking in self._chunkings.values() if chunking.port == port), ())

    def of(self, worker: int, stage: int, kind: PhaseKind) -> PhaseProgram:
        """Return the part of a worker in a phase."""
        ranks = self._ranks.get((stage, kind))
        if ranks is not None:
            return ranks[self._place[stage, worker][1]]
        if (stage, kind) not in self._whole:
            self._whole[stage, kind] = self._make(stage, kind)
        return self._whole[stage, kind]

    def _make(self, stage: int, kind: PhaseKind) -> PhaseProgram:
        named, chunking = self.programs.of(stage, kind), self._chunkings.get(Phase(stage, kind))
        if chunking is None:
            return whole_program(named, self._ends(named, stage, kind))
        made = chunked(named, chunking)
        program = made.named.program
        leaving = [number for number, operator in enumerate(program.operators) if set(made.slots) & set(operator.outs)]
        ends = {*leaving, *self._ends(made.named, stage, kind, but=chunking.port)} - {len(program.operators) - 1}
        return replace(whole_program(made.named, tuple(sorted(ends))), chunks=made.chunks)

    def _ends(self, named: NamedProgram, stage: int, kind: PhaseKind, but: Port | None = None) -> tuple[int, ...]:
        """Return the operators of a phase after which a value is sent before the rest."""
        seconds = expected_s(self._plan, stage, kind)
        if not seconds:
            return ()
        sent, specs = self._sent(stage), specs_by_slot(named.program)
        ports = zip(named.program.outputs, named.outputs, strict=True)
        slots = {slot: specs[slot].size_bytes / sent[port] for slot, port in ports if port in sent and port != but}
        return early_ends(named.program, slots, seconds)

    def _sent(self, stage: int) -> dict[Port, float]:
        if stage not in self._others:
            phases = ((phase.stage, part) for phase, part in self.programs.phases.items())
            self._others[stage] = sent_by(phases, self._plan, stage, self._links)
        return self._others[stage]

    def _shard(self, stage: int, ranks: int, halves: bool, settled: Mapping[str, Placement]) -> None:
        """Split the layers of a stage over ranks."""
        present = [kind for kind in _order(halves) if (stage, kind) in self.programs.phases]
        tapes = [self.programs.of(stage, kind) for kind in present]
        elsewhere = self._elsewhere(stage)
        given: dict[Port, Placement] = _ports(tapes, settled)
        given |= {port: REPLICATE for port in elsewhere if port.kind != "value"}
        sharded = shard_tapes(tapes, ranks, whole=elsewhere, placements=given)
        for kind, named, rank_tapes in zip(present, tapes, sharded.tapes, strict=True):
            self._ranks[stage, kind] = tuple(_rank_part(named, tape) for tape in rank_tapes)
        for port, placement in sharded.placements.items():
            if port.kind in ("parameter", "buffer"):
                self.placements[str(port.name)] = placement

    def _elsewhere(self, stage: int) -> frozenset[Port]:
        """Return the ports of a stage that other stages use too; they are whole there."""
        own: set[Port] = set()
        others: set[Port] = set()
        for phase, part in self.programs.phases.items():
            ports = (*part.inputs, *part.outputs)
            rounded = (Port("parameter", port.name) for port in ports if port.kind == "rounded")
            (own if phase.stage == stage else others).update((*ports, *rounded))
        return frozenset(port for port in own & others if port.kind in ("value", "parameter", "buffer"))


def _order(halves: bool) -> Sequence[PhaseKind]:
    return ("F", "I", "W") if halves else ("F", "B")


def _ports(tapes: Sequence[NamedProgram], settled: Mapping[str, Placement]) -> dict[Port, Placement]:
    ports = {port for tape in tapes for port in tape.inputs if port.kind in ("parameter", "buffer")}
    return {port: settled[str(port.name)] for port in ports if str(port.name) in settled}
