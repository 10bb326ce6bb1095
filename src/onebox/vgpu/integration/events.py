"""Streams and events in the sense of ``torch.cuda``: a device does one thing after the other, so the order is right."""

from __future__ import annotations

import time
from typing import Any

import torch

from onebox.vgpu.runtime.command_queue import CommandQueue as DeviceStream
from onebox.vgpu.runtime.context import Device, place

_plain: Any = torch.Stream
_kind: Any = torch._C._autograd.DeviceType.PrivateUse1


class Stream(_plain):
    """A stream in the sense of ``torch.cuda.Stream``; all of a device are one, so that the order is always right.

    Args:
        device: The device.
        priority: Taken for compatibility.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make what PyTorch's own functions take for a stream."""
        return super().__new__(cls, stream_id=0, device_index=0, device_type=int(_kind))

    def __init__(self, device: Device = None, priority: int = 0, **_: Any) -> None:
        self._stream = place(device)
        self.priority = priority

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._stream.device

    @property
    def device_index(self) -> int:
        """The device's number."""
        return self._stream.worker

    def synchronize(self) -> None:
        """Wait until the device has done all that it was asked to."""
        self._stream.synchronize()

    def query(self) -> bool:
        """Tell whether the device has done all that it was asked to."""
        return self._stream.idle()

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let what comes on this stream wait for what was issued on another; copies between devices do in any case."""
        if isinstance(stream, Stream) and stream._stream is not self._stream:
            stream._stream.synchronize()

    def wait_event(self, event: Event) -> None:
        """Let what comes on this stream wait for an event."""
        if event._stream is not None and event._stream is not self._stream:
            event.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one where none is given."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exit_info: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._stream is self._stream

    def __hash__(self) -> int:
        return hash(id(self._stream))


class Event:
    """A mark in the work of a device, as ``torch.cuda.Event``; times are those of the client, when it waited.

    Args:
        enable_timing: Whether ``elapsed_time`` is wanted: recording then waits for the device.
        blocking: Taken for compatibility.
        interprocess: Not possible.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NotImplementedError("events of virtual devices cannot be shared with other processes")
        self.enable_timing = enable_timing
        self._stream: DeviceStream | None = None
        self._mark = 0
        self._time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark what has been issued so far."""
        self._stream = place(None) if stream is None else stream._stream
        if self.enable_timing:
            self._stream.synchronize()
            self._time_s = time.perf_counter()
        self._mark = self._stream.mark()

    def query(self) -> bool:
        """Tell whether the device has come to the mark."""
        return self._stream is None or self._stream.sent.reached(self._mark)

    def synchronize(self) -> None:
        """Wait until the device has come to the mark."""
        if self._stream is not None and not self._stream.sent.reached(self._mark):
            self._stream.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Let what comes on a stream wait for the mark."""
        (stream or Stream()).wait_event(self)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two events that were made with ``enable_timing``."""
        if not (self.enable_timing and end_event.enable_timing and self._stream and end_event._stream):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True' and be recorded.")
        return (end_event._time_s - self._time_s) * 1000
