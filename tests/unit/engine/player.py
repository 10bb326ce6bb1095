"""Plays the routines of all workers: a second, simple machine, with real tensors and without processes.

Nothing waits here but for what it reads: a receive, and a sum, is a promise that a later reader has to wait for. Every
misuse of a buffer is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebox.wire import Program
from onebox.wire.protocol.instructions import (
    Ask,
    Broadcast,
    Call,
    Evict,
    Free,
    Offload,
    OptimizerStep,
    Prefetch,
    Receive,
    Reduce,
    Send,
    Step,
    Vote,
)
from onebox.wire.protocol.requests import Routine, StoredProgram
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.unit.engine.nets import Lowered, build, state_of

CPU = torch.device("cpu")


class Waits(Exception):
    """A buffer is promised, and not there yet."""


@dataclass
class Sum:
    """A sum over a group under way, or a broadcast.

    Args:
        members: Who takes part.
        parts: What each has brought.
        kinds: What each takes it for.
    """

    members: tuple[int, ...]
    parts: dict[int, list[Tensor]] = field(default_factory=dict)
    kinds: set[tuple[str, int]] = field(default_factory=set)

    def bring(self, worker: int, parts: list[Tensor], kind: str, root: int) -> None:
        assert worker in self.members and worker not in self.parts
        self.parts[worker] = parts
        self.kinds.add((kind, root))
        assert len(self.kinds) == 1, f"members do different things: {self.kinds}"

    def handed(self, root: int, place: int) -> Tensor:
        """Return a copy of what one has brought."""
        if self.members[root] not in self.parts:
            raise Waits
        return self.parts[self.members[root]][place].clone()

    def total(self, worker: int, place: int) -> Tensor:
        if len(self.parts) < len(self.members):
            raise Waits
        for part in self.parts.values():
            assert [t.shape for t in part] == [t.shape for t in self.parts[worker]], "members sum different things"
        return torch.stack([self.parts[member][place] for member in self.members]).sum(0)


@dataclass
class Played:
    """What came of a play.

    Args:
        losses: Of each micro-batch.
        gradients: For each worker, what the optimizer was given, by the parameter's name.
        norms: For each worker, the square of the norm that it was given, if it was.
        state: For each worker, the state that it holds afterwards, by name.
        left: For each worker, the numbers of buffers that were neither there before nor are state.
        order: (worker, place in its routine) of each instruction, in the order in which they were executed.
    """

    losses: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    state: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    left: dict[int, set[int]] = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)


def play(lowered: Lowered, leaves: Sequence[Tensor], *, turn: Callable[[Sequence[int]], int] = min) -> Played:
    """Execute all routines of a step.

    Args:
        lowered: The step.
        leaves: Tensors of the batch.
        turn: Which of the workers that can go on is to execute its next instruction.
    """
    played = Played()
    stage = _Hall(lowered, played)
    workers = {worker: _Player(worker, lowered, leaves, stage, played) for worker in lowered.routines}
    ready = set(workers)
    while unfinished := [number for number, worker in workers.items() if worker.place < len(worker.steps)]:
        able = sorted(ready & set(unfinished))
        assert able, f"all wait: {[(n, workers[n].steps[workers[n].place]) for n in unfinished]}"
        chosen = turn(able)
        if workers[chosen].go():
            ready = set(workers)
        else:
            ready.discard(chosen)
    for worker in workers.values():
        worker.end()
    assert not any(stage.letters.values()), "something was sent that nobody received"
    assert all(len(each.parts) == len(each.members) for sums in stage.sums.values() for each in sums)
    return played


class _Hall:
    """What is between the workers: letters, and sums."""

    def __init__(self, lowered: Lowered, played: Played) -> None:
        self.members = {number: members for members, number in lowered.numbers.groups.items()}
        self.letters: dict[tuple[int, int, int, int], deque[Tensor]] = {}
        self.sums: dict[int, list[Sum]] = {}

    def sum(self, group: int, turn: int) -> Sum:
        """Return the sum of a group that is the so-manieth."""
        sums = self.sums.setdefault(group, [])
        while len(sums) <= turn:
            sums.append(Sum(self.members[group]))
        return sums[turn]


class _Player:
    """One worker."""

    def __init__(self, worker: int, lowered: Lowered, leaves: Sequence[Tensor], hall: _Hall, played: Played) -> None:
        routine = lowered.routines[worker]
        definitions = {define.number: define.what for define in routine.definitions}
        main = definitions[routine.number]
        assert isinstance(main, Routine)
        self.steps: Sequence[Step] = main.steps
        self.place = 0
        self.worker, self.lowered, self.hall, self.played = worker, lowered, hall, played
        self.tapes = {
            n: CompiledProgram(what.program, CPU) for n, what in definitions.items() if isinstance(what, StoredProgram)
        }
        self.store: dict[int, Tensor | Callable[[], Tensor]] = {}
        self.away: dict[int, Tensor] = {}
        self.read_away: set[int] = set()  # gradients that the optimizer has read on the host
        self.turns: dict[int, int] = {}
        self.parts: dict[tuple[int, int], list[Tensor]] = {}  # of what is not sent whole yet
        state = state_of(build())
        numbers = lowered.numbers.state
        held = {name for name, holders in lowered.holdings.holders.items() if worker in holders}
        self.store |= {numbers[name]: state[name].clone() for name in held}
        for number, (value, spec) in routine.constants.items():
            self.store[number] = torch.full(spec.shape, value, dtype=torch.float64)
        for size, named in lowered.job.constants.items():
            self.store |= {number: lowered.job.models[size].programs.constants[name] for name, number in named.items()}
        self.before = set(self.store)
        for place, (micro_batch, leaf) in enumerate(routine.leaves):
            part = lowered.job.micro_batches[micro_batch]
            self.store[-1 - place] = leaves[leaf][part.start : part.start + part.size]
        assert main.bindings == len(routine.leaves)

    def go(self) -> bool:
        """Execute the next instruction; return whether it could be."""
        try:
            self._execute(self.steps[self.place])
        except Waits:
            return False
        self.played.order.append((self.worker, self.place))
        self.place += 1
        return True

    def end(self) -> None:
        """Note what is left."""
        names = {number: name for name, number in self.lowered.numbers.state.items()}
        self.played.left[self.worker] = set(self.store) - self.before
        assert self.before <= set(self.store), "something that lasts is gone"
        assert not self.away, "something is left on the host"
        self.played.state[self.worker] = {names[n]: self._get(n) for n in self.before if n in names}

    def _get(self, number: int) -> Tensor:
        assert number in self.store, (
            f"worker {self.worker} reads {number}, which is not there: {self.steps[self.place]}"
        )
        found = self.store[number]
        if not isinstance(found, Tensor):
            found = self.store[number] = found()
        return found

    def _execute(self, step: Step) -> None:
        match step:
            case Call():
                self._call(step)
            case Free():
                for number in step.buffers:
                    if number in self.read_away:
                        del self.away[number]
                        continue
                    assert number not in self.away, f"worker {self.worker} frees {number}, which is on the host"
                    gone = self.store.pop(number, None) is None
                    assert not gone or number < 0, f"worker {self.worker} frees {number} twice"  # leaves may be gone
            case Send():
                self._send(step)
            case Receive():
                self._receive(step)
            case Reduce() | Broadcast():
                self._exchange(step)
            case Vote():
                self._vote(step)
            case Offload() | Evict() | Prefetch():
                self._transfer(step)
            case Ask():
                self._answer([float(self._get(number)) for number in step.buffers])
            case OptimizerStep():
                self._optimize(step)
            case _:
                raise AssertionError(f"no step of a training routine: {step}")

    def _vote(self, step: Vote) -> None:
        """Agree to a step, as all workers do here."""
        if step.group:
            self._next(step.group).bring(self.worker, [torch.zeros(1)], "vote", -1)
        for number, lasting in zip(step.buffers, step.into, strict=True):
            self.store[lasting] = self.store.pop(number)

    def _send(self, step: Send) -> None:
        target = self.hall.members[step.group][step.peer]
        tensor = self._get(step.buffer)
        if step.whole is not None:
            self.parts.setdefault((target, step.channel), []).append(tensor)
            if step.first + len(tensor) < step.whole.shape[0]:
                return
            tensor = torch.cat(self.parts.pop((target, step.channel)))
        self.hall.letters.setdefault((step.group, self.worker, target, step.channel), deque()).append(tensor)

    def _optimize(self, step: OptimizerStep) -> None:
        holdings, state = self.lowered.holdings, self.lowered.numbers.state
        held = holdings.stepped_by(self.worker, self.lowered.trained)
        self.read_away = {number for number in step.gradients if number not in self.store}
        assert not self.read_away or self.lowered.plan.update == "host"
        read = [self.away[n] if n in self.read_away else self._get(n) for n in step.gradients]
        found = dict(zip(held, read, strict=True))
        self.played.gradients[self.worker] = found
        for name in holdings.owners:  # whoever has it from its owner must have what that has made of it
            if name in found:
                self.store[state[name]] = self._get(state[name]) - found[name]
        if step.square_norm:
            self.played.norms[self.worker] = float(self._get(step.square_norm))

    def _transfer(self, step: Offload | Evict | Prefetch) -> None:
        for number in step.buffers:
            match step:
                case Offload():
                    assert number not in self.away, f"worker {self.worker} offloads {number} twice"
                    self.away[number] = self._get(number).clone()
                case Evict():
                    assert torch.equal(self._get(number), self.away[number]), "it was written to meanwhile"
                    del self.store[number]
                case Prefetch():
                    assert number not in self.store, f"worker {self.worker} brings {number} back twice"
                    self.store[number] = self.away.pop(number)

    def _call(self, step: Call) -> None:
        inputs = [self._get(number) for number in step.inputs]
        for number in {step.inputs[position] for position in step.takes}:
            assert number not in self.away, f"worker {self.worker} takes {number}, which is on the host"
            del self.store[number]
        tape = self.tapes[step.program]
        for number, made in zip(step.outputs, tape.run(inputs, lambda position: None, WorkerProgress()), strict=True):
            renewed = number in self.before or number in step.inputs
            assert renewed or number not in self.store, f"worker {self.worker} overwrites {number}"
            self.store[number] = made

    def _receive(self, step: Receive) -> None:
        source = self.hall.members[step.group][step.peer]
        key = (step.group, source, self.worker, step.channel)

        def arrive() -> Tensor:
            if not self.hall.letters.get(key):
                raise Waits
            found = self.hall.letters[key].popleft()
            assert (tuple(found.shape), found.is_contiguous()) == (step.spec.shape, True)
            return found

        assert step.buffer not in self.store
        self.store[step.buffer] = arrive

    def _reduce(self, step: Reduce) -> None:
        parts = [self._get(number) for number in step.buffers]
        total = self._next(step.group)
        total.bring(self.worker, parts, "sum", step.root)
        if step.root >= 0 and total.members[step.root] != self.worker:
            for number in step.buffers:
                del self.store[number]
            return
        for place, number in enumerate(step.buffers):
            self.store[number] = lambda place=place: total.total(self.worker, place)  # type: ignore[misc]

    def _exchange(self, step: Reduce | Broadcast) -> None:
        if isinstance(step, Reduce):
            self._reduce(step)
        else:
            self._broadcast(step)

    def _broadcast(self, step: Broadcast) -> None:
        mine = self.hall.members[step.group][step.root] == self.worker
        there = [self._get(number) for number in step.buffers] if mine or not step.specs else []
        handed = self._next(step.group)
        handed.bring(self.worker, there if mine else [], "broadcast", step.root)
        if mine:
            return
        shapes = [tuple(spec.shape) for spec in step.specs] or [tuple(tensor.shape) for tensor in there]
        for place, number in enumerate(step.buffers):
            assert (number in self.store) == (not step.specs)

            def arrive(place: int = place) -> Tensor:
                found = handed.handed(step.root, place)
                assert tuple(found.shape) == shapes[place]
                return found

            self.store[number] = arrive

    def _next(self, group: int) -> Sum:
        turn = self.turns.get(group, 0)
        self.turns[group] = turn + 1
        return self.hall.sum(group, turn)

    def _answer(self, values: Sequence[float]) -> None:
        results = self.lowered.routines[self.worker].results
        for (micro_batch, index), value in zip(results, values, strict=True):
            if index == 0:
                assert micro_batch not in self.played.losses, "two workers answer for one micro-batch"
                self.played.losses[micro_batch] = value


def steps_of(lowered: Lowered, worker: int) -> Sequence[Step]:
    """Return the instructions of a worker."""
    last = lowered.routines[worker].definitions[-1]
    assert last.number == lowered.routines[worker].number
    assert isinstance(last.what, Routine)
    return last.what.steps


def programs_of(lowered: Lowered, worker: int) -> Mapping[int, Program]:
    """Return the stored programs of a worker, by number."""
    definitions = lowered.routines[worker].definitions
    return {d.number: d.what.program for d in definitions if isinstance(d.what, StoredProgram)}
