"""The import of PyTorch before the packages of this project, where the environment names devices.

PyTorch then imports those packages itself, which it could not do in the middle of the import of one of them.
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

_LIGHT = ("onebox.autoload", "onebox.lazy_names", "onebox.torch_first")
"""Modules that PyTorch's import needs first."""


class _TorchFirst(MetaPathFinder):
    """Finder that imports PyTorch before any package of this project that needs it.

    A package in the middle of its own import cannot serve PyTorch's, which calls :func:`onebox.autoload.autoload`.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that PyTorch's import has imported; else none, so that another finder has it."""
        package = ".".join(name.split(".")[:2])
        if not package.startswith("onebox.") or package in _OWN or package in _LIGHT or not names_devices():
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


def names_devices() -> bool:
    """Return whether the environment names devices, and this is not a process that has them itself."""
    named = os.environ.get("ONEBOX_PARENT") or os.environ.get("ONEBOX_POOL")
    return bool(named) and not any(name in sys.modules for name in _OWN)


def import_torch_first() -> None:
    """Have PyTorch imported before the packages of this project that need it; called when the project is imported."""
    if names_devices() and "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchFirst())
