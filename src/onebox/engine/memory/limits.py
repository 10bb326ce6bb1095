"""Memory checks before a trainer sends anything, and their errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onebox.engine.memory.timeline import MemoryPeak
from onebox.errors import DeviceMemoryError
from onebox.pool import DeviceInfo
from onebox.pool.errors import ADVICE_IN_STEPS, WorkerLocation
from onebox.sizes import enough_text, size_text

IN_STEPS = f"no step was begun\n  {ADVICE_IN_STEPS}"
IN_EVALUATION = (
    "nothing was sent\n  evaluate smaller batches, use a plan of smaller micro-batches, or a larger budget (memory=)"
)
"""State of the run, and remedies."""


def out_of_memory_error(
    peak: MemoryPeak, device: DeviceInfo, room_bytes: int, *, advice: str = IN_STEPS
) -> DeviceMemoryError:
    """Return the error for a step or an evaluation that does not fit a device.

    Args:
        peak: The device's required peak.
        device: The device.
        room_bytes: Its available memory.
        advice: State of the run, and remedies.
    """
    place = WorkerLocation(worker=device.number, host=device.host, device=device.device)
    work_bytes = peak.sorts.get("work", 0)
    error = DeviceMemoryError(
        f"{place}: {peak.operator or peak.name} would fail in {peak.name}: {enough_text(peak.size_bytes)} needed, but "
        f"the quota is {size_text(room_bytes)}: {enough_text(peak.size_bytes - room_bytes)} too much; {advice}",
        operator=peak.operator,
        worker=device.number,
        host=device.host,
        device=device.device,
        asked_bytes=work_bytes,
        used_bytes=peak.size_bytes - work_bytes,
        allowed_bytes=room_bytes,
    )
    error.doing, error.stage = peak.name, peak.action.stage if peak.action else None
    return error


@dataclass(frozen=True, kw_only=True)
class HostShortage:
    """A host without enough memory for offloaded data.

    Args:
        device: A device with the largest need.
        needed_bytes: Peak need: of that device, or of all devices of the host.
        allowed_bytes: Available memory.
        together: Whether the need is that of all devices.
    """

    device: DeviceInfo
    needed_bytes: int
    allowed_bytes: int
    together: bool

    def __str__(self) -> str:
        own = f"device {self.device.number}"
        whose, limit = ("all its devices", "it had free") if self.together else (own, f"{own} may take there")
        return (
            f"what {whose} would keep in the memory of host {self.device.host} comes to "
            f"{size_text(self.needed_bytes)}, but {limit} {size_text(self.allowed_bytes)}"
        )

    def error(self) -> DeviceMemoryError:
        """Return the error that refuses a step for it."""
        found = DeviceMemoryError(
            f"{self}; no step was begun\n  offload or swap fewer stages, leave the optimizer on the device "
            "(update='device', and state='device' of the outer one), or give the device a larger budget (memory=), of "
            "which its host's share is a multiple",
            worker=self.device.number,
            host=self.device.host,
            device=self.device.device,
            asked_bytes=self.needed_bytes,
            allowed_bytes=self.allowed_bytes,
        )
        found.doing = "waiting in the host's memory"
        return found


def host_shortage(needs: Mapping[int, int], devices: Sequence[DeviceInfo]) -> HostShortage | None:
    """Return a host without enough memory for its devices' offloaded data; ``None`` if all have enough.

    Args:
        needs: Peak bytes in host memory of each device.
        devices: All devices of the pool. Emulated devices, which store nothing, are left out.
    """
    needs = {number: needed for number, needed in needs.items() if devices[number].kind != "sim"}
    together: dict[str, list[DeviceInfo]] = {}
    for number, needed in sorted(needs.items(), key=lambda pair: -pair[1]):
        device = devices[number]
        together.setdefault(device.host, []).append(device)
        if device.host_bytes and needed > device.host_bytes:
            return HostShortage(device=device, needed_bytes=needed, allowed_bytes=device.host_bytes, together=False)
    for members in together.values():
        needed, free = sum(needs[one.number] for one in members), min(one.host_free_bytes for one in members)
        if free and needed > free:
            return HostShortage(device=members[0], needed_bytes=needed, allowed_bytes=free, together=True)
    return None
