"""``torch.Generator(device="cuda")``."""

from __future__ import annotations

from typing import Any

from onebox.vgpu.cuda.patches import Patches
from onebox.vgpu.cuda.places import inward, outward
from onebox.vgpu.generators import Generator


def translate_generators(patches: Patches) -> None:
    """Let generators of virtual devices be made for ``cuda``, and say that they are there."""
    kind: Any = type(Generator)
    make, place = kind.__call__, Generator.device

    def made(cls: Any, device: Any = "cpu") -> Any:
        return make(cls, inward(device))

    patches.set(kind, "__call__", made)
    patches.set(Generator, "device", property(lambda self: outward(place.__get__(self)), doc="Where it draws."))
