"""The virtual tensor, a tensor of ``vgpu:i`` whose elements are on a worker, and the handle of its buffer there."""

from __future__ import annotations

import copy
import gc
import re
import threading
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from onebox.vgpu import native
from onebox.vgpu.core.metadata import Metadata
from onebox.vgpu.core.storage import VirtualStorage, new_storage
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.vgpu.signals import shielded

_lock = threading.Lock()


class Handle:
    """The number of a buffer on a worker; the buffer is freed with it.

    Args:
        queue: Command queue of the device.
        number: The buffer.
    """

    __slots__ = ("__weakref__", "_storage", "number", "queue")

    _storage: VirtualStorage  # set on first use

    @shielded
    def __init__(self, queue: CommandQueue, number: int) -> None:
        self.queue = queue
        self.number = number

    @shielded
    def __del__(self) -> None:
        if self.number:
            self.queue.dead.append(self.number)  # by any thread that collects it; the next record processes it

    def pass_on(self) -> int:
        """Return the number of the buffer, which another process will free."""
        number, self.number = self.number, 0
        return number

    def storage(self, size_bytes: int) -> VirtualStorage:
        """Return the storage of the buffer: the same one until the buffer has another size.

        Args:
            size_bytes: The size of the buffer now.
        """
        with _lock:
            known = getattr(self, "_storage", None)
            if known is None or known.nbytes() != size_bytes:
                known = self._storage = new_storage(size_bytes, self.queue.device)
        return known


class VirtualTensor(Tensor):
    """A tensor whose elements are in a buffer of a worker; the client holds only its layout.

    Autograd, views and version counters are PyTorch's own: operators arrive here below them.
    """

    _handle: Handle  # no slots: torch.utils.swap_tensors, which moves modules, requires equal slots on both sides
    _metadata: Metadata

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    dispatcher: Any = None
    """Set by the dispatch module, which depends on this class."""
    reducer: Any = None
    """Set by the serialization module, which depends on this class: the pickle reduction of a tensor."""

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> Any:
        """Return a parameter: those on a device are of this type, and libraries call ``type(parameter)(...)``."""
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    @shielded
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Pass an operator to the dispatcher."""
        return cls.dispatcher(func, args, kwargs)

    # methods that PyTorch rejects for subclasses, or implements by storages

    def untyped_storage(self) -> VirtualStorage:
        """Return an object that represents the storage, without elements: the same one for all tensors of a buffer and
        for their views."""
        base: Any = self._base  # the tensor that it is a view of, as far as autograd knows
        handle: Handle = (self if base is None else base)._handle
        return handle.storage(self._metadata.storage_bytes)

    def data_ptr(self) -> int:
        """Return an address: it cannot be read, but is unique among tensors."""
        address = self.untyped_storage().data_ptr()
        return address + self._metadata.offset * self.dtype.itemsize if address else 0

    def numpy(self, *, force: bool = False) -> Any:
        """Return the elements as a NumPy array; only with ``force``, as for any device."""
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return self.detach().cpu().numpy()

    # methods whose default device PyTorch gets from its guard, which for a device made in Python is always 0

    def new(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor of this one's type, by default on its device."""
        if kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        if not args:
            return self.new_empty(0, **kwargs)
        return super().new(*args, **({} if isinstance(args[0], Tensor | VirtualStorage) else kwargs))

    def new_tensor(self, data: Any, *, device: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return a tensor of some data, by default of this one's type and on its device."""
        return super().new_tensor(data, device=self.device if device is None else device, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        """Return the elements as nested lists."""
        return self.detach().cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        text = repr(self.detach().cpu())
        suffix = [f"device='{self.device}'"]
        typed = re.search(r",\s+dtype=[\w.]+\)$", text)
        head, kind = (text[: typed.start()], [f"dtype={self.dtype}"]) if typed else (text[:-1], [])
        if self.grad_fn is not None:
            kind.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            kind.append("requires_grad=True")
        whole = ", ".join([head, *suffix, *kind]) + ")"
        return f"Parameter containing:\n{whole}" if getattr(self, "_is_param", False) else whole

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __copy__(self) -> VirtualTensor:
        made: VirtualTensor = _data.__get__(self).requires_grad_(self.requires_grad)
        made.__dict__.update(
            {key: value for key, value in self.__dict__.items() if key not in ("_handle", "_metadata")}
        )
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at present"
            )
        copied = self.detach().clone()
        if getattr(self, "_is_param", False):  # of a parameter only this is copied, as in PyTorch: no gradient
            memo[id(self)] = parameter = torch.nn.Parameter(copied, self.requires_grad)
            return parameter
        made = copied.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        own = {key: value for key, value in self.__dict__.items() if key not in ("_handle", "_metadata")}
        made.__dict__.update(copy.deepcopy(own, memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).reducer(self, protocol)

    @property
    def data(self) -> Any:
        """The tensor without its autograd history, and its setter."""
        return _data.__get__(self)

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, VirtualTensor):
            raise RuntimeError(
                f"a tensor of {self.device} is given the data of one of {new.device}, which PyTorch does not allow; "
                "move the module that holds it with .to(), or make a new tensor"
            )
        _data.__set__(self, new)
        self._bind(new._handle, new._metadata)

    def __coerce_same_metadata_as_tangent__(self, expected_metadata: Any, expected_type: Any = None) -> VirtualTensor:
        return self  # a gradient as it was traced, where AOTAutograd expects a plain tensor

    def _bind(self, handle: Handle, metadata: Metadata) -> None:
        """Set the buffer and the layout."""
        self._handle = handle
        self._metadata = metadata


_data: Any = torch._C.TensorBase.data
_make = Tensor._make_wrapper_subclass
_STRIDED = torch.strided
_is_inference_mode = torch.is_inference_mode_enabled


def wrap(handle: Handle, metadata: Metadata) -> Tensor:
    """Return a tensor for a buffer."""
    made: VirtualTensor = _make(  # by position, which is parsed faster
        VirtualTensor, metadata.shape, metadata.strides, metadata.offset, None, metadata.dtype, _STRIDED,
        handle.queue.device,
    )  # fmt: skip
    made._bind(handle, metadata)
    if not metadata.plain:
        metadata.mark(made)
    return made


share: Any = torch._functionalize_unsafe_set
"""Make the first tensor a view of the memory of the second for ``is_alias_of``."""


def wrap_view(base: Tensor, handle: Handle, metadata: Metadata) -> Tensor:
    """Return a tensor for a buffer that is a view of another one's: an inference tensor if that is one."""
    inference = base.is_inference()
    if inference == _is_inference_mode():
        made = wrap(handle, metadata)
    else:
        with torch.inference_mode(inference):
            made = wrap(handle, metadata)
    share(made, base)
    return made


def view_of(tensor: Tensor) -> Tensor:
    """Return a view of a whole tensor, which has the same buffer."""
    return wrap_view(tensor, tensor._handle, tensor._metadata)  # type: ignore[attr-defined]


def relay(tensor: Tensor, metadata: Metadata) -> None:
    """Set the layout of a tensor, as after ``resize_`` or ``t_``."""
    handle = handle_of(tensor)
    _data.__set__(tensor, wrap(handle, metadata))
    tensor._bind(handle, metadata)  # type: ignore[attr-defined]


def rebind(tensor: Tensor, other: Tensor) -> None:
    """Let a tensor have the buffer of another one from now on, with its own layout."""
    tensor._bind(handle_of(other), layout_of(tensor))  # type: ignore[attr-defined]


def is_virtual(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of a virtual device."""
    return type(value) is VirtualTensor  # the attribute __class__ of others' objects may be a property


def command_queue_of(tensor: Tensor) -> CommandQueue:
    """Return the command queue of a virtual tensor's device."""
    handle: Handle = tensor._handle  # type: ignore[attr-defined]
    return handle.queue


def handle_of(tensor: Tensor) -> Handle:
    """Return the handle of the buffer of exactly this tensor on its worker; hold it while its number is used."""
    handle: Handle = tensor._handle  # type: ignore[attr-defined]
    return handle


def layout_of(tensor: Tensor) -> Metadata:
    """Return the layout of a virtual tensor."""
    layout: Metadata = tensor._metadata  # type: ignore[attr-defined]
    return layout


def all_tensors() -> Iterator[Tensor]:
    """Iterate over the virtual tensors of the process, without those that another thread has not finished yet."""
    return (each for each in gc.get_objects() if is_virtual(each) and hasattr(each, "_handle"))


if native.IN_USE:
    from onebox.vgpu.core.native_tensor import *  # type: ignore  # noqa: F403
    from onebox.vgpu.core.native_tensor import share
