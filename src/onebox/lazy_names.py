"""Public names of packages that are imported at first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its public names at first use.

    Args:
        package: The package.
        modules: The names, by the module that has them; ``NAME as OTHER`` for one that the package calls OTHER.
    """
    homes: dict[str, tuple[str, str]] = {}
    for module, names in modules.items():
        for name in names:
            attribute, _, renamed = name.partition(" as ")
            homes[renamed or attribute] = module, attribute

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = homes[name]
        return getattr(importlib.import_module(module), attribute)

    return get
