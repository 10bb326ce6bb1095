"""``torch.Generator(device="cuda")``."""

from __future__ import annotations

from typing import Any

from onebox.vgpu.cuda_alias.device_names import to_cuda, to_vgpu
from onebox.vgpu.cuda_alias.patches import Patches
from onebox.vgpu.integration.generators import VirtualGenerator


def translate_generators(patches: Patches) -> None:
    """Make generators of virtual devices for ``cuda``, and report that as their device."""
    kind: Any = type(VirtualGenerator)
    make, place = kind.__call__, VirtualGenerator.device

    def made(cls: Any, device: Any = "cpu") -> Any:
        return make(cls, to_vgpu(device))

    patches.set(kind, "__call__", made)
    patches.set(VirtualGenerator, "device", property(lambda self: to_cuda(place.__get__(self)), doc="Where it draws."))
