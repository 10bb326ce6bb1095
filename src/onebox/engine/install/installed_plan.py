"""Setup: the plan, programs, groups and state of a trainer, from its first batch."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence

from onebox.engine.compile.compiler import CompiledStep, Compiler, Probe
from onebox.engine.config import PlanRequest
from onebox.engine.data.compression import BatchCompression
from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.install.program_cache import ProgramCache
from onebox.engine.memory.limits import IN_EVALUATION, host_shortage, out_of_memory_error
from onebox.engine.memory.simulator import InitialContents, PersistentBuffer, peak_of, peaks_of
from onebox.engine.memory.timeline import memory_peak
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.planning.device_shares import resolve_device_shares
from onebox.engine.planning.measured_formats import measure_formats
from onebox.engine.state.elementwise import check_elements
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.named_state import footprints
from onebox.errors import OneboxError
from onebox.plan import Plan
from onebox.pool import Pool
from onebox.wire.protocol.instructions import Ask


class InstalledPlan:
    """An installed plan: a trainer that has received its first batch.

    Before :meth:`bring` nothing is sent to any worker.

    Args:
        plan: Its plan.
        pool: The pool.
        captures: The captured model.
        remote: The remote state.
        batch: The first batch.
        max_norm: Gradient clipping norm; 0 for none.
        strict: Whether to refuse batches that exceed the memory of the devices.
        steps: Whether the first batch is a training batch; else it is an evaluation batch.
        before: The installed plan that this one replaces; its groups are reused where possible.
        windows: Whether steps overlap.

    Raises:
        CaptureError: The model cannot be captured, or cannot be divided among replicas.
        UsageError: The plan is for another model.
        DeviceMemoryError: It needs more memory than a device has, or may use; nothing has been uploaded.
    """

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        captures: Captures,
        remote: RemoteState,
        batch: Batch,
        max_norm: float,
        *,
        strict: bool = False,
        steps: bool = True,
        before: InstalledPlan | None = None,
        windows: bool = False,
    ) -> None:
        self.plan = plan
        self._remote = remote
        self._on_host = plan.update == "host"  # then no optimizer state is on devices
        self._footprints = footprints(remote.optimizer, remote.named, remote.versions.delay)
        self._made: list[int] = []
        library = ProgramCache(pool, remote.new_number) if before is None else before.compiler.library
        self.compiler: Compiler = Compiler(pool, plan, captures, self._new_number, library)
        self.compiler.windows = windows
        self._pool = pool
        self._strict = strict
        self._packing: BatchCompression | None = None
        self._fitting: set[Hashable] = set()
        self._at_once: dict[Hashable, bool] = {}  # by shape of evaluation batches
        self.spare_bytes: dict[int, int] = {}
        """Memory of each worker that training and evaluation batches so far leave free; only with ``strict``."""
        self._groups: dict[Members, int] = {}
        self._unformed: list[Members] = []
        model, holdings = self.compiler.first(batch)
        with_gradient = model.with_gradient
        trained = tuple(name for name in remote.wanted if name in with_gradient)
        self.holdings, self.trained = holdings, trained
        remote.versions = remote.versions.only(trained)  # parameters without gradients have no versions
        affine = [name for name, update in model.updates.items() if update.kind == "affine"]
        check_elements(remote, holdings)
        self._optimizer = remote.optimizer_number if before else remote.new_number()
        for members in holdings.groups(trained, affine, everybody=holdings.parted(trained) or len(plan.stages) > 1):
            known = before.group_of(members) if before and before.plan.sync == plan.sync else 0
            self._groups[members] = known or pool.new_number()
            self._unformed += [] if known else [members]
        self.compiler.begin(
            model,
            holdings,
            trained=trained,
            state=remote.named.numbers,
            optimizer=self._optimizer,
            groups=self._groups,
            max_norm=max_norm,
            previous=remote.versions.previous,
            ahead=remote.versions.ahead,
        )
        if steps:
            self._require_room(batch)
            self._require_room_for_late_steps(batch)
        else:
            self._may_be_at_once(batch, stepped=False)
        self.checks: Mapping[int, Sequence[tuple[Members, Ask]]] = {}

    def _new_number(self) -> int:
        self._made.append(self._remote.new_number())
        return self._made[-1]

    def group_of(self, members: Members, *, to_be: bool = False) -> int:
        """Return the formed or planned group of some workers, or 0."""
        group = self._groups.get(members, 0)
        if members in self._unformed:
            return group if to_be else 0
        return group if group and self._pool.is_whole(group) else 0

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
        if self._strict:
            self._packing = BatchCompression(self._pool, self.plan.devices)
        asked = []
        while self._unformed:
            members = self._unformed[0]
            asked.append(begin_group_formation(self._pool, members, self.plan.sync, self._groups[members]))
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
            self._remote.upload(self.holdings.holders, self.holdings)
            self._remote.define_optimizer(self._optimizer, self.trained, self.holdings, host=self._on_host)
        except BaseException:
            with contextlib.suppress(OneboxError):
                self.close()
            raise
        self.settled()

    def settled(self) -> None:
        """Record that the state is on the workers."""
        self.checks = self._remote.checks()

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
        wanted = after.compiler.definitions
        for worker, own in self.compiler.definitions.items():  # kept in case the change is reverted
            wanted[worker] = wanted.get(worker, set()) | own.difference(self._made)
        self.compiler.library.keep(wanted)
        self._remote.retire(self._made)
        return over

    def step(self, batch: Batch) -> CompiledStep:
        """Return the training routines for a batch, installed on the workers.

        Raises:
            DeviceMemoryError: A step needs more memory than a device has, or may use; nothing has changed on the
                workers.
        """
        self._require_room(batch)
        return self.compiler.step(batch)

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
        return self.compiler.evaluation(batch, at_once=self.at_once(batch, stepped=stepped))

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

    def _require_room(self, batch: Batch) -> None:
        """Refuse a batch, the first of its shape, with which a step would not fit."""
        shape = (batch.signature(batch.size), self.compiler.windows)
        if not self._strict or shape in self._fitting:
            return
        on_hosts = {}
        for worker, contents in self.contents(batch).items():
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

    def _require_room_for_late_steps(self, batch: Batch) -> None:
        """Refuse a batch that would not fit once steps overlap; exact steps, which need less, may come first."""
        if self._remote.versions.previous:
            before, self.compiler.windows = self.compiler.windows, True
            self._require_room(batch)
            self.compiler.windows = before

    def _leaves(self, worker: int, spare_bytes: int) -> None:
        """Record the memory of a worker that a step or an evaluation leaves free."""
        self.spare_bytes[worker] = min(spare_bytes, self.spare_bytes.get(worker, spare_bytes))

    @property
    def packing(self) -> BatchCompression:
        """Compression of batches; only with ``strict``."""
        assert self._packing is not None
        return self._packing

    def peaks(self, batch: Batch, *, ahead: int = 0) -> dict[int, int]:
        """Return the peak bytes of each worker in a step with a batch, from buffer lifetimes alone.

        Args:
            batch: The batch.
            ahead: Number of similar batches uploaded for later steps.
        """
        found = {}
        for worker, contents in self.contents(batch).items():
            waiting = sum(contents.leaves[leaf] for leaf in contents.routine.leaves)
            found[worker] = peak_of(contents) + ahead * waiting
        return found

    def contents(self, batch: Batch) -> dict[int, InitialContents]:
        """Return the memory contents of each worker at the beginning of a step with a batch."""
        return self._contents(batch, self.compiler.laid_out(batch), train=True, stepped=True)

    def evaluation_contents(self, batch: Batch, *, at_once: bool, stepped: bool) -> dict[int, InitialContents]:
        """Return the memory contents of each worker at the beginning of the evaluation of a batch.

        Args:
            batch: The batch.
            at_once: Whether each replica takes its part as one micro-batch.
            stepped: Whether the optimizer's state exists.
        """
        compiled = self.compiler.evaluation(batch, at_once=at_once, send=False)
        return self._contents(batch, compiled, train=False, stepped=stepped)

    def probe(self, batch: Batch, sizes: Sequence[int]) -> Probe | None:
        """Return routines that compute losses and gradients without changing state; ``None`` if memory is insufficient.

        Args:
            batch: The batch.
            sizes: Samples of each of its micro-batches.
        """
        probe = self.compiler.probe(batch, sizes)
        own = {number: tensor.nbytes for number, tensor in probe.constants.items()} | self.compiler.stored_bytes
        contents = self._contents(batch, probe.compiled, train=True, stepped=True, constants=own)
        fits = all(peak_of(found) <= self._room_bytes(worker) for worker, found in contents.items())
        return probe if fits else None

    def _contents(
        self,
        batch: Batch,
        compiled: CompiledStep,
        *,
        train: bool,
        stepped: bool,
        constants: Mapping[int, int] | None = None,
    ) -> dict[int, InitialContents]:
        leaves = {
            (part.index, leaf): tensor[part.start : part.start + part.size].nbytes
            for part in compiled.micro_batches
            for leaf, tensor in enumerate(batch.leaves)
        }
        if compiled.travelling is not None:
            weight = (compiled.travelling.leaf, compiled.travelling.dtype.itemsize)
            leaves |= {(part.index, weight[0]): weight[1] for part in compiled.micro_batches}
        state = self._remote.named
        found = {}
        for worker, routine in compiled.routines.items():
            held = {
                state.numbers[n]: PersistentBuffer(
                    "parameter" if n in state.parameters else "buffer",
                    n,
                    self.holdings.spec(worker, n, state.spec(n)).size_bytes,
                )
                for n in self.holdings.held_by(worker, state.tensors)
            }
            versions = self._remote.versions
            if train and self.compiler.windows:
                held |= {
                    number: PersistentBuffer("parameter", called, held[state.numbers[name]].size_bytes)
                    for name in self.holdings.held_by(worker, self.trained)
                    for number, called in versions.of(name).items()
                }
            sizes = constants or self.compiler.constant_bytes(batch, compiled, worker, train=train)
            held |= {number: PersistentBuffer("constant", "", size_bytes) for number, size_bytes in sizes.items()}
            trained = {
                name: self.holdings.spec(worker, name, state.spec(name)).size_bytes
                for name in self.holdings.stepped_by(worker, self.trained)
            }
            late = train and self.compiler.windows
            remembered_bytes = sum(self._footprints[name].size_bytes(own, late=late) for name, own in trained.items())
            cpu = self._pool.devices[worker].kind == "cpu"
            copied_bytes = 0 if cpu else sum(trained.values())  # updated, and sent back
            found[worker] = InitialContents(
                routine=routine,
                held=held,
                leaves=leaves,
                gradients=self.compiler.gradients,
                optimizer_bytes=0 if self._on_host else stepped * remembered_bytes,
                host_bytes=remembered_bytes + copied_bytes if self._on_host else 0,
                ranks={number: ms.index(worker) for ms, number in self._groups.items() if worker in ms},
                earlier=compiled.earlier(worker),
                versions={
                    previous: versions.ahead.get(name, state.numbers[name])
                    for name, previous in versions.previous.items()
                },
            )
        return found

    def close(self) -> None:
        """Leave the groups."""
        for members, group in self._groups.items():
            if members not in self._unformed:
                self._pool.leave_group(group, members)
        self._groups = {}


def install_plan(
    request: PlanRequest,
    pool: Pool,
    captures: Captures,
    remote: RemoteState,
    batch: Batch,
    max_norm: float,
    *,
    steps: bool = True,
) -> InstalledPlan:
    """Plan and compile for the first batch, a training batch unless ``steps`` is false."""
    plan = request.plan
    if plan is None:
        devices = pool.present
        if pool.gone:
            shares: Sequence[float] = [1.0] * len(devices)
        else:
            shares = resolve_device_shares(request.shares, pool, captures, batch, remote)
        plan = Plan.data_parallel(
            devices,
            shares,
            micro_batch=request.micro_batch,
            sync=request.sync,
            update=request.update,
            optimizer=request.optimizer,
        )
        if captures.recipe.precision == "auto" and not pool.gone:
            plan = measure_formats(plan, pool, captures, remote, batch)
    ready = InstalledPlan(plan, pool, captures, remote, batch, max_norm, strict=True, steps=steps)
    ready.bring()
    return ready
