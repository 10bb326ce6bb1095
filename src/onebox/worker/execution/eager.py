"""Eager operators on a worker: batches of calls, single calls that are answered, and random number generators."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, FREE, Complex, GeneratorSpec, KernelSpec, Strided, TapeSpec, TensorSpec, spec_of
from onebox.wire.protocol.eager import DefaultType, EagerWork, KeepGenerator, Perform, Replay, SetGenerator
from onebox.wire.protocol.responses import OperatorResult, Result, WorkerFailure
from onebox.worker.comm.api import RankLost
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.errors import NoValues, describe_failure, require_device
from onebox.worker.memory.buffers import BufferStore, Poisoned, QuotaExceeded
from onebox.worker.programs.interpreter import OperatorFailed, describe
from onebox.worker.programs.kernels import CompiledKernel, flatten, strided_of, written_inputs
from onebox.worker.programs.tape import CompiledTape, Row, Step, Void, execute, tensors_of, void_among
from onebox.worker.progress import WorkerProgress


@dataclass(frozen=True, slots=True)
class EagerContext:
    """The parts of a worker that eager operators use.

    Args:
        device: The device.
        store: The buffers.
        progress: Incremented for each operator.
        fail: Called with each failure; ``new`` is false for a use of a void buffer.
    """

    device: ComputeDevice
    store: BufferStore
    progress: WorkerProgress
    fail: Callable[..., None]

    def explain(self, error: Exception, kernel: CompiledKernel, arguments: Sequence[Any]) -> WorkerFailure:
        """Report an operator's exception, and return it as a failure; see :func:`require_device`."""
        if arguments or not isinstance(error, WireError):  # without arguments one of its buffers is not there
            error = self.blamed(error, kernel, arguments)
        require_device(self.device, error, kernel.name)
        failure = describe_failure(error, kernel.name)
        self.fail(failure)
        return failure

    def blamed(self, error: Exception, kernel: CompiledKernel, arguments: Sequence[Any]) -> Exception:
        """Return an exception that names the operator, or states that it needs values on a device without them."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if kernel.needs_values and self.device.device.type == "meta":
            return NoValues(spec_of(tensors[0]) if tensors else TensorSpec("float32", ()))
        with contextlib.suppress(RuntimeError):  # the error itself, where a view could not be made
            tensors = kernel.seen(tensors)
        failed = OperatorFailed(kernel.name, describe(tensors))
        failed.__cause__ = error
        return failed


class EagerExecutor:
    """Executes eager operators over the buffers of a worker.

    Args:
        context: The parts of the worker that it uses.
        definitions: Kernels, tapes and generators by number.
    """

    def __init__(self, context: EagerContext, definitions: dict[int, Any]) -> None:
        self._context = context
        self._device, self._store = context.device, context.store
        self._definitions = definitions

    def define(
        self, number: int, what: KernelSpec | TapeSpec | GeneratorSpec
    ) -> CompiledKernel | CompiledTape | torch.Generator:
        """Compile a definition.

        Raises:
            WireError: It is invalid on this worker.
        """
        if number == FREE:
            raise WireError(f"{FREE} is the number of no definition: in calls it frees a slot")
        if isinstance(what, KernelSpec):
            return CompiledKernel(what, self._device.device, self.generator)
        if isinstance(what, TapeSpec):
            return CompiledTape(what, self._kernel)
        return self._device.new_generator(what.seed)

    def generator(self, number: int) -> torch.Generator:
        """Return a random number generator; 0 is the device's own.

        Raises:
            Poisoned: It could not be defined.
            WireError: There is none.
        """
        found = self._definitions.get(number) if number else self._device.accelerator.generator
        if isinstance(found, WorkerFailure):
            raise Poisoned(found)
        if not isinstance(found, torch.Generator):
            raise WireError(f"definition {number} is not there, or no generator")
        return found

    def run(self, instruction: EagerWork) -> list[Result]:
        """Execute an instruction and return its replies; raises the errors of the methods that it calls."""
        if isinstance(instruction, Replay):
            self.replay(instruction)
        elif isinstance(instruction, Perform):
            return [self.perform(instruction)]
        elif isinstance(instruction, KeepGenerator):
            self._keep_generator(instruction)
        elif isinstance(instruction, DefaultType):
            torch.set_default_dtype(DTYPES[instruction.dtype])
        else:
            self._set_generator(instruction)
        return []

    def _set_generator(self, instruction: SetGenerator) -> None:
        """Seed a generator or restore its state."""
        generator = self.generator(instruction.generator)
        if instruction.seed is not None:
            generator.manual_seed(instruction.seed)
            return
        state = self._store.get(instruction.buffer)
        if state.device.type != "meta":  # a device without values draws no random numbers
            generator.set_state(self._device.accelerator.to_host(state))

    def _keep_generator(self, instruction: KeepGenerator) -> None:
        state = self.generator(instruction.generator).get_state()
        self._store.put(instruction.buffer, self._device.accelerator.to_device(state))

    # ---- batches

    def replay(self, replay: Replay, failure: WorkerFailure | None = None) -> None:
        """Run a batch of calls, up to one that fails; views of what exists are made after it, too.

        Args:
            replay: The batch.
            failure: The failure for which all its calls are skipped, if any.

        Raises:
            Poisoned: The batch is void.
            WireError: It does not exist, or has other inputs, outputs or numbers.
        """
        store, inputs = self._store, replay.inputs
        for number in replay.frees:
            store.forget(number)
        tape = self._tape(replay)
        contents: list[Any]
        fits = True
        try:
            contents, void = store.many(inputs), failure is not None
        except (Poisoned, WireError, RankLost):
            contents, void = [self._content(number) for number in inputs], True
        except QuotaExceeded:  # not all at once: each operator brings what it uses
            contents, void, fits = [store.present(number) for number in inputs], failure is not None, False
        run = TapeRun(self._context, tape, replay, void, failure)
        whole = fits and not void and tape.peak_bytes >= 0
        if whole:
            try:
                store.reserve(tape.peak_bytes)
            except QuotaExceeded:  # the operator is found at which there is no room
                whole = False
        if whole:
            run.run(contents)
            return
        run.count()
        moves = store.overflow.moves if store.overflow is not None else 0
        _, peak_bytes = store.peak_of(lambda: run.run(contents))
        still = store.overflow is None or (fits and store.overflow.moves == moves)
        if run.failure is None and not void and still:
            tape.peak_bytes = peak_bytes

    def _content(self, number: int) -> Any:
        try:
            return self._store.present(number)
        except (Poisoned, WireError, RankLost) as error:
            return Void(error)

    # ---- single operators with unpredicted results

    def perform(self, instruction: Perform) -> OperatorResult:
        """Run one operator and return its results; after an error its arguments are as the operator left them.

        Raises:
            Poisoned: An input is void.
            NoValues: Its result depends on values, on a device without them.
            OperatorFailed: It failed.
            WireError: The instruction is invalid.
        """
        if instruction.kernel.outs:
            raise WireError(f"{instruction.kernel.name} must not declare outputs: Perform returns them")
        kernel = CompiledKernel(instruction.kernel, self._device.device, self.generator)
        inputs, floats = instruction.inputs, instruction.floats
        if len(inputs) != kernel.inputs or len(floats) != kernel.floats:
            raise WireError(f"{kernel.name} takes {kernel.inputs} tensors and {kernel.floats} numbers")
        store, progress = self._store, self._context.progress
        tensors = store.many(inputs)
        progress.executed += 1
        progress.doing = kernel.name
        try:
            made = kernel.run(*kernel.pick([*tensors, *floats, *kernel.constants]))
            results = flatten(made) if kernel.returns else []
            for number, result in enumerate(results, instruction.first):
                if isinstance(result, Tensor):
                    store.put(number, result)
            self._recount(kernel, inputs)
            return OperatorResult(tuple(map(_encoded_result, results)), tuple(map(strided_of, tensors)))
        except Exception as error:
            with contextlib.suppress(QuotaExceeded):
                self._recount(kernel, inputs)
            raise self._context.blamed(error, kernel, tensors) from error

    def _recount(self, kernel: CompiledKernel, inputs: Sequence[int]) -> None:
        """Update the memory count of inputs whose storages a kernel may have changed."""
        for index in kernel.resizes:
            self._store.recount(inputs[index])

    def _tape(self, replay: Replay) -> CompiledTape:
        """Return the batch of a replay that fits it."""
        found, inputs = self._definitions.get(replay.tape), replay.inputs
        if isinstance(found, WorkerFailure):
            raise Poisoned(found)
        if not isinstance(found, CompiledTape):
            raise WireError(f"definition {replay.tape} is not there, or no tape")
        expected = found.spec.inputs, len(found.outputs), found.spec.floats
        if (len(inputs), len(replay.outputs), len(replay.floats)) != expected:
            raise WireError(f"tape {replay.tape} has other inputs, outputs or numbers than its replay")
        if len({*inputs, *replay.outputs}) != len(inputs) + len(replay.outputs):
            raise WireError(f"a replay of tape {replay.tape} names a buffer twice")
        return found

    def _kernel(self, number: int) -> CompiledKernel:
        found = self._definitions.get(number)
        if not isinstance(found, CompiledKernel):
            raise WireError(f"a call of definition {number}, which is not there, or no kernel")
        return found

    # ---- skipped instructions

    def skip(self, instruction: Replay | Perform, failure: WorkerFailure) -> None:
        """Void the outputs of an instruction that does not run, and free the buffers that it would have freed."""
        if isinstance(instruction, Replay):
            with contextlib.suppress(WireError, Poisoned):
                self.replay(instruction, failure)
                return
        self._store.void(instruction.outputs if isinstance(instruction, Replay) else (instruction.first,), failure)

    def changed(self, instruction: Replay | Perform) -> list[int]:
        """Return the buffers that an instruction fills or may write to."""
        given = instruction.inputs
        made: Sequence[int]
        written: Iterable[int]
        if isinstance(instruction, Perform):
            made, written = (instruction.first,), written_inputs(instruction.kernel)
        else:
            tape = self._definitions.get(instruction.tape)
            made = instruction.outputs
            written = tape.writes() if isinstance(tape, CompiledTape) else range(len(given))
        return [*made, *(given[index] for index in written if index < len(given))]


class TapeRun:
    """A run of a batch of calls.

    Args:
        context: The parts of the worker that it uses.
        tape: The batch.
        replay: Its buffers and numbers.
        void: Whether a call may have to be skipped: one of its inputs does not exist, or all calls are skipped.
        failure: The failure for which calls are skipped, if any.
    """

    __slots__ = ("_context", "_numbers", "_replay", "_store", "_tape", "_void", "failure")

    def __init__(
        self, context: EagerContext, tape: CompiledTape, replay: Replay, void: bool, failure: WorkerFailure | None
    ) -> None:
        self.failure = failure
        self._context, self._store = context, context.store
        self._tape, self._replay, self._void = tape, replay, void
        self._numbers: list[int] = []  # the buffer of each slot

    def count(self) -> None:
        """Count memory operator by operator, rather than as a whole: in buffers with negative numbers."""
        tape, replay = self._tape, self._replay
        self._numbers = [-1 - slot for slot in range(tape.filled)]
        for slot, number in zip(tape.outputs, replay.outputs, strict=True):
            self._numbers[slot] = number
        self._numbers += reversed(replay.inputs)

    def run(self, contents: list[Any]) -> None:
        """Run it over the contents of its inputs; the list is emptied."""
        tape, store, inputs = self._tape, self._store, self._replay.inputs
        registers = tape.registers(contents, self._replay.floats)
        if not self._numbers:
            for index in tape.ends:  # the registers have them
                store.forget(inputs[index])
        steps: Iterable[Row] = tape.steps
        if self._void or (self._numbers and store.overflow is not None):
            steps = map(self._guarded, steps)
        elif self._numbers and tape.reserving:
            steps = list(steps)
            for number in tape.reserving:
                steps[number] = self._guarded(steps[number])
        rest = iter(steps)
        progress, after = self._context.progress, self._counted if self._numbers else None
        if not execute(rest, registers, progress, self._failed, after=after):
            execute(map(self._guarded, rest), registers, WorkerProgress(), self._failed, after=after)
        if not self._numbers:
            for index in tape.resizes:
                store.recount(inputs[index])
        for number, slot in zip(self._replay.outputs, tape.outputs, strict=True):
            made = registers[slot]
            if isinstance(made, Void):
                assert isinstance(made.error, Poisoned)
                store.void([number], made.error.failure)
            elif not self._numbers:
                store.put(number, made)

    def _guarded(self, row: Row) -> Row:
        """Return a call that raises where it is skipped, reads what does not exist, or lacks memory."""
        step, store = Step._make(row), self._store
        kernel = step.kernel

        def pick(registers: list[Any]) -> Sequence[Any]:
            if self.failure is not None and not kernel.views:
                raise Poisoned(self.failure)
            missing = void_among(step, registers)
            if missing is not None:
                raise missing.error
            if store.overflow is not None:
                store.overflow.begin()
                store.use(tensors_of(step, registers))
            arguments = step.pick(registers)
            if kernel.new_bytes:  # it also writes to arguments, which a lack of memory must precede
                store.reserve(kernel.new_bytes)
            if kernel.name.split(".")[1] in ("resize_", "resize_as_"):
                store.reserve(_growth_bytes(*arguments[:2]))
            return arguments

        return step._replace(pick=pick)

    def _counted(self, row: Row, registers: list[Any]) -> None:
        """Count what a call has made, and no longer what it was the last to use."""
        _, _, _, _, dies, _, _, _, slots, first, stop, kernel = row
        store, numbers = self._store, self._numbers
        for slot in range(first, stop):
            store.put(numbers[slot], registers[slot])
        if kernel.resizes:
            for index in kernel.resizes:
                store.recount(numbers[slots[index]])
        for slot in dies:
            store.forget(numbers[slot])

    def _failed(self, row: Row, registers: list[Any], error: Exception) -> bool:
        """Void what a call would have made, and return whether the calls after it are skipped for it.

        A view reads no elements: who does so is told of the failure. One that is not made changes no shape, which the
        script does not know.
        """
        step, failure = Step._make(row), self.failure
        kernel = step.kernel
        views, stops = kernel.views, failure is None
        if failure is not None:
            if not isinstance(error, Poisoned):
                require_device(self._context.device, error, kernel.name)
        elif isinstance(error, Poisoned):
            failure = error.failure
            stops, views = not views, False
            if stops:
                self._context.fail(failure, new=False)
        elif views and isinstance(error, RankLost):
            failure = describe_failure(error, kernel.name)
            stops = views = False
        else:
            there = void_among(step, registers) is None
            failure = self._context.explain(error, kernel, tensors_of(step, registers) if there else ())
        mark = Void(Poisoned(failure))
        lost = [*range(step.first, step.stop), *([step.slots[index] for index in kernel.writes] if views else ())]
        for slot in lost:
            registers[slot] = mark
        self._store.void([self._replay.inputs[-1 - slot] for slot in lost if slot < 0], failure)
        if self._numbers:
            for slot in (*range(step.first, step.stop), *step.dies):
                self._store.forget(self._numbers[slot])
        if stops:
            self.failure = failure
        return stops


def _growth_bytes(target: Tensor, size: Any) -> int:
    """Return the bytes that ``resize_`` will allocate."""
    end = target.storage_offset() + math.prod(size.shape if isinstance(size, Tensor) else size)
    return max(0, int(end) * target.itemsize - target.untyped_storage().nbytes())


def _encoded_result(result: Any) -> Strided | Complex | bool | int | float | None:
    """Return an operator's result in wire form."""
    if isinstance(result, Tensor):
        return strided_of(result)
    if isinstance(result, complex):
        return Complex(result.real, result.imag)
    if result is None or isinstance(result, bool | int | float):
        return result
    raise TypeError(f"it returned a {type(result).__name__}, which does not travel")
