"""The host's memory beside the device's: what a worker keeps there, counted for itself and bounded."""

from __future__ import annotations

import psutil

from onebox.sizes import enough_text, size_text
from onebox.worker.memory.buffers import QuotaExceeded

HOST_SHARE = 4
"""A worker with a quota may take so many times that of its host's memory: Adam's state and a copy of the parameters are
three times a model that itself may fill the device, and the activations of a step are rarely more."""


class HostMemory:
    """Bytes of the host's memory that a worker keeps things in which would else be on its device.

    They are those of an optimizer that steps on the host, and of activations that wait there. They never count for the
    quota, which is about the device; on a CPU worker both are the same kind of memory, told apart by this account.

    Args:
        quota_bytes: The worker's quota; the bound is :data:`HOST_SHARE` times as much, or all that the host has where
            there is none.
    """

    def __init__(self, quota_bytes: int) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0
        memory = psutil.virtual_memory()
        self.limit_bytes = HOST_SHARE * quota_bytes or int(memory.total)
        self.free_bytes = int(memory.available)  # of the host, at the beginning, whoever takes it

    def charge(self, more_bytes: int) -> None:
        """Count bytes that are taken, or about to be; negative to give them back.

        Raises:
            QuotaExceeded: They are above the bound; they are not counted then.
        """
        total = self.used_bytes + more_bytes
        if more_bytes > 0 and total > self.limit_bytes:
            raise QuotaExceeded(
                f"{enough_text(total)} of the host's memory needed, but {size_text(self.limit_bytes)} are allowed: "
                f"{HOST_SHARE} times the quota, or all that the host has",
                asked_bytes=more_bytes,
                used_bytes=self.used_bytes,
                allowed_bytes=self.limit_bytes,
            )
        self.used_bytes = total
        self.peak_bytes = max(self.peak_bytes, total)
