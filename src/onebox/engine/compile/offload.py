"""Offloading: when values of a worker's step go to the host's memory and come back. Pure.

What a stage of policy ``offload`` makes, or is the first on its device to read of what others sent, goes to the host if
a backward reads it: behind the last forward action that reads it; and it is let go of one action later, so that the
copy has an action to hide under. It begins to come back one action ahead of the first backward action that reads it. Of
policy ``swap`` it is let go of at once, and comes back when it is read: the step waits for both copies, and nothing of
it is there meanwhile. Where these are so near to each other that nothing else would happen while it is away, it stays.

Where the optimizer is on the host, the gradients of a stage of policy ``swap`` are there, too, between the backwards
that add to them, and behind the last one until the optimizer has read them there.

Storages go, not buffers: all views of one go together, once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onebox.cost import owners
from onebox.engine.compile.routine import InstructionLabel
from onebox.plan import Action, ActivationPolicy
from onebox.wire import Program, specs_by_slot
from onebox.wire.protocol.instructions import Call, Evict, Free, Gather, Offload, Prefetch, Receive, Reduce, Step
from onebox.wire.protocol.references import references

LEAST_BYTES = 1 << 14
"""Smaller storages stay: whatever its size, each takes 20 µs of the worker's own time to go and to come back, in which
memory moves ten times as much. Such are the means and variances of normalisations, many and small."""

COPY_ACTIONS: Mapping[ActivationPolicy, int] = {"offload": 1, "swap": 0}
"""How many actions a copy to the host, and one back, has to hide under, by the policy of the stage."""


_EARLIER, _BEGIN, _AT_ONCE, _BACK = range(4)
_KINDS = (Evict, Offload, Evict, Prefetch)
"""What is done between two actions, in order: what was copied before goes, then copies begin, those that are waited for
go, too, and what is needed comes back."""


@dataclass(frozen=True, kw_only=True)
class OffloadInterval:
    """A storage that is away for a part of a step.

    Args:
        buffers: The buffers that view it meanwhile.
        size_bytes: Its bytes.
        stage: The stage whose policy it shares.
        micro_batch: The micro-batch.
        offload: Its copy begins behind this action of the worker's row.
        evict: It is let go of behind this one.
        prefetch: It begins to come back ahead of this one; ``None`` where it never does.
        read: The first action that reads it again, or the number of actions where that is what comes behind them.
    """

    buffers: tuple[int, ...]
    size_bytes: int
    stage: int
    micro_batch: int
    offload: int
    evict: int
    prefetch: int | None
    read: int


class _Storage:
    """A storage as it is followed.

    Args:
        size_bytes: Its bytes.
        made: The action that made it; ``None`` where it was received.
    """

    def __init__(self, size_bytes: int, made: int | None) -> None:
        self.size_bytes = size_bytes
        self.made = made
        self.readers: set[int] = set()
        self.buffers: set[int] = set()
        self._behind: dict[int, tuple[int, ...]] = {}

    def note(self, action: int) -> None:
        """Note what views it behind an action, as far as that has gone."""
        self._behind[action] = tuple(sorted(self.buffers))

    def behind(self, action: int) -> tuple[int, ...]:
        """Return the buffers that view it behind an action that has made or read it."""
        return self._behind[action]


def with_offloading(
    steps: Sequence[Step],
    labels: Sequence[InstructionLabel],
    programs: Mapping[int, Program],
    bounds: Sequence[int],
    actions: Sequence[Action],
    policies: Sequence[ActivationPolicy],
    gradients: Collection[int] = (),
) -> tuple[list[Step], list[InstructionLabel]]:
    """Return instructions and what they are, with those that let be away what is offloaded.

    Args:
        steps: The instructions of a worker's step.
        labels: What each is.
        programs: The programs that they call, by number.
        bounds: The first instruction of each action, and behind the last one the first of what comes then.
        actions: The worker's row of the schedule.
        policies: The policy of each stage.
        gradients: The buffers of gradients that may be away, because nobody but the host's optimizer reads them.
    """
    # Under an action without instructions, as the weight gradients of a recomputed stage are, nothing would hide.
    busy = [place for place in range(len(actions)) if bounds[place] < bounds[place + 1]]
    row, starts = [actions[place] for place in busy], [*(bounds[place] for place in busy), bounds[-1]]
    return with_transfers(
        steps, labels, starts, find_offload_intervals(steps, programs, starts, row, policies, gradients)
    )


def find_offload_intervals(
    steps: Sequence[Step],
    programs: Mapping[int, Program],
    bounds: Sequence[int],
    actions: Sequence[Action],
    policies: Sequence[ActivationPolicy],
    gradients: Collection[int] = (),
) -> list[OffloadInterval]:
    """Return what is to be away when.

    Args:
        steps: The instructions of a worker's step.
        programs: The programs that they call, by number.
        bounds: The first instruction of each action, and behind the last one the first of what comes then.
        actions: The worker's row of the schedule, of actions that have instructions.
        policies: The policy of each stage.
        gradients: The buffers of gradients that may be away.
    """
    if not any(policies[action.stage] in COPY_ACTIONS for action in actions):
        return []
    follower = _Follower(programs)
    for index, step in enumerate(steps):
        follower.follow(step, max(0, bisect_right(bounds, index) - 1))
    found = (
        _absence(storage, actions, policies) or _absence_of_gradient(storage, actions, policies, gradients)
        for storage in follower.storages
    )
    return sorted((one for one in found if one is not None), key=lambda one: (one.offload, one.read, one.buffers))


def with_transfers(
    steps: Sequence[Step],
    labels: Sequence[InstructionLabel],
    bounds: Sequence[int],
    absences: Sequence[OffloadInterval],
) -> tuple[list[Step], list[InstructionLabel]]:
    """Return instructions and what they are, with those that let storages be away.

    Args:
        steps: The instructions of a worker's step.
        labels: What each is.
        bounds: As for :func:`find_offload_intervals`.
        absences: What is to be away when.
    """
    behind: dict[int, list[tuple[Step, InstructionLabel]]] = {}
    for place, made in _transfers(absences):
        behind.setdefault(bounds[place], []).append(made)
    all_steps: list[Step] = []
    all_labels: list[InstructionLabel] = []
    for index in range(len(steps) + 1):
        for step, label in behind.get(index, ()):
            all_steps.append(step)
            all_labels.append(label)
        if index < len(steps):
            all_steps.append(steps[index])
            all_labels.append(labels[index])
    return all_steps, all_labels


def _transfers(absences: Sequence[OffloadInterval]) -> Iterator[tuple[int, tuple[Step, InstructionLabel]]]:
    """Yield what to do, in order, with the action ahead of which it is: room is made before it is taken."""
    together: dict[tuple[int, int, int, int, int], list[int]] = {}
    for one in absences:
        evict = _AT_ONCE if one.evict == one.offload else _EARLIER
        for order, place in ((evict, one.evict + 1), (_BEGIN, one.offload + 1), (_BACK, one.prefetch)):
            if place is not None:
                together.setdefault((place, order, one.read, one.stage, one.micro_batch), []).extend(one.buffers)
    for (place, order, _, stage, micro_batch), buffers in sorted(together.items()):
        kind = _KINDS[order]
        name = f"{kind.__name__.lower()} stage {stage} (micro-batch {micro_batch})"
        yield place, (kind(tuple(buffers)), InstructionLabel(name, "other" if kind is Evict else "transfer"))


def _absence(
    storage: _Storage, actions: Sequence[Action], policies: Sequence[ActivationPolicy]
) -> OffloadInterval | None:
    """Return when a storage is away; ``None`` where it stays."""
    if storage.size_bytes < LEAST_BYTES:
        return None
    readers = sorted(place for place in storage.readers if place < len(actions))
    forward = [place for place in readers if actions[place].kind == "F"]
    backward = [place for place in readers if actions[place].kind != "F"]
    first = storage.made if storage.made is not None else min(forward, default=len(actions))
    if not backward or first >= backward[0] or actions[first].kind != "F":
        return None
    distance = COPY_ACTIONS.get(policies[actions[first].stage])
    if distance is None:
        return None
    last = max([first, *forward])
    evict, prefetch = last + distance, backward[0] - distance
    if evict + 1 >= prefetch:
        return None
    return OffloadInterval(
        buffers=storage.behind(last),
        size_bytes=storage.size_bytes,
        stage=actions[first].stage,
        micro_batch=actions[first].micro_batch,
        offload=last,
        evict=evict,
        prefetch=prefetch,
        read=backward[0],
    )


def _absence_of_gradient(
    storage: _Storage, actions: Sequence[Action], policies: Sequence[ActivationPolicy], gradients: Collection[int]
) -> OffloadInterval | None:
    """Return when a storage is away that holds gradients of a swapped stage; ``None`` where it stays."""
    made = storage.made
    if made is None or made >= len(actions) or actions[made].kind == "F" or storage.size_bytes < LEAST_BYTES:
        return None
    buffers = storage.behind(made)
    if policies[actions[made].stage] != "swap" or not buffers or not set(buffers) <= set(gradients):
        return None
    read = min((place for place in storage.readers if place > made), default=len(actions))
    if read <= made + 1:
        return None
    return OffloadInterval(
        buffers=buffers,
        size_bytes=storage.size_bytes,
        stage=actions[made].stage,
        micro_batch=actions[made].micro_batch,
        offload=made,
        evict=made,
        prefetch=read if read < len(actions) else None,
        read=read,
    )


class _Follower:
    """Follows the storages of a worker through its step.

    Args:
        programs: The programs that are called, by number.
    """

    def __init__(self, programs: Mapping[int, Program]) -> None:
        self.storages: list[_Storage] = []
        self._programs = programs
        self._owners: dict[int, dict[int, int]] = {}  # of each program that has been called
        self._held: dict[int, _Storage] = {}

    def follow(self, step: Step, action: int) -> None:
        """Take note of an instruction of an action."""
        for number in step.inputs if isinstance(step, Call) else references(step):
            if number in self._held:
                self._held[number].readers.add(action)
                self._held[number].note(action)
        match step:
            case Call():
                self._call(step, action)
            case Free():
                for number in step.buffers:
                    self._leave(number, action)
            case Receive():
                self._hold(step.buffer, self._new(step.spec.size_bytes, None), action)
            case Gather():
                self._hold(step.into, self._new(step.spec.size_bytes, action), action)
            case Reduce():  # the sum is a new tensor
                for number in step.buffers:
                    if number in self._held:
                        self._hold(number, self._new(self._held[number].size_bytes, action), action)
            case _:
                pass

    def _call(self, call: Call, action: int) -> None:
        program = self._programs[call.program]
        if call.program not in self._owners:
            self._owners[call.program] = owners(program)
        owner, specs = self._owners[call.program], specs_by_slot(program)
        given = [self._held.get(number) for number in call.inputs]
        for position in call.takes:
            self._leave(call.inputs[position], action)
        made: dict[int, _Storage] = {}
        for number, slot in zip(call.outputs, program.outputs, strict=True):
            source = owner[slot]
            if source < len(given):
                self._hold(number, given[source], action)
                continue
            if source not in made:
                made[source] = self._new(specs[source].size_bytes, action)
            self._hold(number, made[source], action)

    def _new(self, size_bytes: int, made: int | None) -> _Storage:
        self.storages.append(_Storage(size_bytes, made))
        return self.storages[-1]

    def _hold(self, number: int, storage: _Storage | None, action: int) -> None:
        self._leave(number, action)
        if storage is not None:
            self._held[number] = storage
            storage.buffers.add(number)
            storage.note(action)

    def _leave(self, number: int, action: int) -> None:
        storage = self._held.pop(number, None)
        if storage is not None:
            storage.buffers.discard(number)
            storage.note(action)
