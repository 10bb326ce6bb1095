"""Virtual tensors, PyTorch's own of the device in C++: their queue, their buffer on the worker, and their layout."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import Tensor

from onebox.vgpu import native
from onebox.vgpu.core.metadata import Metadata, metadata
from onebox.vgpu.runtime.command_queue import ALONE, CommandQueue, RecordedOp
from onebox.vgpu.signals import shielded
from onebox.wire import KernelSpec, SlotArgument, Strided


def key_of(layout: Metadata) -> tuple[Any, ...]:
    """Return a layout in the form of the device in C++."""
    return (
        layout.dtype, layout.shape, layout.strides, layout.offset, layout.storage_bytes, layout.conjugate,
        layout.negative,
    )  # fmt: skip


class Handle:
    """The number of a buffer on a worker; the buffer is freed with it, or with the tensor that has it.

    Args:
        queue: Command queue of the device.
        number: The buffer.
        tensor: The tensor that has it, if there is one.
    """

    __slots__ = ("__weakref__", "number", "queue", "tensor")

    @shielded
    def __init__(self, queue: Any, number: int, tensor: Tensor | None = None) -> None:
        self.queue, self.number, self.tensor = queue, number, tensor

    @shielded
    def __del__(self) -> None:
        if self.tensor is None and self.number:
            self.queue.native.drop(self.number)

    def is_alone(self) -> bool:
        """Return whether nothing but this handle references the buffer."""
        return self.tensor is None or (sys.getrefcount(self.tensor) == ALONE and native.load().is_alone(self.tensor))

    def pass_on(self) -> int:
        """Return the number of the buffer, which another process will free."""
        number, self.number = self.number, 0
        if self.tensor is not None:
            native.load().pass_on(self.tensor)
        return number


def is_virtual(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of a virtual device."""
    device = native.loaded()
    return device is not None and device.is_virtual(value)


def command_queue_of(tensor: Tensor) -> CommandQueue:
    """Return the command queue of a virtual tensor's device."""
    queue: CommandQueue = native.load().queue(tensor).owner
    return queue


def layout_of(tensor: Tensor) -> Metadata:
    """Return the layout of a virtual tensor."""
    return metadata(*_tuples(native.load().layout(tensor)))


def _tuples(given: Any) -> tuple[Any, ...]:
    dtype, sizes, strides, *rest = given
    return (dtype, tuple(sizes), tuple(strides), *rest)


def view_in_buffer(tensor: Tensor) -> Strided | None:
    """Return the layout of a tensor that is a view of its buffer, as kernels have it; ``None`` for the whole buffer."""
    if native.load().is_base(tensor):
        return None
    layout, base = layout_of(tensor), metadata(*_tuples(native.load().base(tensor)))
    begin, rest = divmod(base.offset * base.dtype.itemsize, layout.dtype.itemsize)
    assert not rest
    found = layout.strided()
    return Strided(found.dtype, found.shape, found.strides, layout.offset - begin, 0, found.conjugate, found.negative)


def handle_of(tensor: Tensor) -> Handle:
    """Return the handle of a buffer with exactly this tensor on its worker; hold it while its number is used."""
    if view_in_buffer(tensor) is None:
        return Handle(command_queue_of(tensor), native.load().number(tensor), tensor)
    return alias_of(tensor)


def alias_of(tensor: Tensor) -> Handle:
    """Return the handle of a new buffer that shares the elements of a tensor: one that may be replaced or passed on."""
    queue, view = command_queue_of(tensor), view_in_buffer(tensor)
    if queue.unwaited:
        queue.write_unwaited()
    key = (view, layout_of(tensor))
    op = queue.views.get(key)
    if op is None:
        queue.limit_views()
        outs, views = (layout_of(tensor).strided(),), () if view is None else (view,)
        op = RecordedOp(KernelSpec("aten.alias.default", (SlotArgument(0),), {}, 1, 0, outs, views), 1)
        queue.views[key] = op
    return Handle(queue, queue.record(op, [native.load().number(tensor)], []))


@shielded
def wrap(handle: Handle, layout: Metadata) -> Tensor:
    """Return a tensor for a buffer."""
    if handle.tensor is None:
        handle.tensor = made = handle.queue.native.make(handle.number, key_of(layout))
        return made
    view: Tensor = native.load().make_view(handle.tensor, key_of(layout))
    return view


def relay(tensor: Tensor, layout: Metadata) -> None:
    """Set the layout of a tensor, as after ``resize_`` or ``t_``."""
    native.load().relay(tensor, key_of(layout))


def all_tensors() -> Iterator[Tensor]:
    """Iterate over the virtual tensors of the process."""
    found = (each for each in gc.get_objects() if issubclass(type(each), Tensor))  # a dead proxy has no class
    return (each for each in found if is_virtual(each))
