"""State of the split of a tape: the placements of its values, and changes of placement."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from onebox.graph.capture.joint import Port
from onebox.graph.shard.analysis import AnalyzedOperator, AnalyzedProgram, analyze_operator
from onebox.graph.shard.placements import PARTIAL, REPLICATE, Partial, Placement, Shard, local_spec, reshaped
from onebox.graph.shard.rules import FOLLOWS_WEIGHT, MOVES, RESHAPES, order
from onebox.graph.shard.spmd import PerRank, Spmd, SpmdArgument, gather_bytes, reduce_bytes
from onebox.wire import Many, Operator, SlotArgument, TensorSpec, Value, reads


class Choice(NamedTuple):
    """The split of one operator.

    Args:
        letter: The letter of its rule along which it is split; empty: every rank computes the whole.
        sizes: Elements of each rank, as in :class:`Shard`.
        blocks: Blocks, as in :class:`Shard`.
        scatter: Whether a sum of the ranks' terms is split along the output's features, rather than kept whole.
    """

    letter: str = ""
    sizes: tuple[int, ...] = ()
    blocks: int = 1
    scatter: bool = False


ChoiceKey = tuple[object, ...]
"""Key of layers that are split alike: the operator, its shapes and the placements of its inputs."""


@dataclass(frozen=True, kw_only=True)
class ShardingObjective:
    """Weights of the comparison of splits, all in bytes that one rank sends.

    Args:
        held: The worth of one byte of parameters, their gradients or saved values saved on a rank.
        flops_per_byte: Operations that a rank does while one byte travels.
        minimum_bytes: Weights below this stay whole.
    """

    held: float
    flops_per_byte: float
    minimum_bytes: int


@dataclass
class ShardGroup:
    """State that the tapes of a stage share while they are split.

    Args:
        ranks: Ranks.
        prices: Weights of the comparison.
        choices: Fixed choices; others are the cheapest at the operator itself.
        carried: Ports that only pass values between tapes of the stage.
        settled: Given placements of parameters and buffers.
        placements: The placement of every decided port.
        met: Every choice, with its alternatives.
        taken: The chosen alternatives.
    """

    ranks: int
    prices: ShardingObjective
    choices: Mapping[ChoiceKey, Choice]
    carried: frozenset[Port]
    settled: Mapping[Port, Placement] = field(default_factory=dict)
    placements: dict[Port, Placement] = field(init=False)
    met: dict[ChoiceKey, list[Choice]] = field(init=False)
    taken: dict[ChoiceKey, Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.placements = dict(self.settled)
        self.met, self.taken = {}, {}

    def others(self, key: ChoiceKey) -> list[Choice]:
        """Return the alternatives to the choice taken."""
        return [choice for choice in self.met[key] if choice != self.taken[key]]

    def with_choice(self, key: ChoiceKey, choice: Choice) -> ShardGroup:
        """Return the initial state of a trial with one more fixed choice."""
        return replace(self, choices={**self.choices, key: choice})

    def final(self, port: Port) -> Placement:
        """Return the placement of a port: of gradients as their parameters, of updates as their buffers."""
        if port.kind == "gradient":
            port = Port("parameter", port.name)
        elif port.kind == "update":
            port = Port("buffer", port.name)
        return self.placements.get(port, REPLICATE)


class PlacementState(abc.ABC):
    """The values of one tape, and the growing tape of all ranks.

    Args:
        tape: The tape.
        inputs: Ports of its inputs.
        outputs: Ports of its outputs.
        group: State shared with the tapes before and after.
    """

    def __init__(
        self, tape: AnalyzedProgram, inputs: Sequence[Port], outputs: Sequence[Port], group: ShardGroup
    ) -> None:
        self.tape = tape
        self.group = group
        self.specs = dict(tape.specs)
        self.native: dict[int, Placement | None] = {}
        self.versions: dict[int, dict[Placement, int]] = {}
        self.spmd = Spmd(group.ranks, tape.program.slots)
        self.uses = dict(tape.uses)
        self._deferred: dict[int, Operator] = {}
        self._ports = inputs
        for slot, port in enumerate(inputs):
            self._enter(slot, port)
        self.goals = dict(self._wanted(outputs))

    def place(self, slot: int, placement: Placement) -> None:
        """Record the first placement of a value, in the slot of its own number."""
        self.native[slot] = placement
        self.versions[slot] = {placement: slot}

    def add(self, spec: TensorSpec) -> int:
        """Return a fresh slot for a value that the whole program does not have."""
        slot = self.spmd.new()
        self.specs[slot] = spec
        self.uses[slot] = 1
        return slot

    def locals_of(self, spec: TensorSpec, placement: Placement) -> tuple[TensorSpec, ...]:
        """Return the spec of each rank's part of a value."""
        if not isinstance(placement, Shard):
            return (spec,) * self.group.ranks
        return tuple(local_spec(spec, placement, rank) for rank in range(self.group.ranks))

    def want(self, slot: int, placement: Placement) -> int:
        """Return the local slot of a value with a placement; append the conversion if necessary."""
        if self.native[slot] is None:
            self.settle(slot, placement)
        known = self.versions[slot]
        if placement not in known:
            native = self.native[slot]
            if REPLICATE not in known:
                if isinstance(native, Partial):
                    known[REPLICATE] = self.spmd.reduce(known[PARTIAL])
                elif isinstance(native, Shard):
                    known[REPLICATE] = self.spmd.gather(known[native], self.specs[slot], native)
            if isinstance(placement, Shard):
                known[placement] = self.spmd.new()
                self.spmd.cut(known[REPLICATE], self.specs[slot], placement, known[placement])
        return known[placement]

    def cost(self, slot: int, placement: Placement) -> float:
        """Return the bytes that :meth:`want` would send."""
        native, known = self.native[slot], self.versions.get(slot, {})
        size = self.specs[slot].size_bytes
        if native is None or placement in known or REPLICATE in known:
            return 0.0
        return reduce_bytes(size, self.group.ranks) if native == PARTIAL else gather_bytes(size, self.group.ranks)

    def settle(self, slot: int, placement: Placement) -> None:
        """Decide the placement of a parameter or buffer (or a view of one): that of its first reader."""
        operator = self._deferred.pop(slot, None)
        if operator is None:
            port = self._ports[slot]
            self.group.placements[port] = placement
            for other, same in enumerate(self._ports):
                if same == port:
                    self._place_input(other, placement)
            return
        source = reads(operator)[0]
        if self.native[source] is None:
            before = self.before(operator, placement) if isinstance(placement, Shard) else REPLICATE
            self.settle(source, before or REPLICATE)
        self.operator(operator)

    def _enter(self, slot: int, port: Port) -> None:
        if port in self.group.placements:
            self._place_input(slot, self.group.placements[port])
        elif port.kind in ("parameter", "buffer"):
            self.native[slot] = None
        else:
            self._place_input(slot, REPLICATE)

    def _place_input(self, slot: int, placement: Placement) -> None:
        self.place(slot, placement)
        self.spmd.locals[slot] = self.locals_of(self.specs[slot], placement)

    def leave(self, slot: int, port: Port) -> int:
        """Return the local slot of an output, with the placement of its port."""
        if port in self.group.carried:
            native = self.native[slot]
            self.group.placements[port] = native if isinstance(native, Shard) else REPLICATE
        return self.want(slot, self.group.final(port))

    def _wanted(self, outputs: Sequence[Port]) -> Iterator[tuple[int, Shard]]:
        """Yield slots that should be split because a gradient is a view of them and its parameter is split."""
        for output, port in zip(self.tape.program.outputs, outputs, strict=True):
            slot, placement = output, self.group.final(port)
            while isinstance(placement, Shard):  # the split of a slot that makes the split of its view right
                yield slot, placement
                operator = self.tape.makers.get(slot)
                if operator is None or operator.name not in FOLLOWS_WEIGHT:
                    break
                before = self.before(operator, placement)
                slot, placement = reads(operator)[0], before or REPLICATE

    def before(self, operator: Operator, shard: Shard) -> Shard | None:
        """Return the split of a view's input for a split of its output."""
        before, after = self.specs[reads(operator)[0]].shape, operator.specs[0]
        assert after is not None
        if operator.name in RESHAPES:
            return reshaped(after.shape, before, shard)
        return shard.at(order(operator, self.specs)[shard.dim]) if operator.name in MOVES else shard

    def sight(self, operator: Operator) -> AnalyzedOperator:
        """Return the properties of an operator."""
        return self.tape.sights.get(id(operator)) or analyze_operator(operator, self.specs)

    @abc.abstractmethod
    def operator(self, operator: Operator) -> None:
        """Append one operator of the whole program, split if possible."""

    def emit(
        self,
        operator: Operator,
        wanted: Sequence[Placement],
        made: Sequence[Placement],
        sizes: Mapping[int, int] | None = None,
        fixed: Mapping[int, PerRank] | None = None,
    ) -> None:
        """Append an operator with given placements of its arguments and outputs.

        Args:
            operator: As in the whole program.
            wanted: For each tensor that it reads, in order.
            made: For each output.
            sizes: For arguments that are sizes, the output whose local shape they are.
            fixed: Arguments that replace others.
        """
        local = [self.want(slot, p) for slot, p in zip(self.sight(operator).slots, wanted, strict=True)]
        slots = iter(local)
        args: list[SpmdArgument] = [renamed(value, slots) for value in operator.args]
        kwargs = {key: renamed(value, slots) for key, value in operator.kwargs.items()}
        for position, output in (sizes or {}).items():
            spec = operator.specs[output]
            assert spec is not None
            args[position] = PerRank(tuple(Many(local.shape) for local in self.locals_of(spec, made[output])))
        for position, value in (fixed or {}).items():
            args[position] = value
        outs: list[tuple[int, tuple[TensorSpec, ...]] | None] = []
        for out, spec, placement in zip(operator.outs, operator.specs, made, strict=True):
            if out is None or spec is None:
                outs.append(None)
                continue
            self.specs[out] = spec
            self.place(out, placement)
            outs.append((out, self.locals_of(spec, placement)))
        self.spmd.run(operator.name, args, outs, local, kwargs, operator.position)


def renamed(value: Value, slots: Iterator[int]) -> Value:
    """Return an argument with its slots replaced by the next ones."""
    if isinstance(value, SlotArgument):
        return SlotArgument(next(slots))
    if isinstance(value, Many):
        return Many(
            tuple(SlotArgument(next(slots)) if isinstance(item, SlotArgument) else item for item in value.items)
        )
    return value
