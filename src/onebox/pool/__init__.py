"""Pools of devices: those of this machine, of agents on other hosts or of a Ray cluster, each owned by a worker
process.

Public names are imported at first use: what starts workers needs no PyTorch, whose import takes a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebox.lazy_names import lazy_names

if TYPE_CHECKING:
    from onebox.pool.client.connection import WorkerReply
    from onebox.pool.devices import DeviceInfo
    from onebox.pool.errors import raise_first
    from onebox.pool.network.emulated import Link
    from onebox.pool.open import open_pool
    from onebox.pool.pool import Pool
    from onebox.worker import Fault

__all__ = ["DeviceInfo", "Fault", "Link", "Pool", "WorkerReply", "open_pool", "raise_first"]

__getattr__ = lazy_names(
    "onebox.pool",
    {
        "onebox.pool.client.connection": ("WorkerReply",),
        "onebox.pool.devices": ("DeviceInfo",),
        "onebox.pool.errors": ("raise_first",),
        "onebox.pool.network.emulated": ("Link",),
        "onebox.pool.open": ("open_pool",),
        "onebox.pool.pool": ("Pool",),
        "onebox.worker": ("Fault",),
    },
)
