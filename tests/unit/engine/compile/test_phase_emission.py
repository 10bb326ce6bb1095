"""Emission: when the outputs of a part in pieces are there for good."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.compile.phase_emission import PhaseCall, emit
from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder
from onebox.engine.partition.phase_programs import whole_program
from onebox.graph import NamedProgram, Port, split
from onebox.wire.protocol.instructions import Call
from tests.unit.programs import Sample, samples


@given(samples(), st.data())
def test_an_output_is_told_of_once_when_no_later_piece_reads_it(sample: Sample, data: st.DataObject) -> None:
    """What is summed over workers or added up in place must not be read afterwards by what made it."""
    program = sample.program
    outputs = tuple(dict.fromkeys(slot for slot in program.outputs if slot >= len(program.inputs)))
    program = type(program)(program.inputs, program.operators, outputs, program.slots)
    ends = data.draw(st.lists(st.integers(0, len(program.operators) - 1), unique=True).map(sorted))
    inputs = tuple(Port("parameter", str(number)) for number in range(len(program.inputs)))
    ports = tuple(Port("gradient", str(slot)) for slot in outputs)
    part = whole_program(NamedProgram(program=program, inputs=inputs, outputs=ports))
    builder = RoutineBuilder(itertools.count(1000).__next__)
    numbers = {port: 10 + place for place, port in enumerate(ports)}
    told: dict[Port, int] = {}

    def done(found: Sequence[Port]) -> None:
        for port in found:
            assert port not in told
            told[port] = len(builder.steps)

    given_numbers = [500 + place for place in range(len(inputs))]
    call = PhaseCall(part=part, inputs=given_numbers, takes=(), label=InstructionLabel("test"), group=0)
    emit(builder, call, split(program, ends), numbers.__getitem__, done=done)
    assert set(told) == set(ports)
    for port, place in told.items():
        calls = [step for step in builder.steps if isinstance(step, Call)]
        assert numbers[port] in {number for step in calls[:place] for number in step.outputs}
        assert numbers[port] not in {number for step in calls[place:] for number in step.inputs}
