"""Cutting programs: the pieces, run in order, compute what the whole computes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.graph import Piece, extract, split
from onebox.wire import Program, specs_by_slot, with_deaths
from tests.unit.programs import Sample, run_plainly, samples


@given(samples(), st.data())
def test_the_pieces_compute_what_the_whole_computes(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    ends = data.draw(st.lists(st.integers(0, len(program.operators) - 1), unique=True).map(sorted))
    expected = run_plainly(program, sample.inputs)
    values = dict(enumerate(sample.inputs))
    pieces = split(program, ends)
    for piece in pieces:
        made = run_plainly(piece.program, [values[slot] for slot in piece.inputs])
        for outer, inner in zip(piece.outputs, piece.program.outputs, strict=True):
            assert outer not in values, "made twice"
            values[outer] = made[inner]
    for slot in program.outputs:
        torch.testing.assert_close(values[slot], expected[slot], rtol=0, atol=0)
    assert sum(len(piece.program.operators) for piece in pieces) == len(program.operators)


@given(samples(), st.data())
def test_a_piece_is_a_program_of_its_own(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    ends = data.draw(st.lists(st.integers(0, len(program.operators) - 1), unique=True).map(sorted))
    specs = specs_by_slot(program)
    for piece in split(program, ends):
        part = piece.program
        assert with_deaths(part) == part
        assert part.inputs == tuple(specs[slot] for slot in piece.inputs), "no more than it reads, in the right order"
        own = specs_by_slot(part)
        assert sorted(own) == list(range(part.slots)), "slots are dense"
        pairs = zip(piece.outputs, part.outputs, strict=True)
        assert all(specs[outer] == own[inner] for outer, inner in pairs)


@given(samples(), st.data())
def test_nothing_travels_that_nobody_reads_later(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    ends = data.draw(st.lists(st.integers(0, len(program.operators) - 1), unique=True).map(sorted))
    pieces = split(program, ends)
    for number, piece in enumerate(pieces):
        later = {slot for other in pieces[number + 1 :] for slot in other.inputs} | set(program.outputs)
        assert set(piece.outputs) <= later


@given(samples())
def test_without_cuts_there_is_one_piece(sample: Sample) -> None:
    (piece,) = split(sample.program, [])
    assert isinstance(piece, Piece)
    (again,) = split(sample.program, [len(sample.program.operators) - 1])
    assert again == piece


def test_a_program_without_operators_has_no_pieces() -> None:
    assert split(Program((), (), (), 0), []) == []


@given(samples())
def test_random_positions_stay_with_their_operators(sample: Sample) -> None:
    program = sample.program
    numbered = Program(
        program.inputs,
        tuple(
            type(operator)(operator.name, operator.args, operator.kwargs, operator.outs, operator.specs, (), number)
            for number, operator in enumerate(program.operators)
        ),
        program.outputs,
        program.slots,
    )
    middle = [len(program.operators) // 2]
    positions = [operator.position for piece in split(numbered, middle) for operator in piece.program.operators]
    assert positions == list(range(len(program.operators)))
    kept = extract(numbered, numbered.outputs).operators
    assert all(operator.name == program.operators[operator.position].name for operator in kept)


@given(samples(), st.data())
def test_an_extract_computes_its_slots_and_no_more(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    wanted = data.draw(st.lists(st.integers(0, program.slots - 1), min_size=1, max_size=3))
    part = extract(program, wanted)
    expected, values = run_plainly(program, sample.inputs), run_plainly(part, sample.inputs)
    for slot in wanted:
        torch.testing.assert_close(values[slot], expected[slot], rtol=0, atol=0)
    assert part.inputs == program.inputs
    needed = set(wanted)
    for operator in reversed(part.operators):
        assert needed & set(operator.outs), "an operator that nobody needs"
        needed |= {value.index for value in operator.args if hasattr(value, "index") and not isinstance(value, tuple)}
        for value in operator.args:
            needed |= {item.index for item in getattr(value, "items", ()) if hasattr(item, "index")}
