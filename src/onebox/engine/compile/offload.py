"""Offloading: transfer of a step's values to the host's memory and back. Pure.

With activation policy ``offload``, a stage's values (computed by it, or received and first read by it) are copied to
the host if a backward reads them: after the last forward action that reads them. They are evicted one action later, so
that the copy overlaps with that action. Prefetching begins one action before the first backward action that reads them.
With policy ``swap`` they are evicted at once and return when they are read: the step waits for both copies, and they
take no device memory meanwhile. If no other action lies in between, values stay.

If the optimizer is on the host, the gradients of a stage with policy ``swap`` are offloaded, too, between the backwards
that accumulate them, and after the last one until the optimizer has read them.

Storages are offloaded, not buffers: all views of one move together, once.
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
"""Smaller storages stay: each copy takes 20 µs of the worker's time in both directions, in which memory moves ten times
as much. These are the means and variances of normalisations, many and small."""

COPY_ACTIONS: Mapping[ActivationPolicy, int] = {"offload": 1, "swap": 0}
"""Number of actions that a copy to or from the host overlaps with, by the activation policy of the stage."""


_EARLIER, _BEGIN, _AT_ONCE, _BACK = range(4)
_KINDS = (Evict, Offload, Evict, Prefetch)
"""Instructions between two actions, in order: evict earlier copies, begin copies, evict those that are waited for, and
prefetch."""


@dataclass(frozen=True, kw_only=True)
class OffloadInterval:
    """Absence of a storage from the device for a part of a step.

    Args:
        buffers: The buffers that view it.
        size_bytes: Its bytes.
        stage: The stage whose activation policy applies.
        micro_batch: The micro-batch.
        offload: Index of the action in the worker's row after which its copy begins.
        evict: Index of the action after which it is evicted.
        prefetch: Index of the action before which its return begins; ``None`` if it does not return.
        read: Index of the first action that reads it again, or the number of actions if a later instruction does.
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
    """Simulated state of a storage.

    Args:
        size_bytes: Its bytes.
        made: The action that computed it; ``None`` if it was received.
    """

    def __init__(self, size_bytes: int, made: int | None) -> None:
        self.size_bytes = size_bytes
        self.made = made
        self.readers: set[int] = set()
        self.buffers: set[int] = set()
        self._behind: dict[int, tuple[int, ...]] = {}

    def note(self, action: int) -> None:
        """Record the buffers that view it after an action."""
        self._behind[action] = tuple(sorted(self.buffers))

    def behind(self, action: int) -> tuple[int, ...]:
        """Return the buffers that view it after an action that has computed or read it."""
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
    """Return instructions and labels with offloading added.

    Args:
        steps: The instructions of a worker's step.
        labels: The label of each.
        programs: The programs that they call, by number.
        bounds: Index of the first instruction of each action, and after the last action that of the rest.
        actions: The worker's row of the schedule.
        policies: The activation policy of each stage.
        gradients: Gradient buffers that may be offloaded, because only the host's optimizer reads them.
    """
    # Actions without instructions, such as the weight gradients of a recomputed stage, would hide nothing.
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
    """Return the absences of storages.

    Args:
        steps: The instructions of a worker's step.
        programs: The programs that they call, by number.
        bounds: Index of the first instruction of each action, and after the last action that of the rest.
        actions: The worker's row of the schedule, without actions that have no instructions.
        policies: The activation policy of each stage.
        gradients: Gradient buffers that may be offloaded.
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
    """Return instructions and labels with those of absences added.

    Args:
        steps: The instructions of a worker's step.
        labels: The label of each.
        bounds: As for :func:`find_offload_intervals`.
        absences: The absences.
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
    """Yield the transfer instructions in order, with the action that each precedes: eviction before prefetching."""
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
    """Return the absence of a storage; ``None`` if it stays."""
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
    """Return the absence of a storage with gradients of a swapped stage; ``None`` if it stays."""
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
    """Tracks the storages of a worker through its step.

    Args:
        programs: The programs that are called, by number.
    """

    def __init__(self, programs: Mapping[int, Program]) -> None:
        self.storages: list[_Storage] = []
        self._programs = programs
        self._owners: dict[int, dict[int, int]] = {}  # by program
        self._held: dict[int, _Storage] = {}

    def follow(self, step: Step, action: int) -> None:
        """Apply an instruction of an action."""
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
