"""Calls of stored programs: execution of ``Call``."""

from __future__ import annotations

import time

from onebox.errors import WireError
from onebox.wire.protocol.instructions import Call
from onebox.wire.protocol.requests import Run
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.collectives import Resolve
from onebox.worker.memory.buffers import BufferStore, QuotaExceeded
from onebox.worker.optimizer.versions import ParameterVersions
from onebox.worker.programs.interpreter import CompiledProgram, OperatorFailed, WorkerProgress
from onebox.worker.trace import Trace


class ProgramCalls:
    """Executes ``Call``.

    Args:
        device: Device of the tensors.
        store: The buffers.
        versions: Notified of reads of parameters that have versions.
        progress: Notified of each operator, and of waits.
    """

    def __init__(
        self, device: ComputeDevice, store: BufferStore, versions: ParameterVersions, progress: WorkerProgress
    ) -> None:
        self._device = device
        self._store = store
        self._versions = versions
        self._progress = progress

    def run(self, call: Call, tape: CompiledProgram, resolve: Resolve, run: Run, trace: Trace) -> None:
        """Run a program.

        Args:
            call: The instruction.
            tape: Its program.
            resolve: Maps the numbers of its buffers.
            run: The message that it belongs to; its seed and step are those of random operators.
            trace: Notified when all inputs of the program are present.

        Raises:
            OperatorFailed: An operator failed, or the quota has no room for its results.
            Poisoned: An input is void.
            WireError: It does not match the program.
        """
        store, program = self._store, tape.program
        if len(call.inputs) != len(program.inputs) or len(call.outputs) != len(program.outputs):
            raise WireError(f"program {call.program} has other inputs or outputs than its call")
        if call.age < 0:
            raise WireError(f"an age of {call.age} steps; allowed is 0 or more")
        step = run.step - call.age
        numbers = [resolve(reference) for reference in call.inputs]
        inputs = store.many(numbers)
        if self._versions:
            self._versions.note(numbers, inputs, step)
        trace.ready()
        start_ns = time.monotonic_ns()
        need = tape.footprint(call.takes)
        try:
            store.reserve(need.peak_bytes)
        except QuotaExceeded as error:
            raise OperatorFailed(program.operators[need.peak_operator].name, "") from error
        for position in call.takes:
            store.forget(numbers[position])

        def seed(position: int) -> None:
            self._device.seed(run.seed, step, call.micro_batch, position)

        try:
            outputs = tape.laid_out(tape.run(inputs, seed, self._progress))
        finally:
            self._device.unseed()
        for reference, tensor in zip(call.outputs, outputs, strict=True):
            store.put(resolve(reference), tensor)
        self._device.pace(start_ns, tape.cost_s, self._progress)
