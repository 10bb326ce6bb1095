"""Routines of a plan: made when a shape of batches is first seen, kept for the next time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from onebox.engine.compile.batch_job import BatchJob, BufferNumbers
from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.compile.lowering import Lowering
from onebox.engine.compile.order_check import OrderFault, TransferRules, step_faults
from onebox.engine.compile.routine import StepRoutine, with_exchanges
from onebox.engine.compile.update.async_window import Window, WorkerWindows
from onebox.engine.partition.elementwise import check_elements
from onebox.engine.partition.gradient_buckets import CodecState
from onebox.engine.partition.hierarchical_reduction import find_reductions, known_links
from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.engine.partition.schedules import forward_only, make_schedule, make_window, plain_schedule
from onebox.engine.partition.sharding_spec import Members, ShardingSpec, find_sharding_spec
from onebox.engine.partition.stages import StageCutter
from onebox.engine.partition.weight_versions import WeightVersions
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.emulated_costs import EmulatedCosts
from onebox.engine.workload.index_ranges import IndexRange, index_ranges
from onebox.engine.workload.loss_reduction import LossReduction, TravellingWeights, Weighted, weights_of
from onebox.engine.workload.named_state import NamedState, footprints
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import CaptureError, UsageError
from onebox.graph import Mode, ModelPrograms
from onebox.graph.lower.loss_divisors import Measure
from onebox.plan import MicroBatch, Plan
from onebox.pool import DeviceInfo
from onebox.pool.network.emulated import LinkMap
from onebox.wire import DTYPES, TensorSpec, elements_of


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledStep:
    """Routines for batches of one shape.

    Args:
        micro_batches: Micro-batches of the batch.
        routines: Routine of each worker; where steps overlap, the one for a step that follows another.
        windows: The other kinds of windows, where steps overlap.
        reduction: Reduction of the micro-batches' losses to the batch's loss.
        travelling: Weights of the micro-batches, if they are sent with each batch.
        measures: What some results tell about others, if it is the same for all micro-batches.
        faults: Faults in the order of transfers between GPUs.
        models: The programs for each micro-batch size, for the places of failures.
    """

    micro_batches: tuple[MicroBatch, ...]
    routines: Mapping[int, StepRoutine]
    windows: Mapping[int, WorkerWindows] = field(default_factory=dict)
    reduction: LossReduction = None
    travelling: TravellingWeights | None = None
    measures: tuple[Measure, ...] = ()
    faults: tuple[OrderFault, ...] = ()
    models: Mapping[int, ModelPrograms] = field(default_factory=dict)

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

    def elements_of(self, batch: Batch, micro_batch: int, leaf: int) -> tuple[TensorSpec, memoryview]:
        """Return the spec and the elements of what :meth:`leaf_of` returns."""
        if self.travelling is not None:
            return elements_of(self.leaf_of(batch, micro_batch, leaf))
        cut = self.micro_batches[micro_batch]
        return batch.elements(leaf, cut.start, cut.size)

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
    """Routines that compute losses and gradients of a batch, or evaluate it, without changing any state.

    Args:
        compiled: The routines; each returns a squared 2-norm, if it computes gradients, and then results.
        constants: Tensors that they read, by buffer.
        models: The programs for each micro-batch size.
    """

    compiled: CompiledStep
    constants: Mapping[int, Tensor]
    models: Sequence[ModelPrograms]


def untagged_groups(plan: Plan, groups: Mapping[Members, int], devices: Sequence[DeviceInfo]) -> Mapping[int, Members]:
    """Return the groups that may use NCCL, which has no tags: those with two GPUs.

    Args:
        plan: The plan.
        groups: The number of each group.
        devices: All devices of the pool.
    """
    if plan.sync != "workers":
        return {}
    return {
        number: members for members, number in groups.items() if sum(devices[member].nccl for member in members) > 1
    }


def _require_alike(devices: Sequence[DeviceInfo]) -> None:
    """Require that devices compute the same bits from the same sums.

    Raises:
        UsageError: They are of different kinds.
    """
    first = devices[0]
    for other in devices[1:]:
        if other.arithmetic != first.arithmetic:
            one, two = (f"device {d.number} ({d.device} on {d.host}, {d.name})" for d in (first, other))
            raise UsageError(
                f"gradients='powersgd' among {one} and {two}, which differ in kind, threads or instruction sets: each "
                "multiplies the summed factors by itself, so that replicas would differ in their last bits; take "
                "gradients='int8' or 'bf16', optimizer='sharded', or replicas on devices that are alike"
            )


class Compiler:
    """Makes the routines of a plan; sends nothing.

    Args:
        plan: The plan.
        captures: The captured model.
        batch: A first batch; all later ones read the same of the state.
        devices: All devices of the pool.
        links: Its emulated links.
        plain_links: Whether connections between its hosts are not encrypted.
        state: Parameters and buffers.
        optimizers: The optimizers.
        wanted: Names of the parameters that they update, in their order.
        versions: Of these parameters, where steps overlap with older weights.
        max_norm: For clipping; 0 for none.
        optimizer: The definition of the optimizer on the workers.
        new: Makes a number for something that stays on the workers.
        numbers: The numbers of programs and constants.
        group_number: Returns the number of a set of workers that exchange something.

    Raises:
        CaptureError: The model cannot be captured, or replicas cannot share it.
        UsageError: The plan is for another model, splits what an optimizer looks at as a whole, or has PowerSGD among
            devices that are not alike.
    """

    def __init__(
        self,
        plan: Plan,
        captures: Captures,
        batch: Batch,
        *,
        devices: Sequence[DeviceInfo],
        links: LinkMap,
        plain_links: bool,
        state: NamedState,
        optimizers: Optimizers,
        wanted: Sequence[str],
        versions: WeightVersions,
        max_norm: float,
        optimizer: int,
        new: Callable[[], int],
        numbers: DefinitionNumbers,
        group_number: Callable[[Members], int],
    ) -> None:
        self.plan = plan
        self.devices = devices
        self.state = state
        self._new = new
        self._numbers = numbers
        self._optimizer = optimizer
        self._captures = captures
        self._stages = StageCutter(plan, captures, known_links(devices, links, plain_links=plain_links))
        self._compiled: dict[Hashable, CompiledStep] = {}
        self.footprints = footprints(optimizers, state, versions.delay)
        """The memory that the optimizers' state takes of each parameter."""
        parts = self._first(batch)
        model = parts.programs
        self._with_gradient = frozenset(model.with_gradient)
        self.trained = tuple(name for name in wanted if name in self._with_gradient)
        """The parameters that have gradients, in the optimizer's order."""
        self.versions = versions.only(self.trained)  # one that gets no gradient stays as it is
        self.affine = tuple(name for name, update in model.updates.items() if update.kind == "affine")
        """The buffers that change with the data, by their old values and a term of the data."""
        self.changed = tuple(model.updates)
        """The buffers that training changes."""
        self.holdings = self._sharding(parts, links, plain_links=plain_links)
        check_elements(optimizers, state, wanted, self.holdings)
        groups = self.holdings.groups(self.trained, self.affine)
        self.groups: Mapping[Members, int] = {members: group_number(members) for members in groups}
        """The number of each set of workers that exchange something."""
        self.untagged: Mapping[int, Members] = untagged_groups(plan, self.groups, devices)
        """The members of each group that may use NCCL."""
        costs = EmulatedCosts(
            plan=plan,
            speeds={worker: devices[worker].speed for worker in plan.devices},
            segments=captures.recipe.costs,
        )
        buffers = BufferNumbers(
            state=state.numbers,
            optimizer=optimizer,
            groups=self.groups,
            new=new,
            previous=self.versions.previous,
            ahead=self.versions.ahead,
            program=numbers.program,
        )
        self._lowering = Lowering(
            plan,
            self.holdings,
            buffers,
            trained=self.trained,
            model=model,
            max_norm=max_norm,
            costs=costs,
            gpus=[worker for worker in plan.devices if devices[worker].kind == "cuda"],
            untagged=self.untagged,
            hosts={worker: devices[worker].host for worker in plan.devices},
        )
        for members in self._lowering.replicated:
            _require_alike([devices[member] for member in members])

    def _first(self, batch: Batch) -> PhasePrograms:
        """Return the programs for the first micro-batch of a batch."""
        size = self.plan.micro_batches(batch.size)[0].size
        self._stages.check(batch, size)
        return self._stages.parts(batch, size, train=True)

    def _sharding(self, parts: PhasePrograms, links: LinkMap, *, plain_links: bool) -> ShardingSpec:
        """Return who is to hold what."""
        holdings = find_sharding_spec(self.plan, parts)
        if self.plan.sync != "workers":
            return holdings
        summed = [name for name in (*self.trained, *self.affine) if name not in holdings.owners]  # for all holders
        replica_groups = (members for name in summed for members in holdings.replica_groups[name])
        ways = find_reductions(self.devices, links, replica_groups, plain_links=plain_links)
        return replace(holdings, ways=ways)

    def known(self, batch: Batch, *, windows: bool = False) -> CompiledStep | None:
        """Return the routines of :meth:`step` if they have been made; callable from any thread."""
        return self._compiled.get(self._key(batch, self.plan, train=True, windows=windows))

    def step(self, batch: Batch, *, windows: bool = False) -> CompiledStep:
        """Return the routines that train with a batch; made once for each shape.

        Args:
            batch: The batch.
            windows: Whether steps overlap.
        """
        return self._compile(batch, self.plan, train=True, windows=windows)

    def evaluation(self, batch: Batch, *, at_once: bool) -> CompiledStep:
        """Return the routines that evaluate a batch; made once for each shape.

        Args:
            batch: The batch.
            at_once: Whether each replica takes its part as one micro-batch, which plans of one stage may do.
        """
        plan = Plan(stages=self.plan.stages, sync=self.plan.sync) if at_once else self.plan
        return self._compile(batch, plan, train=False)

    def probe(self, batch: Batch, sizes: Sequence[int], *, train: bool, mode: Mode) -> Probe:
        """Return routines, not installed anywhere, that compute losses and gradients, or evaluate, without changing any
        state, and with samples that depend neither on chance nor on each other.

        Args:
            batch: The batch.
            sizes: Samples of each of its micro-batches.
            train: Whether to compute gradients, rather than metrics.
            mode: The mode of the model.
        """
        models = {size: self._stages.parts(batch, size, train=train, probe=mode) for size in sizes}
        self._require_held(models, "in eval mode" if mode == "evaluate" else "in training")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        cuts = enumerate(zip(starts, sizes, strict=True))
        parts = tuple(MicroBatch(index=index, start=start, size=size) for index, (start, size) in cuts)
        routes = tuple((stage.replicas[0],) * len(sizes) for stage in self.plan.stages)
        tensors = {size: model.programs.constants for size, model in models.items()}
        numbers = {size: {name: self._new() for name in own} for size, own in tensors.items()}
        job = BatchJob(
            micro_batches=parts,
            routes=routes,
            schedule=plain_schedule(routes, next(iter(models.values())).programs) if train else forward_only(routes),
            models=models,
            constants=numbers,
            leaves=len(batch.leaves),
        )
        routines = self._lowering.probe(job) if train else self._lowering.evaluate(job, apart=True)
        compiled = CompiledStep(micro_batches=parts, routines=routines, faults=self._faults(routines))
        constants = {numbers[size][name]: tensor for size, own in tensors.items() for name, tensor in own.items()}
        return Probe(compiled=compiled, constants=constants, models=[model.programs for model in models.values()])

    def index_ranges(self, batch: Batch, compiled: CompiledStep) -> tuple[IndexRange, ...]:
        """Return the ranges of the integers of a batch that training routines read."""
        programs = self._stages.parts(batch, compiled.micro_batches[0].size, train=True).programs
        return tuple(each for each in index_ranges(programs) if each.leaf < len(batch.leaves))

    def routine(self, worker: int, number: int) -> tuple[CompiledStep, StepRoutine] | None:
        """Return a worker's routine, and the step that it is of; ``None`` if there is no such routine."""
        for compiled in self._compiled.values():
            for found in compiled.all_of(worker) if worker in compiled.routines else ():
                if found.number == number:
                    return compiled, found
        return None

    def constants_of(
        self, batch: Batch, compiled: CompiledStep, *, train: bool = True
    ) -> dict[Hashable, Mapping[str, Tensor]]:
        """Return the constants that routines read, by name, for each graph.

        Args:
            batch: The batch.
            compiled: Its routines.
            train: Whether they train with it.
        """
        sizes = dict.fromkeys(part.size for part in compiled.micro_batches)
        return dict(self._constants_of(batch, size, train=train) for size in sizes)

    def constant_bytes(self, batch: Batch, compiled: CompiledStep, *, train: bool = True) -> dict[int, int]:
        """Return the bytes of the constants that routines read, by number of the buffer.

        Args are those of :meth:`constants_of`.
        """
        found: dict[int, int] = {}
        for graph, tensors in self.constants_of(batch, compiled, train=train).items():
            numbers = self._numbers.constants(graph, tensors)
            found |= {number: tensors[name].nbytes for name, number in numbers.items()}
        return found

    @property
    def gradients(self) -> dict[int, str]:
        """Parameter of each gradient buffer."""
        return self._lowering.gradients

    def residuals(self, worker: int) -> dict[int, CodecState]:
        """Return the buffers that a worker's lossy codecs keep from step to step."""
        return self._lowering.residuals(worker)

    def _key(self, batch: Batch, plan: Plan, *, train: bool, windows: bool) -> Hashable:
        return (batch.signature(batch.size), train, plan.micro_batch, windows)

    def _compile(self, batch: Batch, plan: Plan, *, train: bool, windows: bool = False) -> CompiledStep:
        key = self._key(batch, plan, train=train, windows=windows)
        if key not in self._compiled:
            parts, routes = plan.micro_batches(batch.size), plan.routes(batch.size)
            models = {part.size: self._stages.parts(batch, part.size, train=train) for part in parts}
            self._require_held(models, "in training" if train else "in an evaluation")
            if train:
                self._require_gradients(models)
            if windows:
                models = {size: model.in_chunks(size) for size, model in models.items()}
            make = make_window if windows else make_schedule
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
            self._compiled[key] = self._lower(job, train=train, windows=windows)
        return self._compiled[key]

    def _require_held(self, models: Mapping[int, PhasePrograms], doing: str) -> None:
        """Refuse programs that read state absent from their devices, which hold only the state that the first batch
        needed.

        Raises:
            CaptureError: State is missing; the message names it.
        """
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

    def _lower(self, job: BatchJob, *, train: bool, windows: bool) -> CompiledStep:
        parts, reduction = tuple(job.micro_batches), self._captures.recipe.reduction
        travelling = None
        if train and isinstance(reduction, Weighted):
            travelling = TravellingWeights(reduction=reduction, leaf=job.leaves, dtype=DTYPES[job.loss(0).dtype])
        members = {number: members for members, number in self.groups.items()}
        if windows:
            found = {
                worker: WorkerWindows(
                    fill=with_exchanges(worker, own.fill, members),
                    steady=with_exchanges(worker, own.steady, members),
                    drain=with_exchanges(worker, own.drain, members),
                )
                for worker, own in self._lowering.windows(job).items()
            }
            routines = {worker: own.steady for worker, own in found.items()}
        else:
            made = self._lowering.train(job) if train else self._lowering.evaluate(job)
            found, routines = {}, {worker: with_exchanges(worker, own, members) for worker, own in made.items()}
        told = [model.programs.measures for model in job.models.values()]
        alike = len({tuple(each.value for each in measures) for measures in told}) == 1
        return CompiledStep(
            micro_batches=parts,
            routines=routines,
            measures=told[0] if alike else (),
            windows=found,
            reduction=reduction,
            travelling=travelling,
            faults=self._faults(routines, found),
            models={size: model.programs for size, model in job.models.items()},
        )

    def _faults(
        self, routines: Mapping[int, StepRoutine], windows: Mapping[int, WorkerWindows] | None = None
    ) -> tuple[OrderFault, ...]:
        """Return the faults in the order of transfers, if it matters."""
        if not self.untagged:
            return ()
        turns = {worker: (own.fill, own.steady, own.drain) for worker, own in (windows or {}).items()}
        members = {number: members for members, number in self.groups.items()}
        rules = TransferRules(tagged=members.keys() - self.untagged.keys())
        alone = {worker: (own,) for worker, own in routines.items()}
        stepped = {worker: self.holdings.stepped_by(worker, self.trained) for worker in routines}
        updated = {w: {self._optimizer: [self.state.numbers[name] for name in own]} for w, own in stepped.items()}
        return step_faults(turns or alone, members, rules, self.gradients, updated)

    def _constants_of(self, batch: Batch, size: int, *, train: bool) -> tuple[Hashable, Mapping[str, Tensor]]:
        """Return the key of the graph for micro-batches of a size, and its constants by name."""
        tensors = self._stages.parts(batch, size, train=train).programs.constants
        return (batch.signature(size), train, *tensors), tensors

    def _numbers_of_constants(self, batch: Batch, size: int, *, train: bool) -> dict[str, int]:
        return self._numbers.constants(*self._constants_of(batch, size, train=train))
