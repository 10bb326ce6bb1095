"""The process of an emulated device: a worker's, whose replies are sent when the device would have sent them."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from typing import Any

from onebox.emulator.device import EmulatedDevice
from onebox.emulator.executor import EmulatedExecutor
from onebox.errors import WireError
from onebox.wire.protocol.requests import Envelope
from onebox.wire.protocol.responses import WorkerFailure
from onebox.worker.process.config import WorkerConfig
from onebox.worker.process.main import WorkerServer
from onebox.worker.system.clock import sleep_until, wake_on_time

REPLIES_AHEAD = 64
"""Most replies that wait for the device, as their results take memory meanwhile."""

_BEFORE_S = 2e-3
"""Time before a reply until which the process waits for a message: a socket's waits end later than sleeps."""

_SLICE_NS = 100_000
"""Shortest slice that the kernel grants."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # a system call without a libc function


class EmulatorServer(WorkerServer):
    """The working thread of an emulated device; arguments as for a worker's."""

    machine: EmulatedExecutor

    def __init__(self, config: WorkerConfig, owner_descriptors: Sequence[int]) -> None:
        super().__init__(config, owner_descriptors)
        wake_on_time()
        wake_promptly()

    def _device_of(self, config: WorkerConfig) -> EmulatedDevice:
        return EmulatedDevice(config.speed)

    def _executor_of(self, config: WorkerConfig) -> type[EmulatedExecutor]:
        return EmulatedExecutor

    def _await_reply(self, now_s: float, until_s: float) -> float:
        """Sleep until the first reply is due, if it is soon; return until when to wait for a message then."""
        after = self._replies[0].after
        assert after is not None
        due_s = after.time_ns() / 1e9
        if due_s - now_s > _BEFORE_S:
            return min(until_s, due_s - _BEFORE_S)
        after.synchronize()
        self._send_complete()
        return now_s

    def _handle(self, envelope: Envelope, frames: Sequence[Any]) -> bool:
        going = super()._handle(envelope, frames)
        if len(self._replies) >= REPLIES_AHEAD:
            self.settle()
        return going

    def _report(self, failure: WorkerFailure) -> None:
        """Report a failure when the device comes to it, after the replies before it."""
        if not self._failed:
            self.settle()
            with self.machine.progress.wait():
                sleep_until(self.machine.clock.now_ns)
            super()._report(failure)

    def _report_unreadable(self, error: WireError) -> None:
        self.settle()
        super()._report_unreadable(error)

    def settle(self) -> None:
        """Send the replies that wait, each when it is due."""
        with self.machine.progress.wait():
            while self._replies:
                after = self._replies[0].after
                assert after is not None
                after.synchronize()
                self._send_complete()


server_class = EmulatorServer


def wake_promptly() -> None:
    """Request short scheduler slices, so that this thread runs as soon as it wakes although other threads compute.

    A thread with shorter slices has an earlier deadline (Linux from 6.12; before, or without permission, this has no
    effect). With both cores of a machine busy, 1 sleep in 100 ended 4 ms late or more, with short slices 1 ms; half of
    them ended within 0.02 ms either way.
    """
    if _SCHED_SETATTR is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)  # sched_setattr(2)
    ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, attributes, 0)
