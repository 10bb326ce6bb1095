"""What a failure is called: from exceptions of any library to what the client is told."""

from __future__ import annotations

from typing import Literal

import torch

from onebox.errors import WireError
from onebox.wire.sayings import Failure
from onebox.worker.groups import PeerLost
from onebox.worker.interfaces import NoAddress
from onebox.worker.sim import NoValues
from onebox.worker.store import QuotaExceeded
from onebox.worker.tape import OperatorFailed


def explain(error: Exception, doing: str) -> Failure:
    """Turn an exception into a failure for the client.

    Args:
        error: What was raised.
        doing: The instruction.
    """
    if isinstance(error, StopIteration):
        return Failure("protocol", doing, "the message has fewer frames than it needs")
    if isinstance(error, PeerLost):
        return Failure("peer", doing, str(error))
    if isinstance(error, NoAddress):
        return Failure("address", doing, str(error))
    if isinstance(error, NoValues):
        return Failure("values", doing, str(error))
    if isinstance(error, OperatorFailed):
        cause = error.__cause__ or error
        return Failure(_kind(cause), error.operator, _first_lines(cause), error.shapes, type(cause).__name__)
    if isinstance(error, WireError | ValueError):
        return Failure("protocol", doing, _first_lines(error))
    return Failure(_kind(error), doing, _first_lines(error), "", type(error).__name__)


def _kind(error: BaseException) -> Literal["memory", "operator", "peer"]:
    if isinstance(error, PeerLost):
        return "peer"
    memory = isinstance(error, QuotaExceeded | torch.OutOfMemoryError | MemoryError)
    return "memory" if memory or "DefaultCPUAllocator" in str(error) else "operator"


def _first_lines(error: BaseException, lines: int = 4) -> str:
    text = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return "\n".join(text[:lines])
