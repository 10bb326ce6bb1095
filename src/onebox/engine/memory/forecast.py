"""Exact memory forecast of a plan, by compiling it without sending anything."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

from torch import nn

from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.memory.limits import host_shortage
from onebox.engine.memory.simulator import InitialContents, peaks_of
from onebox.engine.partition.weight_versions import weight_versions
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.graph import Loss
from onebox.plan import ASYNC, Plan
from onebox.pool import DeviceInfo, Pool, WorkerReply
from onebox.pool.network.emulated import LinkMap
from onebox.wire.protocol.instructions import GroupDelays


class Nowhere:
    """Stand-in for a pool without workers: everything sent to them is dropped.

    Args:
        devices: Its devices.
        links: Its emulated links, which decide which values are sent in chunks.
    """

    def __init__(self, devices: Sequence[DeviceInfo], links: LinkMap | None = None) -> None:
        self.devices = tuple(devices)
        self.links: LinkMap = links or {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self.devices)

    def new_number(self) -> int:
        return next(self._numbers)

    def post(self, worker: int, instructions: Any, frames: Any = (), *, answer: bool = False) -> Future[WorkerReply]:
        done: Future[WorkerReply] = Future()
        done.set_result(WorkerReply((), (), ()))
        return done

    def form_group(self, workers: Sequence[int], via: str) -> int:
        return self.new_number()

    def leave_group(self, group: int, workers: Sequence[int]) -> None:
        pass


class MemoryForecast(NamedTuple):
    """Exact memory requirement of a plan.

    Args:
        peaks: Peak bytes of each device.
        lack: Description of the host memory that is missing; empty if there is enough.
    """

    peaks: Mapping[int, int]
    lack: str = ""


def count_memory(
    plan: Plan,
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizers,
    batch: Batch,
    *,
    devices: Sequence[DeviceInfo],
    captures: Captures,
    max_norm: float = 0.0,
    delay: GroupDelays = "none",
    links: LinkMap | None = None,
) -> MemoryForecast:
    """Return the peak memory of each device of a plan in a step, and the host memory that is missing.

    Args and errors are those of :func:`forecast_memory`.
    """
    given = plan, model, loss, optimizer, batch, devices, captures, max_norm, delay
    contents = _ready(*given, links=links).contents(batch)
    peaks = {device: peaks_of(found) for device, found in contents.items()}
    lack = host_shortage({device: peaks[device][1] + found.host_bytes for device, found in contents.items()}, devices)
    return MemoryForecast({device: peak for device, (peak, _) in peaks.items()}, "" if lack is None else str(lack))


def forecast_memory(
    plan: Plan,
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizers,
    batch: Batch,
    *,
    devices: Sequence[DeviceInfo],
    captures: Captures,
    max_norm: float = 0.0,
    ahead: int = 0,
    delay: GroupDelays = "none",
    staleness: int = 0,
    overlap: bool = False,
    links: LinkMap | None = None,
) -> dict[int, int]:
    """Return the peak memory of each device of a plan in a step, from buffer lifetimes alone.

    Args:
        plan: The plan.
        model: The model.
        loss: The loss.
        optimizer: The optimizer.
        batch: A batch.
        devices: All devices of the pool.
        captures: The captured model.
        max_norm: Gradient clipping norm; 0 for none.
        ahead: Number of similar batches that are uploaded in advance.
        delay: Treatment of late gradients, if any.
        staleness: 1 if steps use older weights under plans of one stage, too; asynchronous plans always do.
        overlap: Whether exact steps overlap.
        links: The pool's emulated links, if it has any.

    Raises:
        UsageError: The plan is for another model.
        CaptureError: The model cannot be divided among replicas.
    """
    given = plan, model, loss, optimizer, batch, devices, captures, max_norm, delay
    return _ready(*given, late=staleness > 0, overlap=overlap, links=links).peaks(batch, ahead=ahead)


def forecast_contents(
    plan: Plan,
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizers,
    batch: Batch,
    *,
    devices: Sequence[DeviceInfo],
    captures: Captures,
    max_norm: float = 0.0,
    delay: GroupDelays = "none",
) -> dict[int, InitialContents]:
    """Return the contents of each device of a plan at the beginning of a step, from which its memory can be simulated.

    Args and errors are those of :func:`forecast_memory`.
    """
    return _ready(plan, model, loss, optimizer, batch, devices, captures, max_norm, delay).contents(batch)


def _ready(
    plan: Plan,
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizers,
    batch: Batch,
    devices: Sequence[DeviceInfo],
    captures: Captures,
    max_norm: float,
    delay: GroupDelays,
    *,
    late: bool = False,
    overlap: bool = False,
    links: LinkMap | None = None,
) -> InstalledPlan:
    nowhere = cast(Pool, Nowhere(devices, links))
    remote = RemoteState(model, loss, optimizer, nowhere)
    if late := late or plan.schedule == ASYNC:
        remote.versions = weight_versions(remote.wanted, delay, nowhere.new_number)
    ready = InstalledPlan(plan, nowhere, captures, remote, batch, max_norm)
    ready.compiler.windows = late or overlap
    return ready
