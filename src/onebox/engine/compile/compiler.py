"""Routines of a trainer: compiled at the first batch of a shape, and cached."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from onebox.engine.compile.batch_job import BatchJob, BufferNumbers
from onebox.engine.compile.lowering import Lowering
from onebox.engine.compile.routine import InstructionLabel, StepRoutine
from onebox.engine.compile.update.async_window import Window, WorkerWindows
from onebox.engine.install.program_cache import ProgramCache
from onebox.engine.partition.hierarchical_reduction import find_reductions
from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.engine.partition.schedules import forward_only, make_schedule, make_window, plain_schedule
from onebox.engine.partition.sharding_spec import Members, ShardingSpec, find_sharding_spec
from onebox.engine.partition.stages import StageCutter
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.emulated_costs import EmulatedCosts
from onebox.engine.workload.loss_reduction import LossReduction, TravellingWeights, Weighted, weights_of
from onebox.errors import CaptureError
from onebox.graph import ModelPrograms
from onebox.plan import MicroBatch, Plan
from onebox.pool import Pool
from onebox.wire import DTYPES


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """Routines for batches of one shape.

    Args:
        micro_batches: Micro-batches of the batch.
        routines: Routine of each worker; where steps overlap, the one for a step that follows another.
        windows: The other kinds of windows, where steps overlap.
        reduction: Reduction of the micro-batches' losses to the batch's loss.
        travelling: Weights of the micro-batches, if they are sent with each batch.
    """

    micro_batches: tuple[MicroBatch, ...]
    routines: Mapping[int, StepRoutine]
    windows: Mapping[int, WorkerWindows] = field(default_factory=dict)
    reduction: LossReduction = None
    travelling: TravellingWeights | None = None

    def weights_of(self, batch: Batch) -> tuple[float, ...]:
        """Return the loss weight of each micro-batch."""
        return weights_of(self.reduction, batch, self.micro_batches)

    def replaced(self, batch: Batch, micro_batch: int, leaf: int) -> Tensor | None:
        """Return the replacement for a tensor of a micro-batch; ``None`` if it is unchanged."""
        if self.travelling is None:
            return None
        return self.travelling.replaced(batch, self.micro_batches, micro_batch, leaf)

    def leaf_of(self, batch: Batch, micro_batch: int, leaf: int) -> Tensor:
        """Return a tensor of a micro-batch as workers receive it; the index after the batch's own tensors is its
        weight.
        """
        if self.travelling is not None and leaf == self.travelling.leaf:
            return self.travelling.tensor(batch, self.micro_batches, micro_batch)
        other, cut = self.replaced(batch, micro_batch, leaf), self.micro_batches[micro_batch]
        return batch.leaves[leaf][cut.start : cut.start + cut.size] if other is None else other

    def of(self, window: Window) -> Mapping[int, StepRoutine]:
        """Return the routine of each worker for a kind of window; all kinds are the same where steps do not overlap."""
        if not self.windows:
            return self.routines
        return {worker: getattr(routines, window) for worker, routines in self.windows.items()}

    def earlier(self, worker: int) -> tuple[StepRoutine, ...]:
        """Return the routines that precede a worker's routine and whose state it continues."""
        return (self.windows[worker].fill, self.windows[worker].steady) if worker in self.windows else ()

    def all_of(self, worker: int) -> Sequence[StepRoutine]:
        """Return all routines of a worker."""
        own = self.windows.get(worker)
        return [own.fill, own.steady, own.drain] if own else [self.routines[worker]]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Routines that compute losses and gradients of a batch without changing any state.

    Args:
        compiled: The routines; each returns a squared 2-norm and then losses.
        constants: Tensors that they read, by buffer.
        models: The programs for each micro-batch size.
    """

    compiled: CompiledStep
    constants: Mapping[int, Tensor]
    models: Sequence[ModelPrograms]


class Compiler:
    """Compiler of a trainer's routines, which stores them on the workers.

    Args:
        pool: The pool.
        plan: The plan.
        captures: The captured model.
        new: Returns a new number for an object that stays on the workers.
        library: Programs and constants on the workers, from any plan.
    """

    def __init__(
        self, pool: Pool, plan: Plan, captures: Captures, new: Callable[[], int], library: ProgramCache
    ) -> None:
        self._pool = pool
        self._plan = plan
        self._new = new
        self._captures = captures
        self.library = library
        self._constants = library.constants
        self._stages = StageCutter(pool, plan, captures)
        self._compiled: dict[Hashable, CompiledStep] = {}
        self._there: set[Hashable] = set()
        self._stored: dict[int, dict[int, int]] = {}
        self.windows = False
        """True if steps overlap from now on."""
        self._lowering: Lowering | None = None
        self._with_gradient: frozenset[str] = frozenset()

    def first(self, batch: Batch) -> tuple[ModelPrograms, ShardingSpec]:
        """Return the programs for the first micro-batch of a batch, and the sharding of the state.

        Raises:
            CaptureError: The model cannot be captured.
            UsageError: The plan's stages do not match this model.
        """
        size = self._plan.micro_batches(batch.size)[0].size
        self._stages.check(batch, size)
        parts = self._stages.parts(batch, size, train=True)
        holdings = find_sharding_spec(self._plan, parts)
        self._with_gradient = frozenset(parts.programs.with_gradient)
        if self._plan.sync == "workers":
            replica_groups = (members for own in holdings.replica_groups.values() for members in own)
            holdings = replace(holdings, ways=find_reductions(self._pool, replica_groups))
        return parts.programs, holdings

    def begin(
        self,
        model: ModelPrograms,
        holdings: ShardingSpec,
        *,
        trained: Sequence[str],
        state: Mapping[str, int],
        optimizer: int,
        groups: Mapping[Members, int],
        max_norm: float,
        previous: Mapping[str, int] | None = None,
        ahead: Mapping[str, int] | None = None,
    ) -> None:
        """Set the values that all routines share.

        Args:
            model: From :meth:`first`.
            holdings: From :meth:`first`.
            trained: Trained parameters, in the optimizer's order.
            state: Buffer numbers of parameters and buffers, by name.
            optimizer: The optimizer's definition.
            groups: Number of each communication group.
            max_norm: Gradient clipping norm; 0 for none.
            previous: Buffer numbers of trained parameters before the latest update, where steps overlap.
            ahead: Buffer numbers of trained parameters as predicted after the next update, if used.
        """
        numbers = BufferNumbers(
            state=state,
            optimizer=optimizer,
            groups=groups,
            new=self._new,
            previous=previous or {},
            ahead=ahead or {},
            program=self.library.number,
        )
        speeds = {worker: self._pool.devices[worker].speed for worker in self._plan.devices}
        costs = EmulatedCosts(plan=self._plan, speeds=speeds, segments=self._captures.recipe.costs)
        self._lowering = Lowering(
            self._plan, holdings, numbers, trained=trained, model=model, max_norm=max_norm, costs=costs
        )

    def step(self, batch: Batch) -> CompiledStep:
        """Return the training routines for a batch, installed on the workers; compiled once for each shape."""
        return self._sent(batch, self._plan, train=True)

    def known(self, batch: Batch) -> CompiledStep | None:
        """Return the training routines for a batch if they are installed on the workers; callable from any thread."""
        key = self._key(batch, self._plan, train=True)
        return self._compiled[key] if key in self._there else None

    def laid_out(self, batch: Batch) -> CompiledStep:
        """Return the training routines for a batch, which may not be installed on the workers yet."""
        return self._compile(batch, self._plan, train=True)

    def evaluation(self, batch: Batch, *, at_once: bool, send: bool = True) -> CompiledStep:
        """Return the evaluation routines for a batch; compiled once for each shape.

        Args:
            batch: The batch.
            at_once: Whether each replica takes its part as one micro-batch, possible in plans of one stage.
            send: Whether to install them on the workers.
        """
        plan = Plan(stages=self._plan.stages, sync=self._plan.sync) if at_once else self._plan
        return self._sent(batch, plan, train=False) if send else self._compile(batch, plan, train=False)

    def probe(self, batch: Batch, sizes: Sequence[int]) -> Probe:
        """Return routines, not installed anywhere, that compute losses and gradients in eval mode without changing any
        state.

        Args:
            batch: The batch.
            sizes: Samples of each of its micro-batches.
        """
        assert self._lowering is not None
        models = {size: self._stages.parts(batch, size, train=True, probe=True) for size in sizes}
        self._require_held(models, "in eval mode")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        cuts = enumerate(zip(starts, sizes, strict=True))
        parts = tuple(MicroBatch(index=index, start=start, size=size) for index, (start, size) in cuts)
        routes = tuple((stage.replicas[0],) * len(sizes) for stage in self._plan.stages)
        tensors = {size: model.programs.constants for size, model in models.items()}
        numbers = {size: {name: self._new() for name in own} for size, own in tensors.items()}
        job = BatchJob(
            micro_batches=parts,
            routes=routes,
            schedule=plain_schedule(routes, next(iter(models.values())).programs),
            models=models,
            constants=numbers,
            leaves=len(batch.leaves),
        )
        compiled = CompiledStep(micro_batches=parts, routines=self._lowering.probe(job))
        constants = {numbers[size][name]: tensor for size, own in tensors.items() for name, tensor in own.items()}
        return Probe(compiled=compiled, constants=constants, models=[model.programs for model in models.values()])

    def labels(self, worker: int, routine: int) -> Sequence[InstructionLabel]:
        """Return the labels of the instructions of a worker's routine; empty if there is no such routine."""
        for compiled in self._compiled.values():
            for found in compiled.all_of(worker) if worker in compiled.routines else ():
                if found.number == routine:
                    return found.labels
        return ()

    def constant_bytes(
        self, batch: Batch, compiled: CompiledStep, worker: int, *, train: bool = True
    ) -> dict[int, int]:
        """Return the bytes of the constants on a worker while a batch is computed, by buffer number.

        Constants of batches of other shapes stay there and are included.

        Args:
            batch: The batch.
            compiled: Its routines.
            worker: The worker.
            train: Whether they are training routines.
        """
        found: dict[int, int] = self._constants.uploaded | self._stored.get(worker, {})
        for size in {part.size for part in compiled.micro_batches}:
            tensors = self._stages.parts(batch, size, train=train).programs.constants
            for name, number in self._numbers_of_constants(batch, size, train=train).items():
                found[number] = tensors[name].nbytes
        return found

    @property
    def stored_bytes(self) -> dict[int, int]:
        """Bytes of the constants that workers have from batches so far, by buffer number."""
        return self._constants.uploaded | {n: size for own in self._stored.values() for n, size in own.items()}

    @property
    def definitions(self) -> dict[int, set[int]]:
        """Installed definitions that this plan uses, by worker."""
        found: dict[int, set[int]] = {}
        for key in self._there:
            compiled = self._compiled[key]
            for worker in compiled.routines:
                own = (define.number for routine in compiled.all_of(worker) for define in routine.definitions)
                found.setdefault(worker, set()).update(own)
        return found

    @property
    def gradients(self) -> dict[int, str]:
        """Parameter of each gradient buffer."""
        assert self._lowering is not None
        return self._lowering.gradients

    def _key(self, batch: Batch, plan: Plan, *, train: bool) -> Hashable:
        return (batch.signature(batch.size), train, plan.micro_batch, self.windows and train)

    def _compile(self, batch: Batch, plan: Plan, *, train: bool) -> CompiledStep:
        key = self._key(batch, plan, train=train)
        if key not in self._compiled:
            parts, routes = plan.micro_batches(batch.size), plan.routes(batch.size)
            models = {part.size: self._stages.parts(batch, part.size, train=train) for part in parts}
            self._require_held(models, "in training" if train else "in an evaluation")
            if train:
                self._require_gradients(models)
            if self.windows and train:
                models = {size: model.in_chunks(size) for size, model in models.items()}
            make = make_window if self.windows and train else make_schedule
            schedule = make(plan, parts, routes, next(iter(models.values())).programs)
            job = BatchJob(
                micro_batches=parts,
                routes=routes,
                schedule=schedule if train else forward_only(routes),
                models=models,
                constants={size: self._numbers_of_constants(batch, size, train=train) for size in models},
                leaves=len(batch.leaves),
                summed=self._captures.recipe.reduction == "sum",
            )
            self._compiled[key] = self._lower(job, train=train)
        return self._compiled[key]

    def _require_held(self, models: Mapping[int, PhasePrograms], doing: str) -> None:
        """Refuse programs that read state absent from their devices, which hold only the state that the first batch
        needed.

        Raises:
            CaptureError: State is missing; the message names it.
        """
        assert self._lowering is not None
        for parts in models.values():
            missing = self._lowering.missing(parts.programs)
            if missing:
                raise CaptureError(
                    f"{doing} the model reads {missing}, which training on the first batch did not read in that place: "
                    "devices hold what that needed\n  Call pull() and compute it with the model here, or make another "
                    "trainer; on a virtual device (vgpu) it runs as it is"
                )

    def _require_gradients(self, models: Mapping[int, PhasePrograms]) -> None:
        """Refuse a capture in which other parameters have gradients than in the first: optimizers skip those without.

        Raises:
            CaptureError: The set differs; the message names the parameter.
        """
        for parts in models.values():
            other = sorted(self._with_gradient ^ frozenset(parts.programs.with_gradient))
            if other:
                raise CaptureError(
                    f"{other[0]} has a gradient in some steps and none in others, since other code of the model runs\n"
                    "  Call pull(), close this trainer and make another one where that begins; on a virtual device "
                    "(vgpu) it runs as it is"
                )

    def _lower(self, job: BatchJob, *, train: bool) -> CompiledStep:
        assert self._lowering is not None
        parts, reduction = tuple(job.micro_batches), self._captures.recipe.reduction
        travelling = None
        if train and isinstance(reduction, Weighted):
            travelling = TravellingWeights(reduction=reduction, leaf=job.leaves, dtype=DTYPES[job.loss(0).dtype])
        if train and self.windows:
            windows = self._lowering.windows(job)
            routines = {worker: own.steady for worker, own in windows.items()}
        else:
            windows, routines = {}, self._lowering.train(job) if train else self._lowering.evaluate(job)
        return CompiledStep(
            micro_batches=parts, routines=routines, windows=windows, reduction=reduction, travelling=travelling
        )

    def _sent(self, batch: Batch, plan: Plan, *, train: bool) -> CompiledStep:
        """Return routines, installing them on the workers if necessary."""
        compiled = self._compile(batch, plan, train=train)
        key = self._key(batch, plan, train=train)
        if key not in self._there:
            self._there.add(key)
            for size in dict.fromkeys(part.size for part in compiled.micro_batches):
                tensors = self._stages.parts(batch, size, train=train).programs.constants
                graph = (batch.signature(size), train, *tensors)
                self._constants.upload(graph, tensors, self._plan.devices)
            for worker in compiled.routines:
                for routine in compiled.all_of(worker):
                    self._stored.setdefault(worker, {}).update(self.library.store(worker, routine))
        return compiled

    def _numbers_of_constants(self, batch: Batch, size: int, *, train: bool) -> dict[str, int]:
        tensors = self._stages.parts(batch, size, train=train).programs.constants
        return self._constants.numbers((batch.signature(size), train, *tensors), tensors)
