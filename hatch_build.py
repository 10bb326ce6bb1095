"""The tag of a wheel: it is for any machine, or for those like this one if the tree has objects of the virtual device.

The latter is this interpreter's and ``linux_x86_64``, which promises no more than machines like the one that built
the object: with its C library and libstdc++, or newer ones. ``manylinux_2_28``, as PyTorch's own wheels have, is for
objects of a compiler of that image: ``.github/workflows/wheels.yml``. No tag names PyTorch: the object for its minor
version is looked for by name, and compiled where a wheel has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tag(BuildHookInterface):
    """Hook of wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the tag; hatchling has that of any machine until then."""
        if any(Path(self.root, "src/onebox/vgpu/native/built").glob("*.so")):
            build_data.update(pure_python=False, infer_tag=True)
