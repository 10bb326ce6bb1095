"""Entry point of PyTorch's group ``torch.backends``: called when PyTorch is imported, in any process.

It does nothing unless the environment names devices: those of a parent process that shares its pool, as ``onebox run``
does, or those of ``ONEBOX_POOL``. The latter are PyTorch's accelerator under their own name, ``vgpu``; frameworks that
know accelerators by a list of names find them as ``cuda``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OWN = ("onebox.agent", "onebox.cli", "onebox.worker")
"""Packages whose processes open a pool themselves, or need none."""

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


class _TorchFirst(MetaPathFinder):
    """Finder that imports PyTorch before any package of this project that needs it.

    A package in the middle of its own import cannot serve PyTorch's, which calls :func:`autoload`.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that PyTorch's import has imported; else none, so that another finder has it."""
        package = ".".join(name.split(".")[:2])
        if not package.startswith("onebox.") or package in _OWN or package == __name__ or not _is_wanted():
            return None
        sys.meta_path.remove(self)
        if "torch" not in sys.modules:
            importlib.import_module("torch")
        found = sys.modules.get(name)
        return None if found is None else ModuleSpec(name, _PresentLoader(found))


class _PresentLoader(Loader):
    """Loader of a module that is there already, which stays as it is.

    Args:
        module: The module.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec again."""
        module.__spec__ = self._spec


def _is_wanted() -> bool:
    """Return whether the environment names devices, and this is not a process that has them itself."""
    named = os.environ.get("ONEBOX_PARENT") or os.environ.get("ONEBOX_POOL")
    return bool(named) and not any(name in sys.modules for name in _OWN)


def import_torch_first() -> None:
    """Have PyTorch imported before the packages of this project that need it; called when the project is imported."""
    if _is_wanted() and "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchFirst())


def autoload() -> None:
    """Make virtual devices known to PyTorch; the pool is attached, or opened, when a device is first used."""
    if not _is_wanted():
        return
    shared = os.environ.get("ONEBOX_PARENT")
    if shared:
        from onebox.vgpu import alias_cuda

        alias_cuda()
    else:
        from onebox.vgpu import install_on_demand

        install_on_demand()
        sys.meta_path.insert(0, _CudaForFrameworks())
