"""Which devices this machine has, and which of them a pool is asked for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from onebox.errors import UsageError

MOST_CPU_WORKERS = 4
"""Without accelerators, one CPU worker a core up to this many."""

_GRAMMAR = "'auto', or a list such as 'cuda', 'cuda:0,cuda:1', 'cpu', 'cpu*3' (three CPU workers), 'cuda,cpu'"


@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """One worker to start.

    Args:
        device: ``cpu`` or ``cuda:k``.
        threads: Threads that its CPU operators may use.
    """

    device: str
    threads: int


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def requested_devices(spec: str = "auto", threads: int | None = None) -> list[DeviceRequest]:
    """Turn a specification into the workers to start.

    Args:
        spec: ``auto`` for all accelerators of this machine or, with none, one CPU worker a core up to four; or a list
            separated by commas of ``cuda``, ``cuda:K``, ``cpu`` and ``cpu*N``.
        threads: Threads for each worker; an equal share of the cores when ``None``.

    Raises:
        UsageError: The specification is wrong, or names a device that is not there.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads={threads}: a worker needs at least one thread")
    accelerators = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names: list[str] = []
    for part in _default(accelerators) if spec.strip() == "auto" else spec.split(","):
        names += _expand(part.strip(), spec, accelerators)
    share = max(1, cores() // len(names))
    return [DeviceRequest(device=name, threads=threads or share) for name in names]


def _default(accelerators: int) -> list[str]:
    return ["cuda"] if accelerators else [f"cpu*{min(cores(), MOST_CPU_WORKERS)}"]


def _expand(part: str, spec: str, accelerators: int) -> list[str]:
    match = re.fullmatch(r"cpu(?:\*([1-9]\d{0,2}))?", part)
    if match:
        return ["cpu"] * int(match[1] or 1)
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", part)
    if not match:
        raise UsageError(f"pool {spec!r} is not understood at {part!r}; allowed: {_GRAMMAR}")
    wanted = range(accelerators) if match[1] is None else [int(match[1])]
    if not wanted or any(index >= accelerators for index in wanted):
        raise UsageError(f"pool {spec!r} asks for {part}, but this machine has {accelerators} CUDA devices")
    return [f"cuda:{index}" for index in wanted]
