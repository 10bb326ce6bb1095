"""Lowering: a step of a plan becomes one routine for each worker. Pure.

A worker executes its row of the schedule. Values that it needs from others are received one action ahead, values that
others need are sent as soon as they are there; what nobody needs any more is freed. What a step does beside the actions
is in files of its own: ``gradients.py`` (accumulate, sum over holders, clip, step) and ``statistics.py`` (buffers that
replicas share).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from onebox.engine.emission import emit
from onebox.engine.exchanges import Exchanges
from onebox.engine.gradients import Gradients, WorkerGradients
from onebox.engine.holdings import Holdings
from onebox.engine.job import Job, Numbers
from onebox.engine.offloading import offloaded
from onebox.engine.parts import Part
from onebox.engine.rounding import Rounding
from onebox.engine.routine import Label, RoutineBuilder, StepRoutine
from onebox.engine.statistics import Statistics, WorkerStatistics
from onebox.graph import ModelPrograms, Port
from onebox.plan import Action, Plan
from onebox.wire import TensorSpec
from onebox.wire.messages import Ask, Free, Receive, Send


class Lowering:
    """Lowers the steps of a plan.

    Args:
        plan: The plan.
        holdings: Who holds what.
        numbers: Shared numbers.
        trained: Names of the trained parameters, in the optimizer's order.
        model: The programs for any size of a micro-batch.
        max_norm: For clipping; 0 for none.
        speeds: The speed of each worker, as a part of its full one.

    Raises:
        CaptureError: A buffer changes in a way that replicas cannot share.
    """

    def __init__(
        self,
        plan: Plan,
        holdings: Holdings,
        numbers: Numbers,
        *,
        trained: Sequence[str],
        model: ModelPrograms,
        max_norm: float,
        speeds: Mapping[int, float],
    ) -> None:
        self._plan = plan
        self._speeds = speeds
        self._holdings = holdings
        self._numbers = numbers
        self._gradients = Gradients(holdings, numbers, trained=trained, model=model, max_norm=max_norm)
        self._statistics = Statistics(holdings, numbers, model)

    @property
    def gradients(self) -> dict[int, str]:
        """The parameter of each buffer that a gradient comes to be in: those of one micro-batch, and their sums."""
        fresh = {number: f"{name}, of one micro-batch" for name, number in self._gradients.fresh.items()}
        return fresh | {number: name for name, number in self._gradients.sums.items()}

    def train(self, job: Job) -> dict[int, StepRoutine]:
        """Return the routine of each worker for a training step."""
        tables = _Tables(job, self._numbers.new, self._holdings.ranks)
        found = {}
        for worker in self._plan.devices:
            row = _Row(worker, job, tables, self._plan, self._numbers, self._speeds[worker], self._holdings.ranks)
            exchanges = Exchanges(row.builder, worker, self._numbers.groups)
            statistics = self._statistics.begin(row.builder, worker, row.actions, job, exchanges)
            gradients = self._gradients.begin(row.builder, worker, row.actions, job, exchanges)
            rounding = row.round()
            row.run(gradients, statistics)
            row.offload(gradients.own if self._plan.update == "host" else ())
            rounding.finish()
            exchanges.finish()
            statistics.finish()
            gradients.finish()
            row.answer()
            found[worker] = row.builder.finish(row.leaves, row.results)
        return found

    def evaluate(self, job: Job) -> dict[int, StepRoutine]:
        """Return the routine of each worker for an evaluation; its schedule has nothing but forward."""
        tables = _Tables(job, self._numbers.new, self._holdings.ranks)
        found = {}
        for worker in self._plan.devices:
            row = _Row(worker, job, tables, self._plan, self._numbers, self._speeds[worker], self._holdings.ranks)
            rounding = row.round()
            row.run(None, None)
            rounding.finish()
            row.answer()
            found[worker] = row.builder.finish(row.leaves, row.results)
        return found


class _Tables:
    """What all workers' routines for one job agree on: numbers and channels of values, who makes and who reads them."""

    def __init__(self, job: Job, new: Callable[[], int], ranks: Mapping[int, int]) -> None:
        self._job = job
        self._ranks = ranks
        self._new = new
        self._values: dict[tuple[Port, int], int] = {}
        self._channels: dict[tuple[Port, int, int], int] = {}
        self._makers: dict[int, dict[Port, int]] = {}
        for size, parts in job.models.items():
            phases = parts.programs.phases.items()
            outputs = ((port, phase.stage) for phase, part in phases for port in part.outputs)
            self._makers[size] = {port: stage for port, stage in outputs if port.kind == "value"}
        self._readers: dict[tuple[Port, int], set[int]] = {}
        for worker, row in job.schedule.rows.items():
            for action in row:
                for port in job.part(worker, action).inputs:
                    if port.kind == "value":
                        self._readers.setdefault((port, action.micro_batch), set()).add(worker)

    def value(self, port: Port, micro_batch: int) -> int:
        """Return the buffer of a value of a micro-batch, or of its weight or its result."""
        key = (port, micro_batch)
        if key not in self._values:
            self._values[key] = self._new()
        return self._values[key]

    def channel(self, port: Port, micro_batch: int, target: int) -> int:
        """Return the channel on which a value travels to a worker."""
        return self._channels.setdefault((port, micro_batch, target), len(self._channels))

    def maker(self, port: Port, micro_batch: int, reader: int) -> int:
        """Return the worker that makes a value, or its share of it, for a reader."""
        stage = self._makers[self._job.micro_batches[micro_batch].size][port]
        replica = self._job.routes[stage][micro_batch]
        return reader if reader in replica else replica[self._ranks.get(reader, 0) % len(replica)]

    def readers(self, port: Port, micro_batch: int) -> set[int]:
        """Return the workers that read a value."""
        return self._readers.get((port, micro_batch), set())


class _Row:
    """The routine of one worker under construction: its row of the schedule."""

    def __init__(
        self,
        worker: int,
        job: Job,
        tables: _Tables,
        plan: Plan,
        numbers: Numbers,
        speed: float,
        ranks: Mapping[int, int],
    ) -> None:
        self._speed = speed
        self._ranks = ranks
        self.builder = RoutineBuilder(numbers.new)
        self._bounds: list[int] = []
        self.actions = job.schedule.rows.get(worker, ())
        self.leaves: list[tuple[int, int]] = []
        self.results: list[tuple[int, int]] = []
        self._worker = worker
        self._job = job
        self._tables = tables
        self._plan = plan
        self._numbers = numbers
        self._results: list[int] = []
        self._untold: list[int] = []
        self._asked: set[tuple[Port, int]] = set()
        self._last = self._last_reads()

    def _last_reads(self) -> dict[tuple[Port, int], int]:
        """Return for each value and leaf the last action of this row that reads it."""
        found: dict[tuple[Port, int], int] = {}
        for position, action in enumerate(self.actions):
            for port in self._part(action).inputs:
                if port.kind in ("value", "leaf"):
                    found[port, action.micro_batch] = position
        return found

    def _part(self, action: Action) -> Part:
        return self._job.part(self._worker, action)

    def round(self) -> Rounding:
        """Add the rounding of parameters that the actions read in bfloat16."""
        parts = map(self._part, self.actions)
        return Rounding(self.builder, parts, self._numbers.state, lambda port: self._tables.value(port, 0))

    def run(self, gradients: WorkerGradients | None, statistics: WorkerStatistics | None) -> None:
        """Add all actions.

        Args:
            gradients: Runs the backward actions; forward ones are called as they are.
            statistics: Told before and after each action.
        """
        if self.actions:
            self._receive(self.actions[0])
        for position, action in enumerate(self.actions):
            self._bounds.append(len(self.builder.steps))
            if position + 1 < len(self.actions):
                self._receive(self.actions[position + 1])
            if statistics is not None:
                statistics.before(action)
            self._execute(position, action, gradients, statistics)
            if statistics is not None:
                statistics.after(action)
        self._bounds.append(len(self.builder.steps))

    def offload(self, gradients: Collection[int]) -> None:
        """Let what is to be on the host between forward and backward be there.

        Args:
            gradients: The buffers of gradients that may be there, too.
        """
        fates = [stage.fate for stage in self._plan.stages]
        builder = self.builder
        given = builder.steps, builder.labels, builder.programs
        builder.steps, builder.labels = offloaded(*given, self._bounds, self.actions, fates, gradients)

    def answer(self) -> None:
        """Add the answer: the results, and the end of what is left."""
        if self._results:
            self.builder.add(Ask("scalars", tuple(self._results)), Label("loss"))
        bindings = (-1 - index for index in range(len(self.leaves)))
        left = (*self._results, *self._untold, *bindings)
        if left:
            self.builder.add(Free(left), Label("free"))

    # ---- one action

    def _execute(
        self, position: int, action: Action, gradients: WorkerGradients | None, statistics: WorkerStatistics | None
    ) -> None:
        part = self._part(action)
        stage, micro_batch = action.stage, action.micro_batch
        moved = statistics.moved if statistics is not None else {}
        inputs = [self._number(port, micro_batch, moved) for port in part.inputs]
        takes = [
            index
            for index, port in enumerate(part.inputs)
            if port.kind in ("value", "leaf") and self._last[port, micro_batch] == position
        ]
        label = Label(self._name(action), "compute", action)
        cost_s = self._cost_s(action)
        replica = self._job.routes[stage][micro_batch]
        group = self._numbers.groups[replica] if len(replica) > 1 else 0
        if action.kind == "F" or gradients is None:
            outputs = [self._number(port, micro_batch, moved, made=True) for port in part.outputs]
            numbers = dict(zip(part.outputs, outputs, strict=True))
            emit(
                self.builder,
                part,
                part.steps,
                inputs,
                numbers.__getitem__,
                label,
                takes=takes,
                group=group,
                micro_batch=micro_batch,
                cost_s=cost_s,
            )
            self._hand_on(part, stage, micro_batch)
        else:
            values = {p: self._tables.value(p, micro_batch) for p in part.outputs if p.kind == "value"}
            gradients.run(
                part,
                inputs,
                values,
                label,
                takes=takes,
                group=group,
                action=action,
                position=position,
                cost_s=cost_s,
                hand_on=lambda: self._hand_on(part, stage, micro_batch),
            )

    def _number(self, port: Port, micro_batch: int, moved: Mapping[str, int], *, made: bool = False) -> int:
        name = str(port.name)
        match port.kind:
            case "parameter":
                return self._numbers.state[name]
            case "buffer" | "update":
                return moved.get(name) or self._numbers.state[name]
            case "constant":
                return self._job.constants[self._job.micro_batches[micro_batch].size][name]
            case "leaf":
                return self._binding(micro_batch, int(port.name))
            case "weight":
                return self._weight(port, micro_batch)
            case "result":
                return self._result(port, micro_batch)
            case "rounded":
                return self._tables.value(port, 0)
            case _:
                return self._tables.value(port, micro_batch)

    def _binding(self, micro_batch: int, leaf: int) -> int:
        if (micro_batch, leaf) not in self.leaves:
            self.leaves.append((micro_batch, leaf))
        return -1 - self.leaves.index((micro_batch, leaf))

    def _weight(self, port: Port, micro_batch: int) -> int:
        """Return the buffer that holds the share of a micro-batch in its batch, which the loss is weighted with."""
        number = self._tables.value(port, micro_batch)
        share = self._job.micro_batches[micro_batch].size / self._job.batch
        self.builder.constants[number] = (share, self._loss_spec(micro_batch))
        return number

    def _loss_spec(self, micro_batch: int) -> TensorSpec:
        for part in self._job.programs(micro_batch).phases.values():
            if Port("result", 0) in part.outputs:
                return part.specs()[Port("result", 0)]
        raise AssertionError("a model without a loss")

    def _result(self, port: Port, micro_batch: int) -> int:
        number = self._tables.value(port, micro_batch)
        if self._ranks.get(self._worker):
            self._untold.append(number)  # another rank says the same
            return number
        self._results.append(number)
        self.results.append((micro_batch, int(port.name)))
        return number

    def _name(self, action: Action) -> str:
        what = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}[action.kind]
        where = f"stage {action.stage} " if len(self._plan.stages) > 1 else ""
        return f"{where}{what} {action.micro_batch}"

    def _cost_s(self, action: Action) -> float:
        """Return the seconds, at full speed, that a device that computes nothing sleeps: what the plan expects."""
        if self._plan.predicted is None:
            return 0.0
        forward_s, input_s, weight_s = self._plan.predicted.stages_s[action.stage]
        if self._plan.predicted.replicas_s:
            replicas = self._plan.stages[action.stage].replicas
            place = next(index for index, replica in enumerate(replicas) if self._worker in replica)
            times = self._plan.predicted.replicas_s[action.stage][place]
            forward_s, input_s, weight_s = (seconds * self._speed for seconds in times)
        if action.kind == "W" and not self._part(action._replace(kind="I")).steps:
            input_s, weight_s = 0.0, input_s + weight_s  # nobody waits for its input gradient: all of it comes with W
        full = self._plan.micro_batch or max(part.size for part in self._job.micro_batches)
        seconds = {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s}[action.kind]
        return seconds * self._job.micro_batches[action.micro_batch].size / full

    # ---- values from and to other workers

    def _receive(self, action: Action) -> None:
        """Begin to receive what an action needs of other workers and has not been asked for yet."""
        part = self._part(action)
        for port, spec in zip(part.inputs, part.given, strict=True):
            key = (port, action.micro_batch)
            if port.kind != "value" or key in self._asked:
                continue
            source = self._tables.maker(port, action.micro_batch, self._worker)
            if source == self._worker:
                continue
            self._asked.add(key)
            channel = self._tables.channel(port, action.micro_batch, self._worker)
            number = self._tables.value(port, action.micro_batch)
            receive = Receive(number, spec, self._everybody, self._plan.devices.index(source), channel)
            name = f"receive for {action} from device {source}"
            self.builder.add(receive, Label(name, "transfer"))

    def _targets(self, port: Port, micro_batch: int) -> list[int]:
        """Return the other workers that get a value from this one."""
        readers = sorted(self._tables.readers(port, micro_batch) - {self._worker})
        return [reader for reader in readers if self._tables.maker(port, micro_batch, reader) == self._worker]

    def _hand_on(self, part: Part, stage: int, micro_batch: int) -> None:
        """Send what other workers need, and free what this worker needs no more."""
        unread: list[int] = []
        for port in part.outputs:
            if port.kind != "value":
                continue
            number = self._tables.value(port, micro_batch)
            for target in self._targets(port, micro_batch):
                channel = self._tables.channel(port, micro_batch, target)
                send = Send(number, self._everybody, self._plan.devices.index(target), channel)
                self.builder.add(send, Label(f"send of stage {stage} to device {target}", "transfer"))
            if (port, micro_batch) not in self._last:
                unread.append(number)
        if unread:
            self.builder.add(Free(tuple(unread)), Label("free"))

    @property
    def _everybody(self) -> int:
        return self._numbers.groups[self._plan.devices]
