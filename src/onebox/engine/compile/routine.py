"""A routine under construction: instructions with labels, and the definitions that they need. Pure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as replace_fields

from onebox.cost.estimate import TYPICAL_RATES, program_s
from onebox.plan import Action
from onebox.wire import Program, TensorSpec
from onebox.wire.protocol.instructions import Broadcast, Call, Gather, OptimizerStep, Receive, Reduce, Send, Step
from onebox.wire.protocol.requests import Define, Routine, StoredProgram

LATE = " of the step before"
"""Suffix for the names of work for the previous step."""


@dataclass(frozen=True)
class InstructionLabel:
    """Description of an instruction of a routine, for a timeline.

    Args:
        name: Readable name.
        track: ``compute``, ``transfer``, or ``other``.
        action: The action of the schedule that it computes, if any.
        target: Receiver of a transfer between stages; -1 for none.
        size_bytes: Bytes of the transfer.
        exchange: Identity of the exchange that it is a part of, equal on all devices; empty for none.
        peers: Devices whose parts of it this one needs.
    """

    name: str
    track: str = "other"
    action: Action | None = None
    target: int = -1
    size_bytes: int = 0
    exchange: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepRoutine:
    """A routine and its requirements.

    Args:
        number: The routine's number.
        definitions: Required definitions, in order; routines of a worker may share some, which are sent once.
        constants: One-element buffers that it reads, by number: value and type.
        leaves: Contents of its bindings in order: (micro-batch, leaf of inputs and targets).
        results: Contents of its reply in order: (micro-batch, number of the result; 0 is the loss).
        labels: Label of each instruction.
    """

    number: int
    definitions: tuple[Define, ...]
    constants: Mapping[int, tuple[float, TensorSpec]]
    leaves: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    labels: tuple[InstructionLabel, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The instructions."""
        (steps,) = (define.what.steps for define in self.definitions if isinstance(define.what, Routine))
        return steps

    @property
    def programs(self) -> dict[int, Program]:
        """The programs that they call, by number."""
        return {d.number: d.what.program for d in self.definitions if isinstance(d.what, StoredProgram)}

    def with_steps(self, steps: Sequence[Step], labels: Sequence[InstructionLabel]) -> StepRoutine:
        """Return the routine with other instructions."""
        definitions = tuple(
            Define(define.number, replace_fields(define.what, steps=tuple(steps)))
            if isinstance(define.what, Routine)
            else define
            for define in self.definitions
        )
        return replace(self, definitions=definitions, labels=tuple(labels))


@dataclass
class RoutineBuilder:
    """Collects the instructions of one routine.

    Args:
        new: Returns an unused number.
        known: Returns the number of a program, given its cost on an emulated device; ``None`` numbers programs anew.
        voted: Whether the workers vote on the routine; without a vote it changes lasting buffers in place.
    """

    new: Callable[[], int]
    known: Callable[[Program, float], int] | None = None
    voted: bool = True
    steps: list[Step] = field(default_factory=list)
    labels: list[InstructionLabel] = field(default_factory=list)
    definitions: list[Define] = field(default_factory=list)
    constants: dict[int, tuple[float, TensorSpec]] = field(default_factory=dict)
    renewed: dict[int, int] = field(default_factory=dict)
    """The buffer with the new contents of each lasting one that the step changes, which a vote puts in its place."""
    _age: int = 0
    _programs: dict[tuple[int, float], tuple[int, Program]] = field(default_factory=dict)
    _works: dict[int, tuple[float, Program]] = field(default_factory=dict)

    @contextlib.contextmanager
    def of_step(self, age: int) -> Iterator[None]:
        """Let what is added in the context belong to a step that began so many windows before this one."""
        before, self._age = self._age, age
        try:
            yield
        finally:
            self._age = before

    def add(self, step: Step, label: InstructionLabel) -> None:
        """Add an instruction."""
        if self._age and isinstance(step, Call | Send | Receive | Reduce | Gather | OptimizerStep):
            step = replace_fields(step, age=self._age)
        self.steps.append(step)
        self.labels.append(label)

    @property
    def programs(self) -> dict[int, Program]:
        """Programs defined so far, by number."""
        return {d.number: d.what.program for d in self.definitions if isinstance(d.what, StoredProgram)}

    def work(self, program: Program) -> float:
        """Return the relative time of a program; cached."""
        if id(program) not in self._works:
            self._works[id(program)] = (program_s(program, TYPICAL_RATES), program)
        return self._works[id(program)][0]

    def define(self, program: Program, cost_s: float = 0.0) -> int:
        """Return the number of a program, defining it once."""
        key = (id(program), cost_s)
        if key not in self._programs:
            number = self.new() if self.known is None else self.known(program, cost_s)
            if number not in self.programs:
                self.definitions.append(Define(number, StoredProgram(program, cost_s)))
            self._programs[key] = (number, program)  # kept alive, so that its id stays unique
        return self._programs[key][0]

    def renew(self, number: int) -> int:
        """Return the buffer for the new contents of a lasting one."""
        if not self.voted:
            return number
        if number not in self.renewed:
            self.renewed[number] = self.new()
        return self.renewed[number]

    def newest(self, number: int) -> int:
        """Return the buffer with the newest contents of a lasting one."""
        return self.renewed.get(number, number)

    def call(
        self,
        program: Program,
        inputs: Sequence[int],
        outputs: Sequence[int],
        label: InstructionLabel,
        *,
        takes: Sequence[int] = (),
        micro_batch: int = 0,
        cost_s: float = 0.0,
    ) -> None:
        """Add the call of a program."""
        number = self.define(program, cost_s)
        backward = label.action is not None and label.action.kind != "F"
        call = Call(number, tuple(inputs), tuple(outputs), tuple(takes), micro_batch, backward=backward)
        self.add(call, label)

    def another(self) -> RoutineBuilder:
        """Return a builder for another routine of the same worker, with the programs defined so far."""
        programs = [define for define in self.definitions if isinstance(define.what, StoredProgram)]
        return RoutineBuilder(
            self.new, self.known, self.voted, definitions=programs, _programs=dict(self._programs), _works=self._works
        )

    def finish(
        self, leaves: Sequence[tuple[int, int]], results: Sequence[tuple[int, int]], optimizer: int = 0
    ) -> StepRoutine:
        """Return the routine.

        Args:
            leaves: Contents of its bindings.
            results: Contents of its reply.
            optimizer: See :class:`~onebox.wire.protocol.requests.Routine`.
        """
        assert not self.renewed, "new contents of buffers on which nobody votes"
        number = self.new()
        self.definitions.append(Define(number, Routine(tuple(self.steps), len(leaves), optimizer)))
        return StepRoutine(
            number=number,
            definitions=tuple(self.definitions),
            constants=dict(self.constants),
            leaves=tuple(leaves),
            results=tuple(results),
            labels=tuple(self.labels),
        )


def with_exchanges(worker: int, routine: StepRoutine, members: Mapping[int, Sequence[int]]) -> StepRoutine:
    """Return a complete routine whose labels name the exchanges between devices.

    Args:
        worker: The worker of the routine.
        routine: The routine.
        members: The devices of each group, by rank.
    """
    counts: Counter[int] = Counter()
    labels = []
    for step, label in zip(routine.steps, routine.labels, strict=True):
        exchange: tuple[int, ...] = ()
        peers: tuple[int, ...] = ()
        match step:
            case Send() if step.group in members:
                exchange = step.group, worker, members[step.group][step.peer], step.channel
            case Receive() if step.group in members:
                peer = members[step.group][step.peer]
                exchange, peers = (step.group, peer, worker, step.channel), (peer,)
            case Reduce() | Gather() | Broadcast() if step.group in members:
                exchange, own = (step.group, counts[step.group]), members[step.group]
                counts[step.group] += 1
                root = -1 if isinstance(step, Gather) else step.root
                if isinstance(step, Broadcast):
                    peers = (own[root],) if own[root] != worker else ()
                elif root < 0 or own[root] == worker:
                    peers = tuple(member for member in own if member != worker)
        labels.append(replace(label, exchange=exchange, peers=peers) if exchange else label)
    return replace(routine, labels=tuple(labels))
