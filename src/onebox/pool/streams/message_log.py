"""The log of what scripts have sent to workers, since a point from which it can be played again. Pure.

A script's instructions are the only source of what a worker holds for it, in one order, with its seeds. So a snapshot
at one point of all streams, and the instructions since then, give the same bits on other workers. The point must be one
that no transfer or collective crosses: all that was sent before it has been asked for before it, too.
"""

from __future__ import annotations

import errno
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from msgspec.structs import replace

from onebox.pool.streams.read_values import ReadValues
from onebox.wire import GeneratorSpec, TapeSpec
from onebox.wire.protocol.eager import FREE, BoundMemory, DefaultType, KernelSpec, StreamHeader
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.instructions import Ask, Broadcast, Free, Gather, Receive, Reduce, Send
from onebox.wire.protocol.requests import Define, FreeRange, Instruction

FIRST_BUFFER = 1 << 30
"""The first number of a buffer of a stream, and of the stream itself; those of definitions and groups are lower."""

SPAN = 1 << 44
"""Numbers of buffers, definitions and groups of a process: child ``k`` has those from ``k * SPAN``, the parent lower
ones."""

MESSAGE_BYTES = 1 << 10
"""What a message counts in the log besides its frames."""

_MEASURED = frozenset({"memory", "peak", "time"})


def stream_end(number: int) -> int:
    """Return the number after the last one of a stream's buffers."""
    return (number // SPAN + 1) * SPAN


def is_stream(instructions: Sequence[Instruction]) -> bool:
    """Return whether a message may be a script's: part of its stream, the end of it, or a question about memory."""
    first = instructions[0] if instructions else None
    return isinstance(first, StreamHeader | FreeRange) or all(map(_is_measurement, instructions))


def is_measurement(instructions: Sequence[Instruction]) -> bool:
    """Return whether the reply to a message may differ when it is sent again: bytes in use, or a time."""
    return any(map(_is_measurement, instructions))


def _is_measurement(instruction: Instruction) -> bool:
    return isinstance(instruction, Ask) and instruction.about in _MEASURED


class SpilledFrame(NamedTuple):
    """A frame in a file: where it begins, and its bytes."""

    start: int
    size_bytes: int

    def __len__(self) -> int:
        return 0  # of memory


class SpillFile:
    """A file for the frames that memory has no room for, which only this process can open, and which ends with it.

    Args:
        most_bytes: Its largest size.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.size_bytes = 0
        self._file: IO[bytes] | None = None

    def keep(self, frames: Sequence[Any]) -> tuple[SpilledFrame, ...]:
        """Write frames, and return where they are.

        Raises:
            OSError: There is no room for them.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        kept = []
        for frame in frames:
            view = memoryview(frame).cast("B")
            if self.size_bytes + len(view) > self.most_bytes:
                raise OSError(errno.ENOSPC, f"more than {self.most_bytes} bytes")
            start = self.size_bytes
            self._file.seek(start)
            while len(view):
                written = self._file.write(view)
                self.size_bytes += written
                view = view[written:]
            kept.append(SpilledFrame(start, self.size_bytes - start))
        return tuple(kept)

    def frames(self, kept: Sequence[Any]) -> list[Any]:
        """Return frames, those that are in the file from there."""
        return [self._read(frame) if isinstance(frame, SpilledFrame) else frame for frame in kept]

    def _read(self, frame: SpilledFrame) -> bytes:
        assert self._file is not None
        self._file.seek(frame.start)
        made = self._file.read(frame.size_bytes)
        if len(made) != frame.size_bytes:
            raise OSError(errno.EIO, "a file of this process has lost what was written to it")
        return made

    def empty(self) -> None:
        """Give its room back."""
        if self._file is not None and self.size_bytes:
            self._file.truncate(0)
            self.size_bytes = 0

    def close(self) -> None:
        """Close it. Idempotent."""
        if self._file is not None:
            self._file.close()


@dataclass(eq=False, slots=True)
class LoggedMessage:
    """A message of a script.

    Args:
        worker: Its receiver.
        instructions: The instructions.
        frames: Raw elements of their tensors, or where they are in a file.
        answer: Whether it has a reply.
        future: Future of the reply for the script, done once it has one, whatever happens to workers.
        read: What the script has read by it; ``None`` where there is nothing.
    """

    worker: int
    instructions: tuple[Instruction, ...]
    frames: tuple[Any, ...]
    answer: bool
    future: Future[Any]
    read: ReadValues | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes of this process's memory."""
        return MESSAGE_BYTES + sum([len(frame) for frame in self.frames])


@dataclass(slots=True)
class WorkerState:
    """The definitions, the default type and the streams that a worker has of scripts.

    Attributes:
        definitions: Definitions by number, in the order in which they were made.
        ended: The numbers of those that are freed, and that tapes may still refer to.
        default: The default element type.
        streams: Numbers of the streams.
        bounds: What was said of their memory.
    """

    definitions: dict[int, Define] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    default: DefaultType | None = None
    streams: set[int] = field(default_factory=set)
    bounds: dict[int, BoundMemory] = field(default_factory=dict)

    def take(self, instructions: Iterable[Instruction]) -> None:
        """Record the effect of instructions."""
        for each in instructions:
            match each:
                case Define(number=number):
                    self.definitions[number] = each
                    self.ended.discard(number)
                case Free(definitions=numbers):
                    self.ended.update(number for number in numbers if number in self.definitions)
                case DefaultType():
                    self.default = each
                case BoundMemory(first=first):
                    self.bounds[first] = each
                case StreamHeader(number=number):
                    self.streams.add(number)
                case FreeRange(first=first, end=end):
                    self.ended.update(number for number in self.definitions if first <= number < end)
                    self.streams = {number for number in self.streams if not first <= number < end}
                    self.bounds = {number: own for number, own in self.bounds.items() if not first <= number < end}
                case _:
                    pass

    def prune(self) -> None:
        """Forget freed definitions that no tape refers to."""
        if not self.ended:
            return
        for number in [number for number in self.ended if not isinstance(self.definitions[number].what, KernelSpec)]:
            del self.definitions[number]
            self.ended.discard(number)
        used: set[int] = set()
        for define in self.definitions.values():
            if isinstance(define.what, TapeSpec):
                used.update(self._kernels(define.what.calls))
        for number in self.ended - used:
            del self.definitions[number]
        self.ended &= used

    def _kernels(self, calls: Sequence[int]) -> Iterable[int]:
        """Iterate over the kernels of a tape's calls."""
        at = 0
        while at < len(calls):
            number = calls[at]
            if number == FREE:
                at += 2
                continue
            kernel = self.definitions[number].what
            assert isinstance(kernel, KernelSpec)
            yield number
            at += 1 + kernel.inputs

    @property
    def generators(self) -> tuple[int, ...]:
        """The numbers of random number generators, of which 0 is the device's own."""
        made = (number for number, define in self.definitions.items() if isinstance(define.what, GeneratorSpec))
        return (0, *(number for number in made if number not in self.ended))

    def copy(self) -> WorkerState:
        """Return a copy."""
        return WorkerState(dict(self.definitions), set(self.ended), self.default, set(self.streams), dict(self.bounds))


class Balance:
    """The transfers and collectives of which only some members know yet.

    Transfers are counted by group, sender, receiver and channel; collectives by group and worker.
    """

    def __init__(self) -> None:
        self._members: dict[int, tuple[int, ...]] = {}
        self._transfers: Counter[tuple[int, int, int, int]] = Counter()
        self._collectives: dict[int, Counter[int]] = {}

    def form(self, group: int, members: Sequence[int]) -> None:
        """Record a group."""
        self._members[group] = tuple(members)
        self._collectives[group] = Counter()

    def leave(self, group: int) -> None:
        """Record that a group is of no more use."""
        self._members.pop(group, None)
        self._collectives.pop(group, None)
        self._transfers = Counter({key: count for key, count in self._transfers.items() if key[0] != group})

    def take(self, worker: int, instructions: Iterable[Instruction]) -> None:
        """Record instructions for a worker."""
        for each in instructions:
            group = getattr(each, "group", None)
            if group is None or group not in self._members or worker not in self._members[group]:
                continue
            rank = self._members[group].index(worker)
            match each:
                case Send(peer=peer, channel=channel):
                    self._count((group, rank, peer, channel), 1)
                case Receive(peer=peer, channel=channel, rows=rows):
                    self._count((group, peer, rank, channel), -max(1, len(rows)))
                case Reduce() | Broadcast() | Gather():
                    self._collectives[group][worker] += 1
                case LeaveGroup():
                    self.leave(group)
                case _:
                    pass

    def _count(self, key: tuple[int, int, int, int], more: int) -> None:
        self._transfers[key] += more
        if not self._transfers[key]:
            del self._transfers[key]

    @property
    def even(self) -> bool:
        """True while nothing is under way but what both of its ends know of."""
        if self._transfers:
            return False
        return all(
            len({counts[worker] for worker in self._members[group]}) == 1 for group, counts in self._collectives.items()
        )


class MessageLog:
    """The messages of scripts since a point, and what each worker had at that point.

    Args:
        spill: A file for frames.
    """

    def __init__(self, spill: SpillFile) -> None:
        self.spill = spill
        self.messages: list[LoggedMessage] = []
        self.count = 0
        """How many messages there have been, with those that are forgotten."""
        self.size_bytes = 0
        self.base: dict[int, WorkerState] = {}
        """What each worker had at the point from which the messages are kept."""
        self.present: dict[int, WorkerState] = {}
        """What it has after them."""
        self.balance = Balance()

    def append(self, message: LoggedMessage, room_bytes: float = math.inf) -> None:
        """Add a message.

        Args:
            message: The message.
            room_bytes: Bytes of the log in memory beyond which frames go to the file.

        Raises:
            OSError: The file has no room, either; the message is kept.
        """
        self.messages.append(message)
        self.count += 1
        self.size_bytes += message.size_bytes
        self.present.setdefault(message.worker, WorkerState()).take(message.instructions)
        self.balance.take(message.worker, message.instructions)
        if message.frames and self.size_bytes > room_bytes:
            before_bytes = message.size_bytes
            message.frames = self.spill.keep(message.frames)
            self.size_bytes -= before_bytes - message.size_bytes

    def start_at(self, count: int) -> None:
        """Forget the first messages: there is a snapshot of what came of them."""
        for message in self.messages[:count]:
            self.base.setdefault(message.worker, WorkerState()).take(message.instructions)
            self.size_bytes -= message.size_bytes
        del self.messages[:count]
        if not any(isinstance(frame, SpilledFrame) for message in self.messages for frame in message.frames):
            self.spill.empty()
        for state in (*self.base.values(), *self.present.values()):
            state.prune()

    @property
    def definitions(self) -> dict[int, set[int]]:
        """For each worker the numbers of the definitions that it may have."""
        return {worker: set(state.definitions) for worker, state in self.present.items()}


def regrouped(instructions: Sequence[Instruction], numbers: Mapping[int, int]) -> Sequence[Instruction]:
    """Return instructions for groups that have other numbers now.

    Args:
        instructions: Instructions with the groups' numbers in the script.
        numbers: Their present numbers, where these are others.
    """
    if not numbers or not any(getattr(each, "group", None) in numbers for each in instructions):
        return instructions
    made = []
    for each in instructions:
        number = numbers.get(getattr(each, "group", 0))
        made.append(each if number is None else replace(each, group=number))
    return made


__all__ = [
    "FIRST_BUFFER",
    "SPAN",
    "Balance",
    "LoggedMessage",
    "MessageLog",
    "SpillFile",
    "WorkerState",
    "is_measurement",
    "is_stream",
    "regrouped",
    "stream_end",
]
