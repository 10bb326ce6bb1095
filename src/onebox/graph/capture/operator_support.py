"""Operator support: a graph that runs on every kind of device, and autocast to bfloat16.

A model is captured with CPU tensors, wherever the graph is to run: a client needs no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_NORMS = {
    functional.layer_norm,
    functional.group_norm,
    functional.rms_norm,
    torch.layer_norm,
    torch.group_norm,
    torch.rms_norm,
}
"""Normalisations whose GPU kernels require one element type of input and weight."""


@contextlib.contextmanager
def portable_operators(device_type: str) -> Iterator[None]:
    """Exclude CPU-only operators from a graph made within the context, unless it is for CPUs.

    Args:
        device_type: The type of device on which the graph is to run.
    """
    if device_type == "cpu":
        yield
        return
    onednn = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags() would also warn
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)


@contextlib.contextmanager
def bfloat16_autocast() -> Iterator[None]:
    """Run matrix products and convolutions in bfloat16: PyTorch's autocast for CPUs, but normalise in float32.

    On CPUs autocast leaves normalisations in bfloat16 with weights in float32, which GPUs cannot compute; on GPUs it
    runs them in float32, as here.
    """
    with torch.autocast("cpu", torch.bfloat16), _NormsInFloat32():
        yield


class _NormsInFloat32(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _NORMS and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(argument) for argument in args)
            kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
