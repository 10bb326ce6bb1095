"""Worker program builder: a worker's actions in a routine, with receives, sends, renaming and freeing. Pure.

An action's remote inputs are received one action ahead, and a few if they come from another host, as a message leaves
only when its receiver is known to wait for it. Values for other workers are sent as soon as they are complete, and
values are freed after their last use. In a window, micro-batches of the previous step have negative numbers; values
of a step that the next window reads are kept under those numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Protocol

from onebox.engine.compile.batch_job import BatchJob, BufferNumbers
from onebox.engine.compile.mixed_precision import EARLIER_STEP, EarlierStepCasts, ParameterCasts
from onebox.engine.compile.offload import with_offloading
from onebox.engine.compile.phase_emission import PhaseCall, emit
from onebox.engine.compile.routine import LATE, InstructionLabel, RoutineBuilder
from onebox.engine.compile.update.gradients import WorkerGradients
from onebox.engine.compile.value_numbers import ValueNumbers
from onebox.engine.partition.phase_programs import PhaseProgram
from onebox.engine.partition.sharding_spec import all_workers_group
from onebox.engine.workload.emulated_costs import EmulatedCosts
from onebox.graph import Port, decode_bucket, encode_values
from onebox.plan import Action, Plan
from onebox.plan_names import ActivationCodec
from onebox.wire import Program, TensorSpec
from onebox.wire.gradient_codecs import encoded_spec, is_coded, padded_elements
from onebox.wire.protocol.instructions import Ask, Free, Receive, Rename, Send

_FAR_AHEAD, _FAR_BYTES = 16, 32 << 20
"""Number of actions ahead for which values from other hosts are received, and the limit of their bytes together."""


class ActionHook(Protocol):
    """Adds instructions between actions."""

    def before(self, action: Action) -> None:
        """Add the instructions before an action."""

    def after(self, action: Action) -> None:
        """Add the instructions after an action."""


class CodedValues:
    """The values between stages that travel in a lossy codec, and their programs, which all workers share.

    Args:
        codecs: Codec of what each stage sends.
    """

    def __init__(self, codecs: Sequence[ActivationCodec]) -> None:
        self._codecs = codecs
        self._programs: dict[tuple[bool, ActivationCodec, TensorSpec], Program] = {}

    def spec(self, stage: int, spec: TensorSpec) -> TensorSpec | None:
        """Return the encoded form of a value of a stage; ``None`` if it is sent as it is."""
        codec = self._codecs[stage]
        return encoded_spec(codec, padded_elements(prod(spec.shape), 1)) if is_coded(codec, spec) else None

    def encode(self, stage: int, spec: TensorSpec) -> Program:
        """Return the program that encodes a value of a stage."""
        key = True, self._codecs[stage], spec
        if key not in self._programs:
            self._programs[key] = encode_values(self._codecs[stage], spec)
        return self._programs[key]

    def decode(self, stage: int, spec: TensorSpec) -> Program:
        """Return the program that decodes a value of a stage."""
        key = False, self._codecs[stage], spec
        if key not in self._programs:
            self._programs[key] = decode_bucket(self._codecs[stage], (spec,), 1)
        return self._programs[key]


class WorkerProgramBuilder:
    """The routine of one worker under construction, from its row of the schedule.

    Args:
        worker: The worker.
        job: The job; its schedule covers whole windows where steps overlap.
        values: The values of the job.
        plan: The plan.
        numbers: Shared numbers.
        costs: Costs of actions on emulated devices.
        ranks: For each worker, its rank in its replica.
        builder: The routine.
        actions: The worker's row, or the part of a window in the routine.
        coded: The values that travel in a lossy codec; ``None`` to send all as they are.
        far: Workers of other hosts, whose values are received several actions ahead.
    """

    def __init__(
        self,
        worker: int,
        job: BatchJob,
        values: ValueNumbers,
        plan: Plan,
        numbers: BufferNumbers,
        *,
        costs: EmulatedCosts,
        ranks: Mapping[int, int],
        builder: RoutineBuilder,
        actions: Sequence[Action],
        coded: CodedValues | None = None,
        far: Collection[int] = (),
    ) -> None:
        self.builder = builder
        self.actions = actions
        self.leaves: list[tuple[int, int]] = []
        self.results: list[tuple[int, int]] = []
        self._worker = worker
        self._job = job
        self._values = values
        self._plan = plan
        self._members = all_workers_group(plan.devices, numbers.groups)
        self._numbers = numbers
        self._costs = costs
        self._ranks = ranks
        self._count = len(job.micro_batches)
        self._bounds: list[int] = []
        self._moved: Mapping[str, int] = {}
        self._weight_of: Callable[[str, Action], int] = lambda name, action: numbers.state[name]
        self._results: list[int] = []
        self._untold: list[int] = []
        self._handed = self._handed_on()
        self._asked = {(port, micro_batch - self._count) for port, micro_batch in self._handed}
        self._last = self._last_reads()
        self._coded = coded
        self._far = far
        self._arriving: dict[tuple[Port, int], tuple[int, TensorSpec]] = {}  # encoded values that are being received

    def _handed_on(self) -> tuple[tuple[Port, int], ...]:
        """Return the values and leaves of a step that exist at the end of its window and are read in the next one."""
        whole = self._job.schedule.rows.get(self._worker, ())
        wanted: dict[tuple[Port, int], None] = {}
        there: set[tuple[Port, int]] = set()
        for action in whole:
            part = self._part(action)
            if action.micro_batch >= 0:
                there.update((port, action.micro_batch) for port in (*part.inputs, *part.outputs))
                continue
            keys = [(port, action.micro_batch + self._count) for port in part.inputs if port.kind in ("value", "leaf")]
            wanted.update(dict.fromkeys(keys))
        return tuple(key for key in wanted if key[0].kind == "leaf" or key in there)

    def _last_reads(self) -> dict[tuple[Port, int], int]:
        """Return the last action of this row that reads each value and leaf; none if a later row reads it."""
        found: dict[tuple[Port, int], int] = {}
        for position, action in enumerate(self.actions):
            for port in self._part(action).inputs:
                if port.kind in ("value", "leaf"):
                    found[port, action.micro_batch] = position
        return found | dict.fromkeys(self._handed, -1)

    def _part(self, action: Action) -> PhaseProgram:
        return self._job.part(self._worker, action)

    def round(self) -> ParameterCasts:
        """Add the rounding of parameters that the actions read in bfloat16."""
        parts = [self._part(action) for action in self.actions]
        return ParameterCasts(
            self.builder, parts, self._numbers.state.__getitem__, lambda port: self._values.number(port, 0)
        )

    def round_for_step(self, weight_of: Callable[[str, Action], int]) -> ParameterCasts:
        """Add the rounding of bfloat16 parameters for the window's own step, including its rest in the next window.

        Args:
            weight_of: Returns the buffer that an action reads a parameter from.
        """
        whole = self._job.schedule.rows.get(self._worker, ())
        parts, own = [self._part(action) for action in whole], Action("F", 0, 0)
        return ParameterCasts(
            self.builder, parts, lambda name: weight_of(name, own), lambda port: self._values.number(port, 0)
        )

    def rounded_before(self) -> EarlierStepCasts:
        """Return the rounded parameters of the previous step that this window reads."""
        whole = self._job.schedule.rows.get(self._worker, ())
        late = [self._part(action) for action in whole if action.micro_batch < 0]
        return EarlierStepCasts(self.builder, self.actions, late, self._values.number)

    def run(
        self,
        gradients: Callable[[Action], WorkerGradients] | None = None,
        watchers: Sequence[ActionHook] = (),
        *,
        moved: Mapping[str, int] | None = None,
        weight_of: Callable[[str, Action], int] | None = None,
    ) -> None:
        """Add all actions.

        Args:
            gradients: Returns the builder of a backward action; forward actions are called directly.
            watchers: Notified before and after each action.
            moved: Replacement buffers, by name.
            weight_of: Returns the buffer that an action reads a parameter from; ``None`` for the parameter itself.
        """
        self._moved = moved or {}
        self._weight_of = weight_of or self._weight_of
        if self.actions:
            self._receive(self.actions[0])
        for position, action in enumerate(self.actions):
            self._bounds.append(len(self.builder.steps))
            self._receive_ahead(position)
            for watcher in watchers:
                watcher.before(action)
            with self.builder.of_step(_age(action)):
                self._execute(position, action, gradients)
            for watcher in watchers:
                watcher.after(action)
        self._bounds.append(len(self.builder.steps))

    def offload(self, gradients: Collection[int]) -> None:
        """Add the offloading of values between forward and backward.

        Args:
            gradients: Gradient buffers that may be offloaded, too.
        """
        policies = [stage.policy for stage in self._plan.stages]
        builder = self.builder
        builder.steps, builder.labels = with_offloading(
            builder.steps, builder.labels, builder.programs, self._bounds, self.actions, policies, gradients
        )

    def hand_on(self, more: Mapping[int, int]) -> None:
        """Renumber the buffers that the next window reads.

        Args:
            more: Further buffers with their new numbers.
        """
        pairs = {self._kept(*key): self._values.number(key[0], key[1] - self._count) for key in self._handed}
        pairs |= more
        if pairs:
            self.builder.add(Rename(tuple(pairs), tuple(pairs.values())), InstructionLabel("hand on"))

    def _kept(self, port: Port, micro_batch: int) -> int:
        if port.kind == "leaf":
            return self._binding(micro_batch, int(port.name))
        return self._values.number(port, micro_batch)

    def answer(self) -> None:
        """Add the reply with the results, and free the rest."""
        if self._results:
            self.builder.add(Ask("scalars", tuple(self._results)), InstructionLabel("loss"))
        bindings = (-1 - index for index in range(len(self.leaves)))
        left = (*self._results, *self._untold, *bindings)
        if left:
            self.builder.add(Free(left), InstructionLabel("free"))

    # ---- one action

    def _execute(self, position: int, action: Action, gradients: Callable[[Action], WorkerGradients] | None) -> None:
        part = self._part(action)
        stage, micro_batch = action.stage, action.micro_batch
        self._decode(part, micro_batch)
        replica = self._job.routes[stage][micro_batch]
        call = PhaseCall(
            part=part,
            inputs=[self._number(port, action) for port in part.inputs],
            takes=[
                index
                for index, port in enumerate(part.inputs)
                if port.kind in ("value", "leaf") and self._last[port, micro_batch] == position
            ],
            label=InstructionLabel(self._name(action), "compute", action),
            group=self._numbers.groups[replica] if len(replica) > 1 else 0,
            micro_batch=micro_batch % self._count,
            cost_s=self._cost_s(action),
        )
        sent: set[Port] = set()

        def send(ports: Sequence[Port]) -> None:
            self._send([port for port in ports if port not in sent], part, stage, micro_batch)
            sent.update(ports)

        def hand_on() -> None:
            send(part.outputs)
            self._free(part, micro_batch)

        if action.kind == "F" or gradients is None:
            outputs = [self._number(port, action) for port in part.outputs]
            numbers = dict(zip(part.outputs, outputs, strict=True))
            emit(self.builder, call, part.steps, numbers.__getitem__, made=send)
            hand_on()
        else:
            values = {p: self._values.number(p, micro_batch) for p in part.outputs if p.kind in ("value", "chunk")}
            gradients(action).run(call, values, position, made=send, hand_on=hand_on)

    def _number(self, port: Port, action: Action) -> int:
        name, micro_batch = str(port.name), action.micro_batch
        match port.kind:
            case "parameter":
                return self._weight_of(name, action)
            case "buffer":
                return self._moved.get(name) or self.builder.newest(self._numbers.state[name])
            case "update":
                return self._moved.get(name) or self.builder.renew(self._numbers.state[name])
            case "constant":
                return self._job.constants[self._job.micro_batches[micro_batch].size][name]
            case "leaf" if micro_batch >= 0:
                return self._binding(micro_batch, int(port.name))
            case "weight":
                return self._weight(port, micro_batch)
            case "result":
                return self._result(port, micro_batch)
            case "rounded":
                return self._values.number(port, EARLIER_STEP if micro_batch < 0 else 0)
            case _:
                return self._values.number(port, micro_batch)

    def _binding(self, micro_batch: int, leaf: int) -> int:
        if (micro_batch, leaf) not in self.leaves:
            self.leaves.append((micro_batch, leaf))
        return -1 - self.leaves.index((micro_batch, leaf))

    def _weight(self, port: Port, micro_batch: int) -> int:
        """Return the buffer with the loss weight of a micro-batch."""
        number = self._values.number(port, micro_batch)
        self.builder.constants[number] = (self._job.weight(micro_batch), self._job.loss(micro_batch))
        return number

    def _result(self, port: Port, micro_batch: int) -> int:
        number = self._values.number(port, micro_batch)
        if self._ranks.get(self._worker):
            self._untold.append(number)  # another rank returns the same
            return number
        self._results.append(number)
        self.results.append((micro_batch, int(port.name)))
        return number

    def _name(self, action: Action) -> str:
        what = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}[action.kind]
        where = f"stage {action.stage} " if len(self._plan.stages) > 1 else ""
        late = LATE if action.micro_batch < 0 else ""
        return f"{where}{what} {action.micro_batch % self._count}{late}"

    def _cost_s(self, action: Action) -> float:
        """Return the seconds, at full speed, that an emulated device sleeps."""
        full = self._plan.micro_batch or max(part.size for part in self._job.micro_batches)
        size = self._job.micro_batches[action.micro_batch].size
        late = action.kind == "W" and not self._part(action._replace(kind="I")).steps
        return self._costs.seconds(self._worker, action, size, full, late=late)

    # ---- values from and to other workers

    def _receive_ahead(self, position: int) -> None:
        """Begin to receive what the actions behind a position read: the next one, and more from other hosts."""
        for action in self.actions[position + 1 : position + 2]:
            self._receive(action)
        left_bytes = _FAR_BYTES
        for action in self.actions[position + 2 : position + 1 + _FAR_AHEAD] if self._far else ():
            left_bytes -= sum(spec.size_bytes for _, spec, source in self._remote(action) if source in self._far)
            if left_bytes < 0:
                break
            self._receive(action, self._far)

    def _remote(self, action: Action) -> list[tuple[Port, TensorSpec, int]]:
        """Return the inputs that other workers make for an action, and these."""
        part = self._part(action)
        values = [(port, spec) for port, spec in zip(part.inputs, part.given, strict=True) if port.kind == "value"]
        found = ((port, spec, self._values.maker(port, action.micro_batch, self._worker)) for port, spec in values)
        return [each for each in found if each[2] != self._worker]

    def _receive(self, action: Action, sources: Collection[int] | None = None) -> None:
        """Begin to receive an action's remote inputs, from some workers or all, that have not been requested yet."""
        for port, spec, source in self._remote(action):
            key = (port, action.micro_batch)
            if key in self._asked or (sources is not None and source not in sources):
                continue
            self._asked.add(key)
            channel = self._values.channel(port, action.micro_batch, self._worker)
            number = self._values.number(port, action.micro_batch)
            rows = self._job.rows(port, action.micro_batch)
            encoded: TensorSpec | None = None
            if self._coded is not None and not rows:
                encoded = self._coded.spec(self._values.stage_of(port, action.micro_batch), spec)
                if encoded is not None:
                    number = self.builder.new()
                    self._arriving[key] = number, spec
            receive = Receive(number, encoded or spec, self._everybody, self._members.index(source), channel, rows)
            name = f"receive for {action} from device {source}"
            with self.builder.of_step(_age(action)):
                self.builder.add(receive, InstructionLabel(name, "transfer"))

    def _decode(self, part: PhaseProgram, micro_batch: int) -> None:
        """Decode the inputs of a part that have been received in a lossy codec."""
        for port in part.inputs:
            found = self._arriving.pop((port, micro_batch), None)
            if found is not None:
                assert self._coded is not None
                number, spec = found
                program = self._coded.decode(self._values.stage_of(port, micro_batch), spec)
                made = [self._values.number(port, micro_batch)]
                self.builder.call(program, [number], made, InstructionLabel("decode"), takes=(0,))

    def _targets(self, port: Port, micro_batch: int) -> list[int]:
        """Return the other workers that receive a value from this one."""
        readers = sorted(self._values.readers(port, micro_batch) - {self._worker})
        return [reader for reader in readers if self._values.maker(port, micro_batch, reader) == self._worker]

    def _send(self, ports: Sequence[Port], part: PhaseProgram, stage: int, micro_batch: int) -> None:
        """Send values that other workers need, or chunks of them."""
        specs = dict(zip(part.outputs, part.made, strict=True))
        for port in ports:
            if port.kind not in ("value", "chunk") or port in part.in_chunks:
                continue
            number, chunk = self._values.number(port, micro_batch), part.chunks.get(port)
            value = port if chunk is None else chunk.port
            more = () if chunk is None else (chunk.whole, chunk.first)
            targets, size_bytes = self._targets(value, micro_batch), specs[port].size_bytes
            encoded = self._coded.spec(stage, specs[port]) if self._coded and chunk is None and targets else None
            if encoded is not None:
                assert self._coded is not None
                exact, number, size_bytes = number, self.builder.new(), encoded.size_bytes
                program = self._coded.encode(stage, specs[port])
                self.builder.call(program, [exact], [number], InstructionLabel("encode"))
            for target in targets:
                channel = self._values.channel(value, micro_batch, target)
                send = Send(number, self._everybody, self._members.index(target), channel, *more)
                name = f"send of stage {stage} to device {target}"
                label = InstructionLabel(name, "transfer", target=target, size_bytes=size_bytes)
                self.builder.add(send, label)
            if encoded is not None:
                self.builder.add(Free((number,)), InstructionLabel("free"))

    def _free(self, part: PhaseProgram, micro_batch: int) -> None:
        """Free the values of an action that this worker does not need."""
        made = (port for port in part.outputs if port.kind == "value" and (port, micro_batch) not in self._last)
        if unread := tuple(self._values.number(port, micro_batch) for port in made):
            self.builder.add(Free(unread), InstructionLabel("free"))

    @property
    def _everybody(self) -> int:
        return self._numbers.groups[self._members]


def _age(action: Action) -> int:
    """Return how many windows before this one the step of an action began."""
    return int(action.micro_batch < 0)
