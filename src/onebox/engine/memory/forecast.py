"""The exact memory of a plan, found by compiling it. Pure: nothing is sent anywhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from onebox.engine.compile.compiler import Compiler
from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.memory.initial_contents import step_contents, step_peaks
from onebox.engine.memory.limits import host_shortage
from onebox.engine.memory.simulator import InitialContents, peaks_of
from onebox.engine.partition.weight_versions import WeightVersions, weight_versions
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.named_state import named_state, trained_names
from onebox.engine.workload.parameter_groups import Optimizers, optimizers_in
from onebox.graph import Loss
from onebox.plan import Plan
from onebox.pool import DeviceInfo
from onebox.pool.network.emulated import LinkMap
from onebox.wire.protocol.instructions import GroupDelays


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
    contents = step_contents(_compiler(*given, links=links), batch)
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
    compiler = _compiler(*given, late=staleness > 0, overlap=overlap, links=links)
    return step_peaks(step_contents(compiler, batch), ahead=ahead)


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
    return step_contents(_compiler(plan, model, loss, optimizer, batch, devices, captures, max_norm, delay), batch)


def _compiler(
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
) -> Compiler:
    new = functools.partial(next, itertools.count(1))
    optimizers = optimizers_in(optimizer)
    state = named_state(model, loss, new)
    wanted = trained_names(state, optimizers)
    late = late or plan.late
    compiler = Compiler(
        plan,
        captures,
        batch,
        devices=devices,
        links=links or {},
        state=state,
        optimizers=optimizers,
        wanted=wanted,
        versions=weight_versions(wanted, delay, new) if late else WeightVersions(),
        max_norm=max_norm,
        optimizer=new(),
        new=new,
        numbers=DefinitionNumbers(new),
        group_number=lambda members: new(),
    )
    compiler.windows = late or overlap
    return compiler
