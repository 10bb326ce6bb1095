"""Calls of stored programs: what a worker does at ``Call``."""

from __future__ import annotations

import time

from onebox.errors import WireError
from onebox.wire.protocol.instructions import Call
from onebox.wire.protocol.requests import Run
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.collectives import Resolve
from onebox.worker.memory.buffers import BufferStore, QuotaExceeded
from onebox.worker.optimizer.versions import ParameterVersions
from onebox.worker.programs.interpreter import CompiledProgram, OperatorFailed
from onebox.worker.progress import WorkerProgress
from onebox.worker.trace import Trace


class ProgramCalls:
    """Carries out ``Call``.

    Args:
        device: Where tensors live.
        store: The buffers.
        versions: Told what is read of parameters that have versions.
        progress: Told of each operator, and that the worker waits.
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
            resolve: Finds the numbers of its buffers.
            run: What it is a part of; its seed and step are those of random operators.
            trace: Told when all that the program reads is there.

        Raises:
            OperatorFailed: An operator did, or the quota has no room for what one of them makes.
            Poisoned: Something that it reads is void.
            WireError: It does not fit the program.
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
