"""Routines of the outer step, and of what surrounds an evaluation of the global parameters. Pure.

For each bucket its leaders compute ``(global - local) * weight``, sum it over the islands and update the global values
by the outer optimizer; these become the local ones, and the leaders broadcast them within their islands. The leader's
own copy is an eager operator after the routine, since the programs of routines never write to their inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder, StepRoutine
from onebox.engine.islands.outer_layout import OuterBucket
from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.wire import Operator, Program, SlotArgument, TensorSpec, with_deaths
from onebox.wire.protocol.instructions import Broadcast, Free, OptimizerStep, Reduce

WEIGHT = TensorSpec("float64", ())
"""Spec of the weight of an island, the binding of the routines of an outer step."""

_WEIGHT = -1
"""Reference to that binding."""

BETWEEN_ISLANDS = "average between islands"
"""Label of the sums that travel between islands."""

_TRAVELLING = 4
"""Buckets of outer gradients that are being summed while the next one is computed; it bounds their memory."""


@dataclass(frozen=True, kw_only=True)
class OuterNumbers:
    """Numbers of the buffers and groups of the outer step.

    Args:
        values: Buffer of each global value.
        local: For each island, the buffer of each parameter and buffer.
        optimizer: The outer optimizer's definition.
        between: Group of leaders, for those of several islands.
        within: Returns the group of some workers of an island, which hold the same.
        new: Returns an unused number.
    """

    values: Mapping[str, int]
    local: Sequence[Mapping[str, int]]
    optimizer: int
    between: Mapping[Members, int]
    within: Callable[[int, Members], int]
    new: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class WorkerOuterStep:
    """A worker's part of an outer step, or of a change of its values.

    Args:
        routine: Its routine; ``None`` if there is nothing to do before the copies.
        copies: Pairs of buffers, the first of which are overwritten in place by the second, after the routine.
        blends: Pairs of buffers, the first of which are moved towards the second, likewise.
        then: What follows.
    """

    routine: StepRoutine | None
    copies: tuple[tuple[int, int], ...] = ()
    blends: tuple[tuple[int, int], ...] = ()
    then: WorkerOuterStep | None = None


@dataclass
class OuterCompiler:
    """Makes the routines of the outer step; sends nothing.

    Args:
        holdings: Sharding of the state in each island.
        global_holdings: Sharding of the global values.
        buckets: All buckets.
        trained: Parameters that the outer optimizer updates, in its order.
        specs: Specs of the whole tensors.
        numbers: The numbers.
    """

    holdings: Sequence[ShardingSpec]
    global_holdings: ShardingSpec
    buckets: Sequence[OuterBucket]
    trained: Sequence[str]
    specs: Mapping[str, TensorSpec]
    numbers: OuterNumbers
    sums: dict[str, int] = field(init=False)
    """Buffer of each sum over the islands, between :meth:`begin` and :meth:`apply`."""
    _stashed: list[dict[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        names = dict.fromkeys(name for bucket in self.buckets for name in bucket.names)
        self.sums = {name: self.numbers.new() for name in names}
        self._stashed = [{name: self.numbers.new() for name in names} for _ in self.holdings]

    def step(self, buckets: Sequence[OuterBucket]) -> dict[int, WorkerOuterStep]:
        """Return the outer step of some buckets, for each worker; the binding is the island's weight."""
        return {
            worker: self._step(island, worker, buckets)
            for island, own in enumerate(self.holdings)
            for worker in own.devices
        }

    def begin(self, buckets: Sequence[OuterBucket]) -> dict[int, WorkerOuterStep]:
        """Return the first half of :meth:`step`, which begins the sums over the islands and waits for nothing."""
        found = {}
        for island, own in enumerate(self.holdings):
            for worker in own.devices:
                builder = RoutineBuilder(self.numbers.new)
                for bucket in (bucket for bucket in buckets if worker in bucket.leaders):
                    self._sum(builder, island, worker, bucket, [self.sums[name] for name in bucket.names])
                builder.add(Free((_WEIGHT,)), InstructionLabel("free"))
                found[worker] = WorkerOuterStep(routine=builder.finish([(0, 0)], []))
        return found

    def apply(self, buckets: Sequence[OuterBucket]) -> dict[int, WorkerOuterStep]:
        """Return the second half of :meth:`step`, after which local values are between their own and the global ones.

        The leaders compute these, and hand them to the others in their islands, which have the same.
        """
        found = {}
        for island, own in enumerate(self.holdings):
            for worker in own.devices:
                builder, after = RoutineBuilder(self.numbers.new), RoutineBuilder(self.numbers.new)
                blends: list[tuple[int, int]] = []
                received: list[tuple[int, int]] = []
                for bucket in (bucket for bucket in buckets if worker in bucket.groups[island]):
                    local = tuple(self.numbers.local[island][name] for name in bucket.names)
                    members = bucket.groups[island]
                    if worker == members[0]:
                        sums = [self.sums[name] for name in bucket.names]
                        values = [self.numbers.values[name] for name in bucket.names]
                        if bucket.trained:
                            self._update(builder, worker, bucket, sums)
                        else:
                            specs = tuple(self._spec(worker, name) for name in bucket.names)
                            builder.call(_clones(specs), sums, values, InstructionLabel("average", "compute"))
                            builder.add(Free(tuple(sums)), InstructionLabel("free"))
                        blends += zip(local, values, strict=True)
                    else:
                        received += zip(local, local, strict=True)  # waits for it, as in :meth:`step`
                    if len(members) > 1:
                        label = InstructionLabel("hand out within the island", "transfer")
                        after.add(Broadcast(local, self.numbers.within(island, members), 0), label)
                then = after.finish([], []) if after.steps else None
                found[worker] = WorkerOuterStep(
                    routine=builder.finish([], []) if builder.steps else None,
                    blends=tuple(blends),
                    then=WorkerOuterStep(routine=then, copies=tuple(received)),
                )
        return found

    def enter(self) -> dict[int, WorkerOuterStep]:
        """Return what puts the global values in the place of the local ones, which are kept aside."""
        found = {}
        for island, own in enumerate(self.holdings):
            for worker in own.devices:
                builder = RoutineBuilder(self.numbers.new)
                held = self._held(worker)
                specs = tuple(self._spec(worker, name) for name in held)
                if held:
                    local = [self.numbers.local[island][name] for name in held]
                    aside = [self._stashed[island][name] for name in held]
                    builder.call(_clones(specs), local, aside, InstructionLabel("keep the island's values"))
                found[worker] = self._handed_out(island, worker, self.buckets, builder, bindings=0)
        return found

    def leave(self) -> dict[int, WorkerOuterStep]:
        """Return what undoes :meth:`enter`, but for freeing what :meth:`aside` names."""
        return {
            worker: WorkerOuterStep(
                routine=None,
                copies=tuple(
                    (self.numbers.local[island][name], self._stashed[island][name]) for name in self._held(worker)
                ),
            )
            for island, own in enumerate(self.holdings)
            for worker in own.devices
        }

    def aside(self, worker: int) -> tuple[int, ...]:
        """Return the buffers that :meth:`enter` fills."""
        for island, own in enumerate(self.holdings):
            if worker in own.devices:
                return tuple(self._stashed[island][name] for name in self._held(worker))
        return ()

    def _step(self, island: int, worker: int, buckets: Sequence[OuterBucket]) -> WorkerOuterStep:
        builder = RoutineBuilder(self.numbers.new)
        travelling: deque[tuple[OuterBucket, list[int]]] = deque()
        for bucket in (bucket for bucket in buckets if worker in bucket.leaders):
            if bucket.trained:
                results = [self.numbers.new() for _ in bucket.names]
                travelling.append((bucket, results))
            else:
                results = [self.numbers.values[name] for name in bucket.names]
            self._sum(builder, island, worker, bucket, results)
            if len(travelling) > _TRAVELLING:  # all come to a bucket after the same ones: none waits in a circle
                self._update(builder, worker, *travelling.popleft())
        for each, results in travelling:
            self._update(builder, worker, each, results)
        return self._handed_out(island, worker, buckets, builder, bindings=1)

    def _sum(
        self, builder: RoutineBuilder, island: int, worker: int, bucket: OuterBucket, results: Sequence[int]
    ) -> None:
        """Begin the sum over the islands of a bucket's outer gradients, or of its buffers."""
        specs = tuple(self._spec(worker, name) for name in bucket.names)
        local = [self.numbers.local[island][name] for name in bucket.names]
        if bucket.trained:
            values = [self.numbers.values[name] for name in bucket.names]
            label = InstructionLabel("outer gradient", "compute")
            builder.call(_differences(specs), [*values, *local, _WEIGHT], results, label)
        else:
            builder.call(_weighted(specs), [*local, _WEIGHT], results, InstructionLabel("average", "compute"))
        if len(bucket.leaders) > 1:
            size_bytes = sum(spec.size_bytes for spec in specs)
            label = InstructionLabel(BETWEEN_ISLANDS, "transfer", size_bytes=size_bytes)
            builder.add(Reduce(tuple(results), self.numbers.between[bucket.leaders]), label)

    def _update(self, builder: RoutineBuilder, worker: int, bucket: OuterBucket, gradients: Sequence[int]) -> None:
        """Update the global values of a bucket."""
        stepped = self.global_holdings.stepped_by(worker, self.trained)
        position = {name: place for place, name in enumerate(stepped)}
        members = tuple(position[name] for name in bucket.names)
        step = OptimizerStep(self.numbers.optimizer, tuple(gradients), members=members)
        builder.add(step, InstructionLabel("outer update", "compute"))
        builder.add(Free(tuple(gradients)), InstructionLabel("free"))

    def _handed_out(
        self, island: int, worker: int, buckets: Sequence[OuterBucket], builder: RoutineBuilder, *, bindings: int
    ) -> WorkerOuterStep:
        """Return a routine that ends with the global values in the place of the local ones."""
        copies: list[tuple[int, int]] = []
        for bucket in buckets:
            members = bucket.groups[island]
            if worker not in members:
                continue
            values = tuple(self.numbers.values[name] for name in bucket.names)
            local = tuple(self.numbers.local[island][name] for name in bucket.names)
            leads = worker == members[0]
            # copying a received buffer to itself waits for it: an optimizer may step before anything else reads it
            copies += zip(local, values if leads else local, strict=True)
            if len(members) > 1:
                label = InstructionLabel("hand out within the island", "transfer")
                group = self.numbers.within(island, members)
                builder.add(Broadcast(values if leads else local, group, 0), label)
        if bindings:
            builder.add(Free((_WEIGHT,)), InstructionLabel("free"))
        routine = builder.finish([(0, 0)] * bindings, []) if builder.steps else None
        return WorkerOuterStep(routine=routine, copies=tuple(copies))

    def _held(self, worker: int) -> list[str]:
        """Return the averaged parameters and buffers that a worker holds."""
        return [name for bucket in self.buckets for own in bucket.groups if worker in own for name in bucket.names]

    def _spec(self, worker: int, name: str) -> TensorSpec:
        own = next(own for own in self.holdings if worker in own.devices)
        return own.spec(worker, name, self.specs[name])


def _differences(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that maps inputs ``a0 … an, b0 … bn, w`` to ``(a0 - b0) * w … (an - bn) * w``."""
    count = len(specs)
    weight, slots = SlotArgument(2 * count), 2 * count + 1
    operators: list[Operator] = []
    outputs = []
    for index, spec in enumerate(specs):
        pair = SlotArgument(index), SlotArgument(count + index)
        operators.append(Operator("aten.sub.Tensor", pair, {}, (slots,), (spec,)))
        operators.append(Operator("aten.mul.Tensor", (SlotArgument(slots), weight), {}, (slots + 1,), (spec,)))
        outputs.append(slots + 1)
        slots += 2
    return with_deaths(Program((*specs, *specs, WEIGHT), tuple(operators), tuple(outputs), slots))


def _weighted(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that maps inputs ``a0 … an, w`` to ``a0 * w … an * w``."""
    count = len(specs)
    operators = tuple(
        Operator("aten.mul.Tensor", (SlotArgument(index), SlotArgument(count)), {}, (count + 1 + index,), (spec,))
        for index, spec in enumerate(specs)
    )
    outputs = tuple(range(count + 1, 2 * count + 1))
    return with_deaths(Program((*specs, WEIGHT), operators, outputs, 2 * count + 1))


def _clones(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that copies its inputs."""
    count = len(specs)
    operators = tuple(
        Operator("aten.clone.default", (SlotArgument(index),), {}, (count + index,), (spec,))
        for index, spec in enumerate(specs)
    )
    return with_deaths(Program(tuple(specs), operators, tuple(range(count, 2 * count)), 2 * count))
