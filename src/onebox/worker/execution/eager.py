"""Eager operators on a worker: single calls, stored blocks of calls, and random number generators."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, FREE, BlockSpec, Complex, GeneratorSpec, KernelSpec, Strided, TensorSpec, spec_of
from onebox.wire.protocol.eager import DefaultType, EagerWork, KeepGenerator, Operate, Perform, Replay, SetGenerator
from onebox.wire.protocol.responses import OperatorResult, Result, WorkerFailure
from onebox.worker.comm.api import RankLost
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.errors import NoValues, describe_failure, require_device
from onebox.worker.memory.buffers import BufferStore, Poisoned, QuotaExceeded
from onebox.worker.programs.blocks import CompiledBlock, Void
from onebox.worker.programs.interpreter import OperatorFailed, describe
from onebox.worker.programs.kernels import CompiledKernel, flatten, strided_of, written_inputs
from onebox.worker.progress import WorkerProgress


class VoidKernel:
    """A kernel that could not be compiled: its calls are parsed, and void their outputs.

    Args:
        kernel: The kernel.
        failure: The reason.
    """

    def __init__(self, kernel: KernelSpec, failure: WorkerFailure) -> None:
        self.failure = failure
        self.name = kernel.name
        self.inputs = max(0, kernel.inputs)
        self.floats = max(0, kernel.floats)
        self.outputs = sum(out is not None for out in kernel.outs)
        self.writes = tuple(index for index in written_inputs(kernel) if index < self.inputs)


class Effects(NamedTuple):
    """Buffers that an instruction changes.

    Args:
        outputs: Those that it fills.
        written: Those that it may write to in place.
        freed: Those that it frees.
    """

    outputs: Sequence[int]
    written: Sequence[int]
    freed: Sequence[int]


class EagerExecutor:
    """Executes eager operators over the buffers of a worker.

    Args:
        device: The device.
        store: The buffers.
        definitions: Kernels, blocks and generators by number.
        progress: Incremented for each operator.
        fail: Called with each failure; ``new`` is false for a use of a void buffer.
    """

    def __init__(
        self,
        device: ComputeDevice,
        store: BufferStore,
        definitions: dict[int, Any],
        progress: WorkerProgress,
        fail: Callable[..., None],
    ) -> None:
        self._device = device
        self._store = store
        self._definitions = definitions
        self._progress = progress
        self._fail = fail

    def define(
        self, number: int, what: KernelSpec | BlockSpec | GeneratorSpec
    ) -> CompiledKernel | CompiledBlock | torch.Generator:
        """Compile a definition.

        Raises:
            WireError: It is invalid on this worker.
            Poisoned: A kernel of a block is void.
        """
        if number == FREE:
            raise WireError(f"{FREE} is the number of no definition: in calls it ends a buffer")
        if isinstance(what, KernelSpec):
            return CompiledKernel(what, self._device.device, self.generator)
        if isinstance(what, BlockSpec):
            return CompiledBlock(what, self._kernel)
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
        if isinstance(instruction, Operate):
            self.operate(instruction.calls, instruction.floats)
        elif isinstance(instruction, Replay):
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

    # ---- calls

    def operate(
        self, calls: Sequence[int], floats: Sequence[float], failure: WorkerFailure | None = None
    ) -> WorkerFailure | None:
        """Run operators in sequence, up to one that fails.

        Args:
            calls: The calls.
            floats: Their numbers.
            failure: The failure for which all of them are skipped, if any.

        Returns:
            The failure for which some of them were skipped.

        Raises:
            WireError: The calls are invalid.
        """
        definitions, forget = self._definitions, self._store.forget
        at = drawn = 0
        end = len(calls)
        while at < end:
            number = calls[at]
            if number == FREE and at + 1 < end:
                forget(calls[at + 1])
                at += 2
                continue
            kernel = definitions.get(number)
            if type(kernel) is not CompiledKernel and type(kernel) is not VoidKernel:
                raise WireError(f"a call of definition {number}, which is not there, or no kernel")
            middle = at + 1 + kernel.inputs
            stop, last = middle + kernel.outputs, drawn + kernel.floats
            if stop > end or last > len(floats):
                raise WireError(f"a call of {kernel.name} is cut short")
            inputs, outputs = calls[at + 1 : middle], calls[middle:stop]
            if failure is not None:
                self._skip_call(kernel, inputs, outputs, floats[drawn:last], failure)
            elif isinstance(kernel, VoidKernel):
                failure = kernel.failure
                self._fail(failure, new=False)
                self._store.void(outputs, failure)
            else:
                failure = self._call(kernel, inputs, outputs, floats[drawn:last])
            at, drawn = stop, last
        if drawn != len(floats):
            raise WireError(f"{len(floats)} numbers came for calls that take {drawn}")
        return failure

    def _call(
        self, kernel: CompiledKernel, inputs: Sequence[int], outputs: Sequence[int], floats: Sequence[float]
    ) -> WorkerFailure | None:
        """Run one operator; where it fails, void its outputs and return the failure."""
        progress, store = self._progress, self._store
        progress.executed += 1
        progress.doing = kernel.name
        values: list[Any] = []
        try:
            values += store.many(inputs)
            if floats:
                values += floats
            if kernel.constants:
                values += kernel.constants
            if kernel.new_bytes:  # it also writes to arguments, which a lack of memory must precede
                store.reserve(kernel.new_bytes)
            if kernel.resizes:
                self._reserve_growth(kernel, values)
            result = kernel.run(*kernel.pick(values))
            if outputs:
                for number, tensor in zip(outputs, kernel.kept(result), strict=True):
                    store.put(number, tensor)
            if kernel.resizes:
                self._recount(kernel, inputs)
            return None
        except Poisoned as error:
            failure = error.failure
            if not kernel.views:
                self._fail(failure, new=False)
        except Exception as error:
            if kernel.views and isinstance(error, RankLost):  # it reads no elements: who does so is told
                failure = describe_failure(error, kernel.name)
            else:
                failure = self._explain(error, kernel, values)
                self._void(kernel, inputs, outputs, failure)
                return failure
        store.void(outputs, failure)
        return None if kernel.views else failure

    def _skip_call(
        self,
        kernel: CompiledKernel | VoidKernel,
        inputs: Sequence[int],
        outputs: Sequence[int],
        floats: Sequence[float],
        failure: WorkerFailure,
    ) -> None:
        """Skip one operator and void its outputs.

        A view of a tensor that is not void is made: it has no elements of its own, and the script may keep it.
        """
        store = self._store
        if isinstance(kernel, CompiledKernel) and kernel.views:
            try:
                values = [*store.many(inputs), *floats, *kernel.constants]
                self._reserve_growth(kernel, values)
                result = kernel.run(*kernel.pick(values))
                for number, tensor in zip(outputs, kernel.kept(result) if outputs else (), strict=True):
                    store.put(number, tensor)
                self._recount(kernel, inputs)
                return
            except Exception as error:
                require_device(self._device, error, kernel.name)
        self._void(kernel, inputs, outputs, failure)

    def _void(
        self, kernel: CompiledKernel | VoidKernel, inputs: Sequence[int], outputs: Sequence[int], failure: WorkerFailure
    ) -> None:
        """Void the outputs of an operator, and a tensor of which the script has set another shape than there is."""
        self._store.void(outputs, failure)
        if isinstance(kernel, CompiledKernel) and kernel.views:
            self._store.void([inputs[index] for index in kernel.writes], failure)

    def _explain(self, error: Exception, kernel: CompiledKernel, arguments: Sequence[Any]) -> WorkerFailure:
        """Report an operator's exception, and return it as a failure; see :func:`require_device`."""
        if arguments or not isinstance(error, WireError):  # without arguments one of its buffers is not there
            error = self._blamed(error, kernel, arguments)
        require_device(self._device, error, kernel.name)
        failure = describe_failure(error, kernel.name)
        self._fail(failure)
        return failure

    def _blamed(self, error: Exception, kernel: CompiledKernel, arguments: Sequence[Any]) -> Exception:
        """Return an exception that names the operator, or states that it needs values on a device without them."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if kernel.needs_values and self._device.device.type == "meta":
            return NoValues(spec_of(tensors[0]) if tensors else TensorSpec("float32", ()))
        failed = OperatorFailed(kernel.name, describe(tensors))
        failed.__cause__ = error
        return failed

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
        store, progress = self._store, self._progress
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
            raise self._blamed(error, kernel, tensors) from error

    def _reserve_growth(self, kernel: CompiledKernel, values: Sequence[Any]) -> None:
        """Require room for what ``resize_`` will allocate.

        Raises:
            QuotaExceeded: There is none.
        """
        if kernel.name.split(".")[1] not in ("resize_", "resize_as_"):
            return
        target, size = kernel.pick(values)[:2]
        shape = size.shape if isinstance(size, Tensor) else size
        end = target.storage_offset() + math.prod(shape)
        self._store.reserve(max(0, end * target.itemsize - target.untyped_storage().nbytes()))

    def _recount(self, kernel: CompiledKernel, inputs: Sequence[int]) -> None:
        """Update the memory count of inputs whose storages a kernel may have changed."""
        for index in kernel.resizes:
            self._store.recount(inputs[index])

    # ---- blocks

    def replay(self, replay: Replay) -> None:
        """Run a stored block; the first run counts memory operator by operator, later ones as a whole.

        Raises:
            Poisoned: The block is void.
            WireError: The block does not exist, or has other inputs, outputs or numbers.
        """
        compiled, store = self._checked_block(replay), self._store
        block, inputs = compiled.block, replay.inputs
        if compiled.peak_bytes < 0:
            failure, peak_bytes = store.peak_of(lambda: self._replay_counted(compiled, replay))
            compiled.peak_bytes = peak_bytes if failure is None else -1
            return
        try:
            store.reserve(compiled.peak_bytes)
            tensors = store.many(inputs)
        except (QuotaExceeded, Poisoned, WireError):
            self._replay_counted(compiled, replay)  # finds the operator that fails
            return
        registers = compiled.run(
            tensors, replay.floats, self._progress, lambda slot: store.forget(inputs[slot]), self._explain
        )
        for slot in compiled.resizes:
            store.recount(inputs[slot])
        for number, slot in zip(replay.outputs, block.outputs, strict=True):
            self._keep(number, registers[slot])

    def _checked_block(self, replay: Replay) -> CompiledBlock:
        compiled, inputs = self._block(replay.block), replay.inputs
        block = compiled.block
        if (len(inputs), len(replay.outputs), len(replay.floats)) != (block.inputs, len(block.outputs), block.floats):
            raise WireError(f"block {replay.block} has other inputs, outputs or numbers than its replay")
        if len(set(inputs)) != len(inputs):
            raise WireError(f"a replay of block {replay.block} brings a buffer twice")
        return compiled

    def _replay_counted(
        self, compiled: CompiledBlock, replay: Replay, failure: WorkerFailure | None = None
    ) -> WorkerFailure | None:
        """Run a block as single calls, whose slots are buffers with negative numbers; see :meth:`operate`."""
        store, given, count = self._store, replay.inputs, len(replay.inputs)

        def number(slot: int) -> int:
            return given[slot] if slot < count else -1 - slot

        for slot in compiled.begins:
            store.forget(number(slot))
        for step in compiled.steps:
            numbers = replay.floats[step.floats : step.floats + step.kernel.floats]
            inputs = [number(slot) for slot in step.slots]
            outputs = [number(slot) for slot in range(step.first, step.stop)]
            if failure is None:
                failure = self._call(step.kernel, inputs, outputs, numbers)
            else:
                self._skip_call(step.kernel, inputs, outputs, numbers, failure)
            for slot in step.dies:
                store.forget(number(slot))
        kept = [self._held(number(slot)) for slot in compiled.block.outputs]
        for target, value in zip(replay.outputs, kept, strict=True):
            self._keep(target, value)
        for step in compiled.steps:
            for slot in range(step.first, step.stop):
                store.forget(number(slot))
        return failure

    def _held(self, number: int) -> Any:
        try:
            return self._store.get(number)
        except Poisoned as error:
            return Void(error.failure)

    def _keep(self, number: int, value: Any) -> None:
        if isinstance(value, Void):
            self._store.void([number], value.failure)
        else:
            self._store.put(number, value)

    # ---- skipped instructions

    def skip(self, instruction: Operate | Replay | Perform, failure: WorkerFailure) -> None:
        """Void the outputs of an instruction that does not run, and free the buffers that it would have freed."""
        store = self._store
        with contextlib.suppress(WireError, Poisoned):
            if isinstance(instruction, Operate):
                self.operate(instruction.calls, instruction.floats, failure)
                return
            if isinstance(instruction, Replay):
                self._replay_counted(self._checked_block(instruction), instruction, failure)
                return
        effects = self.effects(instruction)
        store.void(effects.outputs, failure)
        for number in effects.freed:
            store.forget(number)

    def effects(self, instruction: Operate | Replay | Perform) -> Effects:
        """Return the buffers that an instruction changes."""
        if isinstance(instruction, Operate):
            return self._effects_of_calls(instruction.calls)
        if isinstance(instruction, Perform):
            named = [index for index in written_inputs(instruction.kernel) if index < len(instruction.inputs)]
            return Effects((instruction.first,), [instruction.inputs[index] for index in named], ())
        found, given = self._definitions.get(instruction.block), instruction.inputs
        freed, written = found.skip() if isinstance(found, CompiledBlock) else ([], list(range(len(given))))
        buffers = [[given[slot] for slot in slots if slot < len(given)] for slots in (written, freed)]
        return Effects(instruction.outputs, *buffers)

    def _effects_of_calls(self, calls: Sequence[int]) -> Effects:
        outputs, written, freed, at = list[int](), list[int](), list[int](), 0
        while at + 1 < len(calls):
            kernel = self._definitions.get(calls[at])
            if calls[at] == FREE:
                freed.append(calls[at + 1])
                at += 2
            elif isinstance(kernel, CompiledKernel | VoidKernel):
                middle = at + 1 + kernel.inputs
                stop = middle + kernel.outputs
                if stop <= len(calls):
                    outputs += calls[middle:stop]
                    written += [calls[at + 1 + index] for index in kernel.writes]
                at = stop
            else:
                break
        return Effects(outputs, written, freed)

    # ---- definitions

    def _kernel(self, number: int) -> CompiledKernel:
        found = self._definitions.get(number)
        if isinstance(found, VoidKernel):
            raise Poisoned(found.failure)
        if not isinstance(found, CompiledKernel):
            raise WireError(f"a call of definition {number}, which is not there, or no kernel")
        return found

    def _block(self, number: int) -> CompiledBlock:
        found = self._definitions.get(number)
        if isinstance(found, WorkerFailure):
            raise Poisoned(found)
        if not isinstance(found, CompiledBlock):
            raise WireError(f"definition {number} is not there, or no block")
        return found


def _encoded_result(result: Any) -> Strided | Complex | bool | int | float | None:
    """Return an operator's result in wire form."""
    if isinstance(result, Tensor):
        return strided_of(result)
    if isinstance(result, complex):
        return Complex(result.real, result.imag)
    if result is None or isinstance(result, bool | int | float):
        return result
    raise TypeError(f"it returned a {type(result).__name__}, which does not travel")
