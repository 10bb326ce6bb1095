"""Streams and events in the sense of ``torch.cuda``: a device executes sequentially, so every order holds."""

from __future__ import annotations

import time
from typing import Any

import torch

from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.vgpu.runtime.context import Device, place

_plain: Any = torch.Stream
_kind: Any = torch._C._autograd.DeviceType.PrivateUse1


class VirtualStream(_plain):
    """A stream in the sense of ``torch.cuda.Stream``; all streams of a device are the same, so every order holds.

    Args:
        device: The device.
        priority: Ignored, for compatibility.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an object that PyTorch's own functions accept as a stream."""
        return super().__new__(cls, stream_id=0, device_index=0, device_type=int(_kind))

    def __init__(self, device: Device = None, priority: int = 0, **_: Any) -> None:
        self._queue = place(device)
        self.priority = priority

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._queue.device

    @property
    def device_index(self) -> int:
        """The device's number."""
        return self._queue.worker

    def synchronize(self) -> None:
        """Wait until the device has executed everything issued to it."""
        self._queue.synchronize()

    def query(self) -> bool:
        """Return whether the device has executed everything issued to it."""
        return self._queue.idle()

    def is_capturing(self) -> bool:
        """Return whether operators are captured in a graph: never; optimizers ask it before each step."""
        return False

    def wait_stream(self, stream: torch.Stream) -> None:
        """Make later operators on this stream wait for those issued on another; copies between devices do so in any
        case."""
        if isinstance(stream, VirtualStream) and stream._queue is not self._queue:
            stream._queue.synchronize()

    def wait_event(self, event: VirtualEvent) -> None:
        """Make later operators on this stream wait for an event."""
        if event._queue is not None and event._queue is not self._queue:
            event.synchronize()

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Record an event, a new one if none is given."""
        event = event or VirtualEvent()
        event.record(self)
        return event

    def __enter__(self) -> VirtualStream:
        return self

    def __exit__(self, *exit_info: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualStream) and other._queue is self._queue

    def __hash__(self) -> int:
        return hash(id(self._queue))


class VirtualEvent:
    """A mark in the sequence of a device's operators, as ``torch.cuda.Event``; times are those of the client's waits.

    Args:
        enable_timing: Whether to support ``elapsed_time``: recording then waits for the device.
        blocking: Ignored, for compatibility.
        interprocess: Not supported.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NotImplementedError("events of virtual devices cannot be shared with other processes")
        self.enable_timing = enable_timing
        self._queue: CommandQueue | None = None
        self._mark = 0
        self._time_s = 0.0

    def record(self, stream: VirtualStream | None = None) -> None:
        """Mark the operators issued so far."""
        self._queue = place(None) if stream is None else stream._queue
        if self.enable_timing:
            self._queue.synchronize()
            self._time_s = time.perf_counter()
        self._mark = self._queue.mark()

    def query(self) -> bool:
        """Return whether the device has reached the mark."""
        return self._queue is None or self._queue.channel.reached(self._mark)

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""
        if self._queue is None:
            return
        if self._queue.channel.reached(self._mark):
            self._queue.channel.raise_failed()
        else:
            self._queue.synchronize()

    def wait(self, stream: VirtualStream | None = None) -> None:
        """Make later operators on a stream wait for the mark."""
        (stream or VirtualStream()).wait_event(self)

    def elapsed_time(self, end_event: VirtualEvent) -> float:
        """Return the milliseconds between two events that were made with ``enable_timing``."""
        if not (self.enable_timing and end_event.enable_timing and self._queue and end_event._queue):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True' and be recorded.")
        return (end_event._time_s - self._time_s) * 1000
