"""The process that owns one device: buffers, programs, transfers, optimizer.

Public names are imported at first use: ``__main__`` runs before everything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebox.worker.faults import Fault
    from onebox.worker.optimizer.delay_compensation import AHEAD, LAST_UPDATE, PREDICTS, REMEMBERS, momentum_of
    from onebox.worker.optimizer.native import ALLOWED as OPTIMIZERS
    from onebox.worker.optimizer.native import for_each_group
    from onebox.worker.process.config import START_S, Ports, WorkerConfig

__all__ = [
    "AHEAD",
    "LAST_UPDATE",
    "OPTIMIZERS",
    "PREDICTS",
    "REMEMBERS",
    "START_S",
    "Fault",
    "Ports",
    "WorkerConfig",
    "for_each_group",
    "momentum_of",
]

_HOMES = {
    "OPTIMIZERS": ("onebox.worker.optimizer.native", "ALLOWED"),
    "AHEAD": ("onebox.worker.optimizer.delay_compensation", "AHEAD"),
    "LAST_UPDATE": ("onebox.worker.optimizer.delay_compensation", "LAST_UPDATE"),
    "PREDICTS": ("onebox.worker.optimizer.delay_compensation", "PREDICTS"),
    "REMEMBERS": ("onebox.worker.optimizer.delay_compensation", "REMEMBERS"),
    "START_S": ("onebox.worker.process.config", "START_S"),
    "Fault": ("onebox.worker.faults", "Fault"),
    "Ports": ("onebox.worker.process.config", "Ports"),
    "WorkerConfig": ("onebox.worker.process.config", "WorkerConfig"),
    "for_each_group": ("onebox.worker.optimizer.native", "for_each_group"),
    "momentum_of": ("onebox.worker.optimizer.delay_compensation", "momentum_of"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onebox.worker' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
