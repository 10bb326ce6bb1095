"""Cuts of a program into consecutive pieces, between which other steps can run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onebox.wire import Operator, Program, SlotArgument, TensorSpec, Value, reads, specs_by_slot, with_deaths
from onebox.wire.program import Many


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A consecutive part of a program.

    Args:
        program: The part, with slots of its own.
        inputs: For each of its inputs, the slot of the whole program.
        outputs: For each of its outputs, the slot of the whole program.
    """

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def split(program: Program, ends: Sequence[int]) -> list[Piece]:
    """Cut a program after some operators.

    Args:
        program: The whole.
        ends: Ascending numbers of operators; each piece ends after one. The last piece ends with the program.

    Returns:
        Pieces that, run in order, compute the whole program; a value travels from the piece that makes it to the pieces
        that read it.
    """
    bounds = [0, *(end + 1 for end in ends), len(program.operators)]
    specs = specs_by_slot(program)
    pieces: list[Piece] = []
    for start, end in itertools.pairwise(bounds):
        if start < end:
            pieces.append(_piece(program, start, end, specs))
    return pieces


def _piece(program: Program, start: int, end: int, specs: dict[int, TensorSpec]) -> Piece:
    body = program.operators[start:end]
    made = {slot for operator in body for slot in operator.outs if slot is not None}
    read = dict.fromkeys(slot for operator in body for slot in reads(operator))
    later = {slot for operator in program.operators[end:] for slot in reads(operator)} | set(program.outputs)
    inputs = tuple(slot for slot in read if slot not in made)
    outputs = tuple(sorted(made & later))
    number = {slot: index for index, slot in enumerate((*inputs, *sorted(made)))}
    operators = tuple(renumber(operator, number) for operator in body)
    part = Program(
        tuple(specs[slot] for slot in inputs), operators, tuple(number[slot] for slot in outputs), len(number)
    )
    return Piece(program=with_deaths(part), inputs=inputs, outputs=outputs)


def renumber(operator: Operator, number: Mapping[int, int]) -> Operator:
    """Return an operator with other slots, without its deaths."""
    return Operator(
        operator.name,
        tuple(_value(value, number) for value in operator.args),
        {key: _value(value, number) for key, value in operator.kwargs.items()},
        tuple(None if slot is None else number[slot] for slot in operator.outs),
        operator.specs,
        (),
        operator.position,
    )


def _value(value: Value, number: Mapping[int, int]) -> Value:
    if isinstance(value, SlotArgument):
        return SlotArgument(number[value.index])
    if isinstance(value, Many):
        return Many(tuple(SlotArgument(number[i.index]) if isinstance(i, SlotArgument) else i for i in value.items))
    return value
