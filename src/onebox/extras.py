"""Optional packages: imported by one function, which says what is missing and how to install it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from onebox.errors import MissingExtra


class OptionalPackage(NamedTuple):
    """A package that only some uses of onebox need.

    Args:
        module: Its name in an import.
        distribution: Its name for pip.
        extra: The extra of onebox that it belongs to.
        purpose: The uses that need it.
    """

    module: str
    distribution: str
    extra: str
    purpose: str

    @property
    def remedy(self) -> str:
        """The command that installs it."""
        return f"pip install 'onebox[{self.extra}]'"


PACKAGES = (
    OptionalPackage("matplotlib", "matplotlib", "plot", "figures of plans, memory and pools"),
    OptionalPackage("PIL", "pillow", "images", "pictures in files"),
    OptionalPackage("prometheus_client", "prometheus-client", "agent", "onebox serve --metrics-port"),
    OptionalPackage("lz4", "lz4", "compression", "uploads compressed on slow links"),
    OptionalPackage("zstandard", "zstandard", "compression", "uploads compressed on slow links"),
    OptionalPackage("pyarrow", "pyarrow", "data", "Parquet and Arrow files"),
    OptionalPackage("datasets", "datasets", "data", "data sets of Hugging Face"),
    OptionalPackage("torchdata", "torchdata", "data", "graphs of torchdata.nodes"),
    OptionalPackage("ray", "ray", "cluster", "pools on a Ray cluster"),
)
"""All of them, in the order of the extras in pyproject.toml."""


def import_extra(name: str, user: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        name: The module, such as ``PIL.Image``; it belongs to one of :data:`PACKAGES`.
        user: The feature that needs it; the error's message begins with it.

    Raises:
        MissingExtra: The package is not installed, or cannot be imported.

    Example:
        >>> import_extra("matplotlib.figure", "A figure").__name__
        'matplotlib.figure'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        root = name.partition(".")[0]
        (package,) = (each for each in PACKAGES if each.module == root)
        absent = isinstance(error, ModuleNotFoundError) and error.name == root
        reason = "is not installed" if absent else f"cannot be imported ({' '.join(str(error).split())})"
        message = f"{user} needs {package.distribution}, which {reason}: {package.remedy}"
        raise MissingExtra(message, package=package.distribution, extra=package.extra) from error


__all__ = ["PACKAGES", "OptionalPackage", "import_extra"]
