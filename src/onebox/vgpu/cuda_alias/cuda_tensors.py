"""Tensors for scripts written for CUDA: their device, their type, and their movement."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import is_virtual
from onebox.vgpu.cuda_alias.device_names import number_of, to_cuda, to_vgpu
from onebox.vgpu.patches import Patches

_DTYPES = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}
"""Element types by their names in old scripts, as in ``torch.cuda.FloatTensor``."""


class TensorType(type):
    """The type of ``torch.cuda.FloatTensor`` and the like: calls make tensors, ``isinstance`` checks their element
    type."""

    dtype: torch.dtype

    def __call__(cls, *data: Any, device: Any = "cuda") -> Tensor:
        place = to_vgpu(device)
        sizes = data[0] if len(data) == 1 and isinstance(data[0], torch.Size) else data
        if all(isinstance(size, int) for size in sizes):
            return torch.empty(tuple(sizes) or (0,), dtype=cls.dtype, device=place)
        (values,) = data
        return torch.as_tensor(values, dtype=cls.dtype, device=place)

    def __instancecheck__(cls, instance: Any) -> bool:
        return is_virtual(instance) and instance.dtype == cls.dtype

    def __repr__(cls) -> str:
        return f"<class 'torch.cuda.{cls.__name__}'>"


TENSOR_TYPES: dict[str, TensorType] = {
    f"{word}Tensor": TensorType(f"{word}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda", "is_cuda": True})
    for word, dtype in _DTYPES.items()
}
_WORDS = {dtype: f"torch.cuda.{word}Tensor" for word, dtype in _DTYPES.items()}


def tensor_type(kind: Any) -> TensorType | None:
    """Return the type of CUDA tensors for a class or a name such as ``"torch.cuda.FloatTensor"``."""
    if isinstance(kind, TensorType):
        return kind
    return TENSOR_TYPES.get(kind.removeprefix("torch.cuda.")) if str(kind).startswith("torch.cuda.") else None


def _look(patches: Patches) -> None:
    """Make virtual tensors report their device as ``cuda``."""
    place: Any = torch._C.TensorBase.device

    def device(self: Tensor) -> torch.device:
        return to_cuda(place.__get__(self))

    def interface(self: Tensor) -> Any:
        raise AttributeError("the elements of a virtual tensor are not in this process; take tensor.cpu()")

    plain: Any = torch._C.TensorBase
    storage_place: Any = torch.UntypedStorage.device

    def is_cuda(self: Tensor) -> bool:
        if is_virtual(self) or plain.is_cuda.__get__(self):
            return True
        return self.is_sparse and device(self).type == "cuda"

    def array_interface(self: Tensor) -> Any:
        if is_virtual(self):
            interface(self)
        return plain_interface.__get__(self)

    plain_interface: Any = torch.Tensor.__cuda_array_interface__
    to_numpy = torch.Tensor.numpy

    @functools.wraps(to_numpy)
    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_virtual(self) and not (args or kwargs):
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return to_numpy(self, *args, **kwargs)

    patches.set(torch.Tensor, "numpy", numpy)
    patches.set(torch.Tensor, "device", property(device, doc="The device, such as ``cuda:0``."))
    patches.set(
        torch.Tensor,
        "is_cuda",
        property(is_cuda, doc="Whether it is on a GPU."),
    )
    patches.set(torch.Tensor, "__cuda_array_interface__", property(array_interface))
    patches.set(torch.UntypedStorage, "device", property(lambda self: to_cuda(storage_place.__get__(self))))


def _move(patches: Patches) -> None:
    """Make the methods that name CUDA move tensors to a virtual device."""
    to, kind_of = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(torch.Tensor.cuda)
    def cuda(
        self: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        place = torch.device("vgpu", number_of(device))
        return to(self, device=place, non_blocking=non_blocking, memory_format=memory_format)

    @functools.wraps(kind_of)
    def type_(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None and is_virtual(self):
            return _WORDS.get(self.dtype) or kind_of(self).replace("vgpu", "cuda")
        wanted = tensor_type(dtype)
        if wanted is None:
            return kind_of(self, dtype, non_blocking, **kwargs)
        here = self.device if is_virtual(self) else "cuda"
        return to(self, device=to_vgpu(here), dtype=wanted.dtype, non_blocking=non_blocking)

    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "type", type_)


def _default_type(patches: Patches) -> None:
    """Make ``torch.set_default_tensor_type`` accept types of CUDA tensors."""
    original = torch.set_default_tensor_type

    @functools.wraps(original)
    def set_default_tensor_type(t: Any) -> None:
        wanted = tensor_type(t)
        if wanted is None:
            torch.set_default_device(None)
            original(t)
        else:
            torch.set_default_dtype(wanted.dtype)
            torch.set_default_device("cuda")

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)


def translate_tensors(patches: Patches) -> None:
    """Make tensors appear as CUDA tensors."""
    _look(patches)
    _move(patches)
    _default_type(patches)
