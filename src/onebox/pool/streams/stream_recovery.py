"""Scripts survive their workers: lost ones are replaced, all go back to a snapshot, and the log is played again."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from functools import partial
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from onebox.errors import OneboxError, OperatorError, PeerLost, PoolError, UsageError, WorkerError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.devices import DeviceInfo
from onebox.pool.errors import fail
from onebox.pool.recovery import RecoveryReport
from onebox.pool.streams.message_log import (
    LoggedMessage,
    MessageLog,
    SpillFile,
    is_measurement,
    is_stream,
    regrouped,
    stream_end,
)
from onebox.pool.streams.read_values import ReadValues
from onebox.sizes import parse_budgets, size_text
from onebox.wire import KernelSpec, SlotArgument, Strided, TensorSpec
from onebox.wire.protocol.eager import CopyBuffers, KeepGenerator, Perform, SetGenerator, StreamHeader
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import FreeRange, Instruction, Put
from onebox.wire.protocol.responses import BufferCopies

SHARE = 0.02
"""Most of the time that snapshots may take."""

LEAST_S = 1.0
"""Least time between two snapshots."""

LOCAL_BPS = 1e9
"""Bytes per second at which a snapshot of workers of this machine is taken for copied once more."""

FULL = 0.5
"""Part of its room in memory that the log takes before what is uploaded goes to a file."""

DISK = 4
"""The most bytes of that file, and of one with a snapshot that is larger than the budget, as a multiple of it; and the
inverse of the most of the disk's free bytes."""

ROUNDS = 6
"""How often workers may be lost again while the log is played."""

FORM_S = 60.0
"""How long the groups of a script may take to be formed again."""

_LOG = logging.getLogger("onebox")


VARIABLE = "ONEBOX_RECOVER"
"""Environment variable that says whether scripts survive the loss of workers: ``1`` or ``0``."""

PARTS = 4
"""Inverse of the share of the host's memory that a snapshot, and what is sent between two, may take."""


def recovery_budget(recover: bool | None, memory: int | str | None, *, remote: bool) -> int:
    """Return the bytes that the recovery of scripts may keep; 0 where they do not survive the loss of workers.

    Args:
        recover: Whether they do; ``None`` for what :data:`VARIABLE` says, else with devices of other machines.
        memory: The bytes, or text such as ``2GiB``; a part of the host's memory when ``None``.
        remote: Whether there are devices of other machines.

    Raises:
        UsageError: It is something else.
    """
    said = os.environ.get(VARIABLE, "")
    if said not in ("", "0", "1"):
        raise UsageError(f"{VARIABLE}={said}: allowed are 1, for scripts that survive the loss of workers, and 0")
    if recover is not None and not isinstance(recover, bool):
        raise UsageError(f"recover={recover!r}: allowed are True, False and None, for what {VARIABLE} says")
    if isinstance(memory, list | tuple | dict) or (memory is not None and recover is False):
        raise UsageError(f"recover_memory={memory!r}: allowed is one size, such as '2GiB', where scripts recover")
    asked = said == "1" if said else remote
    own_bytes = parse_budgets("recover_memory", memory).every or psutil.virtual_memory().total // PARTS
    return own_bytes if (asked if recover is None else recover) else 0


class PostMessage(Protocol):
    """Sends instructions to a worker; see :meth:`onebox.pool.client.loop.ClientLoop.post`."""

    def __call__(
        self, worker: int, instructions: Sequence[Instruction], frames: Sequence[Any] = (), *, answer: bool = False
    ) -> Future[WorkerReply]: ...


class RecoverablePool(Protocol):
    """A pool, as far as its recovery is concerned; see :class:`onebox.pool.Pool`."""

    order: threading.RLock
    devices: tuple[DeviceInfo, ...]

    @property
    def broken(self) -> bool:
        """True when nothing can be posted, until it is recovered."""

    @property
    def recoveries(self) -> int:
        """Number of recoveries so far."""

    def near(self, worker: int) -> bool:
        """Return whether a worker is of this machine."""

    def new_number(self) -> int:
        """Return an unused number."""

    def recover_workers(self, *, seen: int | None = None, elsewhere: bool = False) -> RecoveryReport:
        """Replace lost workers."""


Form = Callable[[int], list[Future[WorkerReply]]]
"""Begins to form a group under a number."""


class ScriptGroup:
    """A group that a script has formed.

    Args:
        workers: Its members.
        form: Begins to form it.
        number: Its present number.
    """

    def __init__(self, workers: Sequence[int], form: Form, number: int) -> None:
        self.workers = tuple(workers)
        self.form = form
        self.number = number
        self.futures: list[Future[WorkerReply]] = [Future() for _ in workers]
        self.left: set[int] = set()
        """The members that have left it by a message of the log."""
        self.end: int | None = None
        """The count of messages after which it is of no more use; ``None`` for one in use."""

    @property
    def formed(self) -> bool:
        """True once all members have replied."""
        return all(future.done() for future in self.futures)


class AskedSnapshot(NamedTuple):
    """A snapshot whose parts have been asked for.

    Args:
        messages: The messages of the log that precede it.
        replies: The reply of each worker.
        places: For each worker the buffer of each generator's state.
        begin_s: The time.
    """

    messages: int
    replies: Mapping[int, Future[WorkerReply]]
    places: Mapping[int, Mapping[int, int]]
    begin_s: float


class StreamSnapshot:
    """Copies of what streams have on each worker.

    Args:
        copies: For each worker the replies, with their frames in order, and where each generator's state is.
        kinds: For each worker the kind of its device, on which the form of these states depends.
        file: The file that has the frames, where memory has no room for them.
    """

    def __init__(
        self,
        copies: Mapping[int, tuple[list[BufferCopies], Sequence[Any], Mapping[int, int]]],
        kinds: Mapping[int, str],
        file: SpillFile | None = None,
    ) -> None:
        self.copies, self.kinds, self.file = copies, kinds, file
        self.size_bytes = sum(len(frame) for _, frames, _ in copies.values() for frame in frames)
        """Bytes of this process's memory."""

    def spill(self, most_bytes: int) -> StreamSnapshot:
        """Return the snapshot with its frames in a file.

        Raises:
            OSError: The file has no room for them.
        """
        file = SpillFile(most_bytes)
        try:
            copies = {
                worker: (parts, file.keep(frames), places) for worker, (parts, frames, places) in self.copies.items()
            }
        except BaseException:
            file.close()
            raise
        return StreamSnapshot(copies, self.kinds, file)

    def read(self, frame: Any) -> Any:
        """Return a frame, from the file if it is there."""
        return frame if self.file is None else self.file.frames([frame])[0]

    def close(self) -> None:
        """Give the file back. Idempotent."""
        if self.file is not None:
            self.file.close()


class StreamRecovery:
    """Logs what scripts send, takes snapshots, and plays the log again on new workers.

    Args:
        pool: The pool.
        post: Sends instructions to a worker, at once.
        budget_bytes: The most bytes of a snapshot, and of what is sent between two.
    """

    def __init__(self, pool: RecoverablePool, post: PostMessage, budget_bytes: int) -> None:
        self._pool, self._post = pool, post
        self.budget_bytes = budget_bytes
        self.recoveries = self.snapshots = 0
        self.snapshot_s = 0.0
        """Seconds that workers have spent on snapshots."""
        self._log = MessageLog(SpillFile(self._disk_bytes))
        self._used = False  # by a script
        self._unanswered: set[Future[WorkerReply]] = set()
        self._groups: dict[int, ScriptGroup] = {}
        self._numbers: dict[int, int] = {}  # the present number of each group that has another one
        self._snapshot: StreamSnapshot | None = None
        self._asked: AskedSnapshot | None = None
        self._next_s = time.monotonic() + LEAST_S
        self._seen = pool.recoveries
        self._parted: OneboxError | None = None
        self._exact = True
        """True if what the log has read comes out with the same bits: the workers' processors are of the same kind."""
        self._rounded = False  # it has been said that values have come out again but for rounding
        self._paused = False
        self._lock = threading.RLock()
        self._round = 0
        self._recovering = self._closed = False
        self._whole = threading.Event()
        self._whole.set()
        self._lost = threading.Event()
        self._failure: OneboxError | None = None
        self._thread = threading.Thread(target=self._run, name="onebox-stream-recovery", daemon=True)
        self._thread.start()

    # ---- what the pool asks

    def post(
        self, worker: int, instructions: Sequence[Instruction], frames: Sequence[Any] = (), *, answer: bool = False
    ) -> Future[WorkerReply]:
        """Send instructions to a worker, once more after a loss if they are a script's.

        Raises:
            OneboxError: The pool is closed, or could not be recovered.
        """
        self._used = self._used or (bool(instructions) and isinstance(instructions[0], StreamHeader))
        if not (self._used and is_stream(instructions)):  # a trainer's, which recovers by itself
            return self._post(worker, regrouped(instructions, self._numbers), frames, answer=answer)
        future: Future[WorkerReply] = Future()
        if not answer:
            future.set_result(WorkerReply((), (), ()))
        else:
            self._unanswered.add(future)
            future.add_done_callback(self._unanswered.discard)
        message = LoggedMessage(worker, tuple(instructions), tuple(frames), answer, future)
        with self._lock:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            whole = not self._recovering and self._pool.recoveries == self._seen
            if whole:
                self._look(message)
            self._append(message)
            if self._paused and self._asked is None:
                self._forget(len(self._log.messages))
            if whole:
                self._send(message, frames)
            elif not self._recovering:  # a trainer has replaced workers
                self._lost.set()
        return future

    def begin_group(self, group: int, workers: Sequence[int], form: Form) -> list[Future[WorkerReply]]:
        """Begin to form a group, and return the futures of its members' replies; the caller holds the pool's order.

        Args:
            group: Its number in the script.
            workers: Its members.
            form: Begins to form it.
        """
        with self._lock:
            made = self._groups[group] = ScriptGroup(workers, form, group)
            self._log.balance.form(group, workers)
            if not self._recovering:
                self._form(made)
        return made.futures

    def number(self, group: int) -> int:
        """Return the present number of a group, once lost workers are replaced."""
        self._whole.wait()
        return self._numbers.get(group, group)

    def leave(self, group: int) -> int:
        """Record that a group is left by all; return its present number."""
        number = self.number(group)
        with self._lock:
            if group in self._groups:
                self._groups[group].end = self._log.count
                self._log.balance.leave(group)
                self._forget(0)
        return number

    @property
    def kept_bytes(self) -> int:
        """Bytes of this process's memory that the snapshot and the log take, and of the files."""
        own = self._snapshot.size_bytes if self._snapshot is not None else 0
        file = self._snapshot.file if self._snapshot is not None else None
        return own + self._log.size_bytes + sum(each.size_bytes for each in (self._log.spill, file) if each is not None)

    @property
    def _disk_bytes(self) -> int:
        """The most bytes of a file now."""
        return min(DISK * self.budget_bytes, shutil.disk_usage(tempfile.gettempdir()).free // DISK)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed = True
        self._lost.set()
        self._whole.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)
        self._log.spill.close()
        if self._snapshot is not None:
            self._snapshot.close()

    # ---- sending

    def _send(self, message: LoggedMessage, frames: Sequence[Any]) -> None:
        """Send a message, unless workers are lost, after whose replacement it is sent."""
        instructions = regrouped(message.instructions, self._numbers)
        try:
            future = self._post(message.worker, instructions, frames, answer=message.answer)
        except WorkerError:
            self._lost.set()
            return
        if message.answer:
            future.add_done_callback(partial(self._replied, message, self._round))

    def _replied(self, message: LoggedMessage, round_number: int, future: Future[WorkerReply]) -> None:
        """Pass a reply on; called by the client's loop, which must not wait."""
        if round_number != self._round:
            return
        error = future.exception()
        if self._is_loss(error):
            self._lost.set()
            return
        reply = None if error is not None else future.result()
        device, read = self._pool.devices[message.worker], None
        if reply is not None and not is_measurement(message.instructions):
            read = ReadValues(reply, rounded=_may_differ(device))
        if message.future.done():
            if self._exact or error is not None:
                self._compare(message.read, read, device)
            return
        if error is not None:
            fail(message.future, error)
            return
        message.read = read
        with contextlib.suppress(InvalidStateError):
            message.future.set_result(reply)

    def _compare(self, first: ReadValues | None, again: ReadValues | None, device: DeviceInfo) -> None:
        """Compare what a script has read with what came when it ran again."""
        if first is None:
            return
        likeness = "other" if again is None else first.likeness(again)
        if likeness == "other":
            self._parted = _parted(device)
            self._lost.set()
        elif likeness == "rounding" and not self._rounded:
            self._rounded = True
            _LOG.warning(
                "what the script had read from %s on %s has come out again but for rounding: its operators are not "
                "deterministic (torch.use_deterministic_algorithms), and the script goes on with other last bits",
                device.device,
                device.host,
            )

    def _is_loss(self, error: BaseException | None) -> bool:
        """Return whether an error is that of a lost worker, or follows from one."""
        if self._closed or not isinstance(error, WorkerError):
            return False
        if isinstance(error, PeerLost):
            return self._pool.broken
        return not isinstance(error, OperatorError)

    def _form(self, group: ScriptGroup) -> list[Future[WorkerReply]]:
        """Begin to form a group, unless workers are lost, and return the futures of its members."""
        try:
            futures = group.form(group.number)
        except WorkerError:
            self._lost.set()
            return []
        for mine, future in zip(group.futures, futures, strict=True):
            future.add_done_callback(partial(self._joined, mine, self._round))
        return futures

    def _joined(self, mine: Future[WorkerReply], round_number: int, future: Future[WorkerReply]) -> None:
        if round_number != self._round:
            return
        error = future.exception()
        if self._is_loss(error):
            self._lost.set()
        elif not mine.done():
            if error is not None:
                fail(mine, error)
            else:
                mine.set_result(future.result())

    def _append(self, message: LoggedMessage) -> None:
        room_bytes = self.budget_bytes - (self._snapshot.size_bytes if self._snapshot is not None else 0)
        try:
            self._log.append(message, FULL * room_bytes)
            full = self._log.size_bytes > room_bytes
        except OSError:
            full = True
        self._note_left(message)
        if full and not (self._paused or self._recovering):
            self._pause("what was sent since the last snapshot")

    def _note_left(self, message: LoggedMessage) -> None:
        for each in message.instructions:
            if isinstance(each, LeaveGroup) and (group := self._groups.get(each.group)) is not None:
                group.left.add(message.worker)
                if group.left.issuperset(group.workers):
                    group.end = self._log.count

    def _forget(self, count: int) -> None:
        """Forget the first messages of the log, and the groups that only they have used."""
        self._log.start_at(count)
        begun = self._log.count - len(self._log.messages)
        for number in [number for number, group in self._groups.items() if (group.end or math.inf) <= begun]:
            del self._groups[number]
            self._numbers.pop(number, None)

    # ---- snapshots

    def _look(self, following: LoggedMessage) -> None:
        """Begin a snapshot where one is due and nothing is between two streams; or take note of one that is there.

        Args:
            following: The message that is sent next.
        """
        if self._asked is not None:
            self._collect()
            return
        formed = all(group.formed for group in self._groups.values())
        if time.monotonic() >= self._next_s and self._log.balance.even and formed:
            self._ask(following)

    def _ask(self, following: LoggedMessage) -> None:
        """Let all workers copy what streams have there, at this point of the log.

        A stream that a failure has stopped cannot be copied. The header of the message that follows lets it go on if
        the script has been told: where each message fails, there is no other moment.
        """
        header = [each for each in following.instructions[:1] if isinstance(each, StreamHeader)]
        asked: dict[int, Future[WorkerReply]] = {}
        places: dict[int, dict[int, int]] = {}
        for worker, state in self._log.present.items():
            streams = sorted(state.streams)
            if not streams:
                continue
            last = stream_end(streams[0]) - 1
            places[worker] = {generator: last - at for at, generator in enumerate(state.generators)}
            copies = [CopyBuffers(number, stream_end(number)) for number in streams]
            keeps = [KeepGenerator(generator, buffer) for generator, buffer in places[worker].items()]
            free = Free(tuple(places[worker].values()))
            try:
                if worker == following.worker:
                    self._post(worker, header)
                asked[worker] = self._post(worker, [*keeps, *copies, free], answer=True)
            except OneboxError:
                self._lost.set()
                return
        self._asked = AskedSnapshot(len(self._log.messages), asked, places, time.monotonic())

    def _collect(self) -> None:
        """Take note of a snapshot whose parts have come, and forget what came before it."""
        assert self._asked is not None
        count, asked, places, begin_s = self._asked
        if not all(future.done() for future in asked.values()):
            return
        self._asked = None
        if any(future.exception() is not None for future in asked.values()):
            self._next_s = time.monotonic() + LEAST_S
            return
        copies: dict[int, tuple[list[BufferCopies], Sequence[Any], Mapping[int, int]]] = {}
        for worker, future in asked.items():
            reply = future.result()
            parts = [each for each in reply.results if isinstance(each, BufferCopies)]
            if any(part.stopped for part in parts):
                self._next_s = time.monotonic() + LEAST_S
                return
            copies[worker] = parts, reply.frames, places[worker]
        took_s = max((sum(part.took_ns for part in parts) / 1e9 for parts, _, _ in copies.values()), default=0.0)
        self.snapshots += 1
        self.snapshot_s += took_s
        found = StreamSnapshot(copies, {worker: self._pool.devices[worker].kind for worker in copies})
        size_bytes, now_s = found.size_bytes, time.monotonic()
        cost_s = took_s + size_bytes / LOCAL_BPS
        if not all(map(self._pool.near, copies)):  # its bytes delay what else comes over the network
            cost_s = max(cost_s, now_s - begin_s)
        full = False
        if size_bytes > self.budget_bytes:
            try:
                found = found.spill(self._disk_bytes)
            except OSError:
                full = True
            cost_s += time.monotonic() - now_s
        self._next_s = time.monotonic() + max(LEAST_S, cost_s / SHARE)
        if full:
            if not self._paused:
                self._pause(f"a snapshot of {size_text(size_bytes)}")
            return
        if self._paused:
            self._paused = False
            _LOG.warning("the script survives the loss of a worker again")
        before, self._snapshot, self._exact = self._snapshot, found, True
        self._forget(count)
        if before is not None:
            before.close()

    def _pause(self, what: str) -> None:
        """Keep nothing until there is a snapshot again."""
        self._paused = True
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = self._asked = None
        self._forget(len(self._log.messages))
        _LOG.warning(
            "recovery pauses: %s needs more than the %s that it may keep (onebox run --recover-memory); until there is "
            "room, the loss of a worker ends the script",
            what,
            size_text(self.budget_bytes),
        )

    # ---- after a loss

    def _run(self) -> None:
        while True:
            self._lost.wait()
            if self._closed:
                self._give_up(PoolError("the pool is closed; open another with onebox.open()"))
                return
            if self._parted is not None:
                self._give_up(self._parted)
            if self._failure is not None:
                return
            self._whole.clear()
            try:
                self._recover()
            except OneboxError as error:
                self._give_up(error)
            except BaseException as error:
                self._give_up(PoolError(f"the recovery of the script failed: {type(error).__name__}: {error}"))
                raise
            finally:
                self._whole.set()

    def _recover(self) -> None:
        begin_s = time.monotonic()
        with self._lock:
            self._recovering = True
            self._round += 1  # later replies to what was sent before are ignored
            self._asked = None
        lost: dict[int, OneboxError] = {}
        before = self._pool.devices
        failure: WorkerError | None = None
        for _ in range(ROUNDS):
            self._lost.clear()
            report = self._pool.recover_workers(seen=self._seen, elsewhere=not self._paused)
            self._seen = report.number
            lost |= report.lost
            pairs = [*zip(before, self._pool.devices, strict=True)]
            self._exact = self._exact and all(old.arithmetic == new.arithmetic for old, new in pairs)
            if self._parted is not None:
                raise self._parted
            if report.gone:
                raise report.lost[report.gone[0]]
            if self._paused:
                raise next(iter(lost.values()), PoolError("workers were lost while the recovery of scripts paused"))
            with self._pool.order, self._lock:
                self._round += 1
                self.recoveries += 1  # before any reply lets the script go on
                count = len(self._log.messages)
                try:
                    self._restore()
                    for message in self._log.messages:
                        self._send(message, self._log.spill.frames(message.frames))
                except WorkerError as error:
                    failure = error
                    self._lost.set()
                if self._lost.is_set() or self._pool.broken:
                    continue
                self._recovering = False
            said = "; ".join(str(error).partition("\n")[0] for error in lost.values()) or "workers were replaced"
            _LOG.warning(
                "%s. Another one has taken its place after %.1f s, and %d messages of the script run again: it goes on"
                "%s",
                said,
                time.monotonic() - begin_s,
                count,
                _describe_moves(pairs),
            )
            return
        last = failure or next(iter(lost.values()), "it is not known")
        raise PoolError(f"workers were lost {ROUNDS} times while a script was recovered; the last error: {last}")

    def _restore(self) -> None:
        """Bring all workers to the point of the snapshot, and form the script's groups anew."""
        log = self._log
        for worker, state in log.present.items():
            freed = Free((), tuple(state.definitions))
            ranges = [FreeRange(number, stream_end(number)) for number in sorted(state.streams)]
            self._post(worker, [*ranges, freed])
        joined: list[Future[WorkerReply]] = []
        for number, group in self._groups.items():
            for worker in group.workers:
                self._post(worker, [LeaveGroup(group.number)])
            group.number = self._numbers[number] = self._pool.new_number()
            joined += self._form(group)
        for future in wait(joined, FORM_S).done:
            error = future.exception()
            if error is not None:
                raise error
        for worker, state in log.base.items():
            start: list[Instruction] = [] if state.default is None else [state.default]
            start += [*state.bounds.values(), *state.definitions.values()]
            if state.ended:
                start.append(Free((), tuple(state.ended)))
            self._post(worker, start)
            if self._snapshot is not None and worker in self._snapshot.copies:
                self._fill(worker, self._snapshot)

    def _fill(self, worker: int, snapshot: StreamSnapshot) -> None:
        """Send the buffers of a snapshot to a worker, each storage once, and set its generators: to their states, or on
        a device of another kind to seeds made of these."""
        parts, frames, generators = snapshot.copies[worker]
        as_before = snapshot.kinds[worker] == self._pool.devices[worker].kind
        rest = iter(frames)
        seeds: dict[int, int] = {}
        for part in parts:
            held = [next(rest) for _ in range(1 + max(part.storages, default=-1))]
            if not part.buffers:
                continue
            temporary = min(part.buffers) - 1  # no buffer's number, as the stream's own precedes them
            for place, kept in enumerate(held):
                frame = snapshot.read(kept)
                instructions: list[Instruction] = [Put((temporary,), (TensorSpec("uint8", (len(frame),)),))]
                for number, layout, storage in zip(part.buffers, part.layouts, part.storages, strict=True):
                    if storage == place:
                        if not as_before and number in generators.values():
                            seeds[number] = zlib.crc32(frame)
                        instructions.append(Perform(_view(layout), (temporary,), (), number))
                self._post(worker, [*instructions, Free((temporary,))], [frame])
        buffers = tuple(generators.values())
        sets = [SetGenerator(generator, seeds.get(buffer), buffer) for generator, buffer in generators.items()]
        self._post(worker, [*sets, Free(buffers)])

    def _give_up(self, error: OneboxError) -> None:
        """Fail what scripts wait for."""
        with self._lock:
            self._failure = error
            waiting = [*self._unanswered.copy()]
            waiting += [future for group in self._groups.values() for future in group.futures]
        for future in waiting:
            if not future.done():
                fail(future, error)


def _view(layout: Strided) -> KernelSpec:
    """Return the kernel that makes a view of a storage's bytes."""
    return KernelSpec("aten.alias.default", (SlotArgument(0),), {}, 1, 0, (), (layout,))


def _describe_moves(devices: Sequence[tuple[DeviceInfo, DeviceInfo]]) -> str:
    """Return what follows in the line about a recovery where devices are others; empty where none is.

    Args:
        devices: Each device before and after it.
    """
    moves = [(old, new) for old, new in devices if (old.host, old.device) != (new.host, new.device)]
    said = [
        f"device {new.number} is {new.device} on {new.host} now, not {old.device} on {old.host}" for old, new in moves
    ]
    if moves:
        said.append("it may be slower there")
    if left := ", ".join(dict.fromkeys(old.host for old, new in moves if old.host != new.host)):
        said.append(f"{left} is used again by the next start of the script only")
    if any(old.arithmetic != new.arithmetic for old, new in devices):
        said.append("the new processor is of another kind: results may differ by rounding")
    if any(old.kind != new.kind for old, new in moves):
        said.append("random numbers are others")
    return "".join(f"; {each}" for each in said)


def _may_differ(device: DeviceInfo) -> bool:
    """Return whether the operators of a device may give other last bits when they run again, as those of GPUs with
    atomic additions do; which ones they are is known to PyTorch, and only where they run."""
    return device.kind != "cpu" and not torch.are_deterministic_algorithms_enabled()


def _parted(device: DeviceInfo) -> PoolError:
    return PoolError(
        f"{device.device} on {device.host} was lost, and what the script had read from it came out differently when it "
        "was run again: its operators are not deterministic (torch.use_deterministic_algorithms), or failed. The "
        "script cannot go on; start it again from its last checkpoint"
    )


__all__ = ["StreamRecovery"]
