"""The executor of a worker: runs instructions, in order, over its buffers and definitions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, get_args

import torch
from msgspec.structs import replace
from torch import Tensor, UntypedStorage

from onebox.errors import WireError
from onebox.wire import GeneratorSpec, KernelSpec, TapeSpec, TensorSpec, from_frame, rows_of, spec_of, to_frame, unpack
from onebox.wire.protocol.eager import (
    BoundMemory,
    CopyBuffers,
    EagerWork,
    KeepGenerator,
    Perform,
    Replay,
    SetGenerator,
    StreamHeader,
)
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Retime
from onebox.wire.protocol.instructions import (
    Ask,
    Branch,
    Broadcast,
    Call,
    Evict,
    Free,
    Gather,
    Get,
    Offload,
    OptimizerStep,
    Prefetch,
    Receive,
    Reduce,
    Rename,
    Send,
    Vote,
    references,
)
from onebox.wire.protocol.requests import (
    Define,
    FreeRange,
    Instruction,
    OptimizerSpec,
    Put,
    Routine,
    Run,
    SetNumerics,
    StoredProgram,
)
from onebox.wire.protocol.responses import (
    BufferCopies,
    Digest,
    FilledSlots,
    OptimizerState,
    Scalars,
    Tensors,
    WorkerFailure,
)
from onebox.wire.protocol.snapshots import Fill, Lay, Read, Recall, Remembered, SlotInstruction, Snapshot, Write
from onebox.worker.accelerator import DeviceFailed
from onebox.worker.comm.api import ClientChannel, RankLost
from onebox.worker.comm.manager import GroupManager, groups_of
from onebox.worker.comm.tcp.mesh import GroupNetwork
from onebox.worker.device import ComputeDevice, seed_of
from onebox.worker.execution.communication import CollectiveExecutor, Communication, Resolve
from onebox.worker.execution.eager import EagerContext, EagerExecutor
from onebox.worker.execution.errors import describe_failure, require_device
from onebox.worker.execution.numerics import NumericState
from onebox.worker.execution.optimizer_steps import OptimizerSteps
from onebox.worker.execution.pending_reply import Outcome, PendingReply
from onebox.worker.execution.script_streams import ScriptStream, ScriptStreams
from onebox.worker.execution.step_votes import StepVotes
from onebox.worker.faults import FaultInjector
from onebox.worker.memory.async_copy import AsyncCopier, copier_for
from onebox.worker.memory.buffers import BufferStore, Poisoned, QuotaExceeded
from onebox.worker.memory.host import HostMemory
from onebox.worker.memory.offload import Offloader
from onebox.worker.memory.overflow import Overflow
from onebox.worker.optimizer.deferred import DeferredOptimizer
from onebox.worker.optimizer.native import NativeOptimizer
from onebox.worker.programs.graphs import GraphMemory
from onebox.worker.programs.interpreter import CompiledProgram, OperatorFailed, describe
from onebox.worker.programs.kernels import CompiledKernel, strided_of
from onebox.worker.progress import Trace, WorkerProgress, reached
from onebox.worker.snapshots.service import SnapshotService

_Kind = TypeVar("_Kind")
Report = Callable[[WorkerFailure], None]

_ANSWERED = frozenset({CopyBuffers, Get, Ask, Perform, Snapshot, Read, Lay, Remembered})
"""Instructions with awaited replies; if there can be none, the failure is the reply."""

_STOPPED = frozenset({Put, Call, Get, Ask, Replay, Perform, KeepGenerator, SetGenerator, *get_args(Communication)})
"""Instructions that have no effect in a stream that has stopped."""


class Executor:
    """Executes instructions.

    Args:
        device: Device of the tensors.
        channel: The channel to the client, for groups.
        report: Called with each failure, before groups are left; with those for a vote at the end of their routine.
        quota_bytes: Most bytes of buffers; 0 for no limit.
        faults: Faults to inject, for tests.
        between: Called between the instructions of a routine on an asynchronous device, to send replies that have
            become complete.
        address: The address of this host at which workers of others connect to this one; empty for the client's
            choice.
        network: Where workers of other hosts find this one, beside that address.
        sharing_key: A secret of the workers that share memory with it.
    """

    groups_type: type[GroupManager] = GroupManager
    votes_type: type[StepVotes] = StepVotes

    def __init__(
        self,
        device: ComputeDevice,
        channel: ClientChannel,
        report: Report,
        *,
        quota_bytes: int = 0,
        faults: FaultInjector,
        between: Callable[[], None] | None = None,
        address: str = "",
        network: GroupNetwork | None = None,
        sharing_key: bytes = b"",
    ) -> None:
        self.progress = WorkerProgress()
        self.graphs = GraphMemory(device.accelerator)
        self.store = BufferStore(quota_bytes, self.graphs)
        self.host = HostMemory(quota_bytes)
        self.frames_out: list[Any] = []
        self._device = device
        self._channel = channel
        self._report = report
        self._faults = faults
        self._between = between
        self._definitions: dict[int, Any] = {}
        self._eager = EagerExecutor(EagerContext(device, self.store, self.progress, self._fail), self._definitions)
        accelerator = device.accelerator
        self._groups = self.groups_type(
            channel,
            accelerator,
            self.progress,
            address=address,
            network=network,
            quota_bytes=quota_bytes,
            sharing_key=sharing_key,
        )
        self._quota_bytes = quota_bytes
        self._overflow: Overflow | None = None
        self._bounds: dict[int, BoundMemory] = {}
        self._owed: dict[int, tuple[int, ...]] = {}  # groups of the routines that could not be defined
        self._snapshots = SnapshotService(accelerator, self.store, self.host, self._groups, self._definition, faults)
        self._collectives = CollectiveExecutor(self.store, self._groups, self._before_update)
        self._copies = self._copier(faults)
        self._offloader = Offloader(accelerator, self.store, self.host, self._copies)
        self._votes = self.votes_type(
            accelerator, self.store, self._groups, lambda number: self._definition(number, CompiledProgram)
        )
        self._updates = OptimizerSteps(
            device,
            self.store,
            self._offloader,
            self._definition,
            self._before_update,
            self._votes.takes_effect,
        )
        self._numerics = NumericState()
        self._trace = Trace()
        self._group_failures = 0  # when the message began
        self._written: list[tuple[int, Sequence[int]]] = []  # buffers by single instructions, and the progress then
        self._streams = ScriptStreams()
        self._stream: ScriptStream | None = None  # of the present message, if it is of one
        self._run = Run(0)
        self._place: tuple[int, int] | None = None  # number of the running routine, and index of its instruction

    def begin(self) -> None:
        """Begin a message: its results are its own, and its operators have PyTorch's precision unless it sets them."""
        self.frames_out = []
        self._trace = Trace()
        self._stream = None
        if self._device.accelerator.asynchronous:
            self._void_aborted()
            self._group_failures = self._groups.failures()
        self._numerics.use()

    def reply(self, number: int, results: Sequence[Outcome]) -> PendingReply:
        """Return the reply to a message.

        Args:
            number: The message's number.
            results: The results of its instructions.
        """
        frames, trace, after = self.frames_out, self._trace, None
        self.frames_out, self._trace = [], Trace()
        accelerator = self._device.accelerator
        if accelerator.asynchronous and (trace.used_bytes or any(map(callable, (*results, *frames)))):
            after = accelerator.current().record(yields=True)
        check = functools.partial(self._groups.check_since, self._group_failures)
        pending = PendingReply(number, results, frames, trace, after, check, self._groups.traffic)
        if self._stream is not None:
            at = reached(accelerator) if accelerator.asynchronous else self._now_ns()
            self._stream.clock.end(at, self.progress.waited_ns)
            pending.executed = self._stream.clock.take
        return pending

    def execute(self, instruction: Instruction, frames: Iterator[Any]) -> Sequence[Outcome]:
        """Execute one instruction; a failure voids the buffers that it would have written and is reported.

        Args:
            instruction: The instruction.
            frames: Elements of the message's tensors.

        Returns:
            Its replies.

        Raises:
            Poisoned: Its reply needs a void buffer; the failure states the reason.
            DeviceFailed: The device can do no more work in this process.
            WireError: It is not an instruction for an executor.
        """
        if isinstance(instruction, Run):
            return self._run_routine(instruction)
        if isinstance(instruction, StreamHeader):
            try:
                self._stream = stream = self._streams.begin(instruction)
                stream.clock.begin(instruction.message, self._now_ns(), self.progress.waited_ns)
            except WireError as error:
                self._report(describe_failure(error, "stream"))
            return []
        own = iter(list(itertools.islice(frames, _frame_count(instruction))))
        stopped = self._stream.failure if self._stream is not None else None
        if stopped is not None and type(instruction) in _STOPPED and not _is_exempt(instruction):
            return self._skip(instruction, stopped)
        try:
            return self._guarded(instruction, own, _same)
        finally:
            if self._device.accelerator.asynchronous and self._groups.numbers:
                self._note_written(instruction)

    def interrupt(self, group: int) -> None:
        """End waits for peers of a group; callable from any thread."""
        self._groups.interrupt(group)

    def settle(self) -> bool:
        """Do for groups what is to be done while there is no message; return whether there is nothing more of that.

        A group in which this worker cannot connect to another one, for which it has something, is left: others wait for
        it there.
        """
        more, failed = self._groups.attend()
        for number, error in failed.items():
            failure = describe_failure(error, "send")
            self._report(failure)
            self._groups.abandon(number, failure)
        return self._groups.settle() and not more

    def close(self) -> None:
        """Leave all groups, and end pending work."""
        self._groups.close()
        self._offloader.close()
        self._snapshots.close()

    def _copier(self, faults: FaultInjector) -> AsyncCopier:
        """Return what copies between the device and the host's memory."""
        return copier_for(self._device.accelerator, faults)

    def _now_ns(self) -> int:
        """Return the time of traces, on a device that is not asynchronous."""
        return time.monotonic_ns()

    # ---- running

    def _run_routine(self, run: Run) -> Sequence[Outcome]:
        routine = self._definitions.get(run.routine)
        if not isinstance(routine, Routine) or len(run.bindings) < routine.bindings:
            return self._cannot_run(run, routine)
        bindings = run.bindings

        def resolve(reference: int) -> int:
            return reference if reference >= 0 else bindings[-1 - reference]

        self._run = run
        self._updates.begin(run, routine.steps, self._definitions)
        self._votes.begin(run, routine.optimizer)
        if not (run.trace and self._trace.enabled):
            self._trace = Trace(self.store if run.trace else None, self._device.accelerator, self._now_ns)
        trace = self._trace
        results: list[Outcome] = []
        nothing: Iterator[Any] = iter(())
        poisoned: Poisoned | None = None
        between = self._between if self._device.accelerator.asynchronous else None
        for number, step in enumerate(routine.steps):
            self._place = run.routine, number
            trace.begin()
            try:
                results += self._guarded(step, nothing, resolve)
            except Poisoned as error:
                poisoned = poisoned or error  # later instructions, such as freeing buffers, still run
            trace.end()
            if between is not None:
                between()
        trace.close()
        self._place = None
        objection = self._votes.end()
        if poisoned is not None:
            raise poisoned
        if objection is not None:
            self._report(objection)
        return results

    def _cannot_run(self, run: Run, routine: object) -> Sequence[Outcome]:
        """Report a routine that cannot run, and leave the groups in which others would wait for it."""
        groups = self._groups.numbers
        failure = WorkerFailure("protocol", "run", f"routine {run.routine} is not there or lacks bindings")
        if isinstance(routine, WorkerFailure):
            failure, groups = routine, self._owed.get(run.routine, groups)
        elif isinstance(routine, Routine):
            groups = groups_of(routine)
        self._report(failure)
        for number in groups:
            self._groups.abandon(number, failure)
        return []

    def _guarded(self, instruction: Instruction, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        """Execute an instruction; convert its exceptions to void buffers and a report."""
        progress = self.progress
        progress.executed += 1
        progress.doing = type(instruction).__name__.lower()
        if self.store.overflow is not None:
            self.store.overflow.begin()
        try:
            self._faults.before(progress)
            if self._votes.skips(instruction, resolve):
                return []
            results = self._handlers[type(instruction)](self, instruction, frames, resolve)
            if type(instruction) in _ANSWERED:
                self._groups.check()  # after a wait for the device, which an interrupted operation ends with any values
            return results
        except Poisoned as error:
            if self._object(instruction, error.failure, resolve):
                return []
            self._void(instruction, error.failure, resolve)
            if type(instruction) in _ANSWERED:
                raise
            self._fail(error.failure, new=False)
            return []
        except DeviceFailed:
            raise
        except Exception as error:
            require_device(self._device, error, progress.doing)
            failure = describe_failure(error, progress.doing, self._place)
            if self._in_stream and isinstance(instruction, Send) and failure.kind == "peer":
                return []  # only the receiver, which has left, lacks what was to be sent
            if isinstance(instruction, Put) and not instruction.there:
                failure = replace(failure, kept=True)
            if self._object(instruction, failure, resolve):
                return []
            self._void(instruction, failure, resolve)
            if type(instruction) in _ANSWERED:  # the script is told at once: its stream goes on
                self._report(failure)
                raise Poisoned(failure) from error
            self._fail(failure)
            return []

    @property
    def _in_stream(self) -> bool:
        """True for a single instruction of a script's stream."""
        return self._stream is not None and self._place is None

    def _fail(self, failure: WorkerFailure, *, new: bool = True) -> None:
        """Report a failure, and stop the stream of the script whose instruction it is.

        Args:
            failure: The failure.
            new: Whether it has happened now; otherwise a void buffer was to be used, which only scripts are told of
                again.
        """
        if new or self._in_stream:
            self._report(failure)
        if self._stream is not None and self._place is None:
            self._stream.stop(failure)

    def _skip(self, instruction: Instruction, failure: WorkerFailure) -> Sequence[Outcome]:
        """Skip an instruction of a stream that has stopped.

        Raises:
            Poisoned: It is to be answered: the failure is the answer.
        """
        self.progress.executed += 1
        if isinstance(instruction, Put):  # memory that was only allocated before stays
            self.store.void([number for number in instruction.buffers if number not in self.store], failure)
            return []
        if isinstance(instruction, Receive):  # it is received: the next one from there must be the next
            with contextlib.suppress(Poisoned, RankLost, WireError):
                self._groups.get(instruction.group).receive(
                    instruction.spec, instruction.peer, instruction.channel, instruction.rows
                )
        self._void(instruction, failure, _same)
        if type(instruction) in _ANSWERED:
            raise Poisoned(failure)
        return []

    def _object(self, instruction: Instruction, failure: WorkerFailure, resolve: Resolve) -> bool:
        """Leave a failure to the vote on its step, if there is one, with stand-ins for what it would have made."""
        try:
            objects = self._votes.objects(instruction, failure, resolve)
            if objects and isinstance(instruction, Communication):
                self._collectives.run(instruction, resolve, self._trace)
            return objects
        except (Poisoned, RankLost, QuotaExceeded, RuntimeError):  # other workers do not come to the vote then
            return False

    def _void(self, instruction: Instruction, failure: WorkerFailure, resolve: Resolve) -> None:
        """Void the outputs of an instruction; a worker that cannot contribute leaves the group."""
        if isinstance(instruction, Call):
            for position in instruction.takes:
                if 0 <= position < len(instruction.inputs):
                    self.store.forget(resolve(instruction.inputs[position]))
        if isinstance(instruction, Replay | Perform):
            self._eager.skip(instruction, failure)
        if isinstance(instruction, OptimizerStep):
            optimizer = self._definitions.get(instruction.optimizer)
            self.store.void(
                optimizer.numbers if isinstance(optimizer, NativeOptimizer | DeferredOptimizer) else (), failure
            )
        self.store.void([resolve(reference) for reference in _writes(instruction)], failure)
        if isinstance(instruction, Define):
            self._undefine(instruction.number)
            what = instruction.what
            self._definitions[instruction.number] = (
                CompiledKernel.void(what, failure) if isinstance(what, KernelSpec) else failure
            )
            if isinstance(what, Routine):
                self._owed[instruction.number] = groups_of(what)
        if isinstance(instruction, Vote):
            self._votes.abstain(instruction)
        if isinstance(instruction, Reduce | Gather | Broadcast | Send | FormGroup | Vote) and instruction.group:
            if self._stream is None or self._stream.failure is None:  # else it has been reported
                self._report(failure)
            self._groups.abandon(instruction.group, failure)

    def _note_written(self, instruction: Instruction) -> None:
        """Record the buffers that single instructions have written, as operations may go on whose tensors they use.

        A routine is not recorded: a trainer that loses a step goes back to a snapshot.
        """
        numbers: Sequence[int] = ()
        if isinstance(instruction, Replay | Perform):
            numbers = self._eager.changed(instruction)
        elif isinstance(instruction, Receive | Reduce | Gather | Broadcast | Call):
            numbers = _writes(instruction)
        if numbers:
            self._written.append((self.progress.executed, numbers))

    def _void_aborted(self) -> None:
        """Void what was written since the oldest operation of a group that has failed since the last message began.

        An operation that was aborted may have left any values, and what was computed from them is as undefined.
        """
        if not self._written:
            return
        begun = self._groups.oldest()
        try:
            self._groups.check_since(self._group_failures)
        except RankLost as error:
            failure, begun = describe_failure(error, "receive"), 0
            self._streams.stop(failure)
            for number in [number for _, numbers in self._written for number in numbers if number in self.store]:
                self.store.spoil(number, failure)
        self._written = [entry for entry in self._written if entry[0] >= begun] if begun else []

    # ---- one method for each instruction

    def _define(self, define: Define, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        what, deferred = define.what, None
        if isinstance(what, OptimizerSpec) and what.succeeds:
            there = define.number in self._definitions
            deferred = DeferredOptimizer(what, self._definition(define.number, NativeOptimizer) if there else None)
        self._undefine(define.number)
        if isinstance(what, StoredProgram):
            self._definitions[define.number] = self._device.load(what)
        elif isinstance(what, Routine):
            if any(reference < -what.bindings for step in what.steps for reference in references(step)):
                raise WireError(f"a routine refers to more than its {what.bindings} bindings")
            if any(getattr(step, "age", 0) < 0 for step in what.steps):
                raise WireError("an age below 0; allowed is 0 or more steps before the run's step")
            self._definitions[define.number] = what
        elif isinstance(what, KernelSpec | TapeSpec | GeneratorSpec):
            self._definitions[define.number] = self._eager.define(define.number, what)
        else:
            self._definitions[define.number] = optimizer = deferred or self._optimizer(what, frames)
            self.store.charge(optimizer.charged_bytes)
        return []

    def _undefine(self, number: int) -> None:
        gone = self._definitions.pop(number, None)
        self._owed.pop(number, None)
        self._updates.end(number)
        self._votes.forget(number)
        if isinstance(gone, NativeOptimizer | DeferredOptimizer):
            self.store.charge(-gone.charged_bytes)
            gone.close()
        if isinstance(gone, Routine):
            self._offloader.rest()

    def _optimizer(self, spec: OptimizerSpec, frames: Iterator[Any]) -> NativeOptimizer:
        state = [from_frame(one.value, next(frames)) for one in spec.state if isinstance(one.value, TensorSpec)]
        return self._device.optimizer(spec, self.store.many(spec.parameters), state, self.host)

    def _put(self, put: Put, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        packed = put.packed or ("",) * len(put.specs)
        for number, spec, codec in zip(put.buffers, put.specs, packed, strict=True):
            frame = next(frames)
            if codec:
                self.store.reserve(spec.size_bytes)  # before memory is allocated
                frame = unpack(codec, frame, spec.size_bytes)
            made = self._device.fill(spec, frame)
            if self.store.overflow is not None:
                made = self.store.overflow.own(made)
            if put.there:
                self._updates.overwrite(number, made, self._definitions.values())
            else:
                self.store.put(number, made)
        return []

    def _call(self, call: Call, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        tape, store = self._definition(call.program, CompiledProgram), self.store
        program, run = tape.program, self._run
        if len(call.inputs) != len(program.inputs) or len(call.outputs) != len(program.outputs):
            raise WireError(f"program {call.program} has other inputs or outputs than its call")
        if call.age < 0:
            raise WireError(f"an age of {call.age} steps; allowed is 0 or more")
        step = run.step - call.age
        numbers = [resolve(reference) for reference in call.inputs]
        inputs = store.many(numbers)
        if self._updates.versions:
            self._updates.versions.note(numbers, inputs, step)
        self._trace.ready()
        need = tape.footprint(call.takes)
        try:
            store.reserve(need.peak_bytes)
        except QuotaExceeded as error:
            peak = need.peak_operator
            raise OperatorFailed(program.operators[peak].name, "", peak) from error
        for position in call.takes:
            store.forget(numbers[position])

        outputs = self._replay(tape, inputs, run.seed, step, call.micro_batch)
        if outputs is None:
            outputs = self._interpret(tape, inputs, run.seed, step, call.micro_batch)
        if call.backward and self._numerics.present.check_nan:
            self._require_numbers(outputs)
        for reference, tensor in zip(call.outputs, outputs, strict=True):
            store.put(resolve(reference), tensor)
        return []

    def _require_numbers(self, gradients: Sequence[Tensor]) -> None:
        """Refuse elements that are not numbers, as PyTorch's anomaly detection does."""
        for position, tensor in enumerate(gradients):
            if (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any()):
                nan = RuntimeError(
                    f"a backward pass returned nan values in its {position}th output (anomaly detection)"
                )
                raise OperatorFailed("backward", describe([tensor])) from nan

    def _replay(
        self, tape: CompiledProgram, inputs: list[Tensor], seed: int, step: int, micro_batch: int
    ) -> list[Tensor] | None:
        """Run a program as a graph; return ``None`` if it has to be interpreted."""
        numerics = self._numerics.present
        if not numerics.cuda_graphs:
            return None
        return self.graphs.run(
            tape,
            inputs,
            lambda position: seed_of(seed, step, micro_batch, position),
            self.progress,
            self._room,
            numerics,
        )

    def _interpret(
        self, tape: CompiledProgram, inputs: list[Tensor], seed: int, step: int, micro_batch: int
    ) -> list[Tensor]:
        """Run a program operator by operator."""
        device = self._device
        try:
            return tape.laid_out(
                tape.run(inputs, lambda position: device.seed(seed, step, micro_batch, position), self.progress)
            )
        finally:
            device.unseed()
            self.progress.doing = "call"

    def _room(self) -> int | None:
        """Return the bytes that a captured program may take; ``None`` while a group's operations go on: a wait for the
        whole device would be one for a receive, whose tensor may depend on what this worker sends after it."""
        if self._groups.check():
            return None
        found = self._device.accelerator.memory()
        free_bytes = found.free_bytes + found.reserved_bytes - found.allocated_bytes
        within = self.store.room_bytes()
        return free_bytes if within is None else min(free_bytes, within)

    def _free(self, free: Free, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        for reference in free.buffers:
            self.store.forget(resolve(reference))
        for number in free.definitions:
            self._undefine(number)
        return []

    def _free_range(self, free: FreeRange, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        for number in self.store.within(free.first, free.end):
            self.store.forget(number)
        for number in [number for number in self._definitions if free.first <= number < free.end]:
            self._undefine(number)
        self._streams.end(free.first, free.end)
        ended = [number for number in self._bounds if free.first <= number < free.end]
        for number in ended:
            del self._bounds[number]
        if ended:
            self._apply_bounds()
        return []

    def _get(self, get: Get, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        tensors = []
        for number in map(resolve, get.buffers):
            tensors.append(rows_of(self._offloader.readable(number), get.first, get.rows))
            on_host = not self.store.here(number)  # where its memory may be used anew before the reply is sent
            self.frames_out.append(to_frame(tensors[-1].clone()) if on_host else self._device.read(tensors[-1]))
        return [Tensors(tuple(spec_of(tensor) for tensor in tensors))]

    def _copy_buffers(self, what: CopyBuffers, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        begin_ns = time.perf_counter_ns()
        stopped = self._streams.stopped(what.first, what.end)
        numbers, layouts, places = [], [], []
        storages: dict[int, int] = {}
        for number in self.store.within(what.first, what.end):
            try:
                tensor = self.store.present(number)
            except Poisoned:
                continue
            except RankLost:
                stopped = True
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = len(storages)
                self.frames_out.append(self._copied(storage))
            numbers.append(number)
            layouts.append(strided_of(tensor))
            places.append(storages[storage._cdata])
        took_ns = time.perf_counter_ns() - begin_ns
        return [BufferCopies(tuple(numbers), tuple(layouts), tuple(places), stopped, took_ns)]

    def _copied(self, storage: UntypedStorage) -> memoryview | Callable[[], memoryview]:
        """Return the bytes of a storage, wherever it is, as a frame that later writes do not change."""
        away = self._overflow.block(storage._cdata) if self._overflow is not None else None
        if away is not None:
            return to_frame(away.clone())
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        return self._device.read(whole if self._device.accelerator.asynchronous else whole.clone())

    def _bound_memory(self, bound: BoundMemory, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        self._bounds[bound.first] = bound
        self._apply_bounds()
        return []

    def _apply_bounds(self) -> None:
        """Hold to what streams have said of the device's memory: the least of their bounds."""
        store, bounds = self.store, self._bounds.values()
        ranges = {(bound.first, bound.end) for bound in bounds if bound.offload}
        if ranges and store.overflow is None and self._device.device.type != "meta":  # which has no elements
            store.overflow = self._overflow = Overflow(self._copies, self._offloader.blocks, self._before_update)
        most_bytes = self._quota_bytes
        if self._overflow is not None:
            self._overflow.ranges = ranges
            most_bytes = most_bytes or self._device.usable_bytes()
        asked = [bound.most_bytes for bound in bounds if bound.most_bytes]
        store.quota_bytes = min([*asked, *([most_bytes] if most_bytes else [])], default=0)

    def _run_on_slots(self, what: SlotInstruction, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        if isinstance(what, Recall) and isinstance(
            deferred := self._definitions.get(what.optimizer), DeferredOptimizer
        ):
            deferred.postponed.append(what)
            return []
        return self._snapshots.run(what, frames, self.frames_out)

    def _ask(self, ask: Ask, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        if ask.about in ("memory", "peak"):
            return [self._snapshots.memory(anew=ask.about == "peak")]
        if ask.about == "time":
            self._device.accelerator.synchronize()
            return [Scalars((time.monotonic(),))]
        if ask.about == "slots":
            return [self._snapshots.filled(ask.buffers)]
        if ask.about == "optimizer":
            entries, tensors = self._definition(ask.buffers[0], NativeOptimizer).state()
            self.frames_out += [self._device.read(tensor) for tensor in tensors]
            return [OptimizerState(tuple(entries))]
        numbers = [resolve(reference) for reference in ask.buffers]
        if ask.about == "filled":
            return [FilledSlots(tuple(number for number in numbers if self._is_filled(number)))]
        if ask.about == "digest":
            return [Digest(self._device.digest([self._offloader.readable(number) for number in numbers]))]
        return [self._device.scalars([self.store.get(number) for number in numbers])]

    def _is_filled(self, number: int) -> bool:
        try:
            self.store.get(number)
        except (Poisoned, RankLost, WireError):
            return False
        return True

    def _exchange(self, what: Communication, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        self._collectives.run(what, resolve, self._trace)
        return []

    def _move(self, what: Offload | Evict | Prefetch, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        self._offloader.run(what, [resolve(reference) for reference in what.buffers], self._trace)
        return []

    def _optimize(self, step: OptimizerStep, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        return self._updates.step(step, resolve, self._run, self._trace)

    def _branch(self, branch: Branch, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        deferred = self._definitions.get(branch.optimizer)
        if branch.behind and isinstance(deferred, DeferredOptimizer) and resolve is _same:
            self._updates.expect(branch, deferred.numbers)
            deferred.postponed.append(branch)
        else:
            self._updates.branch(branch, resolve)
        return []

    def _rename(self, rename: Rename, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        self._updates.rename(rename, resolve)
        return []

    def _vote(self, vote: Vote, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        self._votes.vote(vote, resolve)
        return []

    def _before_update(self) -> None:
        """Separate replies and copies from buffers that are about to be written in place."""
        self.frames_out = [frame if callable(frame) else bytes(frame) for frame in self.frames_out]
        self._snapshots.before_update()
        self._offloader.settle()

    def _run_eager(self, what: EagerWork, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        self._before_update()
        return self._eager.run(what)

    def _form(self, form: FormGroup, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        return [self._groups.form(form)]

    def _leave_group(self, leave: LeaveGroup, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        self._snapshots.leave(leave.group)
        self._groups.leave(leave.group)
        return []

    def _retime(self, retime: Retime, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        raise WireError(f"{self._device.name} cannot be of another speed; only a sim device can")

    def _set_numerics(self, what: SetNumerics, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        self._numerics.use(what)
        return []

    def _definition(self, number: int, kind: type[_Kind]) -> _Kind:
        found = self._definitions.get(number)
        if kind is NativeOptimizer and isinstance(found, DeferredOptimizer):
            found = self._create_deferred(number, found)
        if isinstance(found, kind):
            return found
        if isinstance(found, WorkerFailure):
            raise Poisoned(found)
        raise WireError(f"definition {number} is not there, or no {kind.__name__}")

    def _create_deferred(self, number: int, deferred: DeferredOptimizer) -> NativeOptimizer:
        """Create an optimizer whose creation was deferred until first use."""
        charged_bytes = deferred.charged_bytes
        self._definitions[number] = optimizer = deferred.make(self.store.many, self._device.optimizer, self.host)
        self.store.charge(optimizer.charged_bytes - charged_bytes)
        for instruction in deferred.postponed:
            self._handlers[type(instruction)](self, instruction, iter(()), _same)
        return optimizer

    _handlers: dict[type[Any], Callable[..., Sequence[Outcome]]] = {  # noqa: RUF012
        Define: _define,
        Put: _put,
        Call: _call,
        Free: _free,
        FreeRange: _free_range,
        Get: _get,
        CopyBuffers: _copy_buffers,
        BoundMemory: _bound_memory,
        Ask: _ask,
        **dict.fromkeys(get_args(Communication), _exchange),
        **dict.fromkeys((Offload, Evict, Prefetch), _move),
        OptimizerStep: _optimize,
        Branch: _branch,
        Rename: _rename,
        Vote: _vote,
        **dict.fromkeys(get_args(EagerWork), _run_eager),
        **dict.fromkeys(get_args(SlotInstruction), _run_on_slots),
        FormGroup: _form,
        LeaveGroup: _leave_group,
        Retime: _retime,
        SetNumerics: _set_numerics,
    }


def _same(reference: int) -> int:
    return reference


def _writes(instruction: Instruction) -> Sequence[int]:
    """Return the references of buffers that an instruction would write, or that would be lost without it."""
    match instruction:
        case Call():
            return instruction.outputs
        case OptimizerStep() | Branch():
            return (*instruction.previous, *instruction.ahead)
        case Rename():
            return instruction.into
        case Put() | Reduce() | Broadcast() | Fill() | Lay() | Offload() | Evict() | Prefetch():
            return instruction.buffers
        case Receive() | KeepGenerator():
            return (instruction.buffer,)
        case Gather():
            return (instruction.into,)
        case Vote():
            return instruction.buffers
        case _:
            return ()


def _is_exempt(instruction: Instruction) -> bool:
    """Return whether an instruction is executed in a stream that has stopped: a query that reads no elements."""
    return isinstance(instruction, Ask) and instruction.about in ("memory", "peak", "filled")


def _frame_count(instruction: Instruction) -> int:
    """Return the number of frames of its message that belong to an instruction."""
    if isinstance(instruction, Put):
        return len(instruction.specs)
    if isinstance(instruction, Write):
        return 1
    if isinstance(instruction, Define) and isinstance(instruction.what, OptimizerSpec):
        return sum(isinstance(entry.value, TensorSpec) for entry in instruction.what.state)
    return 0
