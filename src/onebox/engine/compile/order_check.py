"""Order check: the instructions of all workers under the rules of NCCL, which has no tags. Pure.

A communicator runs its operations in the order of their calls: the n-th send of a worker to another matches the n-th
receive there, whatever their channels, and the n-th collectives of a group's members match. Sends, receives and
collectives only begin where a worker comes to them; it waits where it reads a buffer that one of them fills. Each
direction between two workers has a communicator of its own, made when the group is formed. TCP and shared memory,
which respect channels, run every sequence of instructions that these rules run.

A message that is received in another's place, and a circle of waits, are faults, reported with their instructions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from onebox.engine.compile.routine import StepRoutine
from onebox.engine.partition.sharding_spec import Members
from onebox.wire import Program, TensorSpec, specs_by_slot
from onebox.wire.protocol.instructions import (
    Ask,
    Branch,
    Broadcast,
    Call,
    Free,
    Gather,
    Get,
    Offload,
    OptimizerStep,
    Receive,
    Reduce,
    Rename,
    Send,
    Vote,
)
from onebox.wire.protocol.requests import Define, Instruction, OptimizerSpec, Put
from onebox.wire.protocol.snapshots import Recall

_SHOWN = 3
"""Faults in an error message: the others mostly follow from the first."""


@dataclass(frozen=True, kw_only=True)
class TransferRules:
    """Rules of the communicators; by default those of the groups of workers.

    Args:
        paired: Whether both directions between two workers share one communicator, as in PyTorch's library.
        lazy: Whether a communicator is made at its first use, where each member waits for all others, as in PyTorch's
            library.
        blocking: Whether a receive lets the worker go on only when it has ended: as if everything that a worker does
            waited for its whole device.
        tagged: Groups in which messages match by channel, as over TCP.
    """

    paired: bool = False
    lazy: bool = False
    blocking: bool = False
    tagged: Container[int] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerInstructions:
    """Instructions of one worker, in order.

    Args:
        instructions: The instructions.
        labels: Readable name of each; empty if they have none.
        programs: The programs that they call, by number.
        specs: Specs of buffers that exist before, as far as known.
        optimizers: Buffers of the parameters of each optimizer that exists before, by its number.
    """

    instructions: Sequence[Instruction]
    labels: Sequence[str] = ()
    programs: Mapping[int, Program] = field(default_factory=dict)
    specs: Mapping[int, TensorSpec] = field(default_factory=dict)
    optimizers: Mapping[int, Sequence[int]] = field(default_factory=dict)


class InstructionPlace(NamedTuple):
    """An instruction.

    Args:
        worker: Its worker.
        number: Its index among the worker's instructions.
        text: Readable description.
    """

    worker: int
    number: int
    text: str

    def __str__(self) -> str:
        return f"instruction {self.number} of device {self.worker}, {self.text}"


@dataclass(frozen=True)
class OrderFault:
    """A fault in the order of transfers.

    Args:
        kind: A match of two different operations; a circle of waits; or an operation without a counterpart.
        places: The instructions.
        message: Readable description.
    """

    kind: Literal["mismatch", "deadlock", "unmatched"]
    places: tuple[InstructionPlace, ...]
    message: str


def windows_in_turn(routines: Sequence[StepRoutine]) -> Sequence[int]:
    """Return a run of a worker's routines that covers all neighbourhoods, as their indices.

    Args:
        routines: The routine of a step; or, where steps overlap, those of the first, a steady, and the draining window.
    """
    return (0,) if len(routines) == 1 else (0, 1, 1, 2)


def step_faults(
    routines: Mapping[int, Sequence[StepRoutine]],
    groups: Mapping[int, Members],
    rules: TransferRules = TransferRules(),
    shared: Container[int] = (),
    optimizers: Mapping[int, Mapping[int, Sequence[int]]] = MappingProxyType({}),
) -> tuple[OrderFault, ...]:
    """Return the faults in the order of transfers of a step; see :func:`order_faults`.

    Args:
        routines: For each worker its routine; or, where steps overlap, those of the first, a steady, and the draining
            window.
        groups: Members of each group, by its number.
        rules: The rules.
        shared: Buffers that have the same meaning on all workers.
        optimizers: For each worker, the buffers of the parameters of its optimizers, by their numbers.
    """
    workers = {
        worker: _in_turn([own[which] for which in windows_in_turn(own)], optimizers.get(worker, {}))
        for worker, own in routines.items()
    }
    return order_faults(workers, groups, rules, shared)


def _in_turn(routines: Iterable[StepRoutine], optimizers: Mapping[int, Sequence[int]]) -> WorkerInstructions:
    """Return the instructions of a worker that runs routines one after the other."""
    specs: dict[int, TensorSpec] = {}
    instructions: list[Instruction] = []
    labels: list[str] = []
    programs: dict[int, Program] = {}
    for routine in routines:
        instructions += routine.steps
        labels += (label.name for label in routine.labels)
        programs.update(routine.programs)
        specs |= {number: spec for number, (_, spec) in routine.constants.items()}
    return WorkerInstructions(
        instructions=instructions, labels=labels, programs=programs, specs=specs, optimizers=optimizers
    )


def order_faults(
    workers: Mapping[int, WorkerInstructions],
    groups: Mapping[int, Members],
    rules: TransferRules = TransferRules(),
    shared: Container[int] = (),
) -> tuple[OrderFault, ...]:
    """Return the faults of the order in which workers send, receive and reduce; none if every order is right.

    Args:
        workers: The instructions of each worker, from a state in which nothing is on its way.
        groups: Members of each group, by its number.
        rules: The rules.
        shared: Buffers that have the same meaning on all workers: a sum or a broadcast of one matches only itself.
    """
    return _Simulation(workers, groups, rules, shared).faults()


def fault_text(faults: Sequence[OrderFault]) -> str:
    """Return the first faults as lines."""
    more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    return "\n".join(["  " + fault.message for fault in faults[:_SHOWN]] + ["  " + line for line in more])


# ---- operations of one worker

_Key = tuple[int, ...]
"""A communicator: its group, and for messages the two workers and, in tagged groups, the channel."""


class _Operation:
    """A send, a receive, or a worker's part in a collective."""

    __slots__ = ("detail", "done", "index", "key", "kind", "specs", "text", "worker")

    def __init__(
        self, worker: int, index: int, key: _Key, kind: str, detail: object, specs: Sequence[TensorSpec | None]
    ) -> None:
        self.worker = worker
        self.index = index
        self.key = key
        self.kind = kind
        self.detail = detail
        self.specs = specs
        self.done = False


class _Wait(NamedTuple):
    """A wait for an operation, at an instruction that reads its result."""

    at: int
    operation: _Operation


class _Extraction:
    """The operations and waits of one worker.

    Args:
        worker: The worker.
        given: Its instructions.
        groups: Members of each group.
        rules: The rules.
        shared: Buffers that have the same meaning on all workers.
    """

    def __init__(
        self,
        worker: int,
        given: WorkerInstructions,
        groups: Mapping[int, Members],
        rules: TransferRules,
        shared: Container[int],
    ) -> None:
        self.events: list[_Operation | _Wait] = []
        self._worker = worker
        self._given = given
        self._groups = groups
        self._rules = rules
        self._shared = shared
        self._specs: dict[int, TensorSpec] = dict(given.specs)
        self._made: dict[int, tuple[int, int]] = {}  # by buffer: the program and the position of its output
        self._outputs: dict[int, list[TensorSpec]] = {}
        self._pending: dict[int, list[_Operation]] = {}
        self._optimizers = dict(given.optimizers)
        self._deferred: set[int] = set()
        self._votes: list[_Operation] = []
        self._index = 0
        for self._index, instruction in enumerate(given.instructions):
            self._follow(instruction)

    def _follow(self, step: Instruction) -> None:
        """Add the operations of an instruction, after waits for what it reads."""
        parameters = self._parameters_read(step)
        if self._pending:
            self._read((*parameters, *_read_by(step)))
        match step:
            case Call():
                for position, number in enumerate(step.outputs):
                    self._pending.pop(number, None)
                    self._made[number] = step.program, position
            case Send():
                peer = self._groups[step.group][step.peer]
                rows = None if step.whole is None else step.first
                self._begin(step.group, "send", (step.channel, rows), [self._spec(step.buffer)], peer)
            case Receive():
                self._receive(step)
            case Reduce() | Broadcast() | Gather():
                self._collective(step)
            case Vote() | OptimizerStep():
                self._vote(step)
            case Rename():
                self._rename(dict(zip(step.buffers, step.into, strict=True)))
            case Free():
                for number in step.buffers:
                    self._pending.pop(number, None)
            case Put():
                self._known(step.buffers, step.specs)
            case _:
                pass

    def _parameters_read(self, step: Instruction) -> Sequence[int]:
        """Return the parameters that an instruction about an optimizer waits for.

        One that succeeds another is made at its first use, and waits for all of its parameters there.
        """
        match step:
            case Define(number=number, what=OptimizerSpec() as spec):
                self._optimizers[number] = spec.parameters
                self._deferred.discard(number)
                if not spec.succeeds:
                    return spec.parameters
                self._deferred.add(number)
            case Branch() if step.behind and step.optimizer in self._deferred:
                pass  # it is postponed
            case OptimizerStep() | Branch():
                parameters = self._optimizers.get(step.optimizer, ())
                members = step.members if isinstance(step, OptimizerStep) else ()
                if not members or step.optimizer in self._deferred:
                    self._deferred.discard(step.optimizer)
                    return parameters
                return [parameters[place] for place in members] if parameters else ()
            case _:
                pass
        return ()

    def _collective(self, step: Reduce | Broadcast | Gather) -> None:
        rank = self._groups[step.group].index(self._worker)
        specs: list[TensorSpec | None]
        match step:
            case Reduce():
                specs = [self._spec(number) for number in step.buffers]
                reduced = self._begin(step.group, "reduce", (step.root, *self._known_as(step.buffers)), specs)
                self._promise(step.buffers if step.root in (-1, rank) else (), [reduced])
            case Broadcast():
                specs = [*step.specs] or [self._spec(number) for number in step.buffers]
                sent = self._begin(step.group, "broadcast", (step.root, *self._known_as(step.buffers)), specs)
                self._promise(() if rank == step.root else step.buffers, [sent], step.specs)
            case Gather():
                joined = self._begin(step.group, "gather", (step.dim, step.sizes), [step.spec])
                self._promise((step.into,), [joined], (step.spec,))

    def _vote(self, step: Vote | OptimizerStep) -> None:
        """Add a vote; it is waited for at once if it is about buffers, and else before the optimizer's step."""
        vote = step if isinstance(step, Vote) else None
        if vote is not None and vote.group:
            self._votes.append(self._begin(vote.group, "vote", vote.age, ()))
        if vote is None or vote.buffers:
            self.events += [_Wait(self._index, begun) for begun in self._votes]
            self._votes = []
        if vote is not None:
            self._rename(dict(zip(vote.buffers, vote.into, strict=True)))

    def _known_as(self, numbers: Sequence[int]) -> Iterator[int]:
        """Yield what identifies buffers to all workers, where something does."""
        return (number if number in self._shared else 0 for number in numbers)

    def _receive(self, step: Receive) -> None:
        peer = self._groups[step.group][step.peer]
        shape, parts = step.spec.shape, []
        first = 0
        for rows in step.rows or (0,):
            spec = TensorSpec(step.spec.dtype, (rows, *shape[1:])) if rows else step.spec
            parts.append(self._begin(step.group, "receive", (step.channel, first if rows else None), [spec], peer))
            first += rows
        self._promise((step.buffer,), parts, (step.spec,))
        if self._rules.blocking:
            self._read((step.buffer,))

    def _begin(
        self, group: int, kind: str, detail: object, specs: Sequence[TensorSpec | None], peer: int | None = None
    ) -> _Operation:
        key: _Key = (group,)
        if peer is not None:
            ends = (self._worker, peer) if kind == "send" else (peer, self._worker)
            key = (group, *(sorted(ends) if self._rules.paired else ends))
            if group in self._rules.tagged:
                assert isinstance(detail, tuple)
                key = (group, *ends, detail[0])
        operation = _Operation(self._worker, self._index, key, kind, detail, specs)
        self.events.append(operation)
        return operation

    def _promise(self, numbers: Sequence[int], operations: list[_Operation], specs: Sequence[TensorSpec] = ()) -> None:
        for number in numbers:
            self._pending[number] = operations
        self._known(numbers, specs)

    def _known(self, numbers: Sequence[int], specs: Sequence[TensorSpec]) -> None:
        for number, spec in zip(numbers, specs, strict=False):
            self._made.pop(number, None)
            self._specs[number] = spec

    def _rename(self, into: Mapping[int, int]) -> None:
        tables: list[dict[int, object]] = [self._pending, self._made, self._specs]  # type: ignore[list-item]
        for table in tables:
            moved = {new: table.pop(old) for old, new in into.items() if old in table}
            for number in into.values():
                table.pop(number, None)
            table.update(moved)

    def _read(self, numbers: Iterable[int]) -> None:
        """Wait for buffers that are being filled."""
        for number in numbers:
            operations = self._pending.pop(number, None)
            for operation in operations or ():
                self.events.append(_Wait(self._index, operation))

    def _spec(self, number: int) -> TensorSpec | None:
        """Return the spec of a buffer if it is known."""
        if number not in self._made:
            return self._specs.get(number)
        program, position = self._made[number]
        if program not in self._outputs:
            found = self._given.programs.get(program)
            if found is None:
                return None
            specs = specs_by_slot(found)
            self._outputs[program] = [specs[slot] for slot in found.outputs]
        return self._outputs[program][position]


def _read_by(step: Instruction) -> Sequence[int]:
    """Return the buffers whose contents an instruction waits for."""
    match step:
        case Call():
            return step.inputs
        case Send() | Gather():
            return (step.buffer,)
        case Reduce() | Offload() | Get() | Recall():
            return step.buffers
        case Broadcast():
            return () if step.specs else step.buffers
        case Ask():
            return step.buffers if step.about in ("scalars", "digest") else ()
        case OptimizerStep():
            return (*step.gradients, step.square_norm, *step.previous, *step.ahead)
        case Branch() if step.behind:
            return (*step.previous, *step.ahead)
        case _:
            return ()


# ---- all workers


class _Communicator:
    """Operations that have begun and not ended, of each member in order."""

    def __init__(self, members: Members) -> None:
        self.queues: dict[int, deque[_Operation]] = {member: deque() for member in members}
        self.there: set[int] = set()

    def heads(self) -> list[_Operation] | None:
        """Return the next operation of each member; ``None`` if they cannot run: one is missing, or both would send."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        if len(heads) < len(self.queues):
            return None
        return heads if [head.kind for head in heads] not in (["send", "send"], ["receive", "receive"]) else None


class _Simulation:
    """All workers' operations and waits under the rules.

    Args:
        workers: The instructions of each worker.
        groups: Members of each group, by its number.
        rules: The rules.
        shared: Buffers that have the same meaning on all workers.
    """

    def __init__(
        self,
        workers: Mapping[int, WorkerInstructions],
        groups: Mapping[int, Members],
        rules: TransferRules,
        shared: Container[int],
    ) -> None:
        self._workers = workers
        self._groups = groups
        self._rules = rules
        self._events = {
            worker: _Extraction(worker, own, groups, rules, shared).events for worker, own in workers.items()
        }
        self._next = dict.fromkeys(workers, 0)
        self._communicators: dict[_Key, _Communicator] = {}
        self._sleeping: dict[int, list[int]] = defaultdict(list)  # workers, by the id of the operation they wait for
        self._awake = deque(workers)
        self._faults: list[OrderFault] = []

    def faults(self) -> tuple[OrderFault, ...]:
        """Run all workers as far as they come, and return the faults."""
        while self._awake:
            self._advance(self._awake.popleft())
        if any(queue for one in self._communicators.values() for queue in one.queues.values()) or any(
            self._next[worker] < len(events) for worker, events in self._events.items()
        ):
            self._faults += self._stuck()
        return tuple(self._faults)

    def _advance(self, worker: int) -> None:
        events = self._events[worker]
        while self._next[worker] < len(events):
            event = events[self._next[worker]]
            if isinstance(event, _Wait):
                if not event.operation.done:
                    self._sleeping[id(event.operation)].append(worker)
                    return
            elif not self._begin(event):
                return
            self._next[worker] += 1

    def _begin(self, operation: _Operation) -> bool:
        """Begin an operation; return whether its communicator exists."""
        key, worker = operation.key, operation.worker
        if key not in self._communicators:
            self._communicators[key] = _Communicator(key[1:3] or self._groups[key[0]])
        communicator = self._communicators[key]
        if self._rules.lazy and len(communicator.there) < len(communicator.queues):
            communicator.there.add(worker)
            if len(communicator.there) < len(communicator.queues):
                return False
            self._awake.extend(communicator.there - {worker})
        communicator.queues[worker].append(operation)
        while heads := communicator.heads():
            self._compare(heads)
            for head in heads:
                head.done = True
                communicator.queues[head.worker].popleft()
                self._awake.extend(self._sleeping.pop(id(head), ()))
        return True

    def _compare(self, heads: Sequence[_Operation]) -> None:
        """Note a fault if matching operations differ."""
        first = heads[0]
        for other in heads[1:]:
            message = len(first.key) > 1
            different = first.detail != other.detail or (not message and first.kind != other.kind)
            different = different or len(first.specs) != len(other.specs)
            if different or any(
                one is not None and two is not None and one != two
                for one, two in zip(first.specs, other.specs, strict=True)
            ):
                one, two = (first, other) if first.kind != "receive" else (other, first)
                places = self._place(one), self._place(two)
                what = f"a message from device {one.worker} to device {two.worker}" if message else "a collective"
                self._faults.append(
                    OrderFault("mismatch", places, f"{what}: {places[0]}, matches another one: {places[1]}")
                )

    # ---- explanations

    def _place(self, operation: _Operation, at: int | None = None) -> InstructionPlace:
        """Return an operation's instruction, or another one of its worker."""
        index = operation.index if at is None else at
        labels = self._workers[operation.worker].labels
        name = (
            f'"{labels[index]}"'
            if index < len(labels)
            else type(self._workers[operation.worker].instructions[index]).__name__.lower()
        )
        if at is not None:
            return InstructionPlace(operation.worker, index, name)
        where = f"group {operation.key[0]}"
        if len(operation.key) > 1:
            assert isinstance(operation.detail, tuple)
            channel, row = operation.detail
            where = f"channel {channel}" + ("" if row is None else f" from row {row}")
        shapes = ", ".join("?" if spec is None else str(spec) for spec in operation.specs)
        return InstructionPlace(operation.worker, index, f"{name} ({operation.kind} of {shapes}, {where})")

    def _stuck(self) -> Iterator[OrderFault]:
        """Yield the circles of waits, and the operations without a counterpart."""
        blocked: dict[_Key, None] = {}
        for worker, events in self._events.items():
            if self._next[worker] < len(events):
                event = events[self._next[worker]]
                blocked[event.operation.key if isinstance(event, _Wait) else event.key] = None
        left = (key for key, one in self._communicators.items() if any(one.queues.values()))
        seen: set[_Key] = set()
        for key in dict.fromkeys((*blocked, *left)):
            if key not in seen:
                yield self._explain(key, seen)

    def _explain(self, key: _Key, seen: set[_Key]) -> OrderFault:
        """Follow waits from a communicator until they end or come back to one."""
        path: list[_Key] = []
        steps: list[tuple[str, list[InstructionPlace]]] = []
        while True:
            if key in path:
                steps = steps[path.index(key) :]
                break
            path.append(key)
            communicator = self._communicators[key]
            heads = [queue[0] for queue in communicator.queues.values() if queue]
            absent = [w for w, queue in communicator.queues.items() if not queue and w not in communicator.there]
            absent = absent or [worker for worker, queue in communicator.queues.items() if not queue]
            if not absent:
                places = [self._place(head) for head in heads]
                steps = [(f"{' and '.join(map(str, places))}, are both first on one communicator", places)]
                break
            worker = absent[0]
            known = self._place(heads[0]) if heads else self._first(key, communicator.there)
            events, position = self._events.get(worker, ()), self._next.get(worker, 0)
            if position == len(events):
                seen.update(path)
                return OrderFault("unmatched", (known,), f"{known}, has no counterpart on device {worker}")
            event = events[position]
            if isinstance(event, _Wait):
                waits, key = self._place(event.operation, event.at), event.operation.key
            else:
                waits, key = self._place(event), event.key
            steps.append((f"{known}, needs device {worker}, which is at {waits}", [known, waits]))
        seen.update(path)
        text = "; ".join(line for line, _ in steps)
        return OrderFault("deadlock", tuple(dict.fromkeys(p for _, own in steps for p in own)), f"a deadlock: {text}")

    def _first(self, key: _Key, there: Iterable[int]) -> InstructionPlace:
        """Return the operation at which a member waits for a communicator to be made."""
        for worker in there:
            for event in self._events[worker]:
                if isinstance(event, _Operation) and event.key == key:
                    return self._place(event)
        raise AssertionError("nobody waits for the communicator")
