"""One tape for all ranks of a group: the same operators and collectives, with shapes that may differ by rank.

A tape is built step by step, with the ranks' specs of each slot. Slot numbers below the whole program's count are the
program's own; copies with other placements get new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from onebox.graph.shard.placements import Shard
from onebox.wire import Many, MemoryFormat, Operator, SlotArgument, TensorSpec, Value

Specs = tuple[TensorSpec, ...]
"""The spec of each rank's part in one slot."""

_PRODUCTS = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}
"""Matrix products, and the index of their first matrix."""


_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default"})


@dataclass(frozen=True)
class PerRank:
    """An argument that differs by rank."""

    values: tuple[Value, ...]


SpmdArgument = Value | PerRank


@dataclass(frozen=True)
class LocalStep:
    """An operator that every rank runs on its own parts."""

    name: str
    args: tuple[SpmdArgument, ...]
    kwargs: Mapping[str, Value]
    outs: tuple[int | None, ...]
    reads: tuple[int, ...]
    position: int = -1

    def of_rank(self, rank: int, locals_: Mapping[int, Specs]) -> Operator:
        """Return the operator as one rank runs it."""
        args = tuple(value.values[rank] if isinstance(value, PerRank) else value for value in self.args)
        specs = tuple(None if slot is None else locals_[slot][rank] for slot in self.outs)
        return Operator(self.name, args, dict(self.kwargs), self.outs, specs, (), self.position)


@dataclass(frozen=True)
class ReduceStep:
    """The sum of all ranks' ``source`` goes to ``target`` on each."""

    source: int
    target: int


@dataclass(frozen=True)
class GatherStep:
    """The concatenation of all ranks' ``source`` along ``dim`` goes to ``target`` on each."""

    source: int
    target: int
    dim: int


SpmdStep = LocalStep | ReduceStep | GatherStep


@dataclass
class Spmd:
    """A tape under construction.

    Args:
        ranks: Ranks of the group.
        slots: The next number of a slot.
        locals: The ranks' specs of each slot.
        steps: The tape.
        wire_bytes: Bytes that one rank sends for its collectives, in rings.
        flops: Multiplications and additions of one rank's products.
        relaid: Slots whose memory layout may differ from the whole program's: results of collectives are in the order
            of the dimensions. Views of them are copied where necessary.
    """

    ranks: int
    slots: int
    locals: dict[int, Specs] = field(default_factory=dict)
    steps: list[SpmdStep] = field(default_factory=list)
    wire_bytes: float = 0.0
    flops: float = 0.0
    relaid: set[int] = field(default_factory=set)

    def new(self) -> int:
        """Return a fresh slot."""
        self.slots += 1
        return self.slots - 1

    def run(
        self,
        name: str,
        args: Sequence[SpmdArgument],
        outs: Sequence[tuple[int, Specs] | None],
        reads: Sequence[int],
        kwargs: Mapping[str, Value] | None = None,
        position: int = -1,
    ) -> None:
        """Append an operator.

        Args:
            name: Its name.
            args: Its arguments.
            outs: For each output its slot and the ranks' specs.
            reads: The slots that it reads.
            kwargs: More arguments.
            position: As in :class:`onebox.wire.Operator`.
        """
        for out in outs:
            if out is not None:
                self.locals[out[0]] = out[1]
        kwargs = kwargs or {}
        if self._may_be_relaid(name, reads, kwargs):
            self.relaid.update(out[0] for out in outs if out is not None)
            name = "aten.reshape.default" if name in _VIEWS else name
        step = LocalStep(name, tuple(args), kwargs, tuple(out and out[0] for out in outs), tuple(reads), position)
        self.steps.append(step)
        self.flops += product_flops(name, args, step.outs, self._first)

    def reduce(self, source: int) -> int:
        """Append an all-reduce; return the slot of the sum."""
        target = self.new()
        self.locals[target] = self.locals[source]
        self.relaid.add(target)
        self.steps.append(ReduceStep(source, target))
        self.wire_bytes += reduce_bytes(self.locals[source][0].size_bytes, self.ranks)
        return target

    def gather(self, source: int, spec: TensorSpec, shard: Shard) -> int:
        """Append an all-gather; return the slot of the whole.

        Args:
            source: The slot of the parts.
            spec: Spec of the whole.
            shard: The split.
        """
        dim = shard.dim
        if shard.blocks > 1:  # one gather along the rows of all blocks makes each block whole
            source = self._view(source, [_rows(s, dim, shard.blocks) for s in self.locals[source]])
            dim += 1
        target = self.new()
        whole = spec if shard.blocks == 1 else _rows(spec, shard.dim, shard.blocks)
        self.locals[target] = (whole,) * self.ranks
        self.relaid.add(target)
        self.steps.append(GatherStep(source, target, dim))
        self.wire_bytes += gather_bytes(spec.size_bytes, self.ranks)
        return target if shard.blocks == 1 else self._view(target, [spec] * self.ranks)

    def cut(self, source: int, spec: TensorSpec, shard: Shard, target: int) -> None:
        """Append the operators that cut each rank's own share, in memory of its own, out of the whole."""
        dim = shard.dim
        if shard.blocks > 1:
            source = self._view(source, [_rows(spec, dim, shard.blocks)] * self.ranks)
            spec, dim = self.locals[source][0], dim + 1
        starts = tuple(shard.start(rank) for rank in range(self.ranks))
        ends = tuple(start + size for start, size in zip(starts, shard.sizes, strict=True))
        pieces = tuple(TensorSpec(spec.dtype, (*spec.shape[:dim], n, *spec.shape[dim + 1 :])) for n in shard.sizes)
        view, own = self.new(), target if shard.blocks == 1 else self.new()
        self.run(
            "aten.slice.Tensor", (SlotArgument(source), dim, PerRank(starts), PerRank(ends)), [(view, pieces)], [source]
        )
        self.run("aten.clone.default", (SlotArgument(view),), [(own, pieces)], [view])
        if shard.blocks > 1:
            merged = [TensorSpec(p.dtype, (*p.shape[: dim - 1], shard.blocks * p.shape[dim], *p.shape[dim + 1 :]))
                      for p in pieces]  # fmt: skip
            self._view(own, merged, target)

    def needed(self, outputs: Sequence[int]) -> list[SpmdStep]:
        """Return the steps that some slots need, in order."""
        wanted, found = set(outputs), list[SpmdStep]()
        for step in reversed(self.steps):
            if isinstance(step, LocalStep):
                if wanted.intersection(step.outs):
                    found.append(step)
                    wanted.update(step.reads)
            elif step.target in wanted:
                found.append(step)
                wanted.add(step.source)
        return found[::-1]

    def _view(self, source: int, specs: Sequence[TensorSpec], target: int | None = None) -> int:
        target = self.new() if target is None else target
        sizes = PerRank(tuple(Many(spec.shape) for spec in specs))
        self.run("aten.view.default", (SlotArgument(source), sizes), [(target, tuple(specs))], [source])
        return target

    def _first(self, slot: int) -> TensorSpec:
        """Return the spec of the first rank's part, the largest one, in a slot."""
        return self.locals[slot][0]

    def _may_be_relaid(self, name: str, reads: Sequence[int], kwargs: Mapping[str, Value]) -> bool:
        """Return whether an operator's output follows the layout of an argument that may differ from the program's."""
        if name in _PRODUCTS or kwargs.get("memory_format") == MemoryFormat("contiguous_format"):
            return False
        return not self.relaid.isdisjoint(reads)


def product_flops(
    name: str, args: Sequence[SpmdArgument], outs: Sequence[int | None], spec_of: Callable[[int], TensorSpec]
) -> float:
    """Return the multiplications and additions of a matrix product or convolution, forward or backward; else 0.

    Args:
        name: The operator.
        args: Its arguments.
        outs: The slots of its outputs.
        spec_of: Returns the spec of a slot.
    """
    if name in _PRODUCTS and outs[0] is not None:
        inner = spec_of(_slot(args[_PRODUCTS[name]])).shape[-1]
        return 2.0 * inner * prod(spec_of(outs[0]).shape)
    if name == "aten.convolution.default" and outs[0] is not None:
        x, made = spec_of(_slot(args[0])), spec_of(outs[0])
        return _convolution(spec_of(_slot(args[1])), x if args[6] else made)
    if name == "aten.convolution_backward.default":
        gradient, x, weight = (spec_of(_slot(args[position])) for position in range(3))
        return _convolution(weight, x if args[7] else gradient) * sum(slot is not None for slot in outs[:2])
    return 0.0


def _convolution(weight: TensorSpec, plane: TensorSpec) -> float:
    """Count two operations for each element of the weight at each position of the output, or transposed input."""
    return 2.0 * prod(weight.shape) * plane.shape[0] * prod(plane.shape[2:])


def _slot(value: SpmdArgument) -> int:
    assert isinstance(value, SlotArgument)
    return value.index


def reduce_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank of a ring sends for an all-reduce (Patarasuk and Yuan, 2009)."""
    return 2.0 * size * (ranks - 1) / ranks


def gather_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank of a ring sends for an all-gather of ``size`` bytes altogether."""
    return size * (ranks - 1) / ranks


def _rows(spec: TensorSpec, dim: int, blocks: int) -> TensorSpec:
    """Return a tensor's spec with a dimension divided into blocks."""
    return TensorSpec(spec.dtype, (*spec.shape[:dim], blocks, spec.shape[dim] // blocks, *spec.shape[dim + 1 :]))
