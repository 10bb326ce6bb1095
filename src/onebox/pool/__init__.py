"""Pools of devices: those of this machine, of agents on other hosts or of a Ray cluster, each owned by a worker
process.

Public names are imported at first use: what starts workers needs no PyTorch, whose import takes a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebox.pool.client.connection import WorkerReply
    from onebox.pool.devices import DeviceInfo
    from onebox.pool.errors import raise_first
    from onebox.pool.network.emulated import Link
    from onebox.pool.open import open_pool
    from onebox.pool.pool import Pool
    from onebox.worker import Fault

__all__ = ["DeviceInfo", "Fault", "Link", "Pool", "WorkerReply", "open_pool", "raise_first"]

_HOMES = {
    "DeviceInfo": "onebox.pool.devices",
    "Fault": "onebox.worker",
    "Link": "onebox.pool.network.emulated",
    "Pool": "onebox.pool.pool",
    "WorkerReply": "onebox.pool.client.connection",
    "open_pool": "onebox.pool.open",
    "raise_first": "onebox.pool.errors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'onebox.pool' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
