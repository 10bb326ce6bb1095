"""The process that owns one device: buffers, programs, transfers, optimizer.

What others may use is imported when it is first asked for: ``__main__`` comes before all else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebox.worker.faults import Fault
    from onebox.worker.optimizer import ALLOWED as OPTIMIZERS
    from onebox.worker.serve import Ports, WorkerConfig

__all__ = ["OPTIMIZERS", "Fault", "Ports", "WorkerConfig"]

_HOMES = {
    "OPTIMIZERS": ("onebox.worker.optimizer", "ALLOWED"),
    "Fault": ("onebox.worker.faults", "Fault"),
    "Ports": ("onebox.worker.serve", "Ports"),
    "WorkerConfig": ("onebox.worker.serve", "WorkerConfig"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onebox.worker' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
