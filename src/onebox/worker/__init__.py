"""The process that owns one device: buffers, programs, transfers, optimizer."""

from onebox.worker.faults import Fault
from onebox.worker.optimizer import ALLOWED as OPTIMIZERS
from onebox.worker.serve import Ports, WorkerConfig

__all__ = ["OPTIMIZERS", "Fault", "Ports", "WorkerConfig"]
