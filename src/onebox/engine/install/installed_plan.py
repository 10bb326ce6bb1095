"""Setup: the plan, programs, groups and state of a trainer, from its first batch."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from onebox.engine.compile.compiler import CompiledStep, Compiler, Probe
from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.compile.order_check import fault_text
from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.install.program_cache import ProgramCache
from onebox.engine.memory.initial_contents import (
    BytesBeside,
    StateBytes,
    evaluation_contents,
    no_bytes_beside,
    probe_contents,
    step_contents,
    step_peaks,
)
from onebox.engine.memory.limits import IN_EVALUATION, host_shortage, out_of_memory_error
from onebox.engine.memory.simulator import InitialContents, peak_of, peaks_of
from onebox.engine.memory.timeline import memory_peak
from onebox.engine.partition.gradient_buckets import PlacedCodecState
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.partition.weight_versions import WeightVersions
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.errors import OneboxError, PlanError
from onebox.graph import Mode
from onebox.plan import Plan
from onebox.pool import Pool
from onebox.wire.protocol.instructions import Ask

_LOG = logging.getLogger("onebox")

_BESIDE = 0
"""Number, in forecasts of memory, that stands for state beside a plan's own; no buffer has it."""


@dataclass(frozen=True, kw_only=True)
class InstallInputs:
    """Everything besides a plan and a batch that an installation needs; the same for all plans of a run.

    Args:
        pool: The pool.
        captures: The captured model.
        remote: The remote state.
        versions: Buffers of versions of parameters, where steps overlap with older weights.
        max_norm: Gradient clipping norm; 0 for none.
        beside: Returns the further state of each worker.
    """

    pool: Pool
    captures: Captures
    remote: RemoteState
    versions: WeightVersions
    max_norm: float
    beside: BytesBeside = no_bytes_beside


class InstalledPlan:
    """An installed plan: a trainer that has received its first batch.

    Before :meth:`bring` nothing is sent to any worker.

    Args:
        plan: Its plan.
        batch: The first batch.
        inputs: Further inputs.
        strict: Whether to refuse batches that exceed the memory of the devices.
        steps: Whether the first batch is a training batch; else it is an evaluation batch.
        before: The installed plan that this one replaces; its groups are reused where possible.
        windows: Whether the next step overlaps with others.

    Raises:
        CaptureError: The model cannot be captured, or cannot be divided among replicas.
        UsageError: The plan is for another model.
        DeviceMemoryError: It needs more memory than a device has, or may use; nothing has been uploaded.
        PlanError: GPUs would mix up its transfers, and groups of the plan before serve on.
    """

    def __init__(
        self,
        plan: Plan,
        batch: Batch,
        inputs: InstallInputs,
        *,
        strict: bool = False,
        steps: bool = True,
        before: InstalledPlan | None = None,
        windows: bool = False,
    ) -> None:
        self.plan = plan
        self._remote = remote = inputs.remote
        self._made: list[int] = []
        self._pool = pool = inputs.pool
        self._strict = strict
        self._fitting: set[Hashable] = set()
        self._windows = windows
        self._steps: dict[Hashable, CompiledStep] = {}
        self._at_once: dict[Hashable, bool] = {}  # by shape of evaluation batches
        self.spare_bytes: dict[int, int] = {}
        """Memory of each worker that training and evaluation batches so far leave free; only with ``strict``."""
        self._programs: ProgramCache = (
            before._programs if before else ProgramCache(pool, DefinitionNumbers(remote.new_number))
        )
        self._there: set[CompiledStep] = set()
        self._with_residuals = False
        self._waits = before is not None
        """True if the plan before still runs, with residuals of its own."""
        self._stored: dict[int, dict[int, int]] = {}
        self._unformed: list[Members] = []
        self._tagged = False
        self._optimizer = remote.optimizer_number if before else remote.new_number()
        self.compiler = Compiler(
            plan,
            inputs.captures,
            batch,
            devices=pool.devices,
            links=pool.links,
            plain_links=pool.plain_links,
            state=remote.named,
            optimizers=remote.optimizer,
            wanted=remote.wanted,
            versions=inputs.versions,
            max_norm=inputs.max_norm,
            optimizer=self._optimizer,
            new=self._new_number,
            numbers=self._programs.numbers,
            group_number=functools.partial(self._group_number, before),
        )
        self.holdings, self.trained = self.compiler.holdings, self.compiler.trained
        self._beside = inputs.beside(self.compiler)
        self._groups = dict(self.compiler.groups)
        if steps:
            self._require_room(batch, windows=windows)
            if self.compiler.versions.previous:  # exact steps, which need less, may come before those that overlap
                self._require_room(batch, windows=True)
        else:
            self._may_be_at_once(batch, stepped=False)
        if self.compiler.untagged and steps:
            for overlapping in sorted({windows, windows or bool(self.compiler.versions.previous)}):
                self._require_order(self.compiler.step(batch, windows=overlapping))
        self.checks: Mapping[int, Sequence[tuple[Members, Ask]]] = {}

    def _new_number(self) -> int:
        self._made.append(self._remote.new_number())
        return self._made[-1]

    def _group_number(self, before: InstalledPlan | None, members: Members) -> int:
        """Return the number of a group, which serves on where the plan before has formed it."""
        known = before.group_of(members) if before and before.plan.sync == self.plan.sync else 0
        self._unformed += [] if known else [members]
        return known or self._pool.new_number()

    def group_of(self, members: Members, *, to_be: bool = False) -> int:
        """Return the formed or planned group of some workers, or 0."""
        group = self._groups.get(members, 0)
        if members in self._unformed:
            return group if to_be else 0
        return group if group and self._pool.is_whole(group) else 0

    def broadcast_groups(self, worker: int, members: Members) -> list[int]:
        """Return the formed groups through which a worker takes part in a broadcast from the first member of a group;
        see :meth:`ShardingSpec.broadcast_groups`.
        """
        return [self.group_of(group) for group in self.holdings.broadcast_groups(worker, members)]

    @property
    def members(self) -> tuple[Members, ...]:
        """The communication groups."""
        return tuple(self._groups)

    def form(self) -> list[DeferredReplies]:
        """Form the groups that are not formed yet.

        Returns:
            The pending replies.

        Raises:
            OneboxError: The pool is broken.
        """
        asked = []
        while self._unformed:
            members = self._unformed[0]
            number = self._groups[members]
            asked.append(begin_group_formation(self._pool, members, self.plan.sync, number, tagged=self._tagged))
            self._unformed.pop(0)
        return asked

    def bring(self) -> None:
        """Upload the state to the workers.

        Raises:
            OneboxError: A worker was lost, or refuses something.
        """
        try:
            for asked in self.form():
                asked.take()
            self._remote.upload(self.holdings)
            versions, on_host = self.compiler.versions, self.plan.update == "host"
            self._remote.define_optimizer(self._optimizer, self.trained, versions, host=on_host)
        except BaseException:
            with contextlib.suppress(OneboxError):
                self.close()
            raise
        self.settled()

    def settled(self) -> None:
        """Record that the state is on the workers."""
        self.checks = self._remote.checks()

    def take_over(self) -> None:
        """Make what the next step needs beside the state, once the plan before is retired.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        self._waits = False
        self._make_residuals()

    def retire(self, after: InstalledPlan) -> dict[int, Members]:
        """Free everything that the installed plan replacing this one does not need; earlier requests are still
        executed.

        Returns:
            Groups to leave, with their members, once no data received through them is awaited.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        kept = set(after._groups.values())
        over = {group: members for members, group in self._groups.items() if group not in kept}
        self._groups = {}
        wanted = after._definitions
        for worker, own in self._definitions.items():  # whose programs serve where the change is taken back
            wanted[worker] = wanted.get(worker, set()) | own.difference(self._made)
        self._programs.keep(wanted)
        self._remote.retire(self._made)
        return over

    def step(self, batch: Batch, *, windows: bool | None = None) -> CompiledStep:
        """Return the training routines for a batch, installed on the workers.

        Args:
            batch: The batch.
            windows: Whether the step overlaps with others; ``None``: as the latest step.

        Raises:
            DeviceMemoryError: A step needs more memory than a device has, or may use; nothing has changed on the
                workers.
        """
        self._windows = windows = self._windows if windows is None else windows
        key = (batch.signature(batch.size), windows)
        if key not in self._steps:
            self._require_room(batch, windows=windows)
            self._steps[key] = self.routines(batch, windows=windows)
        return self._steps[key]

    def routines(self, batch: Batch, *, windows: bool) -> CompiledStep:
        """Return the routines of :meth:`step`, installed on the workers, without checking the memory."""
        self._windows = windows
        return self._sent(batch, self.compiler.step(batch, windows=windows), train=True)

    def known(self, batch: Batch) -> CompiledStep | None:
        """Return the routines that train with a batch if they are with the workers; callable from any thread."""
        compiled = self.compiler.known(batch, windows=self._windows)
        return compiled if compiled in self._there else None

    def _sent(self, batch: Batch, compiled: CompiledStep, *, train: bool) -> CompiledStep:
        """Bring routines to the workers where they are not there yet, and return them."""
        if compiled not in self._there:
            self._require_order(compiled)
            self._there.add(compiled)
            for graph, tensors in self.compiler.constants_of(batch, compiled, train=train).items():
                self._programs.constants.upload(graph, tensors, self.plan.devices)
            if train and not self._waits:
                self._make_residuals()
            for worker in compiled.routines:
                for routine in compiled.all_of(worker):
                    self._stored.setdefault(worker, {}).update(self._programs.store(worker, routine))
        return compiled

    def _make_residuals(self) -> None:
        """Make the residuals of lossy codecs before the first step of the plan."""
        if not self._with_residuals:
            self._with_residuals = True
            wanted = {
                f"{worker}.{place}": PlacedCodecState(worker, number, state)
                for worker in self.plan.devices
                for place, (number, state) in enumerate(self.compiler.residuals(worker).items())
            }
            self._remote.define_residuals(wanted)

    @property
    def _definitions(self) -> dict[int, set[int]]:
        """Return the definitions on each worker that this plan uses."""
        found: dict[int, set[int]] = {}
        for compiled in self._there:
            for worker in compiled.routines:
                own = (define.number for routine in compiled.all_of(worker) for define in routine.definitions)
                found.setdefault(worker, set()).update(own)
        return found

    @property
    def _resident(self) -> dict[int, dict[int, int]]:
        """The bytes of the constants that each worker has from batches so far, by number of the buffer."""
        uploaded = self._programs.constants.uploaded
        beside = {worker: {_BESIDE: own.on_device} for worker, own in self._beside.items()}
        return {w: uploaded | self._stored.get(w, {}) | beside.get(w, {}) for w in self.plan.devices}

    def _with_hosts(self, contents: Mapping[int, InitialContents]) -> dict[int, InitialContents]:
        """Return contents with the state beside the plan's own in the memory of hosts."""
        return {
            worker: replace(own, host_bytes=own.host_bytes + self._beside.get(worker, StateBytes()).on_host)
            for worker, own in contents.items()
        }

    def evaluation(self, batch: Batch, *, stepped: bool) -> CompiledStep:
        """Return the evaluation routines for a batch, installed on the workers.

        Each replica of a plan of one stage takes its part of the batch at once if memory allows, else in micro-batches
        as in training: the result does not depend on the division.

        Args:
            batch: The batch.
            stepped: Whether the optimizer has run, and its state exists.

        Raises:
            DeviceMemoryError: It needs more memory than a device has, or may use; nothing has changed on the workers.
        """
        compiled = self.compiler.evaluation(batch, at_once=self.at_once(batch, stepped=stepped))
        return self._sent(batch, compiled, train=False)

    def at_once(self, batch: Batch, *, stepped: bool) -> bool:
        """Return whether a batch is evaluated at once rather than in micro-batches.

        Args and errors are those of :meth:`evaluation`.
        """
        key = (batch.signature(batch.size), stepped)
        if key not in self._at_once:
            self._at_once[key] = self._may_be_at_once(batch, stepped=stepped)
        return self._at_once[key]

    def _may_be_at_once(self, batch: Batch, *, stepped: bool) -> bool:
        """Return whether a batch is evaluated at once rather than in micro-batches; refuse it if neither fits."""
        ways = [True] * self.plan.whole + [False] * (not self.plan.whole or self.plan.micro_batch is not None)
        short: list[tuple[InitialContents, int]] = []
        for at_once in ways:
            found = self.evaluation_contents(batch, at_once=at_once, stepped=stepped)
            over = [worker for worker, contents in found.items() if peak_of(contents) > self._room_bytes(worker)]
            if not over:
                for worker, contents in found.items():
                    self._leaves(worker, self._room_bytes(worker) - peak_of(contents))
                return at_once
            short = [(found[worker], worker) for worker in over]
        contents, worker = short[0]
        device, room_bytes = self._pool.devices[worker], self._room_bytes(worker)
        raise out_of_memory_error(memory_peak(worker, contents), device, room_bytes, advice=IN_EVALUATION)

    def _room_bytes(self, worker: int) -> int:
        """Return the usable bytes of a worker."""
        budgets = dict(zip(self.plan.devices, self.plan.memory_bytes, strict=False))
        device = self._pool.devices[worker]
        return min(device.memory_bytes, budgets.get(worker) or device.memory_bytes)

    def _require_room(self, batch: Batch, *, windows: bool) -> None:
        """Refuse a batch, the first of its shape, with which a step would not fit."""
        shape = (batch.signature(batch.size), windows)
        if not self._strict or shape in self._fitting:
            return
        on_hosts = {}
        found = self._with_hosts(step_contents(self.compiler, batch, self._resident, windows=windows))
        for worker, contents in found.items():
            room_bytes = self._room_bytes(worker)
            peak_bytes, waiting_bytes = peaks_of(contents)
            on_hosts[worker] = contents.host_bytes + waiting_bytes
            spare_bytes = room_bytes - peak_bytes
            if spare_bytes < 0:
                raise out_of_memory_error(memory_peak(worker, contents), self._pool.devices[worker], room_bytes)
            self._leaves(worker, spare_bytes)
        lack = host_shortage(on_hosts, self._pool.devices)
        if lack is not None:
            raise lack.error()
        self._fitting.add(shape)

    def _require_order(self, compiled: CompiledStep) -> None:
        """Refuse routines that would wait forever, or exchange messages, over NCCL; groups that are not formed yet are
        formed over TCP instead.

        Raises:
            PlanError: Groups exist already, or serve on from the plan before.
        """
        if not compiled.faults or self._tagged:
            return
        why = f"GPUs would mix up transfers of {self.plan.describe()}, or wait forever:\n{fault_text(compiled.faults)}"
        if not all(members in self._unformed for members in self.compiler.untagged.values()):
            raise PlanError(f"{why}\n  Choose another schedule, such as 'gpipe', or cut the model elsewhere")
        _LOG.warning("%s\n  its groups use TCP, which is slower: choose another schedule for NCCL", why)
        self._tagged = True

    def _leaves(self, worker: int, spare_bytes: int) -> None:
        """Record the memory of a worker that a step or an evaluation leaves free."""
        self.spare_bytes[worker] = min(spare_bytes, self.spare_bytes.get(worker, spare_bytes))

    def peaks(self, batch: Batch, *, ahead: int = 0) -> dict[int, int]:
        """Return the peak bytes of each worker in a step with a batch, from buffer lifetimes alone.

        Args:
            batch: The batch.
            ahead: Number of similar batches uploaded for later steps.
        """
        return step_peaks(self.contents(batch), ahead=ahead)

    def contents(self, batch: Batch) -> dict[int, InitialContents]:
        """Return the memory contents of each worker at the beginning of a step with a batch."""
        return self._with_hosts(step_contents(self.compiler, batch, self._resident, windows=self._windows))

    def evaluation_contents(self, batch: Batch, *, at_once: bool, stepped: bool) -> dict[int, InitialContents]:
        """Return the memory contents of each worker at the beginning of the evaluation of a batch.

        Args:
            batch: The batch.
            at_once: Whether each replica takes its part as one micro-batch.
            stepped: Whether the optimizer's state exists.
        """
        found = evaluation_contents(self.compiler, batch, self._resident, at_once=at_once, stepped=stepped)
        return self._with_hosts(found)

    def probe(self, batch: Batch, sizes: Sequence[int], *, train: bool, mode: Mode) -> Probe | None:
        """Return routines that compute losses and gradients, or evaluate, without changing state; ``None`` if memory is
        insufficient, or GPUs would mix up their transfers.

        Args:
            batch: The batch.
            sizes: Samples of each of its micro-batches.
            train: Whether to compute gradients, rather than metrics.
            mode: The mode of the model.
        """
        probe = self.compiler.probe(batch, sizes, train=train, mode=mode)
        contents = probe_contents(self.compiler, batch, probe, self._resident, windows=self._windows)
        fits = all(peak_of(found) <= self._room_bytes(worker) for worker, found in contents.items())
        return probe if fits and (self._tagged or not probe.compiled.faults) else None

    def close(self) -> None:
        """Leave the groups."""
        for members, group in self._groups.items():
            if members not in self._unformed:
                self._pool.leave_group(group, members)
        self._groups = {}
