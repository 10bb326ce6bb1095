"""Host memory used by a worker, counted separately from the device's memory, and bounded."""

from __future__ import annotations

import psutil

from onebox.sizes import enough_text, size_text
from onebox.worker.memory.buffers import QuotaExceeded

HOST_SHARE = 4
"""Host memory of a worker with a quota, as a multiple of the quota: Adam's state and a copy of the parameters are three
times a model that itself may fill the device, and the activations of a step are rarely more."""


class HostMemory:
    """Bytes of host memory for data that would otherwise be on the device.

    They belong to an optimizer on the host, and to offloaded activations. They do not count towards the quota, which
    limits the device; on a CPU worker both are the same kind of memory, counted separately here.

    Args:
        quota_bytes: The worker's quota; the bound is :data:`HOST_SHARE` times as much, or the whole host memory without
            a quota.
    """

    def __init__(self, quota_bytes: int) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0
        memory = psutil.virtual_memory()
        self.limit_bytes = HOST_SHARE * quota_bytes or int(memory.total)
        self.free_bytes = int(memory.available)  # of the host at the beginning, for all processes

    def charge(self, more_bytes: int) -> None:
        """Count allocated bytes before or after the allocation; negative to free them.

        Raises:
            QuotaExceeded: They exceed the bound; they are not counted then.
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
