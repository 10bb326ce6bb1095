"""The process that owns one device: buffers, programs, transfers, optimizer.

Public names are imported at first use: ``__main__`` runs before everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebox.lazy_names import lazy_names

if TYPE_CHECKING:
    from onebox.worker.faults import Fault
    from onebox.worker.optimizer.delay_compensation import AHEAD, LAST_UPDATE, PREDICTS, REMEMBERS, momentum_of
    from onebox.worker.optimizer.native import ALLOWED as OPTIMIZERS
    from onebox.worker.optimizer.native import for_each_group
    from onebox.worker.process.config import SHARING_KEY_BYTES, START_S, Ports, WorkerConfig

__all__ = [
    "AHEAD",
    "LAST_UPDATE",
    "OPTIMIZERS",
    "PREDICTS",
    "REMEMBERS",
    "SHARING_KEY_BYTES",
    "START_S",
    "Fault",
    "Ports",
    "WorkerConfig",
    "for_each_group",
    "momentum_of",
]

__getattr__ = lazy_names(
    "onebox.worker",
    {
        "onebox.worker.faults": ("Fault",),
        "onebox.worker.optimizer.delay_compensation": ("AHEAD", "LAST_UPDATE", "PREDICTS", "REMEMBERS", "momentum_of"),
        "onebox.worker.optimizer.native": ("ALLOWED as OPTIMIZERS", "for_each_group"),
        "onebox.worker.process.config": ("Ports", "SHARING_KEY_BYTES", "START_S", "WorkerConfig"),
    },
)
