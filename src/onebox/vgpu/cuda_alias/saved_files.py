"""``torch.load`` with ``map_location="cuda"``, and files that were saved on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from onebox.vgpu.cuda_alias.device_names import number_of
from onebox.vgpu.cuda_alias.patches import Patches
from onebox.vgpu.integration import serialization

_PRIORITY = serialization.PRIORITY - 1
"""Before the virtual devices' own, and before PyTorch's for CUDA."""


def _no_mark(storage: Any) -> None:
    """Return no location tag: that of virtual devices applies."""


def _restore(storage: Any, location: str) -> Any:
    """Move a file's storage to the virtual device of its location tag."""
    return serialization._restore(storage, f"vgpu:{number_of(location)}") if location.startswith("cuda") else None


def translate_saved(patches: Patches) -> None:
    """Make loads onto ``cuda`` go to the virtual devices."""
    entry = (_PRIORITY, _no_mark, _restore)
    registry: list[Any] = torch.serialization._package_registry
    torch.serialization.register_package(*entry)
    patches.undoing(lambda: registry.remove(entry))

    @functools.wraps(torch.UntypedStorage.cuda)
    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return serialization._restore(self, f"vgpu:{number_of(device)}")

    patches.set(torch.storage._StorageBase, "cuda", cuda)
