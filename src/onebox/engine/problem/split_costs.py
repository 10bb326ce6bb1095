"""Costs of segments whose layers are split over several devices, for the planner. Pure.

The split is that of :mod:`onebox.graph.shard.search`, with which the engine splits a stage. A rank's part of a
segment's time follows from its operators: each takes as long as its operations or its bytes do
(:mod:`onebox.cost.estimate`, after the roofline of Williams et al. 2009), and the segment's measured time is multiplied
by the ratio of the rank's operators to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from onebox.cost.estimate import TYPICAL_RATES, program_s
from onebox.cost.model_profile import AS_CAPTURED, SegmentTimes
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.graph import ModelPrograms, NamedProgram, Phase, Piece, Port
from onebox.graph.shard.placements import Placement, Shard, local_spec
from onebox.graph.shard.search import AllGather, RankTape, Sharded, shard_parts, shard_tapes
from onebox.graph.shard.spmd import gather_bytes, reduce_bytes
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.device_groups import kind
from onebox.plan.model.problem import Problem, RankMessages, SplitSegment
from onebox.wire import Operator, Program, specs_by_slot

MOST_OPERATORS = 2000
"""Operators of forward and backward up to which splits are searched for where plans can do without: a GPT-2 of twelve
blocks has 1,442, and takes 4 s for each number of ranks."""

_WORTH = 0.9
"""Largest part of the time of the best plan without groups that an ideal split may take to be looked at."""


def groups_of_ranks(problem: Problem) -> dict[int, tuple[int, ...]]:
    """Return for each possible number of ranks the first devices that may split layers: alike ones of a host.

    The numbers are powers of two.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for device in problem.devices:
        alike.setdefault((kind(device), device.host), []).append(device.number)
    found: dict[int, tuple[int, ...]] = {}
    for own in alike.values():
        ranks = 2
        while ranks <= len(own):
            found.setdefault(ranks, tuple(own[:ranks]))
            ranks *= 2
    return dict(sorted(found.items()))


def worthwhile_ranks(problem: Problem) -> tuple[int, ...]:
    """Return the numbers of ranks over which it may pay to split layers; splits need not be computed for others.

    An ideal split divides all work, sums a value in forward and one in backward for every two segments (as
    "Megatron-LM" does, Shoeybi et al. 2019), and its bytes take no time. It has to be quicker than one device alone and
    than replicas, unless one device does not hold the model.

    Args:
        problem: The problem, without costs of splits.
    """
    costs, every = CostModel(problem), tuple(range(len(problem.segments)))
    size_bytes, found = costs.sizes(every).parameter, []
    for ranks, group in groups_of_ranks(problem).items():
        device, links = problem.device[group[0]], problem.links
        latency_s = max(links.latency_s[a][b] for a in group for b in group if a != b)
        forward, inputs, weights, update_s = costs.seconds(every)[device.type]
        fixed_s, sample_s = (sum(each) / device.speed for each in zip(forward, inputs, weights, strict=True))
        alone_s = fixed_s + sample_s * problem.batch + update_s
        ring_s = links.ring_seconds([(member,) for member in group], size_bytes)
        replicas_s = fixed_s + sample_s * problem.batch / ranks + update_s + ring_s
        ideal_s = alone_s / ranks + (ranks - 1) * len(every) * latency_s
        short = device.capacity_bytes is not None and device.capacity_bytes < costs.sizes(every).state
        if short or ideal_s < _WORTH * min(alone_s, replicas_s):
            found.append(ranks)
    return tuple(found)


def split_costs(
    captures: Captures,
    batch: Batch,
    sizes: Sequence[int],
    problem: Problem,
    ranks: Sequence[int],
    times: Mapping[str, Sequence[SegmentTimes]] | None = None,
    *,
    most_operators: float = inf,
    expired: Callable[[], bool] = lambda: False,
) -> dict[int, tuple[SplitSegment, ...]]:
    """Return the costs of all segments with their layers split, by number of ranks.

    Args:
        captures: The captured model.
        batch: A batch.
        sizes: Measured samples of micro-batches, one or more. Splits are chosen for the largest.
        problem: The problem, for the sizes of whole segments.
        ranks: The numbers of ranks.
        times: The profile's times. Where a segment is quicker in another format than as it was captured, which split
            layers do not have, a rank takes so much longer.
        most_operators: Operators of forward and backward up to which splits are searched for, unless some segment fits
            no device.
        expired: Returns whether to leave out the numbers of ranks behind the first.

    Returns:
        The costs; none for a model of more operators.

    Raises:
        CaptureError: The model cannot be captured.
    """
    largest, *others = sorted(set(sizes), reverse=True)
    models = {largest: _Model(captures, batch, largest)}
    found: dict[int, tuple[SplitSegment, ...]] = {}
    if models[largest].operators > most_operators and not _is_needed(problem):
        return found
    models |= {size: _Model(captures, batch, size) for size in others[-1:]}
    for count in ranks:
        if found and expired():
            break
        first = models[largest].split(count)
        least = {size: model.resplit(count, first.placements) for size, model in models.items() if size != largest}
        found[count] = models[largest].costs(problem, count, first, least)
    slower = [_slower(times or {}, number) for number in range(len(problem.segments))]
    return {
        count: tuple(
            replace(one, forward_share=one.forward_share * forward, backward_share=one.backward_share * backward)
            for one, (forward, backward) in zip(each, slower, strict=True)
        )
        for count, each in found.items()
    }


def _is_needed(problem: Problem) -> bool:
    """Return whether some segment fits no device."""
    caps = [device.capacity_bytes for device in problem.devices]
    room = max((cap for cap in caps if cap is not None), default=0)
    return None not in caps and any(segment.state_bytes > room for segment in problem.segments)


def _slower(times: Mapping[str, Sequence[SegmentTimes]], number: int) -> tuple[float, float]:
    """Return by what factor a segment is slower as captured than in its fastest format, forward and backward."""
    forward = backward = 1.0
    for measured in times.values():
        own, ways = measured[-1].seconds[number], dict(measured[-1].ways)
        if AS_CAPTURED in ways:
            plain = ways[AS_CAPTURED][number]
            forward = max(forward, plain[0] / max(own[0], 1e-12))
            backward = max(backward, sum(plain[1:]) / max(sum(own[1:]), 1e-12))
    return forward, backward


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """Collectives of one run of a tape: number of sums and gathers, and the bytes that a rank sends for them."""

    sums: int
    gathers: int
    size_bytes: float


class _Model:
    """A model for micro-batches of one size: as one stage, and with each segment as a stage.

    Args:
        captures: The captured model.
        batch: A batch.
        size: Samples of a micro-batch.
    """

    def __init__(self, captures: Captures, batch: Batch, size: int) -> None:
        traced = captures.traced(batch, size, train=True)
        self.size, self.count = size, len(traced.segments)
        self._whole: ModelPrograms = traced.divide(None)
        self._programs: ModelPrograms = traced.divide([[name] for name in traced.segments])
        phases = [Phase(n, "F") for n in range(self.count)] + [Phase(n, "B") for n in reversed(range(self.count))]
        self._phases = [phase for phase in phases if phase in self._programs.phases]
        self._tapes = [self._programs.phases[phase] for phase in self._phases]
        self._readers: dict[Port, set[int]] = {}
        for phase, tape in zip(self._phases, self._tapes, strict=True):
            for port in (*tape.inputs, *tape.outputs):
                self._readers.setdefault(port, set()).add(phase.stage)

    @property
    def operators(self) -> int:
        """Number of operators of forward and backward."""
        return sum(len(tape.program.operators) for tape in self._tapes)

    def split(self, ranks: int) -> Sharded:
        """Return the tapes of the segments, split as the whole model is as a stage."""
        whole = [self._whole.phases[phase] for phase in (Phase(0, "F"), Phase(0, "B")) if phase in self._whole.phases]
        return shard_parts(whole, self._tapes, ranks)

    def resplit(self, ranks: int, placements: Mapping[Port, Placement]) -> _Splits:
        """Return the tapes of the segments with given placements of parameters and buffers."""
        return self.tapes_of(shard_tapes(self._tapes, ranks, placements=placements, trials=0))

    def tapes_of(self, sharded: Sharded) -> _Splits:
        """Return the first rank's tape of each phase."""
        return {phase: tapes[0] for phase, tapes in zip(self._phases, sharded.tapes, strict=True)}

    def costs(
        self, problem: Problem, ranks: int, sharded: Sharded, smaller: Mapping[int, _Splits]
    ) -> tuple[SplitSegment, ...]:
        """Return the costs of the segments.

        Args:
            problem: The problem, for the sizes of whole segments.
            ranks: Number of ranks.
            sharded: The split.
            smaller: The tapes of smaller micro-batches, by their size, at most one.
        """
        tapes = self.tapes_of(sharded)

        def messages(phase: Phase) -> RankMessages:
            each = {size: _sent(own[phase], ranks) for size, own in smaller.items() if phase in own}
            return _linear(self.size, _sent(tapes[phase], ranks), each) if phase in tapes else RankMessages()

        def share(number: int, kind: str) -> float:
            phase = Phase(number, kind)  # type: ignore[arg-type]
            if phase not in tapes:
                return 1.0
            whole_s = program_s(self._programs.phases[phase].program, TYPICAL_RATES)
            return min(1.0, _rank_s(tapes[phase]) / whole_s) if whole_s > 0 else 1.0

        made = []
        for number, segment in enumerate(problem.segments):
            forward, backward = Phase(number, "F"), Phase(number, "B")
            held = self._held(number, sharded.placements)
            saved, worked = self._saved(tapes, forward), self._worked(tapes, (forward,))
            back = self._worked(tapes, (backward,))
            made.append(
                SplitSegment(
                    forward_share=share(number, "F"),
                    backward_share=share(number, "B"),
                    forward=messages(forward),
                    backward=messages(backward),
                    forward_end_bytes=self._end_bytes(forward, sharded.placements),
                    backward_end_bytes=self._end_bytes(backward, sharded.placements),
                    parameter_bytes=_part(segment.parameter_bytes, held),
                    state_bytes=_part(segment.state_bytes, held),
                    optimizer_bytes=_part(segment.optimizer_bytes, held),
                    saved_bytes=_part(segment.saved_bytes, saved),
                    late_bytes=_part(segment.late_bytes, saved),
                    forward_work_bytes=_part(segment.forward_work_bytes, worked),
                    backward_work_bytes=_part(segment.backward_work_bytes, back),
                )
            )
        return tuple(made)

    def _held(self, number: int, placements: Mapping[Port, Placement]) -> float:
        """Return the part of a segment's own parameters that the first rank holds; 1 without any."""
        whole_bytes = own_bytes = 0
        seen = set[Port]()
        for phase, tape in zip(self._phases, self._tapes, strict=True):
            for port, spec in zip(tape.inputs, tape.program.inputs, strict=True):
                if port.kind == "parameter" and port not in seen and self._readers[port] == {number} == {phase.stage}:
                    seen.add(port)
                    whole_bytes += spec.size_bytes
                    own_bytes += local_spec(spec, placements[port], 0).size_bytes
        return own_bytes / whole_bytes if whole_bytes else 1.0

    def _saved(self, tapes: _Splits, phase: Phase) -> float:
        """Return the part of the values that a forward hands on that the first rank has."""
        if phase not in tapes:
            return 1.0
        whole = self._programs.phases[phase]
        specs = specs_by_slot(whole.program)
        pairs = zip(whole.outputs, whole.program.outputs, tapes[phase].specs, strict=True)
        sizes = [(specs[slot].size_bytes, own.size_bytes) for port, slot, own in pairs if port.kind == "value"]
        whole_bytes = sum(size for size, _ in sizes)
        return sum(own for _, own in sizes) / whole_bytes if whole_bytes else 1.0

    def _worked(self, tapes: _Splits, phases: Sequence[Phase]) -> float:
        """Return the part of the bytes that some phases' operators make that the first rank makes."""
        whole_bytes = own_bytes = 0
        for phase in phases:
            if phase in tapes:
                whole_bytes += _made_bytes(self._programs.phases[phase].program.operators)
                for step in tapes[phase].steps:
                    own_bytes += (
                        _made_bytes(step.program.operators) if isinstance(step, Piece) else step.spec.size_bytes
                    )
        return own_bytes / whole_bytes if whole_bytes else 1.0

    def _end_bytes(self, phase: Phase, placements: Mapping[Port, Placement]) -> int:
        """Return the bytes, for each sample, of split values that a phase hands to other segments."""
        if phase not in self._programs.phases:
            return 0
        tape: NamedProgram = self._programs.phases[phase]
        specs, total = specs_by_slot(tape.program), 0
        for port, slot in zip(tape.outputs, tape.program.outputs, strict=True):
            if port.kind == "value" and self._readers[port] != {phase.stage} and isinstance(placements[port], Shard):
                total += specs[slot].size_bytes
        return -(-total // self.size)


_Splits = Mapping[Phase, RankTape]
"""The first rank's tape of each phase."""


def _part(size_bytes: int, part: float) -> int:
    return -int(-size_bytes * part // 1)


def _made_bytes(operators: Sequence[Operator]) -> int:
    return sum(spec.size_bytes for operator in operators for spec in operator.specs if spec is not None)


def _rank_s(tape: RankTape) -> float:
    """Return the estimated seconds of a tape's operators."""
    programs: list[Program] = [step.program for step in tape.steps if isinstance(step, Piece)]
    return sum(program_s(program, TYPICAL_RATES) for program in programs)


def _sent(tape: RankTape, ranks: int) -> _Sent:
    """Return the collectives of a tape."""
    steps = [step for step in tape.steps if not isinstance(step, Piece)]
    gathers = [step for step in steps if isinstance(step, AllGather)]

    def total(way: Callable[[float, int], float], sizes: Sequence[int]) -> float:
        return sum(way(size, ranks) for size in sizes)

    summed = [step.spec.size_bytes for step in steps if not isinstance(step, AllGather)]
    sent_bytes = total(reduce_bytes, summed) + total(gather_bytes, [step.spec.size_bytes for step in gathers])
    return _Sent(sums=len(summed), gathers=len(gathers), size_bytes=sent_bytes)


def _linear(size: int, sent: _Sent, smaller: Mapping[int, _Sent]) -> RankMessages:
    """Return collectives whose bytes are a line through those of two sizes of micro-batches, or proportional to one."""
    sample_bytes = sent.size_bytes / size
    for other, less in smaller.items():
        sample_bytes = min(max(0.0, sent.size_bytes - less.size_bytes) / (size - other), sample_bytes)
    fixed_bytes = max(0.0, sent.size_bytes - sample_bytes * size)
    return RankMessages(sums=sent.sums, gathers=sent.gathers, fixed_bytes=fixed_bytes, sample_bytes=sample_bytes)
