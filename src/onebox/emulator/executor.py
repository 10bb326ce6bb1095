"""The executor of an emulated device: a worker's, on the device's clock and over tensors without elements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.cost import ACCELERATOR_BPS
from onebox.emulator.clock import DeviceClock
from onebox.emulator.device import EmulatedDevice
from onebox.emulator.group import EmulatedGroups
from onebox.wire.protocol.groups import Retime
from onebox.worker.comm.api import Finish
from onebox.worker.execution.communication import Resolve
from onebox.worker.execution.executor import Executor
from onebox.worker.execution.pending_reply import Outcome, PendingReply
from onebox.worker.execution.step_votes import StepVotes
from onebox.worker.faults import FaultInjector
from onebox.worker.memory.async_copy import AsyncCopier, PendingCopy
from onebox.worker.system.clock import sleep_until


class _Votes(StepVotes):
    """Votes whose results have no values: a rank knows its own alone."""

    def _numbers(self, buffers: Sequence[int]) -> bool:
        for number in buffers:
            self._store.get(number)
        return True

    def _result(self, held: Finish, *, mine: bool) -> bool:
        held()
        return mine


class EmulatedExecutor(Executor):
    """An executor whose instructions take the device's time; arguments as for a worker's."""

    groups_type = EmulatedGroups
    votes_type = _Votes

    _device: EmulatedDevice
    _groups: EmulatedGroups

    def __init__(self, device: EmulatedDevice, *arguments: Any, **options: Any) -> None:
        self.clock = device.clock
        super().__init__(device, *arguments, **options)

    def begin(self) -> None:
        """Begin a message, which was not there before now."""
        super().begin()
        self.clock.wait(time.monotonic_ns())

    def reply(self, number: int, results: Sequence[Outcome]) -> PendingReply:
        """Return the reply to a message, which is complete when the device has done its work."""
        reply = super().reply(number, results)
        reply.after = DeviceEvent(self.clock.now_ns)
        return reply

    def _copier(self, faults: FaultInjector) -> AsyncCopier:
        return EmulatedCopier(self.clock)

    def _now_ns(self) -> int:
        return self.clock.now_ns

    def _require_numbers(self, gradients: Sequence[Tensor]) -> None:
        """Do nothing: there are no values."""

    def _retime(self, retime: Retime, frames: Iterator[Any], resolve: Resolve) -> Sequence[Outcome]:
        if retime.speed:
            self._device.retime(retime.speed)
        self._groups.retime(retime.links)
        return []

    _handlers: dict[type[Any], Callable[..., Sequence[Outcome]]] = {  # noqa: RUF012
        **Executor._handlers,
        Retime: _retime,
    }


class DeviceEvent:
    """A mark that the device reaches at a time."""

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns

    def query(self) -> bool:
        return time.monotonic_ns() >= self.at_ns

    def synchronize(self) -> None:
        sleep_until(self.at_ns)

    def time_ns(self) -> int:
        return self.at_ns


class EmulatedCopier:
    """Copies of tensors without elements, at :data:`ACCELERATOR_BPS`, one after the other in each direction."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._free_ns = {False: 0, True: 0}

    def block(self, size_bytes: int) -> Tensor:
        """Return bytes without elements."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="meta")

    def move(self, source: Tensor, target: Tensor, *, back: bool = False) -> PendingCopy:
        """Return a copy that completes at its emulated time."""
        begin_ns = max(self._free_ns[back], self._clock.now_ns)
        self._free_ns[back] = begin_ns + math.ceil(source.numel() / ACCELERATOR_BPS * 1e9)
        return _Copy(self._free_ns[back], self._clock)

    def settle(self) -> None:
        """Do nothing: copies read nothing."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class _Copy:
    """A copy that completes at a time."""

    def __init__(self, at_ns: int, clock: DeviceClock) -> None:
        self._at_ns, self._clock = at_ns, clock

    def wait(self) -> int:
        self._clock.wait(self._at_ns)
        return self._at_ns

    def finish(self) -> None:
        self.wait()

    def order(self) -> None:
        pass
