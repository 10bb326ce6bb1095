"""Transport paths of tensors from worker to worker."""

from __future__ import annotations

import os
from collections.abc import Sequence

from onebox.errors import UsageError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.devices import DeviceInfo
from onebox.wire.protocol.responses import Joined

SHARED_VARIABLE = "ONEBOX_SHARED_MEMORY"


def shares_memory() -> bool:
    """Return whether workers of one host may share memory: the value of ``ONEBOX_SHARED_MEMORY``, 1 by default.

    Raises:
        UsageError: Its value is neither 0 nor 1.
    """
    said = os.environ.get(SHARED_VARIABLE, "1")
    if said not in ("0", "1"):
        raise UsageError(f"{SHARED_VARIABLE} is {said!r}; allowed are 1, and 0 for sockets between workers of a host")
    return said == "1"


def explain_unshared(members: Sequence[DeviceInfo], answers: Sequence[WorkerReply]) -> list[str]:
    """Return a line for each member of a group that does not share memory with another one on the same host.

    Args:
        members: The devices, by their ranks.
        answers: Their replies to the joining of the group.
    """
    lines = []
    for one, answer in zip(members, answers, strict=True):
        for joined in answer.results:
            for rank, why in joined.apart if isinstance(joined, Joined) else ():
                if 0 <= rank < len(members):
                    other = members[rank]
                    lines.append(
                        f"device {one.number} ({one.device} on {one.host}) does not share memory with device "
                        f"{other.number} ({other.device} on {other.host}), which is on the same machine: {why}; what "
                        "goes between them goes through sockets"
                    )
    return lines
