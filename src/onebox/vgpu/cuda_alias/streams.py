"""``torch.cuda.Stream`` and ``torch.cuda.Event``: a device executes sequentially, so every order holds."""

from __future__ import annotations

from typing import Any

import torch

from onebox.vgpu.cuda_alias.device_names import number_of, to_cuda, to_vgpu
from onebox.vgpu.cuda_alias.unsupported import raise_unsupported
from onebox.vgpu.integration import device_module
from onebox.vgpu.integration.events import VirtualEvent, VirtualStream
from onebox.vgpu.patches import Patches


class _Either(type):
    """Metaclass that makes ``torch.Stream`` and ``torch.Event`` return the device's class, and ``isinstance`` accept
    all of them.

    Args:
        plain: PyTorch's own class.
        virtual: The class for virtual devices.
        make: Function that creates one of those.
    """

    plain: Any
    virtual: Any
    make: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        place = kwargs["device"] if "device" in kwargs else args[0] if args else None
        made = to_vgpu(place)
        if isinstance(made, torch.device) and made.type == "vgpu":
            return cls.make(*args, **kwargs)
        return cls.plain(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.plain | cls.virtual)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.plain | cls.virtual)


class CudaStream(VirtualStream):
    """A stream of a device; all streams of a device are the same.

    Args:
        device: The device; the current one when ``None``.
        priority: Ignored, for compatibility.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__(number_of(device), priority)
        self.cuda_stream = 0

    @property
    def device(self) -> torch.device:
        """The device."""
        return to_cuda(self._queue.device)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority, which are equal."""
        return 0, 0

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one where none is given, and return it."""
        return super().record_event(CudaEvent() if event is None else event)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream=0x0>"


class CudaEvent(VirtualEvent):
    """A mark in the sequence of a device's operators.

    Args:
        enable_timing: Whether to support ``elapsed_time``: recording then waits for the device.
        blocking: Ignored, for compatibility.
        interprocess: Not supported.
        external: Not supported.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if external:
            raise_unsupported("torch.cuda.Event(external=True)")
        super().__init__(enable_timing, blocking, interprocess)

    def ipc_handle(self) -> Any:
        """Raise an error: events cannot be shared between processes."""
        raise_unsupported("torch.cuda.Event.ipc_handle")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Any:
        """Raise an error: events cannot be shared between processes."""
        raise_unsupported("torch.cuda.Event.from_ipc_handle")


class StreamContext:
    """A context in which the device of a stream is the current one.

    Args:
        stream: The stream; ``None`` for no change.
    """

    def __init__(self, stream: CudaStream | None) -> None:
        self.stream = stream
        self._device = device_module.device(None if stream is None else stream.device_index)

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, *exit_info: object) -> None:
        self._device.__exit__(*exit_info)


def _event(device: Any = None, *, enable_timing: bool = False, blocking: bool = False, **options: bool) -> CudaEvent:
    """Return an event for ``torch.Event``, which unlike ``torch.cuda.Event`` takes a device."""
    number_of(device)
    return CudaEvent(enable_timing, blocking, **options)


def translate_streams(patches: Patches) -> None:
    """Make ``torch.Stream`` and ``torch.Event`` accept ``cuda``."""
    for name, virtual, make in (("Stream", CudaStream, CudaStream), ("Event", CudaEvent, _event)):
        plain = getattr(torch, name)
        members = {"plain": plain, "virtual": virtual, "make": staticmethod(make), "__doc__": plain.__doc__}
        patches.set(torch, name, _Either(name, (), {**members, "__module__": "torch"}))


def current_stream(device: Any = None) -> CudaStream:
    """Return the stream of a device."""
    return CudaStream(device)


def set_stream(stream: CudaStream | None) -> None:
    """Make the device of a stream the current one."""
    if stream is not None:
        device_module.set_device(stream.device_index)
