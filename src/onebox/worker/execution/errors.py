"""Conversion of exceptions of any library to the failures reported to the client."""

from __future__ import annotations

import re
from typing import Literal

from msgspec.structs import replace

from onebox.errors import UsageError, WireError
from onebox.sizes import parse_size
from onebox.wire import TensorSpec
from onebox.wire.protocol.responses import WorkerFailure
from onebox.worker.accelerator import DeviceFailed
from onebox.worker.comm.api import RankLost
from onebox.worker.device import ComputeDevice
from onebox.worker.memory.buffers import QuotaExceeded, lacks_memory
from onebox.worker.programs.interpreter import OperatorFailed
from onebox.worker.system.network_interfaces import NoAddress


class NoValues(Exception):
    """Elements of a tensor without elements were requested."""

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(
            f"{spec} on a sim device has no values: the device computes nothing; allowed are questions about times, "
            "memory and digests of shapes"
        )


def describe_failure(error: Exception, doing: str, place: tuple[int, int] | None = None) -> WorkerFailure:
    """Convert an exception to a failure for the client.

    Args:
        error: The exception.
        doing: The instruction.
        place: Number of the routine and index of its instruction; ``None`` outside of routines.
    """
    failure = _explain(error, doing)
    if failure.kind == "memory":
        cause = error.__cause__ if isinstance(error, OperatorFailed) else None
        asked_bytes, used_bytes, allowed_bytes = memory_figures(cause or error)
        failure = replace(failure, asked_bytes=asked_bytes, used_bytes=used_bytes, allowed_bytes=allowed_bytes)
    return replace(failure, routine=place[0], place=place[1]) if place else failure


def require_device(device: ComputeDevice, error: Exception, doing: str) -> None:
    """Require, after an error, that the device can still work.

    A failed kernel makes every later call to the driver of a GPU fail in this process, whatever it asks for. So one
    that does not wait tells this error from others, such as a lack of memory, independent of their texts.

    Args:
        device: The device.
        error: The error.
        doing: The instruction.

    Raises:
        DeviceFailed: It cannot.
    """
    try:
        device.accelerator.current().record().query()
    except RuntimeError:
        failure = _explain(error, doing)
        where = f"{failure.operator} {failure.shapes}".strip()
        raise DeviceFailed(
            f"{device.name} has failed, and this process, which can no longer use it, ends; the failure was noticed in "
            f"{where}, perhaps after the kernel that caused it: {failure.message}"
        ) from error


def _explain(error: Exception, doing: str) -> WorkerFailure:
    if isinstance(error, StopIteration):
        return WorkerFailure("protocol", doing, "the message has fewer frames than it needs")
    if isinstance(error, RankLost):
        return WorkerFailure("peer", doing, str(error))
    if isinstance(error, NoAddress):
        return WorkerFailure("address", doing, str(error))
    if isinstance(error, NoValues):
        return WorkerFailure("values", doing, str(error))
    if isinstance(error, OperatorFailed):
        cause = error.__cause__ or error
        said, kind = _first_lines(cause), type(cause).__name__
        return WorkerFailure(_kind(cause), error.operator, said, error.shapes, kind, index=error.index)
    if isinstance(error, WireError | ValueError):
        return WorkerFailure("protocol", doing, _first_lines(error))
    return WorkerFailure(_kind(error), doing, _first_lines(error), "", type(error).__name__)


def _kind(error: BaseException) -> Literal["memory", "operator", "peer"]:
    if isinstance(error, RankLost):
        return "peer"
    return "memory" if lacks_memory(error) else "operator"


def _first_lines(error: BaseException, lines: int = 4) -> str:
    text = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return "\n".join(text[:lines])


_SIZES = {
    "asked": re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)"),
    "used": re.compile(r"Of the allocated memory ([\d.]+ \w+) is allocated by PyTorch"),
    "allowed": re.compile(r"([\d.]+ \w+) allowed;"),
    "capacity": re.compile(r"total capacity of ([\d.]+ \w+)"),
}
"""Out-of-memory messages of the allocators of PyTorch 2.11 to 2.13: c10's ``CUDACachingAllocator.cpp``, which rounds,
and ``alloc_cpu.cpp``."""


def memory_figures(error: BaseException) -> tuple[int, int, int]:
    """Return the requested, used and allowed bytes of an out-of-memory error; 0 if unknown."""
    if isinstance(error, QuotaExceeded):
        return error.asked_bytes, error.used_bytes, error.allowed_bytes
    found = {}
    for name, pattern in _SIZES.items():
        match = pattern.search(str(error))
        try:
            found[name] = parse_size(name, match[1].removesuffix("bytes")) if match else 0
        except UsageError:
            found[name] = 0
    return found["asked"], found["used"], found["allowed"] or found["capacity"]
