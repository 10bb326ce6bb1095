"""The alias ``cuda``: scripts written for CUDA use virtual devices, on a PyTorch with or without CUDA.

PyTorch does not let another device be named ``cuda``, so nothing below Python changes: tensors are on ``vgpu``, and the
few places where a script names or queries a device are translated, in both directions. Operators on tensors are
unaffected.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import torch
import torch.backends.cuda
import torch.backends.cudnn

from onebox.vgpu.cuda_alias.cuda_module import translate_surface
from onebox.vgpu.cuda_alias.cuda_tensors import translate_tensors
from onebox.vgpu.cuda_alias.device_arguments import translate_entries
from onebox.vgpu.cuda_alias.fake_tensors import translate_traced
from onebox.vgpu.cuda_alias.functions import accelerator, accelerator_index
from onebox.vgpu.cuda_alias.streams import translate_streams
from onebox.vgpu.cuda_alias.subsystems import (
    translate_amp,
    translate_distributed,
    translate_generators,
    translate_saved,
)
from onebox.vgpu.patches import Patches
from onebox.vgpu.registration import install
from onebox.vgpu.runtime import context


class CudaAlias:
    """The active alias, until it is closed; also a context manager."""

    def close(self) -> None:
        """Restore the original meaning of ``cuda``. Idempotent."""
        if self in _active:
            ALIAS.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exit_info: object) -> None:
        self.close()


_active: list[CudaAlias] = []


def alias_cuda() -> CudaAlias:
    """Make ``cuda`` mean the virtual devices, in the whole process.

    From now on ``torch.device("cuda:1")``, ``.cuda()``, ``device="cuda"``, ``torch.cuda`` and ``map_location="cuda"``
    mean ``vgpu:0 …``, whose tensors report ``cuda:0 …`` as their device. Features without a counterpart, such as CUDA
    graphs, raise an error that names them. Functions that other modules have imported before, as by ``from torch import
    zeros``, are not translated: call this first.

    Returns:
        An object whose ``close`` undoes it; the same one where the alias is active already.

    Example:
        >>> import onebox, torch
        >>> from onebox.vgpu import alias_cuda
        >>> with onebox.open("cpu*2"), alias_cuda():
        ...     torch.ones(2, device="cuda:1").sum().item(), torch.cuda.device_count()
        (2.0, 2)
    """
    install()
    ALIAS.apply()
    return _active[0]


def _translate_accelerators(patches: Patches) -> None:
    """Make the accelerator of this process ``cuda``; PyTorch queries it in two ways."""
    core: Any = torch._C
    for name in ("_accelerator_getAccelerator", "_get_accelerator"):
        patches.set(core, name, accelerator(getattr(core, name)))
    index = accelerator_index(torch.accelerator._utils._get_device_index)
    for owner in (torch.accelerator, torch.accelerator._utils, torch.accelerator.memory):
        patches.set(owner, "_get_device_index", index)
    patches.call(torch.get_device_module.cache_clear)


def _translate_flags(patches: Patches) -> None:
    """Provide the flags of CUDA's libraries, which have no effect on a worker."""
    patches.set(torch.backends.cuda, "is_built", torch.cuda.is_available)
    for name in ("is_acceptable", "is_available"):  # a worker's PyTorch decides for itself
        patches.set(torch.backends.cudnn, name, functools.partial(_answer, value=False))
    patches.set(torch.backends.cudnn, "version", functools.partial(_answer, value=None))


def _answer(*_: Any, value: Any) -> Any:
    return value


def _activate(patches: Patches) -> None:
    _active.append(CudaAlias())
    patches.on_removal(_active.clear)


def _translate_rest(patches: Patches) -> None:
    patches.set(context, "called", "cuda")


ALIAS = Patches(
    (
        translate_surface,
        translate_entries,
        translate_tensors,
        translate_generators,
        translate_streams,
        translate_amp,
        translate_distributed,
        translate_saved,
        translate_traced,
        _translate_accelerators,
        _translate_flags,
        _translate_rest,
        _activate,
    )
)
"""The alias ``cuda``, on top of all other patches."""
