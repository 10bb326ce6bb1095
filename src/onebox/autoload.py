"""Entry point of PyTorch's group ``torch.backends``: called when PyTorch is imported, in any process.

It does nothing unless the environment names devices: those of a parent process that shares its pool, as ``onebox run``
does, or those of ``ONEBOX_POOL``. The latter are PyTorch's accelerator under their own name, ``vgpu``; frameworks that
know accelerators by a list of names find them as ``cuda``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from onebox.torch_first import names_devices

if TYPE_CHECKING:
    from onebox.vgpu.runtime.context import DeviceContext

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages that know no accelerator called ``vgpu``."""


class _CudaForFrameworks(MetaPathFinder):
    """Finder of the frameworks, whose virtual devices are called ``cuda`` from the import of the first of them on.

    A search for a module alone, as a library's question whether there is one, changes nothing.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that another finder has, with a loader that names the devices first."""
        if name not in _FRAMEWORKS:
            return None
        for finder in [each for each in sys.meta_path if each is not self]:
            found = finder.find_spec(name, path, target)
            if found is not None:
                if found.loader is not None:
                    found.loader = _NamingLoader(found.loader)
                return found
        return None


class _NamingLoader(Loader):
    """Loader that gives the devices the name ``cuda``, and then loads a module by its own loader.

    Args:
        loader: The module's own loader, which is in its spec once it is loaded.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Name the devices, and load the module."""
        from onebox.vgpu import alias_cuda

        alias_cuda()
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)


def _profile(devices: DeviceContext, path: Path) -> None:
    """Write a timeline of this process beside that of the script, when it ends."""
    from onebox.cli.script_timelines import write_of_process

    events = devices.record_events()
    devices.pool.closing.insert(1, lambda: write_of_process(path, events))  # after what was recorded is sent


def autoload() -> None:
    """Make virtual devices known to PyTorch; the pool is attached, or opened, when a device is first used."""
    if not names_devices():
        return
    shared = os.environ.get("ONEBOX_PARENT")
    if shared:
        from onebox.vgpu import PROFILE, after_attach, alias_cuda

        alias_cuda()
        if path := os.environ.get(PROFILE):
            after_attach.append(lambda devices: _profile(devices, Path(path)))
    else:
        from onebox.vgpu import install_on_demand

        install_on_demand()
        sys.meta_path.insert(0, _CudaForFrameworks())
