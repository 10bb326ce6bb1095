"""Slots of a worker: what is kept of the training state in the memory of its host, byte by byte.

A snapshot costs a step as long as a copy takes, from memory to memory. On a GPU it goes along a stream of its own, into
pinned memory: the next step computes meanwhile, and only its first update in place waits for the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.sizes import enough_text, size_text
from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.wire.protocol.responses import FilledSlots as Filled
from onebox.wire.protocol.snapshots import layout
from onebox.worker.faults import FaultInjector
from onebox.worker.memory.buffers import QuotaExceeded

SHARE = 4
"""Slots may take so many times the memory of buffers: two snapshots of the worker's own part, of which the older goes
when the newer is whole, and two of another's."""


@dataclass(eq=False)
class SnapshotSlot:
    """A slot.

    Args:
        memory: Its bytes.
        filled: Whether all that is to be in it is.
        failure: Why it will not be filled; empty where it may.
        carriers: Transfers that are under way from or to it.
        copied: Tells when a copy from a GPU has come; ``None`` where it has.
    """

    memory: Tensor
    filled: bool = False
    failure: str = ""
    carriers: int = 0
    copied: torch.cuda.Event | None = field(default=None, repr=False)

    def settle(self) -> None:
        """Wait until what was copied to it is there."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None

    def bytes_at(self, start: int, size_bytes: int) -> Tensor:
        """Return some of its bytes, as a view.

        Raises:
            WireError: They are not in it.
        """
        if not 0 <= start <= start + size_bytes <= self.memory.numel():
            raise WireError(f"{size_bytes} bytes from {start} of a slot of {self.memory.numel()}")
        return self.memory[start : start + size_bytes]

    def tensor_at(self, spec: TensorSpec, start: int) -> Tensor:
        """Return what lies in it as a tensor, as a view.

        Raises:
            WireError: There is no such tensor.
        """
        part = self.bytes_at(start, spec.size_bytes)
        if start % DTYPES[spec.dtype].itemsize:
            raise WireError(f"{spec} cannot begin at byte {start} of a slot")
        return part.view(DTYPES[spec.dtype]).view(spec.shape)


class SnapshotSlots:
    """The slots of a worker.

    Args:
        device: Where its buffers live.
        faults: Faults to inject, for tests.
        limit_bytes: The most bytes of all slots; 0 for no limit. They do not count for the quota of buffers, which is
            about the memory of the device.
    """

    def __init__(self, device: torch.device, faults: FaultInjector, *, limit_bytes: int = 0) -> None:
        self.used_bytes = 0
        self._device = device
        self._limit_bytes = limit_bytes
        self._faults = faults
        self._slots: dict[int, SnapshotSlot] = {}
        self._spare: list[Tensor] = []
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None

    # ---- filling

    def make(self, number: int, size_bytes: int) -> SnapshotSlot:
        """Make a slot, or empty one that is there; memory that was used before is used again.

        Raises:
            QuotaExceeded: It would exceed the limit.
        """
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
            self.used_bytes += size_bytes
            found = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._aside is not None)
        else:
            self._spare = [memory for memory in self._spare if memory is not found]
        self._slots[number] = SnapshotSlot(found)
        return self._slots[number]

    def keep(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Copy tensors to a slot, one behind the other.

        Raises:
            QuotaExceeded: They would exceed the limit.
        """
        specs = [spec_of(tensor) for tensor in tensors]
        starts, size_bytes = layout(specs)
        slot = self.make(number, size_bytes)
        targets = [slot.tensor_at(spec, start) for spec, start in zip(specs, starts, strict=True)]
        if self._aside is None:
            for tensor, target in zip(tensors, targets, strict=True):
                self._faults.at("copying")
                target.copy_(tensor)
        else:
            slot.copied = self._last = self._copy_aside(self._aside, tensors, targets)
        slot.filled = True

    def _copy_aside(
        self, aside: torch.cuda.Stream, tensors: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> torch.cuda.Event:
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for tensor, target in zip(tensors, targets, strict=True):
                target.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(aside)  # its memory is used for nothing else until the copy is done
            return aside.record_event()

    def before_update(self) -> None:
        """Let what is to be updated in place wait for a copy of it that is still under way."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)
            self._last = None

    def write(self, number: int, start: int, size_bytes: int, frame: memoryview | bytes) -> None:
        """Write the bytes of a frame to a slot, which is made where it is not there.

        Raises:
            WireError: They have no place in it.
            QuotaExceeded: It would exceed the limit.
        """
        if number not in self._slots or self._slots[number].memory.numel() != size_bytes:
            self.make(number, size_bytes)
        slot = self._slots[number]
        part = slot.bytes_at(start, len(frame))
        if len(frame):
            ctypes.memmove(part.data_ptr(), np.frombuffer(frame, dtype=np.uint8).ctypes.data, len(frame))
        slot.filled = True  # as far as the client, who knows what it has written, is concerned

    # ---- taking out

    def get(self, number: int) -> SnapshotSlot:
        """Return a slot that is filled.

        Raises:
            WireError: It is not there, or not filled.
        """
        slot = self._slots.get(number)
        if slot is None or not slot.filled:
            raise WireError(f"slot {number} is {'not there' if slot is None else 'not filled'}")
        slot.settle()
        return slot

    def tensor(self, spec: TensorSpec, place: tuple[int, int]) -> Tensor:
        """Return a new tensor of the device with what lies in a slot.

        Raises:
            WireError: It does not lie there.
        """
        return self.host_tensor(spec, place).to(self._device, copy=True)

    def host_tensor(self, spec: TensorSpec, place: tuple[int, int]) -> Tensor:
        """Return what lies in a slot as a tensor, as a view.

        Raises:
            WireError: It does not lie there.
        """
        number, start = place
        return self.get(number).tensor_at(spec, start)

    def filled(self, numbers: Sequence[int]) -> Filled:
        """Return which of some slots are filled; one that is not there counts as one that will not be."""
        found = {number: self._slots.get(number) for number in numbers}
        failures = [slot.failure if slot else f"slot {number} is not there" for number, slot in found.items()]
        return Filled(
            tuple(number for number, slot in found.items() if slot and slot.filled),
            next((failure for failure in failures if failure), ""),
        )

    # ---- letting go

    def drop(self, numbers: Sequence[int], *, again: bool = False) -> None:
        """Forget slots.

        Args:
            numbers: Which; those that are not there are passed over.
            again: Whether to keep their memory for others.
        """
        for number in numbers:
            slot = self._slots.pop(number, None)
            if slot is None:
                continue
            if again and not slot.carriers:  # what is still written to may not hold something else soon
                slot.settle()
                self._spare.append(slot.memory)
            else:
                self.used_bytes -= slot.memory.numel()
        if not again:
            self._let_go()

    def _let_go(self) -> None:
        """Return spare memory."""
        self.used_bytes -= sum(memory.numel() for memory in self._spare)
        self._spare = []
