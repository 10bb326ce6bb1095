"""The exact memory of a plan, found by compiling it. Pure: nothing is sent anywhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from onebox.engine.compile.compiler import Compiler
from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.memory.initial_contents import BytesBeside, StateBytes, no_bytes_beside, step_contents
from onebox.engine.memory.limits import host_shortage
from onebox.engine.memory.simulator import InitialContents, peaks_of
from onebox.engine.partition.weight_versions import WeightVersions, weight_versions
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.named_state import named_state, trained_names
from onebox.engine.workload.parameter_groups import Optimizers, optimizers_in
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


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A model, its optimizer, a batch and devices: all that the memory of a step depends on, except the plan.

    Args:
        captures: The captured model.
        optimizer: The optimizer.
        batch: A batch.
        devices: All devices of the pool.
        links: The pool's emulated links, if it has any.
        plain_links: Whether connections between its hosts are not encrypted.
        max_norm: Gradient clipping norm; 0 for none.
        ahead: Number of similar batches that are uploaded in advance.
        delay: Treatment of late gradients, if any.
        staleness: 1 if steps use older weights under plans of one stage, too; asynchronous plans always do.
        overlap: Whether exact steps overlap.
        beside: Returns the further state of each device.
    """

    captures: Captures
    optimizer: Optimizers
    batch: Batch
    devices: Sequence[DeviceInfo]
    links: LinkMap | None = None
    plain_links: bool = False
    max_norm: float = 0.0
    ahead: int = 0
    delay: GroupDelays = "none"
    staleness: int = 0
    overlap: bool = False
    beside: BytesBeside = no_bytes_beside
    _counted: dict[Plan, MemoryForecast] = field(default_factory=dict, init=False, repr=False, compare=False)

    def count(self, plan: Plan) -> MemoryForecast:
        """Return the peak memory of each device of a plan in a step, and the host memory that is missing.

        It follows from buffer lifetimes alone. A plan is counted once, whatever peaks it predicts.

        Raises:
            UsageError: The plan is for another model.
            CaptureError: The model cannot be divided among replicas.
        """
        told = plan.predicted
        key = plan if told is None else replace(plan, predicted=replace(told, peak_bytes=(0,) * len(told.peak_bytes)))
        if key not in self._counted:
            compiler = self.compiler(plan)
            contents, beside = self._contents(compiler), self.beside(compiler)
            peaks = {device: peaks_of(own) for device, own in contents.items()}
            further = {device: beside.get(device, StateBytes()) for device in contents}
            needs = {d: peaks[d][1] + own.host_bytes + further[d].on_host for d, own in contents.items()}
            waiting = {device: sum(own.leaves[leaf] for leaf in own.routine.leaves) for device, own in contents.items()}
            lack = host_shortage(needs, self.devices)
            self._counted[key] = MemoryForecast(
                {d: peak + self.ahead * waiting[d] + further[d].on_device for d, (peak, _) in peaks.items()},
                "" if lack is None else str(lack),
            )
        return self._counted[key]

    def peaks(self, plan: Plan) -> Mapping[int, int]:
        """Return the peak memory of each device of a plan in a step; see :meth:`count`."""
        return self.count(plan).peaks

    def contents(self, plan: Plan) -> dict[int, InitialContents]:
        """Return the contents of each device at the beginning of a step, from which its memory can be simulated.

        Raises:
            UsageError: The plan is for another model.
            CaptureError: The model cannot be divided among replicas.
        """
        return self._contents(self.compiler(plan))

    def _contents(self, compiler: Compiler) -> dict[int, InitialContents]:
        late = self.staleness > 0 or compiler.plan.late
        return step_contents(compiler, self.batch, windows=late or self.overlap)

    def compiler(self, plan: Plan) -> Compiler:
        """Return the compiler of a plan, whose numbers stand for no worker's.

        Raises:
            UsageError: The plan is for another model.
            CaptureError: The model cannot be divided among replicas.
        """
        new = functools.partial(next, itertools.count(1))
        optimizers = optimizers_in(self.optimizer)
        state = named_state(self.captures.recipe.model, self.captures.recipe.loss, new)
        wanted = trained_names(state, optimizers)
        late = self.staleness > 0 or plan.late
        return Compiler(
            plan,
            self.captures,
            self.batch,
            devices=self.devices,
            links=self.links or {},
            plain_links=self.plain_links,
            state=state,
            optimizers=optimizers,
            wanted=wanted,
            versions=weight_versions(wanted, self.delay, new) if late else WeightVersions(),
            max_norm=self.max_norm,
            optimizer=new(),
            new=new,
            numbers=DefinitionNumbers(new),
            group_number=lambda members: new(),
        )
