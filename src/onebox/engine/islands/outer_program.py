"""Routines of the outer step, and of what surrounds an evaluation of the global parameters. Pure.

For each bucket its leaders compute ``(global - local) * weight``, sum it over the islands, exactly or in a lossy codec,
and update the global values by SGD with Nesterov momentum; these become the local ones, and the leaders broadcast them
within their islands. A change of local values is an eager operator between two routines, since the programs of routines
never write to their inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder, StepRoutine
from onebox.engine.compile.update.coded_buckets import GatheredBucket
from onebox.engine.islands.outer_layout import OuterBucket, travels_coded
from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.trainer_options import Outer
from onebox.wire import Operator, Program, SlotArgument, TensorSpec, Value, with_deaths
from onebox.wire.protocol.instructions import Broadcast, Evict, Free, Offload, Prefetch, Reduce

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
        between: Group of leaders, for those of several islands.
        within: Returns the groups through which a worker of an island takes part in a broadcast from the first of some
            that hold the same, in order; in each of them the source is the first member.
        new: Returns an unused number.
        sums: Buffer of each sum over the islands, between :meth:`OuterCompiler.begin` and :meth:`OuterCompiler.apply`.
        momenta: Buffer of the momentum of each parameter; none for plain SGD.
    """

    values: Mapping[str, int]
    local: Sequence[Mapping[str, int]]
    between: Mapping[Members, int]
    within: Callable[[int, Members, int], Sequence[int]]
    new: Callable[[], int]
    sums: Mapping[str, int]
    momenta: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class OuterRoutine:
    """A routine of an outer step, and the changes of local values that follow it.

    Args:
        routine: The routine; ``None`` for the changes alone. Its binding, if it has one, is the island's weight.
        copies: Pairs of buffers, the first of which are overwritten in place by the second.
        blends: Pairs of buffers, the first of which are moved towards the second, likewise.
    """

    routine: StepRoutine | None
    copies: tuple[tuple[int, int], ...] = ()
    blends: tuple[tuple[int, int], ...] = ()


WorkerOuterStep = tuple[OuterRoutine, ...]
"""A worker's part of an outer step, in order."""


class _Steps:
    """A worker's part of an outer step under construction.

    Args:
        new: Returns an unused number.
    """

    def __init__(self, new: Callable[[], int]) -> None:
        self.builder = RoutineBuilder(new, voted=False)
        """The routine under construction."""
        self._weighted = False
        self._found: list[OuterRoutine] = []

    def use_weight(self) -> None:
        """Record that the routine under construction reads the island's weight."""
        self._weighted = True

    def change(self, *, copies: Sequence[tuple[int, int]] = (), blends: Sequence[tuple[int, int]] = ()) -> None:
        """Change local values after the routine under construction, and begin the next one."""
        if not (self.builder.steps or copies or blends):
            return
        after = self.builder.another()
        routine = self.builder.finish([(0, 0)] * self._weighted, []) if self.builder.steps else None
        self._found.append(OuterRoutine(routine=routine, copies=tuple(copies), blends=tuple(blends)))
        self.builder, self._weighted = after, False

    def finish(self) -> WorkerOuterStep:
        """Return all of it."""
        self.change()
        return tuple(self._found)


@dataclass
class OuterCompiler:
    """Makes the routines of the outer step; sends nothing.

    Args:
        holdings: Sharding of the state in each island.
        fragments: The buckets of each fragment.
        specs: Specs of the whole tensors.
        options: Options of the outer optimizer.
        numbers: The numbers.
    """

    holdings: Sequence[ShardingSpec]
    fragments: Sequence[Sequence[OuterBucket]]
    specs: Mapping[str, TensorSpec]
    options: Outer
    numbers: OuterNumbers
    coded: dict[OuterBucket, GatheredBucket] = field(init=False)
    """The sums in a lossy codec."""
    _stashed: list[dict[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        buckets = [bucket for own in self.fragments for bucket in own]
        names = dict.fromkeys(name for bucket in buckets for name in bucket.names)
        self.coded = {
            bucket: GatheredBucket(
                self.options.compression, self._specs(bucket.leaders[0], bucket), bucket.leaders, self.numbers.new
            )
            for bucket in buckets
            if travels_coded(bucket, self.specs, self.options, len(bucket.leaders))
        }
        self._stashed = [{name: self.numbers.new() for name in names} for _ in self.holdings]

    def step(self, fragment: int) -> dict[int, WorkerOuterStep]:
        """Return the outer step of a fragment, for each worker."""
        return self._for_each(lambda island, worker: self._step(island, worker, self.fragments[fragment]))

    def begin(self, fragment: int) -> dict[int, WorkerOuterStep]:
        """Return the first half of :meth:`step`, which begins the sums over the islands and waits for nothing."""

        def made(island: int, worker: int) -> WorkerOuterStep:
            steps = _Steps(self.numbers.new)
            for bucket in (bucket for bucket in self.fragments[fragment] if worker in bucket.leaders):
                self._sum(steps, island, worker, bucket, [self.numbers.sums[name] for name in bucket.names])
                if bucket.trained:
                    self._put_away(steps, [self.numbers.values[name] for name in bucket.names])
            return steps.finish()

        return self._for_each(made)

    def decode(self, fragment: int) -> dict[int, WorkerOuterStep]:
        """Return what makes the sums that :meth:`begin` has begun in a lossy codec, as those without are."""

        def made(island: int, worker: int) -> WorkerOuterStep:
            steps = _Steps(self.numbers.new)
            for bucket in (bucket for bucket in self.fragments[fragment] if worker in bucket.leaders):
                self._decode(steps, worker, bucket, [self.numbers.sums[name] for name in bucket.names])
            return steps.finish()

        return self._for_each(made)

    def apply(self, fragment: int) -> dict[int, WorkerOuterStep]:
        """Return the second half of :meth:`step`, after which local values are between their own and the global ones.

        The leaders compute these, and hand them to the others in their islands, which have the same.
        """

        def made(island: int, worker: int) -> WorkerOuterStep:
            steps = _Steps(self.numbers.new)
            received: list[tuple[int, int]] = []
            for bucket in self.fragments[fragment]:
                if worker == bucket.groups[island][0]:
                    sums = [self.numbers.sums[name] for name in bucket.names]
                    values = [self.numbers.values[name] for name in bucket.names]
                    if bucket.trained:
                        self._bring(steps, values)
                        self._update(steps, worker, bucket, sums)
                    else:
                        label = InstructionLabel("average", "compute")
                        steps.builder.call(_clones(self._specs(worker, bucket)), sums, values, label)
                        steps.builder.add(Free(tuple(sums)), InstructionLabel("free"))
                received += self._hand_out(steps, island, worker, bucket, blend=True)
            steps.change(copies=received)
            return steps.finish()

        return self._for_each(made)

    def enter(self) -> dict[int, WorkerOuterStep]:
        """Return what puts the global values in the place of the local ones, which are kept aside."""

        def made(island: int, worker: int) -> WorkerOuterStep:
            steps = _Steps(self.numbers.new)
            received: list[tuple[int, int]] = []
            if held := self._held(worker):
                specs = tuple(self._spec(worker, name) for name in held)
                local = [self.numbers.local[island][name] for name in held]
                aside = [self._stashed[island][name] for name in held]
                steps.builder.call(_clones(specs), local, aside, InstructionLabel("keep the island's values"))
            for bucket in self._buckets:
                if worker == bucket.groups[island][0] and bucket.trained:
                    self._bring(steps, [self.numbers.values[name] for name in bucket.names])
                received += self._hand_out(steps, island, worker, bucket)
            steps.change(copies=received)
            return steps.finish()

        return self._for_each(made)

    def leave(self) -> dict[int, WorkerOuterStep]:
        """Return what undoes :meth:`enter`, but for freeing what :meth:`aside` names."""

        def made(island: int, worker: int) -> WorkerOuterStep:
            local, aside = self.numbers.local[island], self._stashed[island]
            return (OuterRoutine(routine=None, copies=tuple((local[n], aside[n]) for n in self._held(worker))),)

        return self._for_each(made)

    def aside(self, worker: int) -> tuple[int, ...]:
        """Return the buffers that :meth:`enter` fills."""
        for island, own in enumerate(self.holdings):
            if worker in own.devices:
                return tuple(self._stashed[island][name] for name in self._held(worker))
        return ()

    def on_host(self, worker: int) -> frozenset[int]:
        """Return the buffers of a worker that lie in its host's memory between two outer steps."""
        if self.options.state == "device":
            return frozenset()
        led = [bucket for bucket in self._buckets if bucket.trained and worker in bucket.leaders]
        names = [name for bucket in led for name in bucket.names]
        residuals = [number for bucket in led if bucket in self.coded for number in self.coded[bucket].state(worker)]
        values = [self.numbers.values[name] for name in names]
        return frozenset((*values, *(self.numbers.momenta[name] for name in names if self.numbers.momenta), *residuals))

    @property
    def _buckets(self) -> list[OuterBucket]:
        return [bucket for own in self.fragments for bucket in own]

    def _for_each(self, make: Callable[[int, int], WorkerOuterStep]) -> dict[int, WorkerOuterStep]:
        """Return the part of each worker, given its island and itself."""
        return {worker: make(island, worker) for island, own in enumerate(self.holdings) for worker in own.devices}

    def _step(self, island: int, worker: int, buckets: Sequence[OuterBucket]) -> WorkerOuterStep:
        steps = _Steps(self.numbers.new)
        travelling: deque[tuple[OuterBucket, list[int]]] = deque()
        received: list[tuple[int, int]] = []

        def arrive(bucket: OuterBucket, results: list[int]) -> None:
            if bucket.trained and worker in bucket.leaders:
                self._decode(steps, worker, bucket, results)
                self._update(steps, worker, bucket, results)
            received.extend(self._hand_out(steps, island, worker, bucket))

        for bucket in (bucket for bucket in buckets if worker in bucket.groups[island]):
            results = [self.numbers.values[name] for name in bucket.names]
            if worker in bucket.leaders:
                results = [self.numbers.new() for _ in bucket.names] if bucket.trained else results
                self._sum(steps, island, worker, bucket, results)
            travelling.append((bucket, results))
            if len(travelling) > _TRAVELLING:  # all come to a bucket after the same ones: none waits in a circle
                arrive(*travelling.popleft())
        for each in travelling:
            arrive(*each)
        steps.change(copies=received)
        return steps.finish()

    def _sum(self, steps: _Steps, island: int, worker: int, bucket: OuterBucket, results: Sequence[int]) -> None:
        """Begin the sum over the islands of a bucket's outer gradients, or of its buffers."""
        specs, builder = self._specs(worker, bucket), steps.builder
        local = [self.numbers.local[island][name] for name in bucket.names]
        steps.use_weight()
        if bucket.trained:
            values = [self.numbers.values[name] for name in bucket.names]
            self._bring(steps, values)
            label = InstructionLabel("outer gradient", "compute")
            builder.call(_differences(specs), [*values, *local, _WEIGHT], results, label)
        else:
            builder.call(_weighted(specs), [*local, _WEIGHT], results, InstructionLabel("average", "compute"))
        if coded := self.coded.get(bucket):
            residuals = list(coded.state(worker))
            self._bring(steps, residuals)
            coded.phases(builder, worker, self.numbers.between[bucket.leaders], results)[0]()
            self._put_away(steps, residuals)
        elif len(bucket.leaders) > 1:
            group = self.numbers.between[bucket.leaders]
            label = InstructionLabel(
                BETWEEN_ISLANDS,
                "transfer",
                size_bytes=sum(spec.size_bytes for spec in specs),
                exchange=(group, self.numbers.values[bucket.names[0]]),
                peers=tuple(leader for leader in bucket.leaders if leader != worker),
            )
            builder.add(Reduce(tuple(results), group), label)

    def _decode(self, steps: _Steps, worker: int, bucket: OuterBucket, results: Sequence[int]) -> None:
        """Make the sums of a bucket, if they travel in a lossy codec."""
        if coded := self.coded.get(bucket):
            coded.phases(steps.builder, worker, self.numbers.between[bucket.leaders], results)[1]()

    def _update(self, steps: _Steps, worker: int, bucket: OuterBucket, gradients: Sequence[int]) -> None:
        """Update the global values of a bucket, which are on the device."""
        values = [self.numbers.values[name] for name in bucket.names]
        momenta = [self.numbers.momenta[name] for name in bucket.names if self.numbers.momenta]
        self._bring(steps, momenta)
        program = _updates(self._specs(worker, bucket), self.options.lr, self.options.momentum)
        given, label = [*values, *momenta, *gradients], InstructionLabel("outer update", "compute")
        steps.builder.call(program, given, [*values, *momenta], label, takes=range(len(given)))
        self._put_away(steps, momenta)

    def _hand_out(
        self, steps: _Steps, island: int, worker: int, bucket: OuterBucket, *, blend: bool = False
    ) -> list[tuple[int, int]]:
        """Give local values those of the leader, which has the global ones on its device; return what remains to copy.

        Args:
            steps: The worker's part.
            island: Its island.
            worker: The worker; nothing is done for one that holds nothing of the bucket.
            bucket: The bucket.
            blend: Whether they become a part of the global ones only.
        """
        members = bucket.groups[island]
        if worker not in members:
            return []
        local = tuple(self.numbers.local[island][name] for name in bucket.names)
        if worker == members[0]:
            values = [self.numbers.values[name] for name in bucket.names]
            pairs = list(zip(local, values, strict=True))
            steps.change(blends=pairs) if blend else steps.change(copies=pairs)
            if bucket.trained:
                self._put_away(steps, values)
        if len(members) > 1:
            peers = () if worker == members[0] else members[:1]
            for group in self.numbers.within(island, members, worker):
                exchange = group, self.numbers.values[bucket.names[0]]
                label = InstructionLabel("hand out within the island", "transfer", exchange=exchange, peers=peers)
                steps.builder.add(Broadcast(local, group, 0), label)
        # copying a received buffer to itself waits for it: an optimizer may step before anything else reads it
        return [] if worker == members[0] else list(zip(local, local, strict=True))

    def _bring(self, steps: _Steps, buffers: Sequence[int]) -> None:
        """Begin to copy buffers to the device, if they lie on the host."""
        if self.options.state == "host" and buffers:
            steps.builder.add(Prefetch(tuple(buffers)), InstructionLabel("bring outer state", "transfer"))

    def _put_away(self, steps: _Steps, buffers: Sequence[int]) -> None:
        """Copy buffers to the host, if they are to lie there."""
        if self.options.state == "host" and buffers:
            steps.builder.add(Offload(tuple(buffers)), InstructionLabel("put outer state away", "transfer"))
            steps.builder.add(Evict(tuple(buffers)), InstructionLabel("free"))

    def _held(self, worker: int) -> list[str]:
        """Return the averaged parameters and buffers that a worker holds."""
        return [name for bucket in self._buckets for own in bucket.groups if worker in own for name in bucket.names]

    def _specs(self, worker: int, bucket: OuterBucket) -> tuple[TensorSpec, ...]:
        return tuple(self._spec(worker, name) for name in bucket.names)

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


def _updates(specs: Sequence[TensorSpec], lr: float, momentum: float) -> Program:
    """Return a program of a step of ``torch.optim.SGD``, with Nesterov momentum unless that is 0.

    It maps inputs ``g0 … gn, m0 … mn, d0 … dn``, of values, momenta and gradients, to new values and momenta; without
    momentum there are no ``m``.
    """
    count, slots = len(specs), (3 if momentum else 2) * len(specs)
    operators: list[Operator] = []
    values, momenta = [], []

    def add(name: str, left: int, right: int | float, spec: TensorSpec, alpha: float = 1.0) -> int:
        second = SlotArgument(right) if isinstance(right, int) else right
        keywords: dict[str, Value] = {} if alpha == 1.0 else {"alpha": alpha}
        operators.append(Operator(name, (SlotArgument(left), second), keywords, (slots + len(operators),), (spec,)))
        return slots + len(operators) - 1

    for index, spec in enumerate(specs):
        step = slots - count + index
        if momentum:
            scaled = add("aten.mul.Scalar", count + index, momentum, spec)
            momenta.append(add("aten.add.Tensor", scaled, step, spec))
            step = add("aten.add.Tensor", step, momenta[-1], spec, momentum)
        values.append(add("aten.add.Tensor", index, step, spec, -lr))
    inputs = tuple(specs) * (3 if momentum else 2)
    return with_deaths(Program(inputs, tuple(operators), (*values, *momenta), slots + len(operators)))


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
