"""The ledger: the memory of a worker over a step, followed through its routine without running it. Pure.

It does what the worker's buffer store does (:class:`onebox.worker.store.BufferStore`): a storage counts once, however
many buffers view it; a program needs its footprint on top of what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onebox.cost import footprint, owners
from onebox.engine.routine import StepRoutine
from onebox.wire import Program, TensorSpec, specs_by_slot
from onebox.wire.messages import Call, Free, Gather, Receive, Reduce, Routine, Step, StoredProgram


def peak_of(
    routine: StepRoutine,
    *,
    held: Mapping[int, int],
    leaves: Mapping[tuple[int, int], int],
    optimizer_bytes: int,
) -> int:
    """Return the most bytes that a worker uses at any time of a step, after the first.

    Args:
        routine: The worker's routine.
        held: Bytes of the buffers that are there all the time, by number: parameters, buffers, constants.
        leaves: Bytes of each (micro-batch, tensor of inputs and targets) that the routine is given.
        optimizer_bytes: The optimizer's state.
    """
    ledger = _Ledger(optimizer_bytes)
    for number, size_bytes in held.items():
        ledger.fill(number, size_bytes)
    for number, (_, spec) in routine.constants.items():
        ledger.fill(number, spec.size_bytes)
    for index, leaf in enumerate(routine.leaves):
        ledger.fill(-1 - index, leaves[leaf])
    programs = {d.number: d.what.program for d in routine.definitions if isinstance(d.what, StoredProgram)}
    (steps,) = (d.what.steps for d in routine.definitions if isinstance(d.what, Routine))
    for step in steps:
        ledger.follow(step, programs)
    return ledger.peak_bytes


class _Ledger:
    """Buffers and their storages."""

    def __init__(self, charged_bytes: int) -> None:
        self.used_bytes = charged_bytes
        self.peak_bytes = charged_bytes
        self._storage: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._views: dict[int, int] = {}
        self._next = 0

    def follow(self, step: Step, programs: Mapping[int, Program]) -> None:
        """Take note of an instruction."""
        match step:
            case Call():
                self._call(step, programs[step.program])
            case Free():
                self._forget(step.buffers)
            case Reduce():
                sums = sum(self._sizes[self._storage[number]] for number in step.buffers)
                self.peak_bytes = max(self.peak_bytes, self.used_bytes + sums)
            case Receive():
                self.fill(step.buffer, step.spec.size_bytes)
            case Gather():
                self.fill(step.into, step.spec.size_bytes)
            case _:  # the others fill no buffer, or one that is there
                pass

    def fill(self, number: int, size_bytes: int) -> None:
        """Fill a buffer with a storage of its own."""
        self._next += 1
        self._put(number, self._next, size_bytes)

    def _call(self, call: Call, program: Program) -> None:
        need = footprint(program, call.takes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + need.peak_bytes)
        owner = owners(program)
        specs: Mapping[int, TensorSpec] = specs_by_slot(program)
        given = [self._storage[number] for number in call.inputs]
        sizes = [self._sizes[storage] for storage in given]
        self._forget(call.inputs[place] for place in call.takes)
        made: dict[int, int] = {}
        for number, slot in zip(call.outputs, program.outputs, strict=True):
            source = owner[slot]
            if source < len(given):
                self._put(number, given[source], sizes[source])
                continue
            if source not in made:
                self._next += 1
                made[source] = self._next
            self._put(number, made[source], specs[source].size_bytes)

    def _put(self, number: int, storage: int, size_bytes: int) -> None:
        self._forget((number,))
        if not self._views.get(storage):
            self.used_bytes += size_bytes
            self._sizes[storage] = size_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._views[storage] = self._views.get(storage, 0) + 1
        self._storage[number] = storage

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            storage = self._storage.pop(number, None)
            if storage is None:
                continue
            self._views[storage] -= 1
            if not self._views[storage]:
                self.used_bytes -= self._sizes[storage]
