"""Splitting within layers: the tapes of a stage become tapes of a group of ranks that share its parameters and work.

Weights of products and convolutions are split by output or by input feature, so that the next layer takes features in
the same shares in which one layer makes them (Krizhevsky, "One weird trick", 2014, for feature maps; Shoeybi et al.,
"Megatron-LM", 2019, for pairs of columns and rows). The splits are chosen by comparing whole tapes: the ranks' traffic,
operations and memory. All ranks run the same steps; only shapes differ, where a dimension does not divide evenly. A
whole value has the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from onebox.errors import UsageError
from onebox.graph.capture.joint import Port
from onebox.graph.lower.split import Piece, split
from onebox.graph.shard.analysis import AnalyzedProgram, analyze_program
from onebox.graph.shard.placements import Partial, Placement, Shard, local_spec
from onebox.graph.shard.spmd import LocalStep, ReduceStep, product_flops
from onebox.graph.shard.state import ChoiceKey, ShardGroup, ShardingObjective
from onebox.graph.shard.walk import ProgramSharder
from onebox.wire import Operator, Program, SlotArgument, TensorSpec, specs_by_slot

HELD = 4.0
"""Default worth of a byte of memory saved on a rank, in bytes sent: memory first. With it the convolutional nets of the
tests are split from end to end; with 1 transformers are split in pairs of columns and rows alone, as in Megatron-LM,
which sends about two thirds and holds a few hundredths more."""

FLOPS_PER_BYTE = 100.0
"""Default operations that a rank does while it sends a byte: 100 GFLOP/s behind a link of 1 GB/s."""

TRIALS = 100
"""Default bound of the search: a GPT-2 of twelve blocks takes about 50 trials, 4 s altogether."""


_STARTS = (0.25, 4.0)
"""Multiples of the worth of a byte held at which the greedy initial split is computed, too: the saving of a split shows
at its operator, its cost only at later ones."""


class NamedTape(Protocol):
    """A tape whose inputs and outputs have names; :class:`onebox.graph.NamedProgram` is one."""

    @property
    def program(self) -> Program:
        """The tape."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """One port for each input."""

    @property
    def outputs(self) -> tuple[Port, ...]:
        """One port for each output."""


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A collective: the sum of all ranks' ``source`` goes to ``target`` on each, the same bits on each.

    Args:
        source: Slot; not read afterwards.
        target: Slot.
        spec: Spec of both.
    """

    source: int
    target: int
    spec: TensorSpec


@dataclass(frozen=True, kw_only=True)
class AllGather:
    """A collective: the concatenation of all ranks' ``source`` along a dimension goes to ``target`` on each.

    Args:
        source: Slot.
        target: Slot.
        dim: The dimension.
        parts: Spec of each rank's part; sizes may differ along ``dim``.
        spec: Spec of the whole.
    """

    source: int
    target: int
    dim: int
    parts: tuple[TensorSpec, ...]
    spec: TensorSpec


RankStep = Piece | AllReduce | AllGather


@dataclass(frozen=True, kw_only=True)
class RankTape:
    """One tape of one rank.

    Slots are numbered over all steps of the tape; a :class:`Piece` maps them to its program's own inputs and outputs.
    Input ``i`` arrives in slot ``i``.

    Args:
        inputs: Spec of each input, ports as in the whole tape.
        steps: Programs and collectives in order; all ranks have the same kinds of steps in the same order.
        outputs: The slot of each output, ports as in the whole tape.
        specs: Spec of each output.
    """

    inputs: tuple[TensorSpec, ...]
    steps: tuple[RankStep, ...]
    outputs: tuple[int, ...]
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """The tapes of a stage, shared by the ranks of a group.

    Args:
        ranks: Number of ranks.
        tapes: For each tape, in the order given, the tape of each rank.
        placements: Of each port of the tapes: parameters and their gradients, buffers and their updates, and values
            that one tape hands to another may be split; all others are whole.
        wire_bytes: Bytes that one rank sends in a run of all tapes, in rings.
        held_bytes: Bytes of parameters and of values between tapes on the first rank, which has the most.
        whole_bytes: The same for one device alone.
        work_share: The first rank's part of the operations of all products and convolutions; each rank's is one over
            the number of ranks at best, and 1 where nothing is shared.
    """

    ranks: int
    tapes: tuple[tuple[RankTape, ...], ...]
    placements: Mapping[Port, Placement]
    wire_bytes: float
    held_bytes: int
    whole_bytes: int
    work_share: float


def shard_tapes(
    tapes: Sequence[NamedTape],
    ranks: int,
    *,
    held: float = HELD,
    flops_per_byte: float = FLOPS_PER_BYTE,
    minimum_bytes: int = 0,
    whole: frozenset[Port] = frozenset(),
    placements: Mapping[Port, Placement] | None = None,
    trials: int = TRIALS,
) -> Sharded:
    """Share the tapes of a stage among ranks.

    A dimension is split if it has an element, or a head, for each rank; it need not divide evenly. Random operators
    draw the numbers of a single device, as far as they depend on shapes, not on strides.

    Args:
        tapes: In the order in which they run: forward, then backward or its halves. A port that is an output of one and
            an input of a later one stays within the stage and may be split.
        ranks: At least two.
        held: The worth of a byte of parameters, gradients or values between tapes saved on a rank, in bytes sent.
        flops_per_byte: Operations that a rank does while it sends a byte.
        minimum_bytes: Weights below this stay whole.
        whole: Ports that must be whole because other stages read them, too.
        placements: Given placements of parameters and buffers: those of the training tapes for the evaluation tapes,
            for example. Other ports are ignored.
        trials: Maximum number of alternative splits of all tapes that are compared. The first one takes the cheapest
            choice at each operator.

    Returns:
        The tapes and the placements of each rank.

    Raises:
        UsageError: There are fewer than two ranks, or a placement does not fit them or its tensor.

    Example:
        >>> import torch
        >>> from onebox.graph import model_programs
        >>> from onebox.graph.capture.export import capture
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> batch = torch.zeros(4, 8), torch.zeros(4, 8)
        >>> programs = model_programs(capture(model, torch.nn.functional.mse_loss, batch), backward=True)
        >>> sharded = shard_tapes([programs.forward, programs.backward], 2, held=1.0)
        >>> sharded.placements[Port("parameter", "model.0.weight")]
        Shard(dim=0, sizes=(32, 32), blocks=1)
        >>> sharded.placements[Port("parameter", "model.2.weight")]
        Shard(dim=1, sizes=(32, 32), blocks=1)
        >>> [type(step).__name__ for step in sharded.tapes[0][0].steps]
        ['Piece', 'AllReduce', 'Piece']
    """
    found = _best(tapes, ranks, held, flops_per_byte, minimum_bytes, whole, placements or {}, trials)
    return _sharded(tapes, found)


def shard_parts(tapes: Sequence[NamedTape], parts: Sequence[NamedTape], ranks: int) -> Sharded:
    """Split the parts of tapes in the way in which :func:`shard_tapes` splits the tapes by default.

    The splits are searched for once, on the whole; then the operators of each part are split alike. So the cost of each
    part of a stage becomes known. A value between two parts stays split where both sides can use it so.

    Args:
        tapes: The tapes of a stage.
        parts: The same operators in more tapes, such as those of its segments, in the order in which they run.
        ranks: At least two.

    Returns:
        The tapes of each part, and all placements.

    Raises:
        UsageError: There are fewer than two ranks.
    """
    found = _best(tapes, ranks, HELD, FLOPS_PER_BYTE, 0, frozenset(), {}, TRIALS).group
    ports = {port for part in parts for port in part.inputs if port.kind in ("parameter", "buffer")}
    settled = {port: found.final(port) for port in ports}
    group = ShardGroup(ranks, found.prices, found.taken, _between(parts), settled)
    return _sharded(parts, _try(parts, [analyze_program(part.program) for part in parts], group))


def _best(
    tapes: Sequence[NamedTape],
    ranks: int,
    held: float,
    flops_per_byte: float,
    minimum_bytes: int,
    whole: frozenset[Port],
    placements: Mapping[Port, Placement],
    trials: int,
) -> _Trial:
    """Return the best split of tapes; see :func:`shard_tapes`."""
    if ranks < 2:
        raise UsageError(f"a layer cannot be split over {ranks} ranks: give at least 2")
    prices = ShardingObjective(held=held, flops_per_byte=flops_per_byte, minimum_bytes=minimum_bytes)
    settled = _settled(tapes, ranks, placements)
    return _search(tapes, ShardGroup(ranks, prices, {}, _between(tapes) - whole, settled), trials)


def _sharded(tapes: Sequence[NamedTape], found: _Trial) -> Sharded:
    ranks, carried = found.group.ranks, found.group.carried
    ports = {port for tape in tapes for port in (*tape.inputs, *tape.outputs)}
    return Sharded(
        ranks=ranks,
        tapes=tuple(tuple(_rank_tape(walk, rank) for rank in range(ranks)) for walk in found.walks),
        placements={port: found.group.final(port) for port in ports},
        wire_bytes=sum(walk.spmd.wire_bytes for walk in found.walks),
        held_bytes=_held(tapes, found.group, carried, copies=1),
        whole_bytes=_held(tapes, None, carried, copies=1),
        work_share=_work_share(tapes, found.walks),
    )


def _settled(tapes: Sequence[NamedTape], ranks: int, given: Mapping[Port, Placement]) -> dict[Port, Placement]:
    """Return the placements given of parameters and buffers.

    Raises:
        UsageError: One does not fit.
    """
    found: dict[Port, Placement] = {}
    for tape in tapes:
        for spec, port in zip(tape.program.inputs, tape.inputs, strict=True):
            if port.kind not in ("parameter", "buffer") or port not in given:
                continue
            placed = found[port] = given[port]
            if isinstance(placed, Partial) or (isinstance(placed, Shard) and not placed.fits(spec.shape, ranks)):
                raise UsageError(f"{port.kind} {port.name} ({spec}) cannot be placed as {placed} over {ranks} ranks")
    return found


def _between(tapes: Sequence[NamedTape]) -> frozenset[Port]:
    """Return the ports of values that are outputs of one tape and inputs of a later one."""
    found: set[Port] = set()
    made: set[Port] = set()
    for tape in tapes:
        found |= made & set(tape.inputs)
        made |= set(tape.outputs)
    return frozenset(port for port in found if port.kind == "value")


@dataclass(frozen=True)
class _Trial:
    """Tapes split in one way."""

    walks: list[ProgramSharder]
    group: ShardGroup
    cost: float


def _search(tapes: Sequence[NamedTape], group: ShardGroup, trials: int) -> _Trial:
    """Improve one choice after the other, in the order in which they arise, until none gets better."""
    known = [analyze_program(tape.program) for tape in tapes]
    best = _try(tapes, known, group)
    for factor in _STARTS if trials else ():
        prices = replace(group.prices, held=factor * group.prices.held)
        first = _try(tapes, known, replace(group, prices=prices))
        start = _try(tapes, known, replace(group, choices=first.group.taken))
        best = min(best, start, key=lambda trial: trial.cost)
    improved = True
    while improved:
        improved = False
        done: set[ChoiceKey] = set()
        while todo := [key for key in best.group.met if key not in done]:
            key = todo[0]
            done.add(key)
            for choice in best.group.others(key):
                if trials <= 0:
                    return best
                trials -= 1
                trial = _try(tapes, known, best.group.with_choice(key, choice))
                if trial.cost < best.cost * (1 - 1e-9):
                    best, improved = trial, True
    return best


def _try(tapes: Sequence[NamedTape], known: Sequence[AnalyzedProgram], group: ShardGroup) -> _Trial:
    walks = [ProgramSharder(seen, tape.inputs, tape.outputs, group) for seen, tape in zip(known, tapes, strict=True)]
    cost = sum(walk.spmd.wire_bytes + walk.spmd.flops / group.prices.flops_per_byte for walk in walks)
    return _Trial(walks, group, cost + group.prices.held * _held(tapes, group, group.carried, copies=2))


def _held(tapes: Sequence[NamedTape], group: ShardGroup | None, carried: frozenset[Port], *, copies: int) -> int:
    """Return the bytes of parameters, buffers and values between tapes: of the first rank, or of one device alone.

    Args:
        tapes: The tapes.
        group: The group with its placements; ``None`` for one device.
        carried: The values between tapes.
        copies: Number of times that parameters count.
    """
    found: dict[Port, int] = {}
    for tape in tapes:
        for spec, port in zip(tape.program.inputs, tape.inputs, strict=True):
            if port in carried or port.kind in ("parameter", "buffer"):
                mine = spec if group is None else local_spec(spec, group.final(port), 0)
                found[port] = mine.size_bytes * (copies if port.kind == "parameter" else 1)
    return sum(found.values())


def _work_share(tapes: Sequence[NamedTape], walks: Sequence[ProgramSharder]) -> float:
    """Return the first rank's part of the operations of one device; 1 without products."""
    alone = 0.0
    for tape in tapes:
        specs = specs_by_slot(tape.program)
        for operator in tape.program.operators:
            alone += product_flops(operator.name, operator.args, operator.outs, specs.__getitem__)
    mine = sum(walk.spmd.flops for walk in walks)
    return mine / alone if alone else 1.0


def _rank_tape(walk: ProgramSharder, rank: int) -> RankTape:
    """Return the tape of one rank: operators between collectives are separate programs."""
    known = walk.spmd.locals
    steps = walk.spmd.needed(walk.outputs)
    operators: list[Operator] = []
    ends: set[int] = set()
    collectives: dict[int, AllReduce | AllGather] = {}
    for number, step in enumerate(steps):
        if isinstance(step, LocalStep):
            operators.append(step.of_rank(rank, known))
            continue
        spec = known[step.target][rank]
        operators.append(Operator(_COLLECTIVE, (SlotArgument(step.source),), {}, (step.target,), (spec,), (), number))
        ends |= {number - 1, number}
        if isinstance(step, ReduceStep):
            collectives[number] = AllReduce(source=step.source, target=step.target, spec=spec)
        else:
            collectives[number] = AllGather(
                source=step.source, target=step.target, dim=step.dim, parts=known[step.source], spec=spec
            )
    inputs = tuple(known[slot][rank] for slot in range(len(walk.tape.program.inputs)))
    program = Program(inputs, tuple(operators), tuple(walk.outputs), walk.spmd.slots)
    pieces = split(program, sorted(ends - {-1}))
    return RankTape(
        inputs=inputs,
        steps=tuple(_step(piece, collectives) for piece in pieces),
        outputs=tuple(walk.outputs),
        specs=tuple(known[slot][rank] for slot in walk.outputs),
    )


_COLLECTIVE = "collective"
"""Placeholder of a collective while a tape is cut into pieces."""


def _step(piece: Piece, collectives: Mapping[int, AllReduce | AllGather]) -> RankStep:
    first = piece.program.operators[0]
    return collectives[first.position] if first.name == _COLLECTIVE else piece
