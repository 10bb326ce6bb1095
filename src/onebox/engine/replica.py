"""Lowering: the training step of one replica becomes one routine of a worker. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onebox.engine.buckets import bucket_ends, buffer_specs, gradient_specs
from onebox.errors import CaptureError
from onebox.graph import (
    ModelPrograms,
    Port,
    add_all,
    combine_all,
    extract,
    scale_all,
    split,
    zeros,
)
from onebox.plan import MicroBatch
from onebox.wire import Program, TensorSpec, specs_by_slot
from onebox.wire.messages import (
    Ask,
    Call,
    Define,
    Free,
    OptimizerStep,
    Reduce,
    Routine,
    Step,
    StoredProgram,
)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Buffer numbers that all routines of a trainer share.

    Args:
        state: Of parameters and buffers, by name.
        optimizer: The optimizer's definition.
        group: The group of the replicas; 0 when there is one replica.
        new: Makes a number that nothing else has.
    """

    state: Mapping[str, int]
    optimizer: int
    group: int
    new: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one replica does of a step.

    Args:
        micro_batches: Its own.
        after: How many of the whole batch come after its last.
        total: Micro-batches of the whole batch.
        batch: Samples of the whole batch.
    """

    micro_batches: Sequence[MicroBatch]
    after: int
    total: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class StepRoutine:
    """A routine and what it needs.

    Args:
        number: The routine's number.
        definitions: To be sent once, in order.
        weights: Buffers that hold the weight of a micro-batch's loss, by number.
        losses: The weight of each loss that the routine answers, in order.
        labels: What each instruction is, for a timeline.
    """

    number: int
    definitions: tuple[Define, ...]
    weights: Mapping[int, tuple[float, TensorSpec]]
    losses: tuple[float, ...]
    labels: tuple[str, ...]


@dataclass
class _Builder:
    """A routine under construction."""

    numbers: Numbers
    steps: list[Step] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    definitions: list[Define] = field(default_factory=list)
    programs: dict[int, int] = field(default_factory=dict)

    def add(self, step: Step, label: str) -> None:
        self.steps.append(step)
        self.labels.append(label)

    def define(self, program: Program) -> int:
        """Return the number of a program, defined once."""
        known = self.programs.get(id(program))
        if known is None:
            known = self.programs[id(program)] = self.numbers.new()
            self.definitions.append(Define(known, StoredProgram(program)))
        return known

    def call(
        self,
        program: Program,
        inputs: Sequence[int],
        outputs: Sequence[int],
        label: str,
        *,
        takes: Sequence[int] = (),
        micro_batch: int = 0,
    ) -> None:
        number = self.define(program)
        self.add(Call(number, tuple(inputs), tuple(outputs), tuple(takes), micro_batch), label)


class ReplicaLowering:
    """Lowers the steps of one replica.

    Args:
        numbers: Shared numbers.
        trained: Names of the trained parameters, in the optimizer's order.
        buckets: Gradients in the order and grouping in which they are reduced, equal on all replicas.
        max_norm: For clipping; 0 for none.
        replicated: Whether there are other replicas.
    """

    def __init__(
        self,
        numbers: Numbers,
        *,
        trained: Sequence[str],
        buckets: Sequence[Sequence[str]],
        max_norm: float,
        replicated: bool,
    ) -> None:
        self._numbers = numbers
        self._trained = trained
        self._buckets = buckets
        self._max_norm = max_norm
        self._replicated = replicated
        self._gradients = {name: numbers.new() for bucket in buckets for name in bucket}
        self._fresh = {name: numbers.new() for name in self._gradients}
        self._moved: dict[str, int] = {}

    def lower(
        self,
        share: Share,
        models: Mapping[int, ModelPrograms],
        constants: Mapping[int, Mapping[str, int]],
        any_model: ModelPrograms,
        leaves: int,
    ) -> StepRoutine:
        """Lower one replica's part of a step.

        Args:
            share: Its micro-batches.
            models: Programs for each size of a micro-batch.
            constants: For each size, the buffers of the model's constants.
            any_model: Programs of any size, for a replica without a micro-batch.
            leaves: Tensors of inputs and targets.

        Raises:
            CaptureError: A buffer changes in a way that replicas cannot share.
        """
        self._check(any_model)
        builder = _Builder(self._numbers)
        weights: dict[int, tuple[float, TensorSpec]] = {}
        losses: list[int] = []
        if self._replicated:
            self._begin_updates(builder, any_model)
        for position, part in enumerate(share.micro_batches):
            model = models[part.size]
            assert model.backward is not None
            ports = {
                **{Port("constant", name): number for name, number in constants[part.size].items()},
                **{Port("leaf", index): -1 - position * leaves - index for index in range(leaves)},
            }
            weight, loss = self._numbers.new(), self._numbers.new()
            weights[weight] = (part.size / share.batch, _loss_spec(model))
            ports[Port("weight", 0)] = weight
            ports[Port("result", 0)] = loss
            losses.append(loss)
            self._forward(builder, model, ports, part.index)
            last = position == len(share.micro_batches) - 1
            if last and self._moved and share.after:
                self._decay(builder, model, share.after)
            self._backward(builder, model, ports, part.index, first=position == 0, last=last)
        if not share.micro_batches:
            self._idle(builder, any_model)
        if self._replicated:
            self._end_updates(builder, any_model, share)
        gradients = tuple(self._gradients[name] for name in self._trained)
        builder.add(OptimizerStep(self._numbers.optimizer, gradients, self._max_norm), "optimizer")
        bindings = leaves * len(share.micro_batches)
        builder.add(Free((*gradients, *(-1 - index for index in range(bindings)))), "free")
        builder.add(Ask("scalars", tuple(losses)), "loss")
        number = self._numbers.new()
        builder.definitions.append(Define(number, Routine(tuple(builder.steps), bindings)))
        return StepRoutine(
            number=number,
            definitions=tuple(builder.definitions),
            weights=weights,
            losses=tuple(part.size / share.batch for part in share.micro_batches),
            labels=tuple(builder.labels),
        )

    # ---- forward and backward

    def _number(self, port: Port, ports: Mapping[Port, int]) -> int:
        if port.kind == "buffer" and str(port.name) in self._moved:
            return self._moved[str(port.name)]
        if port.kind in ("parameter", "buffer"):
            return self._numbers.state[str(port.name)]
        return ports[port]

    def _forward(self, builder: _Builder, model: ModelPrograms, ports: dict[Port, int], micro_batch: int) -> None:
        forward, backward = model.forward, model.backward
        assert backward is not None
        later = set(backward.inputs)
        outputs = []
        for port in forward.outputs:
            if port.kind == "saved":
                ports[port] = self._numbers.new()
            if port.kind == "result" and port not in ports:
                ports[port] = self._numbers.new()
            if port.kind == "update":
                outputs.append(self._number(Port("buffer", port.name), ports))
            else:
                outputs.append(ports[port])
        takes = [i for i, port in enumerate(forward.inputs) if port.kind == "leaf" and port not in later]
        inputs = [self._number(port, ports) for port in forward.inputs]
        builder.call(forward.program, inputs, outputs, f"forward {micro_batch}", takes=takes, micro_batch=micro_batch)

    def _backward(
        self,
        builder: _Builder,
        model: ModelPrograms,
        ports: Mapping[Port, int],
        micro_batch: int,
        *,
        first: bool,
        last: bool,
    ) -> None:
        """Run backward; after the last micro-batch in pieces, each followed by the reduction of its bucket."""
        backward = model.backward
        assert backward is not None
        into = self._gradients if first else self._fresh
        named = dict(zip(backward.program.outputs, backward.outputs, strict=True))
        place = {slot: self._number(port, ports) for slot, port in enumerate(backward.inputs)}
        mortal = {place[slot] for slot, port in enumerate(backward.inputs) if port.kind in ("saved", "leaf")}
        overlap = self._replicated and last
        ends = bucket_ends(backward, self._buckets) if overlap else []
        pieces = split(backward.program, ends)
        pending = list(self._buckets)
        for index, piece in enumerate(pieces):
            for slot in piece.outputs:
                if slot in named:
                    place[slot] = into[str(named[slot].name)]
                else:
                    place[slot] = self._numbers.new()
                    mortal.add(place[slot])
            still = {slot for later in pieces[index + 1 :] for slot in later.inputs}
            takes = [i for i, slot in enumerate(piece.inputs) if place[slot] in mortal and slot not in still]
            builder.call(
                piece.program,
                [place[slot] for slot in piece.inputs],
                [place[slot] for slot in piece.outputs],
                f"backward {micro_batch}" + (f" part {index}" if len(pieces) > 1 else ""),
                takes=takes,
                micro_batch=micro_batch,
            )
            if overlap and len(pieces) == len(self._buckets):
                self._finish(builder, model, [pending.pop(0)], first=first, reduce=True)
        self._finish(builder, model, pending, first=first, reduce=overlap)

    def _finish(
        self,
        builder: _Builder,
        model: ModelPrograms,
        buckets: Sequence[Sequence[str]],
        *,
        first: bool,
        reduce: bool,
    ) -> None:
        """Add gradients to those of earlier micro-batches, and start to reduce them."""
        for bucket in buckets:
            old = [self._gradients[name] for name in bucket]
            if not first:
                specs = gradient_specs(model, bucket)
                new = [self._fresh[name] for name in bucket]
                builder.call(add_all(specs), [*old, *new], old, "accumulate", takes=range(2 * len(old)))
            if reduce:
                self._reduce(builder, model, bucket)

    def _reduce(self, builder: _Builder, model: ModelPrograms, bucket: Sequence[str]) -> None:
        """Start to reduce a bucket; with the last go the contributions to buffers, of the same type in one message."""
        numbers = [self._gradients[name] for name in bucket]
        kind = gradient_specs(model, bucket[:1])[0].dtype
        others: dict[str, list[int]] = {}
        if bucket is self._buckets[-1]:
            for (_, number), spec in zip(self._moved.items(), buffer_specs(model, list(self._moved)), strict=True):
                (numbers if spec.dtype == kind else others.setdefault(spec.dtype, [])).append(number)
        for part in (numbers, *others.values()):
            builder.add(Reduce(tuple(part), self._numbers.group), "reduce")

    # ---- buffers that change

    def _check(self, model: ModelPrograms) -> None:
        general = sorted(name for name, update in model.updates.items() if update.kind == "general")
        if self._replicated and general:
            raise CaptureError(
                f"buffer {general[0]} changes in a way that depends on the order of samples, which replicas cannot "
                "share exactly; train this model on one device, or keep the buffer's update affine in the buffer"
            )

    def _begin_updates(self, builder: _Builder, model: ModelPrograms) -> None:
        """Let updates that depend on data start from zero, so that replicas can add theirs up."""
        names = [name for name, update in model.updates.items() if update.kind == "affine"]
        self._moved = {name: self._moved.get(name) or self._numbers.new() for name in names}
        if names:
            builder.call(zeros(buffer_specs(model, names)), [], list(self._moved.values()), "zero")

    def _decay(self, builder: _Builder, model: ModelPrograms, after: int) -> None:
        """Decay this replica's contributions by the micro-batches that come after its last."""
        names, numbers = list(self._moved), list(self._moved.values())
        factors = [model.updates[name].decay ** after for name in names]
        program = scale_all(buffer_specs(model, names), factors)
        builder.call(program, numbers, numbers, "statistics", takes=range(len(numbers)))

    def _idle(self, builder: _Builder, model: ModelPrograms) -> None:
        """Contribute zeros."""
        for bucket in self._buckets:
            numbers = [self._gradients[name] for name in bucket]
            builder.call(zeros(gradient_specs(model, bucket)), [], numbers, "zero")
            self._reduce(builder, model, bucket)

    def _end_updates(self, builder: _Builder, model: ModelPrograms, share: Share) -> None:
        """Put together what the replicas contributed, and repeat what depends on no data for the others' part."""
        names = list(self._moved)
        if names:
            specs = buffer_specs(model, names)
            factors = [model.updates[name].decay ** share.total for name in names]
            state = [self._numbers.state[name] for name in names]
            moved = [self._moved[name] for name in names]
            builder.call(
                combine_all(specs, factors),
                [*state, *moved],
                state,
                "statistics",
                takes=range(2 * len(names)),
            )
        constant = [name for name, update in model.updates.items() if update.kind == "constant"]
        repeats = share.total - len(share.micro_batches)
        if constant and repeats:
            ports = [Port("update", name) for name in constant]
            where = dict(zip(model.forward.outputs, model.forward.program.outputs, strict=True))
            part, inputs = _without_unread(
                extract(model.forward.program, [where[port] for port in ports]), model.forward.inputs
            )
            numbers = [self._numbers.state[str(port.name)] for port in inputs]
            for _ in range(repeats):
                builder.call(part, numbers, [self._numbers.state[name] for name in constant], "count")


def _without_unread(program: Program, ports: Sequence[Port]) -> tuple[Program, list[Port]]:
    """Drop the inputs that a program does not read."""
    (piece,) = split(program, [])
    return piece.program, [ports[slot] for slot in piece.inputs]


def _loss_spec(model: ModelPrograms) -> TensorSpec:
    specs = specs_by_slot(model.forward.program)
    where = dict(zip(model.forward.outputs, model.forward.program.outputs, strict=True))
    return specs[where[Port("result", 0)]]
