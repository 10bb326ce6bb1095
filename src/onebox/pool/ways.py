"""Which ways tensors may take from worker to worker."""

from __future__ import annotations

import os

from onebox.errors import UsageError

SHARED_VARIABLE = "ONEBOX_SHARED_MEMORY"


def shares_memory() -> bool:
    """Tell whether workers of one host may share memory: what ``ONEBOX_SHARED_MEMORY`` says, 1 where it is not set.

    Raises:
        UsageError: It says something else than 0 or 1.
    """
    said = os.environ.get(SHARED_VARIABLE, "1")
    if said not in ("0", "1"):
        raise UsageError(f"{SHARED_VARIABLE} is {said!r}; allowed are 1, and 0 for sockets between workers of a host")
    return said == "1"
