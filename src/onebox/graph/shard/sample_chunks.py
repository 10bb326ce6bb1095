"""Chunks: computation of a program's tail for some samples after the others, so that a value leaves in parts.

The tail of a value consists of the operators before it whose outputs' rows depend each only on the same samples of
their inputs (by :mod:`onebox.graph.shard.rules`). It is computed for the first samples, then for the next ones, so that
the first results travel meanwhile. Values that are read outside of the tail, as by a backward, are concatenated again.

The result is that of the whole program. Matrix products of fewer rows may sum in another order, though, and so differ
in the last bit; operators that draw random numbers are never in a tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from onebox.graph.shard.analysis import analyze_operator
from onebox.graph.shard.placements import Shard, reshaped
from onebox.graph.shard.rules import MOVES, RESHAPES, SAME_SIZES, WHOLE, Rule, Specs, order, slot_of
from onebox.graph.shard.state import renamed
from onebox.wire import (
    Many,
    Operator,
    Program,
    SlotArgument,
    TensorSpec,
    Value,
    overload,
    reads,
    shares_memory,
    specs_by_slot,
    with_deaths,
)

_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default"})


class SampleRows(NamedTuple):
    """Layout of a micro-batch's samples in a tensor: consecutive along a dimension.

    Args:
        dim: The dimension.
        each: Elements of it per sample.
    """

    dim: int
    each: int

    def local(self, spec: TensorSpec, samples: int) -> TensorSpec:
        """Return the spec of a number of samples of a tensor."""
        shape = (*spec.shape[: self.dim], self.each * samples, *spec.shape[self.dim + 1 :])
        return TensorSpec(spec.dtype, shape)


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The longest tail of a value.

    Args:
        program: The program.
        slot: The slot of the value.
        samples: Samples of the micro-batch.
        operators: The numbers of the tail's operators, the last one first: each prefix of the list is a tail, too.
        rows: For each slot that they make, and each that they read by samples, the layout of the samples in it.
    """

    program: Program
    slot: int
    samples: int
    operators: tuple[int, ...]
    rows: Mapping[int, SampleRows]


class _Way(NamedTuple):
    """Layout of samples in the inputs and outputs of an operator.

    Args:
        inputs: For each slot that it reads the layout of the samples; ``None`` where it reads the whole.
        outputs: For each output; ``None`` where that is not wanted.
        sizes: For arguments that are sizes, the output whose shape they give.
    """

    inputs: tuple[SampleRows | None, ...]
    outputs: tuple[SampleRows | None, ...]
    sizes: Mapping[int, int]


def find_tail(program: Program, slot: int, samples: int) -> Tail | None:
    """Find the operators that can be computed for some samples of a value at a time.

    The samples of each value that the tail reads by samples are consecutive in memory, so that a chunk is a view.

    Args:
        program: The program.
        slot: The slot of the value, whose first dimension holds consecutive samples.
        samples: Number of samples.

    Returns:
        The longest tail; ``None`` where the value is an input, or its operator needs all samples at once.
    """
    specs = specs_by_slot(program)
    shape = specs[slot].shape
    if samples < 2 or not shape or not prod(shape) or shape[0] % samples:
        return None
    ahead, readers = _ancestors(program, slot), _readers(program)
    wanted: dict[int, set[SampleRows | None]] = {slot: {SampleRows(0, shape[0] // samples)}}
    tail: list[int] = []
    rows: dict[int, SampleRows] = {}
    for number in sorted(ahead, reverse=True):
        operator = program.operators[number]
        made = [out for out in operator.outs if out is not None]
        asked = {out: wanted.get(out, set()) for out in made}
        inside = all(reader in tail for out in made for reader in readers.get(out, ()) if reader in ahead)
        ways = {found for each in asked.values() for found in each}
        if not inside or None in ways or any(len(each) > 1 for each in asked.values()):
            continue
        way = _way(operator, specs, {out: next(iter(each)) for out, each in asked.items() if each}, samples)  # type: ignore[misc]
        if way is None or any(
            found and prod(specs[source].shape[: found.dim]) > 1 for source, found in _given(operator, way)
        ):
            continue
        tail.append(number)
        rows |= {out: found for out, found in zip(operator.outs, way.outputs, strict=True) if out is not None and found}
        for source, found in _given(operator, way):
            wanted.setdefault(source, set()).add(found)
    return Tail(program=program, slot=slot, samples=samples, operators=tuple(tail), rows=rows) if tail else None


def _given(operator: Operator, way: _Way) -> list[tuple[int, SampleRows | None]]:
    return list(zip(reads(operator), way.inputs, strict=True))


def _ancestors(program: Program, slot: int) -> set[int]:
    """Return the numbers of the operators that a slot depends on."""
    needed, found = {slot}, set[int]()
    for number in reversed(range(len(program.operators))):
        operator = program.operators[number]
        if needed.intersection(out for out in operator.outs if out is not None):
            found.add(number)
            needed.update(reads(operator))
    return found


def _readers(program: Program) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, operator in enumerate(program.operators):
        for slot in set(reads(operator)):
            found.setdefault(slot, []).append(number)
    return found


def _way(operator: Operator, specs: Specs, asked: Mapping[int, SampleRows], samples: int) -> _Way | None:
    """Return the layout of samples in an operator's tensors; ``None`` where it does not compute samples separately.

    Args:
        operator: The operator.
        specs: Specs of the slots.
        asked: Required layout of the samples in some of its outputs.
        samples: Number of samples.
    """
    if operator.position >= 0 or not asked:
        return None
    if operator.name in RESHAPES | MOVES:
        return _way_of_view(operator, specs, next(iter(asked.values())), samples)
    sight = analyze_operator(operator, specs)
    return None if sight.rule is None else _way_by_rule(operator, sight.rule, sight.letters, specs, asked, samples)


def _way_of_view(operator: Operator, specs: Specs, rows: SampleRows, samples: int) -> _Way | None:
    source, made = slot_of(operator, 0), operator.specs[0]
    assert made is not None
    if operator.name in MOVES:
        before = rows._replace(dim=order(operator, specs)[rows.dim])
        return _Way((before,), (rows,), {})
    shard = reshaped(made.shape, specs[source].shape, Shard(rows.dim, (rows.each,) * samples))
    if shard is None or shard.blocks != 1 or len(set(shard.sizes)) > 1:
        return None
    return _Way((SampleRows(shard.dim, shard.sizes[0]),), (rows,), {1: 0} if operator.name in SAME_SIZES else {})


def _way_by_rule(
    operator: Operator,
    rule: Rule,
    letters: Sequence[str],
    specs: Specs,
    asked: Mapping[int, SampleRows],
    samples: int,
) -> _Way | None:
    out, rows = next(iter(asked.items()))
    names = rule.outputs[operator.outs.index(out)].letters
    letter = names[rows.dim]
    if letter == WHOLE or letter in rule.counts.values():
        return None
    made: list[SampleRows | None] = []
    for slot, output in zip(operator.outs, rule.outputs, strict=False):
        found = _named(output.letters, letter, rows.each)
        if slot is not None and (found is None or letter in output.sums or asked.get(slot, found) != found):
            return None
        made.append(found if slot is not None else None)
    made += [None] * (len(operator.outs) - len(made))
    given = tuple(_named(each, letter, rows.each) for each in letters)
    pairs = [*zip(reads(operator), given, strict=True), *zip(operator.outs, made, strict=True)]
    if any(f is not None and (s is None or specs[s].shape[f.dim] != f.each * samples) for s, f in pairs):
        return None
    return _Way(given, tuple(made), rule.sizes)


def _named(names: str, letter: str, each: int) -> SampleRows | None:
    return SampleRows(names.index(letter), each) if letter in names else None


# ---- the program that computes the tail chunk by chunk


@dataclass(frozen=True, kw_only=True)
class Chunked:
    """A program whose tail is computed chunk by chunk.

    Args:
        program: The program; its outputs are those of the whole one, without the value itself where that is not kept,
            followed by the chunks of the value.
        chunks: The slot of each chunk.
        rows: Number of rows of the value, indices of its first dimension, in each chunk.
    """

    program: Program
    chunks: tuple[int, ...]
    rows: tuple[int, ...]


def put_together(tail: Tail, length: int, *, keep: bool) -> dict[int, bool]:
    """Return the tail's slots that are read outside of it, and whether each is concatenated; if not, it is a view.

    Args:
        tail: The tail.
        length: Number of its operators.
        keep: Whether the value is wanted whole.
    """
    program, inside = tail.program, set(tail.operators[:length])
    outside = {slot for number, o in enumerate(program.operators) if number not in inside for slot in reads(o)}
    outside |= set(program.outputs) - {tail.slot} | ({tail.slot} if keep else set())
    found: dict[int, bool] = {}
    for number in tail.operators[:length]:
        operator = program.operators[number]
        for slot in (slot for slot in operator.outs if slot in outside):
            view = shares_memory(overload(operator.name))
            found[slot] = not view
            outside |= set(reads(operator)) if view else set()
    return found


def in_chunks(tail: Tail, length: int, chunks: Sequence[int], *, keep: bool) -> Chunked:
    """Return the program that computes a tail chunk by chunk.

    Operators after the tail's first one that the tail does not need are moved behind it.

    Args:
        tail: The tail.
        length: Number of its operators, from the last one on.
        chunks: Number of samples of each chunk.
        keep: Whether the value is wanted whole, too.
    """
    assert sum(chunks) == tail.samples and min(chunks) > 0
    return _Chunking(tail, length, keep=keep).run(chunks)


@dataclass
class _Chunking:
    """A program with chunks under construction."""

    tail: Tail
    length: int
    keep: bool
    operators: list[Operator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.program = self.tail.program
        self.specs = specs_by_slot(self.program)
        self.slots = self.program.slots
        self.inside = sorted(self.tail.operators[: self.length])
        self.made = {s for n in self.inside for s in self.program.operators[n].outs if s is not None}

    def run(self, chunks: Sequence[int]) -> Chunked:
        tail, program, first = self.tail, self.program, self.inside[0]
        ahead = _ancestors(program, tail.slot) - set(self.inside)
        others = set(range(len(program.operators))) - set(self.inside)
        before = sorted(number for number in others if number < first or number in ahead)
        self.operators += [program.operators[number] for number in before]
        parts: list[dict[int, int]] = []
        start = 0
        for count in chunks:
            parts.append(self._chunk(start, count))
            start += count
        relaid = self._together(parts)
        for number in sorted(others - set(before)):
            self._append(program.operators[number], relaid)
        pieces = tuple(part[tail.slot] for part in parts)
        outputs = tuple(slot for slot in program.outputs if self.keep or slot != tail.slot)
        whole = Program(program.inputs, tuple(self.operators), (*outputs, *pieces), self.slots)
        each = tail.rows[tail.slot].each
        return Chunked(program=with_deaths(whole), chunks=pieces, rows=tuple(each * count for count in chunks))

    def _chunk(self, start: int, count: int) -> dict[int, int]:
        """Append the tail for some samples; return the slot of each of its values."""
        local: dict[int, int] = {}
        cut: dict[tuple[int, SampleRows], int] = {}
        for number in self.inside:
            operator = self.program.operators[number]
            asked = {s: self.tail.rows[s] for s in operator.outs if s is not None}
            way = _way(operator, self.specs, asked, self.tail.samples)
            assert way is not None
            given = iter([
                slot if rows is None else local[slot] if slot in self.made else self._cut(cut, slot, rows, start, count)
                for slot, rows in zip(reads(operator), way.inputs, strict=True)
            ])  # fmt: skip
            args: list[Value] = [renamed(value, given) for value in operator.args]
            kwargs = {key: renamed(value, given) for key, value in operator.kwargs.items()}
            made = [
                None if spec is None else rows.local(spec, count) if rows else spec
                for spec, rows in zip(operator.specs, way.outputs, strict=True)
            ]
            for position, output in way.sizes.items():
                told = made[output]
                assert told is not None
                args[position] = Many(told.shape)
            outs = tuple(None if slot is None else self._new() for slot in operator.outs)
            local |= {s: out for s, out in zip(operator.outs, outs, strict=True) if s is not None and out is not None}
            specs = tuple(spec if slot is not None else None for spec, slot in zip(made, outs, strict=True))
            self.operators.append(Operator(operator.name, tuple(args), kwargs, outs, specs))
        return local

    def _cut(
        self, known: dict[tuple[int, SampleRows], int], slot: int, rows: SampleRows, start: int, count: int
    ) -> int:
        """Return the slot of some samples of an input of the tail."""
        if (slot, rows) not in known:
            known[slot, rows] = self._new()
            ends = (start * rows.each, (start + count) * rows.each)
            spec = rows.local(self.specs[slot], count)
            args = (SlotArgument(slot), rows.dim, *ends)
            self.operators.append(Operator("aten.slice.Tensor", args, {}, (known[slot, rows],), (spec,)))
        return known[slot, rows]

    def _together(self, parts: Sequence[Mapping[int, int]]) -> set[int]:
        """Append concatenations of values that are read outside of the tail; return their slots.

        Their elements then lie in the order of the dimensions, which may differ from before.
        """
        kept = put_together(self.tail, self.length, keep=self.keep)
        relaid: set[int] = set()
        for number in self.inside:
            operator = self.program.operators[number]
            for slot in (slot for slot in operator.outs if slot is not None and kept.get(slot)):
                items = Many(tuple(SlotArgument(part[slot]) for part in parts))
                dim = self.tail.rows[slot].dim
                self.operators.append(Operator("aten.cat.default", (items, dim), {}, (slot,), (self.specs[slot],)))
                relaid.add(slot)
            if any(slot in kept and not kept[slot] for slot in operator.outs):
                self._append(operator, relaid)
        return relaid

    def _append(self, operator: Operator, relaid: set[int]) -> None:
        """Append an unchanged operator; a view of a value with another memory layout becomes a copy where necessary."""
        name = operator.name
        if name in _VIEWS and not relaid.isdisjoint(reads(operator)):
            name = "aten.reshape.default"
        if shares_memory(overload(operator.name)) and not relaid.isdisjoint(reads(operator)):
            relaid.update(slot for slot in operator.outs if slot is not None)
        self.operators.append(
            Operator(
                name, operator.args, operator.kwargs, operator.outs, operator.specs, operator.dies, operator.position
            )
        )

    def _new(self) -> int:
        self.slots += 1
        return self.slots - 1


def samples_of(samples: int, chunks: int) -> tuple[int, ...]:
    """Return the number of samples of each chunk; the first ones have the remainder."""
    return tuple(samples // chunks + (place < samples % chunks) for place in range(chunks))
