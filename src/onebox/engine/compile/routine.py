"""A routine under construction: instructions with what they are, and the definitions that they need. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onebox.cost.estimate import program_s
from onebox.engine.partition.early_send import RATES
from onebox.plan import Action
from onebox.wire import Program, TensorSpec
from onebox.wire.protocol.instructions import Call, Step
from onebox.wire.protocol.requests import Define, Routine, StoredProgram

LATE = " of the step before"
"""Ends the name of what is done for the step before."""


@dataclass(frozen=True)
class InstructionLabel:
    """What an instruction of a routine is, for a timeline.

    Args:
        name: For a person.
        track: ``compute``, ``transfer``, or ``other``.
        action: The action of the schedule that it belongs to, if it is one's computation.
        target: The worker that something is sent to, of one stage to another; -1 where nothing is.
        size_bytes: Bytes of that.
    """

    name: str
    track: str = "other"
    action: Action | None = None
    target: int = -1
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepRoutine:
    """A routine and what it needs.

    Args:
        number: The routine's number.
        definitions: What it needs, in order; routines of a worker may share some, which are sent once.
        constants: One-element buffers that it reads, by number: value and type.
        leaves: What its bindings are: (micro-batch, tensor of inputs and targets) of each, in order.
        results: What it answers: (micro-batch, number of the result; 0 is the loss) of each, in order.
        labels: What each instruction is.
    """

    number: int
    definitions: tuple[Define, ...]
    constants: Mapping[int, tuple[float, TensorSpec]]
    leaves: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    labels: tuple[InstructionLabel, ...]


@dataclass
class RoutineBuilder:
    """Collects the instructions of one routine.

    Args:
        new: Makes a number that nothing else has.
        known: Returns the number of a program, given what it costs a device that computes nothing; ``None`` for new
            ones.
    """

    new: Callable[[], int]
    known: Callable[[Program, float], int] | None = None
    steps: list[Step] = field(default_factory=list)
    labels: list[InstructionLabel] = field(default_factory=list)
    definitions: list[Define] = field(default_factory=list)
    constants: dict[int, tuple[float, TensorSpec]] = field(default_factory=dict)
    _programs: dict[tuple[int, float], tuple[int, Program]] = field(default_factory=dict)
    _works: dict[int, tuple[float, Program]] = field(default_factory=dict)

    def add(self, step: Step, label: InstructionLabel) -> None:
        """Add an instruction."""
        self.steps.append(step)
        self.labels.append(label)

    @property
    def programs(self) -> dict[int, Program]:
        """The programs that are defined so far, by number."""
        return {d.number: d.what.program for d in self.definitions if isinstance(d.what, StoredProgram)}

    def work(self, program: Program) -> float:
        """Return about how long a program takes, compared with others; it is looked at once."""
        if id(program) not in self._works:
            self._works[id(program)] = (program_s(program, RATES), program)
        return self._works[id(program)][0]

    def define(self, program: Program, cost_s: float = 0.0) -> int:
        """Return the number of a program, defined once."""
        key = (id(program), cost_s)
        if key not in self._programs:
            number = self.new() if self.known is None else self.known(program, cost_s)
            if number not in self.programs:
                self.definitions.append(Define(number, StoredProgram(program, cost_s)))
            self._programs[key] = (number, program)  # kept alive, so that its id stays its own
        return self._programs[key][0]

    def call(
        self,
        program: Program,
        inputs: Sequence[int],
        outputs: Sequence[int],
        label: InstructionLabel,
        *,
        takes: Sequence[int] = (),
        micro_batch: int = 0,
        age: int = 0,
        cost_s: float = 0.0,
    ) -> None:
        """Add a call of a program."""
        number = self.define(program, cost_s)
        self.add(Call(number, tuple(inputs), tuple(outputs), tuple(takes), micro_batch, age), label)

    def another(self) -> RoutineBuilder:
        """Return one for another routine of the same worker, which knows the programs defined so far."""
        programs = [define for define in self.definitions if isinstance(define.what, StoredProgram)]
        return RoutineBuilder(
            self.new, self.known, definitions=programs, _programs=dict(self._programs), _works=self._works
        )

    def finish(self, leaves: Sequence[tuple[int, int]], results: Sequence[tuple[int, int]]) -> StepRoutine:
        """Return the routine."""
        number = self.new()
        self.definitions.append(Define(number, Routine(tuple(self.steps), len(leaves))))
        return StepRoutine(
            number=number,
            definitions=tuple(self.definitions),
            constants=dict(self.constants),
            leaves=tuple(leaves),
            results=tuple(results),
            labels=tuple(self.labels),
        )
