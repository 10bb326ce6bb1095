"""Windows, lowered: followed instruction by instruction, whoever of the workers goes on next.

Nothing is computed. A buffer holds what made it, and versions of parameters are counted, so that it can be said of each
action which step it was of, and which weights it has read.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.engine.compile.routine import InstructionLabel, StepRoutine
from onebox.plan import ASYNC, Action, Plan
from onebox.wire.protocol.instructions import (
    Ask,
    Broadcast,
    Call,
    Free,
    OptimizerStep,
    Receive,
    Reduce,
    Rename,
    Send,
    Step,
    Vote,
)
from onebox.wire.protocol.requests import Routine
from tests.unit.engine.compile.test_order_check import SKEWED
from tests.unit.engine.nets import Lowered, lower, plan, stage

PLANS: dict[str, Plan] = {
    "one device": Plan.data_parallel([0], [1.0], micro_batch=2),
    "two replicas": Plan.data_parallel([0, 1], [0.5, 0.5], micro_batch=2),
    "two stages": plan(stage("ab", 0), stage("cd", 1), schedule=ASYNC),
    "four stages": plan(*(stage(letter, place) for place, letter in enumerate("abcd")), schedule=ASYNC),
    "folded": plan(*(stage(letter, place % 2) for place, letter in enumerate("abcd")), schedule=ASYNC),
    "two by two": plan(stage("ab", 0, 1), stage("cd", 2, 3), schedule=ASYNC),
    "two by one": plan(stage("a", 1, 2, shares=(1.0, 2.0)), stage("bc", 0), stage("d", 3), schedule=ASYNC),
    "recomputed": plan(stage("ab", 0, policy="recompute"), stage("cd", 1, policy="recompute"), schedule=ASYNC),
}
EXACT: dict[str, Plan] = {
    "two replicas": PLANS["two replicas"],
    "sharded": Plan.data_parallel([0, 1, 2], [1.0, 1.0, 1.0], micro_batch=2, optimizer="sharded"),
    "stages": plan(stage("ab", 0, 1), stage("cd", 2, 3), schedule="zb-h1"),
    "sharded stages": plan(stage("ab", 0, 1), stage("cd", 1, 0), optimizer="sharded"),
    "interleaved": plan(*(stage(letter, place % 2) for place, letter in enumerate("abcd")), schedule="interleaved"),
}
SIZE = 8


class Made(NamedTuple):
    """What a buffer holds: made by an action of a step's micro-batch, or by something else."""

    step: int = -1
    micro_batch: int = -1


class Run(NamedTuple):
    """A routine that is run, and with which step."""

    routine: StepRoutine
    step: int


class Waits(Exception):
    """A buffer is promised, and not there yet."""


class Follower:
    """All workers, each with the routines that it is to run."""

    def __init__(self, lowered: Lowered, overlap: str, lengths: Sequence[int]) -> None:
        self.lowered = lowered
        self.stale = overlap == "stale"
        self.steps = sum(lengths)
        self.done: Counter[tuple[int, int, Action]] = Counter()  # of (worker, step, action), one of all its calls
        self.read: dict[tuple[int, str, int], set[int]] = defaultdict(set)
        self.applied: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.letters: dict[tuple[int, int, int], deque[Made]] = defaultdict(deque)  # sender, receiver, channel
        self.sums: dict[int, list[dict[int, Any]]] = defaultdict(list)
        self.workers = [_Worker(self, worker, self._runs(worker, lengths)) for worker in lowered.windows]

    def _runs(self, worker: int, lengths: Sequence[int]) -> list[Run]:
        own, step, runs = self.lowered.windows[worker], 0, []
        for length in lengths:
            runs += [Run(own.steady if place else own.fill, step + place) for place in range(length)]
            step += length
            runs.append(Run(own.drain, step))
        return runs

    def go(self, chance: random.Random) -> None:
        """Let workers go on, one after the other, in any order, until all are done."""
        left = list(self.workers)
        stuck: list[_Worker] = []
        while left:
            able = [worker for worker in left if worker not in stuck]
            assert able, f"all wait: {[(worker.number, worker.here()) for worker in left]}"
            worker = chance.choice(able)
            for _ in range(chance.choice((1, 5, 50))):
                try:
                    worker.go()
                except Waits:
                    stuck.append(worker)
                    break
                stuck = []
                if worker.ended:
                    left.remove(worker)
                    break


class _Worker:
    """One worker."""

    def __init__(self, all_: Follower, number: int, runs: Sequence[Run]) -> None:
        self.all, self.number = all_, number
        lowered, numbers = all_.lowered, all_.lowered.numbers
        held = {name for name, holders in lowered.holdings.holders.items() if number in holders}
        self.names = {numbers.state[name]: name for name in held}
        self.names |= {n: name for name, n in numbers.previous.items() if name in held}
        self.versions = dict.fromkeys(self.names, 0)
        self.store: dict[int, Any] = dict.fromkeys(self.names, Made())
        for run in runs:
            self.store |= dict.fromkeys(run.routine.constants, Made())
        self.store |= dict.fromkeys((n for named in lowered.job.constants.values() for n in named.values()), Made())
        self.before = set(self.store)
        votes = (step for _, _, step, _ in self._instructions(runs) if isinstance(step, Vote))
        self.renewed = {number for vote in votes for number in vote.buffers}
        self.turns: Counter[int] = Counter()
        self.todo = deque(self._instructions(runs))
        self.called: set[tuple[int, Action]] = set()

    @staticmethod
    def _instructions(runs: Sequence[Run]) -> list[tuple[int, Run, Step | None, InstructionLabel | None]]:
        found: list[tuple[int, Run, Step | None, InstructionLabel | None]] = []
        for turn, run in enumerate(runs):
            (steps,) = (d.what.steps for d in run.routine.definitions if isinstance(d.what, Routine))
            found.append((turn, run, None, None))
            found += [(turn, run, step, label) for step, label in zip(steps, run.routine.labels, strict=True)]
        return found

    @property
    def ended(self) -> bool:
        return not self.todo

    def here(self) -> object:
        return self.todo[0][2]

    def go(self) -> None:
        """Execute the next instruction."""
        turn, run, step, label = self.todo[0]
        if step is None or label is None:  # a routine begins
            for place, (micro_batch, _) in enumerate(run.routine.leaves):
                self.store[-1 - place] = Made(run.step, micro_batch)
        else:
            self._execute(turn, run, step, label)
        self.todo.popleft()

    def _get(self, number: int) -> Made:
        assert number in self.store, f"worker {self.number} reads {number}, which is not there: {self.here()}"
        found = self.store[number]
        if callable(found):
            found = self.store[number] = found()
        assert isinstance(found, Made)
        return found

    def _of_step(self, run: Run, step: Call | Send, number: int) -> Made:
        """Return a buffer that an instruction reads, which is of the step that a failure of it would cost."""
        found = self._get(number)
        assert found.step in (-1, run.step - step.age), f"{step} reads what is of {found}"
        return found

    def _execute(self, turn: int, run: Run, step: Step, label: InstructionLabel) -> None:
        match step:
            case Call():
                self._call(turn, run, step, label)
            case Send():
                target = self._members(step.group)[step.peer]
                self.all.letters[self.number, target, step.channel].append(self._of_step(run, step, step.buffer))
            case Receive():
                source = self._members(step.group)[step.peer]
                queue = self.all.letters[source, self.number, step.channel]
                turn_of = (source, self.number, step.channel)
                assert step.buffer not in self.store

                def arrive() -> Made:
                    if not queue:
                        raise Waits
                    assert queue[0].step == run.step - step.age, f"{step} receives {queue[0]}"
                    return queue.popleft()

                assert turn_of[0] != self.number
                self.store[step.buffer] = arrive
            case Reduce() | Broadcast():
                self._join(run, step)
            case OptimizerStep():
                self._optimize(run, step)
            case Rename():
                moved = {new: self.store.pop(old) for old, new in zip(step.buffers, step.into, strict=True)}
                assert not set(moved) & set(self.store)
                self.store |= moved
            case Vote():
                self._vote(step)
            case Free():
                for number in step.buffers:
                    assert number in self.store or number < 0, f"worker {self.number} frees {number} twice"
                    self.store.pop(number, None)
            case Ask():
                for number in step.buffers:
                    self._get(number)
            case _:
                raise AssertionError(f"no step of a window: {step}")

    def _vote(self, vote: Vote) -> None:
        if vote.group:
            self._enter(vote.group, (Vote, vote.age, vote.final))
        for old, new in zip(vote.buffers, vote.into, strict=True):
            assert new in self.before, f"worker {self.number} renews {new}, which does not last"
            self.store[new] = self.store.pop(old)

    def _members(self, group: int) -> tuple[int, ...]:
        return next(members for members, number in self.all.lowered.numbers.groups.items() if number == group)

    def _call(self, turn: int, run: Run, call: Call, label: InstructionLabel) -> None:
        age, count = call.age, len(self.all.lowered.job.micro_batches)
        mine = Made(run.step - age, call.micro_batch) if label.action else Made()
        moved = set(self.all.lowered.moved.values()) | set(self.names) | self.renewed
        for number in call.inputs:
            found = self._of_step(run, call, number)
            if label.action and number not in moved and found != Made():
                assert found == mine, f"{label.name} of step {mine.step} reads what is of {found}"
            if label.action and number in self.versions:
                self.all.read[self.number, self.names[number], mine.step].add(self.versions[number])
        if label.action is not None:
            action = label.action
            assert (age, call.micro_batch) == (int(action.micro_batch < 0), action.micro_batch % count)
            if (turn, action) not in self.called:
                self.called.add((turn, action))
                self.all.done[self.number, mine.step, action._replace(micro_batch=call.micro_batch)] += 1
        for position in set(call.takes):
            self.store.pop(call.inputs[position], None)
        for number in call.outputs:
            lasting = number in self.before or number in call.inputs
            assert lasting or number not in self.store, f"worker {self.number} overwrites {number}: {label.name}"
            self.store[number] = Made() if number in moved else mine

    def _join(self, run: Run, step: Reduce | Broadcast) -> None:
        """Take part in what a group does together; all members do the same, in one order."""
        members = self._members(step.group)
        for number in step.buffers:
            self._get(number)
        roles = tuple(self._role(run, number) for number in step.buffers)
        if isinstance(step, Reduce):
            assert {of for _, of in roles} <= {-1, run.step - step.age}
        what = self._enter(step.group, (type(step), step.root, roles))

        def arrive() -> Made:
            if len(what) < len(members):
                raise Waits
            return Made()

        gone = isinstance(step, Reduce) and step.root >= 0 and members[step.root] != self.number
        for number in step.buffers:
            if gone:
                del self.store[number]
            else:
                self.store[number] = arrive
            if isinstance(step, Broadcast) and members[step.root] != self.number:
                self.versions[number] += 1

    def _enter(self, group: int, what: tuple[object, ...]) -> dict[int, Any]:
        """Enter the next exchange of a group, and return what its members do in it so far."""
        place, sums = self.turns[group], self.all.sums[group]
        self.turns[group] += 1
        while len(sums) <= place:
            sums.append({})
        sums[place][self.number] = what
        assert len(set(sums[place].values())) == 1, f"members do different things: {sums[place]}"
        return sums[place]

    def _role(self, run: Run, number: int) -> tuple[str, int]:
        """Return what a buffer is that workers exchange, and of which step."""
        shared = self.all.lowered.gradients
        known = {n: (name, run.step) for name, n in (*shared.sums.items(), *self.all.lowered.moved.items())}
        known |= {n: (name, run.step - 1) for name, n in shared.late.items()}
        return known.get(number) or (self.names.get(number, "norm"), -1)

    def _optimize(self, run: Run, step: OptimizerStep) -> None:
        lowered = self.all.lowered
        stepped = lowered.holdings.stepped_by(self.number, lowered.trained)
        names = [stepped[place] for place in step.members] if step.members else list(stepped)
        assert len(step.gradients) == len(names)
        for number in step.gradients:
            self._get(number)
        for place, name in enumerate(names):
            state = lowered.numbers.state[name]
            if self.all.stale:
                assert step.previous[place] == lowered.numbers.previous[name]
                self.versions[step.previous[place]] = self.versions[state]
            self.versions[state] += 1
            self.all.applied[self.number, name].append(run.step - step.age)


def check(lowered: Lowered, overlap: Literal["exact", "stale"], lengths: Sequence[int], chance: random.Random) -> None:
    """Follow windows, and require what is true of them."""
    follower = Follower(lowered, overlap, lengths)
    follower.go(chance)
    steps = range(follower.steps)
    for worker, row in lowered.job.schedule.rows.items():
        own = {action._replace(micro_batch=action.micro_batch % len(lowered.job.micro_batches)) for action in row}
        own = {action for action in own if lowered.job.part(worker, action).steps}
        found = {key: times for key, times in follower.done.items() if key[0] == worker}
        assert found == {(worker, step, action): 1 for step, action in itertools.product(steps, own)}
    for (_, name, step), versions in follower.read.items():
        if name in lowered.trained:
            assert versions == {max(step - 1, 0) if overlap == "stale" else step}, (name, step)
    for found_steps in follower.applied.values():
        assert found_steps == list(steps)
    for one in follower.workers:
        assert set(one.store) == one.before, "something is left, or gone"
    assert not any(follower.letters.values()), "something was sent that nobody received"
    assert all(len(set(map(len, sums))) <= 1 for sums in follower.sums.values())


LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@pytest.mark.parametrize("name", PLANS)
@settings(deadline=None, max_examples=6)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_stale_windows(name: str, lengths: list[int], seed: int) -> None:
    """Each action once; forward and backward of a step with the weights before the last update; nothing ever blocks."""
    lowered = lower(PLANS[name], SIZE, max_norm=float(seed % 2), overlap="stale", untagged=seed % 3 == 0)
    check(lowered, "stale", lengths, random.Random(seed))


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None, max_examples=6)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_exact_windows(name: str, lengths: list[int], seed: int) -> None:
    """Each action of a step with the weights of all updates before; in a group all do the same in one order."""
    lowered = lower(EXACT[name], SIZE, max_norm=float(seed % 2), overlap="exact", untagged=seed % 3 == 0)
    check(lowered, "exact", lengths, random.Random(seed))


def test_a_step_is_smaller_than_the_stages_are_many() -> None:
    for size in (2, 4, 6):
        check(lower(PLANS["four stages"], size, overlap="stale"), "stale", (3, 2), random.Random(size))


@pytest.mark.parametrize("made", SKEWED)
@settings(deadline=None, max_examples=6)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_windows_whose_messages_have_no_tags(made: tuple[Plan, int], lengths: list[int], seed: int) -> None:
    """Receives that are in the window before their reader, and sends that wait for another one, change nothing."""
    plan, size = made
    check(lower(plan, size, overlap="stale", untagged=True), "stale", lengths, random.Random(seed))
