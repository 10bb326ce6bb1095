"""Order of messages: each worker posts its receives from another one in the order in which that one sends. Pure.

NCCL has no tags: the n-th receive from a worker gets its n-th message. Receives are emitted one action before their
readers, whose order may differ from that of the sends, as with skip connections. Such a receive is moved to an earlier
place, just before the first receive of a later message: it only reserves memory sooner, and nothing waits for it.

Where steps overlap, a receive may move to the window before, in which the message is sent; its buffer gets its number
at the end of that window. A message of a step that may have no successor cannot wait for one of that: where a worker
sends such a message in the window of the next step, and the other one reads it in the window before, what is sent of
the next step until then is sent after it. The other worker reads it before these, so nothing waits for them meanwhile.

Routines whose messages are in order stay as they are.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from onebox.engine.compile.order_check import windows_in_turn
from onebox.engine.compile.routine import InstructionLabel, StepRoutine
from onebox.engine.partition.sharding_spec import Members
from onebox.wire.protocol.instructions import Call, Free, Receive, Rename, Send, Step

_Pair = tuple[int, int, int]
"""A group, the sender and the receiver."""

_Occurrence = tuple[int, int]
"""A channel, and the number of the message on it."""

_Messages = dict[_Pair, dict[_Occurrence, "_Place"]]
"""For each pair the place of each of its messages."""


class _Place(NamedTuple):
    """A place in a sequence of windows.

    Args:
        window: The window.
        before: The instruction in its routine that it precedes; infinite for the end.
    """

    window: int
    before: float


class _Move(NamedTuple):
    old: _Place
    place: _Place


def in_send_order(
    routines: Mapping[int, Sequence[StepRoutine]], groups: Mapping[int, Members], new: Callable[[], int]
) -> dict[int, Sequence[StepRoutine]]:
    """Return routines in which all receives from a worker are in the order of its sends.

    Args:
        routines: For each worker its routine of a step; or, where steps overlap, those of the first, a steady, and the
            draining window.
        groups: Members of each group whose messages have no tags, by its number; others are left as they are.
        new: Returns an unused number.
    """
    routines = _with_late_sends(routines, groups)
    sends, receives = _messages(routines, groups)
    moves: dict[int, list[_Move]] = defaultdict(list)
    for pair, found in receives.items():
        order = [(occurrence, place.window) for occurrence, place in sends[pair].items() if occurrence in found]
        if len(order) == len(found):
            moves[pair[2]] += _moves(order, found)
    return {worker: _moved(own, moves[worker], new) if moves[worker] else own for worker, own in routines.items()}


def _messages(
    routines: Mapping[int, Sequence[StepRoutine]], groups: Mapping[int, Members]
) -> tuple[_Messages, _Messages]:
    """Return the places of the sends, in their order, and of the receives."""
    sends: _Messages = defaultdict(dict)
    receives: _Messages = defaultdict(dict)
    for worker, own in routines.items():
        exchanges = [[*_exchanges(routine.steps, groups)] for routine in own]
        for window, which in enumerate(windows_in_turn(own)):
            for index, step in exchanges[which]:
                peer = groups[step.group][step.peer]
                sent = isinstance(step, Send)
                pair = (step.group, worker, peer) if sent else (step.group, peer, worker)
                places = (sends if sent else receives)[pair]
                number = 0
                while (step.channel, number) in places:
                    number += 1
                places[step.channel, number] = _Place(window, index)
    return sends, receives


def _exchanges(steps: Iterable[Step], groups: Container[int]) -> Iterable[tuple[int, Send | Receive]]:
    """Yield the messages of a routine in some groups; the chunks of one are one."""
    for index, step in enumerate(steps):
        if isinstance(step, Send | Receive) and step.group in groups and not (isinstance(step, Send) and step.first):
            yield index, step


def _with_late_sends(
    routines: Mapping[int, Sequence[StepRoutine]], groups: Mapping[int, Members]
) -> dict[int, Sequence[StepRoutine]]:
    """Return routines whose steady windows send what the receiver reads in the window before ahead of their own step's
    messages.
    """
    found = dict(routines)
    if any(len(own) == 1 for own in found.values()):
        return found
    sends, receives = _messages(found, groups)
    for (group, source, target), sent in sends.items():
        wanted = receives[group, source, target]
        early = [at.before for one, at in sent.items() if at.window == 2 and one in wanted and wanted[one].window < 2]
        if early:
            fill, steady, drain = found[source]
            peer = groups[group].index(target)
            channels = {one[0] for one, at in sent.items() if at.window == 0}
            first = steady.steps[int(max(early))]
            assert isinstance(first, Send)
            key = _key(first)
            last = max(index for index, step in enumerate(steady.steps) if isinstance(step, Send) and _key(step) == key)
            found[source] = (fill, _sent_after(steady, last, (group, peer), channels), drain)
    return found


def _key(send: Send) -> tuple[int, int, int]:
    return send.group, send.peer, send.channel


def _sent_after(routine: StepRoutine, last: int, target: tuple[int, int], channels: Container[int]) -> StepRoutine:
    """Return a routine that sends messages to a rank of a group, those of some channels, after a later send."""
    pairs = list(zip(routine.steps, routine.labels, strict=True))
    made: list[tuple[Step, InstructionLabel]] = []
    late: list[tuple[Step, InstructionLabel]] = []
    waiting: set[int] = set()
    kept: dict[int, None] = {}
    for index, (step, label) in enumerate(pairs[: last + 1]):
        if isinstance(step, Send) and _key(step)[:2] == target and step.channel in channels and index < last:
            late.append((step, label))
            waiting.add(step.buffer)
            continue
        ending = [number for number in _ended_by(step) if number in waiting]
        kept |= dict.fromkeys(ending)
        made.append((_without_ends(step, waiting) if ending else step, label))
    made += late
    if kept:
        made.append((Free(tuple(kept)), InstructionLabel("free")))
    made += pairs[last + 1 :]
    return routine.with_steps([step for step, _ in made], [label for _, label in made])


def _ended_by(step: Step) -> Sequence[int]:
    """Return the buffers that an instruction frees."""
    match step:
        case Free():
            return step.buffers
        case Call():
            return [step.inputs[place] for place in step.takes]
        case _:
            return ()


def _without_ends(step: Step, kept: Container[int]) -> Step:
    """Return an instruction that does not free some buffers."""
    match step:
        case Free():
            return replace(step, buffers=tuple(number for number in step.buffers if number not in kept))
        case Call():
            return replace(step, takes=tuple(place for place in step.takes if step.inputs[place] not in kept))
        case _:
            return step


def _moves(order: Sequence[tuple[_Occurrence, int]], found: Mapping[_Occurrence, _Place]) -> list[_Move]:
    """Return the moves of the receives of one sender's messages, in the order of the sends.

    Args:
        order: The messages in that order, each with the window in which it is sent.
        found: The present place of each receive.
    """
    places = dict(found)
    early: set[int] = set()  # channels whose receives move to the window of the send, in all windows
    while True:
        target: dict[_Occurrence, _Place] = {}
        least = _Place(sys.maxsize, 0)
        for occurrence, _ in reversed(order):
            least = min(least, places[occurrence])
            target[occurrence] = least
        crossing = {one[0] for one in target if target[one].window < found[one].window} - early
        if not crossing:
            break
        early |= crossing
        places |= {one: min(places[one], _Place(window, math.inf)) for one, window in order if one[0] in early}
    return [_Move(found[one], target[one]) for one, _ in order if target[one] != found[one]]


def _moved(routines: Sequence[StepRoutine], moves: Sequence[_Move], new: Callable[[], int]) -> Sequence[StepRoutine]:
    """Return a worker's routines with some receives moved."""
    sequence, made = windows_in_turn(routines), list(routines)
    numbers: dict[int, int] = {}
    for which, routine in enumerate(routines):
        window = sequence.index(which)
        steps, labels = routine.steps, routine.labels
        gone = {int(old.before) for old, _ in moves if old.window == window}
        before: dict[float, list[tuple[Step, InstructionLabel]]] = defaultdict(list)
        renamed: dict[int, int] = {}
        for old, place in moves:
            if place.window != window:
                continue
            source = routines[sequence[old.window]]
            receive, label = source.steps[int(old.before)], source.labels[int(old.before)]
            assert isinstance(receive, Receive)
            if old.window > window:
                number = numbers.get(receive.buffer) or new()
                numbers[receive.buffer], renamed[number] = number, receive.buffer
                receive = replace(receive, buffer=number, age=receive.age - (old.window - window))
            before[place.before].append((receive, label))
        if renamed:
            before[math.inf].append((Rename(tuple(renamed), tuple(renamed.values())), InstructionLabel("hand on")))
        both: list[tuple[Step, InstructionLabel]] = []
        for index, pair in enumerate(zip(steps, labels, strict=True)):
            both += before.get(index, ())
            both += [] if index in gone else [pair]
        both += before.get(math.inf, ())
        if gone or before:
            made[which] = routine.with_steps([step for step, _ in both], [label for _, label in both])
    return made
