"""Snapshot slots of a worker: parts of the training state in host memory, as bytes.

A snapshot costs a step the time of a memory copy. On a GPU it uses a separate stream and pinned memory: the next step
computes meanwhile, and only its first in-place update waits for the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from onebox.errors import WireError
from onebox.sizes import enough_text, size_text
from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.wire.protocol.responses import FilledSlots as Filled
from onebox.wire.protocol.snapshots import layout
from onebox.worker.accelerator import Accelerator
from onebox.worker.faults import FaultInjector
from onebox.worker.memory.async_copy import CopyStream, StreamCopy
from onebox.worker.memory.buffers import QuotaExceeded

SHARE = 4
"""Limit of slots as a multiple of the memory of buffers: two snapshots of the worker's own part, of which the older is
dropped when the newer is complete, and two of another worker's."""


@dataclass(eq=False)
class SnapshotSlot:
    """A slot.

    Args:
        memory: Its bytes.
        filled: Whether its contents are complete.
        failure: Reason that it will not be filled; empty if it may be.
        carriers: Transfers in progress from or to it.
        copied: A copy in progress from a GPU; ``None`` if it is complete.
    """

    memory: Tensor
    filled: bool = False
    failure: str = ""
    carriers: int = 0
    copied: StreamCopy | None = field(default=None, repr=False)

    def fail(self, reason: str) -> None:
        """Record that it will not be filled."""
        self.failure = reason

    def settle(self) -> None:
        """Wait until copies to it are complete."""
        if self.copied is not None:
            self.copied.finish()
            self.copied = None

    def bytes_at(self, start: int, size_bytes: int) -> Tensor:
        """Return a range of its bytes, as a view.

        Raises:
            WireError: The range is out of bounds.
        """
        if not 0 <= start <= start + size_bytes <= self.memory.numel():
            raise WireError(f"{size_bytes} bytes from {start} of a slot of {self.memory.numel()}")
        return self.memory[start : start + size_bytes]

    def tensor_at(self, spec: TensorSpec, start: int) -> Tensor:
        """Return a tensor in it, as a view.

        Raises:
            WireError: The range is out of bounds.
        """
        part = self.bytes_at(start, spec.size_bytes)
        if start % DTYPES[spec.dtype].itemsize:
            raise WireError(f"{spec} cannot begin at byte {start} of a slot")
        return part.view(DTYPES[spec.dtype]).view(spec.shape)


class SnapshotSlots:
    """The slots of a worker.

    Args:
        accelerator: The device of its buffers.
        faults: Faults to inject, for tests.
        limit_bytes: Most bytes of all slots; 0 for no limit. They do not count towards the quota of buffers, which
            limits the device's memory.
    """

    def __init__(self, accelerator: Accelerator, faults: FaultInjector, *, limit_bytes: int = 0) -> None:
        self.used_bytes = 0
        self._accelerator = accelerator
        self._limit_bytes = limit_bytes
        self._faults = faults
        self._slots: dict[int, SnapshotSlot] = {}
        self._spare: list[Tensor] = []
        self._copies = CopyStream(accelerator) if accelerator.asynchronous else None
        self._last: StreamCopy | None = None

    # ---- filling

    def make(self, number: int, size_bytes: int) -> SnapshotSlot:
        """Create a slot, or empty an existing one; existing memory is reused.

        Raises:
            WireError: The size is negative.
            QuotaExceeded: It would exceed the limit.
        """
        if size_bytes < 0:
            raise WireError(f"a slot of {size_bytes} bytes")
        self.drop([number], again=True)
        found = next((memory for memory in self._spare if memory.numel() == size_bytes), None)
        if found is None:
            self._let_go()
            if self._limit_bytes and self.used_bytes + size_bytes > self._limit_bytes:
                raise QuotaExceeded(
                    f"{enough_text(self.used_bytes + size_bytes)} of snapshots needed, but "
                    f"{size_text(self._limit_bytes)} are allowed, "
                    f"{SHARE} times the memory of the device"
                )
            found = self._accelerator.pinned(size_bytes)
            self.used_bytes += size_bytes
        else:
            self._spare = [memory for memory in self._spare if memory is not found]
        self._slots[number] = SnapshotSlot(found)
        return self._slots[number]

    def keep(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Copy tensors to a slot, concatenated.

        Raises:
            QuotaExceeded: They would exceed the limit.
        """
        specs = [spec_of(tensor) for tensor in tensors]
        starts, size_bytes = layout(specs)
        slot = self.make(number, size_bytes)
        targets = [slot.tensor_at(spec, start) for spec, start in zip(specs, starts, strict=True)]
        pairs = zip(tensors, targets, strict=True)
        if self._copies is None:
            for tensor, target in pairs:
                self._faults.at("copying")
                target.copy_(tensor)
        else:
            self._copies.follow()
            slot.copied = self._last = self._copies.copy(pairs, hold=True)
        slot.filled = True

    def before_update(self) -> None:
        """Make in-place updates wait for a copy in progress."""
        if self._last is not None:
            self._last.order()
            self._last = None

    def write(self, number: int, start: int, size_bytes: int, frame: memoryview | bytes) -> None:
        """Write the bytes of a frame to a slot, creating it if missing.

        Raises:
            WireError: The range is out of bounds, or the size is negative.
            QuotaExceeded: It would exceed the limit.
        """
        if number not in self._slots or self._slots[number].memory.numel() != size_bytes:
            self.make(number, size_bytes)
        slot = self._slots[number]
        part = slot.bytes_at(start, len(frame))
        if len(frame):
            ctypes.memmove(part.data_ptr(), np.frombuffer(frame, dtype=np.uint8).ctypes.data, len(frame))
        slot.filled = True  # as far as known: the client tracks its own writes

    # ---- reading

    def get(self, number: int) -> SnapshotSlot:
        """Return a slot that is filled.

        Raises:
            WireError: It does not exist, or is not filled.
        """
        slot = self._slots.get(number)
        if slot is None or not slot.filled:
            raise WireError(f"slot {number} is {'not there' if slot is None else 'not filled'}")
        slot.settle()
        return slot

    def tensor(self, spec: TensorSpec, place: tuple[int, int]) -> Tensor:
        """Return a new tensor of the device with contents of a slot.

        Raises:
            WireError: The range is out of bounds.
        """
        return self._accelerator.to_device(self.host_tensor(spec, place), copy=True)

    def host_tensor(self, spec: TensorSpec, place: tuple[int, int]) -> Tensor:
        """Return contents of a slot as a tensor, as a view.

        Raises:
            WireError: The range is out of bounds.
        """
        number, start = place
        return self.get(number).tensor_at(spec, start)

    def filled(self, numbers: Sequence[int]) -> Filled:
        """Return the filled slots among those given; a missing one counts as one that will not be filled."""
        found = {number: self._slots.get(number) for number in numbers}
        failures = [slot.failure if slot else f"slot {number} is not there" for number, slot in found.items()]
        return Filled(
            tuple(number for number, slot in found.items() if slot and slot.filled),
            next((failure for failure in failures if failure), ""),
        )

    # ---- freeing

    def drop(self, numbers: Sequence[int], *, again: bool = False) -> None:
        """Drop slots.

        Args:
            numbers: The slots; missing ones are ignored.
            again: Whether to keep their memory for reuse.
        """
        for number in numbers:
            slot = self._slots.pop(number, None)
            if slot is None:
                continue
            if again and not slot.carriers:  # memory with writes in progress must not be reused
                slot.settle()
                self._spare.append(slot.memory)
            else:
                self.used_bytes -= slot.memory.numel()
        if not again:
            self._let_go()

    def _let_go(self) -> None:
        """Free spare memory."""
        self.used_bytes -= sum(memory.numel() for memory in self._spare)
        self._spare = []
