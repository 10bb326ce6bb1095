"""Events of a script and its devices, with times and lines, for a timeline; their number is bounded."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple

from onebox.pool import WorkerReply
from onebox.vgpu.runtime.script_time import ScriptLine
from onebox.wire import KernelSpec, TapeSpec
from onebox.wire.protocol.eager import FREE, Perform, Replay
from onebox.wire.protocol.instructions import Call
from onebox.wire.protocol.requests import Define, Instruction

PROFILE = "ONEBOX_PROFILE"
"""Environment variable with the file of the script's timeline, beside which processes of it write theirs."""

EVENTS = 100_000
"""The most events: those of some minutes of small steps, and a file of some 30 MB."""

Kind = Literal["wait", "ahead", "upload"]


class ScriptEvent(NamedTuple):
    """An activity of a thread of a script.

    Args:
        thread: The thread's name.
        kind: A wait for values, a wait because it was too far ahead, or an upload.
        line: The line; ``None`` for none of the script's.
        start_ns: When it began.
        end_ns: When it ended.
        size_bytes: Bytes that it uploaded.
    """

    thread: str
    kind: Kind
    line: ScriptLine | None
    start_ns: int
    end_ns: int
    size_bytes: int


class MessageEvent(NamedTuple):
    """A message to a device, which the device has executed.

    Args:
        worker: Number of the device.
        after: The line that had sent the message before.
        line: The line that sent it, for a wait or because there were enough operators.
        operators: Its operators, with how often each occurs.
        start_ns: When the device began it.
        end_ns: When the device ended it.
        waited_ns: How long the device waited for others meanwhile.
    """

    worker: int
    after: ScriptLine | None
    line: ScriptLine | None
    operators: Counter[str]
    start_ns: int
    end_ns: int
    waited_ns: int


class ScriptEvents:
    """Collects events; for any threads.

    Args:
        most: The most events.
    """

    def __init__(self, most: int = EVENTS) -> None:
        self.of_threads: list[ScriptEvent] = []
        self.of_devices: list[MessageEvent] = []
        self.left_out = 0
        """Number of further events."""
        self._most = most
        self._kernels: dict[tuple[int, int], tuple[str, int]] = {}  # by worker and number: name, number of inputs
        self._tapes: dict[tuple[int, int], Counter[str]] = {}
        self._lines: dict[int, ScriptLine | None] = {}  # of the latest message to each worker
        self._sent: dict[tuple[int, int], tuple[ScriptLine | None, ScriptLine | None, Counter[str]]] = {}

    @property
    def has_lines(self) -> bool:
        """True if a line of the script has done something."""
        return any(event.line for event in self.of_threads) or any(message.line for message in self.of_devices)

    def add(self, kind: Kind, line: ScriptLine | None, start_ns: int, end_ns: int, size_bytes: int = 0) -> None:
        """Add an activity of this thread."""
        if self._has_room():
            name = threading.current_thread().name
            self.of_threads.append(ScriptEvent(name, kind, line, start_ns, end_ns, size_bytes))

    def sent(
        self, worker: int, message: int, instructions: Sequence[Instruction], line: ScriptLine | None
    ) -> Callable[[Future[WorkerReply]], None]:
        """Note a message to a worker; return what is called with its reply.

        Args:
            worker: The worker.
            message: Number of the message in the script's stream.
            instructions: Its instructions.
            line: The line that sends it.
        """
        operators: Counter[str] = Counter()
        for instruction in instructions:
            operators += self._operators(worker, instruction)
        self._sent[worker, message] = self._lines.get(worker), line, operators
        self._lines[worker] = line
        return lambda future: self._replied(worker, future)

    def _replied(self, worker: int, future: Future[WorkerReply]) -> None:
        if future.exception() is not None:
            return
        for times in future.result().messages:
            after, line, operators = self._sent.pop((worker, times.message), (None, None, Counter()))
            if self._has_room():
                self.of_devices.append(
                    MessageEvent(worker, after, line, operators, times.start_ns, times.end_ns, times.waited_ns)
                )

    def _has_room(self) -> bool:
        if len(self.of_threads) + len(self.of_devices) < self._most:
            return True
        self.left_out += 1
        return False

    def _operators(self, worker: int, instruction: Instruction) -> Counter[str]:
        match instruction:
            case Define(number, KernelSpec() as kernel):
                self._kernels[worker, number] = kernel.name, kernel.inputs
            case Define(number, TapeSpec() as tape):
                self._tapes[worker, number] = self._of_tape(worker, tape.calls)
            case Replay():
                return self._tapes.get((worker, instruction.tape), Counter())
            case Perform():
                return Counter([instruction.kernel.name])
            case Call():
                return Counter(["compiled part"])
        return Counter()

    def _of_tape(self, worker: int, calls: Sequence[int]) -> Counter[str]:
        found: Counter[str] = Counter()
        place = 0
        while place < len(calls):
            if calls[place] == FREE:
                place += 2
                continue
            name, inputs = self._kernels.get((worker, calls[place]), ("", 0))
            if not name:  # defined before: how many inputs it has is not known
                break
            found[name] += 1
            place += 1 + inputs
        return found
