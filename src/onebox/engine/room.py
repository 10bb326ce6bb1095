"""The error that says that there is no room for what a trainer is to do; it is raised before anything is sent."""

from __future__ import annotations

from onebox.engine.curve import Peak
from onebox.errors import DeviceMemoryError
from onebox.pool import DeviceInfo
from onebox.pool.failures import ADVICE_IN_STEPS, Place

IN_STEPS = f"no step was begun\n  {ADVICE_IN_STEPS}"
IN_EVALUATION = (
    "nothing was sent\n  evaluate smaller batches, use a plan of smaller micro-batches, or a larger budget (memory=)"
)
"""What has happened, and what would help."""


def no_room(peak: Peak, device: DeviceInfo, room_bytes: int, *, advice: str = IN_STEPS) -> DeviceMemoryError:
    """Return the error that says that a step, or an evaluation, does not fit a device.

    Args:
        peak: What the device would need, and when.
        device: The device.
        room_bytes: What it has, or may take.
        advice: What has happened, and what would help.
    """
    place = Place(worker=device.number, host=device.host, device=device.device)
    work_bytes = peak.sorts.get("work", 0)
    error = DeviceMemoryError(
        f"{place}: {peak.operator or peak.name} would fail in {peak.name}: {peak.size_bytes} bytes needed, but the "
        f"quota is {room_bytes}: {peak.size_bytes - room_bytes} too many; {advice}",
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
