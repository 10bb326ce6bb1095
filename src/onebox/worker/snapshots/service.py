"""Snapshot service of a worker: takes and restores its part of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from onebox.errors import WireError
from onebox.wire import TensorSpec, rows_of, spec_of, to_frame
from onebox.wire.protocol.responses import FilledSlots as Filled
from onebox.wire.protocol.responses import Result, SnapshotContents, Tensors, WorkerMemory
from onebox.wire.protocol.snapshots import (
    Drop,
    Fill,
    Give,
    Lay,
    Read,
    Recall,
    Remembered,
    SlotInstruction,
    Snapshot,
    StateEntry,
    Take,
    Write,
)
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.manager import GroupManager
from onebox.worker.faults import FaultInjector
from onebox.worker.memory.buffers import BufferStore
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.native import NativeOptimizer
from onebox.worker.snapshots.slots import SHARE, SnapshotSlots
from onebox.worker.snapshots.transfer import SnapshotTransfer


class SnapshotService:
    """Slots and their operations.

    Args:
        accelerator: Device of the buffers.
        store: The buffers.
        host: The count of host memory.
        groups: The groups of this worker.
        definition: Returns a definition of a kind by its number.
        faults: Faults to inject, for tests.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        store: BufferStore,
        host: HostMemory,
        groups: GroupManager,
        definition: Callable[[int, type[NativeOptimizer]], NativeOptimizer],
        faults: FaultInjector,
    ) -> None:
        self._accelerator = accelerator
        self._store = store
        self._host = host
        self._groups = groups
        self._definition = definition
        self._slots = SnapshotSlots(accelerator, faults, limit_bytes=SHARE * store.quota_bytes)
        self._courier = SnapshotTransfer(faults)

    def run(self, what: SlotInstruction, frames: Iterator[Any], answers: list[Any]) -> list[Result]:
        """Perform an operation on slots.

        Args:
            what: The operation.
            frames: Its input frames.
            answers: Output frames are appended here.

        Returns:
            Its replies.

        Raises:
            Poisoned: A tensor to be copied is void.
            QuotaExceeded: Memory is insufficient.
            WireError: The operation is invalid.
        """
        slots = self._slots
        match what:
            case Snapshot():
                return [self._snapshot(what)]
            case Give():
                self._courier.give(what, slots.get(what.slot), self._groups.get(what.group))
            case Take():
                if any(size < 0 for size in what.sizes):
                    raise WireError(f"runs of {what.sizes} bytes")
                slot = slots.make(what.slot, sum(what.sizes))
                self._courier.take(what, slot, self._groups.get(what.group))
            case Read():
                part = slots.get(what.slot).bytes_at(what.start, what.size_bytes)
                answers.append(bytes(to_frame(part)))  # a copy: the slot may be overwritten soon
                return [Tensors((spec_of(part),))]
            case Write():
                slots.write(what.slot, what.start, what.size_bytes, next(frames))
            case Fill():
                for number, spec, place in zip(what.buffers, what.specs, what.places, strict=True):
                    self._store.put(number, slots.tensor(spec, place))
            case Recall():
                self._recall(what)
            case Lay():
                return [self._lay(what)]
            case Remembered():
                tensor = self._definition(what.optimizer, NativeOptimizer).remembered(what.parameter, what.key)
                part = rows_of(tensor, what.first, what.rows)
                answers.append(to_frame(self._accelerator.to_host(part)))
                return [Tensors((spec_of(part),))]
            case Drop():
                slots.drop(what.slots, again=what.again)
        return []

    def memory(self, *, anew: bool) -> WorkerMemory:
        """Return the memory of buffers, slots and other host data; reset the peaks if requested."""
        store, host = self._store, self._host
        kept_bytes = self._slots.used_bytes
        memory = WorkerMemory(
            store.used_bytes,
            store.peak_bytes,
            store.quota_bytes,
            kept_bytes,
            host.used_bytes,
            host.peak_bytes,
            self._accelerator.memory().peak_bytes if self._accelerator.asynchronous else 0,
        )
        if anew:
            store.peak_bytes, host.peak_bytes = store.used_bytes, host.used_bytes
            self._accelerator.reset_peak()
        return memory

    def filled(self, slots: Sequence[int]) -> Filled:
        """Return the filled slots among those given."""
        return self._slots.filled(slots)

    def before_update(self) -> None:
        """Make an in-place update wait for copies of the tensors that it changes."""
        self._slots.before_update()

    def leave(self, group: int) -> None:
        """Cancel the transfers of a group that is about to be left."""
        self._courier.stop(group)

    def close(self) -> None:
        """End all transfers, whose groups have been left."""
        self._courier.close()

    def _snapshot(self, snapshot: Snapshot) -> SnapshotContents:
        tensors = [self._store.get(number) for number in snapshot.buffers]
        specs = tuple(spec_of(tensor) for tensor in tensors)
        entries: list[StateEntry] = []
        if snapshot.optimizer:
            entries, remembered = self._definition(snapshot.optimizer, NativeOptimizer).state()
            tensors += remembered
        self._slots.keep(snapshot.slot, tensors)
        return SnapshotContents(specs, tuple(entries))

    def _recall(self, recall: Recall) -> None:
        optimizer = self._definition(recall.optimizer, NativeOptimizer)
        before = optimizer.charged_bytes
        specs = [entry.value for entry in recall.entries if isinstance(entry.value, TensorSpec)]
        if recall.buffers:
            tensors = [self._store.take(number) for number in recall.buffers]
            if [spec_of(tensor) for tensor in tensors] != specs:
                raise WireError(f"buffers of {[str(spec_of(t)) for t in tensors]} for entries {list(map(str, specs))}")
        else:
            places = iter(recall.places)
            tensors = [self._slots.host_tensor(spec, next(places)).clone() for spec in specs]
        optimizer.remember(recall.entries, tensors)
        self._store.charge(optimizer.charged_bytes - before)

    def _lay(self, lay: Lay) -> SnapshotContents:
        entries, tensors = self._definition(lay.optimizer, NativeOptimizer).state()
        if not lay.parameters:
            return SnapshotContents((), tuple(entries))
        left, wanted = iter(tensors), set(lay.parameters)
        laid = [(entry, next(left) if isinstance(entry.value, TensorSpec) else None) for entry in entries]
        laid = [(entry, tensor) for entry, tensor in laid if entry.parameter in wanted]
        found = [tensor for _, tensor in laid if tensor is not None]
        if len(found) != len(lay.buffers):
            raise WireError(f"{len(lay.buffers)} buffers for {len(found)} tensors of an optimizer's state")
        for number, tensor in zip(lay.buffers, found, strict=True):
            self._store.put(number, self._accelerator.to_device(tensor))  # a step count may be elsewhere
        return SnapshotContents((), tuple(entry for entry, _ in laid))
