"""Pools on a Ray cluster: Ray allocates devices, and starts an agent for each; all else is as with agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebox.lazy_names import lazy_names

if TYPE_CHECKING:
    from onebox.cluster.source import RaySource

__all__ = ["RaySource"]

__getattr__ = lazy_names("onebox.cluster", {"onebox.cluster.source": ("RaySource",)})
