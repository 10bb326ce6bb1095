"""Memory simulator: the memory of a worker over a step, followed through its routine without running it. Pure.

It mirrors the worker's buffer store (:class:`onebox.worker.memory.buffers.BufferStore`): a storage counts once, however
many buffers view it; a program needs its footprint in addition to the existing buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from onebox.cost import footprint, owners
from onebox.engine.compile.routine import StepRoutine
from onebox.wire import Program, TensorSpec, specs_by_slot
from onebox.wire.protocol.instructions import (
    Broadcast,
    Call,
    Evict,
    Free,
    Gather,
    Offload,
    OptimizerStep,
    Prefetch,
    Receive,
    Reduce,
    Rename,
    Step,
    Vote,
)


@dataclass(frozen=True)
class PersistentBuffer:
    """A permanent buffer.

    Args:
        what: ``parameter`` or ``buffer``, of the model or the loss; ``constant``, of the graph; or ``residual``, of a
            lossy codec.
        name: Its name, if it has one.
        size_bytes: Its bytes.
    """

    what: Literal["parameter", "buffer", "constant", "residual"]
    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class InitialContents:
    """Memory contents of a worker at the beginning of a step, after the first.

    Args:
        routine: The worker's routine.
        held: The permanent buffers, by number.
        leaves: Bytes of each (micro-batch, leaf of inputs and targets) of the routine.
        gradients: The parameter of each gradient buffer, by number.
        optimizer_bytes: Bytes of the optimizer's state.
        ranks: The worker's rank in each of its groups.
        host_bytes: Permanent bytes in the host's memory: state of an optimizer on the host.
        earlier: Routines that ran before, if the routine continues from their state.
        versions: Maps each buffer of a parameter version to the one that it is swapped with in an update.
    """

    routine: StepRoutine
    held: Mapping[int, PersistentBuffer]
    leaves: Mapping[tuple[int, int], int]
    gradients: Mapping[int, str]
    optimizer_bytes: int
    host_bytes: int = 0
    ranks: Mapping[int, int] = field(default_factory=dict)
    earlier: tuple[StepRoutine, ...] = ()
    versions: Mapping[int, int] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The instructions of the routine."""
        return self.routine.steps

    @property
    def programs(self) -> dict[int, Program]:
        """The programs that they call, by number."""
        return self.routine.programs


def peaks_of(contents: InitialContents) -> tuple[int, int]:
    """Return the peak bytes of a worker in a step, and the offloaded bytes in host memory at that moment."""
    peaks = [(ledger.peak_bytes, ledger.host_peak_bytes) for ledger in simulate_memory(contents)]
    return max(peak for peak, _ in peaks), peaks[-1][1]


def peak_of(contents: InitialContents) -> int:
    """Return the peak bytes of a worker in a step."""
    return peaks_of(contents)[0]


def simulate_memory(contents: InitialContents) -> Iterator[MemorySimulator]:
    """Simulate a step: yield the simulator before the first instruction, and after each.

    The same object is yielded each time; its peak is that of the latest instruction.
    """
    ledger = MemorySimulator(contents.optimizer_bytes, contents.ranks, contents.versions)
    for number, held in contents.held.items():
        ledger.fill(number, held.size_bytes)
    programs = contents.programs
    for routine in contents.earlier:
        ledger.begin(routine, contents.leaves)
        for step in routine.steps:
            ledger.follow(step, programs)
    ledger.begin(contents.routine, contents.leaves)
    yield ledger
    for number, step in enumerate(contents.steps):
        ledger.peak_bytes, ledger.instruction = ledger.used_bytes, number
        ledger.follow(step, programs)
        yield ledger


@dataclass(eq=False)
class _Copy:
    """A storage copied to the host's memory.

    Args:
        storage: Its number on the device.
        size_bytes: Its bytes.
        buffers: Buffers that will be views of it after its return.
    """

    storage: int
    size_bytes: int
    buffers: set[int]


class MemorySimulator:
    """Buffers and storages of a worker, and the present and peak bytes in the host's memory.

    Args:
        charged_bytes: Bytes besides buffers.
        ranks: The worker's rank in each of its groups.
        versions: Maps each buffer of a parameter version to the one that it is swapped with in an update.
    """

    def __init__(
        self,
        charged_bytes: int,
        ranks: Mapping[int, int] = MappingProxyType({}),
        versions: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._ranks = ranks
        self._versions = versions
        self.used_bytes = charged_bytes
        self.peak_bytes = charged_bytes
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self.instruction = -1
        self.origins: dict[int, tuple[int, int | None]] = {}  # by storage: its instruction, and the slot of a call
        self._storage: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._views: dict[int, int] = {}
        self._away: dict[int, _Copy] = {}
        self._programs: dict[tuple[int, tuple[int, ...]], tuple[int, Mapping[int, int], Mapping[int, TensorSpec]]] = {}
        self._next = 0

    def begin(self, routine: StepRoutine, leaves: Mapping[tuple[int, int], int]) -> None:
        """Add the inputs of a routine; existing storages are marked as made before it."""
        self.origins = dict.fromkeys(self.origins, (-1, None))
        self.instruction = -1
        for number, (_, spec) in routine.constants.items():
            self.fill(number, spec.size_bytes)
        for index, leaf in enumerate(routine.leaves):
            self.fill(-1 - index, leaves[leaf])
        self.peak_bytes, self.host_peak_bytes = self.used_bytes, self.host_bytes

    def follow(self, step: Step, programs: Mapping[int, Program]) -> None:
        """Apply an instruction."""
        match step:
            case Call():
                self._call(step, programs[step.program])
            case Free():
                self._forget(step.buffers)
            case Reduce():
                self._reduce(step)
            case Broadcast():
                self._broadcast(step)
            case Receive():
                self.fill(step.buffer, step.spec.size_bytes)
            case Gather():
                self.fill(step.into, step.spec.size_bytes)
            case Offload():
                self._offload(step.buffers)
            case Evict():
                for number in step.buffers:
                    self._release(number)
            case Prefetch():
                self._return(step.buffers)
            case Rename() | Vote() | OptimizerStep():
                self._rename(step)
            case _:  # the others fill no buffer, or an existing one
                pass

    def _rename(self, step: Rename | Vote | OptimizerStep) -> None:
        """Renumber buffers, all at once: an update swaps versions."""
        if isinstance(step, Rename | Vote):
            into = dict(zip(step.buffers, step.into, strict=True))
        else:
            forth = {number: self._versions[number] for number in step.previous}
            into = forth | {number: previous for previous, number in forth.items()}
        self._forget(number for number in into.values() if number not in into)
        self._storage |= {into[number]: self._storage.pop(number) for number in list(into)}

    def _reduce(self, step: Reduce) -> None:
        """Apply a reduction: the sum exists beside the inputs for a while, or on another worker."""
        if step.root >= 0 and self._ranks.get(step.group) != step.root:
            self._forget(step.buffers)
            return
        sums = sum(self._sizes[self._storage[number]] for number in step.buffers)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + sums)

    def _broadcast(self, step: Broadcast) -> None:
        """Apply a broadcast: the received data exists beside its destination for a while."""
        if self._ranks.get(step.group) == step.root:
            return
        if not step.specs:
            here = sum(self._sizes[self._storage[number]] for number in step.buffers)
            self.peak_bytes = max(self.peak_bytes, self.used_bytes + here)
        for number, spec in zip(step.buffers, step.specs, strict=False):
            self.fill(number, spec.size_bytes)

    def buffers(self) -> dict[int, tuple[int, int]]:
        """Return the storage number and bytes of each buffer."""
        return {number: (storage, self._sizes[storage]) for number, storage in self._storage.items()}

    def fill(self, number: int, size_bytes: int) -> None:
        """Fill a buffer with a new storage."""
        self._next += 1
        self.origins[self._next] = (self.instruction, None)
        self._put(number, self._next, size_bytes)

    def _offload(self, numbers: Sequence[int]) -> None:
        """Copy buffers to the host, each storage once."""
        copies: dict[int, _Copy] = {}
        for number in numbers:
            storage = self._storage[number]
            if storage not in copies:
                copies[storage] = _Copy(storage, self._sizes[storage], set())
                self.host_bytes += copies[storage].size_bytes
            copies[storage].buffers.add(number)
            self._away[number] = copies[storage]
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def _return(self, numbers: Sequence[int]) -> None:
        """Refill evicted buffers: each former storage becomes a new one with the same description."""
        new: dict[_Copy, int] = {}
        for number in numbers:
            copy = self._away[number]
            if copy not in new:
                self._next += 1
                new[copy] = self._next
                self.origins[self._next] = self.origins[copy.storage]
            self._put(number, new[copy], copy.size_bytes)

    def _call(self, call: Call, program: Program) -> None:
        need_bytes, owner, specs = self._known(call, program)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + need_bytes)
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
                self.origins[self._next] = (self.instruction, source)
            self._put(number, made[source], specs[source].size_bytes)

    def _known(self, call: Call, program: Program) -> tuple[int, Mapping[int, int], Mapping[int, TensorSpec]]:
        """Return a program's footprint, and for its slots their storages and descriptions; cached."""
        key = call.program, tuple(call.takes)
        if key not in self._programs:
            need = footprint(program, call.takes).peak_bytes
            self._programs[key] = need, owners(program), specs_by_slot(program)
        return self._programs[key]

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
            self._release(number)
            copy = self._away.pop(number, None)
            if copy is not None:
                copy.buffers.discard(number)
                self.host_bytes -= 0 if copy.buffers else copy.size_bytes

    def _release(self, number: int) -> None:
        """Remove a buffer from the device."""
        storage = self._storage.pop(number, None)
        if storage is None:
            return
        self._views[storage] -= 1
        if not self._views[storage]:
            self.used_bytes -= self._sizes[storage]
