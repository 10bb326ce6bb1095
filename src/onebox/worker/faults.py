"""Fault injection for tests, at a given instruction."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:  # the configuration of a worker holds faults, and what starts workers needs no PyTorch
    from onebox.worker.progress import WorkerProgress


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """One fault.

    Args:
        kind: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``hang`` (sleeps), ``error`` (an exception), ``memory`` (out of
            memory), ``device`` (the device fails for good).
        instruction: Kind of instruction that triggers it, such as ``call`` or ``reduce``; or a part of one: ``copying``
            (a tensor to a snapshot), ``giving`` and ``taking`` (a piece of one).
        count: Number of the occurrence of that kind, from 1.
    """

    kind: Literal["kill", "stop", "hang", "error", "memory", "device"]
    instruction: str
    count: int


class FaultInjector:
    """Injects faults.

    Args:
        faults: The faults; none in ordinary use.
    """

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self._faults = {(fault.instruction, fault.count): fault.kind for fault in faults}
        self._seen: Counter[str] = Counter()

    def before(self, progress: WorkerProgress) -> None:
        """Inject the fault, if any, for the instruction that begins."""
        if self._faults:
            self.at(progress.doing)

    def at(self, doing: str) -> None:
        """Inject the fault, if any, for the operation that begins."""
        if not self._faults:
            return
        self._seen[doing] += 1
        kind = self._faults.get((doing, self._seen[doing]))
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "hang":
            time.sleep(3600)
        elif kind == "error":
            raise RuntimeError("injected fault")
        elif kind == "memory":
            import torch

            raise torch.OutOfMemoryError("injected fault: out of memory")
        elif kind == "device":
            from onebox.worker.accelerator import DeviceFailed

            raise DeviceFailed("injected fault: device-side assert triggered")
