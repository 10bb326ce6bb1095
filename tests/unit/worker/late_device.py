"""An asynchronous device whose tensors are in host memory and whose work takes a given time: events tell it, the host
does not wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onebox.worker.accelerator import HostAccelerator


class LateEvent:
    """A mark that is reached when the work before it has taken its time."""

    def __init__(self, device: LateDevice, at_ns: int, *, timed: bool) -> None:
        self.at_ns = at_ns
        self.waited = False
        self.queries = 0
        self._device = device
        self._timed = timed

    @property
    def reached(self) -> bool:
        return self._device.now_ns() >= self.at_ns

    def query(self) -> bool:
        self.queries += 1
        return self.reached

    def synchronize(self) -> None:
        self.waited = True
        self._device.synchronised += 1
        self._device.wait_until(self.at_ns)

    def time_ns(self) -> int:
        assert self._timed
        assert self.reached, "the event is not complete"
        return self.at_ns


class LateStream:
    """Work that takes its time, one after the other."""

    def __init__(self, device: LateDevice) -> None:
        self.busy_until_ns = 0
        self.events: list[LateEvent] = []
        self._device = device

    def work(self, seconds: float) -> None:
        self.busy_until_ns = max(self.busy_until_ns, self._device.now_ns()) + round(seconds * 1e9)

    def record(self, *, timed: bool = False, yields: bool = False) -> LateEvent:
        self.events.append(LateEvent(self._device, max(self.busy_until_ns, self._device.now_ns()), timed=timed))
        return self.events[-1]

    def wait(self, event: Any) -> None:
        self.busy_until_ns = max(self.busy_until_ns, event.at_ns)

    def wait_stream(self, other: Any) -> None:
        self.busy_until_ns = max(self.busy_until_ns, other.busy_until_ns)

    def synchronize(self) -> None:
        self.record().synchronize()


class LateDevice(HostAccelerator):
    """The device.

    Args:
        kernel_s: Seconds of each operator within :meth:`kernels`, other than copies.
        copy_s: Seconds of each copy there.
        still: Whether time passes by :meth:`skip` and by waits for events alone, at once.
    """

    asynchronous = True

    def __init__(self, kernel_s: float = 0.0, copy_s: float = 0.0, *, still: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._still_ns = time.monotonic_ns() if still else None
        self.kernel_s, self.copy_s = kernel_s, copy_s
        self.synchronised = 0
        self.drains = 0
        self.streams: list[LateStream] = []
        self._ahead_ns = 0
        self._main = self._current = LateStream(self)

    def now_ns(self) -> int:
        """Return the present time of the device."""
        return (time.monotonic_ns() if self._still_ns is None else self._still_ns) + self._ahead_ns

    def wait_until(self, at_ns: int) -> None:
        """Wait until a time."""
        if self._still_ns is not None:
            self._ahead_ns += max(0, at_ns - self.now_ns())
        while self.now_ns() < at_ns:
            time.sleep(1e-4)

    def skip(self, seconds: float) -> None:
        """Let a time pass at once."""
        self._ahead_ns += round(seconds * 1e9)

    def finish(self) -> None:
        """End the work of the present stream at once."""
        for event in self._current.events:
            event.at_ns = 0
        self._current.busy_until_ns = 0

    def current(self) -> Any:
        return self._current

    def stream(self, *, priority: int = 0) -> Any:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def to_host(self, tensor: Tensor) -> Tensor:
        self.drains += 1
        self._current.synchronize()
        return tensor

    def kernels(self) -> TorchDispatchMode:
        """Return a context in which operators take the device's time."""
        return _Kernels(self)


class _Kernels(TorchDispatchMode):
    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_":
            self._device.current().work(self._device.copy_s)
        elif name not in ("empty", "view", "slice", "as_strided", "detach", "item", "alias", "reshape", "set_"):
            self._device.current().work(self._device.kernel_s)
        return func(*args, **(kwargs or {}))
