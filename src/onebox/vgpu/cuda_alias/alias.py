"""``cuda`` for scripts that say cuda: what they say means the virtual devices, on a PyTorch with or without CUDA.

PyTorch refuses to name another device ``cuda``, so nothing below Python changes: tensors are on ``vgpu``, and the few
places where a script names a device, or asks for one, are translated, in both directions. An operator on tensors passes
none of them.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.backends.cuda
import torch.backends.cudnn
from torch.autograd import profiler

from onebox.vgpu.cuda_alias.amp import translate_amp
from onebox.vgpu.cuda_alias.cuda_generators import translate_generators
from onebox.vgpu.cuda_alias.cuda_module import translate_surface
from onebox.vgpu.cuda_alias.cuda_tensors import translate_tensors
from onebox.vgpu.cuda_alias.device_arguments import translate_entries
from onebox.vgpu.cuda_alias.fake_tensors import translate_traced
from onebox.vgpu.cuda_alias.functions import accelerator, accelerator_index
from onebox.vgpu.cuda_alias.nccl_names import translate_distributed
from onebox.vgpu.cuda_alias.patches import Patches
from onebox.vgpu.cuda_alias.saved_files import translate_saved
from onebox.vgpu.cuda_alias.streams import translate_streams
from onebox.vgpu.registration import install
from onebox.vgpu.runtime import context, current_device

_lock = threading.Lock()
_active: list[CudaAlias] = []


class CudaAlias:
    """That ``cuda`` means the virtual devices, until it is closed; works as a context, too."""

    def __init__(self) -> None:
        self._patches = Patches()

    def close(self) -> None:
        """Let ``cuda`` mean again what it meant before. Idempotent."""
        with _lock:
            if self in _active:
                _active.remove(self)
            self._patches.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exit_info: object) -> None:
        self.close()


def alias_cuda() -> CudaAlias:
    """Let ``cuda`` mean the virtual devices, for all of this process.

    From now on ``torch.device("cuda:1")``, ``.cuda()``, ``device="cuda"``, ``torch.cuda`` and ``map_location="cuda"``
    are about ``vgpu:0 …``, and their tensors say ``cuda:0 …`` of themselves. What has no counterpart there, such as
    CUDA graphs, raises an error that names it. Functions that other modules took from ``torch`` before, by
    ``from torch import zeros``, stay as they are: call this first.

    Returns:
        What can be closed to undo it; the same one where ``cuda`` has that meaning already.

    Example:
        >>> import onebox, torch
        >>> from onebox.vgpu import alias_cuda
        >>> with onebox.open("cpu*2"), alias_cuda():
        ...     torch.ones(2, device="cuda:1").sum().item(), torch.cuda.device_count()
        (2.0, 2)
    """
    with _lock:
        if not _active:
            install()
            current_device.register(context.current_device)  # which lasts, so it must not come above what is undone
            made = CudaAlias()
            try:
                _translate(made._patches)
            except BaseException:
                made._patches.undo()
                raise
            _active.append(made)
        return _active[0]


def _translate(patches: Patches) -> None:
    translate_surface(patches)
    translate_entries(patches)
    translate_tensors(patches)
    translate_generators(patches)
    translate_streams(patches)
    translate_amp(patches)
    translate_distributed(patches)
    translate_saved(patches)
    translate_traced(patches)
    _translate_accelerators(patches)
    _translate_flags(patches)
    patches.set(context, "called", "cuda")
    patches.set(profiler.profile, "__init__", _of_this_process(profiler.profile.__init__))


def _translate_accelerators(patches: Patches) -> None:
    """Let the accelerator of this process be called ``cuda``; PyTorch asks in two ways which one it is."""
    core: Any = torch._C
    for name in ("_accelerator_getAccelerator", "_get_accelerator"):
        patches.set(core, name, accelerator(getattr(core, name)))
    index = accelerator_index(torch.accelerator._utils._get_device_index)
    for owner in (torch.accelerator, torch.accelerator._utils, torch.accelerator.memory):
        patches.set(owner, "_get_device_index", index)
    patches.call(torch.get_device_module.cache_clear)


def _translate_flags(patches: Patches) -> None:
    """Let the switches of CUDA's libraries be there; they switch nothing on a worker."""
    patches.set(torch.backends.cuda, "is_built", torch.cuda.is_available)
    for name in ("is_acceptable", "is_available"):  # a worker's PyTorch decides for itself
        patches.set(torch.backends.cudnn, name, functools.partial(_answer, value=False))
    patches.set(torch.backends.cudnn, "version", functools.partial(_answer, value=None))


def _of_this_process(begin: Callable[..., None]) -> Callable[..., None]:
    """Return how a profiler begins that is asked for the times of a GPU: without them."""

    @functools.wraps(begin)
    def init(
        self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **options: Any
    ) -> None:
        if use_cuda or use_device == "cuda":
            use_device = None
            warnings.warn("virtual devices are not profiled, only what this process does for them", stacklevel=3)
        begin(self, enabled, use_device=use_device, **options)

    return init


def _answer(*_: Any, value: Any) -> Any:
    return value
