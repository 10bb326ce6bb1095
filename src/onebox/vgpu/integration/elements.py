"""Elements of tensors in this process, as PyTorch takes them: those of a virtual device are read, or not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import is_virtual


def printed_at_once(text: Callable[..., str]) -> Callable[..., str]:
    """Wrap the function that makes the text of a tensor, to read all of its elements, and not one by one.

    They are read before PyTorch holds off transformations of functions: where an error comes meanwhile, these may stay
    off, as what ends that is an object that the error's traceback keeps.
    """

    @functools.wraps(text)
    def whole(self: Tensor, *, tensor_contents: str | None = None) -> str:
        if tensor_contents is None and is_virtual(self) and self.numel():
            with torch.no_grad():
                tensor_contents = torch._tensor_str._tensor_str(self.detach().cpu(), len("tensor("))
        return text(self, tensor_contents=tensor_contents)

    return whole


def swapping_on_host(swap: Any) -> Any:
    """Wrap the method that swaps the bytes of a storage's elements, which it does at their address, to refuse that."""

    @functools.wraps(swap)
    def byteswap(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cpu":
            raise NotImplementedError("byteswap() needs the elements of a storage in this process; use cpu() before")
        return swap(self, *args, **kwargs)

    return byteswap


def exchanging_from_the_start(export: Any) -> Any:
    """Wrap a function that makes a capsule of a tensor, to refuse views by whose address their memory is not found."""

    @functools.wraps(export)
    def to_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if is_virtual(tensor) and tensor.storage_offset():
            raise BufferError("DLPack needs a tensor of a virtual device to begin where its memory does; use clone()")
        return export(tensor, *args, **kwargs)

    return to_dlpack
