"""Gradients: accumulated over micro-batches, summed over the holders of their parameters, clipped and applied. Pure.

The sharding spec decides whether all holders of a parameter apply them, or its owner, which then distributes the result
(see :mod:`onebox.engine.partition.optimizer_sharding`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from onebox.cost import DeviceGroups
from onebox.engine.compile.batch_job import BatchJob, BufferNumbers
from onebox.engine.compile.phase_emission import PhaseCall, emit
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.compile.update.coded_buckets import CodedBucket, LowRankBucket, QuantizedBucket
from onebox.engine.compile.update.reductions import GroupReduction, RoutineScope
from onebox.engine.partition.gradient_buckets import BUCKET_BYTES, GPU_BUCKET_BYTES, CodecState
from onebox.engine.partition.hierarchical_reduction import group_leaders
from onebox.engine.partition.optimizer_sharding import GradientBucket, buckets_by_owner
from onebox.engine.partition.phase_programs import PhaseProgram
from onebox.engine.partition.sharding_spec import Members, ShardingSpec, all_workers_group
from onebox.errors import CaptureError
from onebox.graph import ModelPrograms, NamedProgram, Piece, Port, add_all, split, square_norm, zeros
from onebox.graph.shard.placements import Shard
from onebox.graph.shard.search import RankStep
from onebox.wire import Program, TensorSpec
from onebox.wire.protocol.instructions import Ask, Free

Half = Literal["whole", "early", "late"]
"""Part of a step's backward in a routine: all of it; the part in the step's own window; or the rest in the next window,
where the sums continue under new numbers, and are exchanged and applied."""


class Gradients:
    """The gradients of a trainer.

    Args:
        holdings: The sharding of the state.
        numbers: Shared numbers.
        trained: Names of the trained parameters, in the optimizer's order.
        model: Returns the programs for a micro-batch size.
        max_norm: Gradient clipping norm; 0 for none.
        gpus: The workers that are GPUs, which exchange larger buckets among each other.
    """

    def __init__(
        self,
        holdings: ShardingSpec,
        numbers: BufferNumbers,
        *,
        trained: Sequence[str],
        model: ModelPrograms,
        max_norm: float,
        gpus: Collection[int] = (),
    ) -> None:
        self.holdings = holdings
        self.numbers = numbers
        self.trained = trained
        self.max_norm = max_norm
        self.sums = {name: numbers.new() for name in trained}
        self.late = {name: numbers.new() for name in trained} if numbers.previous else {}
        self.fresh = {name: numbers.new() for name in trained}
        self.norm = numbers.new()
        self.specs: dict[str, TensorSpec] = {}
        made: dict[str, tuple[int, int]] = {}
        for stage in reversed(range(model.stages)):
            backward = model.of(stage, "B")
            order = {port: number for number, port in enumerate(_in_order_of_making(backward))}
            for port, spec in backward.specs().items():
                if port.kind == "gradient":
                    self.specs[str(port.name)] = spec
                    made[str(port.name)] = (-stage, order[port])
        shared: dict[Members, list[str]] = {}
        for name in sorted(trained, key=made.__getitem__):
            for members in holdings.replica_groups[name]:
                if len(members) > 1:
                    shared.setdefault(members, []).append(name)
        self.buckets = {
            members: buckets_by_owner(
                names,
                self.specs,
                functools.partial(holdings.owner, members),
                GPU_BUCKET_BYTES if all(worker in gpus for worker in members) else BUCKET_BYTES,
                holdings.codecs,
                [name for name in names if isinstance(holdings.placement(name), Shard)],
            )
            for members, names in shared.items()
        }
        self.coded = {
            (members, bucket): self._coded(members, bucket)
            for members, own in self.buckets.items()
            for bucket in own
            if bucket.codec != "none"
        }
        self._additions: dict[tuple[TensorSpec, ...], Program] = {}
        self._pieces: dict[tuple[int, tuple[int, ...]], tuple[Program, list[Piece]]] = {}

    def parts(self, members: Members, bucket: GradientBucket) -> DeviceGroups:
        """Return the parts of a group that sum a bucket first; one part for a flat reduction."""
        if bucket.owner is not None:
            return (members,)
        return self.holdings.parts(members, sum(self._spec(members, name).size_bytes for name in bucket.names))

    def _spec(self, members: Members, name: str) -> TensorSpec:
        """Return the spec of a gradient on the members of a replica group."""
        return self.holdings.spec(members[0], name, self.specs[name])

    def _coded(self, members: Members, bucket: GradientBucket) -> CodedBucket:
        parts, specs = self.parts(members, bucket), [self._spec(members, name) for name in bucket.names]
        exchanging = group_leaders(parts) if len(parts) > 1 else members
        if bucket.codec == "powersgd":
            return LowRankBucket(
                dict(zip(bucket.names, specs, strict=True)), exchanging, bucket.owner, self.numbers.new
            )
        return QuantizedBucket(bucket.codec, specs, exchanging, bucket.owner, self.numbers.new)

    def residuals(self, worker: int) -> dict[int, CodecState]:
        """Return the buffers of a worker that lossy codecs keep from step to step."""
        found: dict[int, CodecState] = {}
        for coded in self.coded.values():
            found |= coded.state(worker)
        return found

    @property
    def replicated(self) -> Iterable[Members]:
        """The groups of which each member computes the result of sums by itself, which must have the same bits."""
        for coded in self.coded.values():
            if isinstance(coded, LowRankBucket) and coded.owner is None:
                yield coded.members

    def pieces(self, program: Program, ends: Sequence[int]) -> list[Piece]:
        """Return a backward program split into pieces, the same for all micro-batches."""
        key = (id(program), tuple(ends))
        if key not in self._pieces:
            self._pieces[key] = (program, split(program, ends))  # kept alive, so that its id stays unique
        return self._pieces[key][1]

    def addition(self, specs: tuple[TensorSpec, ...]) -> Program:
        """Return the program that adds gradients, shared by all micro-batches."""
        if specs not in self._additions:
            self._additions[specs] = add_all(specs)
        return self._additions[specs]

    def buckets_of(self, worker: int) -> list[tuple[Members, GradientBucket]]:
        """Return the buckets of a worker with the group of each, in order."""
        found = self.buckets.items()
        return [(members, bucket) for members, own in found if worker in members for bucket in own]

    @property
    def everybody(self) -> int | None:
        """The group over which norms are summed; ``None`` if every worker has all gradients."""
        holdings = self.holdings
        alone = not holdings.owners or len(holdings.devices) == 1
        if alone and not holdings.parted(self.trained):
            return None
        return self.numbers.groups[all_workers_group(holdings.devices, self.numbers.groups)]


def _in_order_of_making(part: NamedProgram) -> list[Port]:
    """Return the outputs of a program in the order in which they are computed."""
    ports = dict(zip(part.program.outputs, part.outputs, strict=True))
    made = [slot for operator in part.program.operators for slot in operator.outs if slot in ports]
    return [ports[slot] for slot in made if slot is not None]


class WorkerGradients:
    """The gradients of one worker and one step in one routine.

    Args:
        shared: The gradients of the trainer.
        scope: The worker's part of the step.
        half: The part of the step's backward in the routine.
    """

    def __init__(self, shared: Gradients, scope: RoutineScope, *, half: Half = "whole") -> None:
        worker, job = scope.worker, scope.job
        self._shared = shared
        self._builder = scope.builder
        self._worker = worker
        self._exchanges = scope.exchanges
        self._held = shared.holdings.held_by(worker, shared.trained)
        self._specs = {name: shared.holdings.spec(worker, name, shared.specs[name]) for name in self._held}
        self._half = half
        self._sums = shared.late if half == "late" else shared.sums
        self._begun = self._made_early(job) if half == "late" else set[str]()
        self._last: dict[str, int] = {}
        for position, action in enumerate(scope.actions):
            if (action.micro_batch < 0) == (half == "late"):
                self._last |= dict.fromkeys(_gradients_of(job.part(worker, action)), position)
        strangers = sorted(set(self._last) - set(self._held))
        if strangers:
            raise CaptureError(
                f"device {worker} would make a part of the gradient of {strangers[0]}, which other devices hold: the "
                "graph of micro-batches of this size is another than that of the first; train with batches of one size"
            )
        self._missing: list[tuple[set[str], GroupReduction]] = []
        self._bucket_of: dict[str, int] = {}
        if half != "early":
            for members, bucket in shared.buckets_of(worker):
                self._expect(members, bucket)

    def _made_early(self, job: BatchJob) -> set[str]:
        """Return the parameters with gradients from the previous window."""
        row = job.schedule.rows.get(self._worker, ())
        parts = (job.part(self._worker, action) for action in row if action.micro_batch >= 0)
        return {name for part in parts for name in _gradients_of(part)}

    def _expect(self, members: Members, bucket: GradientBucket) -> None:
        missing = {name for name in bucket.names if name in self._last}
        self._bucket_of |= dict.fromkeys(missing, len(self._missing))
        specs = [self._specs[name] for name in bucket.names]
        parts, coded = self._shared.parts(members, bucket), self._shared.coded.get((members, bucket))
        prepare = functools.partial(self._bucket, bucket.names)
        age = int(self._half == "late")
        exchange = self._exchanges.expect(
            members, prepare, bucket.owner, parts=parts, specs=specs, coded=coded, age=age
        )
        exchange.ready = not missing
        self._missing.append((missing, exchange))

    def _bucket(self, bucket: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the buffers of a bucket, with zeros for missing contributions of this worker."""
        silent = self._shared.holdings.silent
        empty = [name for name in bucket if name not in self._begun or self._worker in silent.get(name, ())]
        if empty:
            self._begun.update(empty)
            specs = [self._specs[name] for name in empty]
            self._builder.call(zeros(specs), [], [self._sums[name] for name in empty], InstructionLabel("zero"))
        return [tuple(self._sums[name] for name in bucket)]

    @property
    def own(self) -> frozenset[int]:
        """Buffers of gradients that only the optimizer of this worker reads."""
        if self._shared.max_norm:
            return frozenset()
        shared = {name for _, bucket in self._shared.buckets_of(self._worker) for name in bucket.names}
        return frozenset(self._shared.sums[name] for name in self._held if name not in shared)

    # ---- backward

    def run(
        self,
        call: PhaseCall,
        values: Mapping[Port, int],
        position: int,
        *,
        made: Callable[[Sequence[Port]], None],
        hand_on: Callable[[], None],
    ) -> None:
        """Call a backward program, split where a bucket or an awaited value is complete before its end.

        Args:
            call: The run of the worker's part.
            values: The buffer of each output value.
            position: Index of the action in the worker's sequence.
            made: Called with the completed values, piece by piece.
            hand_on: Adds the values that other workers wait for: called once, before the values that only this worker
                needs.
        """
        part = call.part
        if not part.steps:
            hand_on()
            return
        steps: Sequence[RankStep] = part.steps
        if part.program is not None:
            ends = {*part.ends, *self._ends(part, part.program, position)}
            steps = self._shared.pieces(part.program, sorted(ends))

        def number_of(port: Port) -> int:
            if port in values:
                return values[port]
            name = str(port.name)
            return self._shared.fresh[name] if name in self._begun else self._sums[name]

        left = iter(reversed(range(len(steps))))

        def done(ports: Sequence[Port]) -> None:
            if next(left) == 0:
                hand_on()
            self._accumulate([str(port.name) for port in ports if port.kind == "gradient"], position)

        emit(self._builder, call, steps, number_of, made=made, done=done)

    def _ends(self, part: PhaseProgram, program: Program, position: int) -> list[int]:
        """Return the operators of a program after which a bucket is complete."""
        last = {name for name, place in self._last.items() if place == position} & set(self._bucket_of)
        if not last:
            return []
        made = {slot: number for number, o in enumerate(program.operators) for slot in o.outs if slot is not None}
        ends: dict[int, int] = {}
        for port, slot in zip(part.outputs, part.slots, strict=True):
            if port.kind == "gradient" and port.name in last:
                bucket = self._bucket_of[str(port.name)]
                ends[bucket] = max(ends.get(bucket, -1), made.get(slot, -1))
        behind = len(program.operators) - 1
        return sorted({end for end in ends.values() if 0 <= end < behind})

    def _accumulate(self, names: Sequence[str], position: int) -> None:
        """Add gradients to those of earlier micro-batches, and begin exchanges that are complete."""
        again = [name for name in names if name in self._begun]
        if again:
            old = [self._sums[name] for name in again]
            new = [self._shared.fresh[name] for name in again]
            program = self._shared.addition(tuple(self._specs[name] for name in again))
            self._builder.call(program, [*old, *new], old, InstructionLabel("accumulate"), takes=range(2 * len(old)))
        self._begun.update(names)
        for name in names:
            if self._last[name] == position and name in self._bucket_of:
                missing, exchange = self._missing[self._bucket_of[name]]
                missing.discard(name)
                exchange.ready = not missing
        self._exchanges.flush()

    # ---- the end of a step

    def norm(self) -> None:
        """Return the squared 2-norm of the gradients computed on this worker, and free them.

        Gradients on all ranks of a replica are counted by the first rank.
        """
        shared, holdings = self._shared, self._shared.holdings
        made = [name for name in self._held if name in self._begun]
        split = [name for name in made if isinstance(holdings.placements.get(name), Shard)]
        own = split if holdings.ranks.get(self._worker) else made
        program = square_norm([self._specs[name] for name in own])
        self._builder.call(program, [self._sums[name] for name in own], [shared.norm], InstructionLabel("norm"))
        self._builder.add(Ask("scalars", (shared.norm,)), InstructionLabel("norm"))
        left = (shared.norm, *(self._sums[name] for name in made))
        self._builder.add(Free(left), InstructionLabel("free"))

    @property
    def handed_on(self) -> dict[int, int]:
        """Number in the next window of each sum of the step's own window."""
        made = [name for name in self._held if name in self._begun]
        return {self._sums[name]: self._shared.late[name] for name in made}


def _gradients_of(part: PhaseProgram) -> list[str]:
    """Return the parameters whose gradients a part computes."""
    return [str(port.name) for port in part.outputs if port.kind == "gradient"]
