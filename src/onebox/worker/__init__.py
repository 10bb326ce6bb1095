"""The process that owns one device: buffers, programs, transfers, optimizer.

What others may use is imported when it is first asked for: ``__main__`` comes before all else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebox.worker.delays import AHEAD, LAST_UPDATE, PREDICTS, REMEMBERS, momentum_of
    from onebox.worker.faults import Fault
    from onebox.worker.optimizer import ALLOWED as OPTIMIZERS
    from onebox.worker.optimizer import for_each_group
    from onebox.worker.serve import Ports, WorkerConfig

__all__ = [
    "AHEAD",
    "LAST_UPDATE",
    "OPTIMIZERS",
    "PREDICTS",
    "REMEMBERS",
    "Fault",
    "Ports",
    "WorkerConfig",
    "for_each_group",
    "momentum_of",
]

_HOMES = {
    "OPTIMIZERS": ("onebox.worker.optimizer", "ALLOWED"),
    "AHEAD": ("onebox.worker.delays", "AHEAD"),
    "LAST_UPDATE": ("onebox.worker.delays", "LAST_UPDATE"),
    "PREDICTS": ("onebox.worker.delays", "PREDICTS"),
    "REMEMBERS": ("onebox.worker.delays", "REMEMBERS"),
    "Fault": ("onebox.worker.faults", "Fault"),
    "Ports": ("onebox.worker.serve", "Ports"),
    "WorkerConfig": ("onebox.worker.serve", "WorkerConfig"),
    "for_each_group": ("onebox.worker.optimizer", "for_each_group"),
    "momentum_of": ("onebox.worker.delays", "momentum_of"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onebox.worker' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
